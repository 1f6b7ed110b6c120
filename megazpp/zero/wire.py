"""A shard on the wire: the layout of its message, pure integers that are planned once per unit, and the codecs.

FSDP2 lays a unit's shards out flat: for each parameter its rows on this rank, padded to the same count on every rank
(zeros), one parameter after the other. Each parameter is a segment. On the wire a shard is one message of bytes:

    | payloads of the quantized segments | their scales | segments that travel exact | to a multiple of 16 bytes

No quantization block spans two parameters (a block half norm gains, half weights loses 25 dB of the weights), and 1-D
parameters travel exact, as do those so small that a block would be no shorter. Any shape and any number of ranks is
padding here, so nothing downstream has a special case.

    Example: W = 4 ranks, norm [6], weight [6, 100], 8 bits, blocks of 128, exact part bf16
        segments    norm: 2 elements (6 rows -> 8, 2 each), weight: 200 elements (2 rows of 100)
        message     payload 2 blocks = 256 B | 2 scales = 4 B, to 272 | norm exact 4 B | to 288 B

The codecs are the only code between the hops and the kernels. A, B: leading dims (peers), in any order of memory; S:
elements of a shard; M: bytes of a message. Every method but `elements` is one call of a kernel, whatever the number of
parameters and peers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megazpp.kernels.block_quant import Feedback, pack, range_table, unpack, unpack_onto, unpack_sum
from megazpp.kernels.formats import BlockFormat, ByteRange, MessageLayout, align, place_quantized
from megazpp.kernels.weight_delta import decode, encode, message_bytes, numbers

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One parameter's part of a flat shard."""

    name: str
    start: int  # element in the shard
    size: int  # elements, padding included; the same on every rank
    exact: bool  # never quantized

    @property
    def stop(self) -> int:
        return self.start + self.size


def plan_segments(parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int) -> tuple[Segment, ...]:
    """The segments of a flat shard, of names and shapes (on this tensor-parallel rank) in FSDP2's flat order."""
    segments, start = [], 0
    for name, shape in parameters:
        rows = shape[0] if shape else 1
        size = -(-rows // num_ranks) * math.prod(shape[1:])
        segments.append(Segment(name=name, start=start, size=size, exact=len(shape) <= 1))
        start += size
    return tuple(segments)


def own_rows(rows: int, num_ranks: int, rank: int) -> int:
    """Rows of a parameter that a rank has, without padding: from rank x c to (rank + 1) x c, c the most of any."""
    most = -(-rows // num_ranks)
    return max(min(most, rows - rank * most), 0)


def plan_message(segments: Sequence[Segment], fmt: BlockFormat | None, *, exact_itemsize: int) -> MessageLayout:
    """Lay a shard's segments out in a message; without `fmt` all travel exact, `exact_itemsize` bytes an element."""
    quantized: list[Segment] = []
    exact: list[Segment] = []
    for segment in segments:
        size = segment.size
        pays = fmt is not None and fmt.payload_bytes(size) + fmt.scale_bytes(size) < size * exact_itemsize
        (quantized if pays and not segment.exact else exact).append(segment)

    ranges, offset = ([], 0) if fmt is None else place_quantized([(s.start, s.stop) for s in quantized], fmt)
    for start, stop in _runs(exact):
        offset = align(offset)
        length = (stop - start) * exact_itemsize
        ranges.append(ByteRange(start=start, stop=stop, payload=(offset, length), scales=None))
        offset += length
    size = segments[-1].stop if segments else 0
    return MessageLayout(size=size, message_bytes=align(offset), ranges=tuple(ranges), fmt=fmt)


def _byte_ranges(layout: MessageLayout, segments: Sequence[Segment], *, exact_itemsize: int) -> list[tuple[int, int]]:
    """The bytes (first, the one after the last) that hold these segments of a message."""
    found = []
    for segment in segments:
        for part in layout.ranges:
            if segment.size and part.start <= segment.start and segment.stop <= part.stop:
                if part.scales is None:
                    start = part.payload[0] + (segment.start - part.start) * exact_itemsize
                    found.append((start, start + segment.size * exact_itemsize))
                else:  # a quantized segment has a range of its own
                    found += [(start, start + length) for start, length in (part.payload, part.scales)]
    return found


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Neighbouring segments joined, empty ones left out."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if segment.size == 0:
            continue
        if runs and runs[-1][1] == segment.start:
            runs[-1] = (runs[-1][0], segment.stop)
        else:
            runs.append((segment.start, segment.stop))
    return runs


class Codec:
    """Packs and unpacks the shards of one unit; elements that are not quantized travel in `dtype`."""

    def __init__(self, layout: MessageLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self._table = range_table(layout, dtype)

    @property
    def message_bytes(self) -> int:
        """M."""
        return self.layout.message_bytes

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Messages to pack into, [*peers, M] uint8: zeros, so that the padding between parts compares equal."""
        return torch.zeros(*peers, self.message_bytes, dtype=torch.uint8, device=device)

    def pack(
        self,
        shards: torch.Tensor,
        messages: torch.Tensor,
        *,
        errors: Feedback | None = None,
        beta: float = 0.0,
        base: torch.Tensor | None = None,
    ) -> None:
        """shards [A, B, S] (any strides) -> messages [A, B, M].

        Args:
            errors: quantization errors of earlier packs, see `new_errors`; they are added first, and replaced.
            beta: share of the earlier errors in those that replace them (LoCo's moving average).
            base: [A, B, S] what the receivers have: quantized runs are differences from it, the others whole as ever.
        """
        pack(shards, self._table, messages=messages, errors=errors, beta=beta, base=base)

    def byte_ranges(self, segments: Sequence[Segment]) -> list[tuple[int, int]]:
        """Return the bytes (first, the one after the last) of a message that hold these segments of the unit."""
        return _byte_ranges(self.layout, segments, exact_itemsize=self.dtype.itemsize)

    def new_errors(self, *peers: int, device: torch.device) -> Feedback | None:
        """Zero quantization errors for messages [*peers, M]: int8 blocks, one byte per quantized element.

        None where nothing is quantized.
        """
        is_exact = all(part.scales is None for part in self.layout.ranges)
        return None if is_exact else Feedback.zeros(peers, self._table, device)

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """messages [A, B, M] -> shards [A, B, S] (any strides)."""
        unpack(messages, self._table, out=shards)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """messages [B, M] -> base [B, S]: differences are added, each sum rounded once; what travels exact replaces."""
        unpack_onto(messages, self._table, out=base)

    def elements(self, messages: torch.Tensor) -> torch.Tensor:
        """A view of the elements [B, S] in messages [B, M] of which nothing is quantized."""
        (whole,) = self.layout.ranges
        start, num_bytes = whole.payload
        return messages[..., start : start + num_bytes].view(self.dtype)

    def unpack_sum(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        """The sum over peers, in fp32: messages [K, B, M] -> out [B, S], onto what is there with `accumulate`."""
        unpack_sum(messages, self._table, out=out, accumulate=accumulate)


class MixedCodec(Codec):
    """Packs shards of parameters of several dtypes, which FSDP2 gathers as bytes; S counts bytes.

        | message of the fp32 parameters | of the bf16 ones | ... | bytes of all others, as they are |

    fp32, bf16 and fp16 parameters are quantized as in a unit of their own.

    Args:
        segments, dtypes: of the unit's parameters.
        fmt: block format; None: nothing is quantized.
        codec: makes the codec of some segments, see `Codec`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        dtypes: Sequence[torch.dtype],
        fmt: BlockFormat | None,
        codec: Callable[[Sequence[Segment], BlockFormat | None, torch.dtype], Codec],
    ) -> None:
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
        self._parts: list[tuple[list[tuple[int, int]], Codec | None, slice]] = []
        self._segments = list(chosen.values())  # of each part
        for key, places in spans.items():
            own = None if key == torch.uint8 else codec(chosen[key], fmt, key)
            size = align(sum(b - a for a, b in places)) if own is None else own.message_bytes
            self._parts.append((places, own, slice(end, end + size)))
            end += size
        self.layout = MessageLayout(size=start, message_bytes=end, ranges=(), fmt=fmt)

    def byte_ranges(self, segments: Sequence[Segment]) -> list[tuple[int, int]]:
        """Return the bytes (first, the one after the last) of a message that hold these segments of the unit."""
        names, found = {segment.name for segment in segments}, list[tuple[int, int]]()
        for (places, codec, part), own in zip(self._parts, self._segments, strict=True):
            chosen = [segment for segment in own if segment.name in names]
            if codec is not None:
                ranges = codec.byte_ranges(chosen)
            else:
                lengths = [stop - start for start, stop in places]
                starts = itertools.accumulate(lengths, initial=0)
                named = zip(own, starts, lengths, strict=False)
                ranges = [(start, start + length) for segment, start, length in named if segment.name in names]
            found += [(part.start + start, part.start + stop) for start, stop in ranges]
        return found

    def pack(self, shards: torch.Tensor, messages: torch.Tensor, **how: Any) -> None:
        """shards [A, B, S] of bytes -> messages [A, B, M]."""
        for places, codec, part in self._parts:
            own = torch.cat([shards[..., a:b] for a, b in places], dim=-1)
            if codec is None:
                messages[..., part][..., : own.shape[-1]] = own
            elif own.shape[-1]:
                codec.pack(own.view(codec.dtype), messages[..., part])

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """messages [A, B, M] -> shards [A, B, S] of bytes."""
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


ROOM, SPARE = 0.125, 512  # of a message beyond what is predicted: a share, and bytes (small units vary more)


class LosslessCodec:
    """Packs what has changed of the 16-bit weights of one unit, bit for bit, into messages whose size is predicted.

    How many bytes a difference takes is known on the device alone, and the size of a collective on the host. So a
    message has room for an eighth more than what the last one needed plus what that was more than the one before; the
    first two have room for whatever may come, for a warm-up's first step moves next to nothing. The numbers travel in
    the messages, so all ranks of an axis know the same; the host reads them a step later, when they have long been
    there. Blocks that do not fit are left out: their weights stay as they are on every rank, the owner's copy too, and
    the next difference has them.

    Args:
        size: elements of a shard.
    Attributes:
        recent: [2] int64 on the host: bytes that the last difference and the one before it needed, the most of any
            rank; 0 where there was none. Part of a checkpoint.
    """

    def __init__(self, size: int) -> None:
        self.size, self._left_out = size, 0
        self.recent = torch.zeros(2, dtype=torch.int64)
        self._arriving: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    @property
    def message_bytes(self) -> int:
        """Bytes of the next message."""
        self.read_counters()
        last, before = self.recent.tolist()
        needed = int((last + max(last - before, 0)) * (1 + ROOM)) + SPARE
        return message_bytes(self.size, min(needed, 2 * self.size) if before else None)

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Messages to pack into, [*peers, M] uint8."""
        return torch.empty(*peers, self.message_bytes, dtype=torch.uint8, device=device)

    def pack(self, shard: torch.Tensor, message: torch.Tensor, *, base: torch.Tensor) -> None:
        """shard [S] of weights, base [S] what every rank has of them -> message [M]."""
        encode(shard, base, message)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """messages [N, M] -> base [N, S]: each row becomes its sender's weights."""
        decode(messages, base)

    def learn(self, messages: torch.Tensor) -> None:
        """Know from messages [N, M] that have arrived what the next one needs."""
        if isinstance(messages, FakeTensor):
            return
        found, arrived = numbers(messages).clone(), None  # a view would keep the messages
        if found.is_cuda:
            found = torch.empty(found.shape, dtype=torch.int64, pin_memory=True).copy_(found, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._arriving = found, arrived

    def read_counters(self) -> None:
        """Take the numbers of the last difference; waits for the device if it has not got there."""
        if self._arriving is None:
            return
        (found, event), self._arriving = self._arriving, None
        if event is not None:
            event.synchronize()
        needed, left_out = zip(*found.tolist(), strict=True)
        self.recent[:] = torch.tensor([max(1, *needed), int(self.recent[0])])
        self._left_out += sum(left_out)

    def take_left_out(self) -> int:
        """Changed elements that were left out since the last call, of all ranks of the axis, as far as is known."""
        found, self._left_out = self._left_out, 0
        return found
