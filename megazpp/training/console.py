"""What a user sees while training: log lines, and on a terminal a progress bar with the time left below them.

The log line is Megatron's, byte for byte, with our fields after its last one, so that existing parsers keep
working. One departure: the loss is always printed. Megatron leaves it out when every step of the interval was
skipped; here it is then the mean over the skipped steps, NaN too.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import torch
from tqdm import tqdm

from megazpp.training.metrics import IntervalRecord

MEGA, GIGA = 1e6, 1e9
MEBI = 1024 * 1024


class Console:
    """Prints on one rank and is silent on the others.

    Args:
        enabled: whether this rank prints.
        out: where to; the bar is drawn only if it is a terminal.
    """

    def __init__(self, *, enabled: bool, out: TextIO | None = None) -> None:
        self._enabled, self._out = enabled, out or sys.stdout
        self._bar: tqdm | None = None

    def log(self, text: str) -> None:
        """Print lines, above the bar if there is one."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def start_bar(self, total_iterations: int, done: int) -> None:
        if self._enabled and self._out.isatty():
            self._bar = tqdm(total=total_iterations, initial=done, file=self._out, unit="step", dynamic_ncols=True)

    def advance(self, loss: float) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def log_line(interval: IntervalRecord) -> str:
    """Megatron's line, then tokens/s and TFLOP/s per rank, MFU, memory, MB per step and wire, ETA."""
    last = interval.last
    line = f" iteration {last.iteration:8d}/{interval.total_iterations:8d} |"
    line += f" consumed samples: {last.consumed_samples:12d} |"
    line += f" elapsed time per iteration (ms): {interval.step_seconds * 1000.0:.1f} |"
    line += f" learning rate: {last.learning_rate:.3E} |"
    line += f" global batch size: {last.global_batch_size:5d} |"
    line += f" lm loss: {interval.lm_loss:.6E} |"
    line += f" loss scale: {last.loss_scale:.1f} |"
    if last.grad_norm is not None:
        line += f" grad norm: {last.grad_norm:.3f} |"
    if last.num_zeros is not None:
        line += f" num zeros: {last.num_zeros:.1f} |"
    if last.params_norm is not None:
        line += f" params norm: {last.params_norm:.3f} |"
    line += f" number of skipped iterations: {interval.skipped:3d} |"
    line += f" number of nan iterations: {interval.nan:3d} |"
    return line + _own_fields(interval)


def _own_fields(interval: IntervalRecord) -> str:
    line = f" tokens/s per rank: {interval.tokens_per_second_per_rank:.1f} |"
    line += f" model TFLOP/s per rank: {interval.tflops_per_rank:#.4g} |"
    if interval.mfu is not None:
        line += f" MFU: {interval.mfu:.1%} |"
    if interval.peak_memory_bytes is not None:
        line += f" max memory (GB): {interval.peak_memory_bytes / GIGA:.2f} |"
    for wire, sent in interval.sent_bytes._asdict().items():
        if sent:
            line += f" {wire} MB per step: {sent / MEGA:.3f} |"
    return line + f" eta: {datetime.timedelta(seconds=round(interval.eta_seconds))} |"


def validation_lines(where: str, loss: float) -> list[str]:
    """Megatron's three lines: dashes, the loss and its perplexity, dashes. `where` is e.g. "iteration 100"."""
    line = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 20 as Megatron does; NaN stays NaN."""
    return math.exp(loss if math.isnan(loss) else min(20.0, loss))


def closing_lines(summary: Mapping[str, Any], last: IntervalRecord | None) -> str:
    """What the run came to, for a reader; `last` is its last log interval."""
    lines = []
    if summary["stop_reason"]:
        lines.append(f"stopped by {summary['stop_reason']}")
    if last is not None:
        lines.append(
            f"trained {summary['iterations']} iterations in {summary['seconds']:.1f} s: "
            f"{summary['tokens_per_second']:.0f} tokens/s, {summary['cpu_seconds_per_token'] * 1e6:.1f} CPU "
            f"microseconds per token, {summary['data_wait_share']:.1%} of the time waiting for data"
        )
        lines.append(f"training loss of the last log interval: {summary['final_loss']:.4f} nats per token")
    if summary["validation_loss"] is not None:
        lines.append(
            f"validation loss: {summary['validation_loss']:.4f}; unigram entropy of the validation text: "
            f"{summary['unigram_entropy']:.4f} nats per token"
        )
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
