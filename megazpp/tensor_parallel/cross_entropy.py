"""The output layer's product and the cross entropy in one, over a vocabulary split over the tensor-parallel axis.

Logits are the largest tensor of a step: for 8192 tokens and a vocabulary of 128 thousand, 2.1 GB in 16 bits and 4.2 GB
in fp32. They are never gathered over tp. A fused kernel (`fuse`) never stores them in fp32; eager code does so for a
block of tokens at a time. Forward keeps them as the product gives them, and backward turns them into their own gradient
in place, so a step has three products. Where they are larger than `CHUNK_BYTES`, their columns are worked through in
chunks, of which one is in memory, and backward multiplies all but the last again. Chunks are cut from the vocabulary
and not from the tokens, so that each row of the weight's gradient is one product.

    a chunk                    logits [N, C] = x w^T      normalizer [N] = logsumexp of the logits
    chunks and ranks together  normalizer [N] = logsumexp of theirs
    loss                       normalizer - score of the label
    its gradient               [N, C] = softmax - 1 at the label, in the place of the logits

N tokens, V columns of the padded vocabulary, C of a chunk, H channels, T ranks of tp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megazpp.parallel.axis import MeshAxis

CHUNK_BYTES = 1 << 32  # of a chunk's logits in their own format: in 16 bits, 16384 tokens of 128 thousand
BLOCKS = 64  # eager: the part of a chunk that is in fp32 at a time, in up to five tensors
COLUMNS_MULTIPLE = 128  # of a chunk, as of the padded vocabulary: rows are aligned for the products


@torch.compiler.disable
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

    The last chunk's logits are kept for backward, the first one that runs; all others are multiplied again.
    Collectives on tp: forward one max and one sum all-reduce of one to three numbers per token; backward none, and the
    gradient of `x` is this rank's part of a sum over tp.

    Args:
        x: [..., H], the same on all ranks of tp.
        weight: [V/T, H] in the dtype of x; the rows of tp rank t are tokens t * V/T and on.
        labels: [...] int64. One outside [0, vocab_size) has a loss and gradients of NaN.
        tp: the axis the vocabulary is split over.
        vocab_size: tokens that exist; rows beyond are padding, finite, which does not count and whose gradient is zero.
        temperature: what logits are divided by, in fp32.
        with_entropy: also give the entropy of each distribution, in nats and without a gradient.
        fuse: compile what is done with a chunk's logits, into one kernel each way.
        chunk_bytes: the most that a chunk's logits may take, unless that is less than 128 columns of them.
    Returns:
        Losses and entropy, [...] fp32 each; entropy is None unless asked for.
    """
    settings = _Settings(tp, vocab_size, temperature, with_entropy, fuse, chunk_bytes)
    return _LinearCrossEntropy.apply(x.flatten(0, -2), weight, labels, settings)


class _Settings(NamedTuple):
    tp: MeshAxis
    vocab_size: int
    temperature: float
    with_entropy: bool
    fuse: bool
    chunk_bytes: int


class _Chunk(NamedTuple):
    """A part of this rank's columns."""

    rows: slice  # of the weight; they end at a multiple of `COLUMNS_MULTIPLE` where the weight does
    real: int  # columns that are no padding, the first
    first: int  # the token of the first column

    def at_labels(
        self, logits: torch.Tensor, labels: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns of the labels, [N, 1], anywhere for those of other chunks; [N] bool, those of this; [N] scores."""
        column = labels - self.first
        place = column.clamp(0, self.real - 1).unsqueeze(-1)
        return place, (column >= 0) & (column < self.real), _scores(logits.gather(-1, place).squeeze(-1), temperature)


def _plan_chunks(
    settings: _Settings, num_rows: int, num_tokens: int, itemsize: int
) -> tuple[list[_Chunk], list[slice]]:
    """Split this rank's `num_rows` of the weight into chunks of similar size, and the tokens into blocks.

    Eager code makes fp32 tensors of one block at a time. A fused kernel makes none and takes all tokens as one block.
    """
    first, step = settings.tp.rank * num_rows, COLUMNS_MULTIPLE
    real = min(max(settings.vocab_size - first, 0), num_rows)
    if real == 0:
        return [], []
    most = max(settings.chunk_bytes // (max(num_tokens, 1) * itemsize * step), 1)
    width = step * -(-real // (step * -(-real // (step * most))))
    end = min(-(-real // step) * step, num_rows)
    at_once = max(num_tokens if settings.fuse else settings.chunk_bytes // (BLOCKS * 4 * width), 1)
    blocks = [slice(start, start + at_once) for start in range(0, num_tokens, at_once)]
    starts = range(0, real, width)
    return [_Chunk(slice(s, min(s + width, end)), min(width, real - s), first + s) for s in starts], blocks


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, settings: _Settings
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, labels, tp = labels.shape, labels.flatten(), settings.tp
        chunks, blocks = _plan_chunks(settings, weight.shape[0], len(x), x.element_size())
        logits: torch.Tensor | None = None
        score = torch.zeros(labels.shape, dtype=torch.float32, device=x.device)
        normalizers, entropies = (score.new_full((1 + len(chunks), len(x)), value) for value in (float("-inf"), 0.0))
        distribution = _compiled(_distribution) if settings.fuse else _distribution
        for index, chunk in enumerate(chunks, start=1):
            logits = None  # before there are others
            logits = F.linear(x, weight[chunk.rows])
            _, mine, own_score = chunk.at_labels(logits, labels, settings.temperature)
            score += own_score.masked_fill(~mine, 0.0)
            for block in blocks:
                parts = distribution(logits[block, : chunk.real], settings.temperature, settings.with_entropy)
                normalizers[index, block] = parts[0]
                if parts[1] is not None:
                    entropies[index, block] = parts[1]
        top = tp.max_(normalizers.amax(dim=0))
        shares = (normalizers - top).exp()
        sums = [shares.sum(dim=0), score]
        if settings.with_entropy:  # H = log Z + sum of P (H - log Z) over the parts
            sums.append(torch.where(shares > 0.0, shares * (entropies - (normalizers - top)), 0.0).sum(dim=0))
        total, score, *weighted = tp.all_reduce_(torch.stack(sums))
        outside = (labels < 0) | (labels >= settings.vocab_size)  # no rank has such a label, none would contradict it
        normalizer = (top + total.log()).masked_fill_(outside, float("nan"))
        ctx.save_for_backward(x, weight, labels, normalizer)
        ctx.settings, ctx.chunks, ctx.blocks, ctx.logits = settings, chunks, blocks, logits
        entropy = None
        if weighted:
            entropy = total.log().view(shape) + (weighted[0] / total).view(shape)
            ctx.mark_non_differentiable(entropy)
        return normalizer.view(shape) - score.view(shape), entropy  # no views: FSDP2 hooks what its modules return

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, labels, normalizer = ctx.saved_tensors
        settings, chunks, logits = ctx.settings, ctx.chunks, ctx.logits
        ctx.logits = None  # they are about to change, and to go
        several, temperature = len(chunks) > 1, settings.temperature
        gradient_ = _compiled(_gradient_) if settings.fuse else _gradient_
        scale = grads[0].flatten() / temperature
        x_grad = torch.zeros_like(x, dtype=torch.float32 if several else x.dtype) if ctx.needs_input_grad[0] else None
        weight_grad = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for chunk in reversed(chunks):
            if logits is None:
                logits = F.linear(x, weight[chunk.rows])
            place, mine, score = chunk.at_labels(logits, labels, temperature)
            at_label = (score - normalizer).expm1_().mul_(scale).to(logits.dtype).unsqueeze(-1)
            for block in ctx.blocks:
                gradient_(logits[block, : chunk.real], normalizer[block], scale[block], temperature)
            logits.scatter_(-1, place, torch.where(mine.unsqueeze(-1), at_label, logits.gather(-1, place)))
            logits[:, chunk.real :] = 0.0
            if x_grad is not None and several:
                x_grad += logits @ weight[chunk.rows]
            elif x_grad is not None:
                torch.mm(logits, weight[chunk.rows], out=x_grad)
            if weight_grad is not None:
                torch.mm(logits.t(), x, out=weight_grad[chunk.rows])
            logits = None
        if weight_grad is not None:
            weight_grad[chunks[-1].rows.start + chunks[-1].real if chunks else 0 :] = 0.0
        return None if x_grad is None else x_grad.to(x.dtype), weight_grad, None, None


def _distribution(
    logits: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalizer and entropy of each row of logits [n, C]: [n] fp32 each."""
    scores = _scores(logits, temperature)
    normalizer = scores.logsumexp(dim=-1)
    if not with_entropy:
        return normalizer, None
    below = scores - normalizer.unsqueeze(-1)
    shares = below.exp()
    return normalizer, -torch.where(shares > 0.0, shares * below, 0.0).sum(dim=-1)


def _gradient_(logits: torch.Tensor, normalizer: torch.Tensor, scale: torch.Tensor, temperature: float) -> None:
    """Overwrite logits [n, C] with their gradient but at the labels: the softmax, each row times its `scale`, [n]."""
    share = (_scores(logits, temperature) - normalizer.unsqueeze(-1)).exp_()
    logits.copy_(share.mul_(scale.unsqueeze(-1)))


def _scores(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph for any number of rows."""
    graph = torch.compile(function)

    def marked(*args: Any) -> Any:
        for tensor in filter(torch.is_tensor, args):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return graph(*args)

    return marked
