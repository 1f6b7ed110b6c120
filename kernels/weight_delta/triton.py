"""Lossless deltas of CUDA tensors in Triton: each program encodes one block of weights; format.py defines the bytes.

A block's body, its encoded changes, starts where the bodies of all earlier blocks end. So encoding takes three kernels.
The first measures the bodies, and the second computes the prefix sum of their lengths in one program. The third writes
the bodies into zeroed 32-bit words by atomic OR operations. The host never waits.
"""
# Compile-time constants are upper case, as is usual in Triton. mypy has no types for the arguments of kernels, which
# are pointers and tensors on the device.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megazpp.kernels.weight_delta.format import BLOCK, DENSE, EXPONENTS, MOST_POSITIONS, MOST_QUOTIENTS, RAW

VERSION = triton.__version__
NUM_WARPS = 4

_BLOCK = tl.constexpr(BLOCK)
_MOST_POSITIONS, _DENSE, _RAW = tl.constexpr(MOST_POSITIONS), tl.constexpr(DENSE), tl.constexpr(RAW)
_MOST_QUOTIENTS = tl.constexpr(MOST_QUOTIENTS)
_CHUNK = tl.constexpr(1024)  # blocks of weights per iteration of the prefix sum over the lengths of their bodies


def encode(new: Tensor, old: Tensor, kinds: Tensor, halves: Tensor, body: Tensor, numbers: Tensor) -> None:
    """Encode the lossless delta from old to new weights, in Triton; see `native.encode`."""
    num_blocks = len(kinds)
    # Each row of `plan` has one number per block of weights. The five rows are: the kind of the body, which holds the
    # encoded changes; the exponent c; the bytes of the body; the number of changed elements; and the body's offset in
    # bytes from the first body of the message, or -1 if the body does not fit into the message.
    plan = torch.empty(5, num_blocks, dtype=torch.int32, device=new.device)
    data = (new.view(torch.int16), old.view(torch.int16), plan)
    constants = _constants(new.dtype)
    _measure_kernel[(num_blocks,)](*data, len(new), num_blocks, **constants)
    _start_kernel[(1,)](plan, kinds, halves, numbers, num_blocks, len(body), num_warps=NUM_WARPS)
    _place_kernel[(num_blocks,)](*data, body.zero_().view(torch.int32), len(new), num_blocks, **constants)


def decode(kinds: Tensor, halves: Tensor, body: Tensor, weights: Tensor) -> None:
    """Apply the lossless deltas of N messages to rows of old weights in place, in Triton; see `native.decode`.

    Shapes, for N messages with B blocks, C bytes of bodies and S weights each: kinds and halves [N, B], body [N, C],
    weights [N, S].
    """
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
    """Return keyword arguments of the kernels: how to extract exponents from weights of `dtype`, and `num_warps`."""
    return {**dict(zip(("SHIFT", "MASK", "ABOVE"), EXPONENTS[dtype], strict=True)), "num_warps": NUM_WARPS}


@triton.jit
def _order(bits):
    """Map 16-bit floats, sign-extended bit patterns in int32, to int32 numbers in the order of the values."""
    return bits ^ ((bits >> 15) & 0x7FFF)


@triton.jit
def _load(new, old, size, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr):
    """Load this program's block of weights, and return its changes z, old exponents and new bit patterns, each [256].

    z is the zigzag-encoded change of a weight, as format.py defines it. An old exponent is the exponent of the old
    weight plus ABOVE, the offset of the dtype in `EXPONENTS`. Positions from `size` on have z = 0 and exponent 255.
    """
    index = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = index < size
    after = tl.load(new + index, mask=inside, other=0).to(tl.int32)
    before = tl.load(old + index, mask=inside, other=0).to(tl.int32)
    difference = ((_order(after) - _order(before)) << 16) >> 16
    exponent = tl.where(inside, ((before >> SHIFT) & MASK) + ABOVE, 255)
    return ((difference << 1) ^ (difference >> 15)) & 0xFFFF, exponent, after


@triton.jit
def _parameters(c, exponent):
    """Return the Rice parameters k, 0 to 15, of weights with the given `exponent` in a block with the exponent `c`.

    A lossless delta stores the low k bits of a weight's change unchanged, and the rest in unary.
    """
    return tl.minimum(tl.maximum(c - exponent, 0), 15)


@triton.jit
def _bit_length(x):
    """Return the bit length of a non-negative int32."""
    length = 0
    for shift in tl.static_range(31):
        length += ((x >> shift) > 0).to(tl.int32)
    return length


@triton.jit
def _bytes(bits):
    """Return the number of bytes that hold `bits` bits, rounded up."""
    return (bits + 7) // 8


@triton.jit
def _measure_kernel(
    new, old, plan, size, num_blocks, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr
):  # fmt: skip
    """Choose the shortest body for the changes of one block: raw, dense or sparse.

    The kernel writes the body's kind, the exponent c that determines Rice parameters, the body's bytes, and the number
    of changed elements into `plan`.
    """
    # ---- compute the exponent c of this block, and from c the Rice parameter k of each weight. total is the sum of
    # 2^6 z over the 2^8 weights, where each z is converted to the highest exponent of the block. So total / 2^14 is the
    # mean z. The factor 5 / 8 makes this mean 0.8 to 1.6 at exponent c
    z, exponent, _ = _load(new, old, size, SHIFT, MASK, ABOVE)
    changed = z != 0
    count = tl.sum(changed.to(tl.int32))
    highest = tl.max(tl.where(exponent < 255, exponent, 0))
    lower = tl.minimum(tl.maximum(highest - exponent, 0), 31)
    total = tl.sum((z << 6) >> lower)
    c = tl.minimum(tl.maximum(highest + _bit_length((total >> 3) * 5) - 14, _DENSE), _RAW - 1)
    k = _parameters(c, exponent)
    # ---- compute the bytes of the raw, the dense and the sparse body, and choose the shortest of the three
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
    """Compute where each block's body starts in the message, and write these offsets to the last row of `plan`.

    The offset is -1 for a block that is left out, because its body would end beyond `capacity`, in bytes. The kernel
    also writes the message's kinds, halves (size of each body in bytes / 2) and two counters: the bytes that the bodies
    of all blocks need, and the number of changed elements in the blocks that are left out. One program handles all
    blocks.
    """
    first, wanted, left_out = 0, 0, 0
    while first < num_blocks:  # not `for`: Triton 3.6's interpreter does not support a kernel argument as a range's end
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
    """Compute where each block's body starts in a received message; one program handles one message.

    The offsets follow from the blocks' kinds and halves (bytes of the bodies / 2). `starts` receives them, in bytes
    from the first body. `kinds_n` and `halves_n` are the strides of `kinds` and `halves` from one message to the next.
    """
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
    """Write the low `width` bits of `value`, at most 16, at bit number `bit` of zeroed 32-bit words.

    Lanes where `mask` is False write nothing. Several lanes may write to one word, so each write is an atomic OR.
    """
    word, shift = words + (bit >> 5), (bit & 31).to(tl.int32)
    tl.atomic_or(word, value << shift, mask=mask, sem="relaxed")
    rest = (value.to(tl.int64) << shift) >> 32
    tl.atomic_or(word + 1, rest.to(tl.int32), mask=mask & (shift + width > 32), sem="relaxed")


@triton.jit
def _place_kernel(
    new, old, plan, words, size, num_blocks, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr
):  # fmt: skip
    """Write the body of one block, its encoded changes, into the message, unless the block does not fit into it."""
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
            # ---- in a sparse body, write the exponent c and the positions of the changed elements
            sparse = kind <= _MOST_POSITIONS
            taken = z + tl.where(sparse, 0, 1) > 0
            if sparse:
                _put(words, begin + 8 * lane, lane * 0 + c, 8, lane == 0)
                rank = tl.cumsum(taken.to(tl.int32), 0) - 1
                _put(words, begin + 8 * (1 + rank), lane, 8, taken)
                begin += 8 * (1 + kind)
            # ---- write the low k bits of all values (remainders), then the unary quotients
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
    """Apply the encoded changes of one block of one message to the block's old weights, in place.

    Each lane handles one bit of the unary quotients, so all values of the block are decoded in parallel. The arguments
    kinds_n, halves_n, body_n and weights_n are the strides of these tensors from one message to the next.
    """
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
        # ---- find the parts of a sparse or dense body: the exponent c, positions, remainders and quotients
        sparse = kind <= _MOST_POSITIONS
        c, count, head = kind, _BLOCK, 0
        if sparse:
            c, count, head = tl.load(body).to(tl.int32), kind, 1 + kind
        places = _places(body, lane, lane < count, sparse)
        k = _known(weights, places, lane < count, c, valid, SHIFT, MASK, ABOVE)
        remainders = body + head
        quotients = remainders + _bytes(tl.sum(k))
        # ---- find the set bits of the unary quotients: each set bit ends the quotient of one value, and the number of
        # set bits before it (`rank`) is the index of this value in the body
        bit, num_bits = tl.arange(0, _MOST_QUOTIENTS), 8 * (length - head - _bytes(tl.sum(k)))
        one, before = _bit(quotients, bit, num_bits), _bit(quotients, bit - 1, num_bits)
        rank = tl.cumsum(one, 0) - 1
        is_one = (one == 1) & (rank < count)
        place = _places(body, rank, is_one, sparse)
        k = _known(weights, place, is_one, c, valid, SHIFT, MASK, ABOVE)
        remainder = _read(remainders, tl.cumsum(k, 0) - k, k)
        # ---- compute each quotient (zeros before its set bit), the encoded value, and the new weight
        last = tl.associative_scan(tl.where(before == 1, bit - 1, -1), 0, _larger)
        value = ((bit - 1 - last) << k) + remainder + sparse.to(tl.int32)
        changes = is_one & (place < valid)
        old = tl.load(weights + place, mask=changes, other=0).to(tl.int32)
        new = _order(((_order(old) + ((value >> 1) ^ -(value & 1))) << 16) >> 16)
        tl.store(weights + place, new.to(tl.int16), mask=changes)


@triton.jit
def _places(body, rank, mask, sparse):
    """Return the position in the block of the weight to which each encoded value of a block's body belongs.

    `rank` is the index of each value in the body. A sparse body lists the positions; in a dense body value i belongs to
    weight i. For a sparse body the result is 0 where `mask` is False.
    """
    listed = mask & (rank < tl.where(sparse, _BLOCK, 0))
    return tl.where(sparse, tl.load(body + 1 + rank, mask=listed, other=0).to(tl.int32), rank)


@triton.jit
def _known(weights, place, mask, c, valid, SHIFT: tl.constexpr, MASK: tl.constexpr, ABOVE: tl.constexpr):
    """Return the Rice parameters k of a block's weights at the positions `place`, from old weights and the exponent c.

    The result is 0 where `mask` is False and beyond the `valid` weights of the block.
    """
    mask = mask & (place < valid)
    bits = tl.load(weights + place, mask=mask, other=0).to(tl.int32)
    return tl.where(mask, _parameters(c, ((bits >> SHIFT) & MASK) + ABOVE), 0)


@triton.jit
def _bit(data, bit, num_bits):
    """Return the bits with the numbers `bit` of the bytes at `data`, each as 0 or 1; 0 outside of 0..num_bits - 1.

    Bits are numbered from the lowest bit of the first byte.
    """
    inside = (bit >= 0) & (bit < num_bits)
    return (tl.load(data + (bit >> 3), mask=inside, other=0).to(tl.int32) >> (bit & 7)) & 1


@triton.jit
def _read(data, bit, width):
    """Return the integers of `width` bits, at most 15, that start at bit number `bit` of the bytes at `data`.

    Bits are numbered from the lowest bit of the first byte. The result is 0 for width 0.
    """
    data += bit >> 3
    end = (bit & 7) + width
    word = tl.load(data, mask=width > 0, other=0).to(tl.int32)
    word |= tl.load(data + 1, mask=(width > 0) & (end > 8), other=0).to(tl.int32) << 8
    word |= tl.load(data + 2, mask=(width > 0) & (end > 16), other=0).to(tl.int32) << 16
    return (word >> (bit & 7)) & ((1 << width) - 1)


@triton.jit
def _larger(a, b):
    """Return the elementwise maximum, as the function that `tl.associative_scan` combines elements with."""
    return tl.maximum(a, b)
