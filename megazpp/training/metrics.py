"""The record of a step and of a log interval, how steps add up to a run, and the lines that say so.

One file of more than 300 lines: a step's number is added up, summed and worded next to its field.

The log line is Megatron's, byte for byte, with our fields after its last one, so that existing parsers keep
working. One departure: the loss is always printed. Megatron leaves it out when every step of the interval was
skipped; here it is then the mean over the skipped steps, NaN too.
"""

from __future__ import annotations

import datetime
import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megazpp.base.program import GIGA, MEGA, TERA

MEBI = 1024 * 1024
INNER_LOSS = "inner_loss"  # where islands synchronize: the mean over islands and over the steps since they last did


class SentBytes(NamedTuple):
    """Bytes sent over each wire; `island` is what of `cross` went between islands that take local steps."""

    tp: int = 0
    cross: int = 0
    local: int = 0
    island: int = 0

    def plus(self, other: SentBytes) -> SentBytes:
        return SentBytes(*map(sum, zip(self, other, strict=True)))


NOTHING_SENT = SentBytes()


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, equal on all ranks but for its times: what the step itself knows, then what the loop adds.

    Attributes:
        iteration: counted from 1.
        loss: mean over the tokens of the global batch, in nats; NaN and Inf included.
        grad_norm: before clipping, of the unscaled gradients.
        skipped: the norm was not finite or the guard refused, so nothing was updated.
        num_zeros, params_norm: None unless asked for.
        consumed_samples: including this step's.
        global_batch_size: samples of this step over all ranks.
        tokens: that the model was given over all ranks, padding included: this rank's times the data ranks; None: whole
            samples.
        micro_batches: of one rank.
        seconds: wall time of the step, waiting for data included.
        wait_seconds: of that, waiting for data.
        cpu_seconds: CPU time of this process in the step.
        metrics: what the objective says beside the loss.
    """

    iteration: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    loss_scale: float = 1.0
    skipped: bool = False
    num_zeros: float | None = None
    params_norm: float | None = None
    consumed_samples: int = 0
    global_batch_size: int = 0
    tokens: int | None = None
    micro_batches: int = 1
    seconds: float = 0.0
    wait_seconds: float = 0.0
    cpu_seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The constants that turn samples and seconds into the numbers that are logged.

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

    def tokens_of(self, step: StepRecord) -> int:
        """Tokens that the model was given in a step, over all ranks."""
        return step.global_batch_size * self.seq_length if step.tokens is None else step.tokens


@dataclass(frozen=True, kw_only=True)
class IntervalRecord:
    """The steps since the last log line, summed up.

    Attributes:
        shape: of the run.
        last: the last step, to which belongs what is no mean.
        steps: how many there were, at least one.
        lm_loss: mean over the steps that were taken; over the skipped ones if none was.
        metrics: the objective's, each the mean over the steps that have it.
        synchronizations: steps after which islands met.
        skipped, nan: steps that were not taken; whose loss was not finite.
        max_grad_norm: the largest norm of a step's gradients; None where none was measured.
        step_seconds: mean wall time of a step.
        tokens_per_second: over all ranks.
        eta_seconds: time left at this interval's samples per second.
        flops_per_rank: model FLOP/s of one rank.
        sent_bytes: per node, mean per step.
        peak_memory_bytes: None where it is not measured.
    """

    shape: RunShape
    last: StepRecord
    steps: int
    lm_loss: float
    metrics: Mapping[str, float]
    synchronizations: int
    skipped: int
    nan: int
    max_grad_norm: float | None
    step_seconds: float
    tokens_per_second: float
    eta_seconds: float
    flops_per_rank: float
    sent_bytes: SentBytes
    peak_memory_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        """The object of this interval in metrics.jsonl; a loss or norm may be NaN or Infinity."""
        return {
            "iteration": self.last.iteration,
            "lm_loss": self.lm_loss,
            "grad_norm": self.last.grad_norm,
            "max_grad_norm": self.max_grad_norm,
            "learning_rate": self.last.learning_rate,
            "consumed_samples": self.last.consumed_samples,
            "consumed_tokens": self.last.consumed_samples * self.shape.seq_length,
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "skipped": self.skipped,
            "tp_bytes": self.sent_bytes.tp,
            "cross_bytes": self.sent_bytes.cross,
            "local_bytes": self.sent_bytes.local,
            **({"island_bytes": self.sent_bytes.island} if self.sent_bytes.island else {}),
            **({"synchronizations": self.synchronizations} if self.synchronizations else {}),
            "peak_memory_bytes": self.peak_memory_bytes,
            **self.metrics,
        }

    def line(self) -> str:
        """Megatron's line, then tokens/s and TFLOP/s per rank, MFU, memory, MB per step and wire, time left."""
        last, shape = self.last, self.shape
        fields = [
            f"iteration {last.iteration:8d}/{shape.total_iterations:8d}",
            f"consumed samples: {last.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.step_seconds * 1000.0:.1f}",
            f"learning rate: {last.learning_rate:.3E}",
            f"global batch size: {last.global_batch_size:5d}",
            f"lm loss: {self.lm_loss:.6E}",
            *(f"{name}: {value:.4g}" for name, value in self.metrics.items()),
            f"synchronizations: {self.synchronizations}" if self.synchronizations else None,
            f"loss scale: {last.loss_scale:.1f}",
            None if last.grad_norm is None else f"grad norm: {last.grad_norm:.3f}",
            None if last.num_zeros is None else f"num zeros: {last.num_zeros:.1f}",
            None if last.params_norm is None else f"params norm: {last.params_norm:.3f}",
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.nan:3d}",
            None if self.max_grad_norm is None else f"max grad norm: {self.max_grad_norm:.3f}",
            f"tokens/s per rank: {self.tokens_per_second / shape.world_size:.1f}",
            f"model TFLOP/s per rank: {self.flops_per_rank / TERA:#.4g}",
            None if shape.peak_flops is None else f"MFU: {self.flops_per_rank / shape.peak_flops:.1%}",
            None if self.peak_memory_bytes is None else f"max memory (GB): {self.peak_memory_bytes / GIGA:.2f}",
            *(f"{wire} MB per step: {sent / MEGA:.3f}" for wire, sent in self.sent_bytes._asdict().items() if sent),
            f"eta: {datetime.timedelta(seconds=round(self.eta_seconds))}",
        ]
        return "".join(f" {field} |" for field in fields if field is not None)

    def short_line(self) -> str:
        """The same for a terminal, in at most 100 columns."""
        last, left = self.last, datetime.timedelta(seconds=round(self.eta_seconds))
        norm = "" if last.grad_norm is None else f"grad norm {last.grad_norm:6.3f}  "
        skipped = f"  {self.skipped} skipped" if self.skipped else ""
        return (
            f"iteration {last.iteration:6d}/{self.shape.total_iterations}  loss {self.lm_loss:7.4f}  {norm}"
            f"{self.tokens_per_second:9,.0f} tokens/s  {left} left{skipped}"
        )


class Meter:
    """Adds up the steps of the run; `interval()` sums up those since it was last called.

    Attributes:
        seconds, cpu_seconds, micro_batches: of all steps; the last two of this process.
    """

    def __init__(self, shape: RunShape) -> None:
        self.shape = shape
        self.seconds, self.cpu_seconds, self.micro_batches = 0.0, 0.0, 0
        self._count, self._skipped, self._tokens, self._wait_seconds = 0, 0, 0, 0.0
        self._sent_bytes = NOTHING_SENT
        self._steps: list[StepRecord] = []
        self._first: StepRecord | None = None
        self._inner_losses: list[float] = []

    def add(self, step: StepRecord) -> None:
        """Count one step."""
        self._steps.append(step)
        self._first = self._first or step
        self._count += 1
        self._skipped += step.skipped
        self._inner_losses += [step.metrics[INNER_LOSS]] if INNER_LOSS in step.metrics else []
        self._tokens += self.shape.tokens_of(step)
        self.seconds += step.seconds
        self._wait_seconds += step.wait_seconds
        self.cpu_seconds += step.cpu_seconds
        self.micro_batches += step.micro_batches

    def interval(self, sent_bytes: SentBytes = NOTHING_SENT, *, peak_memory_bytes: int | None = None) -> IntervalRecord:
        """The steps since the last call, of which there must be one, and what they have sent together."""
        steps, self._steps = self._steps, []
        assert steps, "an interval needs a step"
        self._sent_bytes = self._sent_bytes.plus(sent_bytes)
        shape, last, seconds = self.shape, steps[-1], sum(step.seconds for step in steps)
        losses = [step.loss for step in steps if not step.skipped] or [step.loss for step in steps]
        by_name: dict[str, list[float]] = {}
        for step in steps:
            for name, value in step.metrics.items():
                by_name.setdefault(name, []).append(value)
        tokens_per_second = sum(shape.tokens_of(step) for step in steps) / seconds
        left = max(0, shape.total_samples - last.consumed_samples)
        return IntervalRecord(
            shape=shape,
            last=last,
            steps=len(steps),
            lm_loss=sum(losses) / len(losses),
            metrics={name: sum(values) / len(values) for name, values in by_name.items()},
            synchronizations=len(by_name.get(INNER_LOSS, ())),
            skipped=sum(step.skipped for step in steps),
            nan=sum(not math.isfinite(step.loss) for step in steps),
            max_grad_norm=max((step.grad_norm for step in steps if step.grad_norm is not None), default=None),
            step_seconds=seconds / len(steps),
            tokens_per_second=tokens_per_second,
            eta_seconds=left * seconds / sum(step.global_batch_size for step in steps),
            flops_per_rank=tokens_per_second * shape.flops_per_token / shape.world_size,
            sent_bytes=SentBytes(*(total // len(steps) for total in sent_bytes)),
            peak_memory_bytes=peak_memory_bytes,
        )

    def summary(self, *, cpu_seconds: float) -> dict[str, Any]:
        """Sum up the training steps for summary.json.

        Tokens per second are those of the steps after the first, in which kernels and layers are compiled.

        Args:
            cpu_seconds: CPU time of the steps, summed over all ranks.
        """
        tokens, seconds = self._tokens, self.seconds
        timed_tokens, timed_seconds = tokens, seconds
        if self._first is not None and self._count > 1:
            timed_tokens -= self.shape.tokens_of(self._first)
            timed_seconds -= self._first.seconds
        sent_bytes = self._sent_bytes._asdict()
        islands: dict[str, Any] = {}
        if self._inner_losses:
            islands = {"synchronizations": len(self._inner_losses), INNER_LOSS: self._inner_losses[-1]}
        return {
            "iterations": self._count,
            "skipped": self._skipped,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": timed_tokens / timed_seconds if timed_seconds else 0.0,
            "cpu_seconds_per_token": cpu_seconds / tokens if tokens else 0.0,
            "data_wait_share": self._wait_seconds / seconds if seconds else 0.0,
            **{
                f"{wire}_bytes_per_step": sent // max(1, self._count)
                for wire, sent in sent_bytes.items()
                if sent or wire != "island"
            },
            **islands,
        }


def validation_lines(where: str, loss: float, *, metric: str = "lm_loss") -> list[str]:
    """Megatron's three lines: dashes, the loss and its perplexity, dashes. `where` is e.g. "iteration 100".

    Args:
        metric: another name, if it is no loss.
    """
    if metric != "lm_loss":
        line = f" validation at {where} | {metric}: {loss:.6E} | "
        rule = "-" * (len(line) + 1)
        return [rule, line, rule]
    line = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 20 as Megatron does; NaN stays NaN."""
    return math.exp(loss if math.isnan(loss) else min(20.0, loss))


def closing_lines(summary: Mapping[str, Any], *, trained: bool) -> str:
    """Say what the run came to, for a reader; `trained` where it has taken steps."""
    lines = []
    if summary["stop_reason"]:
        lines.append(f"stopped by {summary['stop_reason']}")
    if trained:
        lines.append(
            f"trained {summary['iterations']} iterations in {summary['seconds']:.1f} s: "
            f"{summary['tokens_per_second']:.0f} tokens/s, {summary['cpu_seconds_per_token'] * 1e6:.1f} CPU "
            f"microseconds per token, {summary['data_wait_share']:.1%} of the time waiting for data"
        )
        if "synchronizations" in summary:
            lines.append(
                f"islands synchronized {summary['synchronizations']} times, "
                f"{summary.get('island_bytes_per_step', 0) / MEGA:.3f} MB per node and step between them; inner loss "
                f"{summary[INNER_LOSS]:.4f}"
            )
        lines.append(f"training loss of the last log interval: {summary['final_loss']:.4f} nats per token")
    if summary["validation_loss"] is not None:
        entropy = summary["unigram_entropy"]
        of_text = "" if entropy is None else f"; unigram entropy of the validation text: {entropy:.4f} nats per token"
        lines.append(f"validation loss: {summary['validation_loss']:.4f}{of_text}")
    return "\n".join(lines)


def memory_line(rank: int, iteration: int, device: torch.device) -> str | None:
    """Megatron's memory line, printed once after the first log interval; None without a CUDA device."""
    if device.type != "cuda":
        return None
    sizes = {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }
    line = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    return line + "".join(f" | {name}: {size / MEBI:.2f}" for name, size in sizes.items())


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on a CUDA device; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads, user and system."""
    return time.process_time()
