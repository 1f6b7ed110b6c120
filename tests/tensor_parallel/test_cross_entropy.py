"""The split cross entropy against torch's over the whole, real vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import counted, draw, part, tp_axis

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

SEQ, BATCH = 13, 3  # odd, and 39 tokens are enough for every label of the small vocabularies


def labels_of(vocab_size: int) -> torch.Tensor:
    """[S, B], each token of the vocabulary at least once (while there is room), not contiguous."""
    return (torch.arange(SEQ * BATCH) * 7 % vocab_size).view(BATCH, SEQ).t()


def reference(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and gradients of their weighted sum with respect to the logits, in fp64."""
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view(labels.shape)
    losses.backward(draw(9, *labels.shape))
    return losses.detach(), leaf.grad


def run_split(full: torch.Tensor, labels: torch.Tensor, vocab_size: int, in_fp32: bool = True) -> dict[str, Any]:
    tp = tp_axis()
    logits = part(full, -1, tp).requires_grad_()
    before = logits.detach().clone()
    losses, forward = counted(
        tp, lambda: vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=vocab_size, in_fp32=in_fp32)
    )
    _, backward = counted(tp, lambda: losses.backward(draw(9, *labels.shape).to(losses.dtype)))
    return {
        "losses": losses.detach(),
        "grad": logits.grad,
        "calls": (forward, backward),
        "sent": tp.counter.sent_bytes("tp"),
        "unchanged": torch.equal(logits.detach(), before),
    }


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize(("vocab_size", "padded"), [
    (16, 16),  # no padding
    (15, 16),
    (11, 16),  # on 4 ranks: padding on two of them
    (7, 16),   # on 4 ranks: two ranks of nothing else
    (3, 24),
    (1, 4),    # the only token is certain
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_real_vocabulary(size: int, vocab_size: int, padded: int, in_fp32: bool):
    """fp32 against fp64: 1e-6 relative to losses of a few nats."""
    full = 3 * draw(1, SEQ, BATCH, padded, dtype=torch.float32)
    labels = labels_of(vocab_size)
    losses, grad = reference(full, labels, vocab_size)
    results = ranks(size).run(run_split, full, labels, vocab_size, in_fp32)
    for result in results:
        assert result["losses"].dtype == torch.float32
        torch.testing.assert_close(result["losses"].double(), losses, rtol=2e-6, atol=2e-6)
        assert result["unchanged"]
    ours = torch.cat([result["grad"] for result in results], dim=-1)
    torch.testing.assert_close(ours.double(), grad, rtol=2e-6, atol=2e-6)
    assert not ours[..., vocab_size:].any()  # exactly: AdamW would make steps of any noise


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 4])
def test_16_bit_logits_cost_no_precision_beyond_their_own(size: int, dtype: torch.dtype, in_fp32: bool):
    """Losses are as exact as from fp32 logits of the same values; gradients are rounded once to 16 bits."""
    full = (3 * draw(1, SEQ, BATCH, 16, dtype=torch.float32)).to(dtype)
    labels = labels_of(11)
    losses, grad = reference(full, labels, 11)
    results = ranks(size).run(run_split, full, labels, 11, in_fp32)
    for result in results:
        torch.testing.assert_close(result["losses"].double(), losses, rtol=2e-6, atol=2e-6)
        assert result["grad"].dtype == dtype
    ours = torch.cat([result["grad"] for result in results], dim=-1)
    half_step = torch.finfo(dtype).eps / 2
    # subnormals of fp16 are 6e-8 apart
    torch.testing.assert_close(ours.double(), grad, rtol=1.01 * half_step, atol=2e-6)


def test_16_bit_losses_of_one_rank_are_rounded_to_16_bits_only_when_asked():
    """--fp16-lm-cross-entropy: one bf16 rounding of the losses; without it none."""
    full = (3 * draw(1, SEQ, BATCH, 16, dtype=torch.float32)).bfloat16()
    labels = labels_of(11)
    losses, grad = reference(full, labels, 11)
    exact, rounded = (run_split(full, labels, 11, in_fp32) for in_fp32 in (True, False))
    torch.testing.assert_close(exact["losses"].double(), losses, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(rounded["losses"].double(), losses, rtol=2**-8, atol=2**-8)
    assert not torch.equal(exact["losses"], rounded["losses"])
    for result in (exact, rounded):
        # the softmax is rounded before and after the label's 1 is taken off: two half steps
        torch.testing.assert_close(result["grad"].double(), grad, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_extreme_logits_neither_overflow_nor_lose_the_label(size: int, dtype: torch.dtype):
    """+-1e4: naive exponentials are inf or 0, the right losses are 0 and 2e4 and everything between."""
    full = (1e4 * draw(1, SEQ, BATCH, 16, dtype=torch.float32).sign()).to(dtype)
    full[0] = -1e4  # all equal: log(11)
    full[1] = 1e4
    labels = labels_of(11)
    losses, grad = reference(full, labels, 11)
    results = ranks(size).run(run_split, full, labels, 11)
    for result in results:
        # one fp32 step at 1e4 is 1e-3: log-normaliser and score are each rounded to it before they are subtracted
        torch.testing.assert_close(result["losses"].double(), losses, rtol=1e-6, atol=2e-3)
    ours = torch.cat([result["grad"] for result in results], dim=-1)
    torch.testing.assert_close(ours.double(), grad, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_logit_of_minus_infinity_is_an_impossible_token(size: int):
    """Its loss is infinite where it is the label, and elsewhere it is just left out."""
    full = draw(1, SEQ, BATCH, 16, dtype=torch.float32)
    full[..., 5] = float("-inf")
    labels = labels_of(11)
    losses, _ = reference(full, labels, 11)
    assert losses.isinf().any()
    for result in ranks(size).run(run_split, full, labels, 11):
        torch.testing.assert_close(result["losses"].double(), losses, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("column", [0, 4, 10])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_logit_that_is_not_a_number_makes_its_token_s_loss_nan_on_every_rank(size: int, value: float, column: int):
    """Whichever rank holds it; other tokens keep their losses."""
    full = draw(1, SEQ, BATCH, 16, dtype=torch.float32)
    labels = labels_of(11)
    expected, _ = reference(full, labels, 11)
    full[3, 1, column] = value
    expected[3, 1] = float("nan")
    for result in ranks(size).run(run_split, full, labels, 11):
        torch.testing.assert_close(result["losses"].double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_token_whose_logits_are_all_minus_infinity_has_loss_nan(size: int):
    full = draw(1, SEQ, BATCH, 16, dtype=torch.float32)
    full[2, 0] = float("-inf")
    for result in ranks(size).run(run_split, full, labels_of(11), 11):
        assert result["losses"][2, 0].isnan()
        assert int(result["losses"].isnan().sum()) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_garbage_in_the_padding_changes_nothing(size: int):
    clean = draw(1, SEQ, BATCH, 16, dtype=torch.float32)
    dirty = clean.clone()
    dirty[..., 11:] = torch.tensor([float("nan"), float("inf"), 1e30, float("-inf"), 50.0])
    labels = labels_of(11)
    for a, b in zip(
        ranks(size).run(run_split, clean, labels, 11), ranks(size).run(run_split, dirty, labels, 11), strict=True
    ):
        assert torch.equal(a["losses"], b["losses"])
        assert torch.equal(a["grad"], b["grad"])


@pytest.mark.parametrize("label", [-1, -100, 11, 15, 16, 1000])
def test_a_label_outside_the_vocabulary_is_never_a_silent_number(label: int):
    """Wrong tokenizer, wrong data: the loss has to show it, and the gradient norm too."""
    full = draw(1, SEQ, BATCH, 16, dtype=torch.float32)
    labels = labels_of(11).clone()
    labels[4, 2] = label
    for result in ranks(2).run(run_split, full, labels, 11):
        assert result["losses"][4, 2].isnan()
        assert result["grad"][4, 2].isnan().any()
        assert int(result["losses"].isfinite().sum()) == labels.numel() - 1


@pytest.mark.parametrize("padded", [16, 1024])
@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_sent_depend_on_the_tokens_and_not_on_the_vocabulary(size: int, padded: int):
    """Logits are never gathered: a maximum, and a sum of two numbers, fp32, per token."""
    full = draw(1, SEQ, BATCH, padded, dtype=torch.float32)
    tokens = SEQ * BATCH
    ring = 2 * (4 * tokens * (size - 1) // size) + 2 * (8 * tokens * (size - 1) // size)
    for result in ranks(size).run(run_split, full, labels_of(11), 11):
        assert result["calls"] == ({"all_reduce": 2}, {})
        assert result["sent"] == ring


def test_one_rank_communicates_nothing():
    alone = MeshAxis("tp")
    vocab_parallel_cross_entropy(draw(1, 5, 2, 8), torch.zeros(5, 2, dtype=torch.int64), tp=alone, vocab_size=7)
    assert not alone.counter.table()
