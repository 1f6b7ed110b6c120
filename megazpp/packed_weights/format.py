"""The format of packed weights: the bytes of a row, and the message that holds one rank's rows of several weights.

    message | weight 0: the rank's rows | padding to 16 bytes | weight 1: the rank's rows | ... | padding to `align` |
    row     | elements in 32 or 16 bits, or:
            | quantized integers of blocks, 8 or 4 bits each | bf16 scales of the blocks | padding to 16 bytes |

The rows (dim 0) of a weight are split over the ranks of a node into parts. Each rank's message holds one part of each
weight, with ceil(rows / parts) rows, of which the last may be padding. No block spans two rows, so consecutive rows are
consecutive bytes. Frozen units (frozen.py) and streamed units (streamed.py) use the same messages. Frozen units gather
the messages of all ranks and unpack complete weights. Streamed units multiply with a matrix while they unpack it piece
by piece.

int4 uses blocks of 32 elements. For each block, the scale with the least squared error among a few candidates is
stored. With 4.5 bits per element, the root mean square error of normally distributed weights is 0.082 of their standard
deviation. Without the candidates it would be 0.086.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

import megazpp.kernels.block_quant.reference as reference
from megazpp.kernels.block_quant import RangeTable, pack, range_table, unpack
from megazpp.kernels.formats import BlockFormat, plan_row

LoadRows = Callable[[str, slice], torch.Tensor]  # function that reads a range of rows (dim 0) of the named weight
Slots = list[tuple[nn.Module, str]]  # pairs (module, attribute name) that refer to one parameter

FORMATS = {8: BlockFormat(8, 64), 4: BlockFormat(4, 32)}  # block format of packed weights, by bits per element

# Candidate scales of an int4 block, as multiples of the scale that represents the block's largest element exactly. A
# smaller scale clips the largest element and rounds the other elements less. A larger scale rounds the largest element,
# too, but may suit the others better. The candidate with the smallest squared error of the block is used, in a tie the
# first one.
_SHARES = (1.0, 1.1, 1.05, 0.95, 0.9, 0.85, 0.8)
_LOADED_AT_ONCE = 1 << 18  # maximum number of elements to read at once; larger pieces would fragment the heap
_PACKED_AT_ONCE = 1 << 16  # maximum number of elements to pack at once; they fit the CPU's cache


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The format in which one row of a packed weight is stored.

    Attributes:
        columns: number of elements of the row.
        dtype: fp32, bf16 or fp16, the dtype of the elements if they are not quantized.
        fmt: block format of the quantized elements; None if the elements are stored in `dtype`.
    """

    columns: int
    dtype: torch.dtype
    fmt: BlockFormat | None

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row's elements, without the scales of blocks and without padding to 16 bytes."""
        return self.columns * self.dtype.itemsize if self.fmt is None else self.fmt.payload_bytes(self.columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with the scales of its blocks; a multiple of 16 if the row is quantized."""
        return self.payload_bytes if self.fmt is None else self._table.layout.message_bytes

    def holds(self, dtype: torch.dtype) -> bool:
        """Return True if a packed row consists of unquantized elements in `dtype`, so that it needs no unpacking."""
        return self.fmt is None and self.dtype == dtype

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Pack rows of a weight on the CPU: values [rows, columns] in fp32, bf16 or fp16 -> [rows, row_bytes] uint8."""
        packed = torch.zeros(len(values), self.row_bytes, dtype=torch.uint8)
        at_once = max(_PACKED_AT_ONCE // self.columns, 1)
        for some, to in zip(values.split(at_once), packed.split(at_once), strict=True):
            if self.fmt is None:
                self.exact(to).copy_(some)
            elif self.fmt.bits == 4:
                (row,) = self._table.layout.ranges
                assert row.scales is not None
                first, num_bytes = row.scales
                scales = to[:, first : first + num_bytes].view(torch.bfloat16)
                _pack_with_best_scales(some.float(), self.fmt, to[:, : self.payload_bytes], scales)
            else:
                pack(some.contiguous(), self._table, messages=to)
        return packed

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Unpack packed rows [..., rows, row_bytes] uint8 into `out` [..., rows, columns], and return `out`.

        The packed rows may be a strided view, such as the rows of one weight in the messages of several ranks.
        """
        if self.fmt is None:
            return out.copy_(self.exact(packed))
        unpack(packed, self._table, out=out)
        return out

    def exact(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the elements of unquantized packed rows as a view: [..., row_bytes] uint8 -> [..., columns]."""
        return packed[..., : self.payload_bytes].view(self.dtype)

    @cached_property
    def _table(self) -> RangeTable:
        """Table that tells the block quantization kernels where a quantized row has its integers and scales."""
        assert self.fmt is not None
        return range_table(plan_row(self.columns, self.fmt), self.dtype)


def plan_rows(columns: int, bits: int, dtype: torch.dtype = torch.bfloat16) -> RowFormat:
    """Return the format in which rows of a weight are packed with `bits` per element.

    Rows are stored in `dtype` for 32 and 16 bits. For 8 and 4 bits they are quantized, unless a quantized row with its
    scales and padding would not be shorter than the row in `dtype`.

    Args:
        columns: number of elements of a row.
        bits: 32, 16, 8 or 4.
        dtype: dtype of rows that are not quantized.
    """
    exact = RowFormat(columns=columns, dtype=dtype, fmt=None)
    if bits >= 16:
        return exact
    blocks = RowFormat(columns=columns, dtype=dtype, fmt=FORMATS[bits])
    return blocks if blocks.row_bytes < exact.row_bytes else exact


def at_rest(bits: int | None, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the bits per element in which weights are packed, and the dtype of weights that are not quantized.

    Args:
        bits: value of --weight-bits: 32, 16, 8 or 4; None for the bits of `dtype`, without rounding.
        dtype: dtype in which the model computes.
    """
    if bits is None:
        bits = 32 if dtype == torch.float32 else 16
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    return bits, torch.float32 if bits == 32 else half


class Placed(NamedTuple):
    """The position of a weight in messages of packed weights, the same in the messages of all ranks.

    Attributes:
        name: name of the weight.
        shape: shape of the weight on one tensor-parallel rank.
        rows: format of a packed row; None for a weight that every message holds completely, in fp32.
        part_rows: number of rows per message; in the last messages some rows may be padding.
        start: index of the weight's first byte in a message.
    """

    name: str
    shape: tuple[int, ...]
    rows: RowFormat | None
    part_rows: int
    start: int

    @property
    def stop(self) -> int:
        """Index of the byte after the weight's last row in a message."""
        return self.start + (self.part_rows * self.rows.row_bytes if self.rows else 4 * math.prod(self.shape))

    def rows_in(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the weight's packed rows in L ranks' messages of M bytes: [L, M] -> view [L, part_rows, row_bytes]."""
        return messages[:, self.start : self.stop].unflatten(1, (self.part_rows, -1))

    def load(self, load: LoadRows, part: int) -> Iterator[torch.Tensor]:
        """Read the weight's rows for one rank's message, and yield them, not yet packed, a few at a time.

        Args:
            load: function that reads a range of rows (dim 0) of the named weight.
            part: index of the rank among the ranks over which the weight is split.
        Raises:
            ValueError: `load` returned rows of another shape.
        """
        begin, at_once = part * self.part_rows, max(_LOADED_AT_ONCE // max(math.prod(self.shape[1:]), 1), 1)
        end = min(begin + self.part_rows, self.shape[0])
        for start in range(begin, end, at_once):
            rows = slice(start, min(start + at_once, end))
            loaded, expected = load(self.name, rows), (rows.stop - start, *self.shape[1:])
            if tuple(loaded.shape) != expected:
                raise ValueError(
                    f"{self.name}: rows of shape {tuple(loaded.shape)} were loaded, but the model expects {expected}:"
                    " load weights of a model with the same shapes"
                )
            yield loaded


class MessagePlan(NamedTuple):
    """The layout of messages that hold the packed weights of one unit, one message per rank.

    Attributes:
        name: name of the unit, for the record of communicated bytes.
        weights: position of each weight in a message.
        num_parts: number of ranks, and so of messages, over which the weights' rows are split.
        num_bytes: number of bytes of one message.
    """

    name: str
    weights: tuple[Placed, ...]
    num_parts: int
    num_bytes: int

    def pieces(self, load: LoadRows, part: int) -> Iterator[torch.Tensor]:
        """Load and pack a rank's rows, and yield the rank's message from the first byte to the last, in pieces.

        Each piece is a flat uint8 tensor on the CPU.

        Args:
            load: function that reads a range of rows (dim 0) of the named weight, in any dtype.
            part: index of the rank. It is taken modulo `num_parts`, so with one part all ranks get the same message.
        """
        done, part = 0, part % self.num_parts
        for weight in self.weights:
            yield torch.zeros(weight.start - done, dtype=torch.uint8)
            done = weight.start
            for loaded in weight.load(load, part):
                packed = loaded.float() if weight.rows is None else weight.rows.pack(loaded.reshape(len(loaded), -1))
                yield packed.flatten().view(torch.uint8)
                done += packed.nbytes
        yield torch.zeros(self.num_bytes - done, dtype=torch.uint8)

    def fill(self, message: torch.Tensor, load: LoadRows, part: int) -> torch.Tensor:
        """Load and pack a rank's rows of all weights into `message`, and return `message`.

        Args:
            message: [num_bytes] uint8, which the method fills.
            load: function that reads a range of rows (dim 0) of the named weight, in any dtype.
            part: index of the rank, as for `pieces`.
        """
        done = 0
        for piece in self.pieces(load, part):
            message[done : done + len(piece)] = piece
            done += len(piece)
        return message


def plan_message(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    num_parts: int,
    bits: int,
    dtype: torch.dtype,
    *,
    vectors: torch.dtype | None,
    align: int,
    exact: Collection[str] = (),
) -> MessagePlan:
    """Plan the layout of the messages that hold the packed weights of one unit.

    Args:
        name: name of the unit, for the record of communicated bytes.
        shapes: shapes of the weights on one tensor-parallel rank, by name.
        num_parts: number of ranks over which the weights' rows (dim 0) are split.
        bits: bits per element of matrices: 32, 16, 8 or 4.
        dtype: dtype of matrices that are not quantized.
        vectors: dtype of vectors and other weights that are not matrices; their dim 0 is split over ranks too. With
            None, every message holds these weights, and matrices of one row, completely and in fp32.
        align: number of bytes. The message's size is rounded up to a multiple of this number.
        exact: names of matrices that are stored like vectors, so that they are not quantized.
    """
    placed, start = [], 0
    for each, shape in shapes.items():
        rows = None
        if len(shape) == 2 and each not in exact and (vectors is not None or shape[0] > 1):
            rows = plan_rows(shape[1], bits, dtype)
        elif vectors is not None:
            rows = RowFormat(columns=math.prod(shape[1:]), dtype=vectors, fmt=None)
        weight = Placed(each, shape, rows, -(-shape[0] // num_parts), start)
        placed.append(weight)
        start = -(-weight.stop // 16) * 16
    return MessagePlan(name, tuple(placed), num_parts, -(-start // align) * align)


def parameter_slots(model: nn.Module) -> dict[str, Slots]:
    """Return, for the name of each parameter of `model`, all modules and attribute names that refer to the parameter.

    A tied weight has several such pairs (module, attribute name), and any other weight has one.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    slots: dict[str, Slots] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            slots[names[parameter]].append((module, attribute))
    return slots


def replace_parameter(slots: Slots, tensor: torch.Tensor) -> None:
    """Replace a parameter by a plain tensor, in every module and attribute that refers to the parameter."""
    for module, attribute in slots:
        delattr(module, attribute)
        setattr(module, attribute, tensor)


def _pack_with_best_scales(values: torch.Tensor, fmt: BlockFormat, payload: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize rows of a weight to int4, each block with the candidate scale that has the least squared error.

    Args:
        values: [R, n] fp32, R rows of n elements of the weight.
        fmt: block format with 4 bits.
        payload: [R, bytes] uint8, receives the integers.
        scales: [R, blocks] bf16, receives the scales of the blocks.
    """
    blocks = reference._to_blocks(values, fmt)  # the rows [R, n] in blocks, [R, number of blocks, block_size]
    # `own` is first the usual int4 scale of each block, see `BlockFormat`. If the usual scale is finite and not 0,
    # replace it by the scale that represents the block's largest element exactly, with the usual scale's sign.
    own = reference._scale(blocks, fmt)
    exact = torch.copysign(blocks.abs().amax(-1).div(8).bfloat16().float(), own)
    own = torch.where(own.isfinite() & (own != 0), exact, own)
    # try all candidate scales, and keep for each block the scale with the least squared error
    best_scale, best_error, rounded = own, torch.full_like(own, torch.inf), torch.empty_like(blocks)
    for share in _SHARES:
        scale = (own * share).bfloat16().float()
        torch.mul(blocks, _inverse(scale).unsqueeze(-1), out=rounded).round_().clamp_(-8, 7)
        error = rounded.mul_(scale.unsqueeze(-1)).sub_(blocks).square_().sum(-1)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    # store the best scale and the integers of each block; a block whose scale is 0 or not finite gets the integer 0
    inverse = _inverse(best_scale).unsqueeze(-1)
    integers = torch.where(inverse != 0, blocks, 0.0) * inverse
    payload.copy_(reference._pack(integers.round_().clamp_(-8, 7), fmt))
    reference._store_scales(scales, best_scale)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale elementwise, and 0 for a scale that is 0 or not finite."""
    return torch.where(scale.isfinite() & (scale != 0), 1 / scale, 0.0)
