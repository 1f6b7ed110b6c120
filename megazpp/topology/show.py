"""A layout as text: who is where, and which axis rides which wire.

who is where: rank (replica.cross.local.tp); [ ] shares the fastest wire
  node 0  [0 (0.0.0.0)  2 (0.0.0.1)]  [4 (0.0.1.0)  6 (0.0.1.1)]
  node 1  [1 (0.1.0.0)  3 (0.1.0.1)]  [5 (0.1.1.0)  7 (0.1.1.1)]

axis       ranks  groups  wire                    first group  carries
tp         2      4       domain                  0 2          activations
local      2      4       node                    0 4          the fast hop of weights and gradients
...
"""

from __future__ import annotations

from collections.abc import Iterator

from megazpp.base.program import aligned
from megazpp.topology.cluster import LinkKind
from megazpp.topology.layout import AXES, Layout

CARRIES = {
    "tp": "activations, several times per layer",
    "cp": "heads of attention for parts of samples, twice per layer",
    "local": "ZeRO++: the fast hop of weights and gradients",
    "cross": "ZeRO++: the slow hop, once per optimizer step",
    "shard": "ZeRO: weights and gradients, local and cross in one ring",
    "replicate": "gradients between copies",
    "island": "local steps: outer gradients and outer weights, once per synchronization",
}
SENDER = {"domain": "rank", "node": "rank", "network": "node"}  # whom a link's figure is for
MAX_NODES, MAX_RANKS = 16, 8


def topology_text(layout: Layout) -> str:
    """The whole map; of large clusters the first nodes."""
    coordinates = ".".join("replica" if axis == "replicate" else axis for axis in layout.coordinates)
    places = f"who is where: rank ({coordinates}); [ ] shares the fastest wire"
    notices = [f"note: {notice}" for notice in layout.notices]
    return "\n".join([layout.describe(), *notices, "", places, *_nodes(layout), "", *_axes(layout)])


def axis_wires(layout: Layout, axis: str) -> str:
    """The wires that the rings of an axis ride, with known figures; of several, how many ranks send over each."""

    def text(kind: LinkKind) -> str:
        link = layout.cluster.links.known.get(kind) if layout.cluster.links is not None else None
        return kind if link is None else f"{kind} ({link} per {SENDER[kind]})"

    counts = layout.links(axis)
    if len(counts) < 2:
        return "".join(map(text, counts)) or "-"
    ranks = sum(counts.values())
    return ", ".join(f"{text(kind)} from {count} of {ranks} ranks" for kind, count in counts.items())


def _place(layout: Layout, rank: int) -> str:
    return ".".join(str(layout.axis_ranks(axis, rank).index(rank)) for axis in layout.coordinates)


def _nodes(layout: Layout) -> Iterator[str]:
    cluster = layout.cluster
    per_node, per_domain = cluster.ranks_per_node, cluster.ranks_per_domain
    width = len(str(min(cluster.num_nodes, MAX_NODES) - 1))
    for node in range(min(cluster.num_nodes, MAX_NODES)):
        if per_domain > per_node and node * per_node % per_domain == 0:
            first = node * per_node // per_domain
            yield f"  domain {first}: nodes {node} to {node + per_domain // per_node - 1} share the fastest wire"
        domains = []
        for start in range(node * per_node, (node + 1) * per_node, min(per_domain, per_node)):
            ranks = [cluster.rank_at(position) for position in range(start, start + min(per_domain, per_node))]
            domains.append("[" + "  ".join(f"{rank} ({_place(layout, rank)})" for rank in ranks) + "]")
        yield f"  node {node:<{width}}  {'  '.join(domains)}"
    if cluster.num_nodes > MAX_NODES:
        yield f"  ... and {cluster.num_nodes - MAX_NODES} more nodes"


def _axes(layout: Layout) -> Iterator[str]:
    rows = [("axis", "ranks", "groups", "wire", "first group", "carries")]
    for axis in AXES:
        size = layout.axis_size(axis)
        if axis in ("cp", "island") and size == 1:
            continue
        first = next(layout.axis_groups(axis))
        shown = " ".join(map(str, first[:MAX_RANKS])) + (" ..." if size > MAX_RANKS else "")
        groups = layout.cluster.world_size // size
        rows.append((axis, str(size), str(groups), axis_wires(layout, axis), shown, CARRIES[axis] if size > 1 else "-"))
    yield from aligned(rows)
