"""The timeline of a rank: what ran when, on any thread, as spans by track, and how much of it was hidden.

A track is a row of a trace: "compute", the name of an axis ("tp", "local", "cross", "shard", ...), "wait", where the
computing thread waits for something in flight, or "step", the whole. Spans may nest and overlap.

    Timeline        the code tells it of spans, and it tells its listeners; without any, a span costs half a microsecond
    SpanRecording   a listener that keeps the spans that end
    Activity        a listener that knows the spans that are open now
    below           how long each track was busy, and how much of that was hidden behind other work

On the CPU a span is two readings of the monotonic clock. On CUDA it is a pair of events on the current stream, turned
into seconds when they are read: work that is launched but not waited for ends where the stream ends it. All times are
seconds of the host's monotonic clock (CLOCK_MONOTONIC on Linux), which its processes and containers share, so ranks of
one host can be compared as they are. Hosts are aligned by the end of a barrier, see `align`.

FSDP2's own all-reduce between replicas (HSDP) does not pass through an axis and is not seen.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

STEP, COMPUTE, WAIT = "step", "compute", "wait"
Interval = tuple[float, float]


class Span(NamedTuple):
    """Something that took time."""

    track: str
    name: str
    start_seconds: float  # on the host's monotonic clock
    seconds: float
    blocking: bool = False  # it ran on the computing thread (CPU) or stream (CUDA), which did nothing else meanwhile

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


class Listener(Protocol):
    """Hears of every span while it is attached: it returns a context manager for around what happens."""

    def span(self, track: str, name: str) -> AbstractContextManager[object]: ...


class Timeline:
    """Tells listeners of spans; one per process, thread-safe.

    Args:
        device_type: "cuda" takes times from CUDA events, everything else from the clock.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._listeners: tuple[Listener, ...] = ()

    def span(self, track: str, name: str) -> AbstractContextManager[object]:
        """Tell the listeners of what happens inside as `name` on `track`; the first one's context is the outermost."""
        listeners = self._listeners
        if not listeners:
            return _NOTHING
        return listeners[0].span(track, name) if len(listeners) == 1 else _all_of(listeners, track, name)

    def attach(self, listener: Listener) -> None:
        """Have `listener` hear of spans that begin from now on."""
        self._listeners = (*self._listeners, listener)

    def detach(self, listener: Listener) -> None:
        """Undo `attach`."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def start(self, *, after: SpanRecording | None = None) -> SpanRecording:
        """Attach a recording, which begins as that of `after` ends.

        The calling thread (on CUDA its current stream) counts as the one that computes.
        """
        recording = SpanRecording(cuda=self.device_type == "cuda")
        self._listeners = (*(other for other in self._listeners if other is not after), recording)
        return recording


_NOTHING: AbstractContextManager[object] = nullcontext()


@contextmanager
def _all_of(listeners: Sequence[Listener], track: str, name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.span(track, name))
        yield


class SpanRecording:
    """Keeps the spans that end, by the clock or by CUDA events.

    Events have no common zero with the clock: one of them is tied to it at the start.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda, self.ended = cuda, list[tuple[str, str, Any, Any, bool]]()  # appending is atomic
        self.now: Callable[[], Any] = _record_event if cuda else time.perf_counter_ns
        self._where: Callable[[], object] = torch.cuda.current_stream if cuda else threading.get_ident
        self._computing = self._where()
        if cuda:
            torch.cuda.synchronize()
            self._zero = _record_event()
            self._zero.synchronize()
            self._zero_seconds = time.perf_counter_ns() * 1e-9

    def span(self, track: str, name: str) -> AbstractContextManager[object]:
        return _OpenSpan(self, track, name, self._where() == self._computing)

    def spans(self) -> list[Span]:
        """The spans that have ended so far, by their beginning, outer ones first; on CUDA waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        spans = []
        for track, name, start, end, blocking in list(self.ended):
            if self._cuda:
                began, took = self._zero_seconds + self._zero.elapsed_time(start) * 1e-3, start.elapsed_time(end) * 1e-3
            else:
                began, took = start * 1e-9, (end - start) * 1e-9
            spans.append(Span(track, name, began, took, blocking))
        return sorted(spans, key=lambda span: (span.start_seconds, -span.seconds))


class _OpenSpan:
    """A context manager that is faster than a generator's."""

    def __init__(self, recording: SpanRecording, track: str, name: str, blocking: bool) -> None:
        self._recording, self._track, self._name, self._blocking = recording, track, name, blocking

    def __enter__(self) -> None:
        self._start = self._recording.now()

    def __exit__(self, *error: object) -> None:
        end = self._recording.now()
        self._recording.ended.append((self._track, self._name, self._start, end, self._blocking))


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Doing(NamedTuple):
    """An open span.

    Ranks of an axis call its collectives in the same order, so equal numbers mean the same collective.
    """

    track: str
    name: str
    number: int  # of the track's spans so far, this one included
    seconds: float = 0.0  # since its thread last opened or closed a span


class Activity:
    """Keeps the open spans of each thread; `entered` is how many spans each track has had."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()  # one thread writes to a track
        self._open: dict[int, list[Doing]] = {}
        self._moved: dict[int, float] = {}

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        thread = threading.get_ident()
        self.entered[track] += 1
        open_spans = self._open.setdefault(thread, [])
        open_spans.append(Doing(track, name, self.entered[track]))
        self._moved[thread] = time.monotonic()
        try:
            yield
        finally:
            open_spans.pop()
            self._moved[thread] = time.monotonic()

    def now(self) -> list[Doing]:
        """The innermost open span of every thread that has one, the one without movement for longest first."""
        now = time.monotonic()
        innermost = [
            spans[-1]._replace(seconds=now - self._moved[thread]) for thread, spans in list(self._open.items()) if spans
        ]
        return sorted(innermost, key=lambda doing: -doing.seconds)


def track_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds in which each track was busy; of "compute" without its waits and its blocking collectives."""
    busy = {track: _busy(s for s in spans if s.track == track) for track in dict.fromkeys(s.track for s in spans)}
    seconds = {track: total(intervals) for track, intervals in busy.items()}
    if COMPUTE in busy:
        seconds[COMPUTE] -= total(intersection(busy[COMPUTE], _stalls(spans)))
    return seconds


def hidden_shares(spans: Sequence[Span], track: str) -> tuple[float, float] | None:
    """Shares of `track`'s time, 0 to 1, that were hidden behind compute and behind any work; None if it has no time.

    Behind compute: this rank neither waited, for whatever, nor was inside a blocking collective. Behind work: it
    computed, or a collective of another track ran.
    """
    busy = _busy(s for s in spans if s.track == track)
    if not total(busy):
        return None
    exposed = intersection(busy, _stalls(spans))
    elsewhere = _busy(s for s in spans if s.track not in (STEP, COMPUTE, WAIT, track))
    seconds, alone = total(busy), total(exposed) - total(intersection(exposed, elsewhere))
    return 1.0 - total(exposed) / seconds, 1.0 - alone / seconds


def _stalls(spans: Sequence[Span]) -> list[Interval]:
    """The moments when the computing thread waited or was inside a collective."""
    return _busy(s for s in spans if s.track == WAIT or (s.blocking and s.track not in (STEP, COMPUTE)))


def _busy(spans: Iterable[Span]) -> list[Interval]:
    return union((s.start_seconds, s.end_seconds) for s in spans)


def clip(spans: Iterable[Span], start_seconds: float, end_seconds: float) -> list[Span]:
    """The parts of the spans between two moments."""
    cut = []
    for span in spans:
        start, end = max(span.start_seconds, start_seconds), min(span.end_seconds, end_seconds)
        if start < end:
            cut.append(span._replace(start_seconds=start, seconds=end - start))
    return cut


def align(
    spans_by_rank: Sequence[Sequence[Span]], hosts: Sequence[str], barrier_ends: Sequence[float]
) -> list[list[Span]]:
    """The spans of all ranks on one clock, whose zero is the earliest return of a host's ranks from a barrier.

    Ranks of a host keep their distances exactly; hosts are off by at most a few network latencies.

    Args:
        hosts: each rank's, whatever tells hosts apart (a boot id).
        barrier_ends: each rank's return from the same barrier, on its own clock.
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
    """The moments that two unions share."""
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
