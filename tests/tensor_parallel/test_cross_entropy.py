"""Compare the chunked, vocabulary-parallel output layer and cross entropy with torch's over the unpadded vocabulary."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import assert_near, counted, draw, part, tp_axis
from helpers.tiers import slow

from megazpp.parallel.axis import MeshAxis
from megazpp.planner.trace import BACKWARD, FORWARD, TraceRecorder
from megazpp.tensor_parallel import cross_entropy
from megazpp.tensor_parallel.cross_entropy import BLOCKS, linear_cross_entropy

SEQ, BATCH = 13, 3  # odd sizes, so that the last block of tokens is not full
TOKENS = SEQ * BATCH
# Bytes of a chunk of logits that give: all columns of all tokens; all columns, but only five tokens at a time (in
# fp32); or 128 columns of all tokens
WHOLE, _, SMALL = CHUNKS = 1 << 29, BLOCKS * 4 * 384 * 5, 4 * TOKENS * 128
# 300 tokens in a vocabulary of 384 padded rows. With chunks of SMALL bytes, one rank alone has 3 chunks, and two
# ranks have 2 and 1
REAL, PADDED = 300, 384
# Further sizes (tokens, padded rows) for 4 ranks: no padding; padding on two ranks; ranks with only padding; one token
VOCABULARIES = [(REAL, PADDED), (16, 16), (11, 16), (5, 16), (3, 24), (1, 4)]


def labels_of(vocab_size: int) -> torch.Tensor:
    """Return labels [SEQ, BATCH] in non-contiguous memory: multiples of 7, modulo the size of the vocabulary."""
    return (torch.arange(TOKENS) * 7 % vocab_size).view(BATCH, SEQ).t()


def compare(vocab_size: int, padded: int, chunk_bytes: int, temperature: float, fuse: Any) -> None:
    """Compare this rank's losses, gradients and sent bytes with torch's, and the entropy if the temperature is not 1.

    Args:
        vocab_size: number of tokens in the vocabulary.
        padded: rows of the output layer over all ranks, including padding.
        chunk_bytes: limit for the bytes of a chunk of logits.
        temperature: number by which the logits are divided.
        fuse: function that fuses the elementwise work on the logits; None for eager operations.
    """
    row, with_entropy = f"{vocab_size} of {padded}, {chunk_bytes} bytes, {temperature}", temperature != 1.0
    tp, labels, loss_grad = tp_axis(), labels_of(vocab_size), draw(9, SEQ, BATCH)
    whole_x, whole_weight = draw(1, SEQ, BATCH, 5).requires_grad_(), draw(2, padded, 5).requires_grad_()
    scores = ((whole_x @ whole_weight.t())[..., :vocab_size] / temperature).log_softmax(dim=-1)
    expected = -scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    expected.backward(loss_grad)

    x = whole_x.detach().float().requires_grad_()
    weight = part(whole_weight.detach().float(), 0, tp).requires_grad_()
    how: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy, "fuse": fuse}
    how |= {"tp": tp, "vocab_size": vocab_size, "chunk_bytes": chunk_bytes}
    (losses, entropy), forward = counted(tp, functools.partial(linear_cross_entropy, x, weight, labels, **how))
    sent = tp.counter.sent_bytes("tp")
    _, backward = counted(tp, losses.backward, loss_grad.float())

    # Logits are never gathered: per token, ranks reduce an fp32 maximum, and a sum of two or three fp32 numbers
    assert (forward, backward) == ({"all_reduce": 2} if tp.size > 1 else {}, {}), row
    assert sent == sum(2 * (4 * numbers * TOKENS * (tp.size - 1) // tp.size) for numbers in (1, 2 + with_entropy)), row
    pairs = [(losses, expected), (tp.all_reduce_(x.grad), whole_x.grad)]
    pairs.append((weight.grad, part(whole_weight.grad, 0, tp)))
    if with_entropy:
        pairs.append((entropy, -(scores.exp() * scores).sum(dim=-1)))
        assert not entropy.requires_grad
    for found, exact in pairs:
        assert found.dtype == torch.float32
        assert_near(row, found.double(), exact, rtol=5e-6, atol=5e-6)
    padding = torch.arange(padded) >= vocab_size
    # exactly zero, because AdamW would turn any noise into steps
    assert not weight.grad[part(padding, 0, tp)].any(), row


def compare_all() -> None:
    for (vocab_size, padded), chunk_bytes, temperature in itertools.product(VOCABULARIES, CHUNKS, (1.0, 0.7)):
        compare(vocab_size, padded, chunk_bytes, temperature, fuse=None)


@pytest.mark.parametrize("size", [1, 2, slow(4)])
def test_chunked_loss_entropy_gradients_and_bytes_match_torch(size):
    ranks(size).run(compare_all)


def compare_fused() -> None:
    """Compare the functions that torch.compile fuses with torch's loss, by the back end "aot_eager".

    This back end needs no C++ compiler, which would take most of the time. tests/model/test_compile.py compares the
    compiled C++ code of a whole model with eager operations.
    """
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        compare(REAL, PADDED, SMALL, 0.7, fuse=cross_entropy.torch_compiled)


@pytest.mark.slow
def test_fused_functions_match_torch():
    ranks(2).run(compare_fused)


def test_fused_kernels_process_all_tokens_of_a_chunk_at_once():
    def counting(function: Any) -> Any:
        def counted(logits: torch.Tensor, *args: Any) -> Any:
            calls.append((function.__name__, len(logits)))
            return function(logits, *args)

        return counted

    calls: list[tuple[str, int]] = []
    for tokens, chunk_bytes, num_chunks in ((TOKENS, WHOLE, 1), (TOKENS, SMALL, 3), (1, SMALL, 1), (0, WHOLE, 1)):
        x, weight = draw(1, tokens, 5).requires_grad_(), draw(2, PADDED, 5).requires_grad_()
        labels, found = torch.arange(tokens), []
        for fuse in (None, counting):
            losses, _ = linear_cross_entropy(
                x, weight, labels, tp=MeshAxis("tp"), vocab_size=REAL, fuse=fuse, chunk_bytes=chunk_bytes
            )
            found.append((losses, *torch.autograd.grad(losses.sum(), (x, weight))))
        assert all(map(torch.equal, *found)), (tokens, chunk_bytes)
        each = num_chunks if tokens else 0
        assert calls == [("_distribution", tokens)] * each + [("_gradient_", tokens)] * each
        calls.clear()


def from_logits(
    full: torch.Tensor, labels: torch.Tensor, vocab_size: int, chunk_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses of the given logits, gradient of this rank's columns of the logits).

    The logits are passed as the input of the output layer, and a patched matrix product selects this rank's columns.
    With an identity matrix as the weight instead, one infinite logit would make a token's other logits NaN.
    """
    tp = tp_axis()
    x, weight = full.clone().requires_grad_(), part(torch.eye(full.shape[-1], dtype=full.dtype), 0, tp)
    with mock.patch.object(F, "linear", lambda x, weight: x[..., weight.argmax(dim=-1)]):
        losses, _ = linear_cross_entropy(x, weight, labels, tp=tp, vocab_size=vocab_size, chunk_bytes=chunk_bytes)
        losses.backward(draw(9, *labels.shape).to(losses.dtype))
    assert torch.equal(x.detach(), full) or full.isnan().any()
    assert x.grad.dtype == full.dtype
    return losses.detach(), part(x.grad, -1, tp)


def special_logits() -> Iterator[tuple[str, torch.Tensor, int, tuple[float, float], tuple[float, float] | None]]:
    """Yield logits with rounded, extreme or non-finite values.

    Each item is (name, logits, vocabulary size, (rtol, atol) of losses, (rtol, atol) of gradients). The last is None if
    gradients are not finite.
    """
    clean, near = draw(1, SEQ, BATCH, PADDED, dtype=torch.float32), (2e-6, 2e-6)
    for dtype in (torch.bfloat16, torch.float16):
        # Losses are as exact as from fp32 logits of the same values. Gradients are rounded once to 16 bits, and fp16
        # subnormals are 6e-8 apart
        yield f"{dtype}", (3 * clean).to(dtype), REAL, near, (1.01 * torch.finfo(dtype).eps / 2, 2e-6)
    for dtype in (torch.float32, torch.bfloat16):
        # Naive exponentials of these logits overflow or vanish; exact losses range from 0 to 2e4. One fp32 step at 1e4
        # is 1e-3, to which both the log-normalizer and the score are rounded before their subtraction
        extreme = 1e4 * draw(1, SEQ, BATCH, 16).sign()
        extreme[0], extreme[1] = -1e4, 1e4  # in these rows all logits are equal, so the loss is log(11)
        yield f"1e4 in {dtype}", extreme.to(dtype), 11, (1e-6, 2e-3), (2**-8, 2e-3)
    for where, value in (
        ((..., 7), float("-inf")),  # an impossible token: the loss is infinite where this token is the label
        ((3, 1, 0), float("nan")),  # only this position's loss is NaN, whichever rank holds the logit
        ((3, 1, 130), float("nan")),
        ((3, 1, 299), float("inf")),
        ((2, 0), float("-inf")),
    ):
        logits = clean.clone()
        logits[where] = value
        yield f"{value} at {where}", logits, REAL, near, None
    clean[..., REAL:] = torch.tensor([float("nan"), float("inf"), 1e30, float("-inf")]).repeat(21)
    yield "garbage in the padding", clean, REAL, near, near


def compare_special_logits() -> None:
    for (row, full, vocab_size, near, near_grads), chunk_bytes in itertools.product(special_logits(), CHUNKS):
        labels, leaf, tp = labels_of(vocab_size), full.double().requires_grad_(), tp_axis()
        expected = F.cross_entropy(leaf[..., :vocab_size].transpose(1, 2), labels, reduction="none")
        expected.backward(draw(9, *labels.shape))
        assert expected.isfinite().all() == (near_grads is not None)
        losses, grad = from_logits(full, labels, vocab_size, chunk_bytes)
        assert_near(row, losses.double(), expected.detach(), rtol=near[0], atol=near[1], equal_nan=True)
        if near_grads is not None:
            assert_near(row, grad.double(), part(leaf.grad, -1, tp), rtol=near_grads[0], atol=near_grads[1])
            assert not grad[..., part(torch.arange(full.shape[-1]) >= vocab_size, 0, tp)].any(), row


@pytest.mark.parametrize("size", [1, 2, slow(4)])
def test_rounded_extreme_or_non_finite_logits_affect_only_their_tokens(size):
    ranks(size).run(compare_special_logits)


def check_labels_outside() -> None:
    full = draw(1, SEQ, BATCH, 16, dtype=torch.float32)
    for label in (-1, -100, 11, 15, 16, 1000):
        labels = labels_of(11).clone()
        labels[4, 2] = label
        losses, grad = from_logits(full, labels, 11, WHOLE)
        assert losses[4, 2].isnan(), label
        assert grad[4, 2].isnan().any(), label
        assert int(losses.isfinite().sum()) == TOKENS - 1


def test_label_outside_the_vocabulary_gives_nan_loss_and_gradient():
    """Check that a label outside of the vocabulary makes the loss and the gradient NaN.

    Otherwise a wrong tokenizer or wrong data could pass unnoticed.
    """
    ranks(2).run(check_labels_outside)


def test_input_gradient_is_summed_over_chunks_in_fp32():
    """Sum the input gradient over 64 chunks: the label's chunk adds 16, and each chunk adds 1/64.

    A sum in bf16 would stay at 16, because 1/64 is less than half of a bf16 step at 16.
    """
    x, weight = torch.zeros(1, 1, 4, dtype=torch.bfloat16).requires_grad_(), torch.ones(8192, 4, dtype=torch.bfloat16)
    weight[-1] = -16.0
    labels = torch.tensor([[8191]])
    losses, _ = linear_cross_entropy(x, weight, labels, tp=MeshAxis("tp"), vocab_size=8192, chunk_bytes=256)
    losses.sum().backward()
    assert weight.grad is None  # the weight does not require a gradient
    assert x.grad.tolist() == [[[17.0] * 4]]


def test_second_backward_gives_the_same_gradients():
    """Run the backward twice, and compare the gradients.

    The first backward overwrites the stored logits with gradients, so the second one must compute the logits again.
    """
    x, weight = draw(1, 5, 2, 3).requires_grad_(), draw(2, 8, 3).requires_grad_()
    labels = torch.zeros(5, 2, dtype=torch.int64)
    losses, _ = linear_cross_entropy(x, weight, labels, tp=MeshAxis("tp"), vocab_size=7)
    first, second = (torch.autograd.grad(losses.sum(), (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


Products = list[tuple[int, int, int]]


def traced(num_tokens: int, channels: int, vocab_size: int, rows: int, **changes: Any) -> tuple[Products, Any, Any]:
    """Trace a forward and backward of linear_cross_entropy in bf16 on the meta device.

    Args:
        num_tokens: number of tokens.
        channels: size of each token's input vector.
        vocab_size: number of tokens in the vocabulary.
        rows: rows of the output layer, including padding.
        changes: further arguments of linear_cross_entropy.

    Returns:
        ((m, n, k) of each matrix product, segment of the forward, segment of the backward). The segments are
        `TraceRecorder`'s, with `peak` and `kept` bytes.
    """
    x, weight = (
        torch.empty(size, channels, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for size in (num_tokens, rows)
    )
    labels = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    with TraceRecorder() as recorder:
        losses, _ = linear_cross_entropy(x, weight, labels, tp=MeshAxis("tp"), vocab_size=vocab_size, **changes)
        loss = losses.sum()
        recorder.enter((BACKWARD, 0))
        loss.backward()
        recorder.enter((BACKWARD, -1))
    done = [operation for part in recorder.segments.values() for operation in part.operations]
    products = [(one.m, one.n, one.k) for one in done if one.kind == "matrix"]
    return products, recorder.segments[FORWARD, 0], recorder.segments[BACKWARD, 0]


def test_unchunked_loss_needs_three_products_and_memory_for_16_bit_logits():
    """Check matrix products and peak memory if all logits fit into one chunk: the logits are in memory once, in bf16.

    The peak of the backward includes the weight gradient of the padded vocabulary, which the test subtracts.
    """
    for num_tokens, channels, vocab_size, rows in (
        (16384, 768, 50257, 50304),  # the shape of configs/gpt_125m.args
        (8192, 4096, 128256, 128256),
        (8192, 1024, 151665, 151936),
    ):
        products, forward, backward = traced(num_tokens, channels, vocab_size, rows)
        aligned, logits = -(-vocab_size // 128) * 128, 2 * num_tokens * rows
        assert sum(m * n * k for m, n, k in products) == 3 * num_tokens * channels * aligned, vocab_size
        assert logits < forward.peak < 1.2 * logits, vocab_size
        assert logits < forward.kept + backward.peak - 2 * rows * channels < 1.2 * logits, vocab_size


@pytest.mark.slow
def test_chunks_end_at_multiples_of_128_columns():
    """Check the widths of chunks, the number of multiplications and the peak memory if logits are chunked.

    One chunk of logits is in memory at a time, and the backward recomputes all chunks but the last one.
    """
    for num_tokens in (66, 96):
        products, forward, _ = traced(num_tokens, 64, 50257, 50304, chunk_bytes=1 << 21)
        widths = [n for m, n, k in products if k == 64]
        assert len(widths) > 4
        assert not any(width % 128 for width in widths)
        assert sum(m * n * k for m, n, k in products) == num_tokens * 64 * (4 * 50304 - widths[len(widths) // 2])
        assert forward.peak < 1.2 * (1 << 21)
