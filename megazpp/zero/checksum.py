"""Checksums of a shard, which see any write to it: version counters miss those through views and `parameter.data`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F

WORD = 8  # bytes
PLACE, *MIX = (-0x61C8864680B583EB, -0xAE502812AA7333, -0x3B314601E57A13AD)  # odd numbers as int64


def checksum(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a checksum of the bits of 1-D tensors and of their order, an int64 scalar on their device.

    CRC-32 on the CPU (3 GB/s; a write goes unseen by chance once in 2^32), `mixed_sum` elsewhere (once in about 2^64).
    """
    if shards[0].device.type != "cpu":
        return mixed_sum(shards)
    found = 0
    for shard in shards:
        found = zlib.crc32(shard.view(torch.uint8).numpy().data, found)
    return torch.tensor(found)


def mixed_sum(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over all 8-byte words of a mix of word and place, modulo 2^64: about ten kernels.

    The mix is the end of MurmurHash3, whose every input bit changes each output bit with probability 1/2.
    """
    flat = torch.cat([shard.view(torch.uint8) for shard in shards])
    words = F.pad(flat, (0, -len(flat) % WORD)).view(torch.int64)
    mixed = torch.arange(1, len(words) + 1, device=words.device).mul_(PLACE).add_(words)
    for factor in MIX:
        mixed.bitwise_xor_((mixed >> 33).bitwise_and_(2**31 - 1)).mul_(factor)  # a shift copies the sign bit
    return mixed.bitwise_xor_((mixed >> 33).bitwise_and_(2**31 - 1)).sum()
