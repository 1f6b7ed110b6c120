"""The training loop (fetch, step, record, save, evaluate, stop when it is time) and the optimizer step that it takes.

A step is its micro-batches forward and backward, the norm, the update or the skip. Gradients are sums: every loss is
divided once by what the whole global batch has of it (objective.py), so neither the data ranks nor the micro-batches
are averaged a second time, and the result does not depend on how samples are spread over them. With fp16 the loss is
also multiplied by the loss scale and the gradients divided by it again.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch

from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.record import TrainingProgress
from megazpp.model.gpt import GPTModel
from megazpp.optim.clip import clip_grads_, count_zero_grads, global_grad_norm
from megazpp.optim.loss_scale import LossScaler
from megazpp.optim.optimizer import set_rates_
from megazpp.optim.schedule import Schedule
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE, WAIT
from megazpp.tensor_parallel.parameters import partial_parameters, sum_partial_gradients_
from megazpp.training.anomalies import Guard
from megazpp.training.batches import BatchPlan
from megazpp.training.metrics import StepRecord, cpu_seconds
from megazpp.training.objective import LanguageModelLoss, Objective
from megazpp.training.recorder import MetricsRecorder, Validation
from megazpp.training.stopping import StopConditions
from megazpp.zero.sharding import Sharding


@dataclass
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
        self._partial = partial_parameters(self.model)

    def __call__(
        self, micro_batches: Sequence[Any], *, learning_rate: float, weight_decay: float, iteration: int = 0
    ) -> StepRecord:
        """Train on this rank's micro-batches of one global batch, on the model's device.

        Raises:
            NotFiniteError: the guard ends the job.
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
            loss_value, norm_value = torch.stack((loss, norm.double())).tolist()  # the one host sync
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
            skipped=not taken,
            num_zeros=zeros,
            metrics=self._objective.metrics(),
        )

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


class Loader(Protocol):
    """Where steps get their micro-batches: a `BatchLoader`, or what draws them from the model."""

    wait_seconds: float

    def step(self, consumed_samples: int, global_batch_size: int) -> Sequence[Any]:
        """This rank's micro-batches of the step that begins at `consumed_samples`, on the device."""


class Observer(Protocol):
    """Looks at steps; every rank has the same ones."""

    def step(self, iteration: int) -> AbstractContextManager[None]:
        """Around iteration `iteration`, data included."""


def train(
    step: TrainStep,
    loader: Loader,
    plan: BatchPlan,
    schedule: Schedule,
    recorder: MetricsRecorder,
    stops: StopConditions,
    observers: Sequence[Observer] = (),
    *,
    eval_interval: int,
    evaluate: Validation | None,
    start: TrainingProgress,
    checkpoints: Checkpoints | None = None,
) -> TrainingProgress:
    """Train until `plan` is fulfilled or `stops` says so.

    Args:
        observers: entered around each step, in this order.
        evaluate: the validation, called every `eval_interval` iterations; None for no evaluation.
        start: where to begin.
        checkpoints: saves when it is time and after the last step.
    """
    progress = start
    if progress.iteration >= plan.total_iterations:
        recorder.run.log(f"training is complete: iteration {progress.iteration} of {plan.total_iterations}")
    recorder.run.console.start_bar(plan.total_iterations, progress.iteration)
    while progress.iteration < plan.total_iterations and progress.stop_reason is None:
        iteration, batch_size = progress.iteration + 1, plan.batch_size_at(progress.consumed_samples)
        began, cpu_began, waited = time.perf_counter(), cpu_seconds(), loader.wait_seconds
        with ExitStack() as around:
            for observer in observers:
                around.enter_context(observer.step(iteration))
            with step.dims.timeline.span(WAIT, "data"):
                batches = loader.step(progress.consumed_samples, batch_size)
            record = step(
                batches,
                learning_rate=schedule.learning_rate(progress.scheduled_samples),
                weight_decay=schedule.weight_decay(progress.scheduled_samples),
                iteration=iteration,
            )
            seconds, used = time.perf_counter() - began, cpu_seconds() - cpu_began
        micro_batches = plan.num_micro_batches_at(progress.consumed_samples)
        progress = progress._replace(
            iteration=iteration,
            consumed_samples=progress.consumed_samples + batch_size,
            scheduled_samples=progress.scheduled_samples + (0 if record.skipped else batch_size),
            micro_batches=progress.micro_batches + micro_batches,
            stop_reason=stops.reason(iteration, step.dims),
        )
        record = dataclasses.replace(
            record,
            consumed_samples=progress.consumed_samples,
            global_batch_size=batch_size,
            micro_batches=micro_batches,
            seconds=seconds,
            wait_seconds=loader.wait_seconds - waited,
            cpu_seconds=used,
        )
        last = progress.stop_reason is not None or iteration == plan.total_iterations
        recorder.step(record, last=last)
        if checkpoints is not None:
            checkpoints.after_step(progress, last=last)
        if evaluate is not None and iteration % eval_interval == 0 and not stops.hurried:
            recorder.validate(evaluate, progress)
    recorder.run.console.stop_bar()
    return progress
