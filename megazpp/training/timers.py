"""Records the spans of steps, once for all who read them: Megatron's timers, slow ranks, the timeline of one step.

`--timing-log-level` prints timers after a log line as Megatron does, the fastest and the slowest rank's:

    level 0    nothing: the log line has the time of an iteration
    level 1    forward-backward, all gathers of parameters, all reductions of gradients, optimizer
    level 2    and forward-compute, backward-compute, batch-generator, collectives axis by axis, parts of the optimizer

Times are per iteration and do not exclude each other: collectives run beside the compute, and waiting for them counts
in the timer that waits. On CUDA the times are the device's, which levels 1 and 2 wait for once per iteration; no rank
waits for another.

`--log-straggler` compares one step per log interval: a rank's compute time is its forward, backward, norm and update
without its waits and without the collectives that it stood in, so ranks that wait for a slow one do not look slow.

`--timeline-step` writes a Chrome trace for ui.perfetto.dev: a process per rank, a thread per track.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megazpp.base.flags import check_words, flag
from megazpp.base.program import MEGA
from megazpp.parallel.timeline import (
    COMPUTE,
    STEP,
    WAIT,
    Span,
    SpanRecording,
    align,
    clip,
    hidden_shares,
    total,
    track_seconds,
    union,
)
from megazpp.topology.layout import DATA_AXES, WIRES
from megazpp.training.context import RunContext

TRACKS = (STEP, COMPUTE, WAIT, *WIRES)  # from the top; others follow by name
MAIN_TIMERS = ("forward-backward", "params-all-gather", "grads-reduce-scatter", "optimizer")
COLLECTIVES = {"params-all-gather": ("all_gather",), "grads-reduce-scatter": ("reduce_scatter", "all_to_all")}
OTHER_TIMERS = (
    "forward-compute",
    "backward-compute",
    "batch-generator",
    *(f"{name}-{axis}" for name in COLLECTIVES for axis in DATA_AXES),
    "optimizer-clip-main-grad",
    "optimizer-inner-step",
)
SLOW = 1.2  # times the median
SHOWN_RANKS = 8
SLACK = 1e-9  # seconds: what rounding may move


@dataclass(frozen=True, kw_only=True)
class TimingConfig:
    """Timing.

    Times of the parts of an iteration, slow ranks, and the timeline (trace) of one step.
    """

    timing_log_level: Literal[0, 1, 2] = flag(
        0, "times in the log: 0 of iterations, 1 of their parts, 2 also of micro-batches and of each axis's collectives"
    )
    log_straggler: bool = flag(
        False, f"measure one step per log interval and name the ranks that compute {SLOW} times as long as the median"
    )
    timeline_step: int | None = flag(
        None,
        "record what every rank does in this iteration (the first is 1): timeline.json in the run folder, "
        "for ui.perfetto.dev",
    )

    def __post_init__(self) -> None:
        check_words(self)
        if self.timeline_step is not None and self.timeline_step < 1:
            raise ValueError(f"--timeline-step {self.timeline_step} is not positive: the first iteration is 1")


class StepRecorder:
    """Records each step that a flag asks for; shows every step to the watchdog.

    Args:
        config: the flags.
        run: measures, gathers from the ranks and logs; the timeline of a step goes to its folder.
        interval: iterations between two comparisons of the ranks.
    """

    def __init__(self, config: TimingConfig, run: RunContext, *, interval: int) -> None:
        self._config, self._run, self._interval = config, run, interval
        self._names = ((), MAIN_TIMERS, (*MAIN_TIMERS, *OTHER_TIMERS))[config.timing_log_level]
        self._seconds, self._steps = defaultdict[str, float](float), 0
        self._recording: SpanRecording | None = None
        self._barrier_end: float | None = None

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Surround iteration `iteration`, data included."""
        timeline, drawn = self._run.dims.timeline, self._config.timeline_step
        compares = self._config.log_straggler and iteration % self._interval == 0
        # cross gathers that the step before leaves in flight run under the one that is drawn
        draws = drawn is not None and drawn - 1 <= iteration <= drawn
        if draws and self._barrier_end is None:  # the zero of the ranks' common clock
            float(self._run.dims.world.all_reduce_(torch.zeros((), device=self._run.device)))
            self._barrier_end = time.perf_counter()
        before, self._recording = self._recording, None
        if self._names or compares or draws:
            # without a gap: a span that a queue begins between two steps belongs to the one before
            self._recording = timeline.start(after=before)
        elif before is not None:
            timeline.detach(before)
        with timeline.span(STEP, f"step {iteration}"):
            yield
        if self._recording is None:
            return
        spans = self._recording.spans()
        if self._names:
            self._steps += 1
            for name, seconds in seconds_by_timer(spans).items():
                self._seconds[name] += seconds
        if compares:
            by_rank = self._gather([track_seconds(spans)[COMPUTE]])
            self._run.log(describe_ranks(iteration, [seconds for (seconds,) in by_rank]))
        if iteration == drawn:
            self._write_timeline(spans, [] if before is None else before.spans())

    def close(self) -> None:
        """Record no more after the last step."""
        if self._recording is not None:
            self._run.dims.timeline.detach(self._recording)

    def report_timers(self) -> str | None:
        """Megatron's lines on the steps since the last call, means over them, the same on all ranks; or None."""
        if not self._steps:
            return None
        by_rank = self._gather([1e3 * self._seconds[name] / self._steps for name in self._names])
        self._seconds, self._steps = defaultdict(float), 0
        return timer_lines(self._names, by_rank)

    def _gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of all ranks."""
        dims = self._run.dims
        own = torch.tensor([values], dtype=torch.float64, device=self._run.device)
        by_rank: list[list[float]] = dims.world.all_gather(own).tolist()
        return by_rank

    def _write_timeline(self, spans: list[Span], in_flight: list[Span]) -> None:
        """Write a step's `spans`, and what is `in_flight` since the step before, of all ranks to the run folder."""
        (whole,) = (span for span in spans if span.track == STEP)
        inside = clip([*in_flight, *spans], whole.start_seconds, whole.end_seconds)
        inside.sort(key=lambda span: (span.start_seconds, -span.seconds))
        boot = Path("/proc/sys/kernel/random/boot_id")  # equal on processes that share a monotonic clock
        clock = boot.read_text().strip() if boot.exists() else platform.node()
        dims, folder = self._run.dims, self._run.folder
        gathered = dims.world.gather_objects((inside, clock, self._barrier_end))
        if folder is None or not gathered:
            return
        spans_by_rank = align(*zip(*gathered, strict=True))
        names = [f"rank {rank}, node {dims.layout.cluster.node_of(rank)}" for rank in range(len(spans_by_rank))]
        folder.write_json("timeline.json", chrome_trace(spans_by_rank, names))
        self._run.log(describe(whole.name, spans_by_rank))


def seconds_by_timer(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each timer in one step; several collectives at once count once."""
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

    def busy(axes: tuple[str, ...], collectives: tuple[str, ...]) -> float:
        found = (span for span in spans if span.track in axes and span.name.startswith(collectives))
        return total(union((span.start_seconds, span.end_seconds) for span in found))

    for name, collectives in COLLECTIVES.items():
        seconds[name] = busy(DATA_AXES, collectives)
        seconds |= {f"{name}-{axis}": busy((axis,), collectives) for axis in DATA_AXES}
    return seconds


def timer_lines(names: Sequence[str], by_rank: Sequence[Sequence[float]]) -> str | None:
    """Lines in Megatron's form, of milliseconds by rank and name; timers that no rank has used are left out."""
    columns = {name: column for name, *column in zip(names, *by_rank, strict=True) if max(column) > 0}
    rows = [f"    {(name + ' ').ljust(48, '.')}: ({min(ms):.2f}, {max(ms):.2f})" for name, ms in columns.items()]
    return "\n".join(["(min, max) time across ranks (ms):", *rows]) if rows else None


def describe_ranks(iteration: int, seconds: Sequence[float]) -> str:
    """One line about compute seconds by rank."""
    median = statistics.median_low(seconds)  # of two ranks the faster one
    by_time = sorted(range(len(seconds)), key=lambda rank: -seconds[rank])
    slow = [rank for rank in by_time if seconds[rank] > SLOW * median > 0.0]
    shown = ", ".join(f"rank {rank} {seconds[rank] / median:.2f} x" for rank in slow[:SHOWN_RANKS])
    more = f" and {len(slow) - SHOWN_RANKS} more" if len(slow) > SHOWN_RANKS else ""
    fastest, slowest = by_time[-1], by_time[0]
    return (
        f"compute seconds of iteration {iteration}: median {median:.4f}, "
        f"fastest {seconds[fastest]:.4f} (rank {fastest}), slowest {seconds[slowest]:.4f} (rank {slowest}); "
        + (f"slow: {shown}{more}" if slow else "no slow rank")
    )


def describe(name: str, spans_by_rank: Sequence[Sequence[Span]]) -> str:
    """Seconds of each track, mean over the ranks, and the share of each axis's time that was hidden."""
    by_rank = [(spans, track_seconds(spans)) for spans in spans_by_rank]
    step_seconds = max(seconds[STEP] for _, seconds in by_rank)
    lines = [f"timeline of {name}: {step_seconds:.3f} s; busy seconds of each track, mean of {len(by_rank)} ranks:"]
    for track in sorted_tracks([span for spans in spans_by_rank for span in spans])[1:]:
        busy = sum(seconds.get(track, 0.0) for _, seconds in by_rank)
        line = f"  {track:<10} {busy / len(by_rank):9.4f} s"
        if track not in (COMPUTE, WAIT) and busy:
            shares = [(seconds[track], hidden_shares(spans, track)) for spans, seconds in by_rank if track in seconds]
            compute, work = (
                sum(weight * hidden[kind] for weight, hidden in shares if hidden) / busy for kind in range(2)
            )
            line += f", {compute:.0%} hidden behind compute, {work:.0%} behind compute and other hops"
        lines.append(line)
    return "\n".join(lines)


def chrome_trace(spans_by_rank: Sequence[Sequence[Span]], names: Sequence[str]) -> dict[str, Any]:
    """The trace as JSON values, of spans on one clock and the ranks' names.

    Spans of a track that overlap without nesting (two threads, two streams) get a second thread of its name.
    """
    events: list[dict[str, Any]] = []
    for rank, (spans, name) in enumerate(zip(spans_by_rank, names, strict=True)):
        rows = [(track, row) for track in sorted_tracks(spans) for row in nesting_rows(spans, track)]
        places = [({"pid": rank}, "process", name, rank)]
        places += [({"pid": rank, "tid": tid}, "thread", track, tid) for tid, (track, _) in enumerate(rows)]
        for place, kind, what, index in places:
            events.append({"ph": "M", "name": f"{kind}_name", **place, "args": {"name": what}})
            events.append({"ph": "M", "name": f"{kind}_sort_index", **place, "args": {"sort_index": index}})
        for tid, (track, row) in enumerate(rows):
            for span in row:
                microseconds = {"ts": round(span.start_seconds * MEGA, 3), "dur": round(span.seconds * MEGA, 3)}
                event = {"ph": "X", "name": span.name, "cat": track, "pid": rank, "tid": tid, **microseconds}
                events.append({**event, "args": {"blocking": span.blocking}})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def nesting_rows(spans: Sequence[Span], track: str) -> list[list[Span]]:
    """The track's spans in as few rows as needed, each with spans that follow each other or nest."""
    rows: list[tuple[list[Span], list[float]]] = []  # with the ends of the spans that are not over, outermost first
    of_track = (span for span in spans if span.track == track)
    for span in sorted(of_track, key=lambda span: (span.start_seconds, -span.seconds)):
        for _, ends in rows:
            while ends and ends[-1] <= span.start_seconds + SLACK:
                ends.pop()
        fitting = ((row, ends) for row, ends in rows if not ends or span.end_seconds <= ends[-1] + SLACK)
        row, ends = next(fitting, ([], []))
        if not row:
            rows.append((row, ends))
        row.append(span)
        ends.append(span.end_seconds)
    return [row for row, _ in rows]


def sorted_tracks(spans: Sequence[Span]) -> list[str]:
    """The tracks of the spans, from the top of a picture to its bottom."""
    tracks = {span.track for span in spans}
    return [track for track in TRACKS if track in tracks] + sorted(tracks - set(TRACKS))
