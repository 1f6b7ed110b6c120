"""A layout as a self-contained SVG: nodes with their ranks, and the groups of one rank in colour.

Islands of one node stand below each other, so that a cross group is a column; islands of several nodes (NVLink racks)
stand side by side with their nodes in rows.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from megazpp.topology.layout import Layout
from megazpp.topology.table import axis_wires, coordinates

COLOURS = {"tp": "#d97706", "local": "#16a34a", "cross": "#2563eb", "replicate": "#9333ea"}
CELL, HEIGHT, GAP, PAD, TITLE, MARGIN = 62, 38, 8, 12, 18, 20  # pixels
MAX_ISLANDS, MAX_NODES_OF_ISLAND, MAX_RANKS_OF_NODE = 12, 18, 16
LEGEND_LINE = 20


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int


def topology_svg(layout: Layout, *, rank: int = 0) -> str:
    """The picture; `rank` is the one whose groups are coloured. Of large clusters the first islands are drawn.

    Raises:
        ValueError: there is no such rank.
    """
    cluster = layout.cluster
    if not 0 <= rank < cluster.world_size:
        raise ValueError(f"rank {rank} is not one of the {cluster.world_size} ranks of the cluster")
    islands = min(cluster.num_islands, MAX_ISLANDS)
    ranks_of_node = min(cluster.ranks_per_node, MAX_RANKS_OF_NODE)
    nodes_of_island = min(cluster.island_size // cluster.ranks_per_node, MAX_NODES_OF_ISLAND)
    node = Box(0, 0, 2 * PAD + ranks_of_node * (CELL + GAP) - GAP, TITLE + HEIGHT + PAD)
    island = Box(0, 0, node.width + 2 * PAD, TITLE + nodes_of_island * (node.height + GAP) + PAD - GAP)
    side_by_side = nodes_of_island > 1
    legend = _legend(layout, rank)
    top = MARGIN + (len(legend) + 1) * LEGEND_LINE
    shapes, right, bottom = [], 0, 0
    for index in range(islands):
        x = MARGIN + (index * (island.width + 2 * GAP) if side_by_side else 0)
        y = top + (0 if side_by_side else index * (node.height + 2 * GAP))
        if side_by_side:
            shapes += _box(island._replace(x=x, y=y), f"fast domain {index}", fill="#eef2ff", line="#6366f1")
        for row in range(nodes_of_island):
            number = index * (cluster.island_size // cluster.ranks_per_node) + row
            at = Box(x, y, node.width, node.height)
            if side_by_side:
                at = at._replace(x=x + PAD, y=y + TITLE + row * (node.height + GAP))
            shapes += _node(layout, number, at, ranks_of_node, rank)
            right, bottom = max(right, at.x + at.width), max(bottom, at.y + at.height)
    left_out = cluster.world_size - islands * nodes_of_island * ranks_of_node
    if left_out:
        shapes.append(_text(MARGIN, bottom + 2 * LEGEND_LINE, f"... and {left_out} more ranks"))
    width = max(right + MARGIN + PAD, MARGIN + max(8 * len(text) for _, text in legend))
    height = bottom + MARGIN + PAD + (LEGEND_LINE if left_out else 0)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(layout.describe())}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *_draw_legend(legend),
            *shapes,
            "</svg>\n",
        ]
    )


def _legend(layout: Layout, rank: int) -> list[tuple[str, str]]:
    """(colour, line) for the head of the picture."""
    lines = [
        ("", layout.describe()),
        ("", "rank (replica.cross.local.tp); a bar joins ranks that share the fastest wire"),
        ("", f"in colour: the groups of rank {rank}"),
    ]
    for axis, colour in COLOURS.items():
        size = layout.axis_size(axis)
        if size > 1:
            lines.append((colour, f"{axis}: {size} ranks over {axis_wires(layout, axis)}"))
    return lines


def _draw_legend(lines: list[tuple[str, str]]) -> list[str]:
    shapes = []
    for index, (colour, line) in enumerate(lines):
        y = MARGIN + (index + 1) * LEGEND_LINE - 6
        if colour:
            shapes.append(f'<rect x="{MARGIN}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>')
        shapes.append(_text(MARGIN + (20 if colour else 0), y, line, bold=index == 0))
    return shapes


def _node(layout: Layout, node: int, at: Box, ranks_of_node: int, chosen: int) -> list[str]:
    cluster = layout.cluster
    shapes = _box(at, f"node {node}", fill="#f8fafc", line="#94a3b8")
    groups = {axis: layout.axis_ranks(axis, chosen) for axis in COLOURS}
    for column in range(ranks_of_node):
        position = node * cluster.ranks_per_node + column
        rank = cluster.rank_at(position)
        cell = Box(at.x + PAD + column * (CELL + GAP), at.y + TITLE, CELL, HEIGHT)
        if column and position % cluster.ranks_per_domain:  # joined to its left neighbour by the fastest wire
            y = cell.y + HEIGHT // 2
            shapes.append(f'<path d="M{cell.x - GAP} {y}h{GAP}" stroke="#475569" stroke-width="4"/>')
        axes = [axis for axis, ranks in groups.items() if rank in ranks and len(ranks) > 1]
        shapes += _cell(cell, rank, ".".join(map(str, coordinates(layout, rank))), axes, chosen=rank == chosen)
    return shapes


def _cell(at: Box, rank: int, place: str, axes: list[str], *, chosen: bool) -> list[str]:
    """A rank with a stripe for each coloured group that it is in."""
    fill = "#fde68a" if chosen else "white"
    shapes = [
        f'<rect x="{at.x}" y="{at.y}" width="{at.width}" height="{at.height}" rx="4" fill="{fill}" stroke="#475569"/>'
    ]
    for index, axis in enumerate(axes):
        width = at.width // len(axes)
        shapes.append(
            f'<rect x="{at.x + index * width}" y="{at.y + at.height - 6}" width="{width}" height="6" '
            f'fill="{COLOURS[axis]}"/>'
        )
    middle = at.x + at.width // 2
    shapes.append(_text(middle, at.y + 14, str(rank), bold=True, centred=True))
    shapes.append(_text(middle, at.y + 27, place, size=10, centred=True))
    return shapes


def _box(at: Box, title: str, *, fill: str, line: str) -> list[str]:
    return [
        f'<rect x="{at.x}" y="{at.y}" width="{at.width}" height="{at.height}" rx="6" fill="{fill}" stroke="{line}"/>',
        _text(at.x + PAD, at.y + 13, title, size=11),
    ]


def _text(x: int, y: int, text: str, *, size: int = 12, bold: bool = False, centred: bool = False) -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if centred else "")
    return f'<text x="{x}" y="{y}" font-size="{size}"{style}>{escape(text)}</text>'
