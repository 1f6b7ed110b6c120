"""Records when what ran on this rank, from any thread.

While nothing is recorded a span costs less than a microsecond. Whoever else wants the names of what runs (a profiler)
attaches itself.

On the CPU a span is two readings of the monotonic clock. On CUDA it is a pair of events on the current stream, turned
into seconds when the recording stops: work that is launched but not waited for ends where the stream ends it.

FSDP2's own all-reduce between replicas (HSDP) does not pass through an axis and is not seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

from megazpp.parallel.activity import Activity
from megazpp.parallel.spans import Span


class Listener(Protocol):
    """Hears of every span while it is attached."""

    def span(self, lane: str, name: str) -> AbstractContextManager[object]:
        """Around what happens."""


class Timeline:
    """Tells recordings and other listeners of spans; one per process, thread-safe.

    Args:
        device_type: "cuda" takes times from CUDA events, everything else from the clock.
    Attributes:
        activity: where spans are seen while they are open, whether or not they are recorded; None: nowhere.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.activity: Activity | None = None
        self._listeners: tuple[Listener, ...] = ()

    def span(self, lane: str, name: str) -> AbstractContextManager[object]:
        """Tell the listeners of what happens inside as `name` on `lane`; without any, do nothing."""
        listeners, activity = self._listeners, self.activity
        recorded = _NOTHING
        if listeners:
            recorded = listeners[0].span(lane, name) if len(listeners) == 1 else _all_of(listeners, lane, name)
        return recorded if activity is None else activity.span(lane, name, recorded)

    def attach(self, listener: Listener) -> None:
        """Have `listener` hear of spans that begin from now on."""
        self._listeners = (*self._listeners, listener)

    def detach(self, listener: Listener) -> None:
        """Undo `attach`."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def start(self) -> Recording:
        """A recording, beside others. The calling thread (its current stream on CUDA) is the one that computes."""
        recording = _CudaRecording() if self.device_type == "cuda" else _ClockRecording()
        self.attach(recording)
        return recording

    def stop(self, recording: Recording) -> list[Span]:
        """The spans that have ended since it started, by their beginning, outer ones first; on CUDA waits for it."""
        self.detach(recording)
        return sorted(recording.spans(), key=lambda span: (span.start_seconds, -span.seconds))


class _ClockRecording:
    """Spans by the clock."""

    def __init__(self) -> None:
        self._computing = threading.get_ident()
        self._spans: list[Span] = []  # appending is atomic

    def span(self, lane: str, name: str) -> AbstractContextManager[object]:
        return _OpenSpan(time.perf_counter_ns, lambda start, end: self._add(lane, name, start, end))

    def spans(self) -> list[Span]:
        return list(self._spans)

    def _add(self, lane: str, name: str, start: int, end: int) -> None:
        blocking = threading.get_ident() == self._computing
        self._spans.append(Span(lane, name, start * 1e-9, (end - start) * 1e-9, blocking))


class _CudaRecording:
    """Spans by CUDA events, which have no common zero with the clock: one event is tied to it at the start."""

    def __init__(self) -> None:
        self._computing = torch.cuda.current_stream()
        self._pairs: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event, bool]] = []
        torch.cuda.synchronize()
        self._zero = _record_event()
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter_ns() * 1e-9

    def span(self, lane: str, name: str) -> AbstractContextManager[object]:
        blocking = torch.cuda.current_stream() == self._computing
        return _OpenSpan(_record_event, lambda start, end: self._pairs.append((lane, name, start, end, blocking)))

    def spans(self) -> list[Span]:
        torch.cuda.synchronize()
        return [
            Span(
                lane,
                name,
                self._zero_seconds + self._zero.elapsed_time(start) * 1e-3,
                start.elapsed_time(end) * 1e-3,
                blocking,
            )
            for lane, name, start, end, blocking in list(self._pairs)
        ]


Recording = _ClockRecording | _CudaRecording


@contextmanager
def _all_of(listeners: Sequence[Listener], lane: str, name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.span(lane, name))
        yield


class _OpenSpan:
    def __init__(self, now: Callable[[], object], close: Callable[..., None]) -> None:
        self._now, self._close = now, close

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(self._start, self._now())


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_NOTHING: AbstractContextManager[object] = nullcontext()
