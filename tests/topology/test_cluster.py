"""Test that a cluster maps ranks to nodes and fast domains, and rejects domain sizes and orders that do not fit."""

from helpers.refusals import not_refused

from megazpp.topology.cluster import Cluster, Link, Links, nested_sizes


def test_cluster_docstring_example_places_every_rank():
    cluster = Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7))
    assert [cluster.rank_at(cluster.position_of(rank)) for rank in range(8)] == list(range(8))
    assert [cluster.node_of(rank) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [cluster.domain_of(rank) for rank in range(8)] == [0, 2, 0, 2, 1, 3, 1, 3]
    assert [cluster.link_between(0, rank) for rank in (2, 4, 1)] == ["domain", "node", "network"]


def test_domain_of_several_nodes_is_the_local_domain():
    cluster = Cluster(num_nodes=4, ranks_per_node=2, domain_size=4)
    assert (cluster.local_domain_size, cluster.num_local_domains) == (4, 2)
    assert [cluster.link_between(0, rank) for rank in (1, 3, 4)] == ["domain", "domain", "network"]
    assert (cluster.node_of(3), cluster.local_domain_of(3)) == (1, 0)


def test_nested_sizes_are_divisors_of_inner_and_multiples_dividing_outer():
    assert nested_sizes(6, 36) == [1, 2, 3, 6, 12, 18, 36]
    assert nested_sizes(1, 4) == [1, 2, 4]


def test_invalid_domain_size_or_order_is_rejected_with_valid_ones():
    rows = [
        *(("domain_size", size, f"fast_domain {size}: 4 node(s) of 4") for size in (0, 3, 12, 32)),
        ("domain_size", 3, "possible sizes are 1, 2, 4, 8, 16"),
        ("order", range(15), "rank_order lists 15 ranks, but the cluster has 16; rank 15 is missing"),
        ("order", (*range(16), 3), "rank_order lists 17 ranks, but the cluster has 16"),
        ("order", (0, 1, 1, *range(3, 16)), "lists 16 ranks, but the cluster has 16; rank 2 is missing"),
        ("order", (*range(15), 16), "rank 15 is missing"),
    ]
    assert not not_refused(rows, lambda name, value: Cluster(num_nodes=4, ranks_per_node=4, **{name: value}))


def test_links_description_names_the_source_of_figures():
    known = Links(Link(450.0, source="data sheet of X"), None, Link(12.5, 3.0))
    assert known.describe() == "links: domain 450 GB/s (data sheet of X); network 12.5 GB/s, 3 us (no source given)"
