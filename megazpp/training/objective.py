"""The loss that training minimizes (the objective), and its evaluation on held-out data.

Every loss is a sum over the complete global batch. Before the first micro-batch, an objective computes the loss's
denominators from all micro-batches of all data ranks. The sum of losses of a micro-batch, divided by these
denominators, is the micro-batch's contribution to the step's loss. The step's loss therefore depends neither on the
number of ranks nor on the size of micro-batches.
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
    """The loss of a run as `TrainStep` uses it. Every rank calls every method."""

    def begin_step(self, batches: Sequence[Any]) -> None:
        """Compute the numbers that the loss needs from all micro-batches of a step, for example its denominators.

        The training step calls this method before the first forward.

        `batches` are this rank's micro-batches of one global batch.
        """

    def loss(self, model: GPTModel, batch: Any) -> torch.Tensor:
        """Return a micro-batch's contribution to the step's loss, a scalar.

        The sum over all micro-batches and data ranks is the loss of the global batch.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return further numbers about the step's loss for the log, by name, equal on all ranks.

        The host may have to wait for the device.
        """


def counted_tokens(model: GPTModel, loss_mask: torch.Tensor) -> torch.Tensor | None:
    """Return the tokens for which the routers of a mixture of experts compute their losses and count their choices.

    In each sequence these are all tokens up to the last one that the loss mask includes. Padding at the end is left
    out, so that the losses of routers do not depend on the length to which sequences are padded.

    Args:
        model: the model.
        loss_mask: [B, S] fp32 for B sequences of S tokens, 0 for tokens that the loss excludes.
    Returns:
        [B, S] bool, True for tokens that count. The result is None in two cases: the model has no experts, or it is in
        evaluation mode.
    """
    if not model.training or model.config.num_experts is None:
        return None
    places = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    return places <= torch.where(loss_mask > 0, places, -1).amax(dim=1, keepdim=True)


def add_router_gradient(
    loss: torch.Tensor, router_loss: torch.Tensor | None, num_rows: torch.Tensor | float
) -> torch.Tensor:
    """Return a scalar with the value of `loss` and with the gradients of `loss` plus the mean loss of routers.

    Routers of a mixture of experts thus train with the model, but the logged loss does not include their losses.

    Args:
        loss: the micro-batch's contribution to the step's loss, a scalar.
        router_loss: [B] losses of routers, one for each of the micro-batch's B sequences, as the model's forward passes
            them to the function `head`. None if routers have no losses; the result is then `loss`.
        num_rows: number of sequences in the global batch, over which the losses of routers are averaged.
    """
    if router_loss is None:
        return loss
    mean = router_loss.sum() / num_rows
    return loss + (mean - mean.detach())


class LanguageModelLoss:
    """The negative log-likelihood of the next token: the mean over the global batch's tokens in the loss mask.

    The losses of routers, each averaged over all sequences of the global batch, add to the gradients, but not to the
    value of the loss. With DiLoCo, the global batch here means the part of it that this rank's replica group computes.

    Args:
        dims: mesh axes of the job.
        pads: True if sequences may end with padding, which the losses of routers leave out (`counted_tokens`).

    Attributes:
        tokens: number of tokens in the last step's global batch that the loss mask includes, an fp64 scalar.
    """

    def __init__(self, dims: ParallelDims, *, pads: bool = False) -> None:
        self._dims, self._pads = dims, pads
        self.tokens = torch.zeros((), dtype=torch.float64)
        self._per_token, self._sequences = torch.tensor(1.0), 1

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Count the tokens of the global batch that the loss mask includes, with one all-reduce over data ranks."""
        own = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
        self.tokens = self._dims.sum_over_data_(own)
        self._per_token = (1.0 / self.tokens.clamp(min=1.0)).float()
        own_sequences, dims = sum(len(batch.tokens) for batch in batches), self._dims
        self._sequences = own_sequences * dims.data_size // dims.replica_group.size

    def loss(self, model: GPTModel, batch: MicroBatch) -> torch.Tensor:
        """Return the micro-batch's contribution to the mean loss over the global batch, a scalar."""

        def head(
            model: GPTModel, x: torch.Tensor, router_loss: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            """Return the loss of each token, computed from the final hidden states `x`; and `router_loss` unchanged."""
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
        """Return an empty mapping, because this objective has no further numbers."""
        return {}


class StopRequested(Exception):  # noqa: N818, because it is no error
    """An exception that all ranks raise together if a stop signal arrives during work that the run can do without.

    Such work is an evaluation, the generation of samples, or a wait for samples. A wait for samples raises this
    exception also if the run ends. The exception's text is the reason for the log, for example the name of the signal.
    """


@dataclass
class Evaluator:
    """An evaluation. A call of this object returns the mean loss over the first batches of a held-out dataset.

    Every call uses the same batches, so that the losses at different steps are comparable.

    Args:
        model: model in training.
        sharding: handle of the model's weights.
        loader: loader of the held-out data.
        dims: mesh axes of the job.
        iterations: number of global batches in an evaluation.
        batch_size: number of samples in a global batch.
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
        """Evaluate the model, and return the mean loss in nats per token, equal on all ranks.

        Afterwards the model is in training mode, and its next forward gathers its weights from the shards again.

        Args:
            between_batches: function that is called before each global batch. To end the evaluation early, it raises an
                exception such as StopRequested, which this method does not catch.
        """

        def steps() -> Iterator[Sequence[Any]]:
            """Yield this rank's micro-batches of each global batch, after a call of `between_batches`."""
            for start in range(0, self.iterations * self.batch_size, self.batch_size):
                between_batches()
                yield self.loader.step(start, self.batch_size)

        self.model.eval()
        try:
            with self.dims.counter.paused():  # the log reports only the traffic of training steps
                return self.mean_loss(steps())
        finally:
            self.sharding.reshard()
            self.model.train()

    def mean_loss(self, steps: Iterable[Sequence[Any]]) -> float:
        """Return the mean loss in nats per token over the micro-batches of all ranks.

        Only tokens that the loss masks include count. If there are none, the result is NaN.

        Args:
            steps: this rank's micro-batches, one sequence of micro-batches per global batch.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.model.device)  # sum of losses, number of tokens
        for batch in itertools.chain.from_iterable(steps):
            starts = {"position_ids": batch.position_ids, "document_starts": batch.document_starts}
            losses = self.model(batch.tokens, batch.labels, **starts)
            totals += torch.stack(((losses * batch.loss_mask).sum(), batch.loss_mask.sum()))
        loss, tokens = self.dims.sum_over_replica_groups_(totals).tolist()
        return loss / tokens if tokens else math.nan
