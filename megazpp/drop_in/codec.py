"""The codec of sharding units that ZeRO++ cannot quantize, and the byte ranges of parameters in a message.

ZeRO++ cannot quantize a unit whose parameters FSDP2 gathers in several dtypes, or in a dtype other than fp32, bf16 and
fp16. Only models of `megazpp.zeropp` have such units, because there the program decides the dtypes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from megazpp.zero.wire import Codec, Segment, plan_message


class ByteCodec(Codec):
    """The codec that sends the bytes of a sharding unit's parameters without quantization.

    It serves units that are not `ProgramUnit.is_quantizable`. The flat shard of such a unit is a uint8 tensor, so its
    size S is in bytes. FSDP2 gathers parameters of several dtypes as bytes itself. If all parameters have one dtype,
    `ProgramGather` passes FSDP2's tensors as views of their bytes.

    Args:
        segments: segments of the unit's parameters, counted in bytes (`segments_in_bytes`).
    """

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        super().__init__(plan_message(segments, None, exact_itemsize=1), torch.uint8)

    def pack(self, shards: torch.Tensor, messages: torch.Tensor, **how: Any) -> None:
        """Copy flat shards into messages.

        Args:
            shards: [A, B, S] uint8 flat shards of S bytes, for A x B peers.
            messages: [A, B, M] uint8 messages of M bytes, which are overwritten.
            how: further arguments of `Codec.pack`. They are ignored: the gathers that use this codec pass none.
        """
        messages[..., : self.layout.size] = shards

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """Copy messages [A, B, M] uint8, M bytes from each of A x B peers, into flat shards [A, B, S] of S bytes."""
        shards.copy_(messages[..., : self.layout.size])


def segments_in_bytes(segments: Sequence[Segment], dtypes: Sequence[torch.dtype]) -> tuple[Segment, ...]:
    """Convert a unit's segments from elements to bytes: starts and sizes in a flat shard that is a uint8 tensor.

    Args:
        segments: segments of the unit's parameters, counted in elements.
        dtypes: dtype in which FSDP2 gathers each parameter.
    """
    sizes = [segment.size * dtype.itemsize for segment, dtype in zip(segments, dtypes, strict=True)]
    starts = itertools.accumulate(sizes, initial=0)
    parts = zip(segments, starts, sizes, strict=False)
    return tuple(Segment(name=segment.name, start=start, size=size, exact=True) for segment, start, size in parts)


def byte_ranges(codec: Codec, segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the byte ranges (start, stop) of a message that hold some parameters of a sharding unit.

    Args:
        codec: codec of the unit's messages.
        segments: segments of these parameters in the unit's flat shard.
    """
    found, itemsize = list[tuple[int, int]](), codec.dtype.itemsize
    for segment in segments:
        for part in codec.layout.ranges:
            if segment.size and part.start <= segment.start and segment.stop <= part.stop:
                if part.scales is None:
                    start = part.payload[0] + (segment.start - part.start) * itemsize
                    found.append((start, start + segment.size * itemsize))
                else:  # a quantized range holds one segment only: add the ranges of the segment's payload and scales
                    found += [(start, start + length) for start, length in (part.payload, part.scales)]
    return found
