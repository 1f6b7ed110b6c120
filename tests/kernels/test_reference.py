"""Test the reference implementation of block quantization, which defines the formats.

The tests are worked examples, error bounds and signal-to-noise ratios.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megazpp.kernels.block_quant import reference
from megazpp.kernels.formats import BlockFormat

INT8, INT4 = BlockFormat(8, 32), BlockFormat(4, 32)

Sent = tuple[Tensor, Tensor]  # payload (packed integers), and the scale of each quantization block


def zeros(n: int, fmt: BlockFormat) -> Sent:
    scales = torch.zeros(fmt.num_blocks(n), dtype=torch.bfloat16)
    return torch.zeros(fmt.payload_bytes(n), dtype=torch.uint8), scales


def quantize(x: Tensor, fmt: BlockFormat, error: Sent | None = None, **how: Any) -> Sent:
    sent = zeros(len(x), fmt)
    reference.quantize(x, fmt, *sent, error, **how)
    return sent


def dequantize(sent: Sent, fmt: BlockFormat, n: int) -> Tensor:
    out = torch.full((n,), torch.nan)
    payload, scales = sent
    reference.dequantize_sum(payload[None], scales[None], fmt, out, False)
    return out


def there_and_back(x: Tensor, fmt: BlockFormat, error: Sent | None = None) -> Tensor:
    return dequantize(quantize(x, fmt, error), fmt, len(x))


def block(*head: float) -> Tensor:
    return torch.tensor([*head, *[0.0] * (32 - len(head))])


def test_int8_divides_the_largest_magnitude_into_127_steps():
    payload, scales = quantize(block(-127.0, 1.0, 2.5, 3.5, 126.4), INT8)
    assert scales.tolist() == [1.0]
    # 2.5 and 3.5 lie between two integers and are rounded to the even one
    assert payload.view(torch.int8)[:6].tolist() == [-127, 1, 2, 4, 126, 0]
    scale = quantize(block(1.0), INT8)[1].item()
    assert scale > 1 / 127 > scale * (1 - 2**-7), (
        "the scale must be 1 / 127 rounded up to bf16, so that no value is clipped"
    )


def test_int4_scale_lets_values_exceed_the_integers_by_under_half_a_step():
    """Check that int4 quotients value / scale leave the range -8..7 by less than 0.5, so that none has to be clipped.

    The expected bytes follow from the order of nibbles: the lower nibbles of a block's bytes hold the first half of the
    block, the upper nibbles the second half.
    """
    x = torch.zeros(32)
    x[0], x[1], x[16], x[17] = -8.4375, 3.0, 7.0, -1.0
    payload, scales = quantize(x, INT4)
    assert scales.tolist() == [1.0]
    assert payload[:3].tolist() == [0 | 15 << 4, 11 | 7 << 4, 8 | 8 << 4]
    # now the largest magnitude is positive, so the scale is negative, because int4 has one more negative integer
    x[16] = 2 * 7.4375
    assert quantize(x, INT4)[1].item() == -quantize(-x, INT4)[1].item() < 0
    assert quantize(block(-8.0, 7.4375 * 1.0625), INT4)[1].item() == 1.0625, (
        "the largest element of the other sign must set the scale"
    )
    assert quantize(block(8.4375, 1.0), INT4)[1].item() == -1.0, (
        "the scale must be negative if the largest magnitude is positive"
    )
    assert quantize(block(7.4375, -7.4375), INT4)[1].item() == 1.0, (
        "of two equal magnitudes, the negative element must set the scale's sign"
    )


def test_int4_block_of_equal_magnitudes_keeps_both_signs_accurate():
    """Quantize blocks whose elements have equal magnitude and both signs to int4.

    AdamW's first updates are such blocks: the learning rate times the sign of the gradient.
    """
    signs = torch.randint(0, 2, (4, 32), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    signs[3, 16:] *= 0.1  # in the last block, only half of the elements have the largest magnitude
    step = 1e-3 * signs
    sent = torch.stack([there_and_back(row, INT4) for row in step])
    torch.testing.assert_close(sent[:3], step[:3], rtol=2**-8, atol=0)
    torch.testing.assert_close(sent[3, :16], step[3, :16], rtol=2**-8, atol=0)


def test_block_with_non_finite_value_decodes_to_nan_without_its_neighbors():
    for fmt, bad in itertools.product((INT8, INT4), (math.nan, -math.nan, math.inf, -math.inf)):
        x = torch.ones(3 * 32)
        x[40] = bad
        assert there_and_back(x, fmt).isfinite().view(3, 32).sum(1).tolist() == [32, 0, 32], (fmt, bad)
        assert quantize(x, fmt)[1].view(torch.int16)[1].item() == 0x7FC0, (fmt, bad)


def test_block_too_small_for_a_normal_scale_decodes_to_zeros():
    for fmt, magnitude in itertools.product((INT8, INT4), (0.0, -0.0, 1e-45, 1e-38, 1e-37)):
        x = torch.full((32,), magnitude)
        payload, scales = quantize(x, fmt)
        if scales.item() != 0:
            assert magnitude / 2 ** (fmt.bits - 1) >= torch.finfo(torch.float32).tiny, (fmt, magnitude)
            continue
        assert scales.view(torch.int16).item() == 0, (
            "the scale must be +0 and not -0, so that all implementations have equal bits"
        )
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
def test_rounding_errors_stay_within_the_documented_bound(bits, block_size, n, exponent, seed):
    fmt = BlockFormat(bits, block_size)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.rand(n, generator=generator) ** 4 * 10.0**exponent
    _, scales = quantize(x, fmt)
    error = (there_and_back(x, fmt) - x).abs()
    scale = scales.float().repeat_interleave(block_size)[:n]
    # the largest value of a block whose scale is rounded to 0; such a block is sent as zeros, so this bounds its error
    sent_as_zeros = 2 ** (bits - 1) * torch.finfo(torch.float32).tiny
    bound = torch.where(scale == 0, sent_as_zeros, scale.abs() / 2 * (1 + 2**-15))
    assert (error <= bound).all()


def test_clipping_sends_nine_steps_as_eight_or_seven_and_keeps_the_rest():
    error = zeros(32, INT8)
    payload, scales = quantize(block(-9.0, 8.5, 3.2), BlockFormat(4, 32, clip=True), error)
    assert scales.tolist() == [1.0]
    assert (payload[:3] & 15).tolist() == [0, 15, 11]
    torch.testing.assert_close(dequantize(error, INT8, 3), torch.tensor([-1.0, 1.5, 0.2]), rtol=0, atol=0.02)


def test_signal_to_noise_ratio_on_gaussian_data():
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    expected = {(8, 128): 43.7, (8, 256): 43.1, (8, 2048): 41.6, (4, 128): 19.9, (4, 64): 20.6, (4, 32): 21.4}
    for kind, decibels in expected.items():
        noise = there_and_back(x, BlockFormat(*kind)) - x
        assert 10 * math.log10(x.square().sum() / noise.square().sum()) == pytest.approx(decibels, abs=0.1), kind


def test_difference_is_computed_in_fp32_for_any_dtype():
    """Quantize the difference of an fp32 tensor from a bf16 base.

    The small difference would be lost if the tensor was rounded to bf16 first.
    """
    x, base = block(1 + 2**-20, 300.0), block(1.0, 300.0).bfloat16()
    for fmt in (INT8, INT4):
        assert all(map(torch.equal, quantize(x, fmt, base=base), quantize(block(2**-20), fmt)))


def test_dequantized_difference_is_added_in_fp32_and_rounded_once():
    """Add dequantized values to a row, and compare with an fp32 sum that is rounded once.

    Payload bytes are arbitrary. The sum is NaN where the row or the scale is NaN.
    """
    generator, n = torch.Generator().manual_seed(1), 257
    for fmt, dtype in itertools.product((INT8, INT4), (torch.float32, torch.bfloat16, torch.float16)):
        payload = torch.randint(256, (fmt.payload_bytes(n),), generator=generator, dtype=torch.uint8)
        scales = (0.01 * torch.randn(fmt.num_blocks(n), generator=generator)).bfloat16()
        row = torch.randn(n, generator=generator).to(dtype)
        row[7] = scales[-1] = math.nan
        # integer times bf16 scale is exact in fp32, so only the sum is rounded
        expected = (row.float() + dequantize((payload, scales), fmt, n)).to(dtype)
        reference.dequantize_sum(payload[None], scales[None], fmt, row, True)
        torch.testing.assert_close(row, expected, rtol=0, atol=0, equal_nan=True)
        assert row.isnan().nonzero().flatten().tolist() == [7, 256], (fmt, dtype)


def test_non_finite_difference_is_sent_as_nan():
    bad, good = (block(math.nan), block(math.inf)), block(1.0)
    for x, base in [*itertools.product(bad, [good]), *itertools.product([good], bad), *zip(bad, bad, strict=True)]:
        payload, scales = quantize(x, INT8, base=base)
        assert scales.isnan().all()
        assert payload.eq(0).all()


def test_error_feedback_bounds_the_error_of_many_steps():
    """Sum 32 int4 tensors with and without error feedback.

    With error feedback, the sum has about the error of a single tensor. Without it, the errors of all tensors add up.
    """
    fmt, error = BlockFormat(4, 128), zeros(1024, BlockFormat(8, 128))
    steps = torch.randn(32, 1024, generator=torch.Generator().manual_seed(0))
    with_feedback = sum(there_and_back(x, fmt, error) for x in steps) - steps.sum(0)
    without = sum(there_and_back(x, fmt) for x in steps) - steps.sum(0)
    assert with_feedback.norm() < 0.3 * without.norm()


def test_non_finite_or_huge_step_leaves_no_error_behind():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for bad in (math.nan, math.inf, 3.4e38):
        payload, scales = error = zeros(64, INT8)
        there_and_back(x, INT4, error)
        there_and_back(x.index_fill(0, torch.tensor([3]), bad), INT4, error)
        assert scales.isfinite().all(), bad
        assert scales[1] != 0, "the error of the block beside the bad one must be kept"
        if not math.isfinite(bad):
            assert scales[0] == 0, bad
            assert payload[:32].eq(0).all(), bad
        assert there_and_back(x, INT4, error).isfinite().all(), bad


def test_error_average_keeps_the_share_beta_of_the_earlier_error():
    """Average error feedback: with beta = 0.8, the stored error is 0.8 times the old error plus 0.2 times the new one.

    The tolerance covers the int8 rounding of each of the three stored errors, and the rounding of their scales.
    """
    x, before = torch.randn(2, 256, generator=torch.Generator().manual_seed(3))
    earlier, latest, averaged = (quantize(0.1 * before, INT8) for _ in range(3))
    assert all(map(torch.equal, quantize(x, INT4, latest), quantize(x, INT4, averaged, beta=0.8)))
    old, new, kept = (dequantize(error, INT8, 256) for error in (earlier, latest, averaged))
    torch.testing.assert_close(kept, 0.8 * old + 0.2 * new, rtol=0, atol=float(new.abs().max()) / 127)


def test_damaged_error_buffer_recovers_after_one_step():
    """A NaN in the stored error makes one message NaN, but must not remain in the stored error."""
    x, error = torch.ones(32), zeros(32, INT8)
    error[1].fill_(torch.nan)
    assert there_and_back(x, INT8, error).isnan().all()
    assert torch.equal(there_and_back(x, INT8, error), there_and_back(x, INT8))
