"""Build step records and meters for tests of the logged metrics."""

from typing import Any

from megazpp.training.metrics import Meter, StepRecord


def step(iteration: int = 1, **values: Any) -> StepRecord:
    """Return the record of a training step with 8 samples that took half a second; `values` replaces its fields."""
    usual = {"consumed_samples": 8 * iteration, "global_batch_size": 8, "loss": 10.0, "grad_norm": 1.0, "seconds": 0.5}
    return StepRecord(iteration=iteration, **(usual | {"learning_rate": 1.5e-4} | values))


def meter(*steps: StepRecord, **shape: Any) -> Meter:
    """Return a meter of a run on four ranks that has counted `steps`; `shape` replaces the meter's arguments."""
    usual = {"total_iterations": 500, "total_samples": 4000, "seq_length": 100, "world_size": 4}
    filled = Meter(**(usual | {"flops_per_token": 2 * 10**9} | shape))
    for one in steps:
        filled.add(one)
    return filled
