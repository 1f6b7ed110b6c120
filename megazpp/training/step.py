"""The optimizer step that the training loop takes.

A step is its micro-batches forward and backward, the norm, the update or the skip. Gradients are sums: every loss is
divided once by what the whole global batch has of it (objective.py), so neither the data ranks nor the micro-batches
are averaged a second time, and the result does not depend on how samples are spread over them. With fp16 the loss is
also multiplied by the loss scale and the gradients divided by it again.

By default the host waits for nothing between a backward and its update: clipping and the check for what is not finite
go to the fused optimizer as scalars on the device, which leaves the weights alone if it has to. The host reads the
numbers of a step before the update of the next one, or at once for a log line, a checkpoint, an evaluation, at the end.
What has to be decided on the host (loss spikes, verification, a dynamic loss scale, steps that are skipped and not the
end) waits for the numbers before the update, and so do other optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from megazpp.model.gpt import GPTModel
from megazpp.optim.clip import clip_divisor, count_zero_grads, global_grad_norm
from megazpp.optim.loss_scale import LossScaler
from megazpp.optim.optimizer import set_rates_, skips_on_device, update_
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE
from megazpp.tensor_parallel.parameters import existing_rows, partial_parameters, sum_partial_gradients_
from megazpp.training.anomalies import Evidence, Guard
from megazpp.training.metrics import StepRecord
from megazpp.training.objective import LanguageModelLoss, Objective
from megazpp.zero.sharding import Sharding


@dataclass
class TrainStep:
    """Runs steps on a sharded model.

    Args:
        optimizer: over the model's sharded parameters.
        scaler: the loss scale, constant 1 unless fp16.
        clip_grad: largest gradient norm; 0 does not clip.
        guard: decides whether a step is taken; without it only a norm that is not finite skips one.
        count_zeros: also count zero gradients (--log-num-zeros-in-grad).
        objective: what is minimised; None: the language model's loss.
    """

    model: GPTModel
    sharding: Sharding
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    dims: ParallelDims
    _: KW_ONLY
    clip_grad: float
    guard: Guard | None = None
    count_zeros: bool = False
    objective: Objective | None = None

    def __post_init__(self) -> None:
        self._objective: Objective = self.objective or LanguageModelLoss(self.dims)
        self._partial, self._rows = partial_parameters(self.model), existing_rows(self.model)
        self._before: LaunchedStep | None = None

    def __call__(self, micro_batches: Sequence[Any], **settings: Any) -> StepRecord:
        """Launch a step and wait for it."""
        return self.launch(micro_batches, **settings).wait()

    def launch(
        self, micro_batches: Sequence[Any], *, learning_rate: float, weight_decay: float, iteration: int = 0
    ) -> LaunchedStep:
        """Train on this rank's micro-batches of one global batch; the host waits for no more than it needs to know.

        Raises:
            NotFiniteError: the guard ends the job, because of this step or of the one that was launched before.
        """
        self.model.train()
        self.sharding.begin_step(iteration)
        if self.guard is not None:
            self.guard.begin_step()
        local_losses, loss = self._forward_backward(micro_batches)
        named, axes, scale = list(self.model.named_parameters()), (self.dims.tp, self.dims.shard), self.scaler.scale
        with self._span("norm"):
            sum_partial_gradients_((p for name, p in named if name in self._partial), self.dims.tp)
            norm = global_grad_norm(named, *axes, divisor=scale)
            numbers = [loss, norm.value.double()]
            if self.count_zeros:
                numbers.append(count_zero_grads(named, *axes, rows=self._rows))
            step = LaunchedStep(
                StepRecord(iteration=iteration, learning_rate=learning_rate, loss_scale=scale),
                loss,
                HostCopy(torch.stack(numbers)),
                self.guard,
                None if self.guard is None else self.guard.evidence(local_losses, norm),
                waits=self.guard is None or not self.guard.can_wait or not skips_on_device(self.optimizer),
            )
            if self._before is not None:
                self._before.check()  # the device has its numbers by now, and enough to do
            self._before = step
            found_inf = None if step.waits else (~(loss.isfinite() & norm.value.isfinite())).float()
        taken = not step.skipped
        kept: torch.Tensor | float = 0.0  # by what factor the gradients, and what rounding lost of them, count
        with self._span("optimizer"):
            if taken:
                divisor = clip_divisor(norm.value, self.clip_grad, divisor=scale)
                set_rates_(self.optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
                update_(self.optimizer, divisor, found_inf, iteration=iteration)
                kept = scale / divisor
                if found_inf is not None:
                    kept = kept.where(found_inf == 0.0, 0.0)
            self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(found_inf=step.overflow)
        self.sharding.end_step(kept * (self.scaler.scale / scale), iteration=iteration)
        step.record.metrics = {**self._objective.metrics(), **self.sharding.metrics()}
        return step

    def _forward_backward(self, micro_batches: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Accumulate gradients.

        Returns:
            [number of micro-batches] this rank's shares of the loss; the loss of the global batch, an fp64 scalar.
        """
        self._objective.begin_step(micro_batches)
        losses_of_batches = []
        for index, batch in enumerate(micro_batches):
            self.sharding.begin_micro_batch(last=index == len(micro_batches) - 1)
            with self._span("forward"):
                loss = self._objective.loss(self.model, batch)
            with self._span("backward"):
                (loss * self.scaler.scale).backward()
            losses_of_batches.append(loss.detach())
        local = torch.stack(losses_of_batches)
        return local, self.dims.sum_over_data_(local.double().sum())

    def _span(self, name: str) -> AbstractContextManager[object]:
        return self.dims.timeline.span(COMPUTE, name)


class LaunchedStep:
    """A step that the device has been told to take; its numbers are waited for when they are asked for.

    Args:
        record: what is known of it already; `wait` fills in the rest.
        loss: on the device.
        numbers: its loss, norm of the gradients and, if they are counted, zeros.
        guard: decides by them and the evidence; None: a norm that is not finite skips the step.
        waits: they have to be known before its update; otherwise the device does not update with what is not finite.
    """

    def __init__(
        self,
        record: StepRecord,
        loss: torch.Tensor,
        numbers: HostCopy,
        guard: Guard | None,
        evidence: Evidence | None,
        *,
        waits: bool,
    ) -> None:
        self.record, self.loss, self.waits = record, loss, waits
        self._numbers, self._guard, self._evidence = numbers, guard, evidence
        self._taken: bool | None = None

    def check(self) -> bool:
        """Return whether the weights are updated; waits for the numbers.

        Raises:
            NotFiniteError, CorruptWeightsError: the guard ends the job; on all ranks.
        """
        if self._taken is None:
            loss, norm, *_ = self._numbers.wait()
            if self._guard is None:
                self._taken = math.isfinite(norm)
            else:
                assert self._evidence is not None
                self._taken = self._guard.allows(self.record.iteration, loss, norm, self._evidence)
            self._evidence = None
        return self._taken

    @property
    def skipped(self) -> bool:
        """True if the weights stay as they are and training goes on; known at once."""
        return self.waits and not self.check()

    @property
    def overflow(self) -> bool:
        """True if the norm is not finite and training goes on; known at once."""
        return self.waits and not math.isfinite(self._numbers.wait()[1])

    def wait(self) -> StepRecord:
        """Return the record with what the step has come to; raises as `check` does."""
        taken, (loss, norm, *zeros) = self.check(), self._numbers.wait()
        self.record.loss, self.record.grad_norm, self.record.skipped = loss, norm, not taken
        self.record.num_zeros = int(zeros[0]) if zeros else None
        return self.record


class HostCopy:
    """Copies a few numbers to the host without waiting; on the CPU `values` itself, to which nobody may write."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[float]:
        """The values; waits for the device if it has not got there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values
