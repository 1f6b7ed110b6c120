"""Product and cross entropy in chunks against torch's over the whole, real vocabulary.

Where logits are given, the weight is the identity: its product gives them back.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import counted, draw, part, tp_axis
from helpers.tiers import slow

from megazpp.parallel.axis import MeshAxis
from megazpp.planner.trace import BACKWARD, FORWARD, TraceRecorder
from megazpp.tensor_parallel.cross_entropy import BLOCKS, linear_cross_entropy

SEQ, BATCH = 13, 3  # odd, and 39 tokens are enough for every label of the small vocabularies
# bytes of a chunk: of all columns; of all, five tokens at a time in fp32; of 128 columns, one token at a time
WHOLE, FIVES, SMALL = 1 << 29, BLOCKS * 4 * 384 * 5, 4 * 39 * 128
REAL, PADDED = 300, 384  # on one rank three chunks, on two two and one


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


def run_split(
    full: torch.Tensor, labels: torch.Tensor, vocab_size: int, chunk_bytes: int = WHOLE, picks: bool = False
) -> dict[str, Any]:
    """One rank's part; with `picks`, the product picks columns, as the identity does where nothing is infinite."""
    tp = tp_axis()
    x, weight = full.clone().requires_grad_(), part(torch.eye(full.shape[-1], dtype=full.dtype), 0, tp)
    picking = mock.patch.object(F, "linear", lambda x, weight: x[..., weight.argmax(dim=-1)])
    with picking if picks else nullcontext():
        (losses, _), forward = counted(
            tp,
            lambda: linear_cross_entropy(x, weight, labels, tp=tp, vocab_size=vocab_size, chunk_bytes=chunk_bytes),
        )
        _, backward = counted(tp, lambda: losses.backward(draw(9, *labels.shape).to(losses.dtype)))
    return {
        "losses": losses.detach(),
        "grad": part(x.grad, -1, tp),
        "elsewhere": x.grad.count_nonzero() - part(x.grad, -1, tp).count_nonzero(),
        "calls": (forward, backward),
        "sent": tp.counter.sent_bytes("tp"),
        "unchanged": torch.equal(x.detach(), full),
    }


@pytest.mark.parametrize("chunk_bytes", [WHOLE, FIVES, SMALL])
@pytest.mark.parametrize(("vocab_size", "padded"), [
    (REAL, PADDED),
    (16, 16),  # no padding
    (15, 16),
    (11, 16),  # on 4 ranks: padding on two of them
    (7, 16),   # on 4 ranks: two ranks of nothing else
    (3, 24),
    (1, 4),    # the only token is certain
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_real_vocabulary(
    size: int, vocab_size: int, padded: int, chunk_bytes: int
):
    """fp32 against fp64: 1e-6 relative to losses of a few nats."""
    full = 3 * draw(1, SEQ, BATCH, padded, dtype=torch.float32)
    labels = labels_of(vocab_size)
    losses, grad = reference(full, labels, vocab_size)
    results = ranks(size).run(run_split, full, labels, vocab_size, chunk_bytes)
    for result in results:
        assert result["losses"].dtype == torch.float32
        torch.testing.assert_close(result["losses"].double(), losses, rtol=2e-6, atol=2e-6)
        assert result["unchanged"]
        assert not result["elsewhere"]  # what other ranks add to the gradient of x
    ours = torch.cat([result["grad"] for result in results], dim=-1)
    torch.testing.assert_close(ours.double(), grad, rtol=2e-6, atol=2e-6)
    assert not ours[..., vocab_size:].any()  # exactly: AdamW would make steps of any noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2])
def test_16_bit_logits_cost_no_precision_beyond_their_own(size: int, dtype: torch.dtype):
    """Losses are as exact as from fp32 logits of the same values; gradients are rounded once to 16 bits."""
    full = (3 * draw(1, SEQ, BATCH, PADDED, dtype=torch.float32)).to(dtype)
    labels = labels_of(REAL)
    losses, grad = reference(full, labels, REAL)
    half_step = torch.finfo(dtype).eps / 2
    for chunk_bytes in (WHOLE, FIVES, SMALL):
        results = ranks(size).run(run_split, full, labels, REAL, chunk_bytes)
        for result in results:
            torch.testing.assert_close(result["losses"].double(), losses, rtol=2e-6, atol=2e-6)
            assert result["grad"].dtype == dtype
        ours = torch.cat([result["grad"] for result in results], dim=-1)
        # subnormals of fp16 are 6e-8 apart
        torch.testing.assert_close(ours.double(), grad, rtol=1.01 * half_step, atol=2e-6)


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


@pytest.mark.parametrize(("where", "value"), [
    ((..., 7), float("-inf")),  # an impossible token: its loss is infinite where it is the label
    ((3, 1, 0), float("nan")),  # one token's loss is NaN, whichever rank holds the logit
    ((3, 1, 130), float("nan")),
    ((3, 1, 299), float("inf")),
    ((2, 0), float("-inf")),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_that_are_not_finite_show_in_their_tokens_losses_and_in_no_others(size: int, where: Any, value: float):
    full = draw(1, SEQ, BATCH, PADDED, dtype=torch.float32)
    full[where] = value
    labels = labels_of(REAL)
    losses, _ = reference(full, labels, REAL)
    assert not losses.isfinite().all()
    assert int(losses.isnan().sum()) == (where != (..., 7))
    for result in ranks(size).run(run_split, full, labels, REAL, SMALL, True):
        torch.testing.assert_close(result["losses"].double(), losses, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_garbage_in_the_padding_changes_nothing(size: int):
    clean = draw(1, SEQ, BATCH, PADDED, dtype=torch.float32)
    dirty = clean.clone()
    dirty[..., REAL:] = torch.tensor([float("nan"), float("inf"), 1e30, float("-inf")]).repeat(21)
    labels = labels_of(REAL)
    for a, b in zip(
        ranks(size).run(run_split, clean, labels, REAL, SMALL, True),
        ranks(size).run(run_split, dirty, labels, REAL, SMALL, True),
        strict=True,
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


def run_product(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int, chunk_bytes: int, fuse: bool
) -> dict[str, Any]:
    tp = tp_axis()
    x, weight = x.clone().requires_grad_(), part(weight, 0, tp).clone().requires_grad_()
    how: dict[str, Any] = {"temperature": 0.7, "with_entropy": True, "fuse": fuse, "chunk_bytes": chunk_bytes}
    losses, entropy = linear_cross_entropy(x, weight, labels, tp=tp, vocab_size=vocab_size, **how)
    losses.backward(draw(9, *labels.shape).to(losses.dtype))
    return {"losses": losses.detach(), "entropy": entropy, "x": x.grad, "weight": weight.grad}


@pytest.mark.parametrize(("size", "chunk_bytes", "fuse"), [
    *((size, chunk_bytes, False) for size in (1, 2, 4) for chunk_bytes in (WHOLE, FIVES, SMALL)),
    slow(2, SMALL, True),  # waits for the compiler
])  # fmt: skip
def test_losses_entropy_and_gradients_are_those_of_the_product_s_distribution(size: int, chunk_bytes: int, fuse: bool):
    """At temperature 0.7, against fp64; the padding's part of the weight gets a gradient of exactly zero."""
    x, weight = (draw(seed, *shape, dtype=torch.float32) for seed, shape in ((1, (SEQ, BATCH, 5)), (2, (PADDED, 5))))
    labels = labels_of(REAL)
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    scores = ((exact_x @ exact_weight.t())[..., :REAL] / 0.7).log_softmax(dim=-1)
    losses = -scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    losses.backward(draw(9, *labels.shape))
    results = ranks(size).run(run_product, x, weight, labels, REAL, chunk_bytes, fuse)
    for result in results:
        torch.testing.assert_close(result["losses"].double(), losses.detach(), rtol=2e-6, atol=2e-6)
        entropy = -(scores.exp() * scores).sum(dim=-1).detach()
        torch.testing.assert_close(result["entropy"].double(), entropy, rtol=2e-6, atol=2e-6)
        assert not result["entropy"].requires_grad
    ours = torch.stack([result["x"] for result in results]).sum(dim=0)
    torch.testing.assert_close(ours.double(), exact_x.grad, rtol=5e-6, atol=2e-6)
    ours = torch.cat([result["weight"] for result in results])
    torch.testing.assert_close(ours.double(), exact_weight.grad, rtol=5e-6, atol=5e-6)
    assert not ours[REAL:].any()


def test_the_gradient_of_x_is_summed_over_chunks_in_fp32():
    """64 chunks of 128 columns: 16 from the label's, 1/64 from each, which bf16 would lose one after the other."""
    x, weight = torch.zeros(1, 1, 4, dtype=torch.bfloat16).requires_grad_(), torch.ones(8192, 4, dtype=torch.bfloat16)
    weight[-1] = -16.0
    labels = torch.tensor([[8191]])
    losses, _ = linear_cross_entropy(x, weight, labels, tp=MeshAxis("tp"), vocab_size=8192, chunk_bytes=256)
    losses.sum().backward()
    assert weight.grad is None  # frozen
    assert x.grad.tolist() == [[[17.0] * 4]]


def traced(num_tokens: int, channels: int, vocab_size: int, rows: int, **changes: Any) -> TraceRecorder:
    """One forward and backward in bf16 without memory."""
    recorder = TraceRecorder()
    x = torch.empty(num_tokens, channels, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(rows, channels, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    with recorder:
        losses, _ = linear_cross_entropy(x, weight, labels, tp=MeshAxis("tp"), vocab_size=vocab_size, **changes)
        loss = losses.sum()
        recorder.enter((BACKWARD, 0))
        loss.backward()
        recorder.enter((BACKWARD, -1))
    return recorder


def products(recorder: TraceRecorder) -> list[tuple[int, int, int]]:
    return [(o.m, o.n, o.k) for part in recorder.segments.values() for o in part.operations if o.kind == "matrix"]


def test_a_large_vocabulary_takes_little_more_memory_than_its_16_bit_logits():
    """8192 tokens of 128,256 in bf16: at most 2.5 GB beside the weight's gradient; logits alone take 2.1 GB."""
    recorder = traced(8192, 4096, 128256, 128256)
    forward, backward = recorder.segments[FORWARD, 0], recorder.segments[BACKWARD, 0]
    assert 2.1e9 < forward.peak < 2.5e9
    assert 2.1e9 < forward.kept + backward.peak - 128256 * 4096 * 2 < 2.5e9


@pytest.mark.parametrize(("num_tokens", "channels", "vocab_size", "rows"), [
    (16384, 768, 50257, 50304),  # configs/gpt_125m.args
    (8192, 4096, 128256, 128256),
    (8192, 1024, 151665, 151936),
])  # fmt: skip
def test_a_step_has_three_products_of_aligned_columns(num_tokens: int, channels: int, vocab_size: int, rows: int):
    """Logits, and the gradients of both factors, of the whole padded vocabulary each."""
    found = products(traced(num_tokens, channels, vocab_size, rows))
    assert sum(m * n * k for m, n, k in found) == 3 * num_tokens * channels * -(-vocab_size // 128) * 128


@pytest.mark.parametrize("num_tokens", [2048, 4096, 8192, 16384])
def test_chunks_of_any_number_end_at_multiples_of_128_columns(num_tokens: int):
    """Of 64 MB, one at a time is in memory, and all but the last are multiplied again."""
    recorder = traced(num_tokens, 64, 50257, 50304, chunk_bytes=1 << 26)
    found = products(recorder)
    widths = [n for m, n, k in found if k == 64]
    assert len(widths) > 4
    assert not any(width % 128 for width in widths)
    assert sum(m * n * k for m, n, k in found) == num_tokens * 64 * (4 * 50304 - widths[len(widths) // 2])
    assert recorder.segments[FORWARD, 0].peak < 1.2 * (1 << 26)


def test_one_rank_communicates_nothing_and_a_second_backward_gives_the_same_again():
    """The first one left gradients where the logits were."""
    alone, x, weight = MeshAxis("tp"), draw(1, 5, 2, 3).requires_grad_(), draw(2, 8, 3).requires_grad_()
    losses, _ = linear_cross_entropy(x, weight, torch.zeros(5, 2, dtype=torch.int64), tp=alone, vocab_size=7)
    first, second = (torch.autograd.grad(losses.sum(), (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert not alone.counter.table()
