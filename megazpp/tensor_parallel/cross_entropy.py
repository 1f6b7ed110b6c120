"""Cross entropy over logits whose vocabulary is split over the tensor-parallel axis; logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megazpp.parallel.axis import MeshAxis


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, tp: MeshAxis, vocab_size: int, in_fp32: bool = True
) -> torch.Tensor:
    """Negative log likelihood of each label.

    Collectives on tp: forward one max and one sum all-reduce of a number or two per token; backward none.

    Args:
        logits: [..., V/T], the columns of tp rank t are tokens t * V/T and on.
        labels: [...] int64, in [0, vocab_size). Another label is an IndexError from torch where the vocabulary is
            whole, and a loss and a gradient of NaN where it is split.
        tp: the axis the vocabulary is split over.
        vocab_size: tokens that exist; columns beyond are padding and count as minus infinity.
        in_fp32: copy the logits to fp32 first. Without it, a split vocabulary saves that copy and is as exact; a
            whole one takes torch's 16-bit kernel, whose losses are rounded to 16 bits.
    Returns:
        [...] fp32.
    """
    if tp.size == 1:
        kept = logits[..., :vocab_size]
        flat = kept.float() if in_fp32 else kept
        return (
            F.cross_entropy(flat.reshape(-1, vocab_size), labels.reshape(-1), reduction="none").float().view_as(labels)
        )
    return _split_cross_entropy(logits, labels, tp, vocab_size, in_fp32)


@torch.no_grad()
def vocab_parallel_entropy(logits: torch.Tensor, *, tp: MeshAxis, vocab_size: int) -> torch.Tensor:
    """Entropy in nats of the distribution of each token, without a gradient.

    Collectives on tp: one max and one sum all-reduce of a number or two per token.

    Args:
        logits: [..., V/T] as above.
    Returns:
        [...] fp32.
    """
    real = min(max(vocab_size - tp.rank * logits.shape[-1], 0), logits.shape[-1])
    scores = _masked(logits, real, True)
    top = tp.max_(scores.amax(dim=-1))
    below = scores - top.unsqueeze(-1)
    shares = below.exp()
    weighted = torch.where(shares > 0, shares * below, 0.0).sum(dim=-1)
    exp_sum, weighted = tp.all_reduce_(torch.stack((shares.sum(dim=-1), weighted)))
    return exp_sum.log() - weighted / exp_sum


@torch.compiler.disable
def _split_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, tp: MeshAxis, vocab_size: int, in_fp32: bool
) -> torch.Tensor:
    return _VocabParallelCrossEntropy.apply(logits, labels, tp, vocab_size, in_fp32)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Saves the logits as they came (16 bit) and one number per token, not the softmax in fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, tp: MeshAxis, vocab_size: int, in_fp32: bool
    ) -> torch.Tensor:
        columns = logits.shape[-1]
        first = tp.rank * columns
        real = min(max(vocab_size - first, 0), columns)  # the last ranks may hold padding
        scores = _masked(logits, real, in_fp32)
        top = tp.max_(scores.amax(dim=-1).float())
        exp_sum = (scores - top.unsqueeze(-1)).exp_().sum(dim=-1, dtype=torch.float32)
        column = labels - first
        mine = (column >= 0) & (column < columns)
        column = column.clamp(0, columns - 1)
        score = scores.gather(-1, column.unsqueeze(-1)).squeeze(-1).float().masked_fill(~mine, 0.0)
        exp_sum, score = tp.all_reduce_(torch.stack((exp_sum, score)))
        outside = (labels < 0) | (labels >= vocab_size)  # no rank has such a label, so none would contradict it
        log_normalizer = (top + exp_sum.log()).masked_fill_(outside, float("nan"))
        ctx.save_for_backward(logits, log_normalizer, column, mine)
        ctx.real, ctx.in_fp32 = real, in_fp32
        return log_normalizer - score

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, log_normalizer, column, mine = ctx.saved_tensors
        grad = (_masked(logits, ctx.real, ctx.in_fp32) - log_normalizer.unsqueeze(-1)).exp_()
        grad.scatter_add_(-1, column.unsqueeze(-1), -mine.to(grad.dtype).unsqueeze(-1))
        grad.mul_(grads[0].unsqueeze(-1))
        return grad.to(logits.dtype), None, None, None, None


def _masked(logits: torch.Tensor, real: int, in_fp32: bool) -> torch.Tensor:
    """A copy of the logits with the padding columns at minus infinity."""
    scores = logits.float() if in_fp32 else logits
    if real == logits.shape[-1]:
        return scores
    scores = scores.clone()
    scores[..., real:] = float("-inf")
    return scores
