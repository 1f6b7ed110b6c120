"""A layout as text and as a picture: who is where, and which axis rides which wire.

who is where: rank (replica.cross.local.tp); [ ] shares the fastest wire
  node 0  [0 (0.0.0.0)  2 (0.0.0.1)]  [4 (0.0.1.0)  6 (0.0.1.1)]
  node 1  [1 (0.1.0.0)  3 (0.1.0.1)]  [5 (0.1.1.0)  7 (0.1.1.1)]

axis       ranks  groups  wire                    first group  carries
tp         2      4       domain                  0 2          activations
local      2      4       node                    0 4          the fast hop of weights and gradients
...

The picture is a self-contained SVG: nodes with their ranks, and the groups of one rank in colour. Local domains of one
node stand below each other, so that a cross group is a column; those of several nodes (NVLink racks) stand side by side
with their nodes in rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from megazpp.formatting import aligned
from megazpp.topology.cluster import LinkKind
from megazpp.topology.layout import AXES, Layout

CARRIES = {
    "tp": "activations, several times per layer",
    "local": "ZeRO++: the fast hop of weights and gradients",
    "cross": "ZeRO++: the slow hop, once per optimizer step",
    "shard": "ZeRO: weights and gradients, local and cross in one ring",
    "replicate": "gradients between copies",
    "island": "local steps: outer gradients and outer weights, once per synchronization",
}
SENDER = {"domain": "rank", "node": "rank", "network": "node"}  # whom a link's figure is for
MAX_NODES, MAX_RANKS = 16, 8  # of the text
MAX_DOMAINS, MAX_NODES_OF_DOMAIN, MAX_RANKS_OF_NODE = 12, 18, 16  # of the picture
COLOURS = {"tp": "#d97706", "local": "#16a34a", "cross": "#2563eb", "replicate": "#9333ea", "island": "#dc2626"}
CELL, HEIGHT, GAP, PAD, TITLE, MARGIN, LEGEND_LINE = 62, 38, 8, 12, 18, 20, 20  # pixels


def topology_text(layout: Layout) -> str:
    """The whole map; of large clusters the first nodes."""
    places = f"who is where: rank ({_coordinates(layout)}); [ ] shares the fastest wire"
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


def _coordinates(layout: Layout) -> str:
    return ".".join("replica" if axis == "replicate" else axis for axis in layout.coordinates)


def _place(layout: Layout, rank: int) -> str:
    """The rank's index along each of them."""
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
        if axis == "island" and size == 1:
            continue
        first = next(layout.axis_groups(axis))
        shown = " ".join(map(str, first[:MAX_RANKS])) + (" ..." if size > MAX_RANKS else "")
        groups = layout.cluster.world_size // size
        rows.append((axis, str(size), str(groups), axis_wires(layout, axis), shown, CARRIES[axis] if size > 1 else "-"))
    yield from aligned(rows)


class Box(NamedTuple):
    """A rectangle of the picture, in pixels."""

    x: int
    y: int
    width: int
    height: int


def topology_svg(layout: Layout, *, rank: int = 0) -> str:
    """The picture; `rank` is the one whose groups are coloured. Of large clusters the first domains are drawn.

    Raises:
        ValueError: there is no such rank.
    """
    cluster = layout.cluster
    if not 0 <= rank < cluster.world_size:
        raise ValueError(f"rank {rank} is not one of the {cluster.world_size} ranks of the cluster")
    domains = min(cluster.num_local_domains, MAX_DOMAINS)
    ranks_of_node = min(cluster.ranks_per_node, MAX_RANKS_OF_NODE)
    all_nodes_of_domain = cluster.local_domain_size // cluster.ranks_per_node
    nodes_of_domain = min(all_nodes_of_domain, MAX_NODES_OF_DOMAIN)
    side_by_side = nodes_of_domain > 1
    node_width, node_height = 2 * PAD + ranks_of_node * (CELL + GAP) - GAP, TITLE + HEIGHT + PAD
    domain_width, domain_height = node_width + 2 * PAD, TITLE + nodes_of_domain * (node_height + GAP) + PAD - GAP
    legend = _legend(layout, rank)
    top = MARGIN + (len(legend) + 1) * LEGEND_LINE
    shapes, right, bottom = _draw_legend(legend), 0, 0
    for domain in range(domains):
        x = MARGIN + (domain * (domain_width + 2 * GAP) if side_by_side else 0)
        y = top + (0 if side_by_side else domain * (node_height + 2 * GAP))
        if side_by_side:
            shapes += _titled(Box(x, y, domain_width, domain_height), f"fast domain {domain}", "#eef2ff", "#6366f1")
            x, y = x + PAD, y + TITLE
        for row in range(nodes_of_domain):
            at = Box(x, y + row * (node_height + GAP), node_width, node_height)
            shapes += _draw_node(layout, domain * all_nodes_of_domain + row, at, ranks_of_node, rank)
            right, bottom = max(right, at.x + at.width), max(bottom, at.y + at.height)
    left_out = cluster.world_size - domains * nodes_of_domain * ranks_of_node
    if left_out:
        shapes.append(_text(MARGIN, bottom + 2 * LEGEND_LINE, f"... and {left_out} more ranks"))
    width = max(right + MARGIN + PAD, MARGIN + max(8 * len(text) for _, text in legend))
    height = bottom + MARGIN + PAD + (LEGEND_LINE if left_out else 0)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(layout.describe())}</title>"
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>\n"])


def _legend(layout: Layout, rank: int) -> list[tuple[str, str]]:
    """(colour, line) for the head of the picture."""
    lines = [
        ("", layout.describe()),
        ("", f"rank ({_coordinates(layout)}); a bar joins ranks that share the fastest wire"),
        ("", f"in colour: the groups of rank {rank}"),
    ]
    for axis, colour in COLOURS.items():
        if layout.axis_size(axis) > 1:
            lines.append((colour, f"{axis}: {layout.axis_size(axis)} ranks over {axis_wires(layout, axis)}"))
    return lines


def _draw_legend(lines: list[tuple[str, str]]) -> list[str]:
    shapes = []
    for index, (colour, line) in enumerate(lines):
        y = MARGIN + (index + 1) * LEGEND_LINE - 6
        if colour:
            shapes.append(_rect(Box(MARGIN, y - 10, 12, 12), colour, rx=2))
        shapes.append(_text(MARGIN + (20 if colour else 0), y, line, bold=index == 0))
    return shapes


def _draw_node(layout: Layout, node: int, at: Box, ranks_of_node: int, chosen: int) -> list[str]:
    """The ranks of a node, each with a stripe for every group of the chosen rank that it is in."""
    cluster = layout.cluster
    shapes = _titled(at, f"node {node}", "#f8fafc", "#94a3b8")
    groups = {axis: layout.axis_ranks(axis, chosen) for axis in COLOURS}
    for column in range(ranks_of_node):
        position = node * cluster.ranks_per_node + column
        rank = cluster.rank_at(position)
        cell = Box(at.x + PAD + column * (CELL + GAP), at.y + TITLE, CELL, HEIGHT)
        if column and position % cluster.ranks_per_domain:  # joined to its left neighbour by the fastest wire
            y = cell.y + HEIGHT // 2
            shapes.append(f'<path d="M{cell.x - GAP} {y}h{GAP}" stroke="#475569" stroke-width="4"/>')
        shapes.append(_rect(cell, "#fde68a" if rank == chosen else "white", rx=4, line="#475569"))
        axes = [axis for axis, ranks in groups.items() if rank in ranks and len(ranks) > 1]
        for index, axis in enumerate(axes):
            width = CELL // len(axes)
            shapes.append(_rect(Box(cell.x + index * width, cell.y + HEIGHT - 6, width, 6), COLOURS[axis]))
        shapes.append(_text(cell.x + CELL // 2, cell.y + 14, str(rank), bold=True, centred=True))
        shapes.append(_text(cell.x + CELL // 2, cell.y + 27, _place(layout, rank), size=10, centred=True))
    return shapes


def _titled(at: Box, title: str, fill: str, line: str) -> list[str]:
    return [_rect(at, fill, rx=6, line=line), _text(at.x + PAD, at.y + 13, title, size=11)]


def _rect(at: Box, fill: str, *, rx: int = 0, line: str = "") -> str:
    form = (f' rx="{rx}"' if rx else "") + f' fill="{fill}"' + (f' stroke="{line}"' if line else "")
    return f'<rect x="{at.x}" y="{at.y}" width="{at.width}" height="{at.height}"{form}/>'


def _text(x: int, y: int, text: str, *, size: int = 12, bold: bool = False, centred: bool = False) -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if centred else "")
    return f'<text x="{x}" y="{y}" font-size="{size}"{style}>{escape(text)}</text>'
