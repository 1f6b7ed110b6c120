"""Simulate CUDA streams on the CPU to find missing synchronization in code that uses them.

Operations run in the order in which the host starts them, so their results are always right. For each operation the
simulation records the current stream, the bytes that the operation reads and writes, and a vector clock: the operations
of other streams that are certain to precede it. The simulation reports two kinds of errors:

- a race: two streams use the same bytes, one of them writes, and no event orders them;
- an early reuse: a stream allocates memory that was freed before and that another stream may still use. The caching
  allocator gives freed memory to its own stream at once, unless the other stream was recorded
  (`Tensor.record_stream`).

A host that waits for a stream (`.item()`) orders nothing in the simulation, because no code should rely on such waits.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazpp.parallel import axis, comm_queue
from megazpp.parallel.comm_queue import StreamQueue
from megazpp.zero import wire

# Number of leading arguments of each kernel that the kernel only reads; it may write the other arguments
KERNELS = {"pack": 2, "unpack": 2, "unpack_onto": 2, "unpack_sum": 2, "encode": 2, "decode": 1}


class Stream:
    """Replacement of `torch.cuda.Stream` in the simulation.

    Attributes:
        clock: for each stream, the number of its operations that are certain to precede this stream's next operation.
        left: context that restores the previous current stream when a `with` block of this stream ends.
        freed: unfinished uses, by other streams, of memory that was freed on this stream.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams, self.number, self.clock = streams, next(streams.numbers), Counter[Stream]()
        self.left = ExitStack()  # restores the previous stream; like torch's stream, this one cannot be entered twice
        self.freed: list[Access] = []  # the next allocation on this stream checks and clears them

    def record_event(self) -> Event:
        event = Event(self.streams)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.streams.free_what_is_gone()
        self.clock |= event.clock

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> None:
        self.left.enter_context(self.streams.using(self))

    def __exit__(self, *error: object) -> None:
        self.left.close()


class Event:
    """Replacement of `torch.cuda.Event`: a copy of the vector clock of the stream that recorded it."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.clock = streams, Counter[Stream]()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or self.streams.current).clock.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.streams.current).wait_event(self)


class Access(NamedTuple):
    """One use of some bytes of an allocation by an operation of a stream.

    Attributes:
        stream: stream on which the operation runs.
        time: number of the operation on its stream.
        start: first byte of the use in the allocation.
        stop: byte after the last one.
        writes: True if the operation writes the bytes.
        what: description of the operation for error messages.
    """

    stream: Stream
    time: int
    start: int
    stop: int
    writes: bool
    what: str

    def is_done_before(self, stream: Stream) -> bool:
        return stream.clock[self.stream] >= self.time


@dataclass
class Memory:
    """One allocation of the simulated caching allocator.

    Attributes:
        alive: weak reference to the storage, which expires when the program drops the storage.
        streams: the stream that allocated the memory, followed by the streams that `record_stream` has named.
        accesses: uses of the memory that later uses may still conflict with.
    """

    alive: StorageWeakRef
    streams: list[Stream]
    accesses: list[Access] = field(default_factory=list)


class Streams(TorchDispatchMode):
    """All simulated streams of a process, and the detector of races and early reuses.

    Attributes:
        numbers: counter that numbers the streams.
        current: stream on which operations run now.
        found: description of each error, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.current = Stream(self)
        self.found: list[str] = []
        self._memory: dict[int, Memory] = {}

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current stream inside the context, like `torch.cuda.stream()`."""
        self.free_what_is_gone()
        with mock.patch.object(self, "current", stream):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.use(str(func), *find_uses(func, args, kwargs or {}, result), result)
        return result

    def kernel(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of this project's kernels, and record its reads and writes on the current stream.

        On the CPU these kernels are C functions that take pointers, so the dispatch mode does not see their arguments.
        """
        reads = KERNELS[kernel.__name__]
        self.use(kernel.__name__, args[:reads], [args[reads:], kwargs])
        return kernel(*args, **kwargs)

    def use(self, what: str, reads: Sequence[object], writes: Sequence[object], made: object = None) -> None:
        """Record one operation on the current stream, and report its races.

        Args:
            what: name of the operation.
            reads: values that the operation reads; only the tensors among them count.
            writes: values that the operation writes.
            made: results, whose new storages count as allocated by the current stream.
        """
        stream = self.current
        stream.clock[stream] += 1
        what = f"{what} on stream {stream.number} at {caller()}"
        for tensor in tensors_in(made):
            self._memory_of(tensor)
        for used, is_write in ((reads, False), (writes, True)):
            for tensor in tensors_in(used):
                if tensor.numel():
                    access = Access(stream, stream.clock[stream], *extent(tensor), is_write, what)
                    self._touch(self._memory_of(tensor), access)

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Record that `stream` uses the tensor's memory, like `Tensor.record_stream`."""
        self._memory_of(tensor).streams.append(stream)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Free the storage's memory and allocate new memory, as when FSDP2 resizes the storage of a parameter.

        A size of 0 only frees.
        """
        if storage._cdata in self._memory:
            self._free(storage._cdata)
        if num_bytes:
            self._allocate(storage)

    def free_what_is_gone(self) -> None:
        """Free the memory of all storages that the program has dropped.

        Call this before anything that may order streams or reuse memory, so that frees come at the right point.
        """
        expired = torch.UntypedStorage._expired
        for key in [key for key, memory in self._memory.items() if expired(memory.alive.cdata)]:
            self._free(key)

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            self._allocate(storage)
        return self._memory[storage._cdata]

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        self.free_what_is_gone()
        stream = self.current
        for use in stream.freed:
            if not use.is_done_before(stream):
                self._report(f"early reuse on stream {stream.number} at {caller()}: {use.what}")
        stream.freed = []
        self._memory[storage._cdata] = Memory(StorageWeakRef(storage), [stream])

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        for use in memory.accesses:
            if not any(map(use.is_done_before, memory.streams)):
                memory.streams[0].freed.append(use._replace(what=f"freed at {caller()}, {use.what}"))

    def _touch(self, memory: Memory, new: Access) -> None:
        kept = []
        for old in memory.accesses:
            ordered = old.is_done_before(new.stream)
            if old.start < new.stop and new.start < old.stop and (old.writes or new.writes) and not ordered:
                self._report(f"race: {new.what}; {old.what}")
            covered = new.start <= old.start and old.stop <= new.stop and (new.writes or not old.writes)
            if not (covered and ordered):
                kept.append(old)
        memory.accesses = [*kept, new]

    def _report(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)


@contextmanager
def simulated_streams() -> Iterator[Streams]:
    """Simulate CUDA streams inside the context, for this project's communication queues and for FSDP2.

    Build the model inside the context, so that FSDP2 takes its streams from the simulation.
    """
    streams, resize = Streams(), torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        streams.resized(storage, size)
        return resize(storage, size)

    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.cpu):  # FSDP2 takes its streams from the module of its device type
            patch.setattr(module, "Stream", lambda *args, **kwargs: Stream(streams))
            patch.setattr(module, "Event", lambda **kwargs: Event(streams))
            patch.setattr(module, "stream", streams.using)
            patch.setattr(module, "current_stream", lambda: streams.current)
        for module in (torch.accelerator, comm_queue):
            patch.setattr(module, "current_stream", lambda: streams.current)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.record(tensor, stream))
        patch.setattr(torch.UntypedStorage, "resize_", resize_)
        patch.setattr(axis, "ThreadQueue", lambda name, timeline: StreamQueue())
        for name in KERNELS:
            patch.setattr(wire, name, partial(streams.kernel, getattr(wire, name)))
        with streams:
            yield streams


def find_uses(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[object], list[object]]:
    """Return (values that a torch operation reads, values that it writes), as its schema declares them.

    Args:
        func: operation as the dispatch mode gets it.
        args: positional arguments.
        kwargs: keyword arguments.
        result: result of the operation; new tensors in it count as written.
    """
    schema, name = func._schema, func.__name__
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
    # collectives do not declare their writes, so every argument that is not an input counts as written
    if func.namespace == "c10d":
        inputs = [value for argument, value in given if argument.name.startswith("input")]
        return inputs, [value for argument, value in given if not argument.name.startswith("input")]
    results = result if isinstance(result, tuple) and len(schema.returns) > 1 else (result,)
    reads = [value for argument, value in given if argument.alias_info is None and "_like" not in name]
    writes = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
    new = [value for each, value in zip(schema.returns, results, strict=False) if each.alias_info is None]
    return ([], writes) if "empty" in name else (reads, [*writes, *new])


def tensors_in(values: object) -> list[torch.Tensor]:
    leaves = [leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in tree_leaves(values)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets of the tensor's first byte in its storage and of the byte after its last one."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset() * tensor.element_size()
    return first, first + span * tensor.element_size()


def caller() -> str:
    """Return "file:line" of the innermost stack frame in this project's code or FSDP2's, or "elsewhere"."""
    lines = ((shown_name(frame.f_code.co_filename), line) for frame, line in traceback.walk_stack(None))
    return next((f"{name}:{line}" for name, line in lines if name), "elsewhere")


@functools.cache
def shown_name(file: str) -> str:
    """Return the name of a file in this project's code or FSDP2's, and "" for other files."""
    path = Path(file)
    return path.name if {"megazpp", "_fully_shard"} & {*path.parts} else ""
