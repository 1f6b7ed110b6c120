"""Compute the batch size, the number of micro-batches and the samples of every step: integers, equal on all ranks.

The global batch size is constant or ramps up in equal increments, as in Megatron-LM.

A resumed run may have other batch sizes than the run that saved its checkpoint. The plan of the resumed run then starts
at the iteration and the number of samples of the checkpoint. A run of --train-samples N ends when fewer of the N
samples are left than the next step would take.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from functools import cached_property

from megazpp.base.flags import Config, flag, in_use
from megazpp.optim.schedule import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Config):
    """Batch size and length.

    Micro-batch size, global batch size and its ramp-up, in samples, and the length of the run in steps or samples.

    Attributes:
        micro_batch_size: samples per data rank and forward (default: the global batch in equal parts).
        global_batch_size: samples of an optimizer step (default: one micro-batch per data rank).
        rampup_batch_size: ramp up the global batch size: start size, increment, and length of the ramp in samples;
            needs --train-samples.
        train_iters: optimizer steps of the run; alternative: --train-samples.
        train_samples: samples of the run; alternative: --train-iters.
    """

    micro_batch_size: int | None = flag(None, common=True, must_be="positive")
    global_batch_size: int | None = flag(None, common=True, must_be="positive")
    rampup_batch_size: tuple[int, ...] | None = flag(None, nargs=3, metavar="N")
    train_iters: int | None = flag(None, common=True, must_be="positive")
    train_samples: int | None = flag(None, must_be="positive")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_iters is not None and self.train_samples is not None:
            raise ValueError(
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples}: give only one of the flags"
            )
        if self.rampup_batch_size is None:
            return
        given = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if self.train_iters is not None:
            raise ValueError(
                f"{given} needs --train-samples, not --train-iters {self.train_iters}: the ramp-up is given in samples"
            )
        if len(self.rampup_batch_size) != 3:
            raise ValueError(f"{given}: give three numbers (start size, increment, samples of the ramp-up)")
        start, increment, samples = self.rampup_batch_size
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError(f"{given}: start size and increment must be positive, and samples must not be negative")


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch size of every step of a run, and the length of the run; `plan_batches` makes it from the flags."""

    micro_batch_size: int  # samples per micro-batch and data-parallel rank
    # number of ranks, or of context-parallel groups, that have different samples, in all jobs of the run together
    data_parallel_size: int
    global_batch_size: int  # samples per step after the ramp-up
    start_batch_size: int  # samples of the first step of the ramp-up
    increment: int  # samples by which each stage of the ramp-up enlarges the global batch
    rampup_samples: int  # samples of the complete ramp-up; 0 without a ramp-up
    train_iters: int | None  # length of the run in steps; None if train_samples is given
    train_samples: int | None  # length of the run in samples; None if train_iters is given
    start_iteration: int = 0  # number of steps before this plan, which had other batch sizes
    start_samples: int = 0  # samples that the steps before this plan consumed

    def resumed_at(self, progress: TrainingProgress) -> BatchPlan:
        """Return this plan for a run that resumes from `progress`.

        If all steps before `progress` had the batch sizes of this plan, the result starts at iteration 0. Otherwise it
        starts at `progress`.
        """
        whole = dataclasses.replace(self, start_iteration=0, start_samples=0)
        if whole.consumed_samples_at(progress.iteration) == progress.consumed_samples:
            return whole
        return dataclasses.replace(self, start_iteration=progress.iteration, start_samples=progress.consumed_samples)

    def is_complete(self, progress: TrainingProgress) -> bool:
        """Return True if the run is complete at `progress`: no step is left.

        If the remaining samples of --train-samples are too few for a global batch, they are dropped, as in Megatron-LM.
        """
        if self.train_iters is not None:
            return progress.iteration >= self.train_iters
        assert self.train_samples is not None
        consumed = progress.consumed_samples
        return consumed + self.batch_size_at(consumed) > self.train_samples

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch size of the step that starts after `consumed_samples` samples.

        The calculation uses integers, so an increment takes effect exactly at its sample. Megatron-LM divides floats
        and is sometimes one step late.
        """
        if consumed_samples >= self.rampup_samples:
            return self.global_batch_size
        num_increments = (self.global_batch_size - self.start_batch_size) // self.increment
        return self.start_batch_size + consumed_samples * num_increments // self.rampup_samples * self.increment

    def num_micro_batches_at(self, consumed_samples: int) -> int:
        """Return the number of micro-batches per rank of the step that starts after `consumed_samples` samples."""
        return self.batch_size_at(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)

    def consumed_samples_at(self, iteration: int) -> int:
        """Return the number of samples that the first `iteration` steps of the run consume.

        For iterations before the plan's start, the result is extrapolated backwards with the full global batch size.
        """
        ramp, step = self._ramp_starts, iteration - self.start_iteration
        if 0 <= step < len(ramp):
            return ramp[step]
        first, start = (0, ramp[0]) if step < 0 else (len(ramp) - 1, ramp[-1])
        return start + (step - first) * self.global_batch_size

    def iteration_at(self, consumed_samples: int) -> int:
        """Return the number of steps that are complete when the run has consumed `consumed_samples` samples."""
        ramp, start = self._ramp_starts, self.start_iteration
        if ramp[0] <= consumed_samples < ramp[-1]:
            return start + bisect.bisect_right(ramp, consumed_samples) - 1
        first, samples = (0, ramp[0]) if consumed_samples < ramp[0] else (len(ramp) - 1, ramp[-1])
        return start + first + (consumed_samples - samples) // self.global_batch_size

    @property
    def total_iterations(self) -> int:
        """The number of steps of the complete run, from its first start to its end.

        With --train-samples the number is an estimate, because a resumed run may change the batch size.
        """
        if self.train_iters is not None:
            return self.train_iters
        assert self.train_samples is not None
        return max(self.start_iteration, self.iteration_at(self.train_samples))

    @property
    def total_samples(self) -> int:
        """The number of samples that the complete run consumes, from its first start to its end."""
        return self.consumed_samples_at(self.total_iterations)

    @property
    def dataset_samples(self) -> int:
        """The number of samples that the training dataset must provide, for the steps before and after a resume."""
        return max(self.start_samples, self.total_samples) if self.train_samples is None else self.train_samples

    @cached_property
    def _ramp_starts(self) -> list[int]:
        """The numbers of consumed samples at which the ramp-up's steps and the first step after them start."""
        starts = [self.start_samples]
        while starts[-1] < self.rampup_samples:
            starts.append(starts[-1] + self.batch_size_at(starts[-1]))
        return starts


def plan_batches(config: BatchConfig, *, data_parallel_size: int) -> BatchPlan:
    """Make the batch plan from the flags. If one of the two batch sizes is not given, derive it from the other.

    Args:
        config: flags with the batch sizes and the length of the run.
        data_parallel_size: number of ranks, or of context-parallel groups, that have different samples, in all jobs of
            the run together.
    Raises:
        ValueError: a required batch size or the length of the run is missing; a batch size is not divisible by the
            micro-batch size times `data_parallel_size`; or the ramp-up's increments do not reach the global batch size.
    """
    # ---- compute the micro-batch size and the global batch size from the flags, and check them
    size, total = config.micro_batch_size, config.global_batch_size
    if size is None and (total is None or config.rampup_batch_size is not None):
        raise ValueError("--micro-batch-size is required, unless --global-batch-size is given without a ramp-up")
    if config.train_iters is None and config.train_samples is None:
        raise ValueError("the length of the run is missing: give either --train-iters or --train-samples")
    if size is None:
        assert total is not None
        size = max(total // data_parallel_size, 1)
    rank_samples = size * data_parallel_size
    global_batch_size = rank_samples if total is None else total
    given = "" if config.micro_batch_size is None else f"--micro-batch-size {size} x "
    divisor = f"{given}data-parallel size {data_parallel_size}"
    if global_batch_size % rank_samples:
        raise ValueError(f"--global-batch-size {global_batch_size} is not divisible by {divisor}: change one of them")
    # ---- check the ramp-up of the global batch size, and make the plan
    start, increment, samples = config.rampup_batch_size or (global_batch_size, global_batch_size, 0)
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if start > global_batch_size or (global_batch_size - start) % increment:
        whole = in_use(config, "global_batch_size", global_batch_size)
        raise ValueError(
            f"{given}: {whole} is not {start} plus a multiple of {increment}, so increments of the start size do not "
            "reach it: change one of the three sizes"
        )
    if start % rank_samples or (start < global_batch_size and increment % rank_samples):
        raise ValueError(f"{given}: start size and increment must both be divisible by {divisor}: change them")
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
