"""Quantization formats and message layouts in plain integers, before any tensor exists.

A segment is a run of elements, such as one parameter's shard. It is cut into blocks of `block_size` elements with one
scale each. The last block is padded with zeros, so both ends can compute the bytes of a segment from its length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SCALE_BYTES = 2  # a scale is bf16
ALIGNMENT = 16  # payloads in a message start at multiples of this many bytes
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 2048


@dataclass(frozen=True)
class BlockFormat:
    """Quantization in blocks of `block_size` consecutive elements of `bits` each, with one bf16 scale per block.

    int8:
        x ~= q * scale, q in -127..127. The scale is the largest magnitude / 127, rounded up to bf16.
    int4:
        x ~= q * scale, q in -8..7. Let m be the largest magnitude and o the largest magnitude of the opposite sign. The
        scale is the larger of m / (8 + 7/16) and o / (7 + 7/16), rounded to bf16: the smallest scale that clips
        nothing. If at least half of the block is within 1/16 of m, as in AdamW's first steps, the scale is m / 7, so
        that both signs keep their magnitude. The sign of the scale makes the integer of m negative; if +m and -m both
        occur, the integer of -m is negative. Byte j of a block holds q[j] + 8 in its low half and q[j + block_size / 2]
        + 8 in its high half.
    int4 with `clip`:
        The scale is m / 9 instead of that larger value, so the largest elements are clipped. It is for gradients with
        error feedback, which adds the clipped part to the next message.

    Raises:
        ValueError: bits is not 4 or 8, block_size is not a power of two in 32..2048, or clip is set for 8 bits.
    """

    bits: Literal[4, 8]
    block_size: int
    clip: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"BlockFormat: bits must be 4 or 8, not {self.bits}")
        if self.clip and self.bits != 4:
            raise ValueError(f"BlockFormat: clip needs bits=4, not {self.bits}")
        power_of_two = self.block_size & (self.block_size - 1) == 0
        if not (MIN_BLOCK_SIZE <= self.block_size <= MAX_BLOCK_SIZE and power_of_two):
            raise ValueError(
                f"BlockFormat: block_size must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE},"
                f" not {self.block_size}"
            )

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.block_size * self.bits // 8

    def num_blocks(self, n: int) -> int:
        """Return the number of blocks of a segment of n elements; the last block may hold fewer elements."""
        return -(-n // self.block_size)

    def payload_bytes(self, n: int) -> int:
        """Return the bytes of the integers of a segment of n elements, including the padding of its last block."""
        return self.num_blocks(n) * self.block_bytes

    def scale_bytes(self, n: int) -> int:
        """Return the bytes of the scales of a segment of n elements."""
        return self.num_blocks(n) * SCALE_BYTES

    def bits_per_element(self, n: int) -> float:
        """Return the bits per element of a segment of n elements in a message, including scales and padding."""
        return 8 * (self.payload_bytes(n) + self.scale_bytes(n)) / n if n else 0.0


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """The bytes of a message that hold the elements `start` to `stop` of a flat shard.

    `payload` and `scales` are (first byte, number of bytes).
    """

    start: int
    stop: int
    payload: tuple[int, int]  # the quantized integers, or the unquantized elements
    scales: tuple[int, int] | None  # None if these elements are not quantized


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """The places of a flat shard's elements in its message."""

    size: int  # elements of the flat shard
    message_bytes: int  # a multiple of 16
    ranges: tuple[ByteRange, ...]  # the quantized ranges first, then the unquantized ones
    fmt: BlockFormat | None  # format of the quantized ranges; None if nothing is quantized


def place_quantized(segments: Iterable[tuple[int, int]], fmt: BlockFormat) -> tuple[list[ByteRange], int]:
    """Place quantized segments in a message: first all payloads, then all scales.

    Args:
        segments: (first element, element after the last) of each segment.
        fmt: their quantization format.
    Returns:
        The byte range of each segment, and the byte after the last one.
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
    """Lay out a message of one quantized segment of n elements."""
    ranges, size = place_quantized([(0, n)], fmt)
    return MessageLayout(size=n, message_bytes=align(size), ranges=tuple(ranges), fmt=fmt)


def feedback_format(fmt: BlockFormat) -> BlockFormat:
    """Return the format that stores the quantization errors of messages in `fmt`: int8 with the same block size."""
    return BlockFormat(8, fmt.block_size)


def feedback_layout(layout: MessageLayout) -> MessageLayout:
    """Lay out the quantization errors of the quantized segments of `layout`, in the same order."""
    assert layout.fmt is not None, "a layout that quantizes nothing has no quantization errors"
    fmt = feedback_format(layout.fmt)
    ranges, size = place_quantized([(p.start, p.stop) for p in layout.ranges if p.scales is not None], fmt)
    return MessageLayout(size=layout.size, message_bytes=align(size), ranges=tuple(ranges), fmt=fmt)


def align(offset: int) -> int:
    """Round an offset up to a multiple of 16 bytes."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
