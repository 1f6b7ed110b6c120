"""Combine the measurements of all ranks into log lines, files of the run folder, and records for wandb and TensorBoard.

The results at the end of a run are in results.py.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from megazpp.model.router import router_metrics
from megazpp.optim.clip import global_parameter_norm
from megazpp.optim.schedule import TrainingProgress
from megazpp.tensor_parallel.parameters import existing_rows
from megazpp.topology.layout import WIRES
from megazpp.training.config import TrackingConfig
from megazpp.training.context import RunContext
from megazpp.training.metrics import NOTHING_SENT, IntervalRecord, Meter, StepRecord, validation_lines
from megazpp.training.objective import StopRequested
from megazpp.training.tracking import Tracker
from megazpp.zero.sharding import Sharding

SPIKE, SPIKE_STEPS = 10, 10  # a gradient norm above 10 times the median is logged, once 10 steps were recorded
MEBI = 1024 * 1024


# Evaluates held-out data and returns the same number on all ranks. The argument is called between two batches.
Validation = Callable[[Callable[[], None]], float]


@dataclass
class MetricsRecorder:
    """Records the steps, evaluations and results of a run.

    Every rank calls every method, because some communicate. Only rank 0 has a `tracker` and a console that prints.

    Args:
        config: the flags for logging.
        run: process groups, device, console and run folder.
        meter: accumulates the steps.
        sharding: handle on the model whose parameter norm is recorded.
        tracker: writes files, wandb and TensorBoard on rank 0; None on other ranks.
        report_timers: returns lines with the timers' times, which follow a log line; None for none.
        validation: function that evaluates the validation data; None without such data.
        metric: name of the value that evaluations return, "lm_loss" or for example "reward".
        has_perplexity: whether the "lm_loss" is a mean of nats per token.
        give_up: raises StopRequested if a stop signal has arrived; evaluations call it between two batches.
        weights_for_evaluation: returns a context manager that is entered around each evaluation. DiLoCo uses it to
            evaluate R, the copy of the outer weights that each replica group has.
    """

    config: TrackingConfig
    run: RunContext
    meter: Meter
    _: KW_ONLY
    sharding: Sharding
    tracker: Tracker | None = None
    report_timers: Callable[[], str | None] = lambda: None
    validation: Validation | None = None
    metric: str = "lm_loss"
    has_perplexity: bool = True
    give_up: Callable[[], None] = lambda: None
    weights_for_evaluation: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self.last_interval: IntervalRecord | None = None
        self.last_validation: tuple[int, float] | None = None  # the iteration and the value
        self._sent_before = list(NOTHING_SENT.values())
        self._norms: deque[float] = deque(maxlen=100)
        self._uneven: list[StepRecord] = []  # steps whose tokens are not summed over data ranks yet

    def step(self, record: StepRecord, *, last: bool) -> None:
        """Record a step; after a log interval or the `last` step, also write a log line."""
        # ---- numbers that only a log line has
        run, dims, log = self.run, self.run.dims, last or self.logs(record.iteration)
        sent = self._sent_bytes_per_node() if log else NOTHING_SENT  # read before the norm below adds traffic
        if log and self.config.log_params_norm:
            self.sharding.settle()
            model, axes = self.sharding.model, (dims.tp, dims.shard)
            settings: dict[str, Any] = {"rows": existing_rows(model), "device": run.device}
            record.params_norm = float(global_parameter_norm(model.named_parameters(), *axes, **settings))
        if log:
            with dims.counter.paused():
                record.metrics = {**record.metrics, **router_metrics(self.sharding.model, dims.world.all_reduce_)}

        # ---- the step
        self.meter.add(record)
        if not self.meter.whole_samples:
            self._uneven.append(record)
        if log and self._uneven:  # sum each step's tokens over the data ranks, whose samples differ in length
            with dims.counter.paused():
                own = torch.tensor([step.tokens for step in self._uneven], dtype=torch.int64, device=run.device)
                for step, tokens in zip(self._uneven, dims.sum_over_replica_groups_(own).tolist(), strict=True):
                    step.tokens = tokens
            self._uneven = []
        self._note_spike(record)
        run.console.advance(record.loss)
        if self.tracker is not None:
            self.tracker.step(record)
        if not log:
            return

        # ---- the log line of the interval, the timers, and the record of the interval
        first, peak = self.last_interval is None, peak_memory_bytes(run.device)
        interval = self.last_interval = self.meter.interval(sent, peak_memory_bytes=peak)
        run.log(interval.line, short=interval.short_line)
        if first and (line := memory_line(dims.world.rank, record.iteration, run.device)):
            run.log(line)
        if times := self.report_timers():
            run.log(times)
        if self.tracker is not None:
            self.tracker.interval(interval)

    def _note_spike(self, record: StepRecord) -> None:
        """Log a step whose gradient norm exceeds `SPIKE` times the median of the steps before it."""
        norm = record.grad_norm
        if norm is None or not math.isfinite(norm):
            return
        usual = statistics.median(self._norms) if len(self._norms) >= SPIKE_STEPS else 0.0
        if 0.0 < SPIKE * usual < norm:  # a median of zero allows no ratio
            self.run.log(
                f"note: iteration {record.iteration}: grad norm {norm:.3f} is {norm / usual:.0f} x the median of the "
                f"{len(self._norms)} steps before it, {usual:.3f}"
            )
        self._norms.append(norm)

    def logs(self, iteration: int) -> bool:
        """Return True if a log interval ends with the iteration."""
        return iteration % self.config.log_interval == 0

    def validate(self, progress: TrainingProgress) -> None:
        """Evaluate the validation data, if there is any, and log and record the result."""
        value = self.evaluate(self.validation)
        if value is None:
            return
        self.last_validation = (progress.iteration, value)
        short = f"iteration {progress.iteration:6d}  validation {self.metric.replace('lm_', '')} {value:.4f}"
        how: dict[str, Any] = {"metric": self.metric, "has_perplexity": self.has_perplexity}
        for line in validation_lines(f"iteration {progress.iteration}", value, **how):
            self.run.log(line, short="" if line.startswith("--") else short)
        if self.tracker is not None:
            self.tracker.validation(value, progress, **how)

    def evaluate(self, evaluate: Validation | None) -> float | None:
        """Return the result of `evaluate` with the weights for evaluation; None without a result.

        There is no result without a function, and if a stop signal arrives during the evaluation.
        """
        if evaluate is None:
            return None
        try:
            with self.weights_for_evaluation():
                return evaluate(self.give_up)
        except StopRequested as stop:
            self.run.log(f"the evaluation was given up: {stop}")
            return None

    def _sent_bytes_per_node(self) -> dict[str, int]:
        """Return the bytes sent since the last call, by wire: the sum over all ranks, divided by the number of nodes.

        The sum is over this rank's replica group, scaled to all groups, because groups of DiLoCo do not communicate
        between synchronizations.
        """
        dims = self.run.dims
        counter, nodes = dims.counter, dims.layout.cluster.num_nodes
        now = [*(counter.sent_bytes(wire) for wire in WIRES), counter.sent_on_axis("replica_group")]
        since = torch.tensor(now, dtype=torch.int64) - torch.tensor(self._sent_before, dtype=torch.int64)
        self._sent_before, total = now, since.to(self.run.device)
        with counter.paused():
            for axis in (dims.tp, dims.shard, dims.replicate):
                total = axis.all_reduce_(total)
        return dict(zip((*WIRES, "replica_group"), (total * dims.replica_group.size // nodes).tolist(), strict=True))


def memory_line(rank: int, iteration: int, device: torch.device) -> str | None:
    """Return Megatron-LM's line about CUDA memory, which is printed after the first log interval; None without CUDA."""
    if device.type != "cuda":
        return None
    sizes = {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }
    line = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    return line + "".join(f" | {name}: {size / MEBI:.2f}" for name, size in sizes.items())


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of allocated memory on a CUDA device, or the peak resident size of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB, macOS bytes
