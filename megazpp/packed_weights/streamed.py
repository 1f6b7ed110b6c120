"""Streamed units: layers whose packed weights are fetched from host memory or disk for each use (ZeRO-Inference).

    host or disk: message [M], 1/L of a layer --fetch--> [M] --local all-gather--> [L, M]
    weight [rows, columns] --some rows at a time--> compute dtype, in one small buffer --matrix product--> columns of
    the result

The L ranks of a node with the same tensor-parallel index share a layer. Each rank fetches 1/L of the layer, a message
of M bytes, over its own link, and gathers the rest inside the node. Nothing crosses nodes. The device holds a ring of
1 + `prefetch` messages. Every rank also holds the weights that are not streamed, completely: the embedding, the output
layer, all vectors and the routers of experts. While a layer computes, the next layers in the order of use are fetched.
After the last layer, the first layer is fetched for the next pass.

A matrix is never unpacked completely. Its pieces stay in the cache while they are multiplied, and all pieces use the
same buffer. The arithmetic does not depend on the location of the messages, so results are bit-identical for all values
of --weights-device.
"""

from __future__ import annotations

import functools
import itertools
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
from megazpp.tensor_parallel.parameters import exact_parameters

PAGE = 4096  # messages are padded to a multiple of this many bytes, so that each begins at a page of the file on disk
# Maximum number of elements of a packed matrix to unpack at once: on a CPU so few that they stay in its cache, on CUDA
# more.
_CPU_PIECE, _CUDA_PIECE = 1 << 19, 1 << 26


class StreamPlan(NamedTuple):
    """The layouts of the messages that hold a streamed model's packed weights.

    Attributes:
        kept: layout of the message that stays on the device, with the complete embedding, output layer, vectors and
            routers of experts.
        streamed: for each streamed layer, the layout of the message with this rank's rows of the layer's matrices.
    """

    kept: MessagePlan
    streamed: tuple[MessagePlan, ...]

    @property
    def pass_bytes(self) -> int:
        """Bytes that one rank fetches from host memory or disk for one pass over the weights of all layers."""
        return sum(message.num_bytes for message in self.streamed)

    def device_bytes(self, prefetch: int, *, fetched: bool) -> int:
        """Return the largest number of bytes that a streamed model's weights take on the device.

        The device holds the weights that are not streamed, the ring of fetched layers, and if several ranks share a
        layer, a ring of gathered layers.

        Args:
            prefetch: number of layers that are fetched ahead of their use.
            fetched: True if layers are fetched from host memory or disk. False if the packed weights of all layers stay
                on the device, so that there is no ring of fetched layers.
        """
        ahead, largest = min(prefetch, len(self.streamed) - 1), max(message.num_bytes for message in self.streamed)
        ring, parts = (ahead + 1) * largest, self.streamed[0].num_parts
        return self.kept.num_bytes + (ring if fetched else self.pass_bytes) + (parts * ring if parts > 1 else 0)


def plan_stream(
    model: nn.Module, units: Sequence[nn.Module], num_parts: int, bits: int, dtype: torch.dtype
) -> StreamPlan:
    """Plan which weights of a model are streamed, and in which layout they are packed.

    Args:
        model: model on the meta device, with this tensor-parallel rank's shapes.
        units: modules whose matrices are streamed, usually the layers, in the order of use.
        num_parts: number of ranks of a node that share a unit.
        bits: bits per element of packed matrices.
        dtype: dtype of matrices that are not quantized.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    titles, exact = {module: name for name, module in model.named_modules()}, exact_parameters(model)
    rest = {name: tuple(p.shape) for p, name in names.items()}
    streamed = []
    for unit in units:
        matrices = [names[p] for p in unit.parameters() if p.dim() == 2 and len(p) > 1]
        shapes = {name: rest.pop(name) for name in matrices if name in rest and name not in exact}
        streamed.append(plan_message(titles[unit], shapes, num_parts, bits, dtype, vectors=None, align=PAGE))
    kept = plan_message("what stays in memory", rest, 1, bits, dtype, vectors=None, align=PAGE, exact=exact)
    return StreamPlan(kept, tuple(streamed))


class StreamedUnits:
    """The handle to a streamed model; the constructor replaces the model's parameters by packed weights.

    It implements `WeightHandle`, the methods by which evaluation and generation keep or free a model's weights.

    Args:
        model: model on the meta device.
        units: the streamed modules, usually the layers, in the order of `plan.streamed`.
        plan: layouts of the messages. A message holds the packed weights of a unit in one buffer.
        kept: [bytes] uint8, message with the weights that stay on the device.
        fetch: function that starts to copy the message [M] uint8 of a unit, given by its index, to the device. M is the
            message's number of bytes. The (1 + `prefetch`)-th later fetch may overwrite the message.
        axis: axis over the ranks of a node that share the units.
        dtype: dtype in which the model computes.
        prefetch: number of units that are fetched ahead of their use.
    Attributes:
        passes: number of passes over the weights that have begun.
        waited_seconds: seconds for which the compute waited for messages (on CUDA: for which the host waited).
        keeps_gathered: False, because each use fetches the weights again.
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
        # prepare the table of running fetches (`_started`, by the index of the unit) and, if several ranks share a
        # unit, a ring of buffers for the gathered messages
        self.plan, self.passes, self.waited_seconds = plan, 0, 0.0
        self._fetch, self._axis, self._ahead = fetch, axis, min(prefetch, len(units) - 1)
        self._started: dict[int, Work[torch.Tensor]] = {}
        size = axis.size * max(message.num_bytes for message in plan.streamed) if axis.size > 1 else 0
        buffers = [torch.empty(size, dtype=torch.uint8, device=kept.device) for _ in range(self._ahead + 1)]
        self._gathered = itertools.cycle(buffers)
        # replace the model's parameters by packed matrices and plain vectors
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
        # register hooks that wait for a unit's weights before its forward, and release them after the forward
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(functools.partial(self._before, index))
            unit.register_forward_hook(functools.partial(self._after, index))

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Return a context that has no effect.

        The same method of frozen units keeps weights unpacked during a generation. But each use of a streamed layer
        fetches the layer's weights again.
        """
        yield

    def reshard(self) -> None:
        """Do nothing: a streamed model has no unpacked weights that could be freed between uses."""

    def describe_speed(self, num_tokens: int, seconds: float) -> str:
        """Return a line for the log about the speed of all passes so far.

        Args:
            num_tokens: number of tokens that these passes have generated.
            seconds: time that the generation took.
        """
        speed, waited = (x / seconds if seconds else 0.0 for x in (num_tokens, self.waited_seconds))
        return (
            f" {self.passes} passes fetched {self.passes * self.plan.pass_bytes} bytes; {speed:.1f} tokens/s; "
            f"{waited:.0%} of the time spent waiting for weights"
        )

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        """Wait for the weights of the unit `index` before its forward, and start to fetch the units after it.

        This is the forward pre-hook of the unit's module.
        """
        self.passes += index == 0  # a pass over the weights begins with the first unit
        # If no fetch of this unit was started, this is the model's first forward, or an exception has interrupted the
        # previous forward. Then drop all fetches that were started, because they are for other units.
        if index not in self._started:
            for work in self._started.values():
                work.wait()
            self._started.clear()
            self._start(index)
        # start to fetch the next units in the order of use; the first unit of the next pass follows the last unit
        received = self._started.pop(index)
        for ahead in range(1, self._ahead + 1):
            following = (index + ahead) % len(self._matrices)
            if following not in self._started:
                self._start(following)
        # wait for the unit's packed weights of this rank, and of the other ranks of the node that share the unit
        if not self._axis.queue.blocks_host:
            received = self._gather(received, index)
        started = time.perf_counter()
        messages = received.wait().view(self._axis.size, -1)
        self.waited_seconds += time.perf_counter() - started
        for matrix in self._matrices[index]:
            matrix.take(messages)

    def _after(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """Make the packed weights of the unit `index` unavailable after its forward, because their buffer is reused.

        This is the forward hook of the unit's module.
        """
        for matrix in self._matrices[index]:
            matrix.parts = None

    def _start(self, index: int) -> None:
        """Start to fetch this rank's part of the unit `index` from host memory or disk.

        On a CPU also start the all-gather of the parts of all ranks among which the unit is divided.
        """
        fetched = self._fetch(index)
        # On CUDA the queue is a stream, and starting an all-gather would block the host here until the message has
        # arrived. So the all-gather starts when the unit is used.
        self._started[index] = self._gather(fetched, index) if self._axis.queue.blocks_host else fetched

    def _gather(self, fetched: Work[torch.Tensor], index: int) -> Work[torch.Tensor]:
        """Start the all-gather of a unit's messages inside the node, after this rank's message has arrived.

        The work yields [L, M] uint8: the messages of the L ranks that share the unit, M bytes each.

        Args:
            fetched: work that yields this rank's message [M] uint8 on the device.
            index: index of the unit.
        """
        if self._axis.size == 1:
            return fetched
        message = self.plan.streamed[index]
        out = next(self._gathered)[: self._axis.size * message.num_bytes].view(self._axis.size, -1)
        return self._axis.queue.submit(
            lambda: self._axis.all_gather(fetched.join().unsqueeze(0), out=out, of=message.name)
        )


class PackedMatrix:
    """A matrix of packed weights, which is unpacked piece by piece while it is multiplied.

    Args:
        weight: position of the matrix's rows in the messages that hold them.
        dtype: dtype in which the model computes.
        device: device on which the model computes.
    Attributes:
        parts: [P, part_rows, row_bytes] uint8, the packed rows in the messages of P ranks; None while the matrix's unit
            is not in device memory.
    """

    def __init__(self, weight: Placed, dtype: torch.dtype, device: torch.device) -> None:
        assert weight.rows is not None
        self.weight, self.dtype, self.device, self._format = weight, dtype, device, weight.rows
        self.num_rows, self.columns = weight.shape
        self.parts: torch.Tensor | None = None
        self._at_once = max((_CUDA_PIECE if device.type == "cuda" else _CPU_PIECE) // self.columns, 1)

    def take(self, messages: torch.Tensor) -> None:
        """Make this matrix usable: let `parts` be its packed rows in `messages`, without a copy.

        `messages` is [P, M] uint8: the messages of the P ranks that share the matrix, M bytes each.
        """
        self.parts = self.weight.rows_in(messages)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, rows: range) -> torch.Tensor:
        """Compute a linear layer with some rows W of this matrix: x W^T + bias, [..., number of rows].

        Args:
            x: [..., columns] in the compute dtype.
            bias: [number of rows]; None for no bias.
            rows: indices of the rows of this matrix to use.
        """
        flat = x.reshape(-1, self.columns)
        out = flat.new_empty(len(flat), len(rows))
        for first, piece in self._pieces(rows):
            torch.mm(flat, piece.t(), out=out[:, first - rows.start : first - rows.start + len(piece)])
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], len(rows))

    def product(self, x: torch.Tensor, rows: range) -> torch.Tensor:
        """Multiply by some rows W [number of rows, columns] of this matrix: x W, [n, columns].

        Args:
            x: [n, number of rows] in the compute dtype, for any n.
            rows: indices of the rows of this matrix to use.
        """
        out = x.new_zeros(len(x), self.columns)
        for first, piece in self._pieces(rows):
            start = first - rows.start
            out.addmm_(x[:, start : start + len(piece)], piece)
        return out

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up an embedding: return the rows of this matrix with the indices `ids` [...] as [..., columns].

        The result is in the compute dtype.
        """
        flat, part_rows = ids.reshape(-1), self.weight.part_rows
        packed = self._require_parts()[flat // part_rows, flat % part_rows]
        out = torch.empty(len(flat), self.columns, dtype=self.dtype, device=self.device)
        return self._format.unpack(packed, out).view(*ids.shape, self.columns)

    def _require_parts(self) -> torch.Tensor:
        """Return the packed rows `parts`; raise RuntimeError if the matrix's unit is not in device memory."""
        if self.parts is None:
            raise RuntimeError(
                f"the streamed weight {self.weight.name} is not in memory: it is used outside of its layer's forward,"
                " but layers are in memory only during their forward"
            )
        return self.parts

    def _pieces(self, rows: range) -> Iterator[tuple[int, torch.Tensor]]:
        """Unpack some rows of this matrix piece by piece, and yield (index of the piece's first row, piece).

        The index counts rows of this matrix. A piece has shape [rows of the piece, columns of the matrix] and the
        compute dtype. All pieces may use the same buffer, so a piece is valid only until the next piece is requested.

        Args:
            rows: indices of the rows of this matrix to unpack.
        """
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
    """A tensor without memory that replaces a streamed module's weight, and refers to rows of a `PackedMatrix`.

    It supports `F.linear`, slices and a split of its rows (again `PackedWeight`s), `torch.mm` with the rows as its
    second argument, and `F.embedding` on all rows. Other operations raise NotImplementedError.

    Args:
        matrix: the packed matrix.
        rows: indices of the matrix's rows that this tensor refers to; None for all rows.
    """

    matrix: PackedMatrix
    rows: range

    @staticmethod
    def __new__(cls, matrix: PackedMatrix, rows: range | None = None) -> PackedWeight:
        """Make a tensor without memory that has the shape, dtype and device of the unpacked rows."""
        make: Any = torch.Tensor._make_wrapper_subclass
        rows = range(matrix.num_rows) if rows is None else rows
        weight: PackedWeight = make(cls, (len(rows), matrix.columns), dtype=matrix.dtype, device=matrix.device)
        weight.matrix, weight.rows = matrix, rows
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute F.linear, torch.mm, F.embedding, a slice or a split; `__torch_dispatch__` refuses other functions."""
        kwargs = kwargs or {}
        if func is F.linear and len(args) >= 2 and isinstance(args[1], cls):
            return args[1].matrix.linear(args[0], *args[2:], rows=args[1].rows, **kwargs)
        if func is torch.mm and isinstance(args[1], cls):
            return args[1].matrix.product(args[0], args[1].rows)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
            return cls(args[0].matrix, args[0].rows[args[1]])
        if func is torch.Tensor.split and not kwargs.get("dim"):
            matrix, rows, size = args[0].matrix, args[0].rows, args[1]
            return tuple([cls(matrix, rows[first : first + size]) for first in range(0, len(rows), size)])
        if func is F.embedding and len(args) == 2 and isinstance(args[1], cls):
            assert len(args[1].rows) == args[1].matrix.num_rows, "F.embedding needs all rows of the packed matrix"
            return args[1].matrix.lookup(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise NotImplementedError for an operation that packed weights do not support."""
        raise NotImplementedError(
            f"{func} is not supported for packed weights: use F.linear, torch.mm or F.embedding, or load the model"
            " without --weights-device and --weight-bits"
        )
