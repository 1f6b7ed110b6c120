"""Validation: the mean loss over a fixed number of batches, without touching the training state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from megazpp.base.flags import check_not_negative, check_positive, flag
from megazpp.data.loader import BatchLoader, MicroBatch
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import WeightHandle


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation: how often and on how much."""

    eval_iters: int = flag(100, "global batches of one evaluation; 0 for none")
    eval_interval: int = flag(1000, "training steps between evaluations")

    def __post_init__(self) -> None:
        check_not_negative(self, "eval_iters")
        check_positive(self, "eval_interval")


@dataclass
class Evaluator:
    """Mean loss over the first batches of a dataset: the same batches at every call, so that losses compare.

    Args:
        model, sharding: the model in training and its handle.
        loader: batches of the held-out data.
        iterations, batch_size: how many global batches of how many samples.
    """

    model: GPTModel
    sharding: WeightHandle
    loader: BatchLoader
    dims: ParallelDims
    _: KW_ONLY
    iterations: int
    batch_size: int

    @torch.no_grad()
    def __call__(self) -> float:
        """The same number on all ranks.

        The model is back in training mode afterwards, and its next forward reads the shards anew.
        """
        self.model.eval()
        with self.dims.counter.paused():  # the traffic of training steps is what is reported
            starts = range(0, self.iterations * self.batch_size, self.batch_size)
            loss = self.mean_loss(self.loader.step(start, self.batch_size) for start in starts)
        self.sharding.free_gathered()
        self.model.train()
        return loss

    def mean_loss(self, steps: Iterable[Sequence[Any]]) -> float:
        """Nats per token of this rank's micro-batches of all steps, over all ranks; NaN if no token counts."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.model.embedding.word.weight.device)  # loss, tokens
        for batch in itertools.chain.from_iterable(steps):
            totals += self._loss_and_tokens(batch)
        loss, tokens = self.dims.sum_over_islands_(totals).tolist()
        return loss / tokens if tokens else math.nan

    def _loss_and_tokens(self, batch: MicroBatch) -> torch.Tensor:
        losses = self.model(
            batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
        )
        return torch.stack(((losses * batch.loss_mask).sum(), batch.loss_mask.sum()))
