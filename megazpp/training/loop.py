"""The training loop: fetch, step, record, save, evaluate, and stop when it is time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.progress import Progress
from megazpp.data.loader import BatchLoader
from megazpp.optim.schedule import Schedule
from megazpp.parallel.timeline import WAIT
from megazpp.training.batches import BatchPlan
from megazpp.training.evaluate import Evaluator
from megazpp.training.metrics import cpu_seconds
from megazpp.training.recorder import MetricsRecorder
from megazpp.training.step import TrainStep
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
    recorder: MetricsRecorder,
    stops: StopConditions,
    observers: Sequence[Observer] = (),
    *,
    eval_interval: int,
    evaluate: Evaluator | None,
    start: Progress,
    checkpoints: Checkpoints | None = None,
) -> Progress:
    """Train until `plan` is fulfilled or `stops` says so.

    Args:
        observers: entered around each step, in this order.
        evaluate: the validation, called every `eval_interval` iterations; None for no evaluation.
        start: where to begin.
        checkpoints: saves when it is time and after the last step.
    """
    progress = start
    if progress.iteration >= plan.total_iterations:
        recorder.console.log(f"training is complete: iteration {progress.iteration} of {plan.total_iterations}")
    recorder.console.start_bar(plan.total_iterations, progress.iteration)
    while progress.iteration < plan.total_iterations and progress.stop_reason is None:
        iteration, batch_size = progress.iteration + 1, plan.batch_size_at(progress.consumed_samples)
        began, cpu_began, waited = time.perf_counter(), cpu_seconds(), loader.wait_seconds
        with _observed(observers, iteration):
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
        recorder.step(record, step, last=last)
        if checkpoints is not None:
            checkpoints.after_step(progress, last=last)
        if evaluate is not None and iteration % eval_interval == 0 and not stops.hurried:
            recorder.validate(evaluate, progress)
    recorder.console.stop_bar()
    return progress


@contextmanager
def _observed(observers: Sequence[Observer], iteration: int) -> Iterator[None]:
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.step(iteration))
        yield
