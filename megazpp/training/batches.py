"""The samples of each step: pure integers, the same on every rank.

The global batch size is constant or ramps up in equal increments, as Megatron's does; everything else follows from it.
A resumed run may have other batch sizes than the steps before it. Its plan therefore starts at the progress that it
resumes from, and a run of --train-samples ends when these samples are consumed, in however many steps.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from functools import cached_property

from megazpp.base.flags import check_positive, flag
from megazpp.checkpoint.metadata import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch size and length.

    Batch sizes in samples, and the length of the run.
    """

    micro_batch_size: int | None = flag(
        None,
        "samples of a forward and backward per data-parallel rank",
        common=True,
    )
    global_batch_size: int | None = flag(
        None,
        "samples of an optimizer step, over all ranks",
        common=True,
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "ramp the global batch size up: start size, increment, samples over which; needs --train-samples",
        nargs=3,
        metavar="N",
    )
    train_iters: int | None = flag(None, "optimizer steps of the run (or --train-samples)", common=True)
    train_samples: int | None = flag(None, "samples of the run; or give --train-iters")

    def __post_init__(self) -> None:
        check_positive(self, "micro_batch_size", "global_batch_size", "train_iters", "train_samples")
        if self.train_iters is not None and self.train_samples is not None:
            raise ValueError(
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples}: give only one"
            )
        if self.rampup_batch_size is None:
            return
        given = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if self.train_iters is not None:
            raise ValueError(f"{given} needs --train-samples, not --train-iters {self.train_iters}")
        if len(self.rampup_batch_size) != 3:
            raise ValueError(f"{given}: three numbers are needed, start size, increment and samples")
        start, increment, samples = self.rampup_batch_size
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError(f"{given}: start size and increment must be positive, samples not negative")


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Batch sizes over a run; made from flags by `plan_batches`."""

    micro_batch_size: int  # samples per micro-batch and data-parallel rank
    data_parallel_size: int  # ranks that hold different samples
    global_batch_size: int  # samples per step once any ramp-up is over
    start_batch_size: int
    increment: int
    rampup_samples: int  # 0: no ramp-up
    train_iters: int | None  # or
    train_samples: int | None
    start_iteration: int = 0  # steps that were done with other batch sizes
    start_samples: int = 0  # samples that these steps consumed

    def resumed_at(self, progress: TrainingProgress) -> BatchPlan:
        """Return the plan of a run that resumes from `progress`; the same plan if batch sizes never changed."""
        whole = dataclasses.replace(self, start_iteration=0, start_samples=0)
        if whole.consumed_samples_at(progress.iteration) == progress.consumed_samples:
            return whole
        return dataclasses.replace(self, start_iteration=progress.iteration, start_samples=progress.consumed_samples)

    def is_complete(self, progress: TrainingProgress) -> bool:
        """Return whether the run ends here; a partial last batch of --train-samples is dropped, as in Megatron."""
        if self.train_iters is not None:
            return progress.iteration >= self.train_iters
        assert self.train_samples is not None
        consumed = progress.consumed_samples
        return consumed + self.batch_size_at(consumed) > self.train_samples

    def batch_size_at(self, consumed_samples: int) -> int:
        """Global batch size of the step that starts after `consumed_samples`.

        In integers, so an increment starts exactly where it should (Megatron divides floats and is sometimes
        one step late).
        """
        if consumed_samples >= self.rampup_samples:
            return self.global_batch_size
        num_increments = (self.global_batch_size - self.start_batch_size) // self.increment
        return self.start_batch_size + consumed_samples * num_increments // self.rampup_samples * self.increment

    def num_micro_batches_at(self, consumed_samples: int) -> int:
        """Micro-batches that each rank runs in the step that starts after `consumed_samples`."""
        return self.batch_size_at(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)

    def consumed_samples_at(self, iteration: int) -> int:
        """Samples consumed when `iteration` steps are done; before the plan's start, at today's batch size."""
        ramp, step = self._ramp_starts, iteration - self.start_iteration
        if 0 <= step < len(ramp):
            return ramp[step]
        first, start = (0, ramp[0]) if step < 0 else (len(ramp) - 1, ramp[-1])
        return start + (step - first) * self.global_batch_size

    def iteration_at(self, consumed_samples: int) -> int:
        """Whole steps done when `consumed_samples` samples are consumed."""
        ramp, start = self._ramp_starts, self.start_iteration
        if ramp[0] <= consumed_samples < ramp[-1]:
            return start + bisect.bisect_right(ramp, consumed_samples) - 1
        first, samples = (0, ramp[0]) if consumed_samples < ramp[0] else (len(ramp) - 1, ramp[-1])
        return start + first + (consumed_samples - samples) // self.global_batch_size

    @property
    def total_iterations(self) -> int:
        """Steps of the whole run. For --train-samples an estimate: the batch size may change when it resumes."""
        if self.train_iters is not None:
            return self.train_iters
        assert self.train_samples is not None
        return max(self.start_iteration, self.iteration_at(self.train_samples))

    @property
    def total_samples(self) -> int:
        """Samples consumed when the run is over."""
        return self.consumed_samples_at(self.total_iterations)

    @property
    def dataset_samples(self) -> int:
        """Samples that the training data must have: those already consumed and those that may still be consumed."""
        return max(self.start_samples, self.total_samples) if self.train_samples is None else self.train_samples

    @cached_property
    def _ramp_starts(self) -> list[int]:
        """Samples consumed before the plan's first step, its second, ... up to its first step of full size."""
        starts = [self.start_samples]
        while starts[-1] < self.rampup_samples:
            starts.append(starts[-1] + self.batch_size_at(starts[-1]))
        return starts


def plan_batches(config: BatchConfig, *, data_parallel_size: int) -> BatchPlan:
    """Fill in the batch size that is not given; raises ValueError if sizes or length are missing, or do not divide."""
    size, total = config.micro_batch_size, config.global_batch_size
    if size is None and (total is None or config.rampup_batch_size is not None):
        raise ValueError("--micro-batch-size is required")
    if config.train_iters is None and config.train_samples is None:
        raise ValueError("either --train-iters or --train-samples is required")
    if size is None:
        assert total is not None
        size = max(total // data_parallel_size, 1)
    rank_samples = size * data_parallel_size
    global_batch_size = rank_samples if total is None else total
    divisor = f"--micro-batch-size {size} x data-parallel size {data_parallel_size}"
    if global_batch_size % rank_samples:
        raise ValueError(f"--global-batch-size {global_batch_size} is not divisible by {divisor}")
    start, increment, samples = config.rampup_batch_size or (global_batch_size, global_batch_size, 0)
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if start > global_batch_size or (global_batch_size - start) % increment:
        raise ValueError(
            f"{given}: --global-batch-size {global_batch_size} is not {start} plus a multiple of {increment}"
        )
    if start % rank_samples or (start < global_batch_size and increment % rank_samples):
        raise ValueError(f"{given}: start size and increment are not divisible by {divisor}")
    return BatchPlan(
        micro_batch_size=size,
        data_parallel_size=data_parallel_size,
        global_batch_size=global_batch_size,
        start_batch_size=start,
        increment=increment,
        rampup_samples=samples if start < global_batch_size else 0,
        train_iters=config.train_iters,
        train_samples=config.train_samples,
    )
