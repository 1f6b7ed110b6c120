"""The training loop: fetch, step, record, evaluate, and stop when it is time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazpp.data.loader import BatchLoader
from megazpp.flags import flag
from megazpp.optim.clip import global_parameter_norm
from megazpp.optim.schedule import Schedule
from megazpp.parallel.dims import ParallelDims
from megazpp.training.batches import BatchPlan
from megazpp.training.console import Console
from megazpp.training.metrics import IntervalRecord, Meter, SentBytes, StepRecord, validation_lines
from megazpp.training.resources import memory_line, peak_memory_bytes
from megazpp.training.step import StepResult, TrainStep
from megazpp.training.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """When training stops early."""

    exit_interval: int | None = flag(None, "stop after an iteration that this divides")
    exit_duration_in_mins: int | None = flag(None, "stop after this many minutes of training")
    skip_train: bool = flag(False, "only evaluate")

    def __post_init__(self) -> None:
        for name in ("exit_interval", "exit_duration_in_mins"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is not positive")


class Recorder:
    """Turns what this rank measured into what the run did, and shows it.

    Every rank calls every method (some communicate); only rank 0 has a `tracker` and a console that prints.

    Args:
        meter: sums up steps.
        log_interval: iterations between log lines.
        log_params_norm: also compute the norm of the parameters at every log line.
    """

    def __init__(
        self,
        meter: Meter,
        console: Console,
        tracker: Tracker | None,
        dims: ParallelDims,
        device: torch.device,
        *,
        log_interval: int,
        log_params_norm: bool,
    ) -> None:
        self.meter, self.console, self._tracker = meter, console, tracker
        self._dims, self._device = dims, device
        self._log_interval, self._log_params_norm = log_interval, log_params_norm
        self._sent_before = SentBytes()
        self.last_interval: IntervalRecord | None = None

    def step(self, record: StepRecord, step: TrainStep, *, last: bool) -> None:
        """Record a step; at a log interval and at the `last` one also print and write a line."""
        log = last or record.iteration % self._log_interval == 0
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

    def validation(self, loss: float, *, iteration: int, consumed_samples: int) -> None:
        for line in validation_lines(f"iteration {iteration}", loss):
            self.console.say(line)
        if self._tracker is not None:
            self._tracker.validation(loss, iteration=iteration, consumed_samples=consumed_samples)

    def _log(self, iteration: int) -> None:
        first = self.last_interval is None
        interval = self.meter.interval(peak_memory_bytes=peak_memory_bytes(self._device))
        self.last_interval = interval
        self.console.say(interval.log_line())
        if first and (line := memory_line(self._dims.world.rank, iteration, self._device)):
            self.console.say(line)
        if self._tracker is not None:
            self._tracker.interval(interval)

    def _params_norm(self, step: TrainStep) -> float | None:
        if not self._log_params_norm:
            return None
        return float(global_parameter_norm(step.model.named_parameters(), self._dims.tp, self._dims.shard))

    def _sent_bytes_per_node(self) -> SentBytes:
        """Bytes sent since the last call by all ranks together, divided by the number of nodes."""
        counter = self._dims.counter
        now = SentBytes(*(counter.sent_bytes(wire) for wire in SentBytes._fields))
        since = torch.tensor(now, dtype=torch.int64) - torch.tensor(self._sent_before, dtype=torch.int64)
        self._sent_before = now
        total = self._dims.world.all_reduce_(since.to(self._device))
        return SentBytes(*(total // self._dims.layout.cluster.num_nodes).tolist())


class Progress(NamedTuple):
    """Where training stands; what a resumed run would continue from.

    Attributes:
        iteration: steps done.
        consumed_samples: samples those steps were given.
        scheduled_samples: samples of the steps that were taken; skipped steps do not move the schedule.
        stop_reason: why the loop ended before its last iteration, if it did.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    stop_reason: str | None = None


def train(
    step: TrainStep,
    loader: BatchLoader,
    plan: BatchPlan,
    schedule: Schedule,
    recorder: Recorder,
    config: LoopConfig,
    *,
    eval_interval: int,
    evaluate: Callable[[], float] | None,
    start: Progress = Progress(),
) -> Progress:
    """Train until `plan` is fulfilled or `config` says stop.

    Args:
        evaluate: validation loss on all ranks, called every `eval_interval` iterations; None for no evaluation.
        start: where to begin.
    """
    progress, began = start, time.monotonic()
    recorder.console.start_bar(plan.total_iterations, progress.iteration)
    while progress.iteration < plan.total_iterations and progress.stop_reason is None:
        started = time.perf_counter()
        batch_size = plan.batch_size_at(progress.consumed_samples)
        rate = schedule.learning_rate(progress.scheduled_samples)
        loss_scale = step.scaler.scale
        result = step(
            loader.step(progress.consumed_samples, batch_size),
            learning_rate=rate,
            weight_decay=schedule.weight_decay(progress.scheduled_samples),
        )
        seconds = time.perf_counter() - started
        progress = _advance(progress, batch_size, skipped=result.skipped)
        reason = _stop_reason(config, progress.iteration, began, step.dims)
        progress = progress._replace(stop_reason=reason)
        record = _record(result, progress, batch_size, rate=rate, seconds=seconds, loss_scale=loss_scale)
        recorder.step(record, step, last=reason is not None or progress.iteration == plan.total_iterations)
        if evaluate is not None and progress.iteration % eval_interval == 0:
            recorder.validation(evaluate(), iteration=progress.iteration, consumed_samples=progress.consumed_samples)
    recorder.console.stop_bar()
    return progress


def _advance(progress: Progress, batch_size: int, *, skipped: bool) -> Progress:
    return progress._replace(
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + batch_size,
        scheduled_samples=progress.scheduled_samples + (0 if skipped else batch_size),
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


def _stop_reason(config: LoopConfig, iteration: int, began: float, dims: ParallelDims) -> str | None:
    """The same answer on all ranks: clocks differ, so with a time limit the ranks agree on the latest."""
    if config.exit_interval is not None and iteration % config.exit_interval == 0:
        return f"--exit-interval {config.exit_interval}"
    if config.exit_duration_in_mins is not None:
        over = time.monotonic() - began > 60 * config.exit_duration_in_mins
        vote = torch.tensor(float(over), device=dims.mesh.device_type)
        if float(dims.world.all_reduce_(vote)) > 0:
            return f"--exit-duration-in-mins {config.exit_duration_in_mins}"
    return None
