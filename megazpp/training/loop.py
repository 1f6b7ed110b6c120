"""The training loop: fetch, step, record, save, evaluate, and stop when it is time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.record import TrainingProgress
from megazpp.data.loader import BatchLoader
from megazpp.optim.schedule import Schedule
from megazpp.parallel.spans import WAIT
from megazpp.training.batches import BatchPlan
from megazpp.training.evaluate import Evaluator
from megazpp.training.metrics import StepRecord
from megazpp.training.recorder import Recorder
from megazpp.training.resources import cpu_seconds
from megazpp.training.step import StepResult, TrainStep
from megazpp.training.stopping import StopConditions


class Observer(Protocol):
    """Looks at steps; every rank has the same ones."""

    def step(self, iteration: int) -> AbstractContextManager[None]:
        """Around iteration `iteration`, data included."""


def train(
    step: TrainStep,
    loader: BatchLoader,
    plan: BatchPlan,
    schedule: Schedule,
    recorder: Recorder,
    stops: StopConditions,
    observers: Sequence[Observer] = (),
    *,
    eval_interval: int,
    evaluate: Evaluator | None,
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
        recorder.console.say(f"training is complete: iteration {progress.iteration} of {plan.total_iterations}")
    recorder.console.start_bar(plan.total_iterations, progress.iteration)
    while progress.iteration < plan.total_iterations and progress.stop_reason is None:
        started, cpu_before = time.perf_counter(), cpu_seconds()
        batch_size = plan.batch_size_at(progress.consumed_samples)
        rate = schedule.learning_rate(progress.scheduled_samples)
        loss_scale = step.scaler.scale
        with ExitStack() as observed:
            for observer in observers:
                observed.enter_context(observer.step(progress.iteration + 1))
            with step.dims.timeline.span(WAIT, "data"):
                batches = loader.step(progress.consumed_samples, batch_size)
            result = step(
                batches,
                learning_rate=rate,
                weight_decay=schedule.weight_decay(progress.scheduled_samples),
                iteration=progress.iteration + 1,
            )
            seconds = time.perf_counter() - started
            recorder.cpu_seconds += cpu_seconds() - cpu_before
        recorder.micro_batches += plan.num_micro_batches_at(progress.consumed_samples)
        progress = _advance(progress, batch_size, plan, skipped=result.skipped)
        reason = stops.reason(progress.iteration, step.dims)
        progress = progress._replace(stop_reason=reason)
        record = _record(result, progress, batch_size, rate=rate, seconds=seconds, loss_scale=loss_scale)
        last = reason is not None or progress.iteration == plan.total_iterations
        recorder.step(record, step, last=last)
        if checkpoints is not None:
            checkpoints.after_step(progress, last=last)
        if evaluate is not None and progress.iteration % eval_interval == 0 and not stops.hurried:
            recorder.validate(evaluate, progress)
    recorder.console.stop_bar()
    return progress


def _advance(progress: TrainingProgress, batch_size: int, plan: BatchPlan, *, skipped: bool) -> TrainingProgress:
    return progress._replace(
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + batch_size,
        scheduled_samples=progress.scheduled_samples + (0 if skipped else batch_size),
        micro_batches=progress.micro_batches + plan.num_micro_batches_at(progress.consumed_samples),
    )


def _record(
    result: StepResult, progress: TrainingProgress, batch_size: int, *, rate: float, seconds: float, loss_scale: float
) -> StepRecord:
    return StepRecord(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        global_batch_size=batch_size,
        lm_loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=rate,
        seconds=seconds,
        loss_scale=loss_scale,
        skipped=result.skipped,
        num_zeros=result.num_zeros,
    )
