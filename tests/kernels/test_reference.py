"""The definition of the formats: by hand, by its bounds, and by its signal-to-noise ratio."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.block_quant import reference
from kernels.formats import BlockFormat, feedback_format

INT8, INT4 = BlockFormat(8, 32), BlockFormat(4, 32)


class Segment(NamedTuple):
    payload: Tensor
    scales: Tensor


def no_error(n: int, fmt: BlockFormat) -> Segment:
    stored = feedback_format(fmt)
    scales = torch.zeros(stored.num_blocks(n), dtype=torch.bfloat16)
    return Segment(torch.zeros(stored.payload_bytes(n), dtype=torch.uint8), scales)


def quantize(x: Tensor, fmt: BlockFormat, error: Segment | None = None, **how: Any) -> Segment:
    payload = torch.empty(*x.shape[:-1], fmt.payload_bytes(x.shape[-1]), dtype=torch.uint8)
    scales = torch.empty(*x.shape[:-1], fmt.num_blocks(x.shape[-1]), dtype=torch.bfloat16)
    reference.quantize(x, fmt, payload, scales, error, **how)
    return Segment(payload, scales)


def there_and_back(x: Tensor, fmt: BlockFormat, feedback: Segment | None = None) -> Tensor:
    out = torch.full_like(x, float("nan"))
    reference.dequantize(*quantize(x, fmt, feedback), fmt, out)
    return out


def block(*head: float) -> Tensor:
    return torch.tensor([*head, *[0.0] * (32 - len(head))])


def test_int8_divides_the_largest_magnitude_into_127_steps():
    payload, scales = quantize(block(-127.0, 1.0, 2.5, 3.5, 126.4), INT8)
    assert scales.tolist() == [1.0]
    assert payload.view(torch.int8)[:6].tolist() == [-127, 1, 2, 4, 126, 0]  # halves go to the even integer
    scale = quantize(block(1.0), INT8)[1].item()
    assert scale > 1 / 127 > scale * (1 - 2**-7), "rounded up, so that nothing is clipped"


def test_int4_reaches_half_a_step_less_a_sixteenth_beyond_its_integers_and_packs_the_halves_of_a_block_into_bytes():
    x = torch.zeros(32)
    x[0], x[1], x[16], x[17] = -8.4375, 3.0, 7.0, -1.0
    payload, scales = quantize(x, INT4)
    assert scales.tolist() == [1.0]
    assert payload[:3].tolist() == [0 | 15 << 4, 11 | 7 << 4, 8 | 8 << 4]
    x[16] = 2 * 7.4375  # now the largest: the other sign has the 8
    assert quantize(x, INT4)[1].item() == -quantize(-x, INT4)[1].item() < 0
    assert quantize(block(-8.0, 7.4375 * 1.0625), INT4)[1].item() == 1.0625, "set by the element of the other sign"
    assert quantize(block(8.4375, 1.0), INT4)[1].item() == -1.0, "of a positive maximum"
    assert quantize(block(7.4375, -7.4375), INT4)[1].item() == 1.0, "a tie goes to the negative element"


def test_a_block_of_one_size_keeps_the_length_of_both_signs():
    """The first steps of AdamW are the learning rate with the gradient's sign."""
    signs = torch.randint(0, 2, (4, 32), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    signs[3, 16:] *= 0.1  # half of them are enough
    step = 1e-3 * signs
    sent = there_and_back(step, INT4)
    torch.testing.assert_close(sent[:3], step[:3], rtol=2**-8, atol=0)
    torch.testing.assert_close(sent[3, :16], step[3, :16], rtol=2**-8, atol=0)


def test_a_block_with_a_number_that_is_not_finite_comes_back_as_nan_and_its_neighbour_unharmed():
    for fmt, bad in itertools.product((INT8, INT4), (math.nan, -math.nan, math.inf, -math.inf)):
        x = torch.ones(3 * 32)
        x[40] = bad
        assert there_and_back(x, fmt).isfinite().view(3, 32).sum(1).tolist() == [32, 0, 32], (fmt, bad)
        assert quantize(x, fmt)[1].view(torch.int16)[1].item() == 0x7FC0, (fmt, bad)


def test_a_block_too_small_for_a_normal_scale_comes_back_as_zeros():
    for fmt, magnitude in itertools.product((INT8, INT4), (0.0, -0.0, 1e-45, 1e-38, 1e-37)):
        x = torch.full((32,), magnitude)
        payload, scales = quantize(x, fmt)
        if scales.item() != 0:
            assert magnitude / 2 ** (fmt.bits - 1) >= torch.finfo(torch.float32).tiny, (fmt, magnitude)
            continue
        assert scales.view(torch.int16).item() == 0, "+0, so that all implementations can agree"
        assert there_and_back(x, fmt).eq(0).all()
        assert payload.eq({8: 0, 4: 0x88}[fmt.bits]).all(), (fmt, magnitude)


@given(
    st.sampled_from([8, 4]),
    st.sampled_from([32, 128, 2048]),
    st.integers(1, 5000),
    st.integers(-30, 30),
    st.integers(0, 2**30),
)
@settings(max_examples=80)
def test_errors_stay_within_the_documented_bound(bits, block_size, n, exponent, seed):
    fmt = BlockFormat(bits, block_size)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.rand(n, generator=generator) ** 4 * 10.0**exponent
    _, scales = quantize(x, fmt)
    error = (there_and_back(x, fmt) - x).abs()
    scale = scales.float().repeat_interleave(block_size)[:n]
    sent_as_zeros = 2 ** (bits - 1) * torch.finfo(torch.float32).tiny  # the largest value of a block with scale 0
    bound = torch.where(scale == 0, sent_as_zeros, scale.abs() / 2 * (1 + 2**-15))
    assert (error <= bound).all()


def test_clipping_sends_nine_steps_as_eight_or_seven_and_gives_the_rest_to_the_error():
    fmt, error = BlockFormat(4, 32, clip=True), no_error(32, BlockFormat(4, 32))
    payload, scales = quantize(block(-9.0, 8.5, 3.2), fmt, error)
    assert scales.tolist() == [1.0]
    assert (payload[:3] & 15).tolist() == [0, 15, 11]
    lost = torch.empty(32)
    reference.dequantize(*error, feedback_format(fmt), lost)
    torch.testing.assert_close(lost[:3], torch.tensor([-1.0, 1.5, 0.2]), rtol=0, atol=0.02)
    with pytest.raises(ValueError, match="clip is for 4 bits, not 8"):
        BlockFormat(8, 32, clip=True)


def test_signal_to_noise_on_gaussian_data():
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    expected = {(8, 128): 43.7, (8, 256): 43.1, (8, 2048): 41.6, (4, 128): 19.9, (4, 64): 20.6, (4, 32): 21.4}
    for (bits, block_size), decibels in expected.items():
        noise = there_and_back(x, BlockFormat(bits, block_size)) - x
        found = 10 * math.log10(x.square().sum() / noise.square().sum())
        assert found == pytest.approx(decibels, abs=0.1), (bits, block_size)


def test_a_difference_is_taken_in_fp32_whatever_the_dtypes():
    """bf16 would not hold x."""
    x, base = block(1 + 2**-20, 300.0), block(1.0, 300.0).bfloat16()
    for fmt in (INT8, INT4):
        assert all(map(torch.equal, quantize(x, fmt, base=base), quantize(block(2**-20), fmt)))


def test_a_difference_is_added_to_what_a_row_holds_and_rounded_once():
    """Out of any bytes as integers; where either is NaN the sum is."""
    generator, n = torch.Generator().manual_seed(1), 257
    for fmt, dtype in itertools.product((INT8, INT4), (torch.float32, torch.bfloat16, torch.float16)):
        payload = torch.randint(256, (1, 2, fmt.payload_bytes(n)), generator=generator, dtype=torch.uint8)
        scales = (0.01 * torch.randn(1, 2, fmt.num_blocks(n), generator=generator)).bfloat16()
        scales[0, 1, -1] = math.nan
        rows, product = torch.randn(2, n, generator=generator).to(dtype), torch.empty(2, n)
        rows[0, 7] = math.nan
        reference.dequantize(payload[0], scales[0], fmt, product)  # exact in fp32
        expected = (rows.float() + product).to(dtype)
        reference.dequantize_sum(payload, scales, fmt, rows, True)
        torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
        assert rows.isnan().sum(1).tolist() == [1, 1], (fmt, dtype)


def test_a_difference_that_is_not_finite_is_sent_as_nan():
    bad, good = (block(math.nan), block(math.inf)), block(1.0)
    for x, base in itertools.chain(((x, good) for x in bad), ((good, x) for x in bad), ((x, x) for x in bad)):
        payload, scales = quantize(x, INT8, base=base)
        assert scales.isnan().all()
        assert payload.eq(0).all()


def test_error_feedback_returns_what_was_lost():
    """The sum of many quantized steps keeps the error of one step, instead of one error per step."""
    fmt = BlockFormat(4, 128)
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(1024, generator=generator) for _ in range(32)]
    total = sum(steps, torch.zeros(1024))
    feedback = no_error(1024, fmt)
    with_feedback = sum((there_and_back(x, fmt, feedback) for x in steps), torch.zeros(1024))
    without = sum((there_and_back(x, fmt) for x in steps), torch.zeros(1024))
    assert (with_feedback - total).norm() < 0.3 * (without - total).norm()


def test_a_bad_step_leaves_no_error_behind():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for bad in (math.nan, math.inf, 3.4e38):
        feedback, poisoned = no_error(64, INT4), x.clone()
        there_and_back(x, INT4, feedback)
        poisoned[3] = bad
        there_and_back(poisoned, INT4, feedback)
        assert feedback.scales.isfinite().all(), bad
        assert feedback.scales[1] != 0, "the neighbour keeps its error"
        if not math.isfinite(bad):
            assert feedback.scales[0] == 0, bad
            assert feedback.payload[:32].eq(0).all(), bad
        assert there_and_back(x, INT4, feedback).isfinite().all(), bad


def test_a_moving_average_keeps_the_share_beta_of_the_earlier_error():
    """To half a step of the int8 blocks in which each of the three is kept, and their scales' rounding."""
    x, beta, generator = (
        torch.randn(256, generator=torch.Generator().manual_seed(3)),
        0.8,
        torch.Generator().manual_seed(4),
    )
    earlier, latest, averaged = (no_error(256, INT4) for _ in range(3))
    reference.quantize(0.1 * torch.randn(256, generator=generator), INT8, *earlier)
    for kept in (latest, averaged):
        for part, source in zip(kept, earlier, strict=True):
            part.copy_(source)
    assert all(map(torch.equal, quantize(x, INT4, latest), quantize(x, INT4, averaged, beta=beta)))
    old, new, kept = (torch.empty(256) for _ in range(3))
    for feedback, out in ((earlier, old), (latest, new), (averaged, kept)):
        reference.dequantize(*feedback, feedback_format(INT4), out)
    torch.testing.assert_close(kept, beta * old + (1 - beta) * new, rtol=0, atol=float(new.abs().max()) / 127)


def test_a_feedback_buffer_that_is_itself_damaged_heals_after_one_step():
    x = torch.ones(32)
    feedback = no_error(32, INT8)
    feedback.scales.fill_(float("nan"))
    assert there_and_back(x, INT8, feedback).isnan().all()
    assert torch.equal(there_and_back(x, INT8, feedback), there_and_back(x, INT8))
