"""Record the timeline's spans of steps for three purposes: Megatron-LM's timers, slow ranks, and a trace of one step.

`--timing-log-level` prints Megatron-LM's timers after a log line, with the fastest and the slowest rank's time:

    level 0    nothing: the log line already shows the time of an iteration
    level 1    forward-backward, all gathers of parameters, all reductions of gradients, optimizer
    level 2    also forward-compute, backward-compute, batch-generator, collectives of each axis, parts of the optimizer

Times are per iteration. The times of several timers overlap: collectives run during the compute, and a wait for a
collective also counts as time of the forward, backward or optimizer that waits. On CUDA the times are measured on the
device, so levels 1 and 2 wait for the device once per iteration. No rank waits for another rank.

`--log-straggler` compares the ranks in one step per log interval. A rank's compute time is its forward, backward, norm
and update, without its waits and without blocking collectives. Ranks that wait for a slow rank therefore do not appear
slow.

`--timeline-step` writes a Chrome trace for ui.perfetto.dev, with a process per rank and a thread per track.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megazpp.base.program import MEGA
from megazpp.parallel.timeline import COMPUTE, STEP, WAIT, Span, SpanRecording
from megazpp.topology.layout import DATA_AXES, WIRES
from megazpp.training.config import SLOW, TimingConfig
from megazpp.training.context import RunContext

TRACKS = (STEP, COMPUTE, WAIT, *WIRES)  # first tracks of a trace, from the top; others follow in alphabetical order
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
SHOWN_RANKS = 8  # largest number of slow ranks in the log line
SLACK = 1e-9  # tolerance in seconds: rounding may make a nested span end after the span around it


class StepRecorder:
    """The recorder of the timeline's spans in those steps that the timing flags select.

    Args:
        config: flags for timing.
        run: process groups, log and run folder.
        interval: number of iterations between two comparisons of the ranks' compute times (--log-straggler).
    """

    def __init__(self, config: TimingConfig, run: RunContext, *, interval: int) -> None:
        self._config, self._run, self._interval = config, run, interval
        self._names = ((), MAIN_TIMERS, (*MAIN_TIMERS, *OTHER_TIMERS))[config.timing_log_level]
        # Sums of the timers' seconds over the steps since the last timer lines, and the number of these steps
        self._seconds, self._steps = defaultdict[str, float](float), 0
        self._recording: SpanRecording | None = None  # recording of the current step; None if no flag selects it
        self._barrier_end: float | None = None  # time at which this rank left the trace's barrier; None until then

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Return a context around the training step of `iteration` and its data loading.

        If a flag selects the step, its spans are recorded, and used for timers, slow ranks or the trace afterwards.
        """
        # ---- decide whether the trace, the comparison of ranks or the timers need the spans of this step
        timeline, drawn = self._run.dims.timeline, self._config.timeline_step
        compares = self._config.log_straggler and iteration % self._interval == 0
        # Inter-node gathers of the previous step may still be in flight, so the trace also needs that step's spans.
        draws = drawn is not None and drawn - 1 <= iteration <= drawn
        # An all-reduce serves as a barrier, whose end defines time zero of the trace on all ranks.
        if draws and self._barrier_end is None:
            float(self._run.dims.world.all_reduce_(torch.zeros((), device=self._run.device)))
            self._barrier_end = time.perf_counter()
        # ---- record the spans of the step
        before, self._recording = self._recording, None
        if self._names or compares or draws:
            # The new recording follows the previous one without a gap, so that no span between two steps is lost.
            self._recording = timeline.start(after=before)
        elif before is not None:
            timeline.detach(before)
        yield
        # ---- use the spans for timers, comparison of ranks, and trace
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
        """Stop the recording of the last step's spans. Call this after the last training step."""
        if self._recording is not None:
            self._run.dims.timeline.detach(self._recording)

    def report_timers(self) -> str | None:
        """Return Megatron-LM's timer lines for the steps since the last call; None if no flag selects timers.

        The times are means over these steps. All ranks call this, and get equal lines.
        """
        if not self._steps:
            return None
        by_rank = self._gather([1e3 * self._seconds[name] / self._steps for name in self._names])
        self._seconds, self._steps = defaultdict(float), 0
        return timer_lines(self._names, by_rank)

    def _gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gather the times `values` of all ranks, and return one list per rank, in the order of ranks.

        All ranks call this with equally many values.
        """
        dims = self._run.dims
        own = torch.tensor([values], dtype=torch.float64, device=self._run.device)
        return dims.world.all_gather(own).tolist()

    def _write_timeline(self, spans: list[Span], in_flight: list[Span]) -> None:
        """Gather one step's spans from all ranks, write timeline.json to the run folder, and log a summary.

        Args:
            spans: this rank's spans of the step.
            in_flight: this rank's spans of the previous step. Some may extend into this step.
        """
        # ---- select the spans within the step, and sort outer spans before inner ones
        (whole,) = (span for span in spans if span.track == STEP)
        inside = clip([*in_flight, *spans], whole.start_seconds, whole.end_seconds)
        inside.sort(key=lambda span: (span.start_seconds, -span.seconds))
        # ---- identify the host's clock, because spans of different hosts have to be aligned
        boot = Path("/proc/sys/kernel/random/boot_id")  # equal for processes that share a monotonic clock
        clock = boot.read_text().strip() if boot.exists() else platform.node()
        # ---- write one file with the spans of all ranks
        dims, folder = self._run.dims, self._run.folder
        gathered = dims.world.gather_objects((inside, clock, self._barrier_end))
        if folder is None or not gathered:
            return
        spans_by_rank = align(*zip(*gathered, strict=True))
        names = [f"rank {rank}, node {dims.layout.cluster.node_of(rank)}" for rank in range(len(spans_by_rank))]
        with folder.surviving("timeline.json"):
            folder.write_json("timeline.json", chrome_trace(spans_by_rank, names))
        self._run.log(describe(whole.name, spans_by_rank))


def seconds_by_timer(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each of Megatron-LM's timers in one step, by name, from the step's spans.

    Collectives of a timer that run at the same time count once.
    """
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
        """Return the seconds of the step in which at least one of the given collectives ran on at least one of `axes`.

        `collectives` are the beginnings of the spans' names, for example ("all_gather",).
        """
        found = (span for span in spans if span.track in axes and span.name.startswith(collectives))
        return total(union((span.start_seconds, span.end_seconds) for span in found))

    for name, collectives in COLLECTIVES.items():
        seconds[name] = busy(DATA_AXES, collectives)
        seconds |= {f"{name}-{axis}": busy((axis,), collectives) for axis in DATA_AXES}
    return seconds


def timer_lines(names: Sequence[str], by_rank: Sequence[Sequence[float]]) -> str | None:
    """Return a line per timer in Megatron-LM's format, with the smallest and the largest time of all ranks.

    Timers whose time is 0 on all ranks are left out. If no timer is left, the result is None.

    Args:
        names: names of the timers.
        by_rank: milliseconds of the timers in the order of `names`, one list per rank.
    """
    columns = {name: column for name, *column in zip(names, *by_rank, strict=True) if max(column) > 0}
    rows = [f"    {(name + ' ').ljust(48, '.')}: ({min(ms):.2f}, {max(ms):.2f})" for name, ms in columns.items()]
    return "\n".join(["(min, max) time across ranks (ms):", *rows]) if rows else None


def describe_ranks(iteration: int, seconds: Sequence[float]) -> str:
    """Return one log line that compares the ranks' compute times and names the slow ranks.

    Args:
        iteration: iteration of the measured step.
        seconds: compute seconds of each rank in the step.
    """
    # `median_low` of two ranks is the time of the faster rank. Against the mean of both times, the slower rank would
    # count as slow only at 1.5 times the time of the faster one.
    median = statistics.median_low(seconds)
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
    """Return log lines about a step's timeline: how long each track was busy, and how much of that time was hidden.

    Busy times are means over ranks, in seconds. The time of an axis is hidden while compute or other collectives run at
    the same time.

    Args:
        name: name of the step, for example "step 5".
        spans_by_rank: the step's spans, one list per rank.
    """
    by_rank = [(spans, track_seconds(spans)) for spans in spans_by_rank]
    step_seconds = max(seconds[STEP] for _, seconds in by_rank)
    lines = [f"timeline of {name}: {step_seconds:.3f} s; busy seconds of each track, mean of {len(by_rank)} ranks:"]
    for track in sorted_tracks([span for spans in spans_by_rank for span in spans])[1:]:
        busy = sum(seconds.get(track, 0.0) for _, seconds in by_rank)
        line = f"  {track:<10} {busy / len(by_rank):9.4f} s"
        if track not in (COMPUTE, WAIT) and busy:
            # The fractions that are hidden behind compute, and behind compute and other collectives: means over ranks,
            # weighted by the ranks' busy times
            shares = [(seconds[track], hidden_shares(spans, track)) for spans, seconds in by_rank if track in seconds]
            compute, work = (
                sum(weight * hidden[kind] for weight, hidden in shares if hidden) / busy for kind in range(2)
            )
            line += f", {compute:.0%} hidden behind compute, {work:.0%} behind compute and other hops"
        lines.append(line)
    return "\n".join(lines)


def chrome_trace(spans_by_rank: Sequence[Sequence[Span]], names: Sequence[str]) -> dict[str, Any]:
    """Return a Chrome trace of the ranks' spans as JSON values, with a process per rank and a thread per track.

    If spans of a track overlap without nesting (two threads, two streams), the trace gets another thread of that name.

    Args:
        spans_by_rank: spans of each rank on a common clock.
        names: name of each rank's process in the trace.
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
    """Split the spans of a track into rows, so that the spans of each row are disjoint or nested.

    A Chrome trace shows each row as a thread. A span is added to the first row in which every span that overlaps it
    also contains it.
    """
    # Each row is a pair: its spans so far, and the end times of those spans that are still open when the current span
    # starts, outermost span first.
    rows: list[tuple[list[Span], list[float]]] = []
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
    """Return the different tracks of the spans in the order in which a trace shows them, from the top."""
    tracks = {span.track for span in spans}
    return [track for track in TRACKS if track in tracks] + sorted(tracks - set(TRACKS))


Interval = tuple[float, float]


def track_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds in which each track was busy, by track. Spans of a track that overlap count once.

    The seconds of "compute" leave out the waits and blocking collectives inside spans of compute.
    """
    busy = {track: _busy(s for s in spans if s.track == track) for track in dict.fromkeys(s.track for s in spans)}
    seconds = {track: total(intervals) for track, intervals in busy.items()}
    if COMPUTE in busy:
        seconds[COMPUTE] -= total(intersection(busy[COMPUTE], _stalls(spans)))
    return seconds


def hidden_shares(spans: Sequence[Span], track: str) -> tuple[float, float] | None:
    """Return which fractions of a track's time were hidden by overlap, or None if the track was never busy.

    Args:
        spans: all spans of a rank.
        track: track to examine, usually the track of a mesh axis.
    Returns:
        Two fractions of the track's time, 0 to 1. The first is hidden behind compute: the computing thread was neither
        waiting nor in a blocking collective. The second is hidden behind any work: the thread computed, or another
        track ran a collective.
    """
    busy = _busy(s for s in spans if s.track == track)
    if not total(busy):
        return None
    exposed = intersection(busy, _stalls(spans))
    elsewhere = _busy(s for s in spans if s.track not in (STEP, COMPUTE, WAIT, track))
    seconds, alone = total(busy), total(exposed) - total(intersection(exposed, elsewhere))
    return 1.0 - total(exposed) / seconds, 1.0 - alone / seconds


def _stalls(spans: Sequence[Span]) -> list[Interval]:
    """Return the intervals in which a rank's computing thread waited, or was inside a blocking collective."""
    return _busy(s for s in spans if s.track == WAIT or (s.blocking and s.track not in (STEP, COMPUTE)))


def _busy(spans: Iterable[Span]) -> list[Interval]:
    """Return the time intervals that at least one of the spans covers, disjoint and sorted."""
    return union((s.start_seconds, s.end_seconds) for s in spans)


def clip(spans: Iterable[Span], start_seconds: float, end_seconds: float) -> list[Span]:
    """Return the spans, cut to the interval from `start_seconds` to `end_seconds`, without spans outside of it."""
    cut = []
    for span in spans:
        start, end = max(span.start_seconds, start_seconds), min(span.end_seconds, end_seconds)
        if start < end:
            cut.append(span._replace(start_seconds=start, seconds=end - start))
    return cut


def align(
    spans_by_rank: Sequence[Sequence[Span]], hosts: Sequence[str], barrier_ends: Sequence[float]
) -> list[list[Span]]:
    """Convert the spans of all ranks from their hosts' monotonic clocks to one common clock, and return them.

    Time zero of each host is the moment when the host's first rank left a barrier of all ranks. Spans from one host
    stay exactly aligned. Spans from different hosts are aligned up to a few network latencies.

    Args:
        spans_by_rank: spans of each rank, on its host's monotonic clock.
        hosts: identifier of each rank's host, for instance the boot ID.
        barrier_ends: time at which each rank left the barrier, in seconds on its host's monotonic clock.
    """
    zeros: dict[str, float] = {}
    for host, end in zip(hosts, barrier_ends, strict=True):
        zeros[host] = min(end, zeros.get(host, end))
    return [
        [span._replace(start_seconds=span.start_seconds - zeros[host]) for span in spans]
        for host, spans in zip(hosts, spans_by_rank, strict=True)
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time that is in at least one of the intervals, as disjoint intervals sorted by start."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in both `a` and `b`, as disjoint intervals sorted by start.

    The intervals of `a` must be disjoint and sorted, and so must the intervals of `b`.
    """
    shared, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            shared.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def total(intervals: Iterable[Interval]) -> float:
    """Return the total length in seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)
