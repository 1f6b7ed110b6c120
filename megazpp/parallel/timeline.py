"""The timeline of a rank: spans of work on tracks.

A span is a piece of work with a name, a start and an end. A track is a row of a trace. Its name is "compute", the name
of a mesh axis ("tp", "local", "cross", "shard", ...), "wait" (the computing thread waits for a task of a communication
queue), "files" (a write to a checkpoint's file) or "step" (a whole optimizer step). Spans may nest and overlap, and may
come from any thread.

    Timeline        passes each span to its listeners; without a listener a span costs half a microsecond
    SpanRecording   a listener that records the spans that have ended, for the log and for traces
    Activity        a listener that keeps track of the spans that are open, for the watchdog

training/timers.py computes how long each track was busy, and how much of that time was hidden behind other work.

On the CPU a span is measured by two readings of the monotonic clock. On CUDA a span is measured by two events on the
current stream. The span therefore ends when the device finishes the work, not when the host has launched it.

All times are seconds of the host's monotonic clock (CLOCK_MONOTONIC on Linux). Processes and containers of one host
share this clock, so their spans are directly comparable. `align` in training/timers.py puts the spans of several hosts
on one clock.

FSDP2's own all-reduce between replicas (HSDP) does not use a mesh axis, so the timeline does not show it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

STEP, COMPUTE, WAIT, FILES = "step", "compute", "wait", "files"


class Span(NamedTuple):
    """A piece of work that has ended, for instance one collective, with its track, name, start and duration."""

    track: str
    name: str
    start_seconds: float  # time of the span's start, in seconds on the host's monotonic clock
    seconds: float  # duration of the span
    blocking: bool = False  # True if the work ran on the computing thread (CPU) or stream (CUDA), so compute waited

    @property
    def end_seconds(self) -> float:
        """The time at which the span ended, in seconds on the host's monotonic clock."""
        return self.start_seconds + self.seconds


class Listener(Protocol):
    """The interface of an object that a `Timeline` notifies of spans, from `Timeline.attach` to `Timeline.detach`."""

    def span(self, track: str, name: str) -> AbstractContextManager[object]:
        """Return a context manager that is entered when the span `name` on `track` begins, and left when it ends."""
        ...


class Timeline:
    """The distributor of spans to listeners. A process has one timeline; all threads may use it.

    Args:
        device_type: "cuda" measures the spans of recordings with CUDA events; any other type uses the host's clock.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._listeners: tuple[Listener, ...] = ()

    def span(self, track: str, name: str) -> AbstractContextManager[object]:
        """Return a context manager around a piece of work, which all listeners observe as the span `name` on `track`.

        The contexts of several listeners nest; the first listener's context is the outermost.
        """
        listeners = self._listeners
        if not listeners:
            return _NOTHING
        return listeners[0].span(track, name) if len(listeners) == 1 else _all_of(listeners, track, name)

    def attach(self, listener: Listener) -> None:
        """Notify `listener` of all spans that begin after this call, until `detach`."""
        self._listeners = (*self._listeners, listener)

    def detach(self, listener: Listener) -> None:
        """Stop notifying `listener`, which `attach` or `start` has added, of new spans."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def start(self, *, after: SpanRecording | None = None) -> SpanRecording:
        """Start to record spans, and return the new recording.

        The calling thread (on CUDA its current stream) counts as the computing thread (stream). Spans of work on it
        are marked as blocking.

        Args:
            after: attached recording that the new recording replaces, so that each span is in exactly one of the two.
        """
        recording = SpanRecording(cuda=self.device_type == "cuda")
        self._listeners = (*(other for other in self._listeners if other is not after), recording)
        return recording


_NOTHING: AbstractContextManager[object] = nullcontext()


@contextmanager
def _all_of(listeners: Sequence[Listener], track: str, name: str) -> Iterator[None]:
    """Return a context manager for one span that enters the context managers of all listeners, in order."""
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.span(track, name))
        yield


class SpanRecording:
    """A listener of a timeline that records the spans that have ended.

    CUDA events measure only the time between two events. At its start the recording therefore synchronizes with the
    device once and reads the host's clock at a first event. The times of all later events are relative to this event.

    Args:
        cuda: True measures with CUDA events, False with the host's clock.
    """

    def __init__(self, *, cuda: bool) -> None:
        # The ended spans as (track, name, start, end, blocking): start and end are results of `now`, and blocking is
        # True if compute waits for the span. Several threads append without a lock, because `list.append` is atomic.
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
        """Return a context manager that records the span `name` on `track`; see `Listener.span`."""
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
    """The context manager that records one span. It is a class because `contextlib.contextmanager` is slower."""

    def __init__(self, recording: SpanRecording, track: str, name: str, blocking: bool) -> None:
        self._recording, self._track, self._name, self._blocking = recording, track, name, blocking

    def __enter__(self) -> None:
        self._start = self._recording.now()

    def __exit__(self, *error: object) -> None:
        end = self._recording.now()
        self._recording.ended.append((self._track, self._name, self._start, end, self._blocking))


def _record_event() -> torch.cuda.Event:
    """Record a CUDA event with timing on the current stream, and return it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Doing(NamedTuple):
    """A span that is open now, for instance a collective in which this rank waits.

    The ranks of an axis call the axis's collectives in the same order. On the track of an axis, spans of different
    ranks with equal `number` are therefore the same collective.
    """

    track: str
    name: str
    number: int  # number of spans that have begun on the track, including this span
    seconds: float = 0.0  # time since this span's thread last began or ended a span


class Activity:
    """A listener of a timeline that keeps track of the spans that are open in each thread, for the watchdog.

    Attributes:
        entered: number of spans that have begun on each track, including open spans.
    """

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()  # needs no lock, because all spans of a track begin in the same thread
        self._open: dict[int, list[Doing]] = {}
        self._moved: dict[int, float] = {}

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """Return a context manager in which the span `name` on `track` counts as open in the current thread."""
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
        """Return the innermost open span of each thread that has an open span.

        The list is sorted by the time since the span's thread last began or ended a span, the longest time first.
        """
        now = time.monotonic()
        innermost = [
            spans[-1]._replace(seconds=now - self._moved[thread]) for thread, spans in list(self._open.items()) if spans
        ]
        return sorted(innermost, key=lambda doing: -doing.seconds)
