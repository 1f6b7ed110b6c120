"""What the training steps put on every wire, beside what ZeRO-3 would have put on the wire between nodes.

The rows are counted where the bytes leave (parallel/axis.py). Only ZeRO-3's figure is computed, from the shards:

    k micro-batches, W data ranks, M_w bytes of weights (compute format), M_g bytes of gradients (reduction format):
    a ring sends (W - 1) / W x k x (2 M_w + M_g) over each node's uplink, with N > 1 nodes; 3 k M where both are 16 bit
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from megazpp.formatting import MEGA, aligned
from megazpp.parallel.axis import Traffic
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.layout import AXES, WIRES
from megazpp.zero.precision import PrecisionConfig

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


class TrafficRow(NamedTuple):
    """One collective of one axis over one wire, all training steps together.

    Attributes:
        calls: of one rank.
        sent_bytes: by all ranks of a node, the mean over nodes.
    """

    collective: str
    axis: str
    wire: str
    calls: int
    sent_bytes: int


class Zero3Traffic(NamedTuple):
    """ZeRO-3's traffic between nodes for the same steps.

    Attributes:
        weight_bytes, gradient_bytes: of the whole model, padded as it is sharded (M_w and M_g).
        micro_batches: of all steps together.
        cross_bytes: over one node's uplink.
        formula: with the numbers in it.
    """

    weight_bytes: int
    gradient_bytes: int
    micro_batches: int
    cross_bytes: int
    formula: str


def collect_traffic(dims: ParallelDims, device: torch.device) -> list[TrafficRow]:
    """The counted rows, the same on all ranks; rows without bytes are left out."""
    table = dims.counter.table()
    keys = list(itertools.product(WIRES, AXES, COLLECTIVES))
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
    """ZeRO-3 with the same model, ranks, formats and micro-batches; None if a copy of the model is within one node.

    Args:
        shard_elements: elements of one rank's shards.
        micro_batches: of all training steps together.
    """
    layout = dims.layout
    if layout.cross == 1:
        return None
    elements = shard_elements * layout.shard * layout.tp
    weights, gradients = elements * precision.param_dtype.itemsize, elements * precision.reduce_dtype.itemsize
    ranks = layout.shard
    formula = (
        f"(W - 1)/W x k x (2 M_w + M_g) with W = {ranks} data ranks, k = {micro_batches} micro-batches in all, "
        f"M_w = {weights / MEGA:.3f} MB of weights, M_g = {gradients / MEGA:.3f} MB of gradients"
    )
    cross = micro_batches * (2 * weights + gradients) * (ranks - 1) // ranks
    islands, nodes = layout.cross * layout.replicate, layout.cluster.num_nodes
    if islands != nodes:  # NVLink racks, or tensor parallelism over nodes: several nodes share what a ring sends
        formula += f", over {nodes // islands} nodes each"
        cross = cross * islands // nodes
    return Zero3Traffic(weights, gradients, micro_batches, cross, formula)


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


def traffic_summary(rows: list[TrafficRow], zero3: Zero3Traffic | None) -> dict[str, Any]:
    """The same for summary.json."""
    return {"traffic": [row._asdict() for row in rows], "zero3": None if zero3 is None else zero3._asdict()}
