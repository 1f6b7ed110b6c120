"""Streamed units: layers whose packed weights come from elsewhere for each use (ZeRO-Inference).

    host or disk: message [M], 1/L of a layer --fetch--> [M] --local all-gather--> [L, M]
    weight [rows, columns] --a piece of rows--> compute dtype, in one small buffer --product--> columns of the result

L ranks of a node share a tensor-parallel index; each fetches its part of a layer over its own link, and the rest comes
over the node's wires. Nothing crosses nodes. What is in memory is a ring of 1 + `prefetch` messages, and what does not
stream: the two ends of the model (a tied embedding is used at both) and all vectors, whole on every rank. While a layer
computes, those behind it in the order of use are fetched; behind the last comes the first, for the next pass.

A matrix is never unpacked as a whole: a piece lies in the cache when it is multiplied, and no memory is freed and
mapped again for each use. The same arithmetic runs wherever the messages lie, so that the results are the same bits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.packed_weights.format import MessagePlan, Placed, parameter_slots, plan_message, replace_parameter
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work

PAGE = 4096
_CPU_PIECE, _CUDA_PIECE = 1 << 19, 1 << 26  # elements that are unpacked at once


class StreamPlan(NamedTuple):
    """The message that stays, with the ends and all vectors whole; and of each unit that streams this rank's part."""

    kept: MessagePlan
    streamed: tuple[MessagePlan, ...]

    @property
    def pass_bytes(self) -> int:
        """Bytes that one rank fetches for one pass over the weights."""
        return sum(message.num_bytes for message in self.streamed)

    def device_bytes(self, prefetch: int, *, fetched: bool) -> int:
        """Bytes of weights on the device at most: what stays, the ring, and of several ranks that of gathered units.

        Unless they are fetched from elsewhere, all messages are there.
        """
        ahead, largest = min(prefetch, len(self.streamed) - 1), max(message.num_bytes for message in self.streamed)
        ring, parts = (ahead + 1) * largest, self.streamed[0].num_parts
        return self.kept.num_bytes + (ring if fetched else self.pass_bytes) + (parts * ring if parts > 1 else 0)


def plan_stream(
    model: nn.Module, units: Sequence[nn.Module], num_parts: int, bits: int, dtype: torch.dtype
) -> StreamPlan:
    """Plan which weights of `model`, this tensor-parallel rank's part, stream, and how they are packed.

    Args:
        units: modules whose matrices stream, in the order of use.
        num_parts: ranks of a node that share a unit.
        dtype: of 32 or 16 bits.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    titles = {module: name for name, module in model.named_modules()}
    rest = {name: tuple(p.shape) for p, name in names.items()}
    streamed = []
    for unit in units:
        matrices = [names[p] for p in unit.parameters() if p.dim() == 2 and len(p) > 1]
        shapes = {name: rest.pop(name) for name in matrices if name in rest}
        streamed.append(plan_message(titles[unit], shapes, num_parts, bits, dtype, vectors=None, align=PAGE))
    kept = plan_message("what stays in memory", rest, 1, bits, dtype, vectors=None, align=PAGE)
    return StreamPlan(kept, tuple(streamed))


class StreamedUnits:
    """The `WeightHandle` on a model whose layers stream; it makes the modules' parameters packed weights.

    Args:
        model: on the meta device.
        units: as they were planned.
        kept: [bytes] the message that stays, on the device.
        fetch: begins to bring a unit's message, [M] uint8, onto the device, where it stays until 1 + `prefetch` others
            have been fetched.
        axis: the ranks of the node that share the units.
        dtype: in which the model computes.
        prefetch: units that are fetched ahead.
    Attributes:
        passes: over the weights, begun so far.
        waited_seconds: for which the compute was held by messages that were not there yet (on CUDA: the host).
        keeps_gathered: False, each use fetches anew.
    """

    keeps_gathered = False

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        plan: StreamPlan,
        kept: torch.Tensor,
        fetch: Callable[[int], Work[torch.Tensor]],
        axis: MeshAxis,
        *,
        dtype: torch.dtype,
        prefetch: int,
    ) -> None:
        self.plan, self.passes, self.waited_seconds = plan, 0, 0.0
        self._fetch, self._axis, self._ahead = fetch, axis, min(prefetch, len(units) - 1)
        self._started: dict[int, Work[torch.Tensor]] = {}
        self._gathered: list[torch.Tensor] = []
        self._num_gathered = 0
        if axis.size > 1:
            size = axis.size * max(message.num_bytes for message in plan.streamed)
            self._gathered = [torch.empty(size, dtype=torch.uint8, device=kept.device) for _ in range(self._ahead + 1)]
        slots = parameter_slots(model)

        def place(weight: Placed) -> PackedMatrix:
            matrix = PackedMatrix(weight, dtype, kept.device)
            replace_parameter(slots[weight.name], PackedWeight(matrix))
            return matrix

        for weight in plan.kept.weights:
            if weight.rows is None:
                vector = kept[weight.start : weight.stop].view(torch.float32)
                replace_parameter(slots[weight.name], vector.to(dtype, copy=True).view(weight.shape))
            else:
                place(weight).take(kept.view(1, -1))
        self._matrices = [[place(weight) for weight in message.weights] for message in plan.streamed]
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(functools.partial(self._before, index))
            unit.register_forward_hook(functools.partial(self._after, index))

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Nothing is kept: each use fetches anew."""
        yield

    def reshard(self) -> None:
        """Nothing is kept but the ring."""

    def describe_speed(self, num_tokens: int, seconds: float) -> str:
        """One line about all uses so far, which generated `num_tokens` in `seconds`."""
        speed, waited = (x / seconds if seconds else 0.0 for x in (num_tokens, self.waited_seconds))
        return (
            f" {self.passes} passes fetched {self.passes * self.plan.pass_bytes} bytes; {speed:.1f} tokens/s; "
            f"{waited:.0%} of the time waited for weights"
        )

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        """Have the unit's weights, and start to fetch those behind it."""
        self.passes += index == 0
        if index not in self._started:  # the last forward was left by an exception, or this is the first
            for work in self._started.values():
                work.wait()
            self._started.clear()
            self._start(index)
        received = self._started.pop(index)
        for ahead in range(1, self._ahead + 1):
            following = (index + ahead) % len(self._matrices)
            if following not in self._started:
                self._start(following)
        if not self._axis.queue.blocks_host:
            received = self._gather(received, index)
        started = time.perf_counter()
        messages = received.wait().view(self._axis.size, -1)
        self.waited_seconds += time.perf_counter() - started
        for matrix in self._matrices[index]:
            matrix.take(messages)

    def _after(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        for matrix in self._matrices[index]:
            matrix.parts = None

    def _start(self, index: int) -> None:
        fetched = self._fetch(index)
        # a stream's queue would hold the host until the message is there: it gathers when the message is used
        self._started[index] = self._gather(fetched, index) if self._axis.queue.blocks_host else fetched

    def _gather(self, fetched: Work[torch.Tensor], index: int) -> Work[torch.Tensor]:
        """[M] -> [L, M]"""
        if self._axis.size == 1:
            return fetched
        message = self.plan.streamed[index]
        out = self._gathered[self._num_gathered % len(self._gathered)][: self._axis.size * message.num_bytes]
        out = out.view(self._axis.size, -1)
        self._num_gathered += 1
        return self._axis.queue.submit(
            lambda: self._axis.all_gather(fetched.join().unsqueeze(0), out=out, of=message.name)
        )


class PackedMatrix:
    """A matrix whose packed rows lie in `parts`, [P, part_rows, row_bytes] uint8; None while it is not there."""

    def __init__(self, weight: Placed, dtype: torch.dtype, device: torch.device) -> None:
        assert weight.rows is not None
        self.weight, self.dtype, self.device, self._format = weight, dtype, device, weight.rows
        self.num_rows, self.columns = weight.shape
        self.parts: torch.Tensor | None = None
        self._at_once = max((_CUDA_PIECE if device.type == "cuda" else _CPU_PIECE) // self.columns, 1)

    def take(self, messages: torch.Tensor) -> None:
        """[P, M] uint8."""
        self.parts = self.weight.rows_in(messages)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, rows: range) -> torch.Tensor:
        """x [..., columns] -> x W^T + bias [..., rows], of some rows."""
        flat = x.reshape(-1, self.columns)
        out = flat.new_empty(len(flat), len(rows))
        for first, piece in self._pieces(rows):
            torch.mm(flat, piece.t(), out=out[:, first - rows.start : first - rows.start + len(piece)])
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], len(rows))

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> rows [..., columns]."""
        flat, part_rows = ids.reshape(-1), self.weight.part_rows
        packed = self._require_parts()[flat // part_rows, flat % part_rows]
        out = torch.empty(len(flat), self.columns, dtype=self.dtype, device=self.device)
        return self._format.unpack(packed, out).view(*ids.shape, self.columns)

    def _require_parts(self) -> torch.Tensor:
        if self.parts is None:
            raise RuntimeError(f"{self.weight.name} is not in memory: it is used outside of its unit's forward")
        return self.parts

    def _pieces(self, rows: range) -> Iterator[tuple[int, torch.Tensor]]:
        """The first row of each piece of `rows`, and it in the compute dtype, which the next one overwrites."""
        parts, part_rows = self._require_parts(), self.weight.part_rows
        as_is = self._format.holds(self.dtype)
        size = (0 if as_is else min(self._at_once, part_rows), self.columns)
        buffer = torch.empty(size, dtype=self.dtype, device=self.device)
        for number, part in enumerate(parts):
            begin = number * part_rows
            end = min(part_rows, rows.stop - begin)
            for start in range(max(rows.start - begin, 0), end, self._at_once):
                piece = part[start : min(start + self._at_once, end)]
                unpacked = self._format.exact(piece) if as_is else self._format.unpack(piece, buffer[: len(piece)])
                yield begin + start, unpacked


class PackedWeight(torch.Tensor):
    """Stands for a `PackedMatrix`, or some of its rows, where a module expects its weight.

    It can be multiplied with, a whole one can be looked up in, and a slice of rows is such a weight again.
    """

    matrix: PackedMatrix
    rows: range

    @staticmethod
    def __new__(cls, matrix: PackedMatrix, rows: range | None = None) -> PackedWeight:
        make: Any = torch.Tensor._make_wrapper_subclass
        rows = range(matrix.num_rows) if rows is None else rows
        weight: PackedWeight = make(cls, (len(rows), matrix.columns), dtype=matrix.dtype, device=matrix.device)
        weight.matrix, weight.rows = matrix, rows
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) >= 2 and isinstance(args[1], cls):
            return args[1].matrix.linear(args[0], *args[2:], rows=args[1].rows, **kwargs)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
            return cls(args[0].matrix, args[0].rows[args[1]])
        if func is F.embedding and len(args) == 2 and isinstance(args[1], cls):
            assert len(args[1].rows) == args[1].matrix.num_rows, "rows are looked up in a whole matrix"
            return args[1].matrix.lookup(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of packed weights: they can be multiplied with and looked up")
