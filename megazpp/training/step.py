"""The training step: forward and backward of all micro-batches of a global batch, and the optimizer's update.

Each step also computes the gradient norm, by which it decides to update or to skip. Gradients are sums: each loss is
divided once by a denominator of the complete global batch (objective.py). Nothing is averaged over data ranks or
micro-batches, so the result does not depend on how samples are spread over ranks and micro-batches. With fp16, the loss
is multiplied by the loss scale, and the gradients are divided by the loss scale.

By default the host does not wait between the backward and the update. The fused optimizer receives two scalars on the
device: the divisor of the gradients, and a flag that is 1 if the loss or the norm is not finite. If the flag is 1, the
update changes nothing. The host reads the loss and the norm of a step before the update of the next step. If the step
is the last one, or if a log line, a checkpoint or an evaluation follows it, the host reads them at the end of the step.

Some decisions must be made on the host: loss spikes, verification of weights, a dynamic loss scale, and skipping steps
instead of ending the job. In these cases, and for optimizers other than AdamW and Muon, the host waits before the
update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from megazpp.model.gpt import GPTModel
from megazpp.model.router import biased_routers, update_expert_bias_
from megazpp.optim.clip import clip_divisor, count_zero_grads, global_grad_norm
from megazpp.optim.optimizer import LossScaler, set_rates_, skips_on_device, update_
from megazpp.parallel.comm_queue import HostCopy
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE
from megazpp.tensor_parallel.parameters import existing_rows, partial_parameters, sum_partial_gradients_
from megazpp.training.anomalies import Evidence, Guard
from megazpp.training.metrics import StepRecord
from megazpp.training.objective import LanguageModelLoss, Objective
from megazpp.zero.sharding import Sharding


@dataclass
class TrainStep:
    """The training step of a sharded model. Each call trains on one global batch.

    Args:
        model: the sharded model.
        sharding: handle of the model's shards.
        optimizer: optimizer of the model's sharded parameters.
        scaler: loss scale; constant 1 unless fp16.
        dims: mesh axes of the job.
        clip_grad: gradient norm to which larger norms are clipped; 0 disables clipping.
        guard: check that decides whether a step updates the weights. None: only a gradient norm that is not finite
            skips the update.
        count_zeros: True counts the gradient elements that are zero (--log-num-zeros-in-grad).
        objective: the loss to minimize; None for the language model's loss.
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
        self._routers = biased_routers(self.model)
        if self.dims.tp.size > 1:
            self.sharding.states.partial = self._partial
        self._before: LaunchedStep | None = None

    def __call__(self, micro_batches: Sequence[Any], **settings: Any) -> StepRecord:
        """Run a training step with the arguments of `launch`, wait for its results, and return the step's record."""
        return self.launch(micro_batches, **settings).wait()

    def launch(
        self, micro_batches: Sequence[Any], *, learning_rate: float, weight_decay: float, iteration: int = 0
    ) -> LaunchedStep:
        """Queue a training step on the device, and return a handle with which to wait for its results.

        The host waits for the loss and the gradient norm only if it must decide whether to update the weights.

        Args:
            micro_batches: this rank's micro-batches of one global batch.
            learning_rate: learning rate of the step.
            weight_decay: weight decay of the step.
            iteration: index of the step, counted from 1.
        Raises:
            NotFiniteError: the loss or a gradient of this step, or of the previous step, is not finite, and the guard
                ends the job.
        """
        # ---- forward and backward of all micro-batches
        self.model.train()
        self.sharding.begin_step()
        if self.guard is not None:
            self.guard.begin_step()
        local_losses, loss = self._forward_backward(micro_batches)
        named, axes, scale = list(self.model.named_parameters()), (self.dims.tp, self.dims.shard), self.scaler.scale

        # ---- compute the gradient norm, and check the previous step's loss and norm
        with self._span("norm"):
            norms = self.sharding.states.norms(self.dims.tp)
            # `norms` is None if the gradients are in `.grad`. Then some gradients of replicated parameters are still
            # partial sums, one on each tensor-parallel rank, which are added up before the norm. For gradients in host
            # memory (--optimizer-cpu-offload), `states.norms` has added them up already.
            if norms is None:
                sum_partial_gradients_((p for name, p in named if name in self._partial), self.dims.tp)
            norm = global_grad_norm(named, *axes, divisor=scale, norms=norms)
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
                self._before.check()  # the device does not stall: it still has this step's queued work to run
            self._before = step
            found_inf = None if step.waits else (~(loss.isfinite() & norm.value.isfinite())).float()

        # ---- update the weights, or skip the update
        taken = not step.skipped
        # Factor by which clipping has multiplied the gradients, 0 if the update is skipped. The error feedback is the
        # part of these gradients that quantization has lost, and the next step adds it to its own gradients. So it
        # is multiplied by the same factor: the next step then adds only what is missing in this update.
        kept: torch.Tensor | float = 0.0
        with self._span("optimizer"):
            if taken:
                divisor = clip_divisor(norm.value, self.clip_grad, divisor=scale)
                set_rates_(self.optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
                with self.sharding.weight_update():  # marks the gathered weights as outdated
                    update_(self.optimizer, divisor, found_inf, iteration=iteration)
                kept = scale / divisor
                if found_inf is not None:
                    kept = kept.where(found_inf == 0.0, 0.0)
            if self._routers:
                factor = float(taken) if found_inf is None else 1.0 - found_inf
                update_expert_bias_(self._routers, self.dims.world.all_reduce_, factor=factor)
            self.optimizer.zero_grad(set_to_none=True)

        # ---- adapt the loss scale, scale the error feedback, and add the metrics to the step's record
        self.scaler.update(found_inf=step.overflow)
        self.sharding.end_step(kept * (self.scaler.scale / scale), iteration=iteration)
        step.record.metrics = {**self._objective.metrics(), **self.sharding.metrics()}
        return step

    def _forward_backward(self, micro_batches: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run forward and backward of all micro-batches of a step, so that their gradients add up.

        Returns:
            [number of micro-batches] this rank's contributions to the loss, and the loss of the global batch, an fp64
            scalar.
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
        """Return a context manager that records the span `name` on the timeline's track of compute."""
        return self.dims.timeline.span(COMPUTE, name)


@dataclass
class LaunchedStep:
    """A training step whose work is queued on the device, with methods that wait for its results.

    Args:
        record: record of the step; `wait` adds the loss and the gradient norm.
        loss: loss of the global batch, a scalar on the device.
        numbers: copy in host memory, still in progress, of the loss, the gradient norm and, if counted, the number of
            gradient elements that are zero.
        guard: check that decides by these numbers whether the step updates the weights. None: a gradient norm that is
            not finite skips the update.
        evidence: values with which the guard explains a failure; None without a guard.
        waits: True if the host must know the numbers before the update. Otherwise the optimizer skips the update on the
            device if the loss or the norm is not finite.
    """

    record: StepRecord
    loss: torch.Tensor
    numbers: HostCopy
    guard: Guard | None
    evidence: Evidence | None
    _: KW_ONLY
    waits: bool

    def __post_init__(self) -> None:
        self._taken: bool | None = None

    def check(self) -> bool:
        """Wait for the loss and the gradient norm, and return True if the step updates the weights.

        Raises:
            NotFiniteError: the loss or a gradient is not finite, and the guard ends the job; raised on all ranks.
            CorruptWeightsError: gathered weights differ between ranks; raised on all ranks.
        """
        if self._taken is None:
            loss, norm, *_ = self.numbers.wait()
            if self.guard is None:
                self._taken = math.isfinite(norm)
            else:
                assert self.evidence is not None
                self._taken = self.guard.allows(self.record.iteration, loss, norm, self.evidence)
            self.evidence = None
        return self._taken

    @property
    def skipped(self) -> bool:
        """True if the host has decided to skip the update of this step.

        False if the device decides, because the host does not wait for the device's decision.
        """
        return self.waits and not self.check()

    @property
    def overflow(self) -> bool:
        """True if the gradient norm of this step is not finite, which a dynamic loss scale counts as an overflow.

        False if the device decides about the update, because the host does not wait for the norm then.
        """
        return self.waits and not math.isfinite(self.numbers.wait()[1])

    def wait(self) -> StepRecord:
        """Wait for the loss and the gradient norm, store them in the step's record, and return the record.

        Raises:
            NotFiniteError: the loss or a gradient is not finite, and the guard ends the job; raised on all ranks.
            CorruptWeightsError: gathered weights differ between ranks; raised on all ranks.
        """
        taken, (loss, norm, *zeros) = self.check(), self.numbers.wait()
        self.record.loss, self.record.grad_norm, self.record.skipped = loss, norm, not taken
        self.record.num_zeros = int(zeros[0]) if zeros else None
        return self.record
