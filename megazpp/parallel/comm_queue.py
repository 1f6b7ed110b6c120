"""Communication queues: an axis's collectives run in them, in order, beside the compute.

A queue runs its tasks one after the other and returns a `Work` for each. A task may wait for works of other queues.

    CommQueue     at once, in the caller: no overlap
    ThreadQueue   CPU: in a thread; gloo and torch's kernels release the interpreter lock
    StreamQueue   CUDA: on a stream; the host never waits

Why queues cannot deadlock. Every rank submits the same tasks in the same order (it runs the same program), each queue
keeps that order, and a task depends only on tasks submitted before it. So the first task, in the order of submission,
that is not finished on all its ranks has everything it needs on each of them. A process group must therefore have at
most one queue, and collectives must not be called on the group elsewhere while tasks are pending.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from megazpp.parallel.timeline import Timeline

T = TypeVar("T")
Moment = Any  # what `CommQueue.moment` returns


class Work(Generic[T]):
    """A handle on a task of a queue, as torch's `dist.Work` is one on a collective. This base class is completed."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """Hold the caller (on CUDA: its current stream) until the task is done, and return the task's result.

        Raises:
            Exception: what the task raised.
        """
        return self.join()

    def join(self) -> T:
        """`wait` from inside a task of another queue: the time is not recorded as a wait of the compute."""
        return self._result


class CommQueue:
    """A queue that runs each task at once in the caller: the base class, and the queue without overlap.

    Attributes:
        blocks_host: whether `Work.wait` blocks the host and not only the current stream.
    """

    blocks_host = True

    def moment(self) -> Moment:
        """Mark the end of what the caller's current stream holds now; None where there are no streams."""
        return None

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Run `task` without gradients when this queue's earlier tasks and the works of `after` are done.

        A task runs in inference mode if its caller does, because only then can it write to the caller's tensors.

        Args:
            since: on CUDA, what the task waits for in the place of all that the caller's current stream holds.
        """
        for work in after:
            work.join()
        with _without_gradients():
            return Work(task())


class ThreadQueue(CommQueue):
    """A queue that runs tasks in a thread of its own.

    Args:
        name: of the thread.
        timeline: records the time for which callers of `Work.wait` are held.
    """

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._name, self._timeline = name, timeline
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"megazpp-{name}")

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        inference = torch.is_inference_mode_enabled()

        def run() -> T:
            for work in after:
                work.join()
            with torch.inference_mode(inference), torch.no_grad():
                return task()

        future = self._thread.submit(contextvars.copy_context().run, run)
        return _ThreadWork(future, self._name, self._timeline)


class StreamQueue(CommQueue):
    """A queue that launches tasks on a CUDA stream of its own.

    A task starts after what the caller's current stream holds, or held at the `moment` that it is given. Memory that a
    task allocates belongs to the queue's stream. The caller of `Work.wait` may use the tensor that it returns until the
    last reference is gone, because the waiting stream is recorded. Other memory of a task, the caller's included, must
    live until its work was waited for. One thread at a time submits tasks, and no task submits to its own queue.

    Args:
        priority: of the stream; lower numbers first.
    """

    blocks_host = False

    def __init__(self, *, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(priority=priority)
        self._submitted = torch.cuda.Event()  # of the last task; a wait keeps what the event was when it was called

    def moment(self) -> Moment:
        return current_stream().record_event()

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        if since is None:
            self._submitted.record(current_stream())
            since = self._submitted
        since.wait(self._stream)
        with self._stream, _without_gradients():  # the stream itself: torch.cuda.stream takes ten times as long
            for work in after:
                work.join()
            result = task()
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamWork(result, event)


class _ThreadWork(Work[T]):
    def __init__(self, future: Future[T], queue: str, timeline: Timeline) -> None:
        self._future, self._queue, self._timeline = future, queue, timeline

    def wait(self) -> T:
        if self._future.done():
            return self._future.result()
        with self._timeline.span("wait", self._queue):
            return self._future.result()

    def join(self) -> T:
        return self._future.result()


class _StreamWork(Work[T]):
    def __init__(self, result: T, event: torch.cuda.Event) -> None:
        super().__init__(result)
        self._event = event

    def join(self) -> T:
        waiting = current_stream()
        self._event.wait(waiting)
        if isinstance(self._result, torch.Tensor):
            self._result.record_stream(waiting)  # freed, it must not go back to its own stream before this one is done
        return self._result


def current_stream() -> torch.cuda.Stream:
    """Return `torch.cuda.current_stream()`, an object that is made once per stream: for a tenth of the host time."""
    return _current_stream(torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice()))


@functools.cache
def _current_stream(identity: tuple[int, int, int]) -> torch.cuda.Stream:
    return torch.cuda.current_stream()


_NOTHING: AbstractContextManager[object] = nullcontext()


def _without_gradients() -> AbstractContextManager[object]:
    """Return a context in which autograd records nothing."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
