"""Lossless differences on CUDA: a program codes one block of 256 elements; reference.py says what the bytes are.

Where a body begins depends on the lengths of those before it, so encoding takes two passes with a prefix sum in one
program between them: the first measures, the second places bits by atomic or in zeroed words. Nothing waits for the
host.
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

from megazpp.kernels.weight_delta.reference import BLOCK, EXPONENTS, MOST_QUOTIENTS

VERSION = triton.__version__
NUM_WARPS = 4

_BLOCK = tl.constexpr(BLOCK)
_MOST_POSITIONS, _DENSE, _RAW = tl.constexpr(63), tl.constexpr(64), tl.constexpr(255)
_MOST_QUOTIENTS = tl.constexpr(MOST_QUOTIENTS)
_CHUNK = tl.constexpr(1024)  # blocks that a prefix sum takes at once


def encode(new: Tensor, old: Tensor, kinds: Tensor, halves: Tensor, body: Tensor, numbers: Tensor) -> None:
    """See `reference.encode`."""
    num_blocks = len(kinds)
    plan = torch.empty(5, num_blocks, dtype=torch.int32, device=new.device)  # kind, c, bytes, changed, start
    data = (new.view(torch.int16), old.view(torch.int16), plan)
    constants = _constants(new.dtype)
    _measure_kernel[(num_blocks,)](*data, len(new), num_blocks, **constants)
    _start_kernel[(1,)](plan, kinds, halves, numbers, num_blocks, len(body), num_warps=NUM_WARPS)
    _place_kernel[(num_blocks,)](*data, body.zero_().view(torch.int32), len(new), num_blocks, **constants)


def decode(kinds: Tensor, halves: Tensor, body: Tensor, weights: Tensor) -> None:
    """See `reference.decode`, for rows: kinds and halves [N, B], body [N, C], weights [N, S]."""
    (nodes, num_blocks), size = kinds.shape, weights.shape[1]
    starts = torch.empty(nodes, num_blocks, dtype=torch.int32, device=weights.device)
    strides = (kinds.stride(0), halves.stride(0))
    _find_kernel[(nodes,)](kinds, halves, starts, size, num_blocks, *strides, num_warps=NUM_WARPS)
    _decode_kernel[(num_blocks, nodes)](
        *(kinds, halves, body, starts, weights.view(torch.int16), size, num_blocks),
        *(*strides, body.stride(0), weights.stride(0)),
        **_constants(weights.dtype),
    )


def _constants(dtype: torch.dtype) -> dict[str, int]:
    return {**dict(zip(("SHIFT", "MASK", "ABOVE"), EXPONENTS[dtype], strict=True)), "num_warps": NUM_WARPS}


@triton.jit
def _order(bits):
    """int32 of sign-extended 16-bit patterns."""
    return bits ^ ((bits >> 15) & 0x7FFF)


@triton.jit
def _load(new, old, size, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr):
    """z and exponents [256] of this program's block, and its patterns."""
    index = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = index < size
    after = tl.load(new + index, mask=inside, other=0).to(tl.int32)
    before = tl.load(old + index, mask=inside, other=0).to(tl.int32)
    difference = ((_order(after) - _order(before)) << 16) >> 16
    exponent = tl.where(inside, ((before >> SHIFT) & MASK) + ABOVE, 255)
    return ((difference << 1) ^ (difference >> 15)) & 0xFFFF, exponent, after


@triton.jit
def _parameters(c, exponent):
    return tl.minimum(tl.maximum(c - exponent, 0), 15)


@triton.jit
def _bit_length(x):
    """Return the bit length of an int32 that is not negative."""
    length = 0
    for shift in tl.static_range(31):
        length += ((x >> shift) > 0).to(tl.int32)
    return length


@triton.jit
def _bytes(bits):
    return (bits + 7) // 8


@triton.jit
def _measure_kernel(
    new, old, plan, size, num_blocks, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr
):  # fmt: skip
    """Kind, c, bytes and changed elements of one block."""
    z, exponent, _ = _load(new, old, size, SHIFT, MASK, ABOVE)
    changed = z != 0
    count = tl.sum(changed.to(tl.int32))
    highest = tl.max(tl.where(exponent < 255, exponent, 0))
    lower = tl.minimum(tl.maximum(highest - exponent, 0), 31)
    total = tl.sum((z << 6) >> lower)
    c = tl.minimum(tl.maximum(highest + _bit_length((total >> 3) * 5) - 14, _DENSE), _RAW - 1)
    k = _parameters(c, exponent)
    raw_bytes = 2 * tl.minimum(size - tl.program_id(0) * _BLOCK, _BLOCK)
    bits = _BLOCK + tl.sum(z >> k)
    dense = (_bytes(tl.sum(k)) + _bytes(bits) + 1) // 2 * 2
    kind, best = _RAW, raw_bytes
    if (bits <= _MOST_QUOTIENTS) & (dense < best):
        kind, best = c, dense
    bits = count + tl.sum(tl.where(changed, (z - 1) >> k, 0))
    sparse = (1 + count + _bytes(tl.sum(tl.where(changed, k, 0))) + _bytes(bits) + 1) // 2 * 2
    if (count <= _MOST_POSITIONS) & (bits <= _MOST_QUOTIENTS) & (sparse < raw_bytes) & (sparse <= best):
        kind, best = count, sparse
    if count == 0:
        kind, best = 0, 0
    plan += tl.program_id(0)
    tl.store(plan, kind)
    tl.store(plan + num_blocks, c)
    tl.store(plan + 2 * num_blocks, best)
    tl.store(plan + 3 * num_blocks, count)


@triton.jit
def _start_kernel(plan, kinds, halves, numbers, num_blocks, capacity):
    """Find each body's start, -1 for those without a place, and write the table of blocks; one program."""
    first, wanted, left_out = 0, 0, 0
    while first < num_blocks:  # not `for`: the interpreter of Triton 3.6 takes no argument for the end of a range
        block = first + tl.arange(0, _CHUNK)
        inside = block < num_blocks
        kind = tl.load(plan + block, mask=inside, other=0)
        length = tl.load(plan + 2 * num_blocks + block, mask=inside, other=0)
        changed = tl.load(plan + 3 * num_blocks + block, mask=inside, other=0)
        ends = wanted + tl.cumsum(length, 0)
        fits = ends <= capacity
        tl.store(plan + 4 * num_blocks + block, tl.where(fits, ends - length, -1), mask=inside)
        tl.store(kinds + block, tl.where(fits, kind, 0).to(tl.uint8), mask=inside)
        tl.store(halves + block, tl.where(fits, (length >> 1) & 255, 0).to(tl.uint8), mask=inside)
        wanted += tl.sum(length)
        left_out += tl.sum(tl.where(fits, 0, changed))
        first += _CHUNK
    tl.store(numbers, wanted)
    tl.store(numbers + 1, left_out)


@triton.jit
def _find_kernel(kinds, halves, starts, size, num_blocks, kinds_n, halves_n):
    """Find where each body of a message begins; a program for each message."""
    node, first, end = tl.program_id(0).to(tl.int64), 0, 0
    while first < num_blocks:
        block = first + tl.arange(0, _CHUNK)
        inside = block < num_blocks
        kind = tl.load(kinds + node * kinds_n + block, mask=inside, other=0).to(tl.int32)
        half = tl.load(halves + node * halves_n + block, mask=inside, other=0).to(tl.int32)
        length = 2 * tl.where(kind == _RAW, tl.minimum(size - block * _BLOCK, _BLOCK), half)
        tl.store(starts + node * num_blocks + block, end + tl.cumsum(length, 0) - length, mask=inside)
        end += tl.sum(length)
        first += _CHUNK


@triton.jit
def _put(words, bit, value, width, mask):
    """Write `value` of `width` bits, at most 16, at a bit's place in zeroed words."""
    word, shift = words + (bit >> 5), (bit & 31).to(tl.int32)
    tl.atomic_or(word, value << shift, mask=mask, sem="relaxed")
    rest = (value.to(tl.int64) << shift) >> 32
    tl.atomic_or(word + 1, rest.to(tl.int32), mask=mask & (shift + width > 32), sem="relaxed")


@triton.jit
def _place_kernel(
    new, old, plan, words, size, num_blocks, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr
):  # fmt: skip
    """Write one block's body, if it has a place."""
    plan += tl.program_id(0)
    start = tl.load(plan + 4 * num_blocks).to(tl.int64)
    kind, c, length = tl.load(plan), tl.load(plan + num_blocks), tl.load(plan + 2 * num_blocks)
    if (start >= 0) & (length > 0):
        z, exponent, after = _load(new, old, size, SHIFT, MASK, ABOVE)
        lane = tl.arange(0, _BLOCK)
        begin = 8 * start
        if kind == _RAW:
            _put(words, begin + 16 * lane, after & 0xFFFF, 16, 2 * lane < length)
        else:
            sparse = kind <= _MOST_POSITIONS
            taken = z + tl.where(sparse, 0, 1) > 0
            if sparse:
                _put(words, begin + 8 * lane, lane * 0 + c, 8, lane == 0)
                rank = tl.cumsum(taken.to(tl.int32), 0) - 1
                _put(words, begin + 8 * (1 + rank), lane, 8, taken)
                begin += 8 * (1 + kind)
            value = z - sparse.to(tl.int32)
            k = tl.where(taken, _parameters(c, exponent), 0)
            _put(words, begin + tl.cumsum(k, 0) - k, value & ((1 << k) - 1), k, taken & (k > 0))
            begin += 8 * _bytes(tl.sum(k))
            ends = tl.cumsum(tl.where(taken, (value >> k) + 1, 0), 0)
            _put(words, begin + ends - 1, lane * 0 + 1, 1, taken)


@triton.jit
def _decode_kernel(
    kinds, halves, body, starts, weights, size, num_blocks, kinds_n, halves_n, body_n, weights_n,
    SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """Turn one block of one row from old to new; a lane works for each bit of the quotients."""
    index, node = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind = tl.load(kinds + node * kinds_n + index).to(tl.int32)
    length = 2 * tl.load(halves + node * halves_n + index).to(tl.int32)
    body += node * body_n + tl.load(starts + node * num_blocks + index)
    weights += node * weights_n + index.to(tl.int64) * _BLOCK
    valid = tl.minimum(size - index * _BLOCK, _BLOCK)
    lane = tl.arange(0, _BLOCK)
    if kind == _RAW:
        low = tl.load(body + 2 * lane, mask=lane < valid, other=0).to(tl.int32)
        high = tl.load(body + 2 * lane + 1, mask=lane < valid, other=0).to(tl.int32)
        tl.store(weights + lane, ((low | high << 8) << 16 >> 16).to(tl.int16), mask=lane < valid)
    elif length > 0:
        sparse = kind <= _MOST_POSITIONS
        c, count, head = kind, _BLOCK, 0
        if sparse:
            c, count, head = tl.load(body).to(tl.int32), kind, 1 + kind
        places = _places(body, lane, lane < count, sparse)
        k = _known(weights, places, lane < count, c, valid, SHIFT, MASK, ABOVE)
        remainders = body + head
        quotients = remainders + _bytes(tl.sum(k))
        bit, num_bits = tl.arange(0, _MOST_QUOTIENTS), 8 * (length - head - _bytes(tl.sum(k)))
        one, before = _bit(quotients, bit, num_bits), _bit(quotients, bit - 1, num_bits)
        rank = tl.cumsum(one, 0) - 1
        is_one = (one == 1) & (rank < count)
        place = _places(body, rank, is_one, sparse)
        k = _known(weights, place, is_one, c, valid, SHIFT, MASK, ABOVE)
        remainder = _read(remainders, tl.cumsum(k, 0) - k, k)
        last = tl.associative_scan(tl.where(before == 1, bit - 1, -1), 0, _larger)
        value = ((bit - 1 - last) << k) + remainder + sparse.to(tl.int32)
        changes = is_one & (place < valid)
        old = tl.load(weights + place, mask=changes, other=0).to(tl.int32)
        new = _order(((_order(old) + ((value >> 1) ^ -(value & 1))) << 16) >> 16)
        tl.store(weights + place, new.to(tl.int16), mask=changes)


@triton.jit
def _places(body, rank, mask, sparse):
    """Elements of the block that the values are of."""
    listed = mask & (rank < tl.where(sparse, _BLOCK, 0))
    return tl.where(sparse, tl.load(body + 1 + rank, mask=listed, other=0).to(tl.int32), rank)


@triton.jit
def _known(weights, place, mask, c, valid, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr):
    """Rice parameters, which follow from the old weights; 0 behind the end."""
    mask = mask & (place < valid)
    bits = tl.load(weights + place, mask=mask, other=0).to(tl.int32)
    return tl.where(mask, _parameters(c, ((bits >> SHIFT) & MASK) + ABOVE), 0)


@triton.jit
def _bit(data, bit, num_bits):
    inside = (bit >= 0) & (bit < num_bits)
    return (tl.load(data + (bit >> 3), mask=inside, other=0).to(tl.int32) >> (bit & 7)) & 1


@triton.jit
def _read(data, bit, width):
    """Numbers of `width` bits, at most 15, from any bit on; 0 where the width is 0."""
    data += bit >> 3
    end = (bit & 7) + width
    word = tl.load(data, mask=width > 0, other=0).to(tl.int32)
    word |= tl.load(data + 1, mask=(width > 0) & (end > 8), other=0).to(tl.int32) << 8
    word |= tl.load(data + 2, mask=(width > 0) & (end > 16), other=0).to(tl.int32) << 16
    return (word >> (bit & 7)) & ((1 << width) - 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
