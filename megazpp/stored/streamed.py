"""Streamed units: layers whose packed weights (packed.py) come from elsewhere for each use: ZeRO-Inference.

One file of more than 300 lines: the ring of buffers, the fetches and the products that use them are one schedule.

    host or disk: message [M], 1/L of a layer --fetch--> [M] --local all-gather--> [L, M] --pieces--> products

L ranks of a node share a tensor-parallel index; each fetches its part of a layer over its own link, and the rest comes
over the node's wires. Nothing crosses nodes. What is in memory is a ring of 1 + `prefetch` messages, and what does not
stream: the two ends of the model (a tied embedding is used at both) and all vectors, whole on every rank.

While a layer computes, those behind it in the order of use are fetched; behind the last comes the first, for the next
pass. The same arithmetic runs wherever the messages lie, so that the results are the same bits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue, Work
from megazpp.stored.messages import MessagePlan, Placed, plan_message
from megazpp.stored.packed import Bits, PackedMatrix, PackedWeight

PAGE = 4096


class StreamPlan(NamedTuple):
    """The plan of what stays and what streams, in integers.

    Attributes:
        kept: the ends and all vectors, whole.
        streamed: a message for each unit, in the order of use; each rank of a node has its part.
    """

    kept: MessagePlan
    streamed: tuple[MessagePlan, ...]

    @property
    def pass_bytes(self) -> int:
        """Bytes that one rank fetches for one pass over the weights."""
        return sum(message.num_bytes for message in self.streamed)

    def device_bytes(self, prefetch: int, *, fetched: bool) -> int:
        """Bytes of weights on the device at most: what stays, the ring, and of several ranks that of gathered units.

        Args:
            fetched: from elsewhere; else all messages are there.
        """
        ahead, largest = min(prefetch, len(self.streamed) - 1), max(message.num_bytes for message in self.streamed)
        ring, parts = (ahead + 1) * largest, self.streamed[0].num_parts
        return self.kept.num_bytes + (ring if fetched else self.pass_bytes) + (parts * ring if parts > 1 else 0)

    @property
    def messages(self) -> tuple[MessagePlan, ...]:
        return (self.kept, *self.streamed)


def plan_stream(
    model: nn.Module, units: Sequence[nn.Module], num_parts: int, bits: Bits, dtype: torch.dtype
) -> StreamPlan:
    """Plan which of the weights of `model` stream, and how they are packed.

    Args:
        model: with the shapes of this tensor-parallel rank's part.
        units: modules whose matrices stream, in the order of use.
        num_parts: ranks of a node that share a unit.
        dtype: of 32 or 16 bits.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    titles = {module: name for name, module in model.named_modules()}
    taken: set[nn.Parameter] = set()
    streamed = []
    for unit in units:
        own = [p for p in dict.fromkeys(unit.parameters()) if p.dim() == 2 and len(p) > 1 and p not in taken]
        taken.update(own)
        shapes = {names[p]: tuple(p.shape) for p in own}
        streamed.append(plan_message(titles[unit], shapes, num_parts, bits, dtype, vectors=None, align=PAGE))
    rest = {name: tuple(p.shape) for p, name in names.items() if p not in taken}
    kept = plan_message("what stays in memory", rest, 1, bits, dtype, vectors=None, align=PAGE)
    return StreamPlan(kept, tuple(streamed))


class Messages(Protocol):
    """The place of this rank's messages."""

    def fetch(self, index: int) -> Work[torch.Tensor]:
        """Begin to bring a unit's message into memory, [M] uint8 on the device; it stays until the ring is round."""


class KeptMessages:
    """Messages in the memory of the device."""

    def __init__(self, messages: Sequence[torch.Tensor]) -> None:
        self._messages = tuple(messages)

    def fetch(self, index: int) -> Work[torch.Tensor]:
        return Work(self._messages[index])


class FetchedMessages:
    """Messages that a thread brings in, in order, into a ring of buffers on the device.

    Args:
        read: fills a buffer on the host with the message of a unit, or gives a tensor that holds it already.
        fills: whether it fills the buffer; else there is none, and what is given is page-locked.
        sizes: bytes of the messages.
        ring: how many are in memory.
        queue: runs the reads.
    Attributes:
        fetched_bytes: so far.
    """

    def __init__(
        self,
        read: Callable[[int, torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        *,
        ring: int,
        queue: CommQueue,
        device: torch.device,
        fills: bool = True,
    ) -> None:
        self._read, self._sizes, self._queue, self._device = read, tuple(sizes), queue, device
        self._cuda, self._next, self.fetched_bytes = device.type == "cuda", 0, 0
        largest, byte = max(sizes), torch.uint8
        buffer = largest if fills else 0
        self._host = [torch.empty(buffer, dtype=byte, pin_memory=self._cuda) for _ in range(ring)]
        self._ring = self._host
        if self._cuda:
            self._ring = [torch.empty(largest, dtype=byte, device=device) for _ in range(ring)]
        self._stream = torch.cuda.Stream(device) if self._cuda else None

    def fetch(self, index: int) -> Work[torch.Tensor]:
        slot, self._next = self._next, (self._next + 1) % len(self._ring)
        free = torch.cuda.current_stream().record_event() if self._cuda else None  # what computed with the slot
        return self._queue.submit(functools.partial(self._bring, index, slot, free))

    def _bring(self, index: int, slot: int, free: torch.cuda.Event | None) -> torch.Tensor:
        size = self._sizes[index]
        message = self._read(index, self._host[slot][:size])
        self.fetched_bytes += size
        if self._stream is None:
            return message
        assert free is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            self._ring[slot][:size].copy_(message, non_blocking=True)
        self._stream.synchronize()
        return self._ring[slot][:size]


class StreamedUnits:
    """The handle on a model whose layers stream; it makes the modules' parameters packed weights.

    Args:
        model: on the meta device.
        units: as they were planned.
        kept: [bytes] the message that stays, on the device.
        axis: the ranks of the node that share the units.
        dtype: in which the model computes.
        prefetch: units that are fetched ahead.
    Attributes:
        passes: over the weights, begun so far.
        keeps_gathered: False, each use fetches anew.
    """

    keeps_gathered = False

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        plan: StreamPlan,
        kept: torch.Tensor,
        messages: Messages,
        axis: MeshAxis,
        *,
        dtype: torch.dtype,
        prefetch: int,
    ) -> None:
        self.plan, self.passes, self._waited = plan, 0, 0.0
        self._messages, self._axis, self._device, self._dtype = messages, axis, kept.device, dtype
        self._ahead = min(prefetch, len(units) - 1)
        self._started: dict[int, Work[torch.Tensor]] = {}
        self._gathered: list[torch.Tensor] = []
        self._num_gathered = 0
        if axis.size > 1:
            size = axis.size * max(message.num_bytes for message in plan.streamed)
            self._gathered = [torch.empty(size, dtype=torch.uint8, device=kept.device) for _ in range(self._ahead + 1)]
        self._kept: list[PackedMatrix] = []
        self._matrices: list[list[tuple[Placed, PackedMatrix]]] = []
        owners: dict[str, list[tuple[nn.Module, str]]] = {}
        names = {parameter: name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                owners.setdefault(names[parameter], []).append((module, attribute))

        def place(weight: Placed, tensor: torch.Tensor) -> None:
            for module, attribute in owners[weight.name]:
                delattr(module, attribute)
                setattr(module, attribute, tensor)

        for weight in plan.kept.weights:
            part = kept[weight.start : weight.stop]
            if weight.rows is None:
                place(weight, part.view(torch.float32).to(dtype, copy=True).view(weight.shape))
            else:
                matrix = self._matrix(weight)
                matrix.parts = part.view(1, weight.part_rows, -1)
                self._kept.append(matrix)
                place(weight, PackedWeight(matrix))
        for index, (unit, message) in enumerate(zip(units, plan.streamed, strict=True)):
            matrices = [(weight, self._matrix(weight)) for weight in message.weights]
            for weight, matrix in matrices:
                place(weight, PackedWeight(matrix))
            self._matrices.append(matrices)
            unit.register_forward_pre_hook(functools.partial(self._before, index))
            unit.register_forward_hook(functools.partial(self._after, index))

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Nothing is kept: each use fetches anew."""
        yield

    def free_gathered(self) -> None:
        """Nothing is kept but the ring."""

    @property
    def device_bytes(self) -> int:
        """Bytes of weights on the device at most."""
        return self.plan.device_bytes(self._ahead, fetched=not isinstance(self._messages, KeptMessages))

    @property
    def waited_seconds(self) -> float:
        """For which the compute was held by messages that were not there yet (on CUDA: the host)."""
        return self._waited

    def _matrix(self, weight: Placed) -> PackedMatrix:
        assert weight.rows is not None
        rows, columns = weight.shape
        return PackedMatrix(
            weight.name,
            (rows, columns),
            weight.rows,
            part_rows=weight.part_rows,
            dtype=self._dtype,
            device=self._device,
        )

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        """Have the unit's weights, and start to fetch those behind it."""
        self.passes += index == 0
        if index not in self._started:  # the last forward was left by an exception, or this is the first
            self._drop_started()
            self._start(index)
        received = self._started.pop(index)
        for ahead in range(1, self._ahead + 1):
            following = (index + ahead) % len(self._matrices)
            if following not in self._started:
                self._start(following)
        if not self._axis.queue.blocks_host:
            received = self._gathered_work(received, index)
        started = time.perf_counter()
        message = received.wait().view(self._axis.size, -1)
        self._waited += time.perf_counter() - started
        for weight, matrix in self._matrices[index]:
            matrix.parts = weight.rows_in(message)

    def _drop_started(self) -> None:
        """Give up what was fetched ahead: its places in the ring are free."""
        for work in self._started.values():
            work.wait()
        self._started.clear()

    def _after(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        for _, matrix in self._matrices[index]:
            matrix.parts = None

    def _start(self, index: int) -> None:
        fetched = self._messages.fetch(index)
        # a stream's queue would hold the host until the message is there: it gathers when the message is used
        self._started[index] = self._gathered_work(fetched, index) if self._axis.queue.blocks_host else fetched

    def _gathered_work(self, fetched: Work[torch.Tensor], index: int) -> Work[torch.Tensor]:
        """[M] -> [L, M]"""
        if self._axis.size == 1:
            return fetched
        shape = (self._axis.size, self.plan.streamed[index].num_bytes)
        out = self._gathered[self._num_gathered % len(self._gathered)][: shape[0] * shape[1]].view(shape)
        self._num_gathered += 1
        name = self.plan.streamed[index].name
        return self._axis.queue.submit(lambda: self._axis.all_gather(fetched.join().unsqueeze(0), out=out, of=name))


class Speed:
    """The time that streamed weights took since this was made."""

    def __init__(self, units: StreamedUnits) -> None:
        self._units, self._passes, self._waited = units, units.passes, units.waited_seconds
        self._started = time.perf_counter()

    def reached(self, num_tokens: int) -> str:
        """One line about this time, in which `num_tokens` were generated."""
        seconds, passes = time.perf_counter() - self._started, self._units.passes - self._passes
        waited = self._units.waited_seconds - self._waited
        return (
            f" {passes} passes fetched {passes * self._units.plan.pass_bytes} bytes; {num_tokens / seconds:.1f} "
            f"tokens/s; {100 * waited / seconds:.0f} % of the time waited for weights"
        )
