"""Building blocks of the Triton kernels for block quantization: loads, stores and arithmetic of one tile in registers.

A tile is TILE_ELEMENTS elements of a segment, which are ROWS blocks of BLOCK elements. Registers hold it as two tensors
[ROWS, HALF], with HALF = BLOCK / 2: the first ("low") and the second ("high") halves of all blocks. In int4, byte j of
a block holds elements j and j + HALF, so this layout needs no shuffles; int8 is as fast in it, so both share the code.
Pointers point to the first element of the tile. `left` is the number of elements from there to the end of the segment.
WHOLE is True if these elements fill the tile, so that loads and stores need no masks.

Rules that keep results bit-identical on GPUs, in the interpreter and in the reference:
- Rounding half to even adds 1.5 * 2^23: one addition, after which the low bits of the sum are the integer.
- Maxima are computed on integer bit patterns, because a floating-point maximum drops NaN.
- Integers become floats by inserting a byte into the mantissa of 2^23, because the GPU's conversion of integers to
  floats (I2F) is slower.
- bf16 is read, and scales are written, as bit patterns. GPU and torch convert NaN differently, and Triton's interpreter
  truncates where it should round.
- Quotients are IEEE divisions, and fused multiply-adds are off (triton.py).
"""
# Compile-time constants are upper case, as is usual in Triton. Triton's compiler needs an `else` after a `return` in a
# constant `if` (RET505). mypy has no types for the arguments of kernels, which are pointers and tensors on the device.
# ruff: noqa: N803, RET505
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import triton
import triton.language as tl

TILE_ELEMENTS = 4096

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
STRIP = tl.constexpr(1024)  # unquantized elements that a program copies at once: in 16 bits, 16 bytes per thread
_TILE = tl.constexpr(TILE_ELEMENTS)
_UNROLL = tl.constexpr(4)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: x + _MAGIC has x rounded to an integer in the low bits of its mantissa
_INVERSE_127, _INVERSE_7 = tl.constexpr(1 / 127), tl.constexpr(1 / 7)
_OWN, _OTHER, _CLIPPED = tl.constexpr(1 / 8.4375), tl.constexpr(1 / 7.4375), tl.constexpr(1 / 9)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)


@triton.jit
def load_sum(
    payload, scales, start, payload_k, scales_k, left,
    BITS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, ACCUMULATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Dequantize one tile of each of K messages, and return the sum of the K results, added in the order 0..K-1.

    The sum is returned as two fp32 tensors [ROWS, HALF]: the first and the second halves of the tile's ROWS blocks,
    where HALF is half of the block size. `payload_k` and `scales_k` are the distances from one message to the next, in
    elements of the pointers `payload` and `scales`. With ACCUMULATE the sum starts with the tile of elements at the
    pointer `start`.
    """
    if ACCUMULATE:
        low, high = load_data(start, left, BLOCK, WHOLE)
        more_low, more_high = load_quantized(payload, scales, left, BITS, BLOCK, WHOLE)
        low += more_low
        high += more_high
    else:
        low, high = load_quantized(payload, scales, left, BITS, BLOCK, WHOLE)
    for _ in tl.range(1, K, loop_unroll_factor=_UNROLL):
        payload += payload_k
        scales += scales_k
        more_low, more_high = load_quantized(payload, scales, left, BITS, BLOCK, WHOLE)
        low += more_low
        high += more_high
    return low, high


@triton.jit
def load_data(data, left, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Load a tile of elements as two fp32 tensors, with zeros after the segment's end.

    The two tensors [ROWS, HALF] have the first and the second halves of the tile's ROWS blocks, where HALF is half of
    the block size.
    """
    low = _offsets(BLOCK, BLOCK // 2, BLOCK)
    high = low + BLOCK // 2
    return to_float(_load(data + low, low < left, WHOLE)), to_float(_load(data + high, high < left, WHOLE))


@triton.jit
def store_data(data, low_values, high_values, left, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Store a tile of fp32 elements at the pointer `data`, in the dtype of `data`, up to the end of the segment.

    `low_values` and `high_values` [ROWS, HALF] have the first and the second halves of the tile's ROWS blocks, where
    HALF is half of the block size.
    """
    low = _offsets(BLOCK, BLOCK // 2, BLOCK)
    high = low + BLOCK // 2
    _store(data + low, _from_float(low_values, data.dtype.element_ty), low < left, WHOLE)
    _store(data + high, _from_float(high_values, data.dtype.element_ty), high < left, WHOLE)


@triton.jit
def load_elements(data, left, WHOLE: tl.constexpr):
    """Load STRIP unquantized elements of a tile in the dtype of `data`, with zeros after the segment's end."""
    offset = tl.arange(0, STRIP)
    return _load(data + offset, offset < left, WHOLE)


@triton.jit
def store_elements(data, values, left, WHOLE: tl.constexpr):
    """Store STRIP unquantized elements of a tile, converted to the dtype of `data`, up to the end of the segment."""
    offset = tl.arange(0, STRIP)
    if values.dtype != data.dtype.element_ty:
        values = _from_float(to_float(values), data.dtype.element_ty)
    _store(data + offset, values, offset < left, WHOLE)


@triton.jit
def load_quantized(payload, scales, left, BITS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Load and dequantize a tile, and return it as two fp32 tensors; fp32 represents integer times scale exactly.

    The two tensors [ROWS, HALF] have the first and the second halves of the tile's ROWS blocks, where HALF is half of
    the block size.
    """
    used = _used(left, BLOCK)
    scale = to_float(_load(scales + tl.arange(0, _TILE // BLOCK), used, WHOLE))[:, None]
    offset = _offsets(BLOCK, BLOCK // 2, BLOCK * BITS // 8)
    low = _load(payload + offset, used[:, None], WHOLE).to(tl.int32)
    if BITS == 4:
        return _byte_to_float(low & 15, 8.0) * scale, _byte_to_float(low >> 4, 8.0) * scale
    else:
        high = _load(payload + offset + BLOCK // 2, used[:, None], WHOLE).to(tl.int32)
        # `_byte_to_float` expects 0..255, so flip the sign bit of int8, which maps -128..127 to 0..255.
        return _byte_to_float(low ^ 0x80, 128.0) * scale, _byte_to_float(high ^ 0x80, 128.0) * scale


@triton.jit
def store_integers(
    payload, shifted_low, shifted_high, finite, left, BITS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    """Store a tile's integers at the pointer `payload`, in a message.

    `shifted_low` and `shifted_high` are results of `round_shifted` for the first and the second halves of the tile's
    blocks. Blocks for which the mask `finite` is False, because they have a NaN or Inf, get the integers 0.
    """
    used = _used(left, BLOCK)[:, None]
    offset = _offsets(BLOCK, BLOCK // 2, BLOCK * BITS // 8)
    zero: tl.constexpr = 8 if BITS == 4 else 0
    low = tl.where(finite[:, None], shifted_low.to(tl.int32, bitcast=True), zero)
    high = tl.where(finite[:, None], shifted_high.to(tl.int32, bitcast=True), zero)
    if BITS == 4:
        _store(payload + offset, ((low & 15) | (high << 4)).to(tl.uint8), used, WHOLE)
    else:
        _store(payload + offset, low.to(tl.uint8), used, WHOLE)
        _store(payload + offset + BLOCK // 2, high.to(tl.uint8), used, WHOLE)


@triton.jit
def store_scales(scales, scale, left, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Store the scales of a tile's blocks as bf16; `scale` [number of blocks] is fp32, but exact in bf16."""
    bits = (scale.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    _store(scales + tl.arange(0, _TILE // BLOCK), bits, _used(left, BLOCK), WHOLE)


@triton.jit
def block_scales(low, high, BITS: tl.constexpr, BLOCK: tl.constexpr, CLIP: tl.constexpr):
    """Return three tensors [ROWS] for the ROWS blocks of a tile: scales, inverses of the scales, and a mask.

    The mask is True for blocks without NaN and Inf. `low` and `high` [ROWS, HALF] have the first and the second halves
    of the blocks. Scales are fp32 that is exact in bf16; `BlockFormat` has the formulas. A scale that would be
    subnormal, and the scale of a block with NaN or Inf, is 0 with inverse 0.
    """
    # ---- compute the absolute value of each block's scale, as bits, and its sign
    if BITS == 8:
        peak = tl.max(tl.maximum(_magnitude(low), _magnitude(high)), axis=1)
        scale = ((peak.to(tl.float32, bitcast=True) * _INVERSE_127).to(tl.int32, bitcast=True) + 0xFFFF) & -65536
        sign = peak * 0
    else:
        # Find the largest and the smallest element of each block by comparing bits as integers. As signed integers,
        # positive floats have the order of their values. As unsigned integers, negative floats are above all
        # positive ones, ordered by magnitude.
        highest = tl.maximum(tl.max(tl.maximum(_bits(low), _bits(high)), axis=1), 0)
        lowest = tl.max(tl.maximum(low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)), axis=1)
        lowest = lowest.to(tl.int32, bitcast=True)
        lowest = tl.where(lowest < 0, lowest & 0x7FFFFFFF, 0)
        peak = tl.maximum(highest, lowest)
        size = peak.to(tl.float32, bitcast=True)
        opposite = tl.minimum(highest, lowest).to(tl.float32, bitcast=True)
        limit = _bits(size * 0.9375)[:, None]
        near = tl.sum((_magnitude(low) >= limit).to(tl.int32) + (_magnitude(high) >= limit).to(tl.int32), axis=1)
        if CLIP:
            scale = _bits(size * _CLIPPED)
        else:
            scale = tl.maximum(_bits(size * _OWN), _bits(opposite * _OTHER))
        # If at least half of a block's elements reach 15/16 of its largest magnitude, the scale is this magnitude / 7.
        scale = tl.where(near * 2 >= BLOCK, _bits(size * _INVERSE_7), scale)
        scale = (scale + 0x7FFF + ((scale >> 16) & 1)) & -65536  # round to the nearest bf16, half to even
        sign = tl.where(highest > lowest, -2147483648, 0)
    # ---- set the scale to 0 where it is subnormal or the block has NaN or Inf, and compute the scale's inverse
    finite = peak < _INFINITY_BITS
    normal = finite & (scale >= _SMALLEST_NORMAL_BITS)
    scale = tl.where(normal, scale | sign, 0).to(tl.float32, bitcast=True)
    inverse = tl.where(normal, tl.div_rn(1.0, tl.where(normal, scale, 1.0)), 0.0)
    return scale, inverse, finite


@triton.jit
def _magnitude(x):
    """Return the bit patterns of an fp32 tensor's absolute values as int32; a larger value has a larger pattern."""
    return _bits(x) & 0x7FFFFFFF


@triton.jit
def _bits(x):
    """Reinterpret an fp32 tensor as int32, because maxima of floats drop NaN and maxima of their bits do not."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def round_shifted(x, inverse, BITS: tl.constexpr, CLIP: tl.constexpr):
    """Round x * inverse half to even to the integers q, and return q + _MAGIC in fp32, whose low bits are q.

    _MAGIC is 1.5 * 2^23. For int4 return q + 8 + _MAGIC, because messages store q + 8. With CLIP, q is clipped to
    -8..7. x [ROWS, HALF] has the first or the second halves of a tile's ROWS blocks, and `inverse` [ROWS] is 1 / scale
    of each block.
    """
    shifted = x * inverse[:, None] + (_MAGIC + (8.0 if BITS == 4 else 0.0))
    if CLIP:
        shifted = tl.minimum(tl.maximum(shifted, _MAGIC), _MAGIC + 15.0)
    return shifted


@triton.jit
def unshift(shifted, BITS: tl.constexpr):
    """Turn results of `round_shifted` into the integers q in fp32, by subtracting _MAGIC, and for int4 also 8."""
    return shifted - (_MAGIC + (8.0 if BITS == 4 else 0.0))


@triton.jit
def _byte_to_float(byte, OFFSET: tl.constexpr):
    """Return byte - OFFSET in fp32, where `byte` is 0..255 in int32.

    The byte is inserted into the mantissa of 2^23, because the GPU's conversion of integers to floats is slower.
    """
    return (byte | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def to_float(x):
    """Convert fp32, bf16 or fp16 to fp32; bf16 is converted by shifting its bits."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _from_float(x, dtype: tl.constexpr):
    """Round fp32 to `dtype`, half to even.

    Triton's interpreter truncates when it converts to bf16. So in the interpreter this function rounds the bit patterns
    itself.
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > _INFINITY_BITS
        return tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Load from `pointers` without a mask if WHOLE is True, otherwise with zeros where `mask` is False."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _store(pointers, values, mask, WHOLE: tl.constexpr):
    """Store all `values` without a mask if WHOLE is True, otherwise only the values where `mask` is True."""
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _offsets(BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Return the offsets in a tile of the first COLUMNS items of each block, [number of blocks, COLUMNS].

    Items are elements or bytes. Consecutive blocks of the tile are STRIDE items apart.
    """
    return tl.arange(0, _TILE // BLOCK)[:, None] * STRIDE + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _used(left, BLOCK: tl.constexpr):
    """Return a mask [number of blocks]: True for the blocks of a tile that begin before the segment's end.

    `left` is the number of elements from the start of the tile to the end of the segment.
    """
    return tl.arange(0, _TILE // BLOCK) * BLOCK < left
