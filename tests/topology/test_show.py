"""Test the text about a topology: it lists every rank with its coordinates, and the links of every axis."""

from megazpp.topology.cluster import Cluster, Link, Links
from megazpp.topology.plan import plan_layout
from megazpp.topology.show import axis_wires, topology_text


def test_topology_text_docstring_example():
    cluster = Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7))
    text = topology_text(plan_layout(cluster, tp=2, replicas=1))
    assert text.startswith("2 node(s) x 4 rank(s) (fastest links among 2), ranks in the order 0 2 4 6 1 3 5 7: ")
    assert "  node 0  [0 (0.0.0.0)  2 (0.0.0.1)]  [4 (0.0.1.0)  6 (0.0.1.1)]\n" in text
    assert "  node 1  [1 (0.1.0.0)  3 (0.1.0.1)]  [5 (0.1.1.0)  7 (0.1.1.1)]\n" in text
    rows = {line.split()[0]: line.split()[1:6] for line in text.splitlines()[-5:]}
    expected = {"tp": "2 4 domain 0 2", "local": "2 4 node 0 4", "cross": "2 4 network 0 1", "replicate": "1 8 - 0 -"}
    assert {axis: " ".join(rows[axis]) for axis in expected} == expected


def test_axis_on_two_links_shows_how_many_ranks_send_over_each():
    cluster = Cluster(num_nodes=2, ranks_per_node=4, links=Links(network=Link(1.25, 5.0)))
    wires = axis_wires(plan_layout(cluster, tp=1, replicas=1), "shard")
    assert wires == "domain from 6 of 8 ranks, network (1.25 GB/s, 5 us per node) from 2 of 8 ranks"


def test_domain_of_several_nodes_is_shown_above_them_with_notices():
    text = topology_text(plan_layout(Cluster(num_nodes=4, ranks_per_node=2, domain_size=4), tp=8, replicas=1))
    assert text.count(", joined by the fastest links\n") == 2
    assert "domain 1: nodes 2 to 3, joined by the fastest links\n  node 2  [4 " in text
    assert "\nnote: warning: --tensor-model-parallel-size 8 spans 2 domains" in text


def test_large_cluster_shows_first_nodes_and_counts_the_rest():
    text = topology_text(plan_layout(Cluster(num_nodes=4096, ranks_per_node=8), tp=8, replicas=1))
    assert "... and 4080 more nodes" in text
    assert len(text.splitlines()) < 30
