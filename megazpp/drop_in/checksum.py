"""Checksums of this rank's shards of a unit, with which `megazpp.zeropp` detects a program's writes to weights.

Tensors' version counters miss writes through views and `parameter.data`; checksums do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F

WORD = 8  # bytes of the integers that `mixed_sum` hashes
# Odd multipliers as int64 for `mixed_sum`: PLACE multiplies the position of a word; MIX has the two multipliers of
# MurmurHash3's final mix
PLACE, *MIX = (-0x61C8864680B583EB, -0xAE502812AA7333, -0x3B314601E57A13AD)


def checksum(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a checksum of the bits of 1-D tensors in their order, as an int64 scalar tensor on their device.

    On the CPU the checksum is CRC-32, computed at 3 GB/s. On other devices it is `mixed_sum`. Tensors that differ have
    equal checksums with probability 2^-32 on the CPU, and about 2^-64 on other devices.
    """
    if shards[0].device.type != "cpu":
        return mixed_sum(shards)
    found = 0
    for shard in shards:
        found = zlib.crc32(shard.view(torch.uint8).numpy().data, found)
    return torch.tensor(found, device="cpu")


def mixed_sum(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Hash each 8-byte word of the tensors with its position, and return the sum of the hashes modulo 2^64.

    The sum is an int64 scalar tensor on the tensors' device.

    The hash is the final mix of MurmurHash3: each input bit changes each output bit with probability 1/2. On a GPU the
    function launches about ten kernels, and the host does not wait.
    """
    flat = torch.cat([shard.view(torch.uint8) for shard in shards])
    words = F.pad(flat, (0, -len(flat) % WORD)).view(torch.int64)
    mixed = torch.arange(1, len(words) + 1, device=words.device).mul_(PLACE).add_(words)
    for factor in MIX:
        # `>>` of int64 copies the sign bit; the mask clears the copies, as a logical shift would
        mixed.bitwise_xor_((mixed >> 33).bitwise_and_(2**31 - 1)).mul_(factor)
    return mixed.bitwise_xor_((mixed >> 33).bitwise_and_(2**31 - 1)).sum()
