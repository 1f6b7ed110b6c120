"""What recorded steps say in the log: Megatron's timers (--timing-log-level), and slow ranks (--log-straggler).

The timers are printed after a log line as Megatron prints them:

    level 0    nothing: the log line has the time of an iteration
    level 1    forward-backward, all gathers of parameters, all reductions of gradients, optimizer
    level 2    and forward-compute, backward-compute, batch-generator, collectives axis by axis, parts of the optimizer

Times are per iteration and do not exclude each other: collectives run beside the compute, and what waits for them
counts in what waits. On CUDA the times are the device's, which levels 1 and 2 wait for once per iteration; no rank
waits for another. Nothing is measured at level 0.

For slow ranks one step per log interval is compared: a rank's compute time is its forward, backward, norm and update
without its waits and without the collectives that it stood in. Ranks that wait for a slow one do not look slow
themselves.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megazpp.flags import check_words, flag
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE, WAIT, Span, total, track_seconds, union
from megazpp.topology.layout import DATA_AXES
from megazpp.training.context import RunContext

GATHERS, REDUCTIONS = ("all_gather",), ("reduce_scatter", "all_to_all")
MAIN = ("forward-backward", "params-all-gather", "grads-reduce-scatter", "optimizer")
PARTS = (
    "forward-compute",
    "backward-compute",
    "batch-generator",
    *(f"{what}-{axis}" for what in ("params-all-gather", "grads-reduce-scatter") for axis in DATA_AXES),
    "optimizer-clip-main-grad",
    "optimizer-inner-step",
)
SLOW = 1.2  # times the median
SHOWN = 8  # ranks


@dataclass(frozen=True, kw_only=True)
class TimersConfig:
    """Timers: how long the parts of an iteration take."""

    timing_log_level: Literal[0, 1, 2] = flag(
        0, "times in the log: 0 of iterations, 1 of their parts, 2 also of micro-batches and of each axis's collectives"
    )
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", "of which ranks: the slowest, the fastest and the slowest, or all"
    )

    def __post_init__(self) -> None:
        check_words(self)


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """Stragglers: slow ranks are named."""

    log_straggler: bool = flag(
        False, f"measure one step per log interval and name the ranks that compute {SLOW} times as long as the median"
    )


class Timers:
    """Sums up steps until they are reported; a `SpanReader` (step_timeline.py) of every rank.

    Args:
        config: how much.
        dims: its world axis gathers.
    """

    def __init__(self, config: TimersConfig, dims: ParallelDims) -> None:
        self._config, self._dims = config, dims
        self._names = ((), MAIN, (*MAIN, *PARTS))[config.timing_log_level]
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = 0

    def wants(self, iteration: int) -> bool:
        """Every step, if anything is measured."""
        return bool(self._names)

    def read(self, iteration: int, spans: list[Span], in_flight: list[Span]) -> None:
        """Add up what began and ended in the step."""
        for name, seconds in seconds_by_timer(spans).items():
            self._seconds[name] += seconds
        self._steps += 1

    def report(self) -> str | None:
        """Megatron's lines on the steps since the last call, means over them, the same on all ranks; or None."""
        if not self._steps:
            return None
        mine = [1e3 * self._seconds[name] / self._steps for name in self._names]
        tensor = torch.tensor([mine], dtype=torch.float64, device=self._dims.mesh.device_type)
        by_rank = self._dims.world.all_gather(tensor).tolist()
        self._seconds, self._steps = defaultdict(float), 0
        return render(self._config.timing_log_option, self._names, by_rank)


def seconds_by_timer(spans: Sequence[Span]) -> dict[str, float]:
    """What each timer has for one step; several collectives at once count once."""
    compute: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.track == COMPUTE:
            compute[span.name] += span.seconds
    seconds = {
        "forward-backward": compute["forward"] + compute["backward"],
        "optimizer": compute["norm"] + compute["optimizer"],
        "forward-compute": compute["forward"],
        "backward-compute": compute["backward"],
        "optimizer-clip-main-grad": compute["norm"],
        "optimizer-inner-step": compute["optimizer"],
        "batch-generator": sum(span.seconds for span in spans if (span.track, span.name) == (WAIT, "data")),
    }
    for name, collectives in (("params-all-gather", GATHERS), ("grads-reduce-scatter", REDUCTIONS)):
        seconds[name] = _busy(spans, DATA_AXES, collectives)
        seconds |= {f"{name}-{axis}": _busy(spans, (axis,), collectives) for axis in DATA_AXES}
    return seconds


def _busy(spans: Sequence[Span], axes: tuple[str, ...], collectives: tuple[str, ...]) -> float:
    """Seconds in which one of the collectives ran on one of the axes."""
    found = (span for span in spans if span.track in axes and span.name.startswith(collectives))
    return total(union((span.start_seconds, span.end_seconds) for span in found))


def render(option: str, names: Sequence[str], by_rank: Sequence[Sequence[float]]) -> str | None:
    """The lines in Megatron's form; timers that no rank has used are left out.

    Args:
        option: of --timing-log-option.
        by_rank: milliseconds of each name.
    """
    columns = {name: column for name, *column in zip(names, *by_rank, strict=True) if max(column) > 0}
    if not columns:
        return None
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, column in columns.items():
            shown = (f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(column) if value)
            lines += [f"  {name}:", *shown]
        return "\n".join(lines)
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, column in columns.items():
        value = f"{max(column):.2f}" if option == "max" else f"({min(column):.2f}, {max(column):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {value}")
    return "\n".join(lines)


class Straggler:
    """Compares ranks; a `SpanReader` (step_timeline.py) of every rank.

    Args:
        config: whether to do anything.
        run: its world axis compares.
        interval: steps between two comparisons.
    """

    def __init__(self, config: StragglerConfig, run: RunContext, *, interval: int) -> None:
        self._interval = interval if config.log_straggler else None
        self._dims, self._log = run.dims, run.log

    def wants(self, iteration: int) -> bool:
        """One step per log interval."""
        return self._interval is not None and iteration % self._interval == 0

    def read(self, iteration: int, spans: list[Span], in_flight: list[Span]) -> None:
        """Compare the ranks' compute times."""
        seconds = torch.tensor([track_seconds(spans)[COMPUTE]], dtype=torch.float64, device=self._dims.mesh.device_type)
        self._log(describe_ranks(iteration, self._dims.world.all_gather(seconds).tolist()))


def describe_ranks(iteration: int, seconds: Sequence[float]) -> str:
    """The line for compute seconds by rank."""
    median = statistics.median_low(seconds)  # of two ranks the faster one
    by_time = sorted(range(len(seconds)), key=lambda rank: -seconds[rank])
    slow = [rank for rank in by_time if seconds[rank] > SLOW * median]
    shown = ", ".join(f"rank {rank} {seconds[rank] / median:.2f} x" for rank in slow[:SHOWN])
    more = f" and {len(slow) - SHOWN} more" if len(slow) > SHOWN else ""
    fastest, slowest = by_time[-1], by_time[0]
    return (
        f"compute seconds of iteration {iteration}: median {median:.4f}, "
        f"fastest {seconds[fastest]:.4f} (rank {fastest}), slowest {seconds[slowest]:.4f} (rank {slowest}); "
        + (f"slow: {shown}{more}" if slow else "no slow rank")
    )
