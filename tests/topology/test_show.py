"""Text and picture name every rank with its coordinates and the wires of every axis; the picture is valid SVG."""

from __future__ import annotations

import time
from xml.etree import ElementTree

import pytest

from megazpp.topology.cluster import Cluster, Link, Links
from megazpp.topology.layout import Layout, plan_layout
from megazpp.topology.show import COLOURS, axis_wires, topology_svg, topology_text

CYCLIC_PAIRS = Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7))


def test_the_docstring_example():
    text = topology_text(plan_layout(CYCLIC_PAIRS, tp=2, replicas=1))
    assert "  node 0  [0 (0.0.0.0)  2 (0.0.0.1)]  [4 (0.0.1.0)  6 (0.0.1.1)]\n" in text
    assert "  node 1  [1 (0.1.0.0)  3 (0.1.0.1)]  [5 (0.1.1.0)  7 (0.1.1.1)]\n" in text
    rows = {line.split()[0]: line.split()[1:6] for line in text.splitlines()[-5:]}
    assert rows["tp"] == ["2", "4", "domain", "0", "2"]
    assert rows["local"] == ["2", "4", "node", "0", "4"]
    assert rows["cross"] == ["2", "4", "network", "0", "1"]
    assert rows["replicate"] == ["1", "8", "-", "0", "-"]


def test_an_axis_on_two_wires_says_how_many_ranks_send_over_each():
    links = Links(network=Link(1.25, 5.0))
    layout = plan_layout(Cluster(num_nodes=2, ranks_per_node=4, links=links), tp=1, replicas=1)
    assert axis_wires(layout, "shard") == (
        "domain from 6 of 8 ranks, network (1.25 GB/s, 5 us per node) from 2 of 8 ranks"
    )


def test_a_domain_of_several_nodes_stands_above_its_nodes_and_notices_are_shown():
    text = topology_text(plan_layout(Cluster(num_nodes=4, ranks_per_node=2, domain_size=4), tp=8, replicas=1))
    assert text.count("share the fastest wire\n") == 2
    assert "domain 1: nodes 2 to 3 share the fastest wire\n  node 2  [4 " in text
    assert "\nnote: warning: --tensor-model-parallel-size 8 spans 2 domains" in text


def test_of_a_large_cluster_the_first_nodes_are_shown_and_the_rest_counted():
    start = time.process_time()
    text = topology_text(plan_layout(Cluster(num_nodes=4096, ranks_per_node=8), tp=8, replicas=1))
    assert "... and 4080 more nodes" in text
    assert len(text.splitlines()) < 30
    assert time.process_time() - start < 10


SVG = "{http://www.w3.org/2000/svg}"
CLUSTERS = {
    "nodes": Cluster(num_nodes=3, ranks_per_node=4),
    "pairs in cyclic order": Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    "racks": Cluster(num_nodes=6, ranks_per_node=2, domain_size=6),
}


def draw(layout: Layout, rank: int = 0) -> ElementTree.Element:
    return ElementTree.fromstring(topology_svg(layout, rank=rank))


def bold_numbers(svg: ElementTree.Element) -> list[int]:
    """The ranks that are drawn."""
    texts = [text for text in svg.iter(SVG + "text") if text.get("font-weight") == "bold"]
    return sorted(int(text.text) for text in texts if text.text and text.text.isdecimal())


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_rank_is_drawn_once_and_nothing_leaves_the_canvas(name: str):
    layout = plan_layout(CLUSTERS[name], tp=2, replicas=1)
    svg = draw(layout)
    assert bold_numbers(svg) == list(range(layout.cluster.world_size))
    width, height = int(svg.get("width", 0)), int(svg.get("height", 0))
    for rect in svg.iter(SVG + "rect"):
        x, y, w, h = (int(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    assert not any(value.startswith("http") for element in svg.iter() for value in element.attrib.values())


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_coloured_ranks_are_those_of_the_chosen_ranks_groups(name: str):
    layout = plan_layout(CLUSTERS[name], tp=2, replicas=1)
    svg = draw(layout, rank=5)
    for axis, colour in COLOURS.items():
        stripes = [rect for rect in svg.iter(SVG + "rect") if rect.get("fill") == colour and rect.get("height") == "6"]
        expected = layout.axis_size(axis) if layout.axis_size(axis) > 1 else 0
        assert len(stripes) == expected, axis


def test_bars_join_only_ranks_of_one_domain():
    pairs, nodes = CLUSTERS["pairs in cyclic order"], CLUSTERS["nodes"]
    assert len(list(draw(plan_layout(pairs, tp=1, replicas=1)).iter(SVG + "path"))) == 4  # one in each pair
    assert len(list(draw(plan_layout(nodes, tp=1, replicas=1)).iter(SVG + "path"))) == 9  # three in each node


def test_of_a_large_cluster_a_part_is_drawn_and_the_rest_counted():
    svg = draw(plan_layout(Cluster(num_nodes=100, ranks_per_node=32), tp=1, replicas=1))
    assert len(bold_numbers(svg)) == 12 * 16
    assert f"... and {3200 - 12 * 16} more ranks" in [text.text for text in svg.iter(SVG + "text")]


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank 12 is not one of the 12 ranks"):
        topology_svg(plan_layout(CLUSTERS["nodes"], tp=2, replicas=1), rank=12)
