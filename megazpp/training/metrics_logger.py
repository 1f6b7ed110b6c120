"""Combine the measurements of all ranks into log lines, files of the run folder, and records for wandb and TensorBoard.

The end of a run prints a table of the bytes that the training steps sent over each wire, and compares the bytes between
nodes with ZeRO-3. The bytes of the table are counted at each collective (parallel/axis.py). Only ZeRO-3's figure is
calculated, from the sizes of the shards:

    k micro-batches, W data ranks, M_w bytes of weights (compute dtype), M_g bytes of gradients (reduction dtype):
    a ring sends (W - 1) / W x k x (2 M_w + M_g) over each node's uplink, with N > 1 nodes. This is about 3 k M bytes
    if both have 16 bits and M bytes.
"""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megazpp.base.program import MEGA, aligned, times_fewer
from megazpp.checkpoint.metadata import TrainingProgress
from megazpp.model.router import router_metrics
from megazpp.optim.clip import global_parameter_norm
from megazpp.parallel.axis import Traffic
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.parameters import existing_rows
from megazpp.topology.layout import AXES, EXPERT_AXES, NODE, WIRE_NAMES, WIRES
from megazpp.training.context import RunContext
from megazpp.training.metrics import NOTHING_SENT, IntervalRecord, Meter, StepRecord, closing_lines, validation_lines
from megazpp.training.objective import StopRequested
from megazpp.training.timers import StepRecorder
from megazpp.training.tracking import Tracker, TrackingConfig
from megazpp.zero.config import PrecisionConfig

SPIKE, SPIKE_STEPS = 10, 10  # a gradient norm above 10 times the median is logged, once 10 steps were recorded
MEBI = 1024 * 1024
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


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
        model: model whose parameter norm is recorded.
        zero3: returns ZeRO-3's traffic for a number of micro-batches.
        tracker: writes files, wandb and TensorBoard on rank 0; None on other ranks.
        timers: times that are reported after a log line; None without timers.
        validation, test: functions that evaluate held-out data; None without such data.
        metric: name of the value that they return, "lm_loss" or for example "reward".
        has_perplexity: whether the "lm_loss" is a mean of nats per token.
        give_up: raises StopRequested if a stop signal has arrived; evaluations call it between two batches.
        weights_for_evaluation: returns a context manager that is entered around each evaluation. DiLoCo uses it to
            evaluate R, the copy of the outer weights that each replica group has.
    """

    config: TrackingConfig
    run: RunContext
    meter: Meter
    _: KW_ONLY
    model: nn.Module
    zero3: Callable[[int], Zero3Traffic | None]
    tracker: Tracker | None = None
    timers: StepRecorder | None = None
    validation: Validation | None = None
    test: Validation | None = None
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
            named, axes = self.model.named_parameters(), (dims.tp, dims.shard)
            record.params_norm = float(global_parameter_norm(named, *axes, rows=existing_rows(self.model)))
        if log:
            with dims.counter.paused():
                record.metrics = {**record.metrics, **router_metrics(self.model, dims.world.all_reduce_)}

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
        if self.timers is not None and (times := self.timers.report_timers()):
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
        value = self._evaluate(self.validation)
        if value is None:
            return
        self.last_validation = (progress.iteration, value)
        short = f"iteration {progress.iteration:6d}  validation {self.metric.replace('lm_', '')} {value:.4f}"
        how: dict[str, Any] = {"metric": self.metric, "has_perplexity": self.has_perplexity}
        for line in validation_lines(f"iteration {progress.iteration}", value, **how):
            self.run.log(line, short="" if line.startswith("--") else short)
        if self.tracker is not None:
            self.tracker.validation(value, progress, **how)

    def _evaluate(self, evaluate: Validation | None) -> float | None:
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

    def finish(self, progress: TrainingProgress, *, evaluate: bool, unigram_entropy: float | None) -> None:
        """Run the last evaluations, then print the results of the run and write them to summary.json.

        Losses and the entropy of the validation text are nats per token. The training loss is the mean of the last log
        interval. Values that were not measured are None.

        Args:
            progress: progress at the end of the run.
            evaluate: whether to run the last validation and the test.
            unigram_entropy: entropy of the validation text's tokens, in nats per token; None if unknown.
        """
        # the last evaluations
        if evaluate and (self.last_validation is None or self.last_validation[0] != progress.iteration):
            self.validate(progress)
        test_loss = self._evaluate(self.test) if evaluate else None
        if test_loss is not None:
            where, how = f"iteration {progress.iteration} on test set", {"has_perplexity": self.has_perplexity}
            for line in validation_lines(where, test_loss, metric=self.metric, **how):
                self.run.log(line)
        # results, combined over ranks
        measured = None if self.last_validation is None else self.last_validation[1]
        used = torch.tensor(self.meter.cpu_seconds, dtype=torch.float64, device=self.run.device)
        peak = torch.tensor(float(peak_memory_bytes(self.run.device)), dtype=torch.float64, device=self.run.device)
        summary = self.meter.summary(cpu_seconds=float(self.run.dims.world.all_reduce_(used))) | {
            "final_loss": None if self.last_interval is None else self.last_interval.loss,
            "validation_loss": measured if self.metric == "lm_loss" else None,
            "unigram_entropy": unigram_entropy,
            "peak_memory_bytes": int(self.run.dims.world.max_(peak)),
            "iteration": progress.iteration,
            "test_loss": test_loss,
            "stop_reason": progress.stop_reason,
        }
        if self.metric != "lm_loss" and measured is not None:
            summary[f"validation_{self.metric}"] = measured
        # traffic of all training steps
        rows, compared = collect_traffic(self.run.dims, self.run.device), self.zero3(self.meter.micro_batches)
        if rows:
            self.run.log(traffic_table(rows, compared), short=traffic_in_words(rows, compared))
        summary |= {
            "traffic": [row._asdict() for row in rows],
            "zero3": None if compared is None else compared._asdict(),
        }
        # output
        self.run.log(closing_lines(summary, trained=self.last_interval is not None))
        if self.tracker is not None:
            self.tracker.summary(summary)

    def _sent_bytes_per_node(self) -> dict[str, int]:
        """Return the bytes sent since the last call, by wire: the sum over all ranks, divided by the number of nodes.

        With DiLoCo the sum is over this rank's replica group only, scaled to all groups, because groups do not
        communicate between synchronizations.
        """
        dims = self.run.dims
        counter, nodes = dims.counter, dims.layout.cluster.num_nodes
        now = [*(counter.sent_bytes(wire) for wire in WIRES), counter.sent_on_axis("replica_group")]
        since = torch.tensor(now, dtype=torch.int64) - torch.tensor(self._sent_before, dtype=torch.int64)
        self._sent_before, since = now, since.to(self.run.device)
        if dims.replica_group.size == 1:
            total = dims.world.all_reduce_(since)
        else:
            with counter.paused():
                total = dims.replicate.all_reduce_(dims.shard.all_reduce_(dims.tp.all_reduce_(since)))
        return dict(zip((*WIRES, "replica_group"), (total * dims.replica_group.size // nodes).tolist(), strict=True))


class TrafficRow(NamedTuple):
    """The traffic of one collective on one mesh axis and one wire, over all training steps."""

    collective: str
    axis: str
    wire: str
    calls: int  # number of calls on one rank
    sent_bytes: int  # bytes sent by all ranks of a node, mean over nodes


class Zero3Traffic(NamedTuple):
    """The bytes that ZeRO-3 would have sent between nodes in the same steps."""

    weight_bytes: int  # M_w: weights of the whole model in the compute dtype, with the padding of the shards
    gradient_bytes: int  # M_g: gradients of the whole model in the reduction dtype, with the same padding
    micro_batches: int  # micro-batches per rank in all steps together
    cross_bytes: int  # bytes over one node's uplink
    formula: str  # the formula of `cross_bytes`, with its numbers


def collect_traffic(dims: ParallelDims, device: torch.device) -> list[TrafficRow]:
    """Return the counted traffic, equal on all ranks; rows without bytes are omitted.

    Args:
        dims: mesh axes of the job, with this rank's counter.
        device: device for the reduction over ranks.
    """
    table = dims.counter.table()
    keys = list(itertools.product(WIRES, (*AXES, NODE, *EXPERT_AXES), COLLECTIVES))
    mine = [table.get(key, Traffic(0, 0)) for key in keys]
    calls = dims.world.max_(torch.tensor([t.calls for t in mine], dtype=torch.int64, device=device))
    sent = dims.world.all_reduce_(torch.tensor([t.sent_bytes for t in mine], dtype=torch.int64, device=device))
    num_nodes = dims.layout.cluster.num_nodes
    return [
        TrafficRow(collective, axis, wire, int(n), int(total) // num_nodes)
        for (wire, axis, collective), n, total in zip(keys, calls, sent, strict=True)
        if total
    ]


def zero3_traffic(
    shard_elements: int, dims: ParallelDims, precision: PrecisionConfig, micro_batches: int
) -> Zero3Traffic | None:
    """Calculate ZeRO-3's traffic between nodes for the same ranks and micro-batches.

    Args:
        shard_elements: padded elements of all parameters on one rank.
        dims: mesh axes of the job.
        precision: dtypes of the compute and of the gradient reduction.
        micro_batches: micro-batches per rank in all steps together.
    Returns:
        the traffic, or None if each copy of the model is within one node.
    """
    layout = dims.layout
    if layout.cross * layout.replica_group == 1:
        return None
    elements = shard_elements * layout.shard * layout.tp
    weights, gradients = elements * precision.param_dtype.itemsize, elements * precision.reduce_dtype.itemsize
    ranks = layout.shard * layout.replica_group
    formula = (
        f"(W - 1)/W x k x (2 M_w + M_g) with W = {ranks} data ranks, k = {micro_batches} micro-batches in all, "
        f"M_w = {weights / MEGA:.3f} MB of weights, M_g = {gradients / MEGA:.3f} MB of gradients"
    )
    cross = micro_batches * (2 * weights + gradients) * (ranks - 1) // ranks
    domains, nodes = layout.cross * layout.replicate * layout.replica_group, layout.cluster.num_nodes
    if domains != nodes:  # NVLink domains or tensor parallelism over several nodes: these share a ring's bytes
        formula += f", over {nodes // domains} nodes each"
        cross = cross * domains // nodes
    return Zero3Traffic(weights, gradients, micro_batches, cross, formula)


def traffic_in_words(rows: list[TrafficRow], zero3: Zero3Traffic | None) -> str:
    """Return one line about the bytes between nodes; "" if none were sent or less than 5 % was saved against ZeRO-3."""
    cross = sum(row.sent_bytes for row in rows if row.wire == "cross")
    fewer = times_fewer(cross, 0 if zero3 is None else zero3.cross_bytes)
    return f"between nodes: {cross / MEGA:,.1f} MB per node, {fewer} than ZeRO-3" if fewer else ""


def traffic_table(rows: list[TrafficRow], zero3: Zero3Traffic | None) -> str:
    """Return the traffic rows as an aligned table, with the comparison with ZeRO-3 below."""
    header = ("collective", "axis", "wire", "calls", "MB sent per node")
    cells = ((r.collective, r.axis, WIRE_NAMES[r.wire], str(r.calls), f"{r.sent_bytes / MEGA:.3f}") for r in rows)
    lines = [header, *cells]
    text = list(aligned(lines))
    if zero3 is not None:
        cross = sum(row.sent_bytes for row in rows if row.wire == "cross")
        ratio = f", {zero3.cross_bytes / cross:.1f} times as much" if cross else ""
        text.append(
            f"between nodes: {cross / MEGA:.3f} MB per node; ZeRO-3 would have sent {zero3.cross_bytes / MEGA:.3f} MB"
            f"{ratio}: {zero3.formula}"
        )
    return "\n".join(text)


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
