"""Lossless deltas of 16-bit weights in plain torch: the reference for the implementations in C and Triton.

The format is defined in kernels/weight_delta/format.py. Letters in shapes: S: number of weights; B: number of blocks of
256 weights; C: bytes of all bodies together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megazpp.kernels.weight_delta.format import BLOCK, DENSE, EXPONENTS, MOST_POSITIONS, MOST_QUOTIENTS, RAW


def order(bits: Tensor) -> Tensor:
    """Map the bit patterns of 16-bit floats to int16 so that neighboring floats become neighboring integers.

    -0.0 becomes -1 and 0.0 becomes 0. The function is its own inverse.
    """
    return bits ^ ((bits >> 15) & 0x7FFF)


def encode(new: Tensor, old: Tensor, kinds: Tensor, halves: Tensor, body: Tensor, numbers: Tensor) -> None:
    """Encode the lossless delta from old to new weights, block by block; see `native.encode` for the arguments."""
    exponents = _exponents(old)
    difference = order(new.view(torch.int16)) - order(old.view(torch.int16))
    z = _blocks(((difference << 1) ^ (difference >> 15)).int() & 0xFFFF)
    bodies = [_body(values, exponent) for values, exponent in zip(z, exponents, strict=True)]
    offset = left_out = 0
    body.zero_()
    for index, (kind, found) in enumerate(bodies):
        whole = new[BLOCK * index : BLOCK * (index + 1)].view(torch.uint8)
        if len(found) >= len(whole):
            kind, found = RAW, whole
        fits = offset + len(found) <= len(body)
        kinds[index], halves[index] = (kind, len(found) // 2 % 256) if fits else (0, 0)
        if fits:
            body[offset : offset + len(found)] = found
        else:
            left_out += int(z[index].count_nonzero())
        offset += len(found)
    numbers[0], numbers[1] = offset, left_out


def decode(kinds: Tensor, halves: Tensor, body: Tensor, weights: Tensor) -> None:
    """Apply a lossless delta to old weights in place, block by block; see `native.decode` for the arguments."""
    exponents, offset = _exponents(weights), 0
    for index, (kind, half) in enumerate(zip(kinds.tolist(), halves.tolist(), strict=True)):
        # ---- find the bytes of this block's body, which follow the body of the previous block
        block = weights[BLOCK * index : BLOCK * (index + 1)]
        size = 2 * len(block) if kind == RAW else 2 * half
        found = body[offset : offset + size]
        offset += size
        if kind == RAW:
            block.view(torch.uint8).copy_(found)
            continue
        sparse = kind <= MOST_POSITIONS
        if sparse and kind == 0:
            continue
        # ---- find the positions of the encoded elements in the block, and their Rice parameters k
        c = int(found[0]) if sparse else kind
        places = found[1 : 1 + kind].long() if sparse else torch.arange(BLOCK, device=found.device)
        k = _parameters(c, exponents[index][places])
        # ---- decode the changes z of the block's encoded elements from the remainders and the unary quotients
        bits = _bits(found[1 + kind :] if sparse else found)
        starts = k.cumsum(0) - k
        remainders = [int(_number(bits[a : a + n])) for a, n in zip(starts.tolist(), k.tolist(), strict=True)]
        ones = bits[-(-int(k.sum()) // 8) * 8 :].nonzero()[:, 0]
        quotients = ones.diff(prepend=ones.new_tensor([-1])) - 1
        z = torch.zeros(BLOCK, dtype=torch.int64, device=found.device)
        z[places] = (quotients << k) + torch.tensor(remainders, device=found.device) + int(sparse)
        # ---- compute the block's new weights from its old weights and their zigzag-encoded changes z
        z = z[: len(block)]
        ordered = order(block.view(torch.int16)).int() + ((z >> 1) ^ -(z & 1))
        block.view(torch.int16).copy_(order(ordered.to(torch.int16)))


def _exponents(old: Tensor) -> Tensor:
    """Return the exponents of 16-bit weights [S], plus their dtype's offset in EXPONENTS, in blocks [B, 256] int64.

    The last block is padded with exponent 255, which makes the Rice parameter 0.
    """
    shift, mask, above = EXPONENTS[old.dtype]
    return _blocks(((old.view(torch.int16).long() >> shift) & mask) + above, 255)


def _blocks(x: Tensor, padding: int = 0) -> Tensor:
    """Cut x [S] into blocks [B, 256]; the last block is filled up with the value `padding`."""
    return F.pad(x, (0, -len(x) % BLOCK), value=padding).view(-1, BLOCK)


def _body(z: Tensor, exponents: Tensor) -> tuple[int, Tensor]:
    """Encode the changes of one block of weights as the shorter of a sparse and a dense body.

    Args:
        z: [256] zigzag-encoded changes of the block's weights.
        exponents: [256] exponents of the old weights, from `_exponents`.
    Returns:
        The kind of the body, and its bytes. The kind is RAW if neither body is shorter than the new weights themselves,
        or if their quotients take too many bits. The bytes are zeros then, which `encode` replaces by the new weights.
    """
    # ---- compute the exponent c, which determines the Rice parameters, from the block's mean change, measured in units
    # in the last place of its highest exponent. 255 marks padding, and in bf16 also infinities and NaN. See format.py.
    highest = int(exponents.where(exponents < 255, 0).max())
    total = int(((z.long() << 6) >> (highest - exponents).clamp(0, 31)).sum())
    c = min(max(highest + ((total >> 3) * 5).bit_length() - 14, DENSE), RAW - 1)
    # ---- build the candidates for the block's body, raw, dense and sparse; the shortest wins. The raw candidate is
    # only a placeholder of the right length; `encode` replaces its bytes by the new weights.
    device = z.device
    found = [(RAW, torch.zeros(2 * BLOCK, dtype=torch.uint8, device=device))]
    places = z.nonzero()[:, 0]
    for kind, head, values, k in (
        (c, [], z.long(), _parameters(c, exponents)),
        (len(places), [c, *places.tolist()], z[places].long() - 1, _parameters(c, exponents[places])),
    ):
        quotients = values >> k
        num_bits = len(values) + int(quotients.sum())
        if head and kind == 0:
            found.append((0, torch.zeros(0, dtype=torch.uint8, device=device)))
        elif num_bits <= MOST_QUOTIENTS and (not head or kind <= MOST_POSITIONS):
            remainders = torch.zeros(-(-int(k.sum()) // 8) * 8, dtype=torch.int64, device=device)
            for start, value, width in zip((k.cumsum(0) - k).tolist(), values.tolist(), k.tolist(), strict=True):
                remainders[start : start + width] = (value >> torch.arange(width, device=device)) & 1
            ones = torch.zeros(num_bits, dtype=torch.int64, device=device)
            ones[(quotients + 1).cumsum(0) - 1] = 1
            beginning = torch.tensor(head, dtype=torch.uint8, device=device)
            found.append((kind, torch.cat((beginning, _bytes(remainders), _bytes(ones)))))
    kind, body = min(reversed(found), key=lambda each: -(-len(each[1]) // 2))
    return kind, F.pad(body, (0, len(body) % 2))


def _parameters(c: int, exponents: Tensor) -> Tensor:
    """Return the Rice parameters k, 0 to 15, of weights with the given `exponents` in a block with the exponent `c`.

    A lossless delta stores the low k bits of a weight's change unchanged, and the rest in unary.
    """
    return (c - exponents).clamp(0, 15)


def _bits(x: Tensor) -> Tensor:
    """Unpack bytes [n] uint8 into bits [8 n] int64, the lowest bit of each byte first."""
    return ((x.long()[:, None] >> torch.arange(8, device=x.device)) & 1).flatten()


def _bytes(bits: Tensor) -> Tensor:
    """Pack bits [n], each 0 or 1, into bytes [ceil(n / 8)] uint8, the first bit lowest."""
    return (F.pad(bits, (0, -len(bits) % 8)).view(-1, 8) << torch.arange(8, device=bits.device)).sum(1).to(torch.uint8)


def _number(bits: Tensor) -> Tensor:
    """Return a scalar tensor with the integer whose bits [n] are given, the lowest bit first."""
    return (bits << torch.arange(len(bits), device=bits.device)).sum()
