"""Block quantization on a CPU without a C compiler: eager torch over tiles that stay in cache.

The arithmetic is the reference's, operation for operation; what differs is that every operation writes into scratch of
one tile, so that only the input and the output of a tile cross the memory bus. The scratch is allocated by each call
and shared with nobody: two threads may call at once. Fresh outputs of whole buffers would cost more than the
arithmetic (page faults); a tile's scratch comes back from the allocator warm.

Operations were chosen by their eager speed, in place where possible (half the traffic): an integer maximum over the
bits of a float is twice as fast as a float maximum, aminmax and norms are 30 times slower, and nibbles are put together
and taken apart as bytes, never as floats four times as wide.

Shapes: A, B are the two leading dims, b the blocks of a tile, s the block size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.block_quant.feedback import Feedback, feedback_format
from kernels.formats import BlockFormat

TILE_ELEMENTS = 1 << 19  # 2 MB of fp32 scratch; smaller tiles cost more dispatch than they save traffic (measured)
INVERSE_127 = 1 / 127
SMALLEST_NORMAL = 2.0**-126


def quantize(x: Tensor, fmt: BlockFormat, payload: Tensor, scales: Tensor, feedback: Feedback | None) -> None:
    """Quantize x [A, B, n] into payload and scales; see `kernels.block_quant.quantize_blockwise`."""
    scratch = _Scratch()
    for tile in _tiles(x.shape, fmt.block_size):
        source = tile.data(x)
        work = scratch.floats("work", tile.shape(fmt))
        if feedback is not None:
            values = _copy_padded(source, scratch.floats("values", tile.shape(fmt)))
            _add_error(values, fmt, tile, feedback, scratch)
        else:
            values = source if _is_whole(source, fmt) else _copy_padded(source, work)
        _quantize_tile(values, fmt, tile, payload, scales, feedback, work, scratch)


def dequantize(payload: Tensor, scales: Tensor, fmt: BlockFormat, out: Tensor) -> None:
    """Dequantize into out [A, B, n]; see `kernels.block_quant.dequantize_blockwise`."""
    scratch = _Scratch()
    for tile in _tiles(out.shape, fmt.block_size):
        target = tile.data(out)
        values = target if _is_whole(target, fmt) else scratch.floats("values", tile.shape(fmt))
        _dequantize_tile(payload, scales, fmt, tile, values, scratch)
        if values is not target:
            target.copy_(values[..., : target.shape[-1]])


def dequantize_sum(payload: Tensor, scales: Tensor, fmt: BlockFormat, out: Tensor, accumulate: bool) -> None:
    """Sum payload [K, A, B, bytes] over K into out [A, B, n]; see `kernels.block_quant.dequantize_sum`."""
    scratch = _Scratch()
    for tile in _tiles(out.shape, fmt.block_size):
        target = tile.data(out)
        total = target if _is_whole(target, fmt) else scratch.floats("values", tile.shape(fmt))
        if accumulate and total is not target:
            _copy_padded(target, total)
        _sum_tile(payload, scales, fmt, tile, total, accumulate, scratch)
        if total is not target:
            target.copy_(total[..., : target.shape[-1]])


class _Tile(NamedTuple):
    """Some rows of the leading dims and, of each, the blocks first..stop with `width` elements of data per block."""

    rows: tuple[slice, slice]
    num_rows: tuple[int, int]
    first: int
    stop: int
    width: int
    block_size: int

    def shape(self, fmt: BlockFormat) -> tuple[int, ...]:
        """[A, B, b, s]"""
        return (*self.num_rows, self.stop - self.first, fmt.block_size)

    def data(self, x: Tensor) -> Tensor:
        """View [A, B, b, width] of x [.., n]."""
        start = self.first * self.block_size
        num_blocks = self.stop - self.first
        part = x[(*self.rows, slice(start, start + num_blocks * self.width))]
        return part.unflatten(-1, (num_blocks, self.width))

    def payload(self, payload: Tensor, fmt: BlockFormat) -> Tensor:
        """View int8 [A, B, b, bytes of a block] of payload [.., bytes]."""
        part = payload[(*self.rows, slice(self.first * fmt.block_bytes, self.stop * fmt.block_bytes))]
        return part.view(torch.int8).unflatten(-1, (self.stop - self.first, fmt.block_bytes))

    def scales(self, scales: Tensor) -> Tensor:
        """View [A, B, b] of scales [.., num_blocks]."""
        return scales[(*self.rows, slice(self.first, self.stop))]


def _tiles(shape: tuple[int, ...] | torch.Size, block_size: int) -> Iterator[_Tile]:
    """Cut [A, B, n] into tiles of about TILE_ELEMENTS; short last blocks come as tiles of their own."""
    num_a, num_b, n = shape
    whole, rest = divmod(n, block_size)
    for first, stop, width in ((0, whole, block_size), (whole, whole + 1, rest)):
        num_blocks = stop - first
        if num_blocks * width == 0:
            continue
        limit = TILE_ELEMENTS // block_size
        step_blocks = min(num_blocks, limit)
        step_b = min(num_b, max(1, limit // num_blocks))
        step_a = min(num_a, max(1, limit // (num_blocks * num_b)))
        for a in range(0, num_a, max(step_a, 1)):
            for b in range(0, num_b, max(step_b, 1)):
                rows = (slice(a, min(a + step_a, num_a)), slice(b, min(b + step_b, num_b)))
                num_rows = (rows[0].stop - a, rows[1].stop - b)
                for block in range(first, stop, step_blocks):
                    yield _Tile(rows, num_rows, block, min(block + step_blocks, stop), width, block_size)


class _Scratch:
    """Buffers of one call, by name, as large as the largest tile that asked."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def floats(self, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """fp32 of this shape; its content is whatever the last tile left."""
        return self._take(name, shape, torch.float32)

    def bytes(self, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """int8 of this shape; its content is whatever the last tile left."""
        return self._take(name, shape, torch.int8)

    def _take(self, name: str, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self.buffers[name] = torch.empty(count, dtype=dtype)
        return buffer[:count].view(shape)


def _is_whole(data: Tensor, fmt: BlockFormat) -> bool:
    """Whether a tile's data [A, B, b, width] can be computed on where it is: fp32 without a short block."""
    return data.dtype == torch.float32 and data.shape[-1] == fmt.block_size


def _copy_padded(source: Tensor, out: Tensor) -> Tensor:
    """Copy `source` [A, B, b, width] into out [A, B, b, s] fp32, zeros behind a short block."""
    width = source.shape[-1]
    out[..., :width].copy_(source)
    if width < out.shape[-1]:
        out[..., width:].zero_()
    return out


def _add_error(values: Tensor, fmt: BlockFormat, tile: _Tile, feedback: Feedback, scratch: _Scratch) -> None:
    error = scratch.floats("work", tile.shape(fmt))
    _dequantize_tile(feedback.payload, feedback.scales, feedback_format(fmt), tile, error, scratch)
    values.add_(error)


def _sum_tile(
    payload: Tensor, scales: Tensor, fmt: BlockFormat, tile: _Tile, total: Tensor, add: bool, scratch: _Scratch
) -> None:
    """total (+)= the sum over the first dim, in order, in fp32."""
    part = scratch.floats("work", tile.shape(fmt))
    for k in range(payload.shape[0]):
        first = k == 0 and not add
        _dequantize_tile(payload[k], scales[k], fmt, tile, total if first else part, scratch)
        if not first:
            total.add_(part)


def _dequantize_tile(
    payload: Tensor, scales: Tensor, fmt: BlockFormat, tile: _Tile, out: Tensor, scratch: _Scratch
) -> None:
    """out [A, B, b, s] fp32 = integers * scale."""
    integers = tile.payload(payload, fmt)
    if fmt.bits == 8:
        out.copy_(integers)
    else:
        half = fmt.block_size // 2
        nibbles = scratch.bytes("nibbles", integers.shape)
        # -120 = 0x88 flips the offset binary into two's complement; an arithmetic shift extends the sign
        low = torch.bitwise_left_shift(torch.bitwise_xor(integers, -120, out=nibbles), 4, out=nibbles)
        out[..., :half].copy_(low.bitwise_right_shift_(4))
        high = torch.bitwise_right_shift(torch.bitwise_xor(integers, -120, out=nibbles), 4, out=nibbles)
        out[..., half:].copy_(high)
    out.mul_(tile.scales(scales).float().unsqueeze(-1))


def _quantize_tile(
    values: Tensor,
    fmt: BlockFormat,
    tile: _Tile,
    payload: Tensor,
    scales: Tensor,
    feedback: Feedback | None,
    work: Tensor,
    scratch: _Scratch,
) -> None:
    """Quantize values [A, B, b, s] fp32, with `work` of that shape to compute in; the two may be the same.

    With feedback they are not, and `values` ends up holding the error.
    """
    scale, inverse, finite = _block_scales(values, fmt)
    _store_scales(tile.scales(scales), scale)
    torch.mul(values, inverse.unsqueeze(-1), out=work)
    _store_integers(work, finite, fmt, tile.payload(payload, fmt), scratch)
    if feedback is None:
        return
    if fmt.bits == 4:
        work.clamp_(max=7)
    error, stored = values.sub_(work.mul_(scale.unsqueeze(-1))), feedback_format(fmt)
    scale, inverse, finite = _block_scales(error, stored)
    _store_scales(tile.scales(feedback.scales), scale if finite is None else scale.nan_to_num_(0.0))
    _store_integers(error.mul_(inverse.unsqueeze(-1)), finite, stored, tile.payload(feedback.payload, stored), scratch)


def _store_integers(
    quotient: Tensor, finite: Tensor | None, fmt: BlockFormat, integers: Tensor, scratch: _Scratch
) -> None:
    """Round `quotient` in place, half to even, and write it as the bytes of a payload; not finite becomes 0."""
    quotient.round_()
    if finite is not None:
        quotient.masked_fill_(~finite.unsqueeze(-1), 0.0)
    if fmt.bits == 8:
        integers.copy_(quotient)
        return
    half = fmt.block_size // 2
    nibbles = scratch.bytes("nibbles", quotient.shape).copy_(quotient).clamp_(max=7)
    # (low + 8) + 16 * (high + 8) in the 8 bits of a byte; 136 - 256 = -120
    torch.add(nibbles[..., :half], nibbles[..., half:], alpha=16, out=integers).sub_(120)


def _store_scales(scales: Tensor, scale: Tensor) -> None:
    """Write fp32 that bf16 holds exactly, as bits: torch's own conversion has two different NaNs."""
    scales.view(torch.int16).copy_(scale.view(torch.int32) >> 16)


def _block_scales(values: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scales and their inverses [A, B, b] of values [A, B, b, s], and which are finite (None: all).

    Scales are fp32 that bf16 holds exactly. Not finite: scale NaN, inverse 0. Below the smallest normal: both 0.
    """
    # As integers, floats above zero are in order and floats below it are less than all of them.
    highest = values.view(torch.int32).amax(-1).view(torch.float32)
    lowest = values.amin(-1).neg_()
    peak = torch.maximum(highest, lowest)
    finite = None if peak.amax().item() < math.inf else peak < math.inf
    if fmt.bits == 8:
        scale = peak.mul_(INVERSE_127)
        scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    else:
        scale = peak.mul_(0.125).bfloat16().float()
        scale.copysign_(lowest.sub_(highest))  # a tie gives +0: the negative element sets the sign
    scale.masked_fill_(scale.abs() < SMALLEST_NORMAL, 0.0)
    if finite is not None:
        scale.masked_fill_(~finite, math.nan)
    return scale, scale.reciprocal().nan_to_num_(0.0, 0.0, 0.0), finite
