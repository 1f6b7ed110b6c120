"""Block quantization on CUDA: one Triton kernel per function, each byte read once and written once.

A program computes one tile of one segment: grid axis 0 walks the tiles of a segment, axes 1 and 2 the segments, whose
strides are the permutation of the hops. Whole tiles run without masks; the last tile of a segment is masked.

The launch configuration is fixed: tiles of 4096 elements and 4 warps give each thread 16 bytes per access and leave
room for nine programs per SM. `enable_fp_fusion` is off because contracting a multiply and an add changes the rounding,
and Triton's default differs between versions. Kernels go to the current CUDA device and stream, which the caller has
set to those of the tensors. Set TRITON_INTERPRET=1 before the import to run the same kernels on CPU
tensors.
"""
# Constants are upper case, as Triton's users write them; what a kernel takes are pointers and tensors of the device,
# which mypy has no types for.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

import kernels.block_quant.triton_tiles as tiles
from kernels.block_quant.feedback import Feedback
from kernels.block_quant.triton_tiles import TILE_ELEMENTS
from kernels.formats import BlockFormat

VERSION = triton.__version__
NUM_WARPS = 4

_TILE = tl.constexpr(TILE_ELEMENTS)


def quantize(
    x: Tensor,
    fmt: BlockFormat,
    payload: Tensor,
    scales: Tensor,
    feedback: Feedback | None = None,
    base: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """Quantize x [A, B, n]; see `kernels.block_quant.quantize_blockwise`."""
    minus = x if base is None else base
    error, error_scales = feedback or (payload, scales)
    _quantize_kernel[_grid(x.shape)](
        *(x, minus, payload, scales, error, error_scales),
        *(x.shape[-1], *_strides(x), *_strides(minus)),
        *(*_strides(payload), *_strides(scales), *_strides(error), *_strides(error_scales)),
        *(beta, 1 - beta),
        **_constants(fmt),
        BASE=base is not None,
        FEEDBACK=feedback is not None,
        AVERAGE=beta > 0,
    )


def dequantize(payload: Tensor, scales: Tensor, fmt: BlockFormat, out: Tensor) -> None:
    """Dequantize into out [A, B, n]; see `kernels.block_quant.dequantize_blockwise`."""
    dequantize_sum(payload.unsqueeze(0), scales.unsqueeze(0), fmt, out, False)


def dequantize_sum(payload: Tensor, scales: Tensor, fmt: BlockFormat, out: Tensor, accumulate: bool) -> None:
    """Sum payload [K, A, B, bytes] into out [A, B, n]; see `kernels.block_quant.dequantize_sum`."""
    _dequantize_sum_kernel[_grid(out.shape)](
        *(payload, scales, out),
        *(out.shape[-1], *_strides(payload), *_strides(scales), *_strides(out)),
        **_constants(fmt),
        K=payload.shape[0],
        ACCUMULATE=accumulate,
    )


def _grid(shape: tuple[int, ...] | torch.Size) -> tuple[int, int, int]:
    """(tiles of a segment, B, A) of data [A, B, n]."""
    return -(-shape[2] // TILE_ELEMENTS), shape[1], shape[0]


def _strides(x: Tensor) -> list[int]:
    """Strides of all dims but the last; 0 where they mean nothing, so that they do not cause another compilation."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]


def _constants(fmt: BlockFormat) -> dict[str, int | bool]:
    return {"BITS": fmt.bits, "BLOCK": fmt.block_size, "num_warps": NUM_WARPS, "enable_fp_fusion": False}


# In the kernels: n elements of a segment; name_a, name_b and name_k are the strides of `name`, `left` the elements from
# the tile to the end of the segment. Strides of scales are not specialized on: their alignment buys nothing.


@triton.jit(do_not_specialize=["scales_a", "scales_b", "error_scales_a", "error_scales_b"])
def _quantize_kernel(
    x, base, payload, scales, error, error_scales,
    n, x_a, x_b, base_a, base_b, payload_a, payload_b, scales_a, scales_b,
    error_a, error_b, error_scales_a, error_scales_b, beta, rest,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BASE: tl.constexpr, FEEDBACK: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile: x, or x - base where BASE, or x and the error of the last step where FEEDBACK.

    With AVERAGE the new error has the share `rest` in what is kept, the last one `beta`.
    """
    a, b, tile, left = _place(n)
    first = tile * (_TILE // BLOCK)
    x += a * x_a + b * x_b + tile * _TILE
    base += a * base_a + b * base_b + tile * _TILE
    payload += a * payload_a + b * payload_b + first * (BLOCK * BITS // 8)
    scales += a * scales_a + b * scales_b + first
    error += a * error_a + b * error_b + first * BLOCK
    error_scales += a * error_scales_a + b * error_scales_b + first
    if left >= _TILE:
        _quantize_tile(x, base, payload, scales, error, error_scales, left, beta, rest,
                       BITS, BLOCK, BASE, FEEDBACK, AVERAGE, True)  # fmt: skip
    else:
        _quantize_tile(x, base, payload, scales, error, error_scales, left, beta, rest,
                       BITS, BLOCK, BASE, FEEDBACK, AVERAGE, False)  # fmt: skip


@triton.jit
def _quantize_tile(
    x, base, payload, scales, error, error_scales, left, beta, rest, BITS: tl.constexpr, BLOCK: tl.constexpr,
    BASE: tl.constexpr, FEEDBACK: tl.constexpr, AVERAGE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    low, high = tiles.load_data(x, left, BLOCK, WHOLE)
    if BASE:
        base_low, base_high = tiles.load_data(base, left, BLOCK, WHOLE)
        low -= base_low
        high -= base_high
    if FEEDBACK:
        error_low, error_high = tiles.load_quantized(error, error_scales, left, 8, BLOCK, WHOLE)
        low += error_low
        high += error_high
    scale, inverse, finite = tiles.block_scales(low, high, BITS)
    shifted_low = tiles.round_shifted(low, inverse, BITS)
    shifted_high = tiles.round_shifted(high, inverse, BITS)
    tiles.store_integers(payload, shifted_low, shifted_high, finite, left, BITS, BLOCK, WHOLE)
    tiles.store_scales(scales, tl.where(finite, scale, float("nan")), left, BLOCK, WHOLE)
    if FEEDBACK:
        low -= tiles.unshift(shifted_low, BITS) * scale[:, None]
        high -= tiles.unshift(shifted_high, BITS) * scale[:, None]
        if AVERAGE:
            low = low * rest + error_low * beta
            high = high * rest + error_high * beta
        scale, inverse, error_finite = tiles.block_scales(low, high, 8)
        finite = finite & error_finite
        low = tiles.round_shifted(low, inverse, 8)
        high = tiles.round_shifted(high, inverse, 8)
        tiles.store_integers(error, low, high, finite, left, 8, BLOCK, WHOLE)
        tiles.store_scales(error_scales, tl.where(finite, scale, 0.0), left, BLOCK, WHOLE)


@triton.jit(do_not_specialize=["scales_k", "scales_a", "scales_b"])
def _dequantize_sum_kernel(
    payload, scales, out,
    n, payload_k, payload_a, payload_b, scales_k, scales_a, scales_b, out_a, out_b,
    BITS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Sum one tile over K segments, starting from `out` where ACCUMULATE."""
    a, b, tile, left = _place(n)
    first = tile * (_TILE // BLOCK)
    payload += a * payload_a + b * payload_b + first * (BLOCK * BITS // 8)
    scales += a * scales_a + b * scales_b + first
    out += a * out_a + b * out_b + tile * _TILE
    if left >= _TILE:
        low, high = tiles.load_sum(payload, scales, out, payload_k, scales_k, left, BITS, BLOCK, K, ACCUMULATE, True)
        tiles.store_data(out, low, high, left, BLOCK, True)
    else:
        low, high = tiles.load_sum(payload, scales, out, payload_k, scales_k, left, BITS, BLOCK, K, ACCUMULATE, False)
        tiles.store_data(out, low, high, left, BLOCK, False)


@triton.jit
def _place(n):
    """Leading indices of this program's segment, its tile in it, and the elements from there to the end."""
    tile = tl.program_id(0).to(tl.int64)  # offsets may pass 2^31
    return tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tile, n - tile * _TILE
