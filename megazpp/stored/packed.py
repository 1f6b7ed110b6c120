"""Weights that stay packed: rows of a matrix in 16, 8 or 4 bits, which products and lookups unpack a piece at a time.

    row    | payload, 32 or 16 bits per element |
           | payload of blocks, 8 or 4 bits | bf16 scales | to a multiple of 16 bytes

    weight [rows, columns] --a piece of rows--> compute dtype, in one small buffer --product--> columns of the result

A matrix that is never unpacked as a whole costs its packed bytes and one piece: the piece lies in the cache when it
is multiplied, and no memory is freed and mapped again for each use. No block spans two rows, so any run of rows is a
run of bytes. `PackedWeight` stands in the place of a module's parameter; linear layers and embeddings compute with it
as with any tensor.

int4 at rest: blocks of 32, and of a few scales for each block the one with the least squared error. On normally
distributed weights the relative error is 0.082 with 4.5 bits per element; without the choice of a scale it is 0.086, in
asymmetric groups of 64 (4.5 bits) 0.090, in asymmetric groups of 32 (5 bits) 0.078.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F

import kernels.block_quant.reference as reference
from kernels.block_quant import RangeTable, pack, range_table, unpack
from kernels.formats import BlockFormat, plan_row

Bits = Literal[32, 16, 8, 4]

FORMATS = {8: BlockFormat(8, 64), 4: BlockFormat(4, 32)}

# of the scale with which the largest element of a block is exact: smaller ones clip it and are finer elsewhere
_SHARES = (1.0, 1.1, 1.05, 0.95, 0.9, 0.85, 0.8)
_CPU_PIECE, _CUDA_PIECE = 1 << 19, 1 << 26  # elements that are unpacked at once
_AT_ONCE = 1 << 16  # elements that are packed at once: they stay in the cache


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The format in which one matrix's rows are packed.

    Attributes:
        columns: elements of a row.
        dtype: of what is not quantized: fp32, bf16 or fp16.
        fmt: None where nothing is.
    """

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
        at_once = max(_AT_ONCE // self.columns, 1)
        for some, to in zip(values.split(at_once), packed.split(at_once), strict=True):
            if self.fmt is None:
                self._exact(to).copy_(some)
            elif self.fmt.bits == 4:
                _pack_with_best_scales(some.float(), self.fmt, *self._parts(to))
            else:
                pack(some.contiguous(), self._table, messages=to)
        return packed

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[..., rows, row_bytes] uint8 (any stride of rows) -> out [..., rows, columns]; returned."""
        if self.fmt is None:
            return out.copy_(self._exact(packed))
        unpack(packed, self._table, out=out)
        return out

    def _exact(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[..., : self.payload_bytes].view(self.dtype)

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (row,) = self._table.layout.ranges
        assert row.scales is not None
        first, num_bytes = row.scales
        return packed[:, : self.payload_bytes], packed[:, first : first + num_bytes].view(torch.bfloat16)

    @cached_property
    def _table(self) -> RangeTable:
        assert self.fmt is not None
        return range_table(plan_row(self.columns, self.fmt), self.dtype)


def plan_rows(columns: int, bits: Bits, dtype: torch.dtype = torch.bfloat16) -> RowFormat:
    """The format of rows in `bits`; rows so short that blocks would be no shorter stay in 16 bits.

    Args:
        dtype: of 32 or 16 bits.
    """
    exact = RowFormat(columns=columns, dtype=dtype, fmt=None)
    if bits >= 16:
        return exact
    blocks = RowFormat(columns=columns, dtype=dtype, fmt=FORMATS[bits])
    return blocks if blocks.row_bytes < exact.row_bytes else exact


def at_rest(bits: Bits | None, dtype: torch.dtype) -> tuple[Bits, torch.dtype]:
    """The bits of an element at rest (None: as the model computes), and the dtype of 32 or 16 bits.

    Args:
        dtype: in which the model computes.
    """
    if bits is None:
        bits = 32 if dtype == torch.float32 else 16
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    return bits, torch.float32 if bits == 32 else half


class PackedMatrix:
    """A matrix whose packed rows lie in P parts of equally many rows, of which the last may be padding.

    Args:
        name: for messages.
        shape: (rows, columns).
        rows: its format.
        part_rows: rows of each part.
        dtype: in which is computed.
        device: where.
    Attributes:
        parts: [P, part_rows, row_bytes] uint8; None while the matrix is not there.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        rows: RowFormat,
        *,
        part_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name, self.shape, self.rows = name, shape, rows
        self.part_rows, self.dtype, self.device = part_rows, dtype, device
        self.parts: torch.Tensor | None = None
        piece = _CUDA_PIECE if device.type == "cuda" else _CPU_PIECE
        self._at_once = max(piece // shape[1], 1)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, rows: range | None = None) -> torch.Tensor:
        """x [..., columns] -> x W^T + bias [..., rows], of all rows or of some."""
        rows = range(self.shape[0]) if rows is None else rows
        flat = x.reshape(-1, self.shape[1])
        out = flat.new_empty(len(flat), len(rows))
        for first, piece in self._pieces(rows):
            torch.mm(flat, piece.t(), out=out[:, first - rows.start : first - rows.start + len(piece)])
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], len(rows))

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> rows [..., columns]."""
        parts = self._require_loaded()
        flat = ids.reshape(-1)
        packed = parts[flat // self.part_rows, flat % self.part_rows]
        out = torch.empty(len(flat), self.shape[1], dtype=self.dtype, device=self.device)
        return self.rows.unpack(packed, out).view(*ids.shape, self.shape[1])

    def whole(self) -> torch.Tensor:
        """[rows, columns], unpacked."""
        return torch.cat([piece.clone() for _, piece in self._pieces(range(self.shape[0]))])

    def _require_loaded(self) -> torch.Tensor:
        if self.parts is None:
            raise RuntimeError(f"{self.name} is not in memory: it is used outside of its unit's forward")
        return self.parts

    def _pieces(self, rows: range) -> Iterator[tuple[int, torch.Tensor]]:
        """The first row of each piece of `rows`, and it in the compute dtype, which the next one overwrites."""
        parts = self._require_loaded()
        as_is = self.rows.holds(self.dtype)
        size = (min(self._at_once, self.part_rows), self.shape[1])
        buffer = None if as_is else torch.empty(size, dtype=self.dtype, device=self.device)
        for number, part in enumerate(parts):
            begin = number * self.part_rows
            end = min(self.part_rows, rows.stop - begin)
            for start in range(max(rows.start - begin, 0), end, self._at_once):
                stop = min(start + self._at_once, end)
                if buffer is None:
                    yield begin + start, self.rows._exact(part[start:stop])
                else:
                    yield begin + start, self.rows.unpack(part[start:stop], buffer[: stop - start])


class PackedWeight(torch.Tensor):
    """Stands for a `PackedMatrix`, or some of its rows, where a module expects its weight.

    It can be multiplied with, a whole one can be looked up in, and a slice of rows is such a weight again.
    """

    matrix: PackedMatrix
    rows: range

    @staticmethod
    def __new__(cls, matrix: PackedMatrix, rows: range | None = None) -> PackedWeight:
        make: Any = torch.Tensor._make_wrapper_subclass
        rows = range(matrix.shape[0]) if rows is None else rows
        weight: PackedWeight = make(cls, (len(rows), matrix.shape[1]), dtype=matrix.dtype, device=matrix.device)
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
            assert len(args[1].rows) == args[1].matrix.shape[0], "rows are looked up in a whole matrix"
            return args[1].matrix.lookup(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of packed weights: they can be multiplied with and looked up")


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
