"""The public functions: what they refuse, whom they call, and that threads may call them at once."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels import block_quant
from kernels.block_quant import (
    Feedback,
    backend,
    dequantize_blockwise,
    dequantize_sum,
    native,
    quantize_blockwise,
    reference,
)
from kernels.c_library import CLibrary, CLibraryError
from kernels.formats import BlockFormat

FMT = BlockFormat(8, 32)


def quantized(*lead: int, n: int, fmt: BlockFormat = FMT) -> tuple[Tensor, Tensor]:
    return (
        torch.zeros(*lead, fmt.payload_bytes(n), dtype=torch.uint8),
        torch.zeros(*lead, fmt.num_blocks(n), dtype=torch.bfloat16),
    )


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("n", [0, 1, 63, 257])
def test_segments_of_any_length_with_up_to_two_leading_dims_make_the_round_trip(lead: tuple[int, ...], n: int):
    x = torch.randn(*lead, n)
    payload, scales = quantized(*lead, n=n)
    feedback = Feedback.zeros(lead, n, FMT)
    quantize_blockwise(x, FMT, payload=payload, scales=scales, feedback=feedback)
    out = torch.full_like(x, float("nan"))
    dequantize_blockwise(payload, scales, FMT, out=out)
    torch.testing.assert_close(out, x, rtol=0, atol=float(scales.max()) if n else 0)
    total = torch.full_like(x, float("nan"))
    many = [t.expand(3, *t.shape).contiguous() for t in (payload, scales)]
    dequantize_sum(*many, FMT, out=total)
    assert torch.equal(total, out + out + out)
    dequantize_sum(*many, FMT, out=total, accumulate=True)
    assert torch.equal(total, out + out + out + out + out + out)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("n", [0, 1, 63, 257])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_base_that_receives_every_difference_follows_what_is_sent(lead: tuple[int, ...], n: int, bits: int):
    """Both ends hold the same bits, and what one message loses is in the next: the error is that of one message."""
    fmt, generator = BlockFormat(bits, 32), torch.Generator().manual_seed(n)
    x = torch.randn(*lead, n, generator=generator)
    base = x.bfloat16()
    received = base.clone()
    payload, scales = quantized(*lead, n=n, fmt=fmt)
    for _ in range(10):
        x += 0.1 * torch.randn(*lead, n, generator=generator)
        quantize_blockwise(x, fmt, payload=payload, scales=scales, base=base)
        for copy in (base, received):
            dequantize_sum(payload[None], scales[None], fmt, out=copy, accumulate=True)
    assert torch.equal(base, received)
    one_message = float(scales.float().abs().max()) if n else 0.0
    rounding = 2**-8 * float(base.abs().max()) if n else 0.0
    torch.testing.assert_close(base.float(), x, rtol=0, atol=1.032 * one_message + rounding)


def test_a_leading_dim_of_size_zero_does_nothing():
    payload, scales = quantized(0, n=40)
    quantize_blockwise(torch.zeros(0, 40), FMT, payload=payload, scales=scales)
    dequantize_blockwise(payload, scales, FMT, out=torch.zeros(0, 40))


def test_what_does_not_fit_is_refused_with_its_name():
    payload, scales = quantized(2, n=40)
    x = torch.zeros(2, 40)
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        quantize_blockwise(x.double(), FMT, payload=payload, scales=scales)
    with pytest.raises(ValueError, match=r"payload is torch\.uint8"):
        quantize_blockwise(torch.zeros(2, 65), FMT, payload=payload, scales=scales)
    with pytest.raises(ValueError, match=r"payload is torch\.int8"):
        quantize_blockwise(x, FMT, payload=payload.view(torch.int8), scales=scales)
    with pytest.raises(ValueError, match=r"scales is torch\.float32"):
        quantize_blockwise(x, FMT, payload=payload, scales=scales.float())
    with pytest.raises(ValueError, match=r"x .* has stride 2 in its last dim"):
        quantize_blockwise(torch.zeros(40, 2).t(), FMT, payload=payload, scales=scales)
    with pytest.raises(ValueError, match="4 dims"):
        quantize_blockwise(torch.zeros(1, 1, 2, 40), FMT, payload=payload, scales=scales)
    wrong = Feedback(torch.zeros_like(payload), scales[:, :1])
    with pytest.raises(ValueError, match=r"feedback\.scales"):
        quantize_blockwise(x, FMT, payload=payload, scales=scales, feedback=wrong)
    with pytest.raises(ValueError, match=r"base is \(2, 39\) on cpu, but x is \(2, 40\)"):
        quantize_blockwise(x, FMT, payload=payload, scales=scales, base=x[:, 1:])
    with pytest.raises(ValueError, match=r"base is torch\.float64"):
        quantize_blockwise(x, FMT, payload=payload, scales=scales, base=x.double())
    with pytest.raises(ValueError, match="without feedback"):
        quantize_blockwise(x, FMT, payload=payload, scales=scales, base=x, feedback=Feedback.zeros((2,), 40, FMT))
    with pytest.raises(ValueError, match="nothing to sum"):
        dequantize_sum(payload[None, :0].transpose(0, 1), scales[None, :0].transpose(0, 1), FMT, out=x[0])


def test_the_table_of_back_ends_names_what_runs_and_refuses_what_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "library", lambda: CLibrary(ctypes.CDLL(None), "gcc 12.2.0"))
    assert backend("cpu").implementation == "C, compiled by gcc 12.2.0"
    with pytest.raises(ValueError, match="no implementation for mps"):
        backend("mps")
    monkeypatch.setattr(block_quant, "TRITON", None)
    with pytest.raises(ValueError, match="needs Triton"):
        backend("cuda")


def test_without_a_c_compiler_the_reference_computes_and_the_table_says_why(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(3, 257)
    expected, got = quantized(3, n=257), quantized(3, n=257)
    reference.quantize(x, FMT, *expected, None)
    monkeypatch.setattr(native, "library", lambda: CLibraryError("no C compiler found"))
    monkeypatch.delattr(native, "quantize")
    row = ("block quantization", "the reference in torch", "no C compiler found; compiled C is 3 to 11 times as fast")
    assert backend("cpu") == row
    quantize_blockwise(x, FMT, payload=got[0], scales=got[1])
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_a_tensor_on_a_device_without_an_implementation_is_an_error_not_a_slow_path():
    payload, scales = quantized(2, n=40)
    with pytest.raises(ValueError, match="no implementation for meta"):
        quantize_blockwise(torch.zeros(2, 40, device="meta"), FMT, payload=payload, scales=scales)


def test_threads_may_call_at_once():
    """A communication thread and the main thread share nothing."""
    inputs = [torch.randn(50_000, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]

    def run(x: Tensor) -> Tensor:
        payload, scales = quantized(n=x.numel())
        quantize_blockwise(x, FMT, payload=payload, scales=scales)
        out = torch.empty_like(x)
        dequantize_blockwise(payload, scales, FMT, out=out)
        return out

    alone = [run(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, inputs * 4))
    assert all(torch.equal(a, b) for a, b in zip(alone * 4, together, strict=True))
