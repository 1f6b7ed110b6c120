"""Arithmetic of timeline spans: how long each track was busy, and how much of that time other work has hidden."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megazpp.parallel.timeline import COMPUTE, STEP, WAIT, Span

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
    """Cut spans to the interval from `start_seconds` to `end_seconds`, and return those that lie partly inside it."""
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
