"""The byte layout of ZeRO++'s messages, and the codecs that pack flat shards into messages and unpack them.

FSDP2 concatenates this rank's shards of a unit's parameters in one flat shard. Each parameter's rows on this rank are
padded with zeros to the same count on every rank. A segment is the elements of one parameter in the flat shard. A
flat shard is sent as one message of bytes, whose layout is planned once per unit:

    | payloads of the quantized segments | their scales | segments that are sent exactly | padding to 16 bytes |

The payload of each quantized segment, and each run of adjacent exact segments, begins at a multiple of 16 bytes. No
quantization block spans two parameters. In a block of half norm gains and half weights, the large gains would lower
the signal-to-noise ratio of the weights by 25 dB. 1-D parameters are sent exactly. So are parameters whose quantized
blocks and scales would take as many bytes as their unquantized elements, or more. Because rows are padded, a segment
has the same size on all ranks for every parameter shape and number of ranks. So all ranks use one layout, and the
code that packs and unpacks messages needs no case for uneven shards.

    Example: W = 4 ranks, norm [6], weight [6, 100], 8 bits, blocks of 128, exact segments in bf16
        segments    norm: 2 elements (6 rows padded to 8, 2 per rank), weight: 200 elements (2 rows of 100)
        message     payload 2 blocks = 256 B | 2 scales = 4 B, padded to 272 | norm 4 B, padded to 288 B

In ZeRO++ only these codecs call the kernels that quantize and dequantize. Letters in shapes: A, B: leading dims that
count peers, with any strides; S: elements of a flat shard; M: bytes of a message. Each method that packs or unpacks
calls one kernel, for any number of parameters and peers.
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
    """The range of elements in a flat shard that belongs to one parameter.

    A flat shard consists of this rank's shards of all parameters of a sharding unit, one after the other.
    """

    name: str  # name of the parameter in the model
    start: int  # index of the segment's first element in the flat shard
    size: int  # number of elements including FSDP2's padding, the same on every rank
    exact: bool  # True if the parameter is never quantized

    @property
    def stop(self) -> int:
        """The index in the flat shard of the first element after this segment, the end of the range from `start`."""
        return self.start + self.size


def plan_segments(
    parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int, *, exact: Collection[str] = ()
) -> tuple[Segment, ...]:
    """Return the segment of each parameter in the flat shard that FSDP2 makes of a sharding unit.

    Args:
        parameters: name and shape of each of the unit's parameters, in FSDP2's flat order. Shapes are unsharded over
            the data ranks, but local to this tensor-parallel rank.
        num_ranks: number of data ranks over which dim 0 of each parameter is sharded.
        exact: names of parameters that are never quantized. Parameters with at most one dim are never quantized either.
    """
    segments, start = [], 0
    for name, shape in parameters:
        rows = shape[0] if shape else 1
        size = -(-rows // num_ranks) * math.prod(shape[1:])
        segments.append(Segment(name=name, start=start, size=size, exact=len(shape) <= 1 or name in exact))
        start += size
    return tuple(segments)


def own_rows(rows: int, num_ranks: int, rank: int) -> int:
    """Return the number of a parameter's rows (dim 0) in the shard that FSDP2 gives to `rank`, without padding.

    Let c = ceil(rows / num_ranks). The shard begins at row rank x c and has at most c rows, so the last ranks may have
    fewer rows or none.
    """
    most = -(-rows // num_ranks)
    return max(min(most, rows - rank * most), 0)


@functools.cache
def plan_message(segments: tuple[Segment, ...], fmt: BlockFormat | None, *, exact_itemsize: int) -> MessageLayout:
    """Return the byte layout of the message that carries a flat shard.

    Args:
        segments: segments of the flat shard, one per parameter.
        fmt: block format of the quantized segments; None sends all segments without quantization.
        exact_itemsize: bytes per element of the segments that are sent without quantization.
    """
    quantized: list[Segment] = []
    exact: list[Segment] = []
    for segment in segments:
        size = segment.size
        # A segment is quantized only if its payload and scales take fewer bytes than its unquantized elements.
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
    """Merge adjacent segments of a flat shard into runs of elements, and return the indices (start, stop) of each run.

    Empty segments are left out.
    """
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
    """The codec that packs the flat shards of one sharding unit into messages, and unpacks received messages.

    A flat shard holds weights for a gather, or gradients for a reduction.

    Args:
        layout: byte layout of each message, with the block format of its quantized segments.
        dtype: dtype in which the elements of the unquantized segments are sent.
    """

    def __init__(self, layout: MessageLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self._table = range_table(layout, dtype)

    @property
    def message_bytes(self) -> int:
        """The number of bytes, M, of the message that carries one flat shard of the unit."""
        return self.layout.message_bytes

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Allocate messages [*peers, M] uint8, M bytes to each peer, for `pack` to write into.

        The messages are filled with zeros, so that the padding bytes of a message are equal on all ranks.
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
        """Quantize flat shards, and pack each of them into its message.

        Args:
            shards: [A, B, S] flat shards of S elements for A x B peers, with any strides.
            messages: [A, B, M] uint8 messages, M bytes each, which are overwritten.
            errors: quantization errors of earlier calls, from `new_errors`. They are added to the shards before
                quantization and then replaced by the new errors.
            beta: weight of the earlier errors in the errors that replace them (LoCo's moving average).
            base: [A, B, S] weights that the receivers already hold. If given, quantized segments of the messages carry
                `shards` - `base`, and unquantized segments carry `shards`.
        """
        pack(shards, self._table, messages=messages, errors=errors, beta=beta, base=base)

    def new_errors(self, *peers: int, device: torch.device) -> Feedback | None:
        """Allocate the error feedback of messages [*peers, M], M bytes to each peer, with all quantization errors zero.

        The errors are stored as int8 blocks, one byte per quantized element. Returns None if the messages' layout
        quantizes no segment.
        """
        is_exact = all(part.scales is None for part in self.layout.ranges)
        return None if is_exact else Feedback.zeros(peers, self._table, device)

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """Dequantize messages [A, B, M], M bytes from each of A x B peers, into `shards` [A, B, S] of S elements each.

        `shards` may have any strides.
        """
        unpack(messages, self._table, out=shards)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """Apply messages that `pack` has made with a `base` to this rank's copy of the base, in place.

        Quantized elements are differences: each is added to its element of the base, and the sum is rounded once.
        Unquantized elements replace their elements of the base.

        Args:
            messages: [B, M] uint8 messages, M bytes from each of B peers.
            base: [B, S] weights, a flat shard of S elements for each peer.
        """
        unpack_onto(messages, self._table, out=base)

    def elements(self, messages: torch.Tensor) -> torch.Tensor:
        """Return a view [B, S] of the S unquantized elements in each of B messages [B, M], in the dtype of the codec.

        The view exists only for a layout that quantizes no segment; the elements are contiguous in a message then.
        """
        (all_elements,) = self.layout.ranges
        start, num_bytes = all_elements.payload
        return messages[..., start : start + num_bytes].view(self.dtype)

    def unpack_sum(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        """Dequantize messages of K peers, and sum the K flat shards in fp32.

        Args:
            messages: [K, B, M] uint8 messages of M bytes, B from each of K peers.
            out: [B, S] tensor for the B sums of S elements.
            accumulate: True adds the sums to the values in `out`; False overwrites them.
        """
        unpack_sum(messages, self._table, out=out, accumulate=accumulate)


# Room of a lossless message beyond the bytes that the last two deltas predict: ROOM is a fraction of these bytes, SPARE
# a number of bytes. SPARE serves small units, for whose deltas the prediction is off by a larger fraction.
ROOM, SPARE = 0.125, 512


class LosslessCodec:
    """The codec of lossless deltas: it sends the changes of a unit's 16-bit weights bit for bit.

    The device computes how many bytes a delta takes. The host must give the message size to the collective before that.
    So the host predicts the size: the bytes that the last delta needed, plus their growth since the delta before, if
    they have grown. To this prediction it adds an eighth and 512 bytes. The first two messages have room for any delta:
    the first step of a learning rate warm-up changes almost no weights, so the size of its delta predicts nothing.

    Each message contains the number of bytes that its delta needed. All ranks of the cross axis receive all messages
    and use the largest of these numbers, so all ranks make the same prediction. The host reads the numbers one step
    later, when they have already arrived.

    Blocks of changes that do not fit into a message are left out. Their weights stay unchanged in the resident weights
    of every rank, including the sender's, so the next delta contains these changes.

    Args:
        size: number of elements of the unit's flat shard.
    Attributes:
        recent: [2] int64 on the host: bytes that the last delta and the delta before needed, each as the maximum over
            the ranks of the cross axis; 0 if there was no such delta. Checkpoints store this tensor.
    """

    def __init__(self, size: int) -> None:
        self.size, self._left_out = size, 0
        self.recent = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._arriving: HostCopy | None = None

    @property
    def message_bytes(self) -> int:
        """The predicted bytes of the next lossless delta's message.

        Reading this property waits until the size counters of the last delta are on the host (`read_counters`).
        """
        self.read_counters()
        last, before = self.recent.tolist()
        needed = int((last + max(last - before, 0)) * (1 + ROOM)) + SPARE
        return message_bytes(self.size, min(needed, 2 * self.size) if before else None)

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Allocate messages [*peers, M] uint8 for lossless deltas, M bytes to each peer, without initial values."""
        return torch.empty(*peers, self.message_bytes, dtype=torch.uint8, device=device)

    def pack(self, shard: torch.Tensor, message: torch.Tensor, *, base: torch.Tensor) -> None:
        """Encode the changes from `base` to `shard` into `message`, a lossless delta.

        Args:
            shard: [S] flat shard of S elements with this rank's current weights.
            base: [S] the row of the resident weights that every rank of the cross axis holds for this rank.
            message: [M] uint8 message of M bytes, which is overwritten.
        """
        encode(shard, base, message)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """Apply the lossless deltas of N nodes to the resident weights in place: row n becomes node n's new weights.

        Args:
            messages: [N, M] uint8 messages of M bytes, one from each node.
            base: [N, S] resident weights, a flat shard of S elements from each node.
        """
        decode(messages, base)

    def learn(self, messages: torch.Tensor) -> None:
        """Start a copy of the size counters of the messages [N, M], M bytes from each of N nodes, to the host.

        Each message has two size counters: the bytes that its lossless delta needed, and the number of changed weights
        that were left out because the message was full. `read_counters` waits for the copy.
        """
        if not isinstance(messages, FakeTensor):
            self._arriving = HostCopy(numbers(messages).clone())  # a view would keep all of `messages` in memory

    def read_counters(self) -> int:
        """Wait until the last lossless deltas' size counters are on the host, and record the bytes in `recent`.

        The next message's size is predicted from `recent`. If `learn` has not been called since the last call of this
        method, there are no new counters, and this method does nothing.

        Returns:
            The number of changed weights that did not fit into these deltas, the same on all ranks of the cross axis; 0
            if there are no new counters.
        """
        if self._arriving is None:
            return 0
        arriving, self._arriving = self._arriving, None
        needed, left_out = zip(*arriving.wait(), strict=True)
        # Record at least 1 byte, because 0 in `recent` means that there was no delta.
        self.recent[:] = torch.tensor([max(1, *needed), int(self.recent[0])], device="cpu")
        self._left_out += sum(left_out)
        return sum(left_out)

    def take_left_out(self) -> int:
        """Return how many changed weights did not fit into the unit's lossless deltas since the last call.

        The number is the sum over all ranks of this rank's cross axis. It includes the last delta only if
        `read_counters` has read the delta's size counters.
        """
        found, self._left_out = self._left_out, 0
        return found
