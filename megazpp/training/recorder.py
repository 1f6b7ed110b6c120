"""Turns what each rank measured into what the run did: printed, written to the run folder, sent to the sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megazpp.checkpoint.progress import Progress
from megazpp.optim.clip import global_parameter_norm
from megazpp.training.console import closing_lines, log_line, memory_line, validation_lines
from megazpp.training.context import RunContext
from megazpp.training.evaluate import Evaluator
from megazpp.training.metrics import IntervalRecord, Meter, RunShape, SentBytes, StepRecord, peak_memory_bytes
from megazpp.training.step import TrainStep
from megazpp.training.timers import Timers
from megazpp.training.tracking import Tracker, TrackingConfig
from megazpp.training.traffic import Zero3Traffic, collect_traffic, traffic_summary, traffic_table


class MetricsRecorder:
    """Every rank calls every method (some communicate); only rank 0 has a `tracker` and a console that prints.

    Args:
        config: how often to log, and whether the norm of the parameters too.
        run: prints, communicates and knows the device.
        shape: what turns samples and seconds into figures.
        zero3: number of micro-batches to what ZeRO-3 would have sent.
        tracker: writes on rank 0.
        timers: reported after a log line.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run: RunContext,
        shape: RunShape,
        *,
        zero3: Callable[[int], Zero3Traffic | None],
        tracker: Tracker | None = None,
        timers: Timers | None = None,
    ) -> None:
        self.meter, self.console, self._tracker = Meter(shape), run.console, tracker
        self._dims, self._config, self._device, self._timers = run.dims, config, run.device, timers
        self._zero3 = zero3
        self._sent_before = SentBytes()
        self.last_interval: IntervalRecord | None = None
        self.last_validation: tuple[int, float] | None = None

    def step(self, record: StepRecord, step: TrainStep, *, last: bool) -> None:
        """Record a step; at a log interval and at the `last` one also print and write a line."""
        log = last or record.iteration % self._config.log_interval == 0
        if log:
            record = dataclasses.replace(
                record, sent_bytes=self._sent_bytes_per_node(), params_norm=self._params_norm(step)
            )
        self.meter.add(record)
        self.console.advance(record.loss)
        if self._tracker is not None:
            self._tracker.step(record)
        if log:
            self._log(record.iteration)

    def validate(self, evaluate: Evaluator, progress: Progress) -> None:
        """Evaluate, show and record."""
        loss = evaluate()
        self.last_validation = (progress.iteration, loss)
        for line in validation_lines(f"iteration {progress.iteration}", loss):
            self.console.log(line)
        if self._tracker is not None:
            self._tracker.validation(loss, iteration=progress.iteration, consumed_samples=progress.consumed_samples)

    def finish(
        self,
        progress: Progress,
        validate: Evaluator | None,
        test: Evaluator | None,
        *,
        unigram_entropy: float | None,
    ) -> None:
        """The last evaluations, then what the run came to: printed, and written to summary.json.

        Losses are nats per token, that of training the last log interval's; None where there was none.

        Args:
            unigram_entropy: nats per token of the validation text.
        """
        where = f"iteration {progress.iteration}"
        if validate is not None and (self.last_validation is None or self.last_validation[0] != progress.iteration):
            self.validate(validate, progress)
        test_loss = None if test is None else test()
        if test_loss is not None:
            for line in validation_lines(f"{where} on test set", test_loss):
                self.console.log(line)
        used = torch.tensor(self.meter.cpu_seconds, dtype=torch.float64, device=self._device)
        peak = torch.tensor(float(peak_memory_bytes(self._device)), dtype=torch.float64, device=self._device)
        summary = self.meter.summary(cpu_seconds=float(self._dims.world.all_reduce_(used))) | {
            "final_loss": None if self.last_interval is None else self.last_interval.lm_loss,
            "validation_loss": None if self.last_validation is None else self.last_validation[1],
            "unigram_entropy": unigram_entropy,
            "peak_memory_bytes": int(self._dims.world.max_(peak)),
            "iteration": progress.iteration,
            "test_loss": test_loss,
            "stop_reason": progress.stop_reason,
        }
        rows, compared = collect_traffic(self._dims, self._device), self._zero3(self.meter.micro_batches)
        if rows:
            self.console.log(traffic_table(rows, compared))
        summary |= traffic_summary(rows, compared)
        self.console.log(closing_lines(summary, self.last_interval))
        if self._tracker is not None:
            self._tracker.summary(summary, rows)

    def _log(self, iteration: int) -> None:
        first = self.last_interval is None
        interval = self.meter.interval(peak_memory_bytes=peak_memory_bytes(self._device))
        self.last_interval = interval
        self.console.log(log_line(interval))
        if first and (line := memory_line(self._dims.world.rank, iteration, self._device)):
            self.console.log(line)
        if self._timers is not None and (times := self._timers.report()):
            self.console.log(times)
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
