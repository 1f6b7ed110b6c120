"""The input of one forward pass of post-training, beside pretraining's `MicroBatch`, which serves supervised training.

All batches begin with the fields of a `MicroBatch`, so that the model is called with each in the same way. Place t of a
row belongs to the label there: `loss_mask[:, t]` is 1 where `labels[:, t]` is a token of the answer, log-probabilities
at t are of that label, and a value at t is that of the tokens up to and including `tokens[:, t]`.

Rows of data sets and buffers are --max-length long; a batch is as long as what counts of its longest row (`shortened`).

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
        tokens, labels, position_ids: [2B, S] int64.
        loss_mask: [2B, S] fp32, 1 on the tokens of the answer.
        document_starts: None; a row is one document and its padding.
        ref_logps: [2B] fp32 sums of the reference's log-probabilities of each answer; None without a reference, or
            where the objective has to compute them.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PairBatch:
        """The same pairs on `device`."""
        return mapped(self, lambda t: t.to(device, non_blocking=non_blocking))


class RolloutBatch(NamedTuple):
    """Completions that the policy drew: those of a forward on a device, or a rank's part of a generation on the CPU.

    Attributes:
        tokens, labels, position_ids: [B, S] int64: prompt, completion, padding.
        loss_mask: [B, S] fp32, 1 on the tokens of the completion that are trained on.
        document_starts: None; a row is one document and its padding.
        advantages: [B] fp32 of whole completions (GRPO, RLOO) or [B, S] of their tokens (PPO); None before rewards are
            known.
        old_logps: [B, S] fp32 log-probabilities before the first update of the buffer; None: the policy is unchanged,
            and its own, detached, are taken.
        ref_logps: [B, S] fp32 of the reference model; None without one.
        sampling_logps: [B, S] fp32 as they were when the tokens were drawn; for logging.
        values, returns: [B, S] fp32 (PPO): the value head's before the first update, and what it is trained towards.
        value_mask: [B, S] fp32 (PPO): the places that have a value (`losses.value_mask`).
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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RolloutBatch:
        """The same completions on `device`."""
        return mapped(self, lambda t: t.to(device, non_blocking=non_blocking))

    def part(self, first: int, last: int) -> RolloutBatch:
        """Rows `first` to `last` - 1."""
        return mapped(self, lambda t: t[first:last])


def make_rollout_batch(tokens: torch.Tensor, mask: torch.Tensor, **known: torch.Tensor) -> RolloutBatch:
    """Rows of [B, S + 1] tokens whose labels `mask` [B, S] counts, and what is known of them by name."""
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    return RolloutBatch(tokens[:, :-1], tokens[:, 1:], mask, positions, **known)


def lay_out_rollouts(prompts: Sequence[Sequence[int]], drawn: Drawn, *, max_length: int, pad: int) -> RolloutBatch:
    """Rows of `max_length` tokens: prompt, completion, padding; with the log-probabilities at which they were drawn."""
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
    """A batch without the places of its [B, S] tensors behind which no row has a loss, a score or a value.

    Losses stay what they are: attention looks back only.

    Args:
        multiple: of which the new S is one, unless it stays (`row_multiple`).
    """
    mask: torch.Tensor = batch.loss_mask  # type: ignore[attr-defined]
    counts = mask.any(dim=0).nonzero()
    # the token of the last label is an input too: a reward model's score is there, and PPO's last value
    size = int(counts[-1]) + 2 if len(counts) else 1
    size = -(-size // multiple) * multiple
    return mapped(batch, lambda t: t[:, :size].contiguous() if t.dim() == 2 else t)


def row_multiple(device: torch.device, dims: ParallelDims) -> int:
    """The multiple that rows are rounded up to: few shapes on a GPU, and equal parts on ranks that split them.

    Ranks that split a batch (tp, cp) have the same rows; those that have others share no tensor of that length.
    """
    return math.lcm(64 if device.type == "cuda" else 8, dims.tp.size * dims.cp.size)
