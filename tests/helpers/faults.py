"""Guards of a step, and faults in its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.context import context
from helpers.training import Case
from torch.utils.hooks import RemovableHandle

from megazpp.training.anomalies import AnomalyConfig, Guard, LossHistory
from megazpp.training.batches import BatchConfig, plan_batches
from megazpp.training.step import TrainStep


def guarded(
    step: TrainStep, case: Case, folder: Path | None, *, dynamic_scale: bool = False, islands: bool = False
) -> None:
    batches = BatchConfig(
        micro_batch_size=case.global_batch // step.dims.data_size // case.micro_batches,
        global_batch_size=case.global_batch,
        train_iters=10,
    )
    plan = plan_batches(batches, data_parallel_size=step.dims.data_size)
    run, _ = context(step.dims, folder)
    settings = {"dynamic_scale": dynamic_scale, "islands": islands}
    step.guard = Guard(AnomalyConfig(), step.sharding, run, plan, LossHistory(), **settings)


def poison_gradient(module: torch.nn.Module) -> RemovableHandle:
    """Make one element of the gradient of its weight NaN."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.view(-1)[5] = float("nan")
        return gradient

    return module.register_forward_pre_hook(lambda m, inputs: m.weight.register_hook(poison) and None)


def poison_output(module: torch.nn.Module, when: int) -> RemovableHandle:
    """Make the `when`th output NaN."""
    calls: list[int] = []

    def poison(m: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * float("nan") if len(calls) == when else output

    return module.register_forward_hook(poison)
