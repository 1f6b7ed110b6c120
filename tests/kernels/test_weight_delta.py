"""Test lossless weight deltas.

Decoding is bit-exact, implementations agree, and blocks that do not fit into a message wait for the next.
"""

import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import weight_delta as reference
from helpers.refusals import not_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.kernels.c_library import CLibrary, find_compiler, load_c_library
from megazpp.kernels.weight_delta import TRITON, decode, encode, message_bytes, native, numbers

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = [BF16, FP16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.int16)


def pair(size: int, dtype: torch.dtype, scale: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new and old weights.

    Most differ by about `scale` units in the last place; large differences wrap around.
    """
    generator = torch.Generator().manual_seed(seed)
    old = (0.02 * torch.randn(size, generator=generator)).to(dtype)
    steps = (scale * torch.randn(size, generator=generator)).round().clamp(-(2.0**15), 2.0**15 - 1).to(torch.int16)
    return reference.order(reference.order(bits(old)) + steps).view(dtype), old


def blocks_of_all_kinds(dtype: torch.dtype, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new and old weights of 8 delta blocks.

    The blocks have changes nowhere, in few or in all elements, by little or by much. The last block has only `last`
    weights.
    """
    sizes = {0: 256, 0.02: 256, 0.3: 256, 2: 256, 30: 256, 3000: 256, 30000: 256, 0.5: last}
    pairs = [pair(size, dtype, scale, seed=last) for scale, size in sizes.items()]
    new, old = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return new, old


def coded(module: ModuleType, new: torch.Tensor, old: torch.Tensor, capacity: int) -> tuple[torch.Tensor, ...]:
    """Encode the delta of new and old weights by `module`.

    Return the kinds of all blocks, `halves` (half of the size in bytes of each block's body), the bodies and the size
    counters. Their memory is filled with 77 before, so that a byte that was not written shows.
    """
    device, num_blocks = DEVICE if module is TRITON else "cpu", -(-len(new) // reference.BLOCK)
    kinds, halves = torch.full((2, num_blocks), 77, dtype=torch.uint8, device=device)
    body = torch.full((capacity,), 77, dtype=torch.uint8, device=device)
    found = torch.full((2,), 77, dtype=torch.int64, device=device)
    module.encode(new.to(device), old.to(device), kinds, halves, body, found)
    return kinds, halves, body, found


def blocks_of_all_widths(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new and old weights of 9 delta blocks.

    Magnitudes are 2^-16 to 1. Changes need few to many bits, and some are very large. The remainders of some groups of
    8 elements need 58 to 64 bits, so a word that begins inside a byte does not hold all of them.
    """
    generator = torch.Generator().manual_seed(5)
    scales = torch.exp2(torch.tensor([-2.0, 0, 3, 6, 6, 7, 7, 11, 0])).repeat_interleave(reference.BLOCK)
    size = len(scales)
    signs = 1 - 2 * torch.randint(2, (size,), generator=generator)
    old = (signs * torch.exp2(-16 * torch.rand(size, generator=generator))).to(dtype)
    steps = (scales * torch.randn(size, generator=generator)).round()
    # the last block changes in a tenth of its weights, so its kind is sparse
    steps[-reference.BLOCK :] *= torch.rand(reference.BLOCK, generator=generator) < 0.1
    steps[100 :: reference.BLOCK] = 200 * scales[100 :: reference.BLOCK]
    return reference.order(reference.order(bits(old)) + steps.to(torch.int16)).view(dtype), old


@pytest.fixture(params=["BMI2", "portable"])
def c_library(request, monkeypatch):
    """Let `native` use the C code that it selects for this CPU, or the portable code for CPUs without BMI2."""
    if native.library().missing:
        pytest.skip("needs a C compiler")
    if request.param == "portable":
        monkeypatch.setenv("CC", " ".join([*find_compiler(), "-DMEGAZPP_PORTABLE"]))
        portable = load_c_library(Path(native.__file__).with_name("native.c"))
        monkeypatch.setattr(native, "library", lambda: portable)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_rice_parameters_and_long_quotients_are_packed(c_library, dtype):
    new, old = blocks_of_all_widths(dtype)
    expected, got = (coded(module, new, old, 2 * len(new)) for module in (reference, native))
    assert all(map(torch.equal, got, expected))
    exponents = reference._exponents(old)
    k = torch.stack([reference._parameters(kind, e) for kind, e in zip(expected[0].tolist(), exponents, strict=True)])
    dense = (expected[0] >= reference.DENSE) & (expected[0] < reference.RAW)
    assert set(range(16)) == set(k[dense].flatten().tolist())
    assert int(k[dense].view(-1, 8).sum(1).max()) > 63, (
        "some 8 elements must need more than the 63 bits that fit into one word"
    )
    assert 0 < expected[0][-1] <= reference.MOST_POSITIONS
    received = old.clone()
    native.decode(*got[:3], received)
    assert torch.equal(bits(received), bits(new))


@pytest.mark.parametrize("size", [1, 7, 8, 17, 255, 257, 700])
def test_unaligned_weights_of_any_size_are_packed(c_library, size):
    for dtype, scale in itertools.product(DTYPES, (0.02, 1, 50)):
        new, old = pair(size + 3, dtype, scale, seed=size)
        new, old = new[3:], old[3:]
        capacity = 2 * size + 14
        got = coded(native, new, old, capacity)
        assert all(map(torch.equal, got, coded(reference, new, old, capacity))), (dtype, scale)
        received = torch.cat((old, old[:3]))[1 : size + 1].copy_(old)
        native.decode(*got[:3], received)
        assert torch.equal(bits(received), bits(new)), (dtype, scale)


@pytest.mark.parametrize(
    "name", ["native", pytest.param("triton", marks=pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow)]
)
def test_implementation_writes_and_reads_the_references_bytes(name):
    module = native if name == "native" else TRITON
    if module is None or (module is native and native.library().missing):
        pytest.skip(f"{name} is not installed")
    for dtype, last in ((BF16, 1), *(((FP16, 63), (FP16, 255), (BF16, 256)) if module is native else ())):
        new, old = blocks_of_all_kinds(dtype, last)
        wanted = int(coded(reference, new, old, 2 * len(new) + 14)[-1][0])
        for capacity in ((wanted + 14) // 4 * 4, 16, wanted // 8 * 4):
            expected, got = (coded(each, new, old, capacity) for each in (reference, module))
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True)), (dtype, last, capacity)
            received, read = old.clone(), old.to(got[0].device, copy=True)
            reference.decode(*expected[:3], received)
            rows = (*got[:3], read) if module is native else (part.unsqueeze(0) for part in (*got[:3], read))
            module.decode(*rows)
            assert torch.equal(bits(read), bits(received)), (dtype, last, capacity)
            assert torch.equal(bits(received), bits(new)) == (capacity >= wanted), (dtype, last, capacity)


def test_every_bit_of_every_row_is_decoded():
    for size, dtype in itertools.product((1, 63, 255, 256, 257, 1000), DTYPES):
        rows = [pair(size, dtype, scale, seed) for seed, scale in enumerate((0, 0.01, 1, 100, 30000))]
        messages = torch.full((len(rows), message_bytes(size)), 77, dtype=torch.uint8, device=DEVICE)
        new, weights = (torch.stack(parts).to(DEVICE) for parts in zip(*rows, strict=True))
        for row in zip(new, weights, messages, strict=True):
            encode(*row)
        decode(messages, weights)
        assert torch.equal(bits(weights), bits(new)), (size, dtype)
        assert numbers(messages)[:, 1].tolist() == [0] * len(rows)


def sent(new: torch.Tensor, old: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
    """Encode the delta of new and old weights as one message, and return it: [1, bytes] uint8."""
    message = torch.empty(1, message_bytes(len(new), capacity), dtype=torch.uint8)
    encode(new, old, message[0])
    return message


@settings(max_examples=40)
@given(st.sampled_from(DTYPES), st.data())
def test_any_bit_pattern_becomes_any_other(dtype, data):
    """Encode and decode the delta between any two lists of 16-bit patterns.

    NaN, infinities, subnormals and both zeros need no special case.
    """
    special = [0, -32768, 1, -32767, 0x7F80, 0x7FC0, -64, -128, 0x7C00, 0x7E00, -1, 32767]
    patterns = st.one_of(st.sampled_from(special), st.integers(-32768, 32767))
    old = data.draw(st.lists(patterns, min_size=1, max_size=300))
    new = [data.draw(patterns) if data.draw(st.integers(0, 7)) == 0 else pattern for pattern in old]
    x, base = (torch.tensor(values, dtype=torch.int16).view(dtype) for values in (new, old))
    if not native.library().missing:
        capacity = message_bytes(len(old)) // 4 * 4
        assert all(map(torch.equal, coded(native, x, base, capacity), coded(reference, x, base, capacity)))
    decode(sent(x, base), base.unsqueeze(0))
    assert torch.equal(bits(base), bits(x))


def test_blocks_that_do_not_fit_keep_old_weights_until_a_later_delta():
    new, old = pair(2000, BF16, 3.0)
    message, received = sent(new, old, 800), old.clone()
    wanted, left_out = numbers(message)[0].tolist()
    decode(message, received.unsqueeze(0))
    assert 800 < wanted < message_bytes(2000)
    assert int((bits(received) != bits(new)).sum()) == left_out > 0
    assert int((bits(received) != bits(old)).sum()) > 0
    decode(sent(new, received, wanted), received.unsqueeze(0))
    assert torch.equal(bits(received), bits(new))


def test_delta_size_is_bounded_by_learning_rate_and_by_full_weights():
    weights, moves = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    old = 0.02 * weights
    for rate, share in {1e-6: 0.03, 1e-5: 0.10, 1e-4: 0.22, 1e-3: 0.51, 1.0: 1.0}.items():
        message = sent((old + rate * moves).to(BF16), old.to(BF16))
        assert numbers(message)[0, 0] <= share * 2 * len(old), rate


def test_delta_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: CLibrary(missing="no C compiler found"))
    weights = torch.zeros(300, dtype=BF16)
    with pytest.raises(ValueError, match="lossless deltas of cpu tensors cannot be computed: no C compiler found"):
        encode(weights, weights, torch.empty(message_bytes(300), dtype=torch.uint8))


def test_delta_of_no_elements_is_16_bytes():
    message, empty = torch.full((16,), 77, dtype=torch.uint8), torch.empty(0, dtype=BF16)
    encode(empty, empty, message)
    assert message_bytes(0) == 16
    assert message.tolist() == [0] * 16
    decode(message.unsqueeze(0), empty.unsqueeze(0))


def test_mismatched_tensors_are_rejected():
    new, message = torch.zeros(300, dtype=BF16), torch.empty(message_bytes(300), dtype=torch.uint8)
    rows = message.unsqueeze(0)
    wrong = [
        (encode, new.float(), new.float(), message, "torch.float32"),
        (encode, new, new[:299], message, "torch.Size([299])"),
        (encode, new, new.half(), message, "torch.float16"),
        (encode, new, new.repeat(2)[::2], message, "stride 2"),
        (encode, new, new, message[:16], "messages have 16 bytes each"),
        (encode, new, new, message[8:], "multiples of 16"),
        (decode, rows, new.repeat(2, 1), "torch.Size([2, 300])"),
    ]
    assert not_refused(wrong, lambda call, *arguments: call(*arguments), AssertionError) == []
