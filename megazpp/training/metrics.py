"""The record of a step and of a log interval, how steps add up to a run's summary, and what a process has used."""

from __future__ import annotations

import functools
import math
import operator
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

TERA = 1e12


class SentBytes(NamedTuple):
    """Bytes sent over each wire."""

    tp: int = 0
    cross: int = 0
    local: int = 0


NOTHING_SENT = SentBytes()


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, equal on all ranks but for its times: what the step itself knows, then what the loop adds.

    Attributes:
        iteration: counted from 1.
        loss: mean over the tokens of the global batch, in nats; NaN and Inf included.
        grad_norm: before clipping, of the unscaled gradients.
        tokens: tokens of the global batch that count in the loss.
        skipped: the norm was not finite or the guard refused, so nothing was updated.
        num_zeros, params_norm: None unless asked for.
        consumed_samples: including this step's.
        global_batch_size: samples of this step over all ranks.
        micro_batches: of one rank.
        seconds: wall time of the step, waiting for data included.
        wait_seconds: of that, waiting for data.
        cpu_seconds: CPU time of this process in the step.
        sent_bytes: put on each wire since the last record that says so; may be counted once per interval only.
    """

    iteration: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    loss_scale: float = 1.0
    tokens: int = 0
    skipped: bool = False
    num_zeros: float | None = None
    params_norm: float | None = None
    consumed_samples: int = 0
    global_batch_size: int = 0
    micro_batches: int = 1
    seconds: float = 0.0
    wait_seconds: float = 0.0
    cpu_seconds: float = 0.0
    sent_bytes: SentBytes = NOTHING_SENT


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


class Meter:
    """Adds up the steps of the run; `interval()` sums up those since it was last called.

    Attributes:
        seconds, cpu_seconds, micro_batches: of all steps; the last two of this process.
    """

    def __init__(self, shape: RunShape) -> None:
        self.shape = shape
        self.seconds, self.cpu_seconds, self.micro_batches = 0.0, 0.0, 0
        self._count, self._skipped, self._samples, self._wait_seconds = 0, 0, 0, 0.0
        self._sent_bytes = NOTHING_SENT
        self._steps: list[StepRecord] = []

    def add(self, step: StepRecord) -> None:
        """Count one step."""
        self._steps.append(step)
        self._count += 1
        self._skipped += step.skipped
        self._samples += step.global_batch_size
        self.seconds += step.seconds
        self._wait_seconds += step.wait_seconds
        self.cpu_seconds += step.cpu_seconds
        self.micro_batches += step.micro_batches
        self._sent_bytes = _plus(self._sent_bytes, step.sent_bytes)

    def interval(self, *, peak_memory_bytes: int | None = None) -> IntervalRecord:
        """The steps since the last call; there must be at least one."""
        steps, self._steps = self._steps, []
        assert steps, "an interval needs a step"
        shape, last, count = self.shape, steps[-1], len(steps)
        seconds, samples = sum(step.seconds for step in steps), sum(step.global_batch_size for step in steps)
        sent_bytes = functools.reduce(_plus, (step.sent_bytes for step in steps))
        tokens_per_second = samples * shape.seq_length / seconds
        flops_per_rank = tokens_per_second * shape.flops_per_token / shape.world_size
        return IntervalRecord(
            last=last,
            steps=count,
            total_iterations=shape.total_iterations,
            consumed_tokens=last.consumed_samples * shape.seq_length,
            lm_loss=_mean_loss(steps),
            step_seconds=seconds / count,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_rank=tokens_per_second / shape.world_size,
            tflops_per_rank=flops_per_rank / TERA,
            mfu=None if shape.peak_flops is None else flops_per_rank / shape.peak_flops,
            sent_bytes=SentBytes(*(total // count for total in sent_bytes)),
            eta_seconds=max(0, shape.total_samples - last.consumed_samples) * seconds / samples,
            skipped=sum(step.skipped for step in steps),
            nan=sum(not math.isfinite(step.loss) for step in steps),
            peak_memory_bytes=peak_memory_bytes,
        )

    def summary(self, *, cpu_seconds: float) -> dict[str, Any]:
        """What summary.json says about the training steps.

        Args:
            cpu_seconds: CPU time of the steps, summed over all ranks.
        """
        tokens, seconds = self._samples * self.shape.seq_length, self.seconds
        sent_bytes = self._sent_bytes._asdict()
        return {
            "iterations": self._count,
            "skipped": self._skipped,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "cpu_seconds_per_token": cpu_seconds / tokens if tokens else 0.0,
            "data_wait_share": self._wait_seconds / seconds if seconds else 0.0,
            **{f"{wire}_bytes_per_step": sent // max(1, self._count) for wire, sent in sent_bytes.items()},
        }


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on a CUDA device; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads, user and system."""
    return time.process_time()


def _plus(a: SentBytes, b: SentBytes) -> SentBytes:
    return SentBytes(*map(operator.add, a, b))


def _mean_loss(steps: list[StepRecord]) -> float:
    losses = [step.loss for step in steps if not step.skipped] or [step.loss for step in steps]
    return sum(losses) / len(losses)
