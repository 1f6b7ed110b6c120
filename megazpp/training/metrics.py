"""The numbers of a step, of a log interval and of a run, and the lines that print them.

The log line begins with Megatron-LM's fields, byte for byte, so that existing parsers work. MegaZ++'s fields follow. In
one case the line differs: if every step of the interval was skipped, Megatron-LM omits the loss. Here the line then
shows the mean over the skipped steps, which may be NaN.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megazpp.base.program import GIGA, MEGA, TERA
from megazpp.topology.layout import WIRE_NAMES

# Metric of DiLoCo: the mean loss over all replica groups and over the steps since the last synchronization
INNER_LOSS = "inner_loss"
# Sent bytes by wire, for an interval in which nothing was sent. "replica_group" counts the bytes between DiLoCo's
# replica groups, which "cross" counts too.
NOTHING_SENT = {"tp": 0, "cross": 0, "local": 0, "replica_group": 0}

# Fields of metrics.jsonl that are null if their value is unknown. All other fields are left out if theirs is unknown.
ALWAYS = ("grad_norm", "max_grad_norm", "peak_memory_bytes")


@dataclass(kw_only=True)
class StepRecord:
    """The numbers of one optimizer step.

    `TrainStep` fills in the fields up to `num_zeros` and `metrics`. `MetricsRecorder` computes `params_norm`, and adds
    the numbers of routers to `metrics`, in steps with a log line. The training loop fills in the other fields. All
    fields are equal on all ranks (with DiLoCo, on all ranks of a replica group), except the times and, until the next
    log line, `tokens`.

    Attributes:
        iteration: index of the step, counted from 1.
        loss: mean loss over the tokens of the global batch, in nats. It may be NaN or Inf.
        grad_norm: norm of the gradients, without the loss scale, before clipping.
        learning_rate: learning rate of the step.
        loss_scale: loss scale of the step; 1 without fp16.
        skipped: True if nothing was updated, because the norm was not finite or the guard rejected the step.
        num_zeros: number of gradient elements that are zero; None unless --log-num-zeros-in-grad is given.
        params_norm: L2 norm of the parameters; None without --log-params-norm, and in steps without a log line.
        metrics: further numbers of the objective, the sharding and the routers, by name. The records of a log interval
            have their means over the interval; the log line omits names with a slash.
        consumed_samples: samples consumed by the run so far, including this step.
        global_batch_size: samples of this step over all ranks.
        tokens: number of tokens in this step's forward passes on all data ranks, with padding. None if every sample has
            the full sequence length (`Meter.whole_samples`). Otherwise the training loop stores this data rank's
            number, and the next log line replaces it by the sum over data ranks.
        micro_batches: number of micro-batches per rank.
        seconds: wall time of the step, including the wait for data.
        wait_seconds: wall time that the step waited for data, included in `seconds`.
        cpu_seconds: CPU time of this process during the step.
    """

    iteration: int
    loss: float = math.nan
    grad_norm: float | None = None
    learning_rate: float
    loss_scale: float = 1.0
    skipped: bool = False
    num_zeros: float | None = None
    params_norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    consumed_samples: int = 0
    global_batch_size: int = 0
    tokens: int | None = None
    micro_batches: int = 1
    seconds: float = 0.0
    wait_seconds: float = 0.0
    cpu_seconds: float = 0.0


class IntervalRecord:
    """The numbers of a log interval, which is all steps since the last log line.

    Args:
        meter: meter of the run.
        steps: records of the interval's steps, at least one.
        sent_bytes: bytes that a node has sent in these steps, by wire.
        peak_memory_bytes: peak memory of this rank's device; None if it is not reported.
    Attributes:
        last: record of the last step in the interval.
        steps: number of steps in the interval.
        total_iterations: number of steps of the complete run.
        loss: mean over the steps that were not skipped, or over all steps if all were skipped.
        max_grad_norm: largest gradient norm of the steps, without NaNs; NaN if all norms are NaN. None if no step has a
            norm.
        metrics: means of the steps' further metrics, by name, over the steps that have the metric.
        skipped: number of skipped steps.
        nan: number of steps whose loss was not finite.
        synchronizations: number of synchronizations of DiLoCo's replica groups.
        tokens: tokens of all steps in the interval over all ranks.
        consumed_tokens: tokens since the start of the run; None if the samples differ in length.
        seconds: wall time of all steps in the interval.
        tokens_per_second: tokens per second of all ranks together.
        rank_tokens_per_second: tokens per second of one rank.
        rank_flops: model FLOP/s of one rank.
        mfu: `rank_flops` as a fraction of the device's peak FLOP/s; None if the peak is unknown.
        sent_bytes: bytes that a node has sent per step, by wire.
        peak_memory_bytes: peak memory of this rank's device; None if it is not reported.
        left: remaining time of the run (a timedelta) if it continues with this interval's samples per second.
    """

    def __init__(
        self, meter: Meter, steps: Sequence[StepRecord], sent_bytes: Mapping[str, int], peak_memory_bytes: int | None
    ) -> None:
        # ---- compute sums and means over the steps of the interval
        losses = [step.loss for step in steps if not step.skipped] or [step.loss for step in steps]
        norms = [step.grad_norm for step in steps if step.grad_norm is not None]
        by_name: dict[str, list[float]] = {}
        for step in steps:
            for name, value in step.metrics.items():
                by_name.setdefault(name, []).append(value)
        self.last = steps[-1]
        self.steps = len(steps)
        self.total_iterations = meter.total_iterations
        self.loss = sum(losses) / len(losses)
        self.max_grad_norm = max((norm for norm in norms if not math.isnan(norm)), default=norms[0] if norms else None)
        self.metrics = {name: sum(values) / len(values) for name, values in by_name.items()}
        self.skipped = sum(step.skipped for step in steps)
        self.nan = sum(not math.isfinite(step.loss) for step in steps)
        self.synchronizations = len(by_name.get(INNER_LOSS, ()))
        self.tokens = sum(map(meter.tokens_of, steps))
        self.consumed_tokens: int | None = None
        if meter.whole_samples:
            self.consumed_tokens = self.last.consumed_samples * meter.seq_length + meter.token_offset
        self.sent_bytes = {wire: total // len(steps) for wire, total in sent_bytes.items()}
        self.peak_memory_bytes = peak_memory_bytes
        # ---- compute the speed in the interval, and the remaining time of the run
        self.seconds = sum(step.seconds for step in steps)
        self.tokens_per_second = self.tokens / self.seconds if self.seconds else 0.0
        self.rank_tokens_per_second = self.tokens_per_second / meter.world_size
        self.rank_flops = self.tokens_per_second * meter.flops_per_token / meter.world_size
        self.mfu = None if meter.peak_flops is None else self.rank_flops / meter.peak_flops
        samples = max(1, sum(step.global_batch_size for step in steps))
        samples_left = max(0, meter.total_samples - self.last.consumed_samples)
        self.left = datetime.timedelta(seconds=round(samples_left * self.seconds / samples))

    @property
    def fields(self) -> dict[str, Any]:
        """The values of this log interval by name, for metrics.jsonl, wandb and TensorBoard."""
        last, sent = self.last, {f"{wire}_bytes": value for wire, value in self.sent_bytes.items()}
        fields = {
            "iteration": last.iteration,
            "lm_loss": self.loss,
            "grad_norm": last.grad_norm,
            "max_grad_norm": self.max_grad_norm,
            "num_zeros": last.num_zeros,
            "params_norm": last.params_norm,
            "learning_rate": last.learning_rate,
            "loss_scale": last.loss_scale if last.loss_scale != 1.0 else None,
            "global_batch_size": last.global_batch_size,
            "consumed_samples": last.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "tokens": self.tokens if self.consumed_tokens is None else None,
            "steps": self.steps,
            "step_seconds": self.seconds / self.steps,
            "tokens_per_second": self.tokens_per_second,
            "skipped": self.skipped,
            **sent,
            "replica_group_bytes": sent["replica_group_bytes"] or None,
            "synchronizations": self.synchronizations or None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "mfu": self.mfu,
            **self.metrics,
        }
        return {name: value for name, value in fields.items() if value is not None or name in ALWAYS}

    @property
    def line(self) -> str:
        """The log line of the interval: Megatron-LM's fields up to "number of nan iterations", then MegaZ++'s fields.

        MegaZ++'s fields are the largest gradient norm, tokens/s and TFLOP/s per rank, MFU, memory, MB per step and
        wire, and the remaining time.
        """
        last, memory, sent = self.last, self.peak_memory_bytes, self.sent_bytes
        parts = [
            f"iteration {last.iteration:8d}/{self.total_iterations:8d}",
            f"consumed samples: {last.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.seconds / self.steps * 1000.0:.1f}",
            f"learning rate: {last.learning_rate:.3E}",
            f"global batch size: {last.global_batch_size:5d}",
            f"lm loss: {self.loss:.6E}",
            *(f"{name}: {value:.4g}" for name, value in self.metrics.items() if "/" not in name),
            f"synchronizations: {self.synchronizations}" if self.synchronizations else None,
            f"loss scale: {last.loss_scale:.1f}",
            None if last.grad_norm is None else f"grad norm: {last.grad_norm:.3f}",
            None if last.num_zeros is None else f"num zeros: {last.num_zeros:.1f}",
            None if last.params_norm is None else f"params norm: {last.params_norm:.3f}",
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.nan:3d}",
            None if self.max_grad_norm is None else f"max grad norm: {self.max_grad_norm:.3f}",
            f"tokens/s per rank: {self.rank_tokens_per_second:.1f}",
            f"model TFLOP/s per rank: {self.rank_flops / TERA:#.4g}",
            None if self.mfu is None else f"MFU: {self.mfu:.1%}",
            None if memory is None else f"max memory (GB): {memory / GIGA:.2f}",
            *(f"{WIRE_NAMES[wire]} MB per step: {value / MEGA:.3f}" for wire, value in sent.items() if value),
            f"eta: {self.left}",
        ]
        return "".join(f" {part} |" for part in parts if part is not None)

    @property
    def short_line(self) -> str:
        """A shorter log line of the interval for a terminal, at most 100 columns wide."""
        norm = "" if self.last.grad_norm is None else f"grad norm {self.last.grad_norm:6.3f}  "
        return (
            f"iteration {self.last.iteration:6d}/{self.total_iterations}  loss {self.loss:7.4f}  {norm}"
            f"{self.tokens_per_second:9,.0f} tokens/s  {self.left} left"
            + (f"  {self.skipped} skipped" if self.skipped else "")
        )


@dataclass(kw_only=True)
class Meter:
    """Sums over the records of steps, from which `interval` summarizes a log interval, and `summary` the run.

    Args:
        total_iterations: number of steps of the complete run.
        total_samples: number of samples of the complete run.
        seq_length: number of tokens per sample.
        world_size: number of ranks of all jobs of the run, for the figures per rank.
        flops_per_token: model FLOPs per token, see `model_flops_per_token`.
        whole_samples: True if every sample has `seq_length` tokens. False: each step record has its number of tokens.
            The log then has no `consumed_tokens`, because the tokens before a resume are not known.
        peak_flops: peak FLOP/s of one rank's device. None if unknown; no MFU is reported then.
        token_offset: `TrainingProgress.token_offset` of the run, which is set when a checkpoint is loaded.
    Attributes:
        count: number of steps since the start of this process.
        micro_batches: number of micro-batches per rank in all these steps together.
        seconds: wall time of these steps.
        cpu_seconds: CPU time of this process in these steps.
    """

    total_iterations: int
    total_samples: int
    seq_length: int
    world_size: int
    flops_per_token: int
    whole_samples: bool = True
    peak_flops: float | None = None
    token_offset: int = 0

    def __post_init__(self) -> None:
        self.count, self.micro_batches, self._tokens = 0, 0, 0
        self.seconds, self.cpu_seconds = 0.0, 0.0
        self._skipped, self._wait_seconds, self._sent_bytes = 0, 0.0, NOTHING_SENT
        self._steps: list[StepRecord] = []
        self._first: StepRecord | None = None
        self._inner_losses: list[float] = []

    def add(self, step: StepRecord) -> None:
        """Add the record of one step to the sums over the log interval and over the run."""
        self._steps.append(step)
        self._first = self._first or step
        self._inner_losses += [step.metrics[INNER_LOSS]] if INNER_LOSS in step.metrics else []
        self.count += 1
        self.micro_batches += step.micro_batches
        self.seconds += step.seconds
        self.cpu_seconds += step.cpu_seconds
        self._skipped += step.skipped
        self._wait_seconds += step.wait_seconds

    def interval(
        self, sent_bytes: Mapping[str, int] = NOTHING_SENT, *, peak_memory_bytes: int | None = None
    ) -> IntervalRecord:
        """Summarize the log interval, which is all steps added since the last call. At least one step is required.

        Args:
            sent_bytes: bytes that a node has sent in these steps, by wire.
            peak_memory_bytes: peak memory of this rank's device; None if it is not reported.
        """
        steps, self._steps = self._steps, []
        assert steps, "an interval needs a step"
        record = IntervalRecord(self, steps, sent_bytes, peak_memory_bytes)
        self._tokens += record.tokens
        self._sent_bytes = {wire: sent_bytes[wire] + before for wire, before in self._sent_bytes.items()}
        return record

    def summary(self, *, cpu_seconds: float) -> dict[str, Any]:
        """Summarize all training steps of this process for summary.json.

        The field `tokens_per_second` leaves out the first step, in which kernels and layers are compiled.

        Args:
            cpu_seconds: CPU time of the steps, summed over all ranks.
        """
        tokens = all_tokens = self._tokens + sum(map(self.tokens_of, self._steps))
        seconds = self.seconds
        if self._first is not None and self.count > 1:
            tokens, seconds = tokens - self.tokens_of(self._first), seconds - self._first.seconds
        met = len(self._inner_losses)
        return {
            "iterations": self.count,
            "skipped": self._skipped,
            "tokens": all_tokens,
            "seconds": self.seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "cpu_seconds_per_token": cpu_seconds / all_tokens if all_tokens else 0.0,
            "data_wait_share": self._wait_seconds / self.seconds if self.seconds else 0.0,
            **{
                f"{wire}_bytes_per_step": sent // max(1, self.count)
                for wire, sent in self._sent_bytes.items()
                if sent or wire != "replica_group"
            },
            **({"synchronizations": met, INNER_LOSS: self._inner_losses[-1]} if met else {}),
        }

    def tokens_of(self, step: StepRecord) -> int:
        """Return the number of tokens of a step's forward passes on all data ranks, from the step's record.

        If samples differ in length, call this only after a log line has summed the record's `tokens` over data ranks.
        """
        return step.global_batch_size * self.seq_length if step.tokens is None else step.tokens


def validation_lines(where: str, loss: float, *, metric: str = "lm_loss", has_perplexity: bool = True) -> list[str]:
    """Return Megatron-LM's three lines about a validation: dashes, the loss and its perplexity, dashes.

    Args:
        where: text that follows "validation loss at", for example "iteration 100".
        loss: result of the validation.
        metric: name of the result, "lm_loss" or for example "reward".
        has_perplexity: True if the loss is a mean of nats per token, so that its exponential is a perplexity.
    """
    line = f" validation loss at {where} | lm loss value: {loss:.6E} | "
    if has_perplexity:
        line += f"lm loss PPL: {perplexity(loss):.6E} | "
    if metric != "lm_loss":
        line = f" validation at {where} | {metric}: {loss:.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def perplexity(loss: float) -> float:
    """Return the perplexity exp(min(loss, 20)) for a loss in nats per token, with the limit of Megatron-LM.

    For NaN the result is NaN.
    """
    return math.exp(loss if math.isnan(loss) else min(20.0, loss))
