"""CUDA streams without a GPU: code written for them runs on the CPU, and what they would not keep in order shows.

Operations run one after the other as the host starts them, so results are right whatever the streams. Beside that every
operation is noted with the stream that was current, the bytes it reads and writes, and a vector clock per stream: what
of the other streams it is sure to come after. Two things are reported:

- a race: two streams use the same bytes, one of them writes, and no event orders them;
- an early reuse: memory is allocated on a stream, perhaps memory that was freed before, which another stream may still
  use. The caching allocator hands freed memory out again on its own stream at once, unless the other one was recorded
  (`Tensor.record_stream`).

That the host waits for a stream (`.item()`) orders nothing here: nobody should rely on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazpp.parallel import axis
from megazpp.parallel.comm_queue import StreamQueue
from megazpp.zero import wire

Clock = dict[int, int]  # stream -> how many of its operations are done


class Access(NamedTuple):
    stream: int
    time: int
    start: int
    stop: int
    writes: bool
    what: str


@dataclass
class Memory:
    """One allocation."""

    alive: StorageWeakRef
    stream: int
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class Streams(TorchDispatchMode):
    """All streams of a process.

    Attributes:
        found: what is wrong, in words, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: list[Clock] = [{}]
        self.current = Stream(self, 0)
        self.found: list[str] = []
        self._memory: dict[int, Memory] = {}
        self._shared: set[int] = set()  # the keys of what more than one stream has used
        self._freed: dict[int, list[tuple[str, Access]]] = {}  # stream -> who may still use what it gets next

    def new(self, *args: object, **kwargs: object) -> Stream:
        """As `torch.cuda.Stream()`."""
        self.clocks.append({})
        return Stream(self, len(self.clocks) - 1)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream()`."""
        self.free_what_is_gone(self._memory)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        reads, writes = find_uses(func, args, kwargs or {}, result)
        self.use(str(func), reads, writes, result)
        return result

    def use(self, what: str, reads: Sequence[object], writes: Sequence[object], made: object = None) -> None:
        """Note one kernel on the current stream."""
        stream = self.current.index
        clock = self.clocks[stream]
        clock[stream] = time = clock.get(stream, 0) + 1
        what = f"{what} at {caller()}"
        for tensor in tensors_in(made):
            self._memory_of(tensor)
        for used, is_write in ((reads, False), (writes, True)):
            for tensor in tensors_in(used):
                if tensor.numel():
                    memory = self._memory_of(tensor)
                    if memory.stream != stream:
                        self._shared.add(tensor.untyped_storage()._cdata)
                    self._touch(memory, Access(stream, time, *extent(tensor), is_write, what))

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """As `Tensor.record_stream`."""
        self._memory_of(tensor).recorded.add(stream.index)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """FSDP2 frees and allocates parameters' memory by resizing their storage."""
        key = storage._cdata
        if key in self._memory:
            self._free(key)
        if num_bytes:
            self._allocate(storage)

    def free_what_is_gone(self, keys: Iterable[int] | None = None) -> None:
        """Before anything that may order streams, or hand out memory again: what only one stream used can wait."""
        for key in [key for key in (self._shared if keys is None else keys) if self._memory[key].alive.expired()]:
            self._free(key)

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            self._allocate(storage)
        return self._memory[storage._cdata]

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        self.free_what_is_gone()
        stream = self.current.index
        for freed, use in self._freed.pop(stream, ()):
            if not self._done_before(use, stream):
                self._report(f"early reuse on {stream} at {caller()}: {freed}, {use.what} on {use.stream}")
        self._memory[storage._cdata] = Memory(StorageWeakRef(storage), stream)

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        self._shared.discard(key)
        for use in memory.accesses:
            if not any(self._done_before(use, stream) for stream in (memory.stream, *memory.recorded)):
                self._freed.setdefault(memory.stream, []).append((f"freed at {caller()}", use))

    def _touch(self, memory: Memory, new: Access) -> None:
        kept = []
        for old in memory.accesses:
            overlap = old.start < new.stop and new.start < old.stop
            ordered = self._done_before(old, new.stream)
            if overlap and (old.writes or new.writes) and not ordered:
                self._report(f"race: {new.what} on {new.stream}, {old.what} on {old.stream}")
            covered = new.start <= old.start and old.stop <= new.stop and (new.writes or not old.writes)
            if not (covered and ordered):
                kept.append(old)
        memory.accesses = [*kept, new]

    def _done_before(self, use: Access, stream: int) -> bool:
        return use.stream == stream or self.clocks[stream].get(use.stream, 0) >= use.time

    def _report(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(self.streams.clocks[(stream or self.streams.current).index])


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, streams: Streams, index: int) -> None:
        self.streams, self.index = streams, index

    def record_event(self) -> Event:
        event = Event(self.streams)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.streams.free_what_is_gone()
        clock = self.streams.clocks[self.index]
        for stream, time in event.clock.items():
            clock[stream] = max(clock.get(stream, 0), time)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@contextmanager
def simulated_streams() -> Iterator[Streams]:
    """Streams for our queues and for FSDP2, in this process; build the model inside."""
    streams = Streams()
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        streams.resized(storage, size)
        return resize(storage, size)

    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.cpu):  # FSDP2 takes streams from the module of its device
            patch.setattr(module, "Stream", streams.new)
            patch.setattr(module, "Event", lambda **kwargs: Event(streams))
            patch.setattr(module, "stream", streams.using)
            patch.setattr(module, "current_stream", lambda: streams.current)
        patch.setattr(torch.accelerator, "current_stream", lambda: streams.current)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.record(tensor, stream))
        patch.setattr(torch.UntypedStorage, "resize_", resize_)
        patch.setattr(axis, "ThreadQueue", lambda name, timeline: StreamQueue())
        for name in ("pack", "unpack", "unpack_onto", "unpack_sum"):
            patch.setattr(wire, name, note_kernel(streams, name, getattr(wire, name)))
        with streams:
            yield streams


def note_kernel(streams: Streams, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernels for the CPU are C and take pointers, which torch does not see."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        streams.use(name, [args], [kwargs])  # what they write is given by name
        return kernel(*args, **kwargs)

    return noted


def find_uses(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[object], list[object]]:
    """What an operation reads and what it writes."""
    schema = func._schema
    if func.namespace == "c10d":  # these do not say what they write
        named = list(zip((argument.name for argument in schema.arguments), args, strict=False))
        reads = [value for name, value in named if name.startswith("input")]
        return reads, [value for name, value in named if not name.startswith("input")]
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
    reads, writes = [], []
    makes_nothing = "empty" in func.__name__
    for argument, value in given:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes.append(value)
        elif alias is None and not makes_nothing and "_like" not in func.__name__:
            reads.append(value)
    results = result if isinstance(result, tuple) and len(schema.returns) > 1 else (result,)
    for returned, value in zip(schema.returns, results, strict=False):
        if returned.alias_info is None and not makes_nothing:
            writes.append(value)
    return reads, writes


def tensors_in(values: object) -> list[torch.Tensor]:
    leaves = [leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in tree_leaves(values)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte in its storage."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset() * tensor.element_size()
    return first, first + span * tensor.element_size()


def caller() -> str:
    """The line of ours or of FSDP2 that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if "megazpp" in path.parts or "_fully_shard" in path.parts:
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
