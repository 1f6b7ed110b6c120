"""The output layer's product and the cross entropy in one, over a vocabulary split over the tensor-parallel axis.

Logits are the largest tensor of a step: for 8192 tokens and a vocabulary of 128 thousand, 2.1 GB in 16 bits and 4.2 GB
in fp32. They are never gathered over tp, never kept in fp32, and never whole where they are large: their columns are
worked through in chunks, and backward multiplies each chunk again, from one number per token that forward keeps. Chunks
are cut from the vocabulary and not from the tokens, so that each row of the weight's gradient is one product.

    a chunk                    logits [N, C] = x w^T      normalizer [N] = logsumexp of the logits
    chunks and ranks together  normalizer [N] = logsumexp of theirs
    loss                       normalizer - score of the label

N tokens, V columns of the padded vocabulary, C of a chunk, H channels, T ranks of tp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megazpp.parallel.axis import MeshAxis

CHUNK_BYTES = 1 << 29  # of a chunk's logits in fp32; at its fullest, backward holds about three times as much


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    tp: MeshAxis,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    fuse: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Negative log-likelihood of each label where the logits are x weight^T / temperature.

    Logits that fit in one chunk are kept for backward as the product gives them; larger ones are multiplied again.
    Collectives on tp: forward one max and one sum all-reduce of one to three numbers per token; backward none, and the
    gradient of `x` is this rank's part of a sum over tp.

    Args:
        x: [..., H], the same on all ranks of tp.
        weight: [V/T, H] in the dtype of x; the rows of tp rank t are tokens t * V/T and on.
        labels: [...] int64. One outside [0, vocab_size) has a loss and gradients of NaN.
        tp: the axis the vocabulary is split over.
        vocab_size: tokens that exist; rows beyond are padding, which is not used and whose gradient is zero.
        temperature: what logits are divided by, in fp32.
        with_entropy: also give the entropy of each distribution, in nats and without a gradient.
        fuse: compile what is done with a chunk's logits, into one kernel each way.
        chunk_bytes: the most that a chunk's logits may take in fp32.
    Returns:
        Losses and entropy, [...] fp32 each; entropy is None unless asked for.
    """
    settings = _Settings(tp, vocab_size, temperature, with_entropy, fuse, chunk_bytes)
    return _apply(x.flatten(0, -2), weight, labels, settings)


class _Settings(NamedTuple):
    tp: MeshAxis
    vocab_size: int
    temperature: float
    with_entropy: bool
    fuse: bool
    chunk_bytes: int

    def chunks(self, rows: int, num_tokens: int) -> list[slice]:
        """What of this rank's `rows` is no padding, in chunks of about the same size."""
        real = min(max(self.vocab_size - self.tp.rank * rows, 0), rows)
        count = max(-(-4 * num_tokens * real // self.chunk_bytes), 1)
        width = max(-(-real // count), 1)
        return [slice(first, min(first + width, real)) for first in range(0, real, width)]


@torch.compiler.disable
def _apply(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _LinearCrossEntropy.apply(*args)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, settings: _Settings
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, labels = labels.shape, labels.flatten()
        tp, first = settings.tp, settings.tp.rank * weight.shape[0]
        chunks = settings.chunks(weight.shape[0], x.shape[0])
        nothing = torch.full(labels.shape, float("-inf"), dtype=torch.float32, device=x.device)
        normalizers, score, entropies = [nothing], torch.zeros_like(nothing), [torch.zeros_like(nothing)]
        distribution, logits = _compiled(_distribution) if settings.fuse else _distribution, None
        for rows in chunks:
            logits = F.linear(x, weight[rows])
            column = labels - (first + rows.start)
            parts = distribution(logits, column, settings.temperature, settings.with_entropy)
            normalizers.append(parts.normalizer)
            score += parts.score
            if parts.entropy is not None:
                entropies.append(parts.entropy)
        parts_of = torch.stack(normalizers)
        top = tp.max_(parts_of.amax(dim=0))
        shares = (parts_of - top).exp()
        sums = [shares.sum(dim=0), score]
        if settings.with_entropy:  # H = log Z + sum of P (H - log Z) over the parts
            below = torch.stack(entropies) - (parts_of - top)
            sums.append(torch.where(shares > 0.0, shares * below, 0.0).sum(dim=0))
        total, score, *weighted = tp.all_reduce_(torch.stack(sums))
        outside = (labels < 0) | (
            labels >= settings.vocab_size
        )  # no rank has such a label, so none would contradict it
        normalizer = (top + total.log()).masked_fill_(outside, float("nan"))
        ctx.save_for_backward(x, weight, labels, normalizer, logits if len(chunks) == 1 else None)
        ctx.settings, ctx.chunks = settings, chunks
        entropy = None
        if weighted:
            entropy = total.log().view(shape) + (weighted[0] / total).view(shape)
            ctx.mark_non_differentiable(entropy)
        return normalizer.view(shape) - score.view(shape), entropy  # no views: FSDP2 hooks what its modules return

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, labels, normalizer, kept = ctx.saved_tensors
        settings: _Settings = ctx.settings
        first, several = settings.tp.rank * weight.shape[0], len(ctx.chunks) > 1
        gradient, grad_losses = _compiled(_gradient) if settings.fuse else _gradient, grads[0].flatten()
        x_grad = torch.zeros_like(x, dtype=torch.float32 if several else x.dtype) if ctx.needs_input_grad[0] else None
        weight_grad = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for rows in ctx.chunks:
            logits = F.linear(x, weight[rows]) if kept is None else kept
            grad = gradient(logits, labels - (first + rows.start), normalizer, grad_losses, settings.temperature)
            if x_grad is not None:
                x_grad += grad @ weight[rows]
            if weight_grad is not None:
                torch.mm(grad.t(), x, out=weight_grad[rows])
        if weight_grad is not None:
            weight_grad[ctx.chunks[-1].stop if ctx.chunks else 0 :] = 0.0
        return None if x_grad is None else x_grad.to(x.dtype), weight_grad, None, None


class _Distribution(NamedTuple):
    """What a chunk's logits say of each token, [N] fp32 each; the score is 0 where the label is not among them."""

    normalizer: torch.Tensor
    score: torch.Tensor
    entropy: torch.Tensor | None


def _distribution(logits: torch.Tensor, column: torch.Tensor, temperature: float, with_entropy: bool) -> _Distribution:
    """Of logits [N, C] and the columns [N] of the labels, of which those outside [0, C) are elsewhere."""
    scores = _scores(logits, temperature)
    normalizer = scores.logsumexp(dim=-1)
    mine = (column >= 0) & (column < logits.shape[-1])
    place = column.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    score = scores.gather(-1, place).squeeze(-1).masked_fill(~mine, 0.0)
    if not with_entropy:
        return _Distribution(normalizer, score, None)
    below = scores - normalizer.unsqueeze(-1)
    shares = below.exp()
    return _Distribution(normalizer, score, -torch.where(shares > 0.0, shares * below, 0.0).sum(dim=-1))


def _gradient(
    logits: torch.Tensor, column: torch.Tensor, normalizer: torch.Tensor, grad: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Of the losses, whose gradient is [N], with respect to the product: [N, C] in the dtype of the logits."""
    mine = (column >= 0) & (column < logits.shape[-1])
    place = column.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    share = (_scores(logits, temperature) - normalizer.unsqueeze(-1)).exp_()
    share.scatter_add_(-1, place, -mine.to(share.dtype).unsqueeze(-1))
    return share.mul_((grad / temperature).unsqueeze(-1)).to(logits.dtype)


def _scores(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
