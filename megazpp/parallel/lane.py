"""Lanes: where an axis's collectives run in order, beside the compute.

A lane runs what it is given one task after the other and hands out a ticket for each. Tasks may depend on tickets of
other lanes.

    InlineLane   at once, in the caller                            no overlap
    ThreadLane   CPU: in a thread; gloo and torch's kernels release the interpreter lock
    StreamLane   CUDA: on a stream; the host never waits

Why lanes cannot deadlock. Every rank submits the same tasks in the same order (it runs the same program), each lane
keeps that order, and a task depends only on tasks submitted before it. So the first task, in the order of submission,
that is not finished on all its ranks has everything it needs on each of them. A process group must therefore have one
lane at most, and nobody else may use the group while tasks are pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from megazpp.parallel.timeline import Timeline

T = TypeVar("T")


class Ticket(Generic[T]):
    """A task that has been given to a lane. This one is done."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """Let the caller (on CUDA: its current stream) go on only when the task is done; returns its result.

        Raises:
            Exception: what the task raised.
        """
        return self.join()

    def join(self) -> T:
        """The same for a task of another lane, whose waiting is not the compute's."""
        return self._result


class Lane:
    """Runs tasks at once, in the caller: the base class and the lane without overlap.

    Attributes:
        blocks_host: who waits for a ticket keeps the host, not only its stream.
    """

    blocks_host = True

    def submit(self, task: Callable[[], T], *, after: Sequence[Ticket[Any]] = ()) -> Ticket[T]:
        """Run `task` when the tasks given before, and those of `after`, are done; without gradients.

        A task runs in inference mode if its caller does, because only then can it write to the caller's tensors.
        """
        for ticket in after:
            ticket.join()
        with torch.no_grad():
            return Ticket(task())


class ThreadLane(Lane):
    """Runs tasks in a thread of its own.

    Args:
        name: of the thread.
        timeline: where the time that a caller waits is recorded.
    """

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._name, self._timeline = name, timeline
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"megazpp-{name}")

    def submit(self, task: Callable[[], T], *, after: Sequence[Ticket[Any]] = ()) -> Ticket[T]:
        inference = torch.is_inference_mode_enabled()

        def run() -> T:
            for ticket in after:
                ticket.join()
            with torch.inference_mode(inference), torch.no_grad():
                return task()

        return _ThreadTicket(self._thread.submit(run), self._name, self._timeline)


class StreamLane(Lane):
    """Launches tasks on a CUDA stream of its own.

    A task starts after what the caller's current stream holds. Memory that it allocates belongs to the lane's stream.
    Whoever waits for a ticket may use the tensor it returns until the last reference is gone: the waiting stream is
    recorded. Other memory of a task, the caller's included, must live until something has waited for the ticket.

    Args:
        priority: of the stream; lower numbers first.
    """

    blocks_host = False

    def __init__(self, *, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(priority=priority)

    def submit(self, task: Callable[[], T], *, after: Sequence[Ticket[Any]] = ()) -> Ticket[T]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for ticket in after:
                ticket.join()
            result = task()
            return _StreamTicket(result, self._stream.record_event())


class _ThreadTicket(Ticket[T]):
    def __init__(self, future: Future[T], lane: str, timeline: Timeline) -> None:
        self._future, self._lane, self._timeline = future, lane, timeline

    def wait(self) -> T:
        if self._future.done():
            return self._future.result()
        with self._timeline.span("wait", self._lane):
            return self._future.result()

    def join(self) -> T:
        return self._future.result()


class _StreamTicket(Ticket[T]):
    def __init__(self, result: T, event: torch.cuda.Event) -> None:
        super().__init__(result)
        self._event = event

    def join(self) -> T:
        waiting = torch.cuda.current_stream()
        waiting.wait_event(self._event)
        if isinstance(self._result, torch.Tensor):
            self._result.record_stream(waiting)  # freed, it must not go back to its own stream before this one is done
        return self._result
