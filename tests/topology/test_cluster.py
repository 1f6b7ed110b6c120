"""A cluster knows who sits where, comes from a file, an emulation or the launcher, and says what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazpp.topology.cluster import Cluster, Link, nested_sizes
from megazpp.topology.cluster_file import ClusterConfig, detect_cluster, read_cluster
from megazpp.topology.layout import plan_layout

CLUSTERS = sorted((Path(__file__).parents[2] / "configs" / "clusters").glob("*.yaml"))
CYCLIC = (0, 2, 4, 6, 1, 3, 5, 7)


def test_the_docstring_example_puts_every_rank_into_its_node_and_domain():
    cluster = Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=CYCLIC)
    assert [cluster.rank_at(cluster.position_of(rank)) for rank in range(8)] == list(range(8))
    assert [cluster.node_of(rank) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [cluster.domain_of(rank) for rank in range(8)] == [0, 2, 0, 2, 1, 3, 1, 3]
    assert [cluster.link_between(0, rank) for rank in (2, 4, 1)] == ["domain", "node", "network"]


def test_a_domain_of_several_nodes_is_the_local_domain():
    cluster = Cluster(num_nodes=4, ranks_per_node=2, domain_size=4)
    assert (cluster.local_domain_size, cluster.num_local_domains) == (4, 2)
    assert [cluster.link_between(0, rank) for rank in (1, 3, 4)] == ["domain", "domain", "network"]
    assert (cluster.node_of(3), cluster.local_domain_of(3)) == (1, 0)


def test_a_plain_cluster_has_one_domain_per_node_and_its_ranks_in_order():
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    assert (cluster.ranks_per_domain, cluster.local_domain_size, cluster.is_block_order) == (4, 4, True)
    assert Cluster(num_nodes=1, ranks_per_node=2, order=(0, 1)).is_block_order
    assert not Cluster(num_nodes=1, ranks_per_node=2, order=(1, 0)).is_block_order


def test_nested_sizes_are_parts_of_the_inner_size_and_multiples_that_divide_the_whole():
    assert nested_sizes(6, 36) == [1, 2, 3, 6, 12, 18, 36]
    assert nested_sizes(1, 4) == [1, 2, 4]


@pytest.mark.parametrize("size", [0, 3, 12, 32])
def test_a_domain_that_does_not_fit_is_refused_with_the_sizes_that_would(size: int):
    with pytest.raises(ValueError, match=f"fast_domain {size}: 4 node.s. of 4 .*; 1, 2, 4, 8, 16 would fit"):
        Cluster(num_nodes=4, ranks_per_node=4, domain_size=size)


@pytest.mark.parametrize(("order", "message"), [
    ((0, 1, 2), "rank_order has 3 ranks, the cluster 4"),
    ((0, 1, 2, 3, 3), "rank_order has 5 ranks, the cluster 4"),
    ((0, 1, 1, 3), "rank_order .* rank 2 is not among them"),
    ((0, 1, 2, 4), "rank_order .* rank 3 is not among them"),
])  # fmt: skip
def test_an_order_that_is_no_order_of_all_ranks_is_refused(order: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Cluster(num_nodes=2, ranks_per_node=2, order=order)


def test_the_cluster_comes_from_the_launcher_or_is_emulated():
    none = ClusterConfig()
    assert detect_cluster(8, none, {}) == Cluster(num_nodes=1, ranks_per_node=8)
    assert detect_cluster(8, none, {"LOCAL_WORLD_SIZE": "4"}) == Cluster(num_nodes=2, ranks_per_node=4)
    assert detect_cluster(8, none, {"SLURM_NTASKS_PER_NODE": "2"}) == Cluster(num_nodes=4, ranks_per_node=2)
    emulated = detect_cluster(8, ClusterConfig(emulate_nodes=2), {"LOCAL_WORLD_SIZE": "8"})
    assert emulated == Cluster(num_nodes=2, ranks_per_node=4)
    with pytest.raises(ValueError, match=r"--emulate-nodes 3 does not divide the 8 ranks .* 1, 2, 4 or 8"):
        detect_cluster(8, ClusterConfig(emulate_nodes=3), {})
    with pytest.raises(ValueError, match=r"nodes of 3 .LOCAL_WORLD_SIZE.: .* for instance 3 on each of 2 node"):
        detect_cluster(8, none, {"LOCAL_WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    ("world_size", "tp", "nodes"), [(4, 1, 2), (4, 2, 2), (2, 1, 2), (1, 1, 1), (2, 2, 1), (3, 1, 1), (4, 4, 1)]
)
def test_emulate_nodes_auto_makes_two_nodes_of_one_machine_where_they_fit_and_says_so(
    world_size: int, tp: int, nodes: int
):
    auto = ClusterConfig(emulate_nodes="auto")
    cluster = detect_cluster(world_size, auto, {}, tp=tp)
    assert cluster == Cluster(num_nodes=nodes, ranks_per_node=world_size // nodes)
    [notice] = cluster.notices
    assert notice.startswith(f"--emulate-nodes auto: {world_size} rank")
    assert ("treated as 2 nodes" in notice) == (nodes == 2)
    plan_layout(cluster, tp=tp, replicas=1)


def test_emulate_nodes_auto_leaves_several_machines_alone():
    cluster = detect_cluster(8, ClusterConfig(emulate_nodes="auto"), {"LOCAL_WORLD_SIZE": "2"})
    assert cluster == Cluster(num_nodes=4, ranks_per_node=2)
    assert cluster.notices == ()


def test_a_cluster_file_describes_the_job_whatever_the_launcher_says_and_has_as_many_ranks(tmp_path: Path):
    path = str(tmp_path / "cluster.yaml")
    Path(path).write_text("nodes: 2\nranks_per_node: 4\nfast_domain: 2\nrank_order: cyclic\n")
    expected = Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=CYCLIC)
    config = ClusterConfig(cluster_file=path)
    assert detect_cluster(8, config, {}) == detect_cluster(8, config, {"LOCAL_WORLD_SIZE": "8"}) == expected
    auto = ClusterConfig(cluster_file=path, emulate_nodes="auto")  # a default of the tiny config, not a wish
    assert detect_cluster(8, auto, {}) == expected
    message = f"--cluster-file {path}: nodes 2 x ranks_per_node 4 are 8 ranks, the job has 4 .*--nproc 8"
    with pytest.raises(ValueError, match=message):
        detect_cluster(4, ClusterConfig(cluster_file=path), {})
    with pytest.raises(ValueError, match=f"--cluster-file {path} and --emulate-nodes 2"):
        detect_cluster(8, ClusterConfig(cluster_file=path, emulate_nodes=2), {})


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_shipped_cluster_file_is_read_and_every_figure_names_its_source_in_a_comment(path: Path):
    cluster = read_cluster(path)
    assert cluster.links is not None
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    for link in cluster.links:
        if link is not None:
            assert link.source in comments
    assert plan_layout(cluster, tp=2, replicas=1).tp == 2


def test_the_shipped_cluster_files_say_what_their_names_say():
    shipped = {path.stem: read_cluster(path) for path in CLUSTERS}
    dgx, rack, pairs = (shipped[name] for name in ("dgx_h100_8x_100gbit", "gb200_nvl72", "nvlink_pairs"))
    assert (dgx.num_nodes, dgx.ranks_per_node, dgx.ranks_per_domain) == (8, 8, 8)
    assert dgx.links is not None
    assert dgx.links.network == Link(12.5, None, "IEEE 802.3 100 Gbit/s Ethernet")
    assert (rack.ranks_per_node, rack.local_domain_size, pairs.ranks_per_domain) == (4, 72, 2)
