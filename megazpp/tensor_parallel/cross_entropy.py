"""A GPT's output layer and its cross entropy in one operation, for a vocabulary that is split over the tp axis.

The logits are the largest tensor of a training step: 2.1 GB in 16 bits (4.2 GB in fp32) for 8192 tokens and a
vocabulary of 128 thousand. This operation reduces their memory and traffic:

- Ranks never gather the logits over tp.
- A fused kernel (`fuse`) never stores logits in fp32. Eager code stores only a block of tokens in fp32 at a time.
- Forward keeps the logits in the dtype of the matrix product. Backward overwrites them with their gradient, so that a
  step has three matrix products: for the logits, the gradient of x and the gradient of the weight.
- If the logits exceed `CHUNK_BYTES`, they are computed in chunks of vocabulary columns, with one chunk in memory at a
  time. Backward recomputes all chunks except the last. Chunks divide the vocabulary, not the tokens, so that each row
  of the weight's gradient comes from a single matrix product.

    per chunk                  logits [N, C] = x w^T, normalizer [N] = logsumexp(logits)
    over chunks and ranks      normalizer [N] = logsumexp(normalizers of all chunks)
    loss                       normalizer - logit of the label
    gradient of the logits     [N, C] = softmax, minus 1 at the label

Letters: N tokens, V columns of the padded vocabulary, C columns of a chunk, H channels, T ranks of tp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megazpp.parallel.axis import MeshAxis

# Type of a compiler such as `torch_compiled`: it takes a function of elementwise operations, and returns a version of
# this function that stores no intermediate results in memory.
Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]
CHUNK_BYTES = 1 << 32  # largest size of a chunk's logits in bytes: 16384 tokens x 128 thousand columns in 16 bits
# Eager code processes a chunk in blocks of tokens. The fp32 logits of a block have at most CHUNK_BYTES / BLOCKS bytes.
BLOCKS = 64
COLUMNS_MULTIPLE = 128  # a chunk has a multiple of this many columns, which aligns its rows for the matrix products


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
    fuse: Fuse | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the negative log-likelihood of each label under the logits x weight^T / temperature.

    The logits are computed in chunks of vocabulary columns. Backward processes the chunks in reverse order. It reuses
    the logits of the last chunk and recomputes all others.

    Collectives on tp: forward has a max all-reduce of one number per token, and a sum all-reduce of two or three
    numbers per token. Backward has none, so the gradient of `x` is partial on each rank. In `GPTModel`, the backward of
    `enter_region`, whose result is `x`, sums this gradient over tp.

    Args:
        x: [..., H] output of the last layer, the same on all ranks of tp.
        weight: [V/T, H] this rank's rows of the output layer, in the dtype of x. Row i of tp rank t belongs to token
            id t * V/T + i.
        labels: [...] int64 token ids. A label outside [0, vocab_size) gives a loss and gradients of NaN.
        tp: axis over which the vocabulary is split.
        vocab_size: number of token ids. The weight's rows for larger ids are padding: they must be finite, do not
            change the results, and get zero gradients.
        temperature: divisor of the logits, applied in fp32.
        with_entropy: True also returns the entropy of the model's distribution over the vocabulary at each token, in
            nats and without a gradient.
        fuse: function that fuses the elementwise work on a chunk's logits into one kernel for forward and one for
            backward, such as `torch_compiled`; None for eager operations on one block of tokens after another.
        chunk_bytes: largest size of a chunk's logits in bytes. A chunk always has at least 128 columns.
    Returns:
        The losses and the entropies, [...] fp32 each. The entropies are None without `with_entropy`.
    """
    settings = _Settings(tp, vocab_size, temperature, with_entropy, fuse, chunk_bytes)
    return _LinearCrossEntropy.apply(x.flatten(0, -2), weight, labels, settings)


class _Settings(NamedTuple):
    """The arguments of `linear_cross_entropy` that are not tensors."""

    tp: MeshAxis
    vocab_size: int
    temperature: float
    with_entropy: bool
    fuse: Fuse | None
    chunk_bytes: int


class _Chunk(NamedTuple):
    """A chunk of the logits: columns of consecutive token ids in this tensor-parallel rank's part of the vocabulary."""

    # The chunk's rows of this rank's weight. Their number is a multiple of COLUMNS_MULTIPLE, except in a last chunk for
    # which the weight has too few padding rows.
    rows: slice
    real: int  # number of the chunk's columns of logits that belong to token ids; padding columns follow
    first: int  # token id of the chunk's first column of logits

    def at_labels(
        self, logits: torch.Tensor, labels: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look up the logit of each token's label in this chunk.

        Args:
            logits: [N, C] logits of the chunk, for N tokens and C columns.
            labels: [N] token id of each label.
            temperature: divisor of the logits.
        Returns:
            Three tensors. The column of each label, [N, 1], arbitrary for labels outside the chunk. A mask of the
            labels inside the chunk, [N] bool. The logit in that column divided by the temperature, [N] fp32.
        """
        column = labels - self.first
        place = column.clamp(0, self.real - 1).unsqueeze(-1)
        return place, (column >= 0) & (column < self.real), _scores(logits.gather(-1, place).squeeze(-1), temperature)


def _plan_chunks(
    settings: _Settings, num_rows: int, num_tokens: int, itemsize: int
) -> tuple[list[_Chunk], list[slice]]:
    """Divide this rank's vocabulary columns into chunks of similar size, and the tokens into blocks.

    Eager code creates fp32 logits for one block of tokens at a time. A fused kernel creates no such tensors, so it
    processes all tokens as one block.

    Args:
        settings: arguments of `linear_cross_entropy`.
        num_rows: number of rows of the weight on this rank, padding included.
        num_tokens: number of tokens.
        itemsize: bytes per logit.
    Returns:
        The chunks, and the range of tokens of each block. Both are empty if all rows of this rank are padding.
    """
    first, step = settings.tp.rank * num_rows, COLUMNS_MULTIPLE
    real = min(max(settings.vocab_size - first, 0), num_rows)
    if real == 0:
        return [], []
    # `most` is the largest number of steps, of COLUMNS_MULTIPLE columns each, in a chunk. `width` is the number of
    # columns of a chunk: as few whole steps as the smallest number of chunks allows. The last chunk ends at the row
    # `end` of the weight. It includes padding rows to fill its last step, if the weight has enough of them.
    most = max(settings.chunk_bytes // (max(num_tokens, 1) * itemsize * step), 1)
    width = step * -(-real // (step * -(-real // (step * most))))
    end = min(-(-real // step) * step, num_rows)
    at_once = max(num_tokens if settings.fuse is not None else settings.chunk_bytes // (BLOCKS * 4 * width), 1)
    blocks = [slice(start, start + at_once) for start in range(0, num_tokens, at_once)]
    starts = range(0, real, width)
    return [_Chunk(slice(s, min(s + width, end)), min(width, real - s), first + s) for s in starts], blocks


class _LinearCrossEntropy(torch.autograd.Function):
    """The autograd function of `linear_cross_entropy`; backward overwrites the logits that forward has kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, settings: _Settings
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, labels, tp = labels.shape, labels.flatten(), settings.tp
        chunks, blocks = _plan_chunks(settings, weight.shape[0], len(x), x.element_size())
        logits: torch.Tensor | None = None
        score = torch.zeros(labels.shape, dtype=torch.float32, device=x.device)
        # Row i has the values of chunk i, counted from 1. Row 0 belongs to no chunk: its normalizer of -inf and its
        # entropy of 0 change no result. It gives a rank whose vocabulary rows are all padding, and which has no chunk,
        # a row to take the maximum and the sum over.
        normalizers, entropies = (score.new_full((1 + len(chunks), len(x)), value) for value in (float("-inf"), 0.0))
        distribution = _distribution if settings.fuse is None else settings.fuse(_distribution)

        # Compute the normalizer and the entropy of each token in each of this rank's chunks, and the score (logit /
        # temperature) of the token's label.
        for index, chunk in enumerate(chunks, start=1):
            logits = None  # frees the previous chunk's logits before the next chunk's are allocated
            logits = F.linear(x, weight[chunk.rows])
            _, mine, own_score = chunk.at_labels(logits, labels, settings.temperature)
            score += own_score.masked_fill(~mine, 0.0)
            for block in blocks:
                parts = distribution(logits[block, : chunk.real], settings.temperature, settings.with_entropy)
                normalizers[index, block] = parts[0]
                if parts[1] is not None:
                    entropies[index, block] = parts[1]

        # Combine chunks and ranks. `shares` is each chunk's probability mass, divided for each token by the mass of the
        # chunk with the largest normalizer, so that exp cannot overflow.
        top = tp.max_(normalizers.amax(dim=0))
        shares = (normalizers - top).exp()
        sums = [shares.sum(dim=0), score]
        if settings.with_entropy:
            # Entropy over all chunks c: H = log Z + sum_c p_c (H_c - log Z_c). Z is the sum of the exponentials of all
            # logits, Z_c the sum over chunk c, and p_c = Z_c / Z.
            sums.append(torch.where(shares > 0.0, shares * (entropies - (normalizers - top)), 0.0).sum(dim=0))
        total, score, *weighted = tp.all_reduce_(torch.stack(sums))

        # A label outside the vocabulary is in no chunk, so its score is 0. Its loss would look plausible: make it NaN.
        outside = (labels < 0) | (labels >= settings.vocab_size)
        normalizer = (top + total.log()).masked_fill_(outside, float("nan"))
        ctx.save_for_backward(x, weight, labels, normalizer)
        ctx.settings, ctx.chunks, ctx.blocks, ctx.logits = settings, chunks, blocks, logits
        entropy = None
        if weighted:
            entropy = total.log().view(shape) + (weighted[0] / total).view(shape)
            ctx.mark_non_differentiable(entropy)
        # The results are new tensors, not views, because FSDP2 registers hooks on the tensors that a module returns.
        return normalizer.view(shape) - score.view(shape), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, labels, normalizer = ctx.saved_tensors
        settings, chunks, logits = ctx.settings, ctx.chunks, ctx.logits
        # Drop the context's reference to these logits, because this backward overwrites them. So their memory is freed
        # when their chunk has been processed, and a second backward computes them again.
        ctx.logits = None
        several, temperature = len(chunks) > 1, settings.temperature
        gradient_ = _gradient_ if settings.fuse is None else settings.fuse(_gradient_)
        scale = grads[0].flatten() / temperature
        x_grad = torch.zeros_like(x, dtype=torch.float32 if several else x.dtype) if ctx.needs_input_grad[0] else None
        weight_grad = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for chunk in reversed(chunks):
            # Overwrite the chunk's logits with their gradient. `gradient_` writes the scaled softmax into all columns,
            # and `scatter_` then replaces the value in the column of each token's label.
            if logits is None:
                logits = F.linear(x, weight[chunk.rows])
            place, mine, score = chunk.at_labels(logits, labels, temperature)
            at_label = (score - normalizer).expm1_().mul_(scale).to(logits.dtype).unsqueeze(-1)
            for block in ctx.blocks:
                gradient_(logits[block, : chunk.real], normalizer[block], scale[block], temperature)
            logits.scatter_(-1, place, torch.where(mine.unsqueeze(-1), at_label, logits.gather(-1, place)))
            logits[:, chunk.real :] = 0.0

            # Compute the chunk's part of the gradient of x, and the gradient of the chunk's rows of the weight. The
            # parts of several chunks are summed in fp32.
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
    """Return the logsumexp and the entropy of softmax(logits / temperature) of each token, over the columns of a chunk.

    Args:
        logits: [n, C] logits of n tokens in one chunk of columns.
        temperature: divisor of the logits.
        with_entropy: False returns None instead of the entropies.
    Returns:
        The logsumexps of logits / temperature, and the entropies in nats, [n] fp32 each.
    """
    scores = _scores(logits, temperature)
    normalizer = scores.logsumexp(dim=-1)
    if not with_entropy:
        return normalizer, None
    below = scores - normalizer.unsqueeze(-1)
    shares = below.exp()
    return normalizer, -torch.where(shares > 0.0, shares * below, 0.0).sum(dim=-1)


def _gradient_(logits: torch.Tensor, normalizer: torch.Tensor, scale: torch.Tensor, temperature: float) -> None:
    """Overwrite logits with their gradient for the loss of `linear_cross_entropy`.

    The values in the columns of the labels are not yet the gradient: `_LinearCrossEntropy.backward` replaces them.

    Args:
        logits: [n, C] logits of n tokens in one chunk; they become scale * softmax(logits / temperature).
        normalizer: [n] logsumexp of each token's logits / temperature over the whole vocabulary.
        scale: [n] gradient of each token's loss, divided by the temperature.
        temperature: divisor of the logits.
    """
    share = (_scores(logits, temperature) - normalizer.unsqueeze(-1)).exp_()
    logits.copy_(share.mul_(scale.unsqueeze(-1)))


def _scores(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return `logits` / `temperature` in fp32. At temperature 1, fp32 logits are returned without a copy."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


@functools.cache
def torch_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors with torch.compile, once per process, and return it.

    Dim 0 of all tensor arguments is marked as dynamic, so one graph serves any number of tokens.
    """
    graph = torch.compile(function)

    def marked(*args: Any) -> Any:
        """Mark dim 0 of all tensor arguments as dynamic, so that any length uses one graph, and call the graph."""
        for tensor in filter(torch.is_tensor, args):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return graph(*args)

    return marked
