"""Formats in integers, before any tensor exists: sizes of a quantized segment, and where segments lie in a message.

A segment of n elements is cut into blocks of `block_size`; each block has one scale. The last block may be short in
data, but it is whole on the wire: its missing elements are sent as zeros, so a segment of any length has a size that
both ends compute from n alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SCALE_BYTES = 2  # bfloat16
ALIGNMENT = 16  # of payloads in a message, in bytes
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 2048


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of `block_size` consecutive elements, `bits` each, with one bf16 scale per block.

    int8: x ~= q * scale, q in -127..127, scale = largest magnitude / 127, rounded up to bf16.
    int4: x ~= q * scale, q in -8..7. With m the largest magnitude and o the largest of the other sign, the scale is the
        larger of m / (8 + 7/16) and o / (7 + 7/16), rounded to bf16: the smallest at which nothing is clipped. Where
        half of a block or more is within 1/16 of m, as AdamW's first steps are, it is m / 7, which keeps the length of
        both signs. Its sign makes m's integer negative; of +m and -m the latter counts as m. Byte j of a block holds
        q[j] + 8 in its low half and q[j + block_size / 2] + 8 in its high half.
    int4 with `clip`: m / 9 instead of the larger of the two; what is clipped has to come with the next message, by
        error feedback. For gradients; "Gradients" in docs/benchmarks.md has what it gains and costs.

    Raises:
        ValueError: bits is not 4 or 8, or block_size is not a power of two in 32..2048, or clip is for 8 bits.
    """

    bits: Literal[4, 8]
    block_size: int
    clip: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"BlockFormat: bits must be 4 or 8, not {self.bits}")
        if self.clip and self.bits != 4:
            raise ValueError(f"BlockFormat: clip is for 4 bits, not {self.bits}")
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
        """Blocks of a segment of n elements; the last may be short."""
        return -(-n // self.block_size)

    def payload_bytes(self, n: int) -> int:
        """Bytes of the integers of a segment of n elements, the padding of its last block included."""
        return self.num_blocks(n) * self.block_bytes

    def scale_bytes(self, n: int) -> int:
        """Bytes of the scales of a segment of n elements."""
        return self.num_blocks(n) * SCALE_BYTES

    def bits_per_element(self, n: int) -> float:
        """Bits on the wire per element of a segment of n elements, scales and padding included."""
        return 8 * (self.payload_bytes(n) + self.scale_bytes(n)) / n if n else 0.0


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """The bytes of a message that hold a run of neighbouring elements of the shard: first byte and number of bytes."""

    start: int
    stop: int
    payload: tuple[int, int]  # quantized, or the elements as they are
    scales: tuple[int, int] | None  # None: not quantized


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """The places of one shard's elements in its message."""

    size: int  # elements of the shard
    message_bytes: int  # a multiple of 16
    ranges: tuple[ByteRange, ...]  # quantized runs, then exact ones
    fmt: BlockFormat | None  # of the quantized runs; None if nothing is quantized


def place_quantized(segments: Iterable[tuple[int, int]], fmt: BlockFormat) -> tuple[list[ByteRange], int]:
    """Place segments (first element, the one after the last) in a message: payloads, then scales; (ranges, end)."""
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
    """A message of one quantized segment of n elements."""
    ranges, size = place_quantized([(0, n)], fmt)
    return MessageLayout(size=n, message_bytes=align(size), ranges=tuple(ranges), fmt=fmt)


def feedback_format(fmt: BlockFormat) -> BlockFormat:
    """The format in which the error of a message in `fmt` is kept."""
    return BlockFormat(8, fmt.block_size)


def feedback_layout(layout: MessageLayout) -> MessageLayout:
    """The places of the errors of the quantized segments of `layout`, in the same order."""
    assert layout.fmt is not None, "nothing is lost where nothing is quantized"
    fmt = feedback_format(layout.fmt)
    ranges, size = place_quantized([(p.start, p.stop) for p in layout.ranges if p.scales is not None], fmt)
    return MessageLayout(size=layout.size, message_bytes=align(size), ranges=tuple(ranges), fmt=fmt)


def align(offset: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
