"""What ran on a rank, as spans by lane, and how much of one lane was hidden behind other work.

A lane is "compute", the name of an axis ("tp", "local", "cross", "shard", ...), "wait", where the computing thread
waits for something in flight, or "step", the whole. Spans may nest and overlap.

All times are seconds of the host's monotonic clock (CLOCK_MONOTONIC on Linux), which its processes and containers
share, so ranks of one host can be compared as they are. Hosts are aligned by the end of a barrier, see `align`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

STEP, COMPUTE, WAIT = "step", "compute", "wait"


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        lane, name: where it is drawn and what it is.
        start_seconds: on the host's monotonic clock.
        seconds: how long it took.
        blocking: it ran on the computing thread (CPU) or stream (CUDA), which did nothing else meanwhile.
    """

    lane: str
    name: str
    start_seconds: float
    seconds: float
    blocking: bool = False

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


Interval = tuple[float, float]


def lane_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds in which each lane was busy; of "compute" without its waits and its blocking collectives."""
    spans = list(spans)
    busy = {
        lane: union(_intervals(s for s in spans if s.lane == lane)) for lane in dict.fromkeys(s.lane for s in spans)
    }
    stalled = stalls(spans)
    return {
        lane: total(intervals) - (total(intersection(intervals, stalled)) if lane == COMPUTE else 0.0)
        for lane, intervals in busy.items()
    }


class Hidden(NamedTuple):
    """Shares of a lane's time, 0 to 1, in which this rank got on with something else.

    Attributes:
        behind_compute: it computed: it neither waited, for whatever, nor was inside a blocking collective.
        behind_work: it computed, or a collective of another lane ran.
    """

    behind_compute: float
    behind_work: float


def hidden_shares(spans: Iterable[Span], lane: str) -> Hidden | None:
    """How much of `lane`'s time was hidden, or None if it has none."""
    spans = list(spans)
    busy = union(_intervals(s for s in spans if s.lane == lane))
    if not busy:
        return None
    exposed = intersection(busy, stalls(spans))
    elsewhere = union(_intervals(s for s in spans if s.lane not in (STEP, COMPUTE, WAIT, lane)))
    seconds, alone = total(busy), total(exposed) - total(intersection(exposed, elsewhere))
    return Hidden(1.0 - total(exposed) / seconds, 1.0 - alone / seconds)


def stalls(spans: Sequence[Span]) -> list[Interval]:
    """When the computing thread waited or was inside a collective."""
    return union(_intervals(s for s in spans if s.lane == WAIT or (s.blocking and s.lane not in (STEP, COMPUTE))))


def clip(spans: Iterable[Span], start_seconds: float, end_seconds: float) -> list[Span]:
    """The parts of the spans between two moments."""
    cut = [
        s._replace(start_seconds=start, seconds=min(s.end_seconds, end_seconds) - start)
        for s in spans
        for start in (max(s.start_seconds, start_seconds),)
    ]
    return [s for s in cut if s.seconds > 0]


def align(
    spans_by_rank: Sequence[Sequence[Span]], hosts: Sequence[str], barrier_ends: Sequence[float]
) -> list[list[Span]]:
    """The spans of all ranks on one clock, whose zero is the end of a barrier.

    Ranks of a host keep their distances exactly. Hosts are shifted so that the earliest return from the barrier is the
    same moment on each: off by at most the time that the last messages of the barrier took, a few network latencies.

    Args:
        hosts: of each rank, whatever tells hosts apart (a boot id).
        barrier_ends: when each rank came out of the same barrier, on its own clock.
    """
    zeros: dict[str, float] = {}
    for host, end in zip(hosts, barrier_ends, strict=True):
        zeros[host] = min(end, zeros.get(host, end))
    return [
        [span._replace(start_seconds=span.start_seconds - zeros[host]) for span in spans]
        for host, spans in zip(hosts, spans_by_rank, strict=True)
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same moments."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What two unions share."""
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
    """Seconds that disjoint intervals cover."""
    return sum(end - start for start, end in intervals)


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(s.start_seconds, s.end_seconds) for s in spans]
