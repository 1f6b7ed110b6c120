"""Communication queues, in which the collectives of a mesh axis run in order and overlap with compute.

The file ends with two other tools for overlap of host and device: `HostCopy`, which copies a few numbers to the host
without blocking, and `threads_on`, which makes a pool of threads that use one CUDA device.

A queue runs its tasks one after the other. `submit` returns a `Work`, a handle with which other code waits for the
task. A task may wait for tasks of other queues by their handles.

    CommQueue     runs each task immediately in the thread that calls `submit`, without overlap
    ThreadQueue   CPU: runs tasks in a thread. gloo and torch's kernels release the interpreter lock
    StreamQueue   CUDA: launches tasks on a stream. The host never blocks

Queues cannot deadlock. All ranks run the same program, so they submit the same tasks in the same order. Each queue
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
Moment = Any  # the result of `CommQueue.record_event`: a CUDA event, or None on the CPU


class Work(Generic[T]):
    """A handle to a task in a communication queue, comparable to torch's `dist.Work`.

    The base class holds the result of a task that has already run. Subclasses wait for a thread or a stream.
    """

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """Wait until the task is done and return its result.

        For a task of a `StreamQueue` only the caller's current CUDA stream waits, not the host.

        Raises:
            Exception: the exception that the task raised, if any.
        """
        return self.join()

    def join(self) -> T:
        """Wait for the task like `wait`, but do not record a "wait" span in the timeline.

        Queue tasks that depend on tasks of another queue call `join`, because only blocked compute counts as waiting.
        """
        return self._result


class CommQueue:
    """A communication queue without overlap: `submit` runs each task at once in the calling thread.

    This is also the base class of the queues that overlap tasks with compute.

    Attributes:
        blocks_host: True if `Work.wait` blocks the host, False if it blocks only the current CUDA stream.
    """

    blocks_host = True

    def record_event(self) -> Moment:
        """Record a CUDA event behind the work now queued on the caller's current stream, and return it.

        The caller can pass the event to `submit` as `since`. On the CPU the result is None.
        """
        return None

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Queue `task` behind this queue's earlier tasks, and return a handle with which to wait for it.

        The task runs without autograd. It runs in inference mode if the code that calls `submit` does, because only
        then can the task write to that code's inference tensors.

        Args:
            task: function to run. `Work.wait` returns its result.
            after: handles of tasks, usually of other queues, that must be done before this task starts.
            since: on CUDA, an event from `record_event`. The task then starts as soon as the event is reached. None
                makes the task wait for all work that the caller's current stream now holds. Ignored on the CPU.
        """
        for work in after:
            work.join()
        with _without_gradients():
            return Work(task())


class ThreadQueue(CommQueue):
    """A queue that runs its tasks in a separate thread, for CPU tensors.

    Args:
        name: name of the queue's mesh axis, for the name of the thread and of "wait" spans in the timeline.
        timeline: timeline that gets a "wait" span whenever a caller of `Work.wait` is blocked.
    """

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._name, self._timeline = name, timeline
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"megazpp-{name}")

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Queue `task` for the queue's thread, which runs it in a copy of the caller's context variables.

        `CommQueue.submit` describes the arguments and the result.
        """
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

    Memory rules: memory that a task allocates belongs to the queue's stream in torch's caching allocator. If a task
    returns a tensor, the caller of `Work.wait` may use and free this tensor, because `wait` records it on the waiting
    stream (`Tensor.record_stream`). All other tensors that a task uses, also those that other code has allocated, must
    stay alive until some stream has waited for the task by `Work.wait`.

    Only one thread at a time may submit tasks. A task must not submit to its own queue.

    Args:
        priority: CUDA priority of the stream; lower numbers are served first.
    """

    blocks_host = False

    def __init__(self, *, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(priority=priority)
        # One event serves all submissions. A stream that waits for an event waits for the recording that is the latest
        # when the wait is queued, so a new recording does not affect earlier waits.
        self._submitted = torch.cuda.Event()

    def record_event(self) -> Moment:
        """Record an event after the work now queued on the caller's current stream, and return it."""
        return current_stream().record_event()

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Launch `task` on the queue's CUDA stream without blocking the host.

        `CommQueue.submit` describes the arguments and the result.
        """
        if since is None:
            self._submitted.record(current_stream())
            since = self._submitted
        since.wait(self._stream)
        # `with stream` takes a tenth of the host time of `with torch.cuda.stream(stream)`, and does the same.
        with self._stream, _without_gradients():
            for work in after:
                work.join()
            result = task()
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamWork(result, event)


class _ThreadWork(Work[T]):
    """The handle to a task of a `ThreadQueue`. Waiting blocks the calling thread."""

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
    """The handle to a task of a `StreamQueue`. Waiting blocks only the caller's current CUDA stream, not the host."""

    def __init__(self, result: T, event: torch.cuda.Event) -> None:
        super().__init__(result)
        self._event = event

    def join(self) -> T:
        waiting = current_stream()
        self._event.wait(waiting)
        if isinstance(self._result, torch.Tensor):
            # Without `record_stream`, the allocator could give a freed result's memory to a new task on the queue's
            # stream while the waiting stream still reads the result.
            self._result.record_stream(waiting)
        return self._result


def current_stream() -> torch.cuda.Stream:
    """Return the current CUDA stream from a cache, in a tenth of the host time of `torch.cuda.current_stream()`."""
    return _current_stream(torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice()))


@functools.cache
def _current_stream(identity: tuple[int, int, int]) -> torch.cuda.Stream:
    """Return `torch.cuda.current_stream()`; the cache has one entry per (stream ID, device index, device type)."""
    return torch.cuda.current_stream()


_NOTHING: AbstractContextManager[object] = nullcontext()


def _without_gradients() -> AbstractContextManager[object]:
    """Return a context in which autograd records nothing; a context without effect if autograd is already off."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


# ---- other tools for overlap of host and device ----------------------------------------------------------------------


class HostCopy:
    """An asynchronous copy of a few numbers from the GPU to the host. Only `wait` makes the host wait for the GPU.

    `values` on the CPU are not copied, so they must not change before `wait`.
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
