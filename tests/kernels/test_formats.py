"""Test the sizes of segments that are quantized in blocks: bytes of payload and of scales."""

from typing import Any

from helpers.refusals import not_refused
from hypothesis import given
from hypothesis import strategies as st

from megazpp.kernels.formats import BLOCK_SIZES, BlockFormat


def test_full_blocks_cost_their_bits_and_one_bf16_scale():
    expected: dict[Any, float] = {(8, 128): 8.125, (8, 256): 8.0625, (4, 128): 4.125, (4, 32): 4.5}
    assert {kind: BlockFormat(*kind).bits_per_element(kind[1] * 10) for kind in expected} == expected


@given(st.sampled_from([4, 8]), st.sampled_from(BLOCK_SIZES), st.integers(0, 2**40))
def test_blocks_cover_a_segment_without_empty_blocks(bits, block_size, n):
    fmt = BlockFormat(bits, block_size)
    assert (fmt.num_blocks(n) - 1) * block_size < n <= fmt.num_blocks(n) * block_size or n == 0
    assert fmt.payload_bytes(n) * 8 == fmt.num_blocks(n) * block_size * bits
    assert fmt.scale_bytes(n) == 2 * fmt.num_blocks(n)
    assert fmt.bits_per_element(0) == 0.0


def test_unsupported_bits_and_block_sizes_are_rejected():
    wrong: list[Any] = [(bits, 128, False, f"bits={bits}, block_size=128") for bits in (2, 3, 16)]
    wrong += [(8, size, False, f"block_size={size}") for size in (16, 4096, 96, 0, -32)]
    wrong += [(8, 32, True, "bits=8, block_size=32, clip=True")]
    assert not_refused(wrong, BlockFormat, AssertionError) == []
