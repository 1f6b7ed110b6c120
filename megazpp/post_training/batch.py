"""Micro-batches of post-training: pairs of answers, and sampled completions.

Supervised training uses pretraining's `MicroBatch`. All batches begin with the fields of a `MicroBatch`, so the model
is called with each of them in the same way. Position t of a row refers to the label at t. `loss_mask[:, t]` is 1 where
`labels[:, t]` is a token of the answer, and a log-probability at t is the one of that label. A value at t estimates
the reward that follows the tokens up to and including `tokens[:, t]`.

Rows of datasets, and of the completions of one generation, have --max-length tokens. `shortened` cuts each micro-batch
to its longest answer.

Legend: B pairs or completions of a micro-batch, S tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megazpp.data.loader import Batch, mapped
from megazpp.inference.generate import Drawn
from megazpp.parallel.dims import ParallelDims


class PairBatch(NamedTuple):
    """Micro-batch of B pairs of answers: rows 0 to B - 1 have the preferred answers, rows B to 2B - 1 the rejected.

    Attributes:
        tokens: [2B, S] int64 tokens of prompt and answer, which are the inputs of the model.
        labels: [2B, S] int64 token that follows each input token.
        loss_mask: [2B, S] fp32, 1 where the label is a token of the answer.
        position_ids: [2B, S] int64 position of each token in its row.
        document_starts: None, because a row has only one document, followed by padding.
        ref_logps: [2B] fp32 sums of the reference model's log-probabilities over each answer; None without a reference
            model, or if the objective computes these sums itself.
        margins: [B] fp32 numbers by which the scores of preferred answers should be higher, for the objective reward;
            None for 0.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    margins: torch.Tensor | None = None


class RolloutBatch(NamedTuple):
    """Sampled completions of the policy: a micro-batch on a device, or all of a data rank's completions on the CPU.

    Attributes:
        tokens: [B, S] int64 prompt, completion and padding, which are the inputs of the model.
        labels: [B, S] int64 token that follows each input token.
        loss_mask: [B, S] fp32, 1 where the label is a token of the completion that is trained on.
        position_ids: [B, S] int64 position of each token in its row.
        document_starts: None, because a row has only one document, followed by padding.
        advantages: fp32 advantages, [B] for completions (GRPO, RLOO) or [B, S] for tokens (PPO); None before the
            rewards are known.
        old_logps: [B, S] fp32 log-probabilities of the labels before the first update with these completions; None if
            the policy has not changed since sampling, so that its own detached log-probabilities are used.
        ref_logps: [B, S] fp32 log-probabilities of the labels under the reference model; None without a reference.
        sampling_logps: [B, S] fp32 log-probabilities at which the tokens were sampled, only for logging.
        values: [B, S] fp32 outputs of the value head before the first update with these completions (PPO).
        returns: [B, S] fp32 targets for the value head (PPO).
        value_mask: [B, S] fp32, 1 where the value head is trained (PPO, see `losses.value_mask`).
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampling_logps: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    value_mask: torch.Tensor | None = None

    def part(self, first: int, last: int) -> RolloutBatch:
        """Return a batch of only the completions in rows `first` to `last` - 1."""
        return mapped(self, lambda t: t[first:last])


def make_rollout_batch(tokens: torch.Tensor, mask: torch.Tensor, **known: torch.Tensor) -> RolloutBatch:
    """Make a batch of completions from rows of tokens: split them into inputs and labels, and add positions.

    Args:
        tokens: [B, S + 1] int64 prompt, completion and padding.
        mask: [B, S] fp32, 1 where the label is trained on; index t belongs to the token at t + 1.
        **known: values of further fields of `RolloutBatch`, such as `advantages`.
    """
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    return RolloutBatch(tokens[:, :-1], tokens[:, 1:], mask, positions, **known)


def lay_out_rollouts(prompts: Sequence[Sequence[int]], drawn: Drawn, *, max_length: int, pad: int) -> RolloutBatch:
    """Make a batch of prompts and their sampled completions, with one row per prompt.

    Args:
        prompts: token ids of each prompt.
        drawn: one completion for each prompt, with the log-probabilities at which its tokens were sampled.
        max_length: S, the number of inputs in each row of the batch.
        pad: token id that fills the rows after the completions.
    """
    tokens = torch.full((len(prompts), max_length + 1), pad)
    mask, logps = (torch.zeros(len(prompts), max_length) for _ in range(2))
    for row, (prompt, length) in enumerate(zip(prompts, drawn.lengths.tolist(), strict=True)):
        start = len(prompt)
        tokens[row, :start] = torch.tensor(prompt)
        tokens[row, start : start + length] = drawn.tokens[row, :length]
        mask[row, start - 1 : start - 1 + length] = 1.0
        logps[row, start - 1 : start - 1 + length] = drawn.logps[row, :length]
    return make_rollout_batch(tokens, mask, sampling_logps=logps)


def shortened(batch: Batch, multiple: int) -> Batch:
    """Cut the padding from a batch: cut its [B, S] tensors after the last position that any row needs.

    A row needs the positions of its loss, and one more for a reward model's score or PPO's last value. The results do
    not change, because attention is causal.

    Args:
        batch: batch to cut.
        multiple: divisor of the new row length S, see `row_multiple`; S never grows.
    """
    mask: torch.Tensor = batch.loss_mask  # type: ignore[attr-defined]
    counts = mask.any(dim=0).nonzero()
    # The last label at index t is input t + 1. Keep this input, because its output is a reward model's score or PPO's
    # last value. So the row length is t + 2.
    size = int(counts[-1]) + 2 if len(counts) else 1
    size = -(-size // multiple) * multiple
    return mapped(batch, lambda t: t[:, :size].contiguous() if t.dim() == 2 else t)


def row_multiple(device: torch.device, dims: ParallelDims) -> int:
    """Return the multiple to which the row lengths of micro-batches are rounded up, in tokens.

    The rounding keeps the number of tensor shapes on a GPU small, and gives equal chunks to the tp and cp ranks that
    split a row. Data ranks may have rows of different lengths, because none of their collectives depends on the length.
    """
    return math.lcm(64 if device.type == "cuda" else 8, dims.tp.size * dims.cp.size)
