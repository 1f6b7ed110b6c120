"""Sizes of a block-quantized segment, in integers: what travels, before any tensor exists.

A segment of n elements is cut into blocks of `block_size`; each block has one scale. The last block may be short in
data, but it is whole on the wire: its missing elements are sent as zeros, so a segment of any length has a size that
both ends compute from n alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCALE_BYTES = 2  # bfloat16
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 2048


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of `block_size` consecutive elements, `bits` each, with one bf16 scale per block.

    int8: x ~= q * scale, q in -127..127, scale = largest magnitude / 127, rounded up to bf16.
    int4: x ~= q * scale, q in -8..7, scale = (element of largest magnitude, with its sign) / -8, rounded to bf16; on a
        tie between +m and -m the negative one sets the sign. Byte j of a block holds q[j] + 8 in its low half and
        q[j + block_size / 2] + 8 in its high half.

    int2: as int4, with q in -2..1 and scale = the same element / -2. Byte j holds four integers plus 2, from its lowest
        bits to its highest q[2j], q[2j + block_size / 2], q[2j + 1], q[2j + 1 + block_size / 2]. Experimental.

    Raises:
        ValueError: bits is not 2, 4 or 8, or block_size is not a power of two in 32..2048.
    """

    bits: Literal[2, 4, 8]
    block_size: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"BlockFormat: bits must be 2, 4 or 8, not {self.bits}")
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
