"""Validation: the mean loss over a fixed number of batches, without touching the training state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megazpp.data.batch import MicroBatch
from megazpp.flags import flag
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation: how often and on how much."""

    eval_iters: int = flag(100, "global batches of one evaluation; 0 for none")
    eval_interval: int = flag(1000, "training steps between evaluations")

    def __post_init__(self) -> None:
        if self.eval_iters < 0:
            raise ValueError(f"--eval-iters {self.eval_iters} is negative")
        if self.eval_interval < 1:
            raise ValueError(f"--eval-interval {self.eval_interval} is not positive")


@torch.no_grad()
def evaluate(model: GPTModel, sharding: Sharding, batches: Iterable[Sequence[MicroBatch]], dims: ParallelDims) -> float:
    """Mean loss in nats per token over `batches`, each this rank's micro-batches of a global batch.

    The same number on all ranks. The model is back in training mode afterwards, and the next training step reads
    its weights anew.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # loss, tokens
    for micro_batches in batches:
        for batch in micro_batches:
            losses = model(
                batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
            )
            totals[0] += (losses * batch.loss_mask).sum()
            totals[1] += batch.loss_mask.sum()
    sharding.free_gathered()
    model.train()
    loss, tokens = dims.sum_over_data_(totals).tolist()
    return loss / tokens if tokens else math.nan
