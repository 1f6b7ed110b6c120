"""The loss that training minimises and evaluation measures: an objective's part of a step, and validation.

Every loss is a sum over the whole global batch: an objective works out its denominators before the first micro-batch,
from all of them and over all data ranks, and each micro-batch gives its share. So neither the number of ranks nor the
size of micro-batches changes the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

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


class Objective(Protocol):
    """The part of an objective that `TrainStep` calls; every rank calls every method."""

    def begin_step(self, batches: Sequence[Any]) -> None:
        """See this rank's micro-batches of one global batch, before the first forward."""

    def loss(self, model: GPTModel, batch: Any) -> torch.Tensor:
        """A micro-batch's share of the step's loss, a scalar; the shares of all micro-batches and data ranks add up."""

    def metrics(self) -> Mapping[str, float]:
        """The step's further numbers, the same on all ranks; may wait for the device."""


def token_losses(model: GPTModel, batch: MicroBatch) -> torch.Tensor:
    """[micro-batch, sequence] nats of each token; 0 where it does not count."""
    losses = model(batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts)
    return losses * batch.loss_mask


class LanguageModelLoss:
    """Negative log-likelihood of the next token, the mean over all tokens of the global batch that count.

    With local steps it is the mean over those of this rank's island.

    Attributes:
        tokens: of the last step that count, a scalar.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims
        self.tokens = torch.zeros((), dtype=torch.float64)
        self._per_token = torch.tensor(1.0)

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        own = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
        self.tokens = self._dims.sum_over_data_(own)
        self._per_token = (1.0 / self.tokens.clamp(min=1.0)).float()

    def loss(self, model: GPTModel, batch: MicroBatch) -> torch.Tensor:
        return token_losses(model, batch).sum() * self._per_token

    def metrics(self) -> Mapping[str, float]:
        return {}


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
        return torch.stack((token_losses(self.model, batch).sum(), batch.loss_mask.sum()))
