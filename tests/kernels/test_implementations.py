"""The C and the Triton implementation against the reference, bit for bit, wherever the segments lie.

Triton runs on the GPU where there is one, on shapes that fill it, else on CPU tensors under its interpreter (see
tests/conftest.py), which takes 10 ms and more per program: on few shapes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from helpers.block_quant import (
    assert_same,
    difficult,
    many_segments,
    messages,
    one_segment,
    pack_both,
    quantize_both,
    segments,
    unpack_both,
)
from helpers.tiers import slow

from kernels import block_quant
from kernels.block_quant import TRITON, Feedback, pack, range_table, reference, unpack, unpack_sum
from kernels.c_library import CLibraryError
from kernels.formats import BlockFormat, plan_row

ON_GPU = torch.cuda.is_available()
DEVICES = {"reference": "cpu", "native": "cpu", "triton": "cuda" if ON_GPU else "cpu"}
BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048]
DTYPES = FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = [(8, False), (4, False), (4, True)]  # bits, clip
LENGTHS = [1, 63, 256, 257, 4096, 4101, 8300, *[100_000] * ON_GPU]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, on NaN and Inf


def cases(every: list[Any], few: list[Any]) -> list[Any]:
    """All of `every` for C, and for Triton on a GPU; else `few` for Triton."""
    marks = [pytest.mark.gpu] if ON_GPU else []
    return [
        *(pytest.param("native", *case) for case in every),
        *(
            case if hasattr(case, "marks") else pytest.param("triton", *case, marks=marks)
            for case in (every if ON_GPU else few)
        ),
    ]


def module_of(name: str) -> ModuleType:
    library = block_quant.native.library()
    if name == "native" and isinstance(library, CLibraryError):
        pytest.skip(str(library))
    if name == "triton" and TRITON is None:
        pytest.skip("Triton is not installed")
    return {"reference": reference, "native": block_quant.native, "triton": TRITON}[name]


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return module_of("native")


@pytest.mark.parametrize(
    ("name", "lengths", "dtype", "block_size", "bits", "clip"),
    cases(
        [(LENGTHS, dtype, size, *kind) for dtype in DTYPES for size in BLOCK_SIZES for kind in KINDS],
        [
            *(([1], FP32, 32, 8, False), ([63], BF16, 32, 4, False), ([256], FP16, 256, 8, False)),
            *(([257], FP32, 64, 4, False), ([257], BF16, 2048, 8, False), ([4096], BF16, 128, 8, False)),
            *(([4101], FP32, 1024, 4, False), ([4101], FP16, 512, 4, False)),
            *(([size + size // 2 + 5], BF16, size, *kind) for size in BLOCK_SIZES for kind in KINDS),
        ],
    ),
)
def test_blocks_of_any_kind_are_the_reference_s(
    name: str, lengths: list[int], dtype: torch.dtype, block_size: int, bits: Literal[4, 8], clip: bool
):
    for n in lengths:
        x, fmt = difficult((4, 2), n, dtype), BlockFormat(bits, block_size, clip)
        quantize_both(module_of(name), x, fmt, DEVICES[name], swapped=n % 2 == 0, offset=n % 7)


@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize(("bits", "clip"), KINDS)
@pytest.mark.parametrize(("name", "lengths", "dtype"), cases([(LENGTHS, dtype) for dtype in DTYPES], [([300], BF16)]))
def test_errors_that_are_fed_back_are_the_reference_s(
    name: str, lengths: list[int], dtype: torch.dtype, bits: Literal[4, 8], clip: bool, beta: float
):
    for n in lengths:
        x, fmt = difficult((2, 4), n, dtype, seed=n), BlockFormat(bits, 128, clip)
        quantize_both(module_of(name), x, fmt, DEVICES[name], swapped=True, offset=1, steps=3, beta=beta)


@pytest.mark.parametrize(
    ("name", "lengths", "dtype", "base_dtype", "bits"),
    cases(
        [(LENGTHS, dtype, base, bits) for dtype in DTYPES for base in DTYPES for bits in (8, 4)],
        [
            *(([63], BF16, BF16, 8), ([257], FP32, BF16, 4), ([4101], FP32, FP16, 4)),
            *(([4096], FP16, FP16, 4), ([300], BF16, FP32, 8)),
        ],
    ),
)
def test_differences_are_the_reference_s(
    name: str, lengths: list[int], dtype: torch.dtype, base_dtype: torch.dtype, bits: Literal[4, 8]
):
    for n in lengths:
        x, fmt = difficult((4, 2), n, dtype, seed=n), BlockFormat(bits, BLOCK_SIZES[n % 7])
        for base in (x.to(base_dtype), difficult((4, 2), n, base_dtype, seed=n + 3)):
            quantize_both(module_of(name), x, fmt, DEVICES[name], swapped=n % 2 == 0, offset=n % 3, base=base)


@pytest.mark.parametrize(
    ("name", "num_parts", "bits", "shapes"),
    cases(
        [
            (k, bits, [(1, FP32), (257, BF16), (257, FP16), (4101, FP32), *[(100_000, FP32)] * ON_GPU])
            for k in (1, 2, 3, 8, *[16] * ON_GPU)
            for bits in (8, 4)
        ],
        [(1, 4, [(257, FP32)]), (2, 8, [(4101, FP32)]), (3, 4, [(257, BF16)]), (8, 8, [(257, FP32)])],
    ),
)
def test_sums_are_the_reference_s(
    name: str, num_parts: int, bits: Literal[4, 8], shapes: list[tuple[int, torch.dtype]]
):
    for n, dtype in shapes:
        parts = difficult((num_parts, 9 if name == "native" else 2), n, FP32, seed=num_parts)
        unpack_both(module_of(name), parts, one_segment(n, BlockFormat(bits, 128)), DEVICES[name], dtype, FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["reference", "native", "triton"])
def test_a_difference_is_added_to_what_a_row_holds_and_rounded_once(name: str, bits: int, dtype: torch.dtype):
    implementation, device = module_of(name), DEVICES[name]
    generator = torch.Generator().manual_seed(bits)
    for n in (1, 63, 257, 4101):
        fmt = BlockFormat(bits, 128)
        layout = one_segment(n, fmt)
        ((payload, scales),) = segments(sent := messages((4, 2), layout, "cpu", swapped=True), layout)
        payload.random_(generator=generator)
        scales.copy_(torch.randn(scales.shape, generator=generator) * 0.01)
        scales[1, 1, -1] = float("nan")
        product = torch.empty(4, 2, n)
        reference.dequantize(payload, scales, fmt, product)  # exact in fp32

        resident = torch.full((2, 4, n + 20), float("nan"), dtype=dtype)
        rows = resident.transpose(0, 1)[..., 3 : 3 + n]
        rows.copy_(difficult((4, 2), n, dtype, seed=n))
        expected = resident.clone()
        expected.transpose(0, 1)[..., 3 : 3 + n] = (rows.float() + product).to(dtype)
        stays_nan = rows.isnan() | product.isnan()

        received = messages((1, 4, 2), layout, device)
        received.copy_(sent)
        resident = resident.to(device)
        out, table = resident.transpose(0, 1)[..., 3 : 3 + n], range_table(layout, dtype)
        implementation.unpack_sum(received, table, out, onto_quantized=True, onto_exact=False)
        assert_same(f"{n} elements of {dtype} and beside them", resident, expected)
        assert out.cpu()[stays_nan].isnan().all()
        assert stays_nan.any() or n == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "clip"), KINDS)
def test_native_reads_every_sixteen_bit_number_like_the_reference(
    native: ModuleType, bits: int, clip: bool, dtype: torch.dtype
):
    """Blocks of numbers of one size, so that none vanishes beside a large one."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    quantize_both(native, x.view(1, 1, -1), BlockFormat(bits, 32, clip), "cpu", swapped=False, offset=1, steps=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_native_rounds_products_and_sums_with_every_scale_like_the_reference(
    native: ModuleType, bits: int, dtype: torch.dtype
):
    fmt, generator = BlockFormat(bits, 32), torch.Generator().manual_seed(bits)
    every_scale = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    near = every_scale[(torch.arange(2**16) + torch.randint(-300, 300, (2**16,), generator=generator)) % 2**16]
    scales = torch.stack([every_scale, near]).view(2, 1, 1, -1)
    layout = plan_row(2**21, fmt)
    sent = torch.randint(256, (2, 1, 1, layout.message_bytes), generator=generator, dtype=torch.uint8)
    segments(sent, layout)[0][1].copy_(scales)
    for num_parts in (1, 2):
        expected, got = (torch.full((1, 1, 2**21), float("nan"), dtype=dtype) for _ in range(2))
        for module, out in ((reference, expected), (native, got)):
            module.unpack_sum(sent[:num_parts], range_table(layout, dtype), out, onto_quantized=False, onto_exact=False)
        assert_same(f"sum of {num_parts}", got, expected)


MANY = [
    *((300, True), (33, False), (4096, True), (1, False), (0, False), (5000, True), (0, True), (4099, False)),
    *((63, True), (16384, False)),
]
FEW = [(33, False), (4170, True), (0, False), (5, True), (1050, False)]


@pytest.mark.parametrize(
    ("name", "bits", "dtype", "exact", "layouts"),
    cases(
        [
            (bits, dtype, exact, (MANY, MANY[::-1], [(70, False)]))
            for bits in (8, 4)
            for dtype in DTYPES
            for exact in DTYPES
        ],
        [slow("triton", 8, BF16, BF16, (FEW,)), (4, FP32, FP32, (FEW,)), slow("triton", 4, BF16, FP16, (FEW,))],
    ),
)
def test_many_segments_are_packed_and_unpacked_like_the_reference_s(
    name: str, bits: Literal[4, 8], dtype: torch.dtype, exact: torch.dtype, layouts: tuple[Any, ...]
):
    """Segments that are quantized and segments that are not, in any order, empty ones too, wherever they start."""
    implementation, device = module_of(name), DEVICES[name]
    for seed, sizes in enumerate(layouts):
        layout = many_segments(sizes, BlockFormat(bits, 128), exact.itemsize)
        x = difficult((2, 2), layout.size, dtype, seed=4 + 2 * seed)
        base = difficult((2, 2), layout.size, BF16, seed=seed + 1)
        pack_both(implementation, x, layout, device, dtype=exact, swapped=seed % 2 == 0, offset=seed, steps=2)
        pack_both(implementation, x, layout, device, dtype=exact, base=base)
        parts = difficult((3, 2), layout.size, FP32, seed=seed)
        for num_parts in (1, 3):
            unpack_both(implementation, parts[:num_parts], layout, device, dtype, exact)


# ---- buffers that 32-bit offsets cannot address -------------------------------------------------------------------


@pytest.mark.gpu
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


@pytest.mark.gpu
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
    assert_same("the sum", out, expected)
    ((_, scales),) = segments(messages, table.layout)
    torch.testing.assert_close(out, x.sum(0), rtol=0, atol=2 * float(scales.max()))
