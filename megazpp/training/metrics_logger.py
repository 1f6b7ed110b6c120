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

# A gradient norm above SPIKE times the median of earlier norms is logged, after the first SPIKE_STEPS steps
SPIKE, SPIKE_STEPS = 10, 10
MEBI = 1024 * 1024


# A function that evaluates held-out data, and returns the result, which is equal on all ranks. It calls its argument
# before each batch.
Validation = Callable[[Callable[[], None]], float]


@dataclass
class MetricsRecorder:
    """The recorder of a run's steps and evaluations: log lines, files of the run folder, wandb and TensorBoard.

    Every rank calls every method, because some methods communicate. Only rank 0 has a `tracker` and a console that
    prints.

    Args:
        config: flags for logging.
        run: process groups, device, console and run folder.
        meter: meter that sums over the steps, and summarizes log intervals.
        sharding: handle of the model whose parameter norm is recorded.
        tracker: writer of the run folder's files, of wandb and TensorBoard, on rank 0; None on other ranks.
        report_timers: function that returns lines with the timers' times, which follow a log line, or None.
        validation: function that evaluates the validation data; None without such data.
        metric: name of the number that evaluations return, "lm_loss" or for example "reward".
        has_perplexity: True if "lm_loss" is a mean of nats per token, so that its exponential is a perplexity.
        give_up: function that raises StopRequested if a stop signal has arrived. Evaluations call it before each batch.
        weights_for_evaluation: function that returns a context manager, which is entered around each evaluation. DiLoCo
            uses it to evaluate the outer weights instead of the replica group's own weights.
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
        self.last_validation: tuple[int, float] | None = None  # iteration and result; None before the first validation
        self._sent_before = list(NOTHING_SENT.values())  # bytes that this rank had sent at the last log line, by wire
        self._norms: deque[float] = deque(maxlen=100)  # gradient norms of the last steps
        # Records since the last log line whose `tokens` is still this data rank's number; empty if all samples have the
        # same length
        self._uneven: list[StepRecord] = []

    def step(self, record: StepRecord, *, last: bool) -> None:
        """Record a training step. If a log interval ends with the step, or the step is the `last` one, log a line."""
        # ---- for a log line, compute the numbers that no other step has
        run, dims, log = self.run, self.run.dims, last or self.logs(record.iteration)
        # Read the counted bytes first, because the parameter norm below sends bytes that no training step needs.
        sent = self._sent_bytes_per_node() if log else NOTHING_SENT
        if log and self.config.log_params_norm:
            self.sharding.settle()
            model, axes = self.sharding.model, (dims.tp, dims.shard)
            settings: dict[str, Any] = {"rows": existing_rows(model), "device": run.device}
            record.params_norm = float(global_parameter_norm(model.named_parameters(), *axes, **settings))
        if log:
            with dims.counter.paused():
                record.metrics = {**record.metrics, **router_metrics(self.sharding.model, dims.world.all_reduce_)}

        # ---- add the record of the step to the meter, and write it to wandb and TensorBoard
        self.meter.add(record)
        if not self.meter.whole_samples:
            self._uneven.append(record)
        if log and self._uneven:  # the data ranks' samples differ in length: sum each step's tokens over data ranks
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

        # ---- print the log line of the interval and the timers, and write the record of the interval
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
        """Log a note if the step's gradient norm exceeds `SPIKE` times the median of the last steps' norms."""
        norm = record.grad_norm
        if norm is None or not math.isfinite(norm):
            return
        usual = statistics.median(self._norms) if len(self._norms) >= SPIKE_STEPS else 0.0
        if 0.0 < SPIKE * usual < norm:  # no note for a median of 0, because the note gives the ratio of norm to median
            self.run.log(
                f"note: iteration {record.iteration}: grad norm {norm:.3f} is {norm / usual:.0f} x the median of the "
                f"{len(self._norms)} steps before it, {usual:.3f}"
            )
        self._norms.append(norm)

    def logs(self, iteration: int) -> bool:
        """Return True if a log interval ends with `iteration`, so that a log line follows."""
        return iteration % self.config.log_interval == 0

    def validate(self, progress: TrainingProgress) -> None:
        """Evaluate the validation data, then log and record the result. Do nothing if the run has no such data."""
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
        """Call `evaluate`, with DiLoCo on the outer weights, and return its result.

        Returns None if `evaluate` is None, or if a stop signal arrives during the evaluation.
        """
        if evaluate is None:
            return None
        try:
            with self.weights_for_evaluation():
                return evaluate(self.give_up)
        except StopRequested as stop:
            self.run.log(f"the evaluation ends without a result because of {stop}")
            return None

    def _sent_bytes_per_node(self) -> dict[str, int]:
        """Return the bytes that a node has sent since the last call, by wire, as a mean over all nodes.

        DiLoCo's replica groups do not communicate between synchronizations. The bytes are therefore summed over the
        ranks of this rank's group, and multiplied by the number of groups.
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
    """Return Megatron-LM's line about a rank's CUDA memory, for the log after the first interval; None on a CPU."""
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
    """Return the peak of allocated memory on a CUDA device, or this process's peak resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB, macOS bytes
