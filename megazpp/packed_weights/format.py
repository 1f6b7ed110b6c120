"""The format of packed weights: the bytes of a row, and the message that holds one rank's rows of several weights.

    message | weight 0: this rank's rows | padding to 16 bytes | weight 1: its rows | ... | padding to `align` |
    row     | payload, 32 or 16 bits per element |
            | payload of blocks, 8 or 4 bits per element | bf16 scales | padding to 16 bytes |

Dim 0 of a weight is split over the parts of a message, one part per rank. Each part has ceil(rows / parts) rows, and
the last ones may be padding. No block spans two rows, so consecutive rows are consecutive bytes. Frozen units
(frozen.py) and streamed units (streamed.py) use the same message. Frozen units gather the parts and unpack whole
weights. Streamed units multiply with a matrix while they unpack it piece by piece.

int4 uses blocks of 32 elements. For each block, the scale with the least squared error among a few candidates is
stored. On normally distributed weights the relative error is 0.082 with 4.5 bits per element, and 0.086 without the
candidates.
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

LoadRows = Callable[[str, slice], torch.Tensor]
Slots = list[tuple[nn.Module, str]]

FORMATS = {8: BlockFormat(8, 64), 4: BlockFormat(4, 32)}  # block format by bits per element

# Candidate scales of an int4 block, as multiples of the scale that represents its largest element exactly. A smaller
# scale clips that element and is finer for the others.
_SHARES = (1.0, 1.1, 1.05, 0.95, 0.9, 0.85, 0.8)
_LOADED_AT_ONCE = 1 << 18  # elements read at once; larger temporary pieces would fragment the heap
_PACKED_AT_ONCE = 1 << 16  # elements packed at once; they fit the CPU's cache


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The format of a row of `columns` elements: blocks of format `fmt`, or elements in `dtype` if `fmt` is None.

    `dtype` is fp32, bf16 or fp16.
    """

    columns: int
    dtype: torch.dtype
    fmt: BlockFormat | None

    @property
    def payload_bytes(self) -> int:
        """Bytes of the elements of a row, without scales."""
        return self.columns * self.dtype.itemsize if self.fmt is None else self.fmt.payload_bytes(self.columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its scales; a multiple of 16 if it is quantized."""
        return self.payload_bytes if self.fmt is None else self._table.layout.message_bytes

    def holds(self, dtype: torch.dtype) -> bool:
        """Return True if a packed row is a plain row of elements in `dtype`."""
        return self.fmt is None and self.dtype == dtype

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Pack [rows, columns] values (fp32, bf16 or fp16, on the CPU) into [rows, row_bytes] uint8."""
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
        """Unpack [..., rows, row_bytes] uint8 into `out` [..., rows, columns], and return `out`.

        Packed rows may have any stride.
        """
        if self.fmt is None:
            return out.copy_(self.exact(packed))
        unpack(packed, self._table, out=out)
        return out

    def exact(self, packed: torch.Tensor) -> torch.Tensor:
        """Return packed rows [..., row_bytes] uint8 as a view [..., columns]; the format must not be quantized."""
        return packed[..., : self.payload_bytes].view(self.dtype)

    @cached_property
    def _table(self) -> RangeTable:
        """Layout of a quantized row, for the kernels."""
        assert self.fmt is not None
        return range_table(plan_row(self.columns, self.fmt), self.dtype)


def plan_rows(columns: int, bits: int, dtype: torch.dtype = torch.bfloat16) -> RowFormat:
    """Return the format of rows with `bits` per element.

    Rows that quantization would not make shorter, because of their scales and padding, stay in `dtype`.

    Args:
        columns: elements of a row.
        bits: 32, 16, 8 or 4.
        dtype: dtype of rows that are not quantized.
    """
    exact = RowFormat(columns=columns, dtype=dtype, fmt=None)
    if bits >= 16:
        return exact
    blocks = RowFormat(columns=columns, dtype=dtype, fmt=FORMATS[bits])
    return blocks if blocks.row_bytes < exact.row_bytes else exact


def at_rest(bits: int | None, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the bits per element of packed weights, and the dtype of weights that are not quantized.

    Args:
        bits: 32, 16, 8 or 4. None: the bits of `dtype`.
        dtype: dtype in which the model computes.
    """
    if bits is None:
        bits = 32 if dtype == torch.float32 else 16
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    return bits, torch.float32 if bits == 32 else half


class Placed(NamedTuple):
    """The place of a weight in a message: from byte `start` on, `part_rows` rows of each part; the last may be padding.

    `rows` is their format. It is None for a weight that every part holds whole in fp32.
    """

    name: str
    shape: tuple[int, ...]
    rows: RowFormat | None
    part_rows: int
    start: int

    @property
    def stop(self) -> int:
        """The byte after the weight's last row."""
        return self.start + (self.part_rows * self.rows.row_bytes if self.rows else 4 * math.prod(self.shape))

    def rows_in(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows in [L, M] messages as a view [L, part_rows, row_bytes]."""
        return messages[:, self.start : self.stop].unflatten(1, (self.part_rows, -1))

    def load(self, load: LoadRows, part: int) -> Iterator[torch.Tensor]:
        """Yield the rows of a part without padding, a few at a time.

        Args:
            load: function that reads rows of dim 0 of a weight.
            part: index of the part.
        Raises:
            ValueError: `load` returned rows of another shape.
        """
        begin, at_once = part * self.part_rows, max(_LOADED_AT_ONCE // max(math.prod(self.shape[1:]), 1), 1)
        end = min(begin + self.part_rows, self.shape[0])
        for start in range(begin, end, at_once):
            rows = slice(start, min(start + at_once, end))
            loaded, expected = load(self.name, rows), (rows.stop - start, *self.shape[1:])
            if tuple(loaded.shape) != expected:
                raise ValueError(f"{self.name}: rows of shape {tuple(loaded.shape)} were loaded, not {expected}")
            yield loaded


class MessagePlan(NamedTuple):
    """The layout of a message: its weights, the parts over which they are split, and the bytes of one part."""

    name: str
    weights: tuple[Placed, ...]
    num_parts: int
    num_bytes: int

    def pieces(self, load: LoadRows, part: int) -> Iterator[torch.Tensor]:
        """Yield a rank's message from the first byte to the last, in pieces: uint8 on the CPU.

        Args:
            load: function that reads rows of dim 0 of a weight, in any dtype.
            part: index of the rank, modulo the number of parts.
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
        """Write a rank's message into `message`, and return it.

        Args:
            message: [M] uint8, the target.
            load: function that reads rows of dim 0 of a weight, in any dtype.
            part: index of the rank, modulo the number of parts.
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
    """Lay out weights in a message.

    Args:
        name: name of the message.
        shapes: shapes of this tensor-parallel rank's parts of the weights, by name.
        num_parts: ranks over which dim 0 is split.
        bits: bits per element of a matrix.
        dtype: dtype of matrices that are not quantized.
        vectors: dtype of vectors and other weights that are not matrices, which are then split over the parts too.
            None: these weights, and matrices of one row, are whole in every part, in fp32.
        align: the message's size is a multiple of this many bytes.
        exact: names of matrices that are stored like vectors, and so are not quantized.
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
    """Return the modules and attribute names that use each parameter of `model`, by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    slots: dict[str, Slots] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            slots[names[parameter]].append((module, attribute))
    return slots


def replace_parameter(slots: Slots, tensor: torch.Tensor) -> None:
    """Replace a parameter by a plain tensor in every module that uses it."""
    for module, attribute in slots:
        delattr(module, attribute)
        setattr(module, attribute, tensor)


def _pack_with_best_scales(values: torch.Tensor, fmt: BlockFormat, payload: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize rows [R, n] fp32 to int4; each block uses the candidate scale with the least squared error.

    Args:
        values: [R, n] fp32.
        fmt: the block format.
        payload: [R, payload bytes] uint8, the target of the integers.
        scales: [R, blocks] bf16, the target of the scales.
    """
    blocks = reference._to_blocks(values, fmt)  # [R, blocks, block_size]
    # the scale that represents the largest element exactly
    own = reference._scale(blocks, fmt)  # its sign is kept, and its value if it is NaN, Inf or 0
    exact = torch.copysign(blocks.abs().amax(-1).div(8).bfloat16().float(), own)
    own = torch.where(own.isfinite() & (own != 0), exact, own)
    # the candidate with the least squared error
    best_scale, best_error, rounded = own, torch.full_like(own, torch.inf), torch.empty_like(blocks)
    for share in _SHARES:
        scale = (own * share).bfloat16().float()
        torch.mul(blocks, _inverse(scale).unsqueeze(-1), out=rounded).round_().clamp_(-8, 7)
        error = rounded.mul_(scale.unsqueeze(-1)).sub_(blocks).square_().sum(-1)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    # integers and scales
    inverse = _inverse(best_scale).unsqueeze(-1)
    integers = torch.where(inverse != 0, blocks, 0.0) * inverse  # blocks whose scale is NaN or 0 get zeros
    payload.copy_(reference._pack(integers.round_().clamp_(-8, 7), fmt))
    reference._store_scales(scales, best_scale)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, and 0 for a scale that is 0 or not finite."""
    return torch.where(scale.isfinite() & (scale != 0), 1 / scale, 0.0)
