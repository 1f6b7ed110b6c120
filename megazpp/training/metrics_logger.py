"""Turns what each rank measured into what the run did: printed, written to the run folder, sent to the sinks.

At the end comes a table of what the training steps put on every wire, beside what ZeRO-3 would have put on the wire
between nodes. The rows are counted where the bytes leave (parallel/axis.py). Only ZeRO-3's figure is computed, from the
shards:

    k micro-batches, W data ranks, M_w bytes of weights (compute format), M_g bytes of gradients (reduction format):
    a ring sends (W - 1) / W x k x (2 M_w + M_g) over each node's uplink, with N > 1 nodes; 3 k M where both are 16 bit
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megazpp.base.program import MEGA, aligned, times_fewer
from megazpp.checkpoint.metadata import TrainingProgress
from megazpp.model.moe import router_metrics
from megazpp.optim.clip import global_parameter_norm
from megazpp.parallel.axis import Traffic
from megazpp.parallel.dims import EXPERT_NAMES, ParallelDims
from megazpp.tensor_parallel.parameters import existing_rows
from megazpp.topology.layout import AXES, NODE, WIRES
from megazpp.training.context import RunContext
from megazpp.training.flops import memory_line, peak_memory_bytes
from megazpp.training.metrics import NOTHING_SENT, IntervalRecord, Meter, StepRecord, closing_lines, validation_lines
from megazpp.training.timers import StepRecorder
from megazpp.training.tracking import Tracker, TrackingConfig
from megazpp.zero.config import PrecisionConfig

SPIKE, SPIKE_STEPS = 10, 10  # a norm of so many medians is named, once so many steps were seen
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


Validation = Callable[[], float]  # evaluates held-out data; the same number on all ranks


@dataclass
class MetricsRecorder:
    """Every rank calls every method (some communicate); only rank 0 has a `tracker` and a console that prints.

    Args:
        model: whose parameters' norm is recorded.
        zero3: number of micro-batches to what ZeRO-3 would have sent.
        tracker: writes on rank 0.
        timers: reported after a log line.
        validation, test: evaluate held-out data; None without.
        metric: what they measure: "lm_loss", or "reward".
        has_perplexity: the "lm_loss" is nats per token.
        weights_for_evaluation: entered around each evaluation.
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
    weights_for_evaluation: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self.last_interval: IntervalRecord | None = None
        self.last_validation: tuple[int, float] | None = None  # the iteration, and what was measured
        self._sent_before = list(NOTHING_SENT.values())
        self._norms: deque[float] = deque(maxlen=100)
        self._uneven: list[StepRecord] = []  # steps since the log line of which this rank knows its own tokens only

    def step(self, record: StepRecord, *, last: bool) -> None:
        """Record a step; at a log interval and at the `last` one also print and write a line."""
        log = last or self.logs(record.iteration)
        sent = self._sent_bytes_per_node() if log else NOTHING_SENT  # before the norm below sends some
        if log and self.config.log_params_norm:
            named, axes = self.model.named_parameters(), (self.run.dims.tp, self.run.dims.shard)
            norm = global_parameter_norm(named, *axes, rows=existing_rows(self.model))
            record.params_norm = float(norm)
        if log:
            with self.run.dims.counter.paused():
                record.metrics = {**record.metrics, **router_metrics(self.model, self.run.dims.world.all_reduce_)}
        self.meter.add(record)
        if not self.meter.whole_samples:
            self._uneven.append(record)
            if log:
                self._sum_tokens()
        self._note_spike(record)
        self.run.console.advance(record.loss)
        if self.tracker is not None:
            self.tracker.step(record)
        if log:
            self._log(record.iteration, sent)

    def _sum_tokens(self) -> None:
        """Add up each step's tokens over the data ranks, whose rows have different lengths: one all-reduce."""
        dims, steps, self._uneven = self.run.dims, self._uneven, []
        with dims.counter.paused():
            own = torch.tensor([step.tokens for step in steps], dtype=torch.int64, device=self.run.device)
            for step, tokens in zip(steps, dims.sum_over_islands_(own).tolist(), strict=True):
                step.tokens = tokens

    def _note_spike(self, record: StepRecord) -> None:
        """Say where a step's gradients are `SPIKE` times as long as the median of the steps before it."""
        norm = record.grad_norm
        if norm is None or not math.isfinite(norm):
            return
        usual = statistics.median(self._norms) if len(self._norms) >= SPIKE_STEPS else 0.0
        if 0.0 < SPIKE * usual < norm:  # a norm above a median of zero is no multiple of it
            self.run.log(
                f"note: iteration {record.iteration}: grad norm {norm:.3f} is {norm / usual:.0f} x the median of the "
                f"{len(self._norms)} steps before it, {usual:.3f}"
            )
        self._norms.append(norm)

    def logs(self, iteration: int) -> bool:
        """True if a log interval ends with the iteration."""
        return iteration % self.config.log_interval == 0

    def validate(self, progress: TrainingProgress) -> None:
        """Evaluate, show and record, if there is validation data."""
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
        if evaluate is None:
            return None
        with self.weights_for_evaluation():
            return evaluate()

    def finish(self, progress: TrainingProgress, *, evaluate: bool, unigram_entropy: float | None) -> None:
        """The last evaluations, then what the run came to: printed, and written to summary.json.

        Losses and the validation text's entropy are nats per token, the training loss is the last log interval's; None
        where there was none.
        """
        if evaluate and (self.last_validation is None or self.last_validation[0] != progress.iteration):
            self.validate(progress)
        test_loss = self._evaluate(self.test) if evaluate else None
        if test_loss is not None:
            where, how = f"iteration {progress.iteration} on test set", {"has_perplexity": self.has_perplexity}
            for line in validation_lines(where, test_loss, metric=self.metric, **how):
                self.run.log(line)
        measured = None if self.last_validation is None else self.last_validation[1]
        used = torch.tensor(self.meter.cpu_seconds, dtype=torch.float64, device=self.run.device)
        peak = torch.tensor(float(peak_memory_bytes(self.run.device)), dtype=torch.float64, device=self.run.device)
        summary = self.meter.summary(cpu_seconds=float(self.run.dims.world.all_reduce_(used))) | {
            "final_loss": None if self.last_interval is None else self.last_interval.fields["lm_loss"],
            "validation_loss": measured if self.metric == "lm_loss" else None,
            "unigram_entropy": unigram_entropy,
            "peak_memory_bytes": int(self.run.dims.world.max_(peak)),
            "iteration": progress.iteration,
            "test_loss": test_loss,
            "stop_reason": progress.stop_reason,
        }
        if self.metric != "lm_loss" and measured is not None:
            summary[f"validation_{self.metric}"] = measured
        rows, compared = collect_traffic(self.run.dims, self.run.device), self.zero3(self.meter.micro_batches)
        if rows:
            self.run.log(traffic_table(rows, compared), short=traffic_in_words(rows, compared))
        summary |= {
            "traffic": [row._asdict() for row in rows],
            "zero3": None if compared is None else compared._asdict(),
        }
        self.run.log(closing_lines(summary, trained=self.last_interval is not None))
        if self.tracker is not None:
            self.tracker.summary(summary)

    def _log(self, iteration: int, sent: Mapping[str, int]) -> None:
        first, peak = self.last_interval is None, peak_memory_bytes(self.run.device)
        interval = self.last_interval = self.meter.interval(sent, peak_memory_bytes=peak)
        self.run.log(interval.line, short=interval.short_line)
        if first and (line := memory_line(self.run.dims.world.rank, iteration, self.run.device)):
            self.run.log(line)
        if self.timers is not None and (times := self.timers.report_timers()):
            self.run.log(times)
        if self.tracker is not None:
            self.tracker.interval(interval)

    def _sent_bytes_per_node(self) -> dict[str, int]:
        """Bytes sent by wire since the last call by all ranks together, divided by the number of nodes.

        With local steps by those of this rank's island: others are not asked.
        """
        dims = self.run.dims
        counter, nodes = dims.counter, dims.layout.cluster.num_nodes
        now = [*(counter.sent_bytes(wire) for wire in WIRES), counter.sent_on_axis("island")]
        since = torch.tensor(now, dtype=torch.int64) - torch.tensor(self._sent_before, dtype=torch.int64)
        self._sent_before, since = now, since.to(self.run.device)
        if dims.island.size == 1:
            total = dims.world.all_reduce_(since)
        else:
            with counter.paused():
                total = dims.replicate.all_reduce_(dims.shard.all_reduce_(dims.tp.all_reduce_(since)))
        return dict(zip((*WIRES, "island"), (total * dims.island.size // nodes).tolist(), strict=True))


class TrafficRow(NamedTuple):
    """One collective of one axis over one wire, all training steps together."""

    collective: str
    axis: str
    wire: str
    calls: int  # of one rank
    sent_bytes: int  # by all ranks of a node, the mean over nodes


class Zero3Traffic(NamedTuple):
    """ZeRO-3's traffic between nodes for the same steps."""

    weight_bytes: int  # of the whole model, padded as it is sharded (M_w)
    gradient_bytes: int  # M_g
    micro_batches: int  # of all steps together
    cross_bytes: int  # over one node's uplink
    formula: str  # with the numbers in it


def collect_traffic(dims: ParallelDims, device: torch.device) -> list[TrafficRow]:
    """The counted rows, the same on all ranks; rows without bytes are left out."""
    table = dims.counter.table()
    keys = list(itertools.product(WIRES, (*AXES, NODE, *EXPERT_NAMES.values()), COLLECTIVES))
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
    """ZeRO-3 with the same ranks, formats, elements of a rank's shards and micro-batches of all steps together.

    None if a copy of the model is within one node.
    """
    layout = dims.layout
    if layout.cross * layout.island == 1:
        return None
    elements = shard_elements * layout.shard * layout.tp
    weights, gradients = elements * precision.param_dtype.itemsize, elements * precision.reduce_dtype.itemsize
    ranks = layout.shard * layout.island
    formula = (
        f"(W - 1)/W x k x (2 M_w + M_g) with W = {ranks} data ranks, k = {micro_batches} micro-batches in all, "
        f"M_w = {weights / MEGA:.3f} MB of weights, M_g = {gradients / MEGA:.3f} MB of gradients"
    )
    cross = micro_batches * (2 * weights + gradients) * (ranks - 1) // ranks
    domains, nodes = layout.cross * layout.replicate * layout.island, layout.cluster.num_nodes
    if domains != nodes:  # NVLink racks, or tensor parallelism over nodes: several nodes share what a ring sends
        formula += f", over {nodes // domains} nodes each"
        cross = cross * domains // nodes
    return Zero3Traffic(weights, gradients, micro_batches, cross, formula)


def traffic_in_words(rows: list[TrafficRow], zero3: Zero3Traffic | None) -> str:
    """The bytes between nodes in one line; nothing where there is one node, or ZeRO-3 would have sent the same."""
    cross = sum(row.sent_bytes for row in rows if row.wire == "cross")
    fewer = times_fewer(cross, 0 if zero3 is None else zero3.cross_bytes)
    return f"between nodes: {cross / MEGA:,.1f} MB per node, {fewer} than ZeRO-3" if fewer else ""


def traffic_table(rows: list[TrafficRow], zero3: Zero3Traffic | None) -> str:
    """The rows and the comparison as text."""
    header = ("collective", "axis", "wire", "calls", "MB sent per node")
    lines = [header, *((r.collective, r.axis, r.wire, str(r.calls), f"{r.sent_bytes / MEGA:.3f}") for r in rows)]
    text = list(aligned(lines))
    if zero3 is not None:
        cross = sum(row.sent_bytes for row in rows if row.wire == "cross")
        ratio = f", {zero3.cross_bytes / cross:.1f} times as much" if cross else ""
        text.append(
            f"between nodes: {cross / MEGA:.3f} MB per node; ZeRO-3 would have sent {zero3.cross_bytes / MEGA:.3f} MB"
            f"{ratio}: {zero3.formula}"
        )
    return "\n".join(text)
