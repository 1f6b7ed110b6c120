"""Compare block quantization in C and in Triton with the reference, bit for bit, at any segment offset.

Triton runs on the GPU if there is one, otherwise on CPU tensors under its interpreter (see tests/conftest.py). The
interpreter takes 10 ms and more per program, so it gets only the `few` cases, with few rows.
"""

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.block_quant import assert_same, difficult, layout_of, pack_both, unpack_both

from megazpp.kernels import block_quant
from megazpp.kernels.block_quant import TRITON, Feedback, pack, range_table, reference, unpack, unpack_sum
from megazpp.kernels.formats import BlockFormat, plan_row

ON_GPU = torch.cuda.is_available()
DEVICES = {"native": "cpu", "triton": "cuda" if ON_GPU else "cpu"}
BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048]
DTYPES = FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = [(8, False), (4, False), (4, True)]  # bits per value, and `clip`: whether int4 scales clip the largest values
LENGTHS = [1, 63, 256, 257, 4101, 8300, *[100_000] * ON_GPU]

# numpy warns about the NaN and Inf in the inputs
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
each_implementation = pytest.mark.parametrize(
    "name", ["native", pytest.param("triton", marks=[pytest.mark.gpu] if ON_GPU else [])]
)
each_implementation_slowly = pytest.mark.parametrize(
    "name", ["native", pytest.param("triton", marks=pytest.mark.gpu if ON_GPU else pytest.mark.slow)]
)


def module_of(name: str) -> ModuleType:
    found = TRITON if name == "triton" else block_quant.native
    if found is None or (name == "native" and found.library().missing):
        pytest.skip(f"{name}: there is no Triton or no C compiler")
    return found


def cases(name: str, every: list[Any], few: list[Any]) -> list[Any]:
    return few if name == "triton" and not ON_GPU else every


def pack_one(name: str, x: torch.Tensor, fmt: BlockFormat, **how: Any) -> None:
    """Pack x as one quantized segment by the implementation `name` and by the reference, and compare the messages."""
    pack_both(module_of(name), x, layout_of([(x.shape[-1], True)], fmt), DEVICES[name], **how)


@each_implementation_slowly
def test_packed_blocks_match_the_reference(name):
    formats = [(size, *kind) for size in BLOCK_SIZES for kind in KINDS]
    every = [((4, 2), n, dtype, *fmt) for n in LENGTHS for dtype in DTYPES for fmt in formats]
    few = [((1, 2), size + size // 2 + 5, DTYPES[i % 3], size, *KINDS[-i % 3]) for i, size in enumerate(BLOCK_SIZES)]
    few += [((4, 2), 1, FP32, 32, 8, False), ((4, 2), 63, BF16, 32, 4, False), ((4, 2), 256, FP16, 256, 4, True)]
    few += [((1, 2), 4096, BF16, 128, 8, False), ((1, 2), 4101, FP32, 1024, 4, False)]
    for seed, (lead, n, dtype, block_size, bits, clip) in enumerate(cases(name, every, few)):
        x, fmt = difficult(lead, n, dtype, seed=2 * seed), BlockFormat(bits, block_size, clip)
        pack_one(name, x, fmt, swapped=n % 2 == 0, offset=n % 7)


@each_implementation_slowly
def test_packing_with_error_feedback_matches_the_reference(name):
    every = [(n, dtype, kind, beta) for n in LENGTHS for dtype in DTYPES for kind in KINDS for beta in (0.0, 0.8)]
    few = [(300, BF16, KINDS[0], 0.8), (130, FP32, KINDS[1], 0.0), (300, FP16, KINDS[2], 0.8)]
    for seed, (n, dtype, (bits, clip), beta) in enumerate(cases(name, every, few)):
        x, fmt = difficult((2, 2), n, dtype, seed=4 * seed), BlockFormat(bits, 128, clip)
        pack_one(name, x, fmt, swapped=True, offset=1, steps=3, beta=beta)


@each_implementation
def test_packed_differences_match_the_reference(name):
    every = [(n, dtype, base, bits) for n in LENGTHS for dtype in DTYPES for base in DTYPES for bits in (8, 4)]
    few = [(63, BF16, BF16, 8), (257, FP32, BF16, 4), (1031, FP32, FP16, 4), (300, FP16, FP16, 8), (300, BF16, FP32, 4)]
    for seed, (n, dtype, base_dtype, bits) in enumerate(cases(name, every, few)):
        lead = (2, 2) if name == "native" else (1, 2)
        x, fmt = difficult(lead, n, dtype, seed=4 * seed), BlockFormat(bits, BLOCK_SIZES[n % 7])
        close, far = x.to(base_dtype), difficult(lead, n, base_dtype, seed=4 * seed + 3)
        for base in cases(name, [close, far], [(close, far)[seed % 2]]):
            pack_one(name, x, fmt, swapped=n % 2 == 0, offset=n % 3, base=base)


@each_implementation
def test_unpacked_sums_match_the_reference(name):
    shapes = [(1, FP32), (257, BF16), (257, FP16), (4101, FP32), *[(100_000, FP32)] * ON_GPU]
    every = [(k, bits, n, dtype) for k in (1, 2, 3, 8, *[16] * ON_GPU) for bits in (8, 4) for n, dtype in shapes]
    few = [(1, 4, 257, FP32), (2, 8, 1031, FP32), (3, 4, 257, BF16), (8, 8, 130, FP16)]
    for num_parts, bits, n, dtype in cases(name, every, few):
        parts = difficult((num_parts, 9 if name == "native" else 2), n, FP32, seed=num_parts)
        unpack_both(module_of(name), parts, layout_of([(n, True)], BlockFormat(bits, 128)), DEVICES[name], dtype, FP32)


MANY = [
    *((300, True), (33, False), (4096, True), (1, False), (0, False), (5000, True), (0, True), (4099, False)),
    *((63, True), (16384, False)),
]
FEW = [(33, False), (4170, True), (0, False), (5, True), (1050, False)]


@each_implementation_slowly
def test_many_quantized_and_exact_segments_match_the_reference(name):
    """Compare messages with many segments with the reference.

    Quantized segments, exact (unquantized) ones and empty ones come in any order and start at any offset.
    """
    layouts = (MANY, MANY[::-1], [(70, False)])
    pairs = itertools.product(DTYPES, DTYPES)
    grid = [(8 if number % 2 else 4, dtype, exact) for number, (dtype, exact) in enumerate(pairs)]
    every = [(seed, sizes, *kind) for kind in grid for seed, sizes in enumerate(layouts)]
    few = [(0, FEW, 4, FP32, FP32), (1, [(70, False), (200, True)], 8, BF16, FP16)]
    implementation, device = module_of(name), DEVICES[name]
    for seed, sizes, bits, dtype, exact in cases(name, every, few):
        layout = layout_of(sizes, BlockFormat(bits, 128), exact.itemsize)
        lead = (2, 2) if name == "native" else (1, 2)
        x, base = (difficult(lead, layout.size, kind, seed=4 + 2 * seed) for kind in (dtype, BF16))
        pack_both(implementation, x, layout, device, dtype=exact, swapped=seed % 2 == 0, offset=seed, steps=2)
        pack_both(implementation, x, layout, device, dtype=exact, base=base.roll(1))
        parts = difficult((3, 2), layout.size, FP32, seed=seed)
        for num_parts in cases(name, [1, 3], [3 - 2 * seed]):
            unpack_both(implementation, parts[:num_parts], layout, device, dtype, exact)


def test_native_packs_every_16_bit_value_like_the_reference():
    """Pack all 65536 bit patterns of bf16 and fp16 by the C code and by the reference.

    Each block holds numbers of similar size, so that no value rounds to zero next to a large one.
    """
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(1, 1, -1)
    for dtype in (BF16, FP16):
        for bits, clip in KINDS:
            pack_one("native", patterns.view(dtype), BlockFormat(bits, 32, clip), offset=1, steps=2)


@pytest.mark.parametrize("bits", [8, 4])
def test_native_sums_with_every_scale_match_the_reference(bits):
    generator = torch.Generator().manual_seed(bits)
    every_scale = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    near = every_scale[(torch.arange(2**16) + torch.randint(-300, 300, (2**16,), generator=generator)) % 2**16]
    layout = plan_row(2**21, BlockFormat(bits, 32))
    sent = torch.randint(256, (2, 1, 1, layout.message_bytes), generator=generator, dtype=torch.uint8)
    Feedback(sent, range_table(layout, FP32)).scales.copy_(torch.stack([every_scale, near]).view(2, 1, 1, -1))
    how = {"onto_quantized": False, "onto_exact": False}
    for dtype in DTYPES:
        for num_parts in (1, 2):
            expected, got = (torch.full((1, 1, 2**21), float("nan"), dtype=dtype) for _ in range(2))
            for module, out in ((reference, expected), (module_of("native"), got)):
                module.unpack_sum(sent[:num_parts], range_table(layout, dtype), out, **how)
            assert_same(f"sum of {num_parts} in {dtype}", got, expected)


@pytest.mark.gpu
def test_repeated_triton_launch_uses_the_new_tensors():
    """Pack and unpack three times with new tensors of equal shapes, and compare with the reference.

    Later calls skip Triton's own inspection of the arguments, but must use the new tensors' addresses.
    """
    table = range_table(layout_of([(4101, True), (63, False)], BlockFormat(4, 128)), FP32)
    for _ in range(3):
        x, out = torch.randn(2, 3, 4164, dtype=BF16), torch.zeros(2, 3, 4164, dtype=BF16)
        expected = torch.zeros(2, 3, table.layout.message_bytes, dtype=torch.uint8)
        messages, decoded = expected.cuda(), out.cuda()
        reference.pack(x, table, expected)
        pack(x.cuda(), table, messages=messages)
        assert_same("messages", messages, expected)
        reference.unpack_sum(expected[None], table, out, onto_quantized=False, onto_exact=False)
        unpack(messages, table, out=decoded)
        assert_same("data", decoded, out)


# ---- buffers that are too large for 32-bit offsets ----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_offsets_beyond_two_to_the_31_elements_are_correct(bits):
    """Quantize a segment of 2^31 + 257 elements, and compare its last blocks with the same elements quantized alone."""
    n, fmt = 2**31 + 257, BlockFormat(bits, 128)
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.zeros(n, dtype=BF16, device="cuda")
    x[-5000:] = torch.randn(5000, device="cuda")
    # the last 4096 + 257 elements, which begin at the first element of a quantization block
    tail = x[-(4096 + 257) :].clone()
    sent = []
    for data in (x, tail):
        table = range_table(plan_row(len(data), fmt), BF16)
        messages = torch.empty(table.layout.message_bytes, dtype=torch.uint8, device="cuda")
        pack(data, table, messages=messages, errors=Feedback.zeros((), table, "cuda"))
        sent += Feedback(messages, table).segments()
        unpack(messages, table, out=data)
    for whole, part in zip(*sent, strict=True):
        assert torch.equal(whole[-part.numel() :], part)
    assert not sent[0][1][: 2**23].any()
    assert torch.equal(x[-len(tail) :], tail)


@pytest.mark.gpu
def test_rows_more_than_two_to_the_31_bytes_apart_are_correct():
    """Unpack two messages that start more than 2^31 bytes apart, which 32-bit strides could not address."""
    table, apart = range_table(plan_row(1000, BlockFormat(8, 256)), FP32), 2**31 + 16
    buffer = torch.zeros(2 * apart, dtype=torch.uint8, device="cuda")
    messages = buffer.as_strided((2, table.layout.message_bytes), (apart, 1))
    x = torch.randn(2, 1000, device="cuda")
    pack(x, table, messages=messages)
    out, expected = torch.empty_like(x[0]), torch.empty_like(x[0])
    unpack_sum(messages, table, out=out)
    unpack_sum(messages.contiguous(), table, out=expected)
    assert_same("the sum", out, expected.cpu())
    torch.testing.assert_close(out, x.sum(0), rtol=0, atol=2 * float(Feedback(messages, table).scales.max()))
