"""One optimizer step: micro-batches forward and backward, the norm, the update or the skip.

Gradients are sums: every loss is divided once by the number of tokens of the whole global batch, so neither the
data ranks nor the micro-batches are averaged a second time, and the result does not depend on how samples are
spread over them. With fp16 the loss is also multiplied by the loss scale and the gradients divided by it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from megazpp.data.batch import MicroBatch
from megazpp.model.gpt import GPTModel
from megazpp.optim.clip import clip_grads_, count_zero_grads, global_grad_norm
from megazpp.optim.loss_scale import LossScaler
from megazpp.optim.optimizer import set_rates_
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE
from megazpp.training.anomalies import Guard
from megazpp.training.metrics import StepRecord
from megazpp.zero.sharding import Sharding


class TrainStep:
    """Runs steps on a sharded model.

    Args:
        model, sharding: the model and its handle.
        optimizer: over the model's sharded parameters.
        scaler: the loss scale, constant 1 unless fp16.
        dims: for the sums over ranks.
        clip_grad: largest gradient norm; 0 does not clip.
        guard: looks at each step before its update; without it only a norm that is not finite skips one.
        count_zeros: also count zero gradients (--log-num-zeros-in-grad).
    """

    def __init__(
        self,
        model: GPTModel,
        sharding: Sharding,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        dims: ParallelDims,
        *,
        clip_grad: float,
        guard: Guard | None = None,
        count_zeros: bool = False,
    ) -> None:
        self.model, self.sharding, self.optimizer, self.scaler, self.dims = model, sharding, optimizer, scaler, dims
        self.clip_grad, self.guard, self.count_zeros = clip_grad, guard, count_zeros

    def __call__(
        self, micro_batches: Sequence[MicroBatch], *, learning_rate: float, weight_decay: float, iteration: int = 0
    ) -> StepRecord:
        """Train on this rank's micro-batches of one global batch, on the model's device.

        Raises:
            NotFiniteError: the guard ends the job.
        """
        self.model.train()
        if self.guard is not None:
            self.guard.begin_step()
        local_losses, loss, tokens = self._forward_backward(micro_batches)
        named, axes, scale = list(self.model.named_parameters()), (self.dims.tp, self.dims.shard), self.scaler.scale
        with self._span("norm"):
            norm = global_grad_norm(named, *axes, divisor=scale)
            loss_value, num_tokens, norm_value = torch.stack(
                (loss, tokens, norm.double())
            ).tolist()  # the one host sync
        zeros = int(count_zero_grads(named, *axes)) if self.count_zeros else None
        finite = math.isfinite(norm_value)
        taken = finite if self.guard is None else self.guard.allows(iteration, loss_value, norm_value, local_losses)
        kept: torch.Tensor | float = 0.0  # by what factor the gradients, and what rounding lost of them, count
        with self._span("optimizer"):
            if taken:
                kept = clip_grads_((p for _, p in named), norm, self.clip_grad, divisor=scale)
                set_rates_(self.optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(found_inf=not finite)
        self.sharding.end_step(kept * (self.scaler.scale / scale), iteration=iteration)
        return StepRecord(
            iteration=iteration,
            loss=loss_value,
            grad_norm=norm_value,
            learning_rate=learning_rate,
            loss_scale=scale,
            tokens=round(num_tokens),
            skipped=not taken,
            num_zeros=zeros,
        )

    def _forward_backward(self, micro_batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accumulate gradients.

        Returns:
            [number of micro-batches] this rank's shares of the loss; the mean loss and the token count of the global
            batch, fp64 scalars.
        """
        tokens = self.dims.sum_over_data_(
            torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in micro_batches]).sum()
        )
        per_token = (1.0 / tokens.clamp(min=1.0)).float()
        losses_of_batches = []
        for index, batch in enumerate(micro_batches):
            self.sharding.begin_micro_batch(last=index == len(micro_batches) - 1)
            with self._span("forward"):
                losses = self.model(
                    batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
                )
                loss = (losses * batch.loss_mask).sum() * per_token
            with self._span("backward"):
                (loss * self.scaler.scale).backward()
            losses_of_batches.append(loss.detach())
        local = torch.stack(losses_of_batches)
        return local, self.dims.sum_over_data_(local.double().sum()), tokens

    def _span(self, name: str) -> AbstractContextManager[object]:
        return self.dims.timeline.span(COMPUTE, name)
