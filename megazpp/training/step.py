"""The training loop (fetch, step, record, save, evaluate, stop when it is time) and the optimizer step that it takes.

A step is its micro-batches forward and backward, the norm, the update or the skip. Gradients are sums: every loss is
divided once by what the whole global batch has of it (objective.py), so neither the data ranks nor the micro-batches
are averaged a second time, and the result does not depend on how samples are spread over them. With fp16 the loss is
also multiplied by the loss scale and the gradients divided by it again.

By default the host waits for nothing between a backward and its update: clipping and the check for what is not finite
go to the fused optimizer as scalars on the device, which leaves the weights alone if it has to. The host reads the
numbers of a step before the update of the next one, while the device is busy with that; at once where they are needed:
for a log line, a checkpoint, an evaluation, at the end. What has to be decided on the host (loss spikes, verification,
a dynamic loss scale, steps that are skipped and not the end) waits for the numbers before the update, and so do other
optimizers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch

from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.record import TrainingProgress
from megazpp.model.gpt import GPTModel
from megazpp.optim.clip import clip_divisor, count_zero_grads, global_grad_norm
from megazpp.optim.loss_scale import LossScaler
from megazpp.optim.optimizer import set_rates_, skips_on_device, update_
from megazpp.optim.schedule import Schedule
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE, WAIT
from megazpp.tensor_parallel.parameters import partial_parameters, sum_partial_gradients_
from megazpp.training.anomalies import Evidence, Guard
from megazpp.training.batches import BatchPlan
from megazpp.training.host_copy import HostCopy
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
        self._partial = partial_parameters(self.model)
        self._before: LaunchedStep | None = None

    def __call__(
        self, micro_batches: Sequence[Any], *, learning_rate: float, weight_decay: float, iteration: int = 0
    ) -> StepRecord:
        """Train on this rank's micro-batches of one global batch, on the model's device, and wait for the step.

        Raises:
            NotFiniteError: the guard ends the job.
        """
        return self.launch(
            micro_batches, learning_rate=learning_rate, weight_decay=weight_decay, iteration=iteration
        ).record()

    def launch(
        self, micro_batches: Sequence[Any], *, learning_rate: float, weight_decay: float, iteration: int = 0
    ) -> LaunchedStep:
        """Like a call, but the host waits for no more of the step than it needs to know.

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
                numbers.append(count_zero_grads(named, *axes))
            step = LaunchedStep(
                StepRecord(
                    iteration=iteration, loss=math.nan, grad_norm=None, learning_rate=learning_rate, loss_scale=scale
                ),
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
                update_(self.optimizer, divisor, found_inf)
                kept = scale / divisor
                if found_inf is not None:
                    kept = kept.where(found_inf == 0.0, 0.0)
            self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(found_inf=step.overflow)
        self.sharding.end_step(kept * (self.scaler.scale / scale), iteration=iteration)
        step.metrics = self._objective.metrics()
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
        record: what is known of it already.
        loss: on the device.
        numbers: its loss, norm of the gradients and, if they are counted, zeros.
        guard: decides by them; None: a norm that is not finite skips the step.
        evidence: for the guard.
        waits: they have to be known before its update; otherwise the device does not update with what is not finite.
    Attributes:
        metrics: of the objective.
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
        self.loss, self.waits = loss, waits
        self._record, self._numbers, self._guard, self._evidence = record, numbers, guard, evidence
        self._taken: bool | None = None
        self.metrics: Mapping[str, float] = {}

    def check(self) -> bool:
        """Whether the weights are updated; waits for the numbers.

        Raises:
            NotFiniteError, CorruptWeightsError: the guard ends the job; on all ranks.
        """
        if self._taken is None:
            loss, norm, *_ = self._numbers.wait()
            if self._guard is None:
                self._taken = math.isfinite(norm)
            else:
                assert self._evidence is not None
                self._taken = self._guard.allows(self._record.iteration, loss, norm, self._evidence)
            self._evidence = None
        return self._taken

    @property
    def skipped(self) -> bool:
        """Whether the weights stay as they are and training goes on; known at once."""
        return self.waits and not self.check()

    @property
    def overflow(self) -> bool:
        """Whether the norm is not finite and training goes on; known at once."""
        return self.waits and not math.isfinite(self._numbers.wait()[1])

    def record(self) -> StepRecord:
        """What the step has come to; waits for its numbers, and raises as `check` does."""
        taken, (loss, norm, *zeros) = self.check(), self._numbers.wait()
        return dataclasses.replace(
            self._record,
            loss=loss,
            grad_norm=norm,
            skipped=not taken,
            num_zeros=int(zeros[0]) if zeros else None,
            metrics=self.metrics,
        )


class Loader(Protocol):
    """Where steps get their micro-batches: a `BatchLoader`, or what draws them from the model."""

    wait_seconds: float

    def step(self, consumed_samples: int, global_batch_size: int) -> Sequence[Any]:
        """This rank's micro-batches of the step that begins at `consumed_samples`, on the device."""


class Synchronizer(Protocol):
    """What synchronizes islands that take local steps (local_steps.py)."""

    def after_step(self, launched: LaunchedStep, iteration: int, *, last: bool) -> bool:
        """Whether all islands have waited for each other after `iteration`."""


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
    islands: Synchronizer | None = None,
) -> TrainingProgress:
    """Train until `plan` is fulfilled or `stops` says so.

    Args:
        observers: entered around each step, in this order.
        evaluate: the validation, called every `eval_interval` iterations; None for no evaluation.
        start: where to begin.
        checkpoints: saves when it is time and after the last step.
        islands: synchronizes them; None where every step is synchronized.
    """
    progress = start
    if progress.iteration >= plan.total_iterations:
        recorder.run.log(f"training is complete: iteration {progress.iteration} of {plan.total_iterations}")
    recorder.run.console.start_bar(plan.total_iterations, progress.iteration)
    before: Callable[[], StepRecord] | None = None  # the record of a step that nobody has asked for yet
    while progress.iteration < plan.total_iterations and progress.stop_reason is None:
        iteration, batch_size = progress.iteration + 1, plan.batch_size_at(progress.consumed_samples)
        began, cpu_began, waited = time.perf_counter(), cpu_seconds(), loader.wait_seconds
        with ExitStack() as around:
            for observer in observers:
                around.enter_context(observer.step(iteration))
            with step.dims.timeline.span(WAIT, "data"):
                batches = loader.step(progress.consumed_samples, batch_size)
            launched = step.launch(
                batches,
                learning_rate=schedule.learning_rate(progress.scheduled_samples),
                weight_decay=schedule.weight_decay(progress.scheduled_samples),
                iteration=iteration,
            )
            final = iteration == plan.total_iterations
            met = islands is None or islands.after_step(launched, iteration, last=final)
        micro_batches = plan.num_micro_batches_at(progress.consumed_samples)
        progress = progress._replace(
            iteration=iteration,
            consumed_samples=progress.consumed_samples + batch_size,
            # islands skip steps on their own, but share a schedule
            scheduled_samples=progress.scheduled_samples + (0 if islands is None and launched.skipped else batch_size),
            micro_batches=progress.micro_batches + micro_batches,
            stop_reason=stops.reason(iteration, step.dims, agree=met, at_once=islands is not None),
        )
        last = progress.stop_reason is not None or final
        evaluates = evaluate is not None and iteration % eval_interval == 0 and not stops.hurried
        saves = checkpoints is not None and checkpoints.due(iteration, last=last)
        at_once = last or evaluates or saves or recorder.logs(iteration)
        if at_once:
            launched.check()
        finished = functools.partial(
            _finished,
            launched,
            consumed_samples=progress.consumed_samples,
            global_batch_size=batch_size,
            tokens=plan.data_parallel_size * sum(batch.tokens.numel() for batch in batches),
            micro_batches=micro_batches,
            seconds=time.perf_counter() - began,
            wait_seconds=loader.wait_seconds - waited,
            cpu_seconds=cpu_seconds() - cpu_began,
        )
        if before is not None:
            recorder.step(before(), last=False)
        if at_once:
            recorder.step(finished(), last=last)
        before = None if at_once else finished
        if checkpoints is not None:
            checkpoints.after_step(progress, last=last)
        if evaluate is not None and evaluates:
            recorder.validate(evaluate, progress)
    recorder.run.console.stop_bar()
    return progress


def _finished(launched: LaunchedStep, **of_loop: Any) -> StepRecord:
    return dataclasses.replace(launched.record(), **of_loop)
