"""The C and the Triton implementation against the reference, bit for bit, wherever the segments lie.

Triton runs on the GPU where there is one, else on CPU tensors under its interpreter (see tests/conftest.py).
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
    sum_both,
    unpack_both,
)
from helpers.tiers import slow
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import block_quant
from kernels.block_quant import TRITON, range_table, reference
from kernels.c_library import CLibraryError
from kernels.formats import BlockFormat, plan_row

TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [(8, False), (4, False), (4, True)]  # bits, clip
LENGTHS = [1, 63, 256, 257, 4096, 4101, 8300]
# n, dtype, block size, bits: few cases, because the interpreter takes 10 ms and more per program
FEW = [
    (1, torch.float32, 32, 8),
    (63, torch.bfloat16, 32, 4),
    (256, torch.float16, 256, 8),
    (257, torch.float32, 64, 4),
    (257, torch.bfloat16, 2048, 8),
    (4096, torch.bfloat16, 128, 8),
    (4101, torch.float32, 1024, 4),
    (4101, torch.float16, 512, 4),
]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, on NaN and Inf


@pytest.fixture(scope="module")
def native() -> ModuleType:
    library = block_quant.native.library()
    if isinstance(library, CLibraryError):
        pytest.skip(str(library))
    return block_quant.native


@pytest.fixture
def triton() -> ModuleType:
    if TRITON is None:
        pytest.skip("Triton is not installed")
    return TRITON


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("bits", "clip"), KINDS)
def test_native_quantizes_like_the_reference(
    native: ModuleType, bits: int, clip: bool, block_size: int, dtype: torch.dtype
):
    for n in LENGTHS:
        x = difficult((4, 2), n, dtype)
        quantize_both(native, x, BlockFormat(bits, block_size, clip), "cpu", swapped=n % 2 == 0, offset=n % 3)


@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize(("bits", "clip"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_feeds_back_errors_like_the_reference(
    native: ModuleType, bits: int, clip: bool, dtype: torch.dtype, beta: float
):
    for n in LENGTHS:
        x = difficult((2, 4), n, dtype, seed=n)
        quantize_both(native, x, BlockFormat(bits, 128, clip), "cpu", swapped=True, offset=1, steps=3, beta=beta)


@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_native_quantizes_differences_like_the_reference(
    native: ModuleType, bits: int, dtype: torch.dtype, base_dtype: torch.dtype
):
    for n in LENGTHS:
        x = difficult((4, 2), n, dtype, seed=n)
        for base in (x.to(base_dtype), difficult((4, 2), n, base_dtype, seed=n + 3)):
            fmt = BlockFormat(bits, BLOCK_SIZES[n % 7])
            quantize_both(native, x, fmt, "cpu", swapped=n % 2 == 0, offset=n % 3, base=base)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
@pytest.mark.parametrize("bits", [8, 4])
def test_native_sums_like_the_reference(native: ModuleType, num_parts: int, bits: int):
    for n, dtype in ((1, torch.float32), (257, torch.bfloat16), (257, torch.float16), (4101, torch.float32)):
        parts = difficult((num_parts, 9), n, torch.float32, seed=num_parts)
        sum_both(native, parts, BlockFormat(bits, 128), "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["reference", "native", "triton"])
def test_a_difference_is_added_to_what_a_row_holds_and_rounded_once(
    name: str, bits: int, dtype: torch.dtype, request: pytest.FixtureRequest
):
    implementation = reference if name == "reference" else request.getfixturevalue(name)
    device = TRITON_DEVICE if name == "triton" else "cpu"
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


@given(
    st.sampled_from(KINDS),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(DTYPES),
    st.integers(1, 5000),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(0, 17),
    st.integers(0, 2),
)
@settings(max_examples=100)
def test_native_quantizes_like_the_reference_wherever_data_start(
    native: ModuleType,
    kind: tuple[Literal[4, 8], bool],
    block_size: int,
    dtype: torch.dtype,
    n: int,
    lead: tuple[int, int],
    offset: int,
    steps: int,
):
    x = difficult(lead, n, dtype, seed=n + offset)
    quantize_both(
        native, x, BlockFormat(kind[0], block_size, kind[1]), "cpu", swapped=n % 2 == 0, offset=offset, steps=steps
    )


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


@pytest.mark.parametrize(("n", "dtype", "block_size", "bits"), FEW)
def test_triton_quantizes_like_the_reference(
    triton: ModuleType, n: int, dtype: torch.dtype, block_size: int, bits: int
):
    x = difficult((4, 2), n, dtype)
    quantize_both(triton, x, BlockFormat(bits, block_size), TRITON_DEVICE, swapped=n % 2 == 1, offset=n % 3)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("bits", "clip"), KINDS)
def test_triton_handles_every_block_size(triton: ModuleType, bits: int, clip: bool, block_size: int):
    x = difficult((4, 2), block_size + block_size // 2 + 5, torch.bfloat16, seed=block_size)
    quantize_both(triton, x, BlockFormat(bits, block_size, clip), TRITON_DEVICE, swapped=True, offset=0)


@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize(("bits", "clip"), KINDS)
def test_triton_feeds_back_errors_like_the_reference(triton: ModuleType, bits: int, clip: bool, beta: float):
    x = difficult((2, 4), 300, torch.bfloat16, seed=1)
    quantize_both(triton, x, BlockFormat(bits, 128, clip), TRITON_DEVICE, swapped=True, offset=1, steps=3, beta=beta)


@pytest.mark.parametrize(
    ("n", "dtype", "base_dtype", "block_size", "bits"),
    [
        (63, torch.bfloat16, torch.bfloat16, 32, 8),
        (257, torch.float32, torch.bfloat16, 128, 4),
        (4101, torch.float32, torch.float16, 256, 4),
        (4096, torch.float16, torch.float16, 64, 4),
        (300, torch.bfloat16, torch.float32, 128, 8),
    ],
)
def test_triton_quantizes_differences_like_the_reference(
    triton: ModuleType, n: int, dtype: torch.dtype, base_dtype: torch.dtype, block_size: int, bits: int
):
    x, fmt = difficult((4, 2), n, dtype, seed=n), BlockFormat(bits, block_size)
    quantize_both(triton, x, fmt, TRITON_DEVICE, swapped=True, offset=n % 2, base=x.to(base_dtype))
    base = difficult((4, 2), n, base_dtype, seed=n + 3)
    quantize_both(triton, x, fmt, TRITON_DEVICE, swapped=False, offset=1, base=base)


@pytest.mark.parametrize(("num_parts", "bits"), [(1, 4), (2, 8), (3, 4), (8, 8)])
def test_triton_sums_like_the_reference(triton: ModuleType, num_parts: int, bits: int):
    dtype = torch.bfloat16 if num_parts == 3 else torch.float32
    parts = difficult((num_parts, 2), 4101 if num_parts == 2 else 257, torch.float32, seed=5)
    sum_both(triton, parts, BlockFormat(bits, 128), TRITON_DEVICE, dtype)


MANY = [
    (300, True),
    (33, False),
    (4096, True),
    (1, False),
    (0, False),
    (5000, True),
    (0, True),
    (4099, False),
    (63, True),
]


def compare_many(
    implementation: ModuleType, device: str, bits: int, dtype: torch.dtype, exact: torch.dtype, *layouts: Any
) -> None:
    """Segments that are quantized and segments that are not, in any order, empty ones too, wherever they start."""
    for seed, sizes in enumerate(layouts):
        layout = many_segments(sizes, BlockFormat(bits, 128), exact.itemsize)
        x = difficult((2, 2), layout.size, dtype, seed=4 + 2 * seed)
        base = difficult((2, 2), layout.size, torch.bfloat16, seed=seed + 1)
        pack_both(implementation, x, layout, device, dtype=exact, swapped=seed % 2 == 0, offset=seed, steps=2)
        pack_both(implementation, x, layout, device, dtype=exact, base=base)
        parts = difficult((3, 2), layout.size, torch.float32, seed=seed)
        for num_parts in (1, 3):
            unpack_both(implementation, parts[:num_parts], layout, device, dtype, exact)


@pytest.mark.parametrize("exact", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_native_packs_and_unpacks_many_segments_like_the_reference(
    native: ModuleType, bits: int, dtype: torch.dtype, exact: torch.dtype
):
    compare_many(native, "cpu", bits, dtype, exact, MANY, MANY[::-1], [(70, False)])


@pytest.mark.parametrize(
    ("bits", "dtype", "exact"),
    [
        slow(8, torch.bfloat16, torch.bfloat16),
        (4, torch.float32, torch.float32),
        slow(4, torch.bfloat16, torch.float16),
    ],
)
def test_triton_packs_and_unpacks_many_segments_like_the_reference(
    triton: ModuleType, bits: int, dtype: torch.dtype, exact: torch.dtype
):
    few = [(33, False), (4170, True), (0, False), (5, True), (1050, False)]  # the interpreter is slow
    compare_many(triton, TRITON_DEVICE, bits, dtype, exact, few)


def test_triton_packs_and_unpacks_all_segments_in_one_launch_each(triton: ModuleType, monkeypatch: pytest.MonkeyPatch):
    launches: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(triton, name)

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            launches.append(self.name)
            return self.kernel[grid]

    for name in ("_pack_kernel", "_unpack_sum_kernel"):
        monkeypatch.setattr(triton, name, Counted(name))
    layout = many_segments([(300, True), (33, False), (64, True), (17, False)], BlockFormat(4, 32), 4)
    parts = difficult((3, 2), layout.size, torch.float32)
    pack_both(triton, parts, layout, TRITON_DEVICE, swapped=True, offset=1)
    assert launches == ["_pack_kernel", "_unpack_sum_kernel", "_unpack_sum_kernel"]
    launches.clear()
    unpack_both(triton, parts, layout, TRITON_DEVICE, torch.float32, torch.float32)
    assert launches == ["_unpack_sum_kernel"] * 3
