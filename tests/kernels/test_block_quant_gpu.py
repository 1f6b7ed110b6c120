"""The same comparisons on a GPU, on shapes that fill it, and buffers that 32-bit offsets cannot address."""

from __future__ import annotations

import pytest
import torch
from helpers.block_quant import (
    bits,
    difficult,
    many_segments,
    pack_both,
    quantize_both,
    segments,
    sum_both,
    unpack_both,
)

from kernels.block_quant import TRITON, Feedback, pack, range_table, unpack, unpack_sum
from kernels.formats import BlockFormat, plan_row

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 512, 1024, 2048])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_cuda_quantizes_like_the_reference(num_bits: int, block_size: int, dtype: torch.dtype):
    assert TRITON is not None
    for n in (1, 63, 257, 4096, 4101, 100_000):
        for offset in (0, 1):
            x = difficult((2, 4), n, dtype, seed=n)
            fmt = BlockFormat(num_bits, block_size)
            quantize_both(TRITON, x, fmt, "cuda", swapped=True, offset=offset, steps=offset * 2, beta=0.4 * offset)


@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [8, 4])
def test_cuda_quantizes_differences_like_the_reference(num_bits: int, dtype: torch.dtype, base_dtype: torch.dtype):
    assert TRITON is not None
    for n in (63, 4101, 100_000):
        x = difficult((2, 4), n, dtype, seed=n)
        for base in (x.to(base_dtype), difficult((2, 4), n, base_dtype, seed=n + 3)):
            quantize_both(TRITON, x, BlockFormat(num_bits, 128), "cuda", swapped=True, offset=n % 2, base=base)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_cuda_sums_like_the_reference(num_parts: int, num_bits: int):
    assert TRITON is not None
    for n, dtype in ((257, torch.bfloat16), (100_000, torch.float32)):
        parts = difficult((num_parts, 9), n, torch.float32, seed=num_parts)
        sum_both(TRITON, parts, BlockFormat(num_bits, 128), "cuda", dtype)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_offsets_beyond_two_to_the_31_are_right(num_bits: int):
    """One segment of 2^31 + 257 elements: its last blocks equal those of the same elements quantized alone."""
    n, fmt = 2**31 + 257, BlockFormat(num_bits, 128)
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-5000:] = torch.randn(5000, device="cuda")
    table = range_table(plan_row(n, fmt), torch.bfloat16)
    messages = torch.empty(table.layout.message_bytes, dtype=torch.uint8, device="cuda")
    pack(x, table, messages=messages, errors=Feedback.zeros((), table, "cuda"))
    whole = 4096 + 257  # a multiple of the block size from the end
    tail, tail_table = x[-whole:].clone(), range_table(plan_row(whole, fmt), torch.bfloat16)
    tail_messages = torch.empty(tail_table.layout.message_bytes, dtype=torch.uint8, device="cuda")
    pack(tail, tail_table, messages=tail_messages)
    ((payload, scales),) = segments(messages, table.layout)
    ((tail_payload, tail_scales),) = segments(tail_messages, tail_table.layout)
    assert torch.equal(payload[-tail_payload.numel() :], tail_payload)
    assert torch.equal(scales[-tail_scales.numel() :], tail_scales)
    assert not scales[: 2**23].any()
    unpack(messages, table, out=x)
    unpack(tail_messages, tail_table, out=tail)
    assert torch.equal(x[-whole:], tail)


def test_rows_that_lie_beyond_two_to_the_31_bytes_are_right():
    """Strides, not only offsets within a row, need 64 bits."""
    table, apart = range_table(plan_row(1000, BlockFormat(8, 256)), torch.float32), 2**31 + 16
    buffer = torch.zeros(2 * apart, dtype=torch.uint8, device="cuda")
    messages = buffer.as_strided((2, table.layout.message_bytes), (apart, 1))
    x = torch.randn(2, 1000, device="cuda")
    pack(x, table, messages=messages)
    out, expected = torch.empty_like(x[0]), torch.empty_like(x[0])
    unpack_sum(messages, table, out=out)
    unpack_sum(messages.contiguous(), table, out=expected)
    assert torch.equal(bits(out), bits(expected))
    ((_, scales),) = segments(messages, table.layout)
    torch.testing.assert_close(out, x.sum(0), rtol=0, atol=2 * float(scales.max()))


@pytest.mark.parametrize("exact", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [8, 4])
def test_cuda_packs_and_unpacks_many_segments_like_the_reference(num_bits: int, dtype: torch.dtype, exact: torch.dtype):
    assert TRITON is not None
    sizes = [(300, True), (33, False), (8192, True), (16384, False), (0, False), (5000, True), (4099, False)]
    for seed, order in enumerate((sizes, sizes[::-1])):
        layout = many_segments(order, BlockFormat(num_bits, 128), exact.itemsize)
        x = difficult((2, 4), layout.size, dtype, seed=seed)
        pack_both(TRITON, x, layout, "cuda", dtype=exact, swapped=True, offset=seed, steps=2)
        pack_both(TRITON, x, layout, "cuda", dtype=exact, base=x.bfloat16())
        for num_parts in (1, 5):
            parts = difficult((num_parts, 3), layout.size, torch.float32, seed=seed)
            unpack_both(TRITON, parts, layout, "cuda", dtype, exact)
