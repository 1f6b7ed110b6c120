"""The loss that training minimizes and evaluation measures: the objective's part of a step, and validation.

Every loss is a sum over the whole global batch. Before the first micro-batch, an objective computes its denominators
from all micro-batches of all data ranks. Each micro-batch then contributes its share. The result therefore depends
neither on the number of ranks nor on the size of micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch

from megazpp.data.loader import BatchLoader, MicroBatch
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import WeightHandle


class Objective(Protocol):
    """The methods of an objective that `TrainStep` calls; every rank calls every method."""

    def begin_step(self, batches: Sequence[Any]) -> None:
        """Prepare a step from this rank's micro-batches of one global batch; called before the first forward."""

    def loss(self, model: GPTModel, batch: Any) -> torch.Tensor:
        """Return a micro-batch's share of the step's loss, a scalar.

        The shares of all micro-batches and data ranks add up to the loss of the global batch.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return further numbers of the step, equal on all ranks; may wait for the device."""


def counted_tokens(model: GPTModel, loss_mask: torch.Tensor) -> torch.Tensor | None:
    """Return the tokens of padded rows that routers count, [B, S] bool; None without experts, or in evaluation.

    The losses and the counted choices of routers include the tokens up to the last one of each row that the loss mask
    includes. They leave out padding after it, so that they do not depend on the length to which rows are padded.

    Args:
        model: the model.
        loss_mask: [B, S] fp32, 0 for excluded tokens.
    """
    if not model.training or model.config.num_experts is None:
        return None
    places = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    return places <= torch.where(loss_mask > 0, places, -1).amax(dim=1, keepdim=True)


def add_router_gradient(
    loss: torch.Tensor, router_loss: torch.Tensor | None, num_rows: torch.Tensor | float
) -> torch.Tensor:
    """Return the value of `loss` with the gradients of `loss` and of the losses of routers.

    Args:
        loss: share of the step's loss, a scalar.
        router_loss: [B] losses of routers that the head of a forward received.
        num_rows: rows of the global batch, over which the losses of routers are averaged.
    """
    if router_loss is None:
        return loss
    mean = router_loss.sum() / num_rows
    return loss + (mean - mean.detach())


class LanguageModelLoss:
    """Negative log-likelihood of the next token, averaged over the tokens of the global batch that count.

    A token counts unless the loss mask excludes it. With DiLoCo the mean is over the tokens of this rank's replica
    group.
    The losses of routers, each the mean over all sequences of the global batch, add to the gradients, but not to the
    value of the loss.

    Args:
        dims: parallel layout.
        pads: True if rows may end with padding, which the losses of routers leave out (`counted_tokens`).

    Attributes:
        tokens: number of tokens that count in the last step, an fp64 scalar.
    """

    def __init__(self, dims: ParallelDims, *, pads: bool = False) -> None:
        self._dims, self._pads = dims, pads
        self.tokens = torch.zeros((), dtype=torch.float64)
        self._per_token, self._sequences = torch.tensor(1.0), 1

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Count the tokens of the global batch that the loss mask includes: one all-reduce."""
        own = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
        self.tokens = self._dims.sum_over_data_(own)
        self._per_token = (1.0 / self.tokens.clamp(min=1.0)).float()
        own_sequences, dims = sum(len(batch.tokens) for batch in batches), self._dims
        self._sequences = own_sequences * dims.data_size // dims.replica_group.size

    def loss(self, model: GPTModel, batch: MicroBatch) -> torch.Tensor:
        """Return this micro-batch's share of the mean loss over the global batch."""

        def head(
            model: GPTModel, x: torch.Tensor, router_loss: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return model.token_losses(x, batch.labels)[0], router_loss

        losses, router_loss = model(
            batch.tokens,
            position_ids=batch.position_ids,
            document_starts=batch.document_starts,
            counted=counted_tokens(model, batch.loss_mask) if self._pads else None,
            head=head,
        )
        loss = (losses * batch.loss_mask).sum() * self._per_token
        return add_router_gradient(loss, router_loss, self._sequences)

    def metrics(self) -> Mapping[str, float]:
        """Return no further numbers."""
        return {}


class StopRequested(Exception):  # noqa: N818, because it is no error
    """Raised on all ranks at the same place if a stop signal gives up work that a run can do without."""


@dataclass
class Evaluator:
    """Computes the mean loss over the first batches of a dataset.

    Every call uses the same batches, so that losses are comparable.

    Args:
        model: the model, which may be in training.
        sharding: handle to the model's weights.
        loader: loader of the held-out data.
        dims: mesh axes of the job.
        iterations: number of global batches.
        batch_size: samples of a global batch.
    """

    model: GPTModel
    sharding: WeightHandle
    loader: BatchLoader
    dims: ParallelDims
    _: KW_ONLY
    iterations: int
    batch_size: int

    @torch.no_grad()
    def __call__(self, between_batches: Callable[[], None] = lambda: None) -> float:
        """Return the mean loss, equal on all ranks.

        Afterwards the model is in training mode, and its next forward gathers its weights from the shards again.

        Args:
            between_batches: function that is called before each global batch. If it raises, the evaluation is given up.
        """

        def steps() -> Iterator[Sequence[Any]]:
            for start in range(0, self.iterations * self.batch_size, self.batch_size):
                between_batches()
                yield self.loader.step(start, self.batch_size)

        self.model.eval()
        try:
            with self.dims.counter.paused():  # the log reports the traffic of training steps only
                return self.mean_loss(steps())
        finally:
            self.sharding.reshard()
            self.model.train()

    def mean_loss(self, steps: Iterable[Sequence[Any]]) -> float:
        """Return the mean loss in nats per token over all ranks; NaN if the loss masks exclude all tokens.

        Args:
            steps: this rank's micro-batches of each global batch.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.model.device)  # loss, tokens
        for batch in itertools.chain.from_iterable(steps):
            starts = {"position_ids": batch.position_ids, "document_starts": batch.document_starts}
            losses = self.model(batch.tokens, batch.labels, **starts)
            totals += torch.stack(((losses * batch.loss_mask).sum(), batch.loss_mask.sum()))
        loss, tokens = self.dims.sum_over_replica_groups_(totals).tolist()
        return loss / tokens if tokens else math.nan
