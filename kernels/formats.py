"""Formats of ZeRO++'s quantized messages and layouts of their bytes, in plain integers, before any tensor exists.

A segment is a run of consecutive elements, such as one parameter's shard. It is cut into blocks of `block_size`
elements with one scale each. The last block is padded with zeros, so sender and receiver compute the same number of
bytes from the segment's length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SCALE_BYTES = 2  # bytes of a block's scale in a message, which is one bf16 number
ALIGNMENT = 16  # each segment's quantized integers start at a multiple of this many bytes in the message
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class BlockFormat:
    """Quantization of `block_size` consecutive elements x to integers q of `bits` bits, with one bf16 scale per block.

    int8:
        x ~= q * scale, q in -127..127. The scale is the block's largest magnitude / 127, rounded up to bf16.
    int4:
        x ~= q * scale, q in -8..7. Let m be the largest magnitude in the block, and o the largest magnitude of elements
        with the opposite sign. The sign of the scale makes the integer of the element with magnitude m negative; if +m
        and -m both occur, the integer of -m is negative. The scale's magnitude is the larger of m / (8 + 7/16) and
        o / (7 + 7/16), rounded to bf16. So m rounds to at most 8 and o to at most 7, and nothing is clipped. If at
        least half of the elements have a magnitude of 15/16 m or more, as in AdamW's first steps, the scale's magnitude
        is m / 7 instead, so that +m and -m become integers of the same magnitude. Byte j of a block holds q[j] + 8 in
        its low 4 bits and q[j + block_size / 2] + 8 in its high 4 bits.
    int4 with `clip`:
        The scale's magnitude is m / 9 instead of the larger of the two quotients, so the largest elements are clipped.
        This format is for gradients with error feedback, which adds what was clipped to the next message.

    `block_size` is one of BLOCK_SIZES, and `clip` is for int4 only.
    """

    bits: Literal[4, 8]
    block_size: int
    clip: bool = False

    def __post_init__(self) -> None:
        is_supported = self.block_size in BLOCK_SIZES and (self.bits == 4 or (self.bits == 8 and not self.clip))
        assert is_supported, f"{self} is not supported"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's quantized integers in a message, without the block's scale."""
        return self.block_size * self.bits // 8

    def num_blocks(self, n: int) -> int:
        """Return the number of blocks that a segment of n elements is cut into, with a possibly shorter last block."""
        return -(-n // self.block_size)

    def payload_bytes(self, n: int) -> int:
        """Return the bytes of the quantized integers of a segment of n elements, padded to whole blocks."""
        return self.num_blocks(n) * self.block_bytes

    def scale_bytes(self, n: int) -> int:
        """Return the bytes of the bf16 scales, one per block, of a segment of n elements."""
        return self.num_blocks(n) * SCALE_BYTES

    def bits_per_element(self, n: int) -> float:
        """Return how many bits a message takes per element of a segment of n elements, with scales and padding.

        The result is 0.0 for an empty segment.
        """
        return 8 * (self.payload_bytes(n) + self.scale_bytes(n)) / n if n else 0.0


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """The bytes of a message that hold the elements `start` to `stop` - 1 of a rank's flat shard.

    Attributes:
        start: index of the first element in the flat shard.
        stop: index after the last element.
        payload: (first byte, number of bytes) of the quantized integers, or of the unquantized elements.
        scales: (first byte, number of bytes) of the blocks' scales; None if these elements are not quantized.
    """

    start: int
    stop: int
    payload: tuple[int, int]
    scales: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """Layout of a message: the byte ranges that hold the elements of a rank's flat shard.

    Attributes:
        size: number of elements of the flat shard.
        message_bytes: bytes of the message, a multiple of 16.
        ranges: byte ranges: first one for each quantized segment, then one for each run of adjacent exact segments,
            which are sent without quantization.
        fmt: format of the quantized segments; None if no segment is quantized.
    """

    size: int
    message_bytes: int
    ranges: tuple[ByteRange, ...]
    fmt: BlockFormat | None


def place_quantized(segments: Iterable[tuple[int, int]], fmt: BlockFormat) -> tuple[list[ByteRange], int]:
    """Assign bytes of a message to quantized segments: first the integers of all segments, then all their scales.

    Args:
        segments: (index of the first element, index after the last element) of each segment in the flat shard.
        fmt: quantization format of these segments.
    Returns:
        The byte range of each segment, and the number of bytes up to the end of the last scale.
    """
    payloads, ranges, offset = [], [], 0
    for start, stop in segments:
        payloads.append((start, stop, (offset, fmt.payload_bytes(stop - start))))
        offset = align(offset + fmt.payload_bytes(stop - start))
    for start, stop, payload in payloads:
        scales = (offset, fmt.scale_bytes(stop - start))
        ranges.append(ByteRange(start=start, stop=stop, payload=payload, scales=scales))
        offset = sum(scales)
    return ranges, offset


def plan_row(n: int, fmt: BlockFormat) -> MessageLayout:
    """Return the layout of a message that holds one quantized segment of n elements and nothing else."""
    ranges, size = place_quantized([(0, n)], fmt)
    return MessageLayout(size=n, message_bytes=align(size), ranges=tuple(ranges), fmt=fmt)


def feedback_format(fmt: BlockFormat) -> BlockFormat:
    """Return the format in which error feedback stores the errors of messages in `fmt`: int8, same block size."""
    return BlockFormat(8, fmt.block_size)


def feedback_layout(layout: MessageLayout) -> MessageLayout:
    """Return the layout of the buffer in which error feedback stores the quantization errors of messages.

    The buffer is itself a message. It holds the quantized segments of `layout` in the same order, and no others.
    """
    assert layout.fmt is not None, "a message layout without quantized segments has no quantization errors"
    fmt = feedback_format(layout.fmt)
    ranges, size = place_quantized([(p.start, p.stop) for p in layout.ranges if p.scales is not None], fmt)
    return MessageLayout(size=layout.size, message_bytes=align(size), ranges=tuple(ranges), fmt=fmt)


def align(offset: int) -> int:
    """Round an offset in a message up to a multiple of 16 bytes, from which GPUs load and store fastest."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
