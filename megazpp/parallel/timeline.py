"""The timeline of a rank: spans of work on tracks, and the share of communication that compute hides.

A track is a row of a trace. Its name is "compute", the name of a mesh axis ("tp", "local", "cross", "shard", ...),
"wait" (the computing thread waits for a pending task), "files" (a write to a checkpoint's file) or "step" (a whole
optimizer step). Spans may nest and overlap, and may come from any thread.

    Timeline        passes each span to its listeners; without a listener a span costs half a microsecond
    SpanRecording   a listener that records the spans that have ended
    Activity        a listener that keeps track of the spans that are open
    functions       how long each track was busy, and how much of that time was hidden behind other work

On the CPU a span is measured by two readings of the monotonic clock. On CUDA it is measured by two events on the
current stream, so the span ends when the device finishes the work, not when the host has launched it.

All times are seconds of the host's monotonic clock (CLOCK_MONOTONIC on Linux). Processes and containers of one host
share this clock, so their spans are directly comparable. `align` puts the spans of several hosts on one clock.

FSDP2's own all-reduce between replicas (HSDP) does not use a mesh axis, so the timeline does not show it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

STEP, COMPUTE, WAIT, FILES = "step", "compute", "wait", "files"
Interval = tuple[float, float]


class Span(NamedTuple):
    """A named piece of work with its start and duration."""

    track: str
    name: str
    start_seconds: float  # on the host's monotonic clock
    seconds: float
    blocking: bool = False  # True if it ran on the computing thread (CPU) or stream (CUDA), so compute had to wait

    @property
    def end_seconds(self) -> float:
        """The end of the span, on the host's monotonic clock."""
        return self.start_seconds + self.seconds


class Listener(Protocol):
    """The interface of a timeline's listeners, which are notified of each span that begins while they are attached."""

    def span(self, track: str, name: str) -> AbstractContextManager[object]:
        """Return a context manager that the timeline enters when the span begins and leaves when it ends."""
        ...


class Timeline:
    """A source of spans for listeners. A process has one timeline; all threads may use it.

    Args:
        device_type: "cuda" makes recordings use CUDA events; any other type uses the host's clock.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._listeners: tuple[Listener, ...] = ()

    def span(self, track: str, name: str) -> AbstractContextManager[object]:
        """Return a context manager for a span `name` on `track`, which all listeners observe.

        The contexts of several listeners nest; the first listener's context is the outermost.
        """
        listeners = self._listeners
        if not listeners:
            return _NOTHING
        return listeners[0].span(track, name) if len(listeners) == 1 else _all_of(listeners, track, name)

    def attach(self, listener: Listener) -> None:
        """Add a listener for the spans that begin from now on."""
        self._listeners = (*self._listeners, listener)

    def detach(self, listener: Listener) -> None:
        """Remove a listener that `attach` or `start` has added."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def start(self, *, after: SpanRecording | None = None) -> SpanRecording:
        """Attach a new recording and return it.

        The calling thread (on CUDA its current stream) counts as the computing one: collectives that run on it are
        marked as blocking.

        Args:
            after: an attached recording, which the new one replaces without a gap or an overlap.
        """
        recording = SpanRecording(cuda=self.device_type == "cuda")
        self._listeners = (*(other for other in self._listeners if other is not after), recording)
        return recording


_NOTHING: AbstractContextManager[object] = nullcontext()


@contextmanager
def _all_of(listeners: Sequence[Listener], track: str, name: str) -> Iterator[None]:
    """Enter the contexts of all listeners, in order."""
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.span(track, name))
        yield


class SpanRecording:
    """A listener that records the spans that have ended.

    CUDA events measure only differences. The recording therefore synchronizes once when it starts, and reads the
    host's clock at a first event, to which all later events are relative.

    Args:
        cuda: True to measure with CUDA events, False to measure with the host's clock.
    """

    def __init__(self, *, cuda: bool) -> None:
        # Several threads append to the list without a lock, because list.append is atomic.
        self._cuda, self.ended = cuda, list[tuple[str, str, Any, Any, bool]]()
        self.now: Callable[[], Any] = _record_event if cuda else time.perf_counter_ns
        self._where: Callable[[], object] = torch.cuda.current_stream if cuda else threading.get_ident
        self._computing = self._where()
        if cuda:
            torch.cuda.synchronize()
            self._zero = _record_event()
            self._zero.synchronize()
            self._zero_seconds = time.perf_counter_ns() * 1e-9

    def span(self, track: str, name: str) -> AbstractContextManager[object]:
        """Return a context manager that records one span."""
        return _OpenSpan(self, track, name, self._where() == self._computing)

    def spans(self) -> list[Span]:
        """Return the spans that have ended, sorted by start, outer spans before inner ones.

        On CUDA this synchronizes with the device.
        """
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
    """The context manager of a recorded span. A class, because `contextlib.contextmanager` would be slower."""

    def __init__(self, recording: SpanRecording, track: str, name: str, blocking: bool) -> None:
        self._recording, self._track, self._name, self._blocking = recording, track, name, blocking

    def __enter__(self) -> None:
        self._start = self._recording.now()

    def __exit__(self, *error: object) -> None:
        end = self._recording.now()
        self._recording.ended.append((self._track, self._name, self._start, end, self._blocking))


def _record_event() -> torch.cuda.Event:
    """Record an event with timing on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Doing(NamedTuple):
    """A span that is open now.

    The ranks of an axis call its collectives in the same order. Spans with equal numbers on an axis's track are
    therefore the same collective on all its ranks.
    """

    track: str
    name: str
    number: int  # number of spans that the track has had, including this one
    seconds: float = 0.0  # time since the span's thread last opened or closed a span


class Activity:
    """A listener that keeps track of the spans that are open in each thread.

    Attributes:
        entered: number of spans that each track has had, open ones included.
    """

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()  # needs no lock: only one thread opens spans of a given track
        self._open: dict[int, list[Doing]] = {}
        self._moved: dict[int, float] = {}

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """Return a context manager during which the span counts as open in the current thread."""
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
        """Return the innermost open span of each thread that has one, the longest unchanged thread first."""
        now = time.monotonic()
        innermost = [
            spans[-1]._replace(seconds=now - self._moved[thread]) for thread, spans in list(self._open.items()) if spans
        ]
        return sorted(innermost, key=lambda doing: -doing.seconds)


def track_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds in which each track was busy.

    The time of "compute" excludes the waits and blocking collectives inside it.
    """
    busy = {track: _busy(s for s in spans if s.track == track) for track in dict.fromkeys(s.track for s in spans)}
    seconds = {track: total(intervals) for track, intervals in busy.items()}
    if COMPUTE in busy:
        seconds[COMPUTE] -= total(intersection(busy[COMPUTE], _stalls(spans)))
    return seconds


def hidden_shares(spans: Sequence[Span], track: str) -> tuple[float, float] | None:
    """Return how much of a track's time was hidden by overlap, or None if the track was never busy.

    Args:
        spans: all spans of the rank.
        track: the track to examine, usually an axis.
    Returns:
        Two shares of the track's time, 0 to 1. The first is hidden behind compute: the computing thread was neither
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
    """Return the intervals in which the computing thread waited or was inside a blocking collective."""
    return _busy(s for s in spans if s.track == WAIT or (s.blocking and s.track not in (STEP, COMPUTE)))


def _busy(spans: Iterable[Span]) -> list[Interval]:
    """Return the intervals that at least one of the spans covers."""
    return union((s.start_seconds, s.end_seconds) for s in spans)


def clip(spans: Iterable[Span], start_seconds: float, end_seconds: float) -> list[Span]:
    """Return the spans cut to the interval from `start_seconds` to `end_seconds`, without those outside it."""
    cut = []
    for span in spans:
        start, end = max(span.start_seconds, start_seconds), min(span.end_seconds, end_seconds)
        if start < end:
            cut.append(span._replace(start_seconds=start, seconds=end - start))
    return cut


def align(
    spans_by_rank: Sequence[Sequence[Span]], hosts: Sequence[str], barrier_ends: Sequence[float]
) -> list[list[Span]]:
    """Return the spans of all ranks on one clock.

    All ranks have left the same barrier. On each host, zero is the moment when its first rank left the barrier. Spans
    from one host stay exactly aligned. Different hosts are aligned up to a few network latencies.

    Args:
        spans_by_rank: spans of each rank, on its host's monotonic clock.
        hosts: identifier of each rank's host, for instance its boot ID.
        barrier_ends: moment when each rank left the barrier, on its host's monotonic clock.
    """
    zeros: dict[str, float] = {}
    for host, end in zip(hosts, barrier_ends, strict=True):
        zeros[host] = min(end, zeros.get(host, end))
    return [
        [span._replace(start_seconds=span.start_seconds - zeros[host]) for span in spans]
        for host, spans in zip(hosts, spans_by_rank, strict=True)
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch, and return the disjoint result sorted by start."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the intervals that lie in both `a` and `b`, each sorted and disjoint as `union` returns them."""
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
