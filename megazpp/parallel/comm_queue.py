"""Communication queues, in which the collectives of a mesh axis run in order and overlap with compute.

At the end of the file are two other means by which host and device work side by side: copies of a few numbers to the
host, and threads.

A queue runs its tasks one after the other. `submit` returns a `Work`, the handle by which a caller waits. A task may
depend on works of other queues.

    CommQueue     runs each task immediately in the caller, without overlap
    ThreadQueue   CPU: runs tasks in a thread. gloo and torch's kernels release the interpreter lock
    StreamQueue   CUDA: launches tasks on a stream. The host never blocks

Queues cannot deadlock. Every rank runs the same program, so it submits the same tasks in the same order. Each queue
keeps that order, and a task depends only on tasks that were submitted earlier. Consider the earliest task that is
unfinished on some rank: all its dependencies are finished on all ranks, so it can run. This argument needs two rules:
a process group has at most one queue, and no other code calls collectives on the group while tasks are pending.
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
Moment = Any  # a CUDA event as returned by `CommQueue.record_event`, or None


class Work(Generic[T]):
    """A handle to a task in a communication queue, comparable to torch's `dist.Work`.

    The base class holds the result of a task that has already run. Subclasses wait for a thread or a stream.
    """

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """Wait until the task is done and return its result.

        With a `StreamQueue` only the caller's current stream waits, not the host.

        Raises:
            Exception: the exception that the task raised, if any.
        """
        return self.join()

    def join(self) -> T:
        """Wait like `wait`, but without recording a "wait" span. For tasks that wait for tasks of another queue."""
        return self._result


class CommQueue:
    """A queue that runs each task immediately in the caller: the base class, and the queue without overlap.

    Attributes:
        blocks_host: True if `Work.wait` blocks the host, False if it blocks only the current CUDA stream.
    """

    blocks_host = True

    def record_event(self) -> Moment:
        """Record an event after the work now queued on the caller's current CUDA stream; None on the CPU.

        Pass the event to `submit` as `since`.
        """
        return None

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Queue `task`, which runs after this queue's earlier tasks, and return the handle to it.

        The task runs without autograd. It runs in inference mode if the caller does, because only then can it write
        to inference tensors of the caller.

        Args:
            task: function to run. Its return value becomes the result of the `Work`.
            after: works that must be done before the task starts, usually tasks of other queues.
            since: on CUDA, an event from `record_event`. The task starts after this event instead of after everything
                that the caller's current stream now holds. Ignored on the CPU.
        """
        for work in after:
            work.join()
        with _without_gradients():
            return Work(task())


class ThreadQueue(CommQueue):
    """A queue that runs its tasks in a separate thread, for CPU tensors.

    Args:
        name: name of the axis; it becomes part of the thread's name, and the label of "wait" spans in the timeline.
        timeline: recorder of the time for which callers of `Work.wait` are blocked.
    """

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._name, self._timeline = name, timeline
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"megazpp-{name}")

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Queue `task` for the thread, in a copy of the caller's context variables; see `CommQueue.submit`."""
        inference = torch.is_inference_mode_enabled()

        def run() -> T:
            for work in after:
                work.join()
            with torch.inference_mode(inference), torch.no_grad():
                return task()

        future = self._thread.submit(contextvars.copy_context().run, run)
        return _ThreadWork(future, self._name, self._timeline)


class StreamQueue(CommQueue):
    """A queue that launches its tasks on a separate CUDA stream.

    A task starts after the work that the caller's current stream held at `submit`, or after the event `since`.

    Memory rules: The caching allocator assigns memory that a task allocates to the queue's stream. A tensor returned
    by `Work.wait` is safe to use and to free, because `wait` records it on the waiting stream. All other tensors that a
    task uses, the caller's included, must stay alive until someone has waited for the task's work.

    Only one thread at a time may submit tasks. A task must not submit to its own queue.

    Args:
        priority: CUDA priority of the stream; lower numbers are served first.
    """

    blocks_host = False

    def __init__(self, *, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(priority=priority)
        # Reused for every submission: a stream that waits for an event waits for its latest recording at that moment,
        # so recording it again does not affect earlier waits.
        self._submitted = torch.cuda.Event()

    def record_event(self) -> Moment:
        """Record an event after the work now queued on the caller's current stream, and return it."""
        return current_stream().record_event()

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Launch `task` on the queue's stream, without blocking the host; see `CommQueue.submit`."""
        if since is None:
            self._submitted.record(current_stream())
            since = self._submitted
        since.wait(self._stream)
        # Entering the stream object directly takes a tenth of the host time of `torch.cuda.stream`.
        with self._stream, _without_gradients():
            for work in after:
                work.join()
            result = task()
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamWork(result, event)


class _ThreadWork(Work[T]):
    """The handle to a task in a thread. Waiting blocks the calling thread."""

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
    """The handle to a task on a stream. Waiting blocks only the caller's current stream."""

    def __init__(self, result: T, event: torch.cuda.Event) -> None:
        super().__init__(result)
        self._event = event

    def join(self) -> T:
        waiting = current_stream()
        self._event.wait(waiting)
        if isinstance(self._result, torch.Tensor):
            # Without this, a freed result's memory could be reused on the queue's stream while this stream reads it.
            self._result.record_stream(waiting)
        return self._result


def current_stream() -> torch.cuda.Stream:
    """Return `torch.cuda.current_stream()` from a cache of one object per stream, in a tenth of the host time."""
    return _current_stream(torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice()))


@functools.cache
def _current_stream(identity: tuple[int, int, int]) -> torch.cuda.Stream:
    """Return the current stream, cached by its identity."""
    return torch.cuda.current_stream()


_NOTHING: AbstractContextManager[object] = nullcontext()


def _without_gradients() -> AbstractContextManager[object]:
    """Return a context in which autograd records nothing; a no-op context if it is already off."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


# ---- other work on the host beside the device ------------------------------------------------------------------------


class HostCopy:
    """Copies a few numbers from the device to the host without waiting for the device.

    On the CPU it keeps `values` itself, which must not be changed afterwards.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[Any]:
        """Wait until the copy is complete, and return the values as Python numbers, in lists like `Tensor.tolist`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def threads_on(device: torch.device, num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads have `device` as their current CUDA device.

    CUDA's current device is per thread, and a new thread starts with the first GPU.

    Args:
        device: CUDA device or CPU.
        num_threads: largest number of threads.
        name: prefix of the threads' names.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(num_threads, name)
    return ThreadPoolExecutor(num_threads, name, initializer=torch.cuda.set_device, initargs=(device,))
