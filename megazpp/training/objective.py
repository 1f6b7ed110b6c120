"""The objective: its part of a training step, and pretraining's own.

Every loss is a sum over the whole global batch: an objective works out its denominators before the first micro-batch,
from all of them and over all data ranks, and each micro-batch gives its share. So neither the number of ranks nor the
size of micro-batches changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megazpp.data.loader import MicroBatch
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims


class Objective(Protocol):
    """The part of an objective that `TrainStep` calls; every rank calls every method."""

    def begin_step(self, batches: Sequence[Any]) -> None:
        """See this rank's micro-batches of one global batch, before the first forward."""

    def loss(self, model: GPTModel, batch: Any) -> torch.Tensor:
        """A micro-batch's share of the step's loss, a scalar; the shares of all micro-batches and data ranks add up."""

    def metrics(self) -> Mapping[str, float]:
        """The step's further numbers, the same on all ranks; may wait for the device."""


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
        mine = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
        self.tokens = self._dims.sum_over_data_(mine)
        self._per_token = (1.0 / self.tokens.clamp(min=1.0)).float()

    def loss(self, model: GPTModel, batch: MicroBatch) -> torch.Tensor:
        losses = model(
            batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
        )
        return (losses * batch.loss_mask).sum() * self._per_token

    def metrics(self) -> Mapping[str, float]:
        return {}
