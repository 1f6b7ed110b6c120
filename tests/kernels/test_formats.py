"""Sizes of quantized segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.formats import BlockFormat

BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize(
    ("bits", "block_size", "expected"),
    [(8, 128, 8.125), (8, 256, 8.0625), (4, 128, 4.125), (4, 32, 4.5)],
)
def test_whole_blocks_cost_their_bits_and_one_bf16_scale(bits: int, block_size: int, expected: float):
    assert BlockFormat(bits, block_size).bits_per_element(block_size * 10) == expected


@given(st.sampled_from([4, 8]), st.sampled_from(BLOCK_SIZES), st.integers(0, 2**40))
def test_blocks_cover_a_segment_and_no_block_is_without_data(bits: int, block_size: int, n: int):
    fmt = BlockFormat(bits, block_size)
    assert (fmt.num_blocks(n) - 1) * block_size < n <= fmt.num_blocks(n) * block_size or n == 0
    assert fmt.payload_bytes(n) * 8 == fmt.num_blocks(n) * block_size * bits
    assert fmt.scale_bytes(n) == 2 * fmt.num_blocks(n)
    assert fmt.bits_per_element(0) == 0.0


@pytest.mark.parametrize(
    ("bits", "block_size"), [(2, 128), (3, 128), (16, 128), (8, 16), (8, 4096), (8, 96), (4, 0), (4, -32)]
)
def test_other_bits_and_block_sizes_are_refused_with_their_value(bits: int, block_size: int):
    with pytest.raises(ValueError, match=str(bits) if bits not in (4, 8) else str(block_size)):
        BlockFormat(bits, block_size)
