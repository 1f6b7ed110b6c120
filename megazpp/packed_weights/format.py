"""The format of weights at rest: how rows are packed, and the message that holds one rank's rows of several weights.

    message | weight 0: this rank's rows | to 16 bytes | weight 1: its rows | ... | to a multiple of `align` |
    row     | payload, 32 or 16 bits per element |
            | payload of blocks, 8 or 4 bits | bf16 scales | to a multiple of 16 bytes |

Dim 0 of a weight is spread over the parts of a message, each with ceil(rows / parts) rows, of which the last may be
padding. No block spans two rows, so any run of rows is a run of bytes. The same message serves frozen units
(frozen.py), which gather the parts and unpack whole weights, and streamed ones (streamed.py), whose products unpack
a piece at a time.

int4 at rest: blocks of 32, and of a few scales for each block the one with the least squared error. On normally
distributed weights the relative error is 0.082 with 4.5 bits per element, without the choice 0.086.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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

FORMATS = {8: BlockFormat(8, 64), 4: BlockFormat(4, 32)}

# of the scale with which the largest element of a block is exact: smaller ones clip it and are finer elsewhere
_SHARES = (1.0, 1.1, 1.05, 0.95, 0.9, 0.85, 0.8)
_LOADED_AT_ONCE = 1 << 18  # elements; larger pieces leave holes in the heap, between which the weights lie
_PACKED_AT_ONCE = 1 << 16  # elements: they stay in the cache


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The format of rows of `columns` elements: blocks of `fmt`; where it is None fp32, bf16 or fp16 (`dtype`)."""

    columns: int
    dtype: torch.dtype
    fmt: BlockFormat | None

    @property
    def payload_bytes(self) -> int:
        return self.columns * self.dtype.itemsize if self.fmt is None else self.fmt.payload_bytes(self.columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; where it is quantized a multiple of 16."""
        return self.payload_bytes if self.fmt is None else self._table.layout.message_bytes

    def holds(self, dtype: torch.dtype) -> bool:
        """True if a row is its elements in `dtype`, as they are."""
        return self.fmt is None and self.dtype == dtype

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, columns] fp32, bf16 or fp16 on the CPU -> [rows, row_bytes] uint8."""
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
        """[..., rows, row_bytes] uint8 (any stride of rows) -> out [..., rows, columns]; returned."""
        if self.fmt is None:
            return out.copy_(self.exact(packed))
        unpack(packed, self._table, out=out)
        return out

    def exact(self, packed: torch.Tensor) -> torch.Tensor:
        """[..., row_bytes] uint8 -> [..., columns], a view; where nothing is quantized."""
        return packed[..., : self.payload_bytes].view(self.dtype)

    @cached_property
    def _table(self) -> RangeTable:
        assert self.fmt is not None
        return range_table(plan_row(self.columns, self.fmt), self.dtype)


def plan_rows(columns: int, bits: int, dtype: torch.dtype = torch.bfloat16) -> RowFormat:
    """The format of rows in `bits`; rows so short that blocks would be no shorter stay in `dtype`."""
    exact = RowFormat(columns=columns, dtype=dtype, fmt=None)
    if bits >= 16:
        return exact
    blocks = RowFormat(columns=columns, dtype=dtype, fmt=FORMATS[bits])
    return blocks if blocks.row_bytes < exact.row_bytes else exact


def at_rest(bits: int | None, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """The bits of an element at rest (None: as the model computes, in `dtype`), and the dtype of 32 or 16 bits."""
    if bits is None:
        bits = 32 if dtype == torch.float32 else 16
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    return bits, torch.float32 if bits == 32 else half


class Placed(NamedTuple):
    """A weight in a message, from byte `start` on: `part_rows` rows of each part, of which the last may be padding.

    `rows` is their format; None for a weight that is whole in every part, in fp32.
    """

    name: str
    shape: tuple[int, ...]
    rows: RowFormat | None
    part_rows: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + (self.part_rows * self.rows.row_bytes if self.rows else 4 * math.prod(self.shape))

    def rows_in(self, messages: torch.Tensor) -> torch.Tensor:
        """[L, M] messages -> [L, part_rows, row_bytes], a view."""
        return messages[:, self.start : self.stop].unflatten(1, (self.part_rows, -1))

    def load(self, load: LoadRows, part: int) -> Iterator[torch.Tensor]:
        """The rows of a part, without padding, a piece at a time; ValueError where `load` gives another shape."""
        begin, at_once = part * self.part_rows, max(_LOADED_AT_ONCE // max(math.prod(self.shape[1:]), 1), 1)
        end = min(begin + self.part_rows, self.shape[0])
        for start in range(begin, end, at_once):
            rows = slice(start, min(start + at_once, end))
            loaded, expected = load(self.name, rows), (rows.stop - start, *self.shape[1:])
            if tuple(loaded.shape) != expected:
                raise ValueError(f"{self.name}: rows of shape {tuple(loaded.shape)} were loaded, not {expected}")
            yield loaded


class MessagePlan(NamedTuple):
    """Weights that come together, over how many ranks they are spread, and the bytes of one rank's part of them."""

    name: str
    weights: tuple[Placed, ...]
    num_parts: int
    num_bytes: int

    def pieces(self, load: LoadRows, part: int) -> Iterator[torch.Tensor]:
        """A rank's message, piece by piece from its first byte to its last: uint8 on the CPU.

        `load` gives rows of dim 0 of a weight in any dtype; `part` is the rank, any where there is one part.
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
        """Write the pieces into `message` [M] uint8, which is returned."""
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
) -> MessagePlan:
    """Lay weights out in a message.

    Args:
        shapes: of this tensor-parallel rank's part of each weight.
        bits, dtype: of an element of a matrix, and the dtype of 32 or 16 bits.
        vectors: dtype in which all but matrices are spread over the parts too; None: they, and matrices of one row,
            are whole in every part.
    """
    placed, start = [], 0
    for each, shape in shapes.items():
        rows = None
        if len(shape) == 2 and (vectors is not None or shape[0] > 1):
            rows = plan_rows(shape[1], bits, dtype)
        elif vectors is not None:
            rows = RowFormat(columns=math.prod(shape[1:]), dtype=vectors, fmt=None)
        weight = Placed(each, shape, rows, -(-shape[0] // num_parts), start)
        placed.append(weight)
        start = -(-weight.stop // 16) * 16
    return MessagePlan(name, tuple(placed), num_parts, -(-start // align) * align)


def parameter_slots(model: nn.Module) -> dict[str, Slots]:
    """The modules and attributes that use each parameter of `model`, by its name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    slots: dict[str, Slots] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            slots[names[parameter]].append((module, attribute))
    return slots


def replace_parameter(slots: Slots, tensor: torch.Tensor) -> None:
    """Put a plain tensor in the place of a parameter."""
    for module, attribute in slots:
        delattr(module, attribute)
        setattr(module, attribute, tensor)


def _pack_with_best_scales(values: torch.Tensor, fmt: BlockFormat, payload: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize rows [R, n] fp32 to int4, each block with that of several scales which has the least squared error."""
    blocks = reference._to_blocks(values, fmt)  # [R, blocks, block_size]
    own = reference._scale(blocks, fmt)  # for its sign, and where it is NaN or 0
    exact = torch.copysign(blocks.abs().amax(-1).div(8).bfloat16().float(), own)
    own = torch.where(own.isfinite() & (own != 0), exact, own)
    best_scale, best_error, rounded = own, torch.full_like(own, torch.inf), torch.empty_like(blocks)
    for share in _SHARES:
        scale = (own * share).bfloat16().float()
        torch.mul(blocks, _inverse(scale).unsqueeze(-1), out=rounded).round_().clamp_(-8, 7)
        error = rounded.mul_(scale.unsqueeze(-1)).sub_(blocks).square_().sum(-1)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    inverse = _inverse(best_scale).unsqueeze(-1)
    integers = torch.where(inverse != 0, blocks, 0.0) * inverse  # what is not finite has no integers
    payload.copy_(reference._pack(integers.round_().clamp_(-8, 7), fmt))
    reference._store_scales(scales, best_scale)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.isfinite() & (scale != 0), 1 / scale, 0.0)
