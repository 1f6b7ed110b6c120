"""What a step reports, what a log interval and a run make of it, and the fields that are written."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megazpp.formatting import TERA


class SentBytes(NamedTuple):
    """Bytes sent over each wire."""

    tp: int = 0
    cross: int = 0
    local: int = 0


NOTHING_SENT = SentBytes()


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        iteration: counted from 1.
        consumed_samples: including this step's.
        global_batch_size: samples of this step over all ranks.
        seconds: wall time of the step, waiting for data included.
        wait_seconds: of that, waiting for data.
        cpu_seconds: CPU time of this process in the step.
        micro_batches: of one rank.
        skipped: the gradients were not finite and the step was not taken.
        sent_bytes: put on each wire since the last record that says so; may be counted once per interval only.
        num_zeros, params_norm: None unless asked for.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    lm_loss: float
    grad_norm: float | None
    learning_rate: float
    seconds: float
    wait_seconds: float = 0.0
    cpu_seconds: float = 0.0
    micro_batches: int = 1
    loss_scale: float = 1.0
    skipped: bool = False
    sent_bytes: SentBytes = NOTHING_SENT
    num_zeros: float | None = None
    params_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What turns samples and seconds into the numbers that are logged.

    Attributes:
        total_iterations, total_samples: length of the run.
        seq_length: tokens of a sample.
        world_size: ranks, for the figures per rank.
        flops_per_token: model FLOPs, see `model_flops_per_token`.
        peak_flops: FLOP/s of one rank's device; None where unknown, then there is no MFU.
    """

    total_iterations: int
    total_samples: int
    seq_length: int
    world_size: int
    flops_per_token: int
    peak_flops: float | None = None


@dataclass(frozen=True, kw_only=True)
class IntervalRecord:
    """The steps since the last log line: means, except for what belongs to the last step.

    Attributes:
        last: the last step of the interval.
        steps: how many there are.
        lm_loss: mean over the steps that were taken; over the skipped ones if none was.
        step_seconds: mean wall time of a step.
        tokens_per_second: over all ranks.
        tflops_per_rank: model TFLOP/s of one rank.
        mfu: fraction of the device's peak, or None.
        sent_bytes: mean per step.
        eta_seconds: time left at this interval's samples per second.
        skipped, nan: steps not taken; steps whose loss was not finite.
        peak_memory_bytes: or None where it is not measured.
    """

    last: StepRecord
    steps: int
    total_iterations: int
    consumed_tokens: int
    lm_loss: float
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    tflops_per_rank: float
    mfu: float | None
    sent_bytes: SentBytes
    eta_seconds: float
    skipped: int
    nan: int
    peak_memory_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        """The object of this interval in metrics.jsonl; a loss or norm may be NaN or Infinity."""
        return {
            "iteration": self.last.iteration,
            "lm_loss": self.lm_loss,
            "grad_norm": self.last.grad_norm,
            "learning_rate": self.last.learning_rate,
            "consumed_samples": self.last.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "skipped": self.skipped,
            "tp_bytes": self.sent_bytes.tp,
            "cross_bytes": self.sent_bytes.cross,
            "local_bytes": self.sent_bytes.local,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over steps."""

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    cpu_seconds: float = 0.0
    micro_batches: int = 0
    sent_bytes: SentBytes = NOTHING_SENT

    def plus(self, step: StepRecord) -> StepSums:
        """With one more step."""
        return StepSums(
            steps=self.steps + 1,
            skipped=self.skipped + step.skipped,
            samples=self.samples + step.global_batch_size,
            seconds=self.seconds + step.seconds,
            wait_seconds=self.wait_seconds + step.wait_seconds,
            cpu_seconds=self.cpu_seconds + step.cpu_seconds,
            micro_batches=self.micro_batches + step.micro_batches,
            sent_bytes=SentBytes(*map(operator.add, self.sent_bytes, step.sent_bytes)),
        )


class Meter:
    """Collects steps; `interval()` sums up those since it was last called, `totals` all of them."""

    def __init__(self, shape: RunShape) -> None:
        self.totals = StepSums()
        self.shape = shape
        self._steps: list[StepRecord] = []

    def add(self, step: StepRecord) -> None:
        """Count one step."""
        self._steps.append(step)
        self.totals = self.totals.plus(step)

    def interval(self, *, peak_memory_bytes: int | None = None) -> IntervalRecord:
        """The steps since the last call; there must be at least one."""
        steps, self._steps = self._steps, []
        assert steps, "an interval needs a step"
        shape, last, sums = self.shape, steps[-1], functools.reduce(StepSums.plus, steps, StepSums())
        tokens_per_second = sums.samples * shape.seq_length / sums.seconds
        flops_per_rank = tokens_per_second * shape.flops_per_token / shape.world_size
        return IntervalRecord(
            last=last,
            steps=sums.steps,
            total_iterations=shape.total_iterations,
            consumed_tokens=last.consumed_samples * shape.seq_length,
            lm_loss=_mean_loss(steps),
            step_seconds=sums.seconds / sums.steps,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_rank=tokens_per_second / shape.world_size,
            tflops_per_rank=flops_per_rank / TERA,
            mfu=None if shape.peak_flops is None else flops_per_rank / shape.peak_flops,
            sent_bytes=SentBytes(*(total // sums.steps for total in sums.sent_bytes)),
            eta_seconds=max(0, shape.total_samples - last.consumed_samples) * sums.seconds / sums.samples,
            skipped=sums.skipped,
            nan=sum(not math.isfinite(step.lm_loss) for step in steps),
            peak_memory_bytes=peak_memory_bytes,
        )

    def summary(self, *, cpu_seconds: float) -> dict[str, Any]:
        """What summary.json says about the training steps.

        Args:
            wait_seconds: of that, waiting for data.
        cpu_seconds: CPU time of the steps, summed over all ranks.
        """
        totals = self.totals
        tokens = totals.samples * self.shape.seq_length
        steps = max(1, totals.steps)
        return {
            "iterations": totals.steps,
            "skipped": totals.skipped,
            "tokens": tokens,
            "seconds": totals.seconds,
            "tokens_per_second": tokens / totals.seconds if totals.seconds else 0.0,
            "cpu_seconds_per_token": cpu_seconds / tokens if tokens else 0.0,
            "data_wait_share": totals.wait_seconds / totals.seconds if totals.seconds else 0.0,
            **{f"{wire}_bytes_per_step": sent // steps for wire, sent in totals.sent_bytes._asdict().items()},
        }


def _mean_loss(steps: list[StepRecord]) -> float:
    losses = [step.lm_loss for step in steps if not step.skipped] or [step.lm_loss for step in steps]
    return sum(losses) / len(losses)
