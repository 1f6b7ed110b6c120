"""Records steps, once for all who read them, and writes the timeline of one step as a Chrome trace.

The trace is what ui.perfetto.dev and chrome://tracing show: a process per rank, a thread per track. Spans of a track
that overlap without nesting (two threads, two streams) get a second thread of its name.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megazpp.flags import flag
from megazpp.formatting import MEGA
from megazpp.parallel.timeline import (
    COMPUTE,
    STEP,
    WAIT,
    Span,
    SpanRecording,
    Timeline,
    align,
    clip,
    hidden_shares,
    track_seconds,
)
from megazpp.topology.layout import WIRES
from megazpp.training.context import RunContext

TRACKS = (STEP, COMPUTE, WAIT, *WIRES)  # from the top; others follow by name
SLACK = 1e-9  # seconds: what rounding may move


@dataclass(frozen=True, kw_only=True)
class TimelineConfig:
    """Timeline (trace) of one step on all ranks."""

    timeline_step: int | None = flag(
        None,
        "record what every rank does in this iteration (the first is 1): timeline.json in the run folder, "
        "for ui.perfetto.dev",
    )

    def __post_init__(self) -> None:
        if self.timeline_step is not None and self.timeline_step < 1:
            raise ValueError(f"--timeline-step {self.timeline_step} is not positive: the first iteration is 1")


class SpanReader(Protocol):
    """Reads the spans of the steps that it wants; every rank has the same readers."""

    def wants(self, iteration: int) -> bool:
        """Whether to record `iteration`; called once, before it begins."""

    def read(self, iteration: int, spans: list[Span], in_flight: list[Span]) -> None:
        """Take in a step that has ended.

        Args:
            spans: what began and ended in it, the step as a whole among them.
            in_flight: what began in the step before, if that was recorded, and whatever ended there.
        """


class StepRecorder:
    """Records each step that a reader wants, once for all of them; shows every step to the watchdog."""

    def __init__(self, timeline: Timeline, readers: Sequence[SpanReader]) -> None:
        self._timeline, self._readers = timeline, readers
        self._recording: SpanRecording | None = None

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Around iteration `iteration`, data included."""
        readers = [reader for reader in self._readers if reader.wants(iteration)]
        before, self._recording = self._recording, None
        if readers:
            # without a gap: what a queue begins between two steps belongs to the one before
            self._recording = self._timeline.start(after=before)
        elif before is not None:
            self._timeline.detach(before)
        with self._timeline.span(STEP, f"step {iteration}"):
            yield
        if self._recording is None:
            return
        spans = self._timeline.spans(self._recording)
        in_flight = [] if before is None else self._timeline.spans(before)
        for reader in readers:
            reader.read(iteration, spans, in_flight)

    def close(self) -> None:
        """Record no more after the last step."""
        if self._recording is not None:
            self._timeline.detach(self._recording)


class StepTimeline:
    """Writes the timeline of the step that the flags name; a `SpanReader`.

    It also wants the step before, because what that leaves in flight (the cross gathers) runs under this one.

    Args:
        config: which step.
        run: its world axis gathers, and rank 0 writes to its folder.
    """

    def __init__(self, config: TimelineConfig, run: RunContext) -> None:
        self._step, self._dims, self._folder, self._log = config.timeline_step, run.dims, run.folder, run.log
        self._barrier_end: float | None = None

    def wants(self, iteration: int) -> bool:
        """The step and the one before; a barrier before them is the zero of the ranks' common clock."""
        wanted = self._step is not None and self._step - 1 <= iteration <= self._step
        if wanted and self._barrier_end is None:
            float(self._dims.world.all_reduce_(torch.zeros((), device=self._dims.mesh.device_type)))
            self._barrier_end = time.perf_counter()
        return wanted

    def read(self, iteration: int, spans: list[Span], in_flight: list[Span]) -> None:
        """Gather the step from all ranks, write it and log what it comes to."""
        if iteration != self._step:
            return
        (whole,) = (span for span in spans if span.track == STEP)
        inside = clip([*in_flight, *spans], whole.start_seconds, whole.end_seconds)
        inside.sort(key=lambda span: (span.start_seconds, -span.seconds))
        gathered = self._dims.world.gather_objects((inside, _clock(), self._barrier_end))
        if self._folder is None or not gathered:
            return
        spans_by_rank = align(*zip(*gathered, strict=True))
        cluster = self._dims.layout.cluster
        names = [f"rank {rank}, node {cluster.node_of(rank)}" for rank in range(len(spans_by_rank))]
        self._folder.write_json("timeline.json", chrome_trace(spans_by_rank, names))
        self._log(describe(whole.name, spans_by_rank))


def describe(name: str, spans_by_rank: Sequence[Sequence[Span]]) -> str:
    """Seconds of each track, mean over the ranks, and how much of each axis's time was hidden."""
    by_rank = [(spans, track_seconds(spans)) for spans in spans_by_rank]
    step_seconds = max(seconds[STEP] for _, seconds in by_rank)
    lines = [f"timeline of {name}: {step_seconds:.3f} s; busy seconds of each track, mean of {len(by_rank)} ranks:"]
    for track in sorted_tracks([span for spans in spans_by_rank for span in spans])[1:]:
        total = sum(seconds.get(track, 0.0) for _, seconds in by_rank)
        line = f"  {track:<10} {total / len(by_rank):9.4f} s"
        if track not in (COMPUTE, WAIT):
            shares = [(seconds[track], hidden_shares(spans, track)) for spans, seconds in by_rank if track in seconds]
            compute, work = (
                sum(weight * hidden[kind] for weight, hidden in shares if hidden) / total for kind in range(2)
            )
            line += f", {compute:.0%} hidden behind compute, {work:.0%} behind compute and other hops"
        lines.append(line)
    return "\n".join(lines)


def _clock() -> str:
    """The same on all processes that share a monotonic clock, and nowhere else."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def chrome_trace(spans_by_rank: Sequence[Sequence[Span]], names: Sequence[str]) -> dict[str, Any]:
    """The trace as JSON values.

    Args:
        spans_by_rank: on one clock.
        names: of the ranks.
    """
    events: list[dict[str, Any]] = []

    def describe_place(kind: str, place: dict[str, int], name: str, index: int) -> None:
        events.append({"ph": "M", "name": f"{kind}_name", **place, "args": {"name": name}})
        events.append({"ph": "M", "name": f"{kind}_sort_index", **place, "args": {"sort_index": index}})

    for rank, (spans, name) in enumerate(zip(spans_by_rank, names, strict=True)):
        describe_place("process", {"pid": rank}, name, rank)
        rows = [(track, row) for track in sorted_tracks(spans) for row in rows_without_crossings(spans, track)]
        for thread, (track, row) in enumerate(rows):
            describe_place("thread", {"pid": rank, "tid": thread}, track, thread)
            for span in row:
                microseconds = {"ts": round(span.start_seconds * MEGA, 3), "dur": round(span.seconds * MEGA, 3)}
                place = {"ph": "X", "name": span.name, "cat": track, "pid": rank, "tid": thread}
                events.append({**place, **microseconds, "args": {"blocking": span.blocking}})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def sorted_tracks(spans: Sequence[Span]) -> list[str]:
    """The tracks of the spans, from the top of a picture to its bottom."""
    tracks = {span.track for span in spans}
    return [track for track in TRACKS if track in tracks] + sorted(tracks - set(TRACKS))


def rows_without_crossings(spans: Sequence[Span], track: str) -> list[list[Span]]:
    """The track's spans in as few rows as needed, each with spans that follow each other or nest."""
    rows: list[tuple[list[Span], list[float]]] = []  # with the ends of the spans that are not over, outermost first
    mine = (span for span in spans if span.track == track)
    for span in sorted(mine, key=lambda span: (span.start_seconds, -span.seconds)):
        row, open_ends = next((row for row in rows if _fits(span, row[1])), ([], []))
        if not row:
            rows.append((row, open_ends))
        row.append(span)
        open_ends.append(span.end_seconds)
    return [row for row, _ in rows]


def _fits(span: Span, open_ends: list[float]) -> bool:
    """Whether the span follows what is in the row or is inside it; drops the ends that are over when it begins."""
    while open_ends and open_ends[-1] <= span.start_seconds + SLACK:
        open_ends.pop()
    return not open_ends or span.end_seconds <= open_ends[-1] + SLACK
