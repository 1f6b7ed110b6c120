"""Combine the measurements of all ranks into log lines, files of the run folder, and records for wandb and TensorBoard.

Only the `Tracker` of rank 0 writes records. Each log interval is a record in metrics.jsonl, wandb and TensorBoard
(sinks.py), and each validation is a record in validation.jsonl, wandb and TensorBoard. Single steps are not recorded.
The results at the end of a run are in results.py.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch

from megazpp.model.router import router_metrics
from megazpp.optim.clip import global_parameter_norm
from megazpp.optim.schedule import TrainingProgress
from megazpp.tensor_parallel.parameters import existing_rows
from megazpp.topology.layout import WIRES
from megazpp.training.config import TrackingConfig
from megazpp.training.context import RunContext, RunFolder
from megazpp.training.metrics import NOTHING_SENT, IntervalRecord, Meter, StepRecord, validation_lines
from megazpp.training.objective import StopRequested
from megazpp.zero.sharding import Sharding

# A gradient norm above SPIKE times the median of earlier norms is logged, after the first SPIKE_STEPS steps
SPIKE, SPIKE_STEPS = 10, 10
MEBI = 1024 * 1024

# A function that evaluates held-out data, and returns the result, which is equal on all ranks. Its argument is a
# function that it calls before each batch, for example to end the evaluation after a stop signal.
Validation = Callable[[Callable[[], None]], float]


class Sink(Protocol):
    """A destination for the scalars of a run: wandb or TensorBoard (sinks.py). Its methods may raise any exception."""

    name: str

    def write(self, scalars: Mapping[str, float], *, iteration: int) -> None:
        """Record scalars, by name, at an iteration."""

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        """Record the results of the run, numbers and strings by name."""

    def close(self, *, exit_code: int) -> None:
        """Write all pending records, and close the destination. `exit_code` is 1 if the run has failed, otherwise 0."""


class Tracker(AbstractContextManager["Tracker"]):
    """The writer of a run's records: files of the run folder, wandb and TensorBoard.

    It is a context manager around the run. At the end it closes wandb and TensorBoard, and unlocks the run folder. If
    recording fails (a full disk, a lost network), a warning is printed once for each file or sink, and training
    continues. The log line on stdout still has the numbers.

    Args:
        folder: the run folder on rank 0; None on other ranks, where nothing is recorded.
        sinks: the sinks that `open_sinks` has opened: wandb, TensorBoard, both or none.
    """

    def __init__(self, folder: RunFolder | None = None, sinks: Sequence[Sink] = ()) -> None:
        self.folder, self.sinks = folder, sinks
        self._failed = set[str]()  # names of sinks whose failure has been reported by a warning

    def record(self, name: str, row: Mapping[str, Any]) -> None:
        """Append `row` as a line of JSON to the file NAME.jsonl, and write its numbers to wandb and TensorBoard.

        There, the number KEY of the row has the name NAME/KEY. The row has the key "iteration".
        """
        if self.folder is not None:
            self.folder.append(f"{name}.jsonl", row)
        scalars = {f"{name}/{key}": value for key, value in row.items() if isinstance(value, int | float)}
        self._each("write", scalars, iteration=row["iteration"])

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the results of the run to summary.json. Write its numbers and strings to wandb and TensorBoard too."""
        if self.folder is not None:
            with self.folder.surviving("summary.json"):
                self.folder.write_json("summary.json", values, indent=2)
        scalars = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
        self._each("summarize", scalars, iteration=values["iteration"])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close wandb and TensorBoard, and unlock the run folder. An exception marks the wandb run as failed."""
        self._each("close", exit_code=0 if error is None else 1)
        if self.folder is not None:
            self.folder.unlock()

    def _each(self, method: str, *values: Any, **named: Any) -> None:
        """Call a method of every sink (wandb, TensorBoard). After a sink has failed, only its `close` is called."""
        for sink in self.sinks:
            if sink.name in self._failed and method != "close":
                continue
            try:
                getattr(sink, method)(*values, **named)
            except Exception as error:  # wandb and TensorBoard may raise any exception, and training has to continue
                if sink.name not in self._failed:
                    self._failed.add(sink.name)
                    print(
                        f"warning: {sink.name}: {error}; it records no more values, and training continues", flush=True
                    )


@dataclass
class MetricsRecorder:
    """The recorder of a run's steps and evaluations: log lines, files of the run folder, wandb and TensorBoard.

    Every rank calls every method, because some methods communicate. Only the tracker and the console of rank 0 write.

    Args:
        config: flags for logging.
        run: process groups, device, console and run folder.
        meter: meter that sums over the steps, and summarizes log intervals.
        sharding: handle of the model whose parameter norm is recorded.
        tracker: writer of the run folder's files, of wandb and TensorBoard, which writes nothing on other ranks than 0.
        report_timers: function that returns the lines with the timers' times, which follow a log line; or None if no
            flag selects timers.
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
    tracker: Tracker
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
        self._norms: deque[float] = deque(maxlen=100)  # gradient norms of the last 100 steps
        # Records since the last log line whose `tokens` counts only this data rank's tokens, until the next log line
        # replaces it by the sum over data ranks. Empty if all samples have the same length.
        self._uneven: list[StepRecord] = []

    def step(self, record: StepRecord, *, last: bool) -> None:
        """Record a training step. If a log interval ends with the step, or the step is the `last` one, log a line."""
        # ---- compute the numbers that only steps with a log line have
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

        # ---- add the record of the step to the meter
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
        self.tracker.record("metrics", interval.fields)

    def _note_spike(self, record: StepRecord) -> None:
        """Log a note if the step's gradient norm exceeds `SPIKE` times the median norm of up to 100 earlier steps."""
        norm = record.grad_norm
        if norm is None or not math.isfinite(norm):
            return
        usual = statistics.median(self._norms) if len(self._norms) >= SPIKE_STEPS else 0.0
        if 0.0 < SPIKE * usual < norm:  # no note if `usual` is 0: there are too few norms, or norm / median is infinite
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
        place = {"iteration": progress.iteration, "consumed_samples": progress.consumed_samples}
        self.tracker.record("validation", {**place, self.metric: value})

    def evaluate(self, evaluate: Validation | None) -> float | None:
        """Call `evaluate`, and return its result. With DiLoCo, the model has the outer weights during the call.

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
