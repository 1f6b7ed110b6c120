"""The training loop: fetch, step, record, save, evaluate, and stop when it is time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.progress import Progress
from megazpp.data.loader import BatchLoader
from megazpp.optim.clip import global_parameter_norm
from megazpp.optim.schedule import Schedule
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.spans import WAIT
from megazpp.training.batches import BatchPlan
from megazpp.training.console import Console
from megazpp.training.evaluate import Evaluator
from megazpp.training.metrics import IntervalRecord, Meter, SentBytes, StepRecord, validation_lines
from megazpp.training.resources import cpu_seconds, memory_line, peak_memory_bytes
from megazpp.training.step import StepResult, TrainStep
from megazpp.training.stopping import StopConditions
from megazpp.training.timers import Timers
from megazpp.training.tracking import Tracker, TrackingConfig
from megazpp.training.traffic import Zero3Traffic, collect_traffic, traffic_summary, traffic_table


class Recorder:
    """Turns what this rank measured into what the run did, and shows it.

    Every rank calls every method (some communicate); only rank 0 has a `tracker` and a console that prints.

    Args:
        meter: sums up steps.
        config: how often to log, and whether the norm of the parameters too.
        timers: reported after a log line.
    """

    def __init__(
        self,
        meter: Meter,
        console: Console,
        tracker: Tracker | None,
        dims: ParallelDims,
        config: TrackingConfig,
        device: torch.device,
        timers: Timers | None = None,
    ) -> None:
        self.meter, self.console, self._tracker = meter, console, tracker
        self._dims, self._config, self._device, self._timers = dims, config, device, timers
        self._sent_before = SentBytes()
        self.last_interval: IntervalRecord | None = None
        self.last_validation: tuple[int, float] | None = None
        self.cpu_seconds, self.micro_batches = 0.0, 0  # of this process's steps, as its traffic is

    def step(self, record: StepRecord, step: TrainStep, *, last: bool) -> None:
        """Record a step; at a log interval and at the `last` one also print and write a line."""
        log = last or record.iteration % self._config.log_interval == 0
        if log:
            record = dataclasses.replace(
                record, sent_bytes=self._sent_bytes_per_node(), params_norm=self._params_norm(step)
            )
        self.meter.add(record)
        self.console.advance(record.lm_loss)
        if self._tracker is not None:
            self._tracker.step(record)
        if log:
            self._log(record.iteration)

    def validate(self, evaluate: Evaluator, progress: Progress) -> None:
        """Evaluate, show and record."""
        loss = evaluate()
        self.last_validation = (progress.iteration, loss)
        for line in validation_lines(f"iteration {progress.iteration}", loss):
            self.console.say(line)
        if self._tracker is not None:
            self._tracker.validation(loss, iteration=progress.iteration, consumed_samples=progress.consumed_samples)

    def finish(
        self,
        progress: Progress,
        validate: Evaluator | None,
        test: Evaluator | None,
        *,
        unigram_entropy: float | None,
        wait_share: float,
        zero3: Callable[[int], Zero3Traffic | None],
    ) -> None:
        """The last evaluations, then what the run came to: printed, and written to summary.json.

        Args:
            zero3: number of micro-batches to what ZeRO-3 would have sent.
        """
        where = f"iteration {progress.iteration}"
        if validate is not None and (self.last_validation is None or self.last_validation[0] != progress.iteration):
            self.validate(validate, progress)
        test_loss = None if test is None else test()
        if test_loss is not None:
            for line in validation_lines(f"{where} on test set", test_loss):
                self.console.say(line)
        used = torch.tensor(self.cpu_seconds, dtype=torch.float64, device=self._device)
        peak = torch.tensor(float(peak_memory_bytes(self._device)), dtype=torch.float64, device=self._device)
        summary = self.meter.summary(
            final_loss=None if self.last_interval is None else self.last_interval.lm_loss,
            validation_loss=None if self.last_validation is None else self.last_validation[1],
            unigram_entropy=unigram_entropy,
            cpu_seconds=float(self._dims.world.all_reduce_(used)),
            peak_memory_bytes=int(self._dims.world.max_(peak)),
        )
        summary |= {
            "iteration": progress.iteration,
            "test_loss": test_loss,
            "data_wait_share": wait_share,
            "stop_reason": progress.stop_reason,
        }
        rows, compared = collect_traffic(self._dims, self._device), zero3(self.micro_batches)
        if rows:
            self.console.say(traffic_table(rows, compared))
        summary |= traffic_summary(rows, compared)
        self.console.say(_closing_lines(summary, self.last_interval))
        if self._tracker is not None:
            self._tracker.summary(summary, rows)

    def _log(self, iteration: int) -> None:
        first = self.last_interval is None
        interval = self.meter.interval(peak_memory_bytes=peak_memory_bytes(self._device))
        self.last_interval = interval
        self.console.say(interval.log_line())
        if first and (line := memory_line(self._dims.world.rank, iteration, self._device)):
            self.console.say(line)
        if self._timers is not None and (times := self._timers.report()):
            self.console.say(times)
        if self._tracker is not None:
            self._tracker.interval(interval)

    def _params_norm(self, step: TrainStep) -> float | None:
        if not self._config.log_params_norm:
            return None
        return float(global_parameter_norm(step.model.named_parameters(), self._dims.tp, self._dims.shard))

    def _sent_bytes_per_node(self) -> SentBytes:
        """Bytes sent since the last call by all ranks together, divided by the number of nodes."""
        now = self._sent()
        since = torch.tensor(now, dtype=torch.int64) - torch.tensor(self._sent_before, dtype=torch.int64)
        self._sent_before = now
        total = self._dims.world.all_reduce_(since.to(self._device))
        return SentBytes(*(total // self._dims.layout.cluster.num_nodes).tolist())

    def _sent(self) -> SentBytes:
        """Bytes this rank has sent so far."""
        return SentBytes(*(self._dims.counter.sent_bytes(wire) for wire in SentBytes._fields))


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


def _advance(progress: Progress, batch_size: int, plan: BatchPlan, *, skipped: bool) -> Progress:
    return progress._replace(
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + batch_size,
        scheduled_samples=progress.scheduled_samples + (0 if skipped else batch_size),
        micro_batches=progress.micro_batches + plan.num_micro_batches_at(progress.consumed_samples),
    )


def _record(
    result: StepResult, progress: Progress, batch_size: int, *, rate: float, seconds: float, loss_scale: float
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


def _closing_lines(summary: dict[str, Any], last: IntervalRecord | None) -> str:
    """What the run came to, for a reader."""
    lines = []
    if summary["stop_reason"]:
        lines.append(f"stopped by {summary['stop_reason']}")
    if last is not None:
        lines.append(
            f"trained {summary['iterations']} iterations in {summary['seconds']:.1f} s: "
            f"{summary['tokens_per_second']:.0f} tokens/s, {summary['cpu_seconds_per_token'] * 1e6:.1f} CPU "
            f"microseconds per token, {summary['data_wait_share']:.1%} of the time waiting for data"
        )
        lines.append(f"training loss of the last log interval: {summary['final_loss']:.4f} nats per token")
    if summary["validation_loss"] is not None:
        lines.append(
            f"validation loss: {summary['validation_loss']:.4f}; unigram entropy of the validation text: "
            f"{summary['unigram_entropy']:.4f} nats per token"
        )
    return "\n".join(lines)
