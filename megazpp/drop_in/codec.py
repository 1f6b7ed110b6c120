"""The codec of sharding units whose parameters have several dtypes, and the byte ranges of parameters in a message.

Only models of `megazpp.zeropp` have such units, because there the program decides the dtypes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megazpp.drop_in.units import QUANTIZABLE
from megazpp.kernels.formats import BlockFormat, MessageLayout, align
from megazpp.zero.wire import Codec, Segment


class MixedCodec(Codec):
    """The codec of a sharding unit whose parameters have several dtypes.

    FSDP2 gathers such a unit as bytes, so the size S of its flat shard is in bytes. A message consists of one part per
    dtype, in the order in which the dtypes first occur. All dtypes other than fp32, bf16 and fp16 share one part. For
    example:

        | message of the fp32 parameters | message of the bf16 parameters | unchanged bytes of all other parameters |

    The parameters in fp32, in bf16 and in fp16 are quantized as if each dtype formed a separate unit.

    Args:
        segments: segments of the unit's parameters, counted in elements.
        dtypes: dtype of each parameter.
        fmt: block format of quantized segments; None quantizes no segment.
        codec: function that makes the codec of the segments of one dtype, see `CommContext.codec`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        dtypes: Sequence[torch.dtype],
        fmt: BlockFormat | None,
        codec: Callable[[Sequence[Segment], BlockFormat | None, torch.dtype], Codec],
    ) -> None:
        # ---- group the parameters by dtype: for each dtype, `spans` has the byte ranges of its parameters in the flat
        # shard, and `chosen` their segments in a flat shard that has only the parameters of this dtype
        self.dtype = torch.uint8
        spans: dict[torch.dtype, list[tuple[int, int]]] = {}
        chosen: dict[torch.dtype, list[Segment]] = {}
        start = end = 0
        for segment, dtype in zip(segments, dtypes, strict=True):
            key = dtype if dtype in QUANTIZABLE else torch.uint8
            stop = start + segment.size * dtype.itemsize
            spans.setdefault(key, []).append((start, stop))
            before = chosen.setdefault(key, [])
            place = before[-1].stop if before else 0
            before.append(Segment(name=segment.name, start=place, size=segment.size, exact=segment.exact))
            start = stop

        # ---- for each dtype: its byte ranges in the flat shard, its codec, and its bytes in the message
        self._parts: list[tuple[list[tuple[int, int]], Codec | None, slice]] = []
        self._segments = list(chosen.values())  # for each entry of `_parts`, the segments with its dtype
        for key, places in spans.items():
            own = None if key == torch.uint8 else codec(tuple(chosen[key]), fmt, key)
            size = align(sum(b - a for a, b in places)) if own is None else own.message_bytes
            self._parts.append((places, own, slice(end, end + size)))
            end += size
        self.layout = MessageLayout(size=start, message_bytes=end, ranges=(), fmt=fmt)

    def byte_ranges(self, segments: Sequence[Segment]) -> list[tuple[int, int]]:
        """Return the byte ranges (start, stop) of a message that hold these segments of the unit's flat shard."""
        names, found = {segment.name for segment in segments}, list[tuple[int, int]]()
        for (places, codec, part), own in zip(self._parts, self._segments, strict=True):
            if codec is not None:
                ranges = byte_ranges(codec, [segment for segment in own if segment.name in names])
            else:
                lengths = [stop - start for start, stop in places]
                starts = itertools.accumulate(lengths, initial=0)
                named = zip(own, starts, lengths, strict=False)
                ranges = [(start, start + length) for segment, start, length in named if segment.name in names]
            found += [(part.start + start, part.start + stop) for start, stop in ranges]
        return found

    def pack(self, shards: torch.Tensor, messages: torch.Tensor, **how: Any) -> None:
        """Pack flat shards into messages.

        Args:
            shards: [A, B, S] uint8 flat shards of S bytes, for A x B peers.
            messages: [A, B, M] uint8 messages of M bytes, which are overwritten.
            how: further arguments of `Codec.pack`. They are ignored: the gathers that use this codec pass none.
        """
        for places, codec, part in self._parts:
            own = torch.cat([shards[..., a:b] for a, b in places], dim=-1)
            if codec is None:
                messages[..., part][..., : own.shape[-1]] = own
            elif own.shape[-1]:
                codec.pack(own.view(codec.dtype), messages[..., part])

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """Unpack messages into flat shards, with a separate codec for each dtype.

        Args:
            messages: [A, B, M] uint8 messages, M bytes from each of A x B peers.
            shards: [A, B, S] uint8 flat shards of S bytes, which are overwritten.
        """
        for places, codec, part in self._parts:
            own = messages[..., part]
            if codec is not None:
                elements = torch.empty(*own.shape[:-1], codec.layout.size, dtype=codec.dtype, device=own.device)
                codec.unpack(own, elements)
                own = elements.view(torch.uint8)
            start = 0
            for a, b in places:
                shards[..., a:b] = own[..., start : start + b - a]
                start += b - a


def byte_ranges(codec: Codec, segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the byte ranges (start, stop) of a message that hold some parameters of a sharding unit.

    Args:
        codec: codec of the unit's messages.
        segments: segments of these parameters in the unit's flat shard.
    """
    if isinstance(codec, MixedCodec):
        return codec.byte_ranges(segments)
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
