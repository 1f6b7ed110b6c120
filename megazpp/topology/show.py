"""The layout as text: the placement of all ranks, and the links that each axis uses. Example:

placement: rank (replica.cross.local.tp); [ ] joined by the fastest links
  node 0  [0 (0.0.0.0)  2 (0.0.0.1)]  [4 (0.0.1.0)  6 (0.0.1.1)]
  node 1  [1 (0.1.0.0)  3 (0.1.0.1)]  [5 (0.1.1.0)  7 (0.1.1.1)]

axis       ranks  groups  wire                    first group  carries
tp         2      4       domain                  0 2          activations, several times per layer
local      2      4       node                    0 4          ZeRO++: the intra-node hop of weights and gradients
...
"""

from __future__ import annotations

from collections.abc import Iterator

from megazpp.base.program import aligned
from megazpp.topology.cluster import LinkKind
from megazpp.topology.layout import AXES, Layout

CARRIES = {
    "tp": "activations, several times per layer",
    "cp": "parts of samples, exchanged for attention heads, twice per layer",
    "local": "ZeRO++: the intra-node hop of weights and gradients",
    "cross": "ZeRO++: the inter-node hop, once per optimizer step",
    "shard": "ZeRO: weights and gradients, over local and cross in one ring",
    "replicate": "gradients between copies",
    "replica_group": "local steps: outer gradients and outer weights, once per synchronization",
}
# By kind of link: whether `Link.gigabytes_per_second` is the bandwidth of one rank or of one node
SENDER = {"domain": "rank", "node": "rank", "network": "node"}
# Largest number of nodes in the printed placement, and of ranks in the column "first group" of the table of axes
MAX_NODES, MAX_RANKS = 16, 8


def topology_text(layout: Layout) -> str:
    """Return the layout as text: the placement of all ranks, and the table of mesh axes.

    A run writes the text to topology.txt in its run folder, and tools/show_topology.py prints it. The placement lists
    at most `MAX_NODES` nodes.
    """
    coordinates = ".".join("replica" if axis == "replicate" else axis for axis in layout.coordinates)
    places = f"placement: rank ({coordinates}); [ ] joined by the fastest links"
    notices = [f"note: {notice}" for notice in layout.notices]
    return "\n".join([layout.describe(), *notices, "", places, *_nodes(layout), "", *_axes(layout)])


def axis_wires(layout: Layout, axis: str) -> str:
    """Return the kinds of links over which the rings of a mesh axis send, as text with bandwidth and latency if known.

    If the axis uses several kinds, the text says how many ranks send over each kind. For an axis of one rank the text
    is "-".
    """

    def text(kind: LinkKind) -> str:
        """Return the name of a kind of link, followed by its bandwidth and latency per rank or per node if known.

        Two examples: "domain" and "node (25 GB/s per rank)".
        """
        link = layout.cluster.links.known.get(kind) if layout.cluster.links is not None else None
        return kind if link is None else f"{kind} ({link} per {SENDER[kind]})"

    counts = layout.links(axis)
    if len(counts) < 2:
        return "".join(map(text, counts)) or "-"
    ranks = sum(counts.values())
    return ", ".join(f"{text(kind)} from {count} of {ranks} ranks" for kind, count in counts.items())


def _place(layout: Layout, rank: int) -> str:
    """Return the indices of a rank along the axes of `Layout.coordinates`, separated by dots, for example "0.1.0.0"."""
    return ".".join(str(layout.axis_ranks(axis, rank).index(rank)) for axis in layout.coordinates)


def _nodes(layout: Layout) -> Iterator[str]:
    """Yield lines about the placement of ranks: a line for each node, with the node's ranks grouped by fast domain.

    If fast domains span several nodes, a line precedes the nodes of each domain.
    """
    cluster = layout.cluster
    per_node, per_domain = cluster.ranks_per_node, cluster.ranks_per_domain
    width = len(str(min(cluster.num_nodes, MAX_NODES) - 1))
    for node in range(min(cluster.num_nodes, MAX_NODES)):
        if per_domain > per_node and node * per_node % per_domain == 0:
            first = node * per_node // per_domain
            yield f"  domain {first}: nodes {node} to {node + per_domain // per_node - 1}, joined by the fastest links"
        domains = []
        for start in range(node * per_node, (node + 1) * per_node, min(per_domain, per_node)):
            ranks = [cluster.rank_at(position) for position in range(start, start + min(per_domain, per_node))]
            domains.append("[" + "  ".join(f"{rank} ({_place(layout, rank)})" for rank in ranks) + "]")
        yield f"  node {node:<{width}}  {'  '.join(domains)}"
    if cluster.num_nodes > MAX_NODES:
        yield f"  ... and {cluster.num_nodes - MAX_NODES} more nodes"


def _axes(layout: Layout) -> Iterator[str]:
    """Yield the lines of the table of mesh axes: sizes, links, the first group, and the data communicated."""
    rows = [("axis", "ranks", "groups", "wire", "first group", "carries")]
    for axis in AXES:
        size = layout.axis_size(axis)
        if axis in ("cp", "replica_group") and size == 1:
            continue
        first = next(layout.axis_groups(axis))
        shown = " ".join(map(str, first[:MAX_RANKS])) + (" ..." if size > MAX_RANKS else "")
        groups = layout.cluster.world_size // size
        rows.append((axis, str(size), str(groups), axis_wires(layout, axis), shown, CARRIES[axis] if size > 1 else "-"))
    yield from aligned(rows)
