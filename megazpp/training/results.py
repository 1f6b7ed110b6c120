"""The results of a run at its end: the last evaluations, the bytes of all steps, and the lines that print them.

A table shows the bytes that the training steps have sent over each wire. Below it, the bytes between nodes are compared
with the bytes that ZeRO-3 would have sent. The bytes of the table are counted at each collective (parallel/axis.py).
The bytes of ZeRO-3 are calculated from the sizes of the shards:

    With k micro-batches per rank, W data ranks on several nodes, M_w bytes of weights (compute dtype) and M_g bytes of
    gradients (reduction dtype), a ring sends (W - 1) / W x k x (2 M_w + M_g) bytes over each node's uplink. Forward and
    backward each gather the weights, and backward reduces the gradients. If weights and gradients both have 16 bits and
    M bytes, the uplink carries about 3 k M bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megazpp.base.program import MEGA, aligned, times_fewer
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.axis import Traffic
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.layout import AXES, DOWNLOAD, EXPERT_AXES, HOST, NODE, PCIE, UPLOAD, WIRE_NAMES, WIRES
from megazpp.training.metrics import INNER_LOSS, validation_lines
from megazpp.training.metrics_logger import MetricsRecorder, Validation, peak_memory_bytes
from megazpp.zero.config import PrecisionConfig

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send")


def record_results(
    recorder: MetricsRecorder,
    progress: TrainingProgress,
    *,
    evaluate: bool,
    test: Validation | None = None,
    unigram_entropy: float | None,
    zero3: Callable[[int], Zero3Traffic | None],
) -> None:
    """Run the last evaluations, then print the results of the run and write them to summary.json. All ranks call this.

    Losses of language models and the entropy of the validation text are in nats per token. The training loss is the
    mean of the last log interval. Values that were not measured are None.

    Args:
        recorder: recorder of the run's steps and evaluations.
        progress: progress at the end of the run.
        evaluate: True runs the last validation, unless it has been run at this iteration, and the test.
        test: function that evaluates the test data; None without such data.
        unigram_entropy: entropy of the validation text's single tokens, in nats per token; None if unknown.
        zero3: function from the run's number of micro-batches per rank to the bytes that ZeRO-3 would have sent.
    """
    # ---- run the last evaluations
    run, meter, metric = recorder.run, recorder.meter, recorder.metric
    if evaluate and (recorder.last_validation is None or recorder.last_validation[0] != progress.iteration):
        recorder.validate(progress)
    test_loss = recorder.evaluate(test) if evaluate else None
    if test_loss is not None:
        where, how = f"iteration {progress.iteration} on test set", {"has_perplexity": recorder.has_perplexity}
        for line in validation_lines(where, test_loss, metric=metric, **how):
            run.log(line)
    # ---- combine the losses, the CPU time of all ranks and their highest memory peak into the summary
    measured = None if recorder.last_validation is None else recorder.last_validation[1]
    used = torch.tensor(meter.cpu_seconds, dtype=torch.float64, device=run.device)
    peak = torch.tensor(float(peak_memory_bytes(run.device)), dtype=torch.float64, device=run.device)
    summary = meter.summary(cpu_seconds=float(run.dims.world.all_reduce_(used))) | {
        "final_loss": None if recorder.last_interval is None else recorder.last_interval.loss,
        "validation_loss": measured if metric == "lm_loss" else None,
        "unigram_entropy": unigram_entropy,
        "peak_memory_bytes": int(run.dims.world.max_(peak)),
        "iteration": progress.iteration,
        "test_loss": test_loss,
        "stop_reason": progress.stop_reason,
    }
    if metric != "lm_loss" and measured is not None:
        summary[f"validation_{metric}"] = measured
    # ---- collect the bytes that all training steps have sent, and compare them with ZeRO-3
    rows, compared = collect_traffic(run.dims, run.device), zero3(meter.micro_batches)
    if rows:
        run.log(traffic_table(rows, compared), short=traffic_in_words(rows, compared))
    summary |= {"traffic": [row._asdict() for row in rows], "zero3": None if compared is None else compared._asdict()}
    # ---- print the last lines of the log, and write summary.json
    unit = " nats per token" if recorder.has_perplexity else ""
    run.log(closing_lines(summary, trained=recorder.last_interval is not None, unit=unit))
    recorder.tracker.summary(summary)


class TrafficRow(NamedTuple):
    """The number of calls of one collective on one mesh axis and wire in all training steps, and the bytes sent."""

    collective: str
    axis: str
    wire: str
    calls: int  # number of calls on the rank with the most calls
    sent_bytes: int  # bytes that all ranks of a node have sent together, as a mean over nodes


class Zero3Traffic(NamedTuple):
    """The bytes that ZeRO-3 would have sent between nodes in the steps of the run."""

    weight_bytes: int  # bytes of the unsharded weights in the compute dtype, with the padding of the shards
    gradient_bytes: int  # bytes of the unsharded gradients in the reduction dtype, with the padding of the shards
    micro_batches: int  # number of micro-batches per rank in all steps together
    cross_bytes: int  # bytes that ZeRO-3 would have sent over one node's uplink
    formula: str  # calculation of `cross_bytes` in words, for the log


def collect_traffic(dims: ParallelDims, device: torch.device) -> list[TrafficRow]:
    """Return the bytes that the run's training steps have sent, by wire, axis and collective. All ranks call this.

    The result is equal on all ranks. Collectives that sent no bytes are left out.

    Args:
        dims: mesh axes of the job, with this rank's traffic counter.
        device: device for the reduction over ranks.
    """
    table = dims.counter.table()
    keys = list(itertools.product(WIRES, (*AXES, NODE, *EXPERT_AXES), COLLECTIVES))
    keys += [(PCIE, HOST, UPLOAD), (PCIE, HOST, DOWNLOAD)]
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
    """Calculate the bytes that ZeRO-3 would send between nodes with the ranks of this job.

    ZeRO-3 has no replica groups, so the data ranks of all DiLoCo groups form one ring.

    Args:
        shard_elements: number of elements in one rank's shards of all parameters, with padding.
        dims: mesh axes of the job.
        precision: dtypes of compute and gradient reduction.
        micro_batches: number of micro-batches per rank in all steps together.
    Returns:
        The bytes with their calculation. None if the run has no DiLoCo replica groups, and each copy of the model is
        sharded inside one local domain.
    """
    layout = dims.layout
    if layout.cross * layout.replica_group == 1:
        return None
    elements = shard_elements * layout.shard * layout.tp
    weights, gradients = elements * precision.param_dtype.itemsize, elements * precision.reduce_dtype.itemsize
    ranks = layout.shard * layout.replica_group
    formula = (
        f"in each of {micro_batches} micro-batches it gathers {weights / MEGA:.3f} MB of weights twice and reduces "
        f"{gradients / MEGA:.3f} MB of gradients; a ring of {ranks} ranks sends "
        f"{ranks - 1}/{ranks} of them over an uplink"
    )
    cross = micro_batches * (2 * weights + gradients) * (ranks - 1) // ranks
    domains, nodes = layout.cross * layout.replicate * layout.replica_group, layout.cluster.num_nodes
    # A local domain may span several nodes, in an NVLink rack or with tensor parallelism across nodes. The uplinks of
    # these nodes then share the bytes of one ring, and each uplink carries only a part of the bytes.
    if domains != nodes:
        formula += f", which {nodes // domains} nodes share"
        cross = cross * domains // nodes
    return Zero3Traffic(weights, gradients, micro_batches, cross, formula)


def traffic_in_words(rows: list[TrafficRow], zero3: Zero3Traffic | None) -> str:
    """Return a line for a terminal that compares the bytes sent between nodes with ZeRO-3's.

    Returns "" if no bytes were sent between nodes, or if ZeRO-3 would not have sent at least 5 % more.
    """
    cross = sum(row.sent_bytes for row in rows if row.wire == "cross")
    fewer = times_fewer(cross, 0 if zero3 is None else zero3.cross_bytes)
    return f"between nodes: {cross / MEGA:,.1f} MB per node, {fewer} than ZeRO-3" if fewer else ""


def traffic_table(rows: list[TrafficRow], zero3: Zero3Traffic | None) -> str:
    """Return the bytes that the run has sent as an aligned table for the log, followed by a comparison with ZeRO-3.

    Args:
        rows: bytes by collective, axis and wire.
        zero3: bytes that ZeRO-3 would have sent between nodes; None leaves out the comparison.
    """
    header = ("collective", "axis", "wire", "calls", "MB sent per node")
    cells = ((r.collective, r.axis, WIRE_NAMES[r.wire], str(r.calls), f"{r.sent_bytes / MEGA:.3f}") for r in rows)
    text = list(aligned([header, *cells]))
    if zero3 is not None:
        cross = sum(row.sent_bytes for row in rows if row.wire == "cross")
        ratio = f", {zero3.cross_bytes / cross:.1f} times as much" if cross else ""
        text.append(
            f"between nodes in training steps: {cross / MEGA:.3f} MB per node; ZeRO-3 would have sent "
            f"{zero3.cross_bytes / MEGA:.3f} MB{ratio}: {zero3.formula}"
        )
    return "\n".join(text)


def closing_lines(summary: Mapping[str, Any], *, trained: bool, unit: str) -> str:
    """Return the closing report of a run as text for the log.

    Args:
        summary: results of the run, as in summary.json.
        trained: True if this process has taken training steps.
        unit: unit of the training loss, with a space before it; "" for losses without a unit, such as DPO's.
    """
    lines = []
    if summary["stop_reason"]:
        lines.append(f"stopped by {summary['stop_reason']}")
    if trained:
        lines.append(
            f"trained {summary['iterations']} iterations in {summary['seconds']:.1f} s: "
            f"{summary['tokens_per_second']:.0f} tokens/s, {summary['cpu_seconds_per_token'] * 1e6:.1f} CPU "
            f"microseconds per token, {summary['data_wait_share']:.1%} of the time waiting for data"
        )
        if "synchronizations" in summary:
            lines.append(
                f"replica groups synchronized {summary['synchronizations']} times, "
                f"{summary.get('replica_group_bytes_per_step', 0) / MEGA:.3f} MB per node and step between them; inner "
                f"loss {summary[INNER_LOSS]:.4f}"
            )
        lines.append(f"training loss of the last log interval: {summary['final_loss']:.4f}{unit}")
    if summary["validation_loss"] is not None:
        entropy = summary["unigram_entropy"]
        of_text = "" if entropy is None else f"; unigram entropy of the validation text: {entropy:.4f} nats per token"
        lines.append(f"validation loss: {summary['validation_loss']:.4f}{of_text}")
    return "\n".join(lines)
