"""The layout of a flat shard's message, and the codecs that pack and unpack messages.

FSDP2 concatenates the shards of a unit's parameters in one flat shard. Each parameter's rows on this rank are padded
with zeros to the same count on every rank. The part of one parameter is a segment. A flat shard is sent as one message
of bytes, whose layout is planned once per unit:

    | payloads of the quantized segments | their scales | segments that are sent exactly | padding to 16 bytes |

No quantization block spans two parameters: a block of half norm gains and half weights would lose 25 dB of the weights.
1-D parameters are sent exactly, and so are parameters for which a block would be no shorter. Padding makes every shape
and number of ranks valid, so later code has no special cases.

    Example: W = 4 ranks, norm [6], weight [6, 100], 8 bits, blocks of 128, exact part bf16
        segments    norm: 2 elements (6 rows -> 8, 2 each), weight: 200 elements (2 rows of 100)
        message     payload 2 blocks = 256 B | 2 scales = 4 B, to 272 | norm exact 4 B | to 288 B

The codecs are the only callers of the quantization kernels. Shapes: A, B: leading dims (peers), with any strides; S:
elements of a shard; M: bytes of a message. Each method except `elements` calls one kernel, for any number of parameters
and peers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megazpp.kernels.block_quant import Feedback, pack, range_table, unpack, unpack_onto, unpack_sum
from megazpp.kernels.formats import BlockFormat, ByteRange, MessageLayout, align, place_quantized
from megazpp.kernels.weight_delta import decode, encode, message_bytes, numbers
from megazpp.parallel.comm_queue import HostCopy


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of one parameter in a flat shard."""

    name: str
    start: int  # index of its first element in the flat shard
    size: int  # number of elements including padding, the same on every rank
    exact: bool  # True if it is never quantized

    @property
    def stop(self) -> int:
        """Index, in the flat shard, of the element after the segment."""
        return self.start + self.size


def plan_segments(
    parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int, *, exact: Collection[str] = ()
) -> tuple[Segment, ...]:
    """Plan the segments of a flat shard.

    Args:
        parameters: name and shape of each parameter in FSDP2's flat order. Shapes are full over the data ranks and
            local to this tensor-parallel rank.
        num_ranks: data ranks over which dim 0 of each parameter is sharded.
        exact: names of parameters that are never quantized, in addition to those with one dimension.
    """
    segments, start = [], 0
    for name, shape in parameters:
        rows = shape[0] if shape else 1
        size = -(-rows // num_ranks) * math.prod(shape[1:])
        segments.append(Segment(name=name, start=start, size=size, exact=len(shape) <= 1 or name in exact))
        start += size
    return tuple(segments)


def own_rows(rows: int, num_ranks: int, rank: int) -> int:
    """Return how many rows of a parameter a rank has, without padding.

    A rank holds up to c = ceil(rows / num_ranks) rows from row rank x c on, so the last ranks may hold fewer or none.
    """
    most = -(-rows // num_ranks)
    return max(min(most, rows - rank * most), 0)


@functools.cache
def plan_message(segments: tuple[Segment, ...], fmt: BlockFormat | None, *, exact_itemsize: int) -> MessageLayout:
    """Lay out the segments of a flat shard in a message.

    Args:
        segments: segments of the flat shard.
        fmt: quantization format; None sends all segments exactly.
        exact_itemsize: bytes per element of the segments that are sent exactly.
    """
    quantized: list[Segment] = []
    exact: list[Segment] = []
    for segment in segments:
        size = segment.size
        # Quantize only where that makes the message shorter.
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


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return (start, stop) of runs of adjacent segments, without empty ones."""
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
    """The codec that packs the flat shards of one unit into messages and unpacks them.

    Args:
        layout: layout of the messages.
        dtype: dtype in which elements that are not quantized are sent.
    """

    def __init__(self, layout: MessageLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self._table = range_table(layout, dtype)

    @property
    def message_bytes(self) -> int:
        """Bytes of one message (M)."""
        return self.layout.message_bytes

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Allocate messages [*peers, M] uint8 to pack into.

        They are zeroed, so that the padding between parts is equal on all ranks.
        """
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
        """Pack flat shards into messages.

        Args:
            shards: [A, B, S] flat shards, with any strides.
            messages: [A, B, M] uint8, written.
            errors: quantization errors of earlier calls, from `new_errors`. They are added to the shards before
                quantization and then replaced by the new errors.
            beta: weight of the earlier errors in the errors that replace them (LoCo's moving average).
            base: [A, B, S] weights that the receivers hold. Quantized segments then hold the difference from it; the
                others hold the shards themselves.
        """
        pack(shards, self._table, messages=messages, errors=errors, beta=beta, base=base)

    def new_errors(self, *peers: int, device: torch.device) -> Feedback | None:
        """Allocate zero quantization errors for messages [*peers, M], as int8 blocks of one byte per quantized element.

        Returns None if the layout quantizes nothing.
        """
        is_exact = all(part.scales is None for part in self.layout.ranges)
        return None if is_exact else Feedback.zeros(peers, self._table, device)

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """Unpack messages [A, B, M] into flat shards [A, B, S] with any strides."""
        unpack(messages, self._table, out=shards)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """Unpack messages [B, M] that `pack` made with a `base`, onto that base [B, S].

        Quantized differences are added, and each sum is rounded once. Elements that were sent exactly are replaced.
        """
        unpack_onto(messages, self._table, out=base)

    def elements(self, messages: torch.Tensor) -> torch.Tensor:
        """Return a view of the elements [B, S] of messages [B, M]; only for a layout that quantizes nothing."""
        (whole,) = self.layout.ranges
        start, num_bytes = whole.payload
        return messages[..., start : start + num_bytes].view(self.dtype)

    def unpack_sum(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        """Unpack messages [K, B, M] and sum them over the K peers in fp32, into out [B, S].

        Args:
            messages: [K, B, M] uint8.
            out: [B, S], written.
            accumulate: whether the sum is added to the values in `out`.
        """
        unpack_sum(messages, self._table, out=out, accumulate=accumulate)


# Capacity of a lossless message beyond its predicted size: a fraction, and bytes, because small units vary more.
ROOM, SPARE = 0.125, 512


class LosslessCodec:
    """The codec that sends the changes of a unit's 16-bit weights bit for bit, in messages of a predicted size.

    Only the device knows how many bytes a difference takes, but the host must give the size of a collective. So the
    host predicts it: the bytes that the last difference needed, plus its growth over the one before, plus an eighth.
    The first two messages have room for any difference, because the first step of a learning rate warm-up changes
    almost nothing.

    Each message contains the number of bytes that it needed, so all ranks of an axis make the same prediction. The host
    reads this number one step later, without waiting for the device.

    Blocks that do not fit are left out. Their weights stay unchanged on every rank, including the owner's copy, so the
    next difference contains them.

    Args:
        size: elements of a flat shard.
    Attributes:
        recent: [2] int64 on the host: bytes that the last difference and the one before it needed, as the maximum over
            ranks; 0 if there was none. It is part of a checkpoint.
    """

    def __init__(self, size: int) -> None:
        self.size, self._left_out = size, 0
        self.recent = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._arriving: HostCopy | None = None

    @property
    def message_bytes(self) -> int:
        """Bytes of the next message. Reading it may wait for the device."""
        self.read_counters()
        last, before = self.recent.tolist()
        needed = int((last + max(last - before, 0)) * (1 + ROOM)) + SPARE
        return message_bytes(self.size, min(needed, 2 * self.size) if before else None)

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Allocate messages [*peers, M] uint8 to pack into."""
        return torch.empty(*peers, self.message_bytes, dtype=torch.uint8, device=device)

    def pack(self, shard: torch.Tensor, message: torch.Tensor, *, base: torch.Tensor) -> None:
        """Encode the difference of `shard` [S] from `base` [S], which every rank holds, into `message` [M]."""
        encode(shard, base, message)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """Decode messages [N, M] onto base [N, S]: each row becomes the weights of its sender."""
        decode(messages, base)

    def learn(self, messages: torch.Tensor) -> None:
        """Start to copy the size counters of received messages [N, M] to the host; `read_counters` reads them."""
        if not isinstance(messages, FakeTensor):
            self._arriving = HostCopy(numbers(messages).clone())  # a view would keep the messages in memory

    def read_counters(self) -> None:
        """Read the size counters of the last message; waits until they have reached the host."""
        if self._arriving is None:
            return
        arriving, self._arriving = self._arriving, None
        needed, left_out = zip(*arriving.wait(), strict=True)
        self.recent[:] = torch.tensor([max(1, *needed), int(self.recent[0])], device="cpu")
        self._left_out += sum(left_out)

    def take_left_out(self) -> int:
        """Return and reset the number of changed weights for which messages had no room, over all ranks of the axis.

        The counters of the last message are included once `read_counters` has read them.
        """
        found, self._left_out = self._left_out, 0
        return found
