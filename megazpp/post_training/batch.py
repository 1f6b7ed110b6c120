"""Inputs of one forward pass for pairs and for completions. Supervised training uses pretraining's `MicroBatch`.

All batches begin with the fields of a `MicroBatch`, so the model is called with each in the same way. Index t of a row
refers to its label. `loss_mask[:, t]` is 1 where `labels[:, t]` is a token of the answer, and a log-probability at t
belongs to that label. A value at t is the value of the tokens up to and including `tokens[:, t]`.

Rows of datasets and buffers have --max-length tokens. A batch is cut to its longest answer (`shortened`).

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
    """Pairs of a preferred and a rejected answer: rows 0 to B - 1 are preferred, rows B to 2B - 1 rejected.

    Attributes:
        tokens: [2B, S] int64 inputs.
        labels: [2B, S] int64 next tokens.
        loss_mask: [2B, S] fp32, 1 on the tokens of the answer.
        position_ids: [2B, S] int64 positions.
        document_starts: None, because a row is one document and padding.
        ref_logps: [2B] fp32 sums of the reference model's log-probabilities over each answer; None without a reference
            model, or if the objective computes them.
        margins: [B] fp32 numbers by which preferred scores have to be higher (reward); None for 0.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    margins: torch.Tensor | None = None


class RolloutBatch(NamedTuple):
    """Sampled completions: a micro-batch on a device, or a rank's part of a generation on the CPU.

    Attributes:
        tokens: [B, S] int64 inputs: prompt, completion, padding.
        labels: [B, S] int64 next tokens.
        loss_mask: [B, S] fp32, 1 on the tokens of the completion that are trained on.
        position_ids: [B, S] int64 positions.
        document_starts: None, because a row is one document and padding.
        advantages: [B] fp32 for each completion (GRPO, RLOO) or [B, S] for each token (PPO); None before the rewards
            are known.
        old_logps: [B, S] fp32 log-probabilities before the first update with this buffer; None if the policy has not
            changed since, so that its own detached log-probabilities are used.
        ref_logps: [B, S] fp32 log-probabilities of the reference model, or None.
        sampling_logps: [B, S] fp32 log-probabilities at which the tokens were sampled, for logging.
        values: [B, S] fp32 values before the first update (PPO).
        returns: [B, S] fp32 targets of the values (PPO).
        value_mask: [B, S] fp32, 1 where there is a value (PPO, `losses.value_mask`).
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
        """Return rows `first` to `last` - 1."""
        return mapped(self, lambda t: t[first:last])


def make_rollout_batch(tokens: torch.Tensor, mask: torch.Tensor, **known: torch.Tensor) -> RolloutBatch:
    """Make a batch of rows of tokens.

    Args:
        tokens: [B, S + 1] int64 tokens.
        mask: [B, S] fp32, 1 where the label is trained on.
        **known: further fields of the batch.
    """
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    return RolloutBatch(tokens[:, :-1], tokens[:, 1:], mask, positions, **known)


def lay_out_rollouts(prompts: Sequence[Sequence[int]], drawn: Drawn, *, max_length: int, pad: int) -> RolloutBatch:
    """Make a batch of prompts and their sampled completions.

    Args:
        prompts: tokens of each prompt.
        drawn: completions with their log-probabilities.
        max_length: S, the length of all rows.
        pad: token that fills the rows.
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
    """Cut the [B, S] tensors of a batch after the last place that any row needs for a loss, a score or a value.

    Losses do not change, because attention is causal.

    Args:
        batch: batch to cut.
        multiple: divisor of the new S (`row_multiple`); S never grows.
    """
    mask: torch.Tensor = batch.loss_mask  # type: ignore[attr-defined]
    counts = mask.any(dim=0).nonzero()
    # The token of the last label is an input, too: it has a reward model's score and PPO's last value.
    size = int(counts[-1]) + 2 if len(counts) else 1
    size = -(-size // multiple) * multiple
    return mapped(batch, lambda t: t[:, :size].contiguous() if t.dim() == 2 else t)


def row_multiple(device: torch.device, dims: ParallelDims) -> int:
    """Return the multiple to which row lengths are rounded up.

    It keeps the number of shapes on a GPU small, and gives equal parts to the tp and cp ranks that split a row. Data
    ranks may have rows of different lengths, because no collective of theirs depends on the length.
    """
    return math.lcm(64 if device.type == "cuda" else 8, dims.tp.size * dims.cp.size)
