"""Layouts are partitions, tp stays inside a node, and what does not fit says which flag is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazpp.topology.cluster import Cluster, ClusterConfig, detect_cluster
from megazpp.topology.layout import Layout, plan_layout

AXES = ("tp", "shard", "replicate")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, local, cross, replicate = (draw(st.integers(1, 4)) for _ in range(4))
    cluster = Cluster(num_nodes=cross * replicate, ranks_per_node=tp * local)
    return plan_layout(cluster, tp=tp, replicas=replicate)


@given(layouts())
def test_every_axis_partitions_the_ranks_and_all_members_agree(layout: Layout):
    world = range(layout.cluster.world_size)
    for axis in AXES:
        groups = {layout.axis_ranks(axis, rank) for rank in world}
        assert sorted(rank for group in groups for rank in group) == list(world)
        for rank in world:
            assert rank in layout.axis_ranks(axis, rank)


@given(layouts())
def test_the_axes_of_a_rank_meet_only_in_that_rank(layout: Layout):
    for rank in range(layout.cluster.world_size):
        sets = [set(layout.axis_ranks(axis, rank)) for axis in AXES]
        for i, one in enumerate(sets):
            for other in sets[i + 1 :]:
                assert one & other == {rank}


@given(layouts())
def test_tp_ranks_share_a_node_and_only_links_between_nodes_are_cross(layout: Layout):
    for rank in range(layout.cluster.world_size):
        assert len({layout.cluster.node_of(r) for r in layout.axis_ranks("tp", rank)}) == 1
        assert layout.wire("tp", rank) == "tp"
        ranks = layout.axis_ranks("shard", rank)
        successor = ranks[(ranks.index(rank) + 1) % len(ranks)]
        leaves = layout.cluster.node_of(rank) != layout.cluster.node_of(successor)
        assert layout.wire("shard", rank) == ("cross" if leaves else "local")


def test_the_docstring_example():
    layout = plan_layout(Cluster(num_nodes=2, ranks_per_node=4), tp=2, replicas=1)
    assert [layout.axis_ranks("tp", r) for r in (0, 2, 4, 6)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.axis_ranks("shard", 4) == (0, 2, 4, 6)
    assert layout.axis_ranks("shard", 3) == (1, 3, 5, 7)
    assert (layout.cross, layout.local) == (2, 2)


def test_replicas_that_are_parts_of_a_node_are_laid_out_and_uneven_ones_refused():
    layout = plan_layout(Cluster(num_nodes=1, ranks_per_node=4), tp=1, replicas=2)
    assert (layout.cross, layout.local, layout.shard) == (1, 2, 2)
    with pytest.raises(ValueError, match="--num-distributed-optimizer-instances 2 gives shards over 9"):
        plan_layout(Cluster(num_nodes=3, ranks_per_node=6), tp=1, replicas=2)


@pytest.mark.parametrize(
    ("tp", "replicas", "message"),
    [
        (3, 1, "--tensor-model-parallel-size 3 does not divide the 4 ranks of a node"),
        (8, 1, "--tensor-model-parallel-size 8 does not divide"),
        (0, 1, "--tensor-model-parallel-size 0"),
        (1, 3, "--num-distributed-optimizer-instances 3 does not divide the 8 data ranks"),
    ],
)
def test_degrees_that_do_not_fit_name_the_flag(tp: int, replicas: int, message: str):
    with pytest.raises(ValueError, match=message):
        plan_layout(Cluster(num_nodes=2, ranks_per_node=4), tp=tp, replicas=replicas)


def test_the_cluster_comes_from_the_launcher_or_is_emulated():
    none = ClusterConfig()
    assert detect_cluster(8, none, {}) == Cluster(num_nodes=1, ranks_per_node=8)
    assert detect_cluster(8, none, {"LOCAL_WORLD_SIZE": "4"}) == Cluster(num_nodes=2, ranks_per_node=4)
    assert detect_cluster(8, none, {"SLURM_NTASKS_PER_NODE": "2"}) == Cluster(num_nodes=4, ranks_per_node=2)
    emulated = detect_cluster(8, ClusterConfig(emulate_nodes=2), {"LOCAL_WORLD_SIZE": "8"})
    assert emulated == Cluster(num_nodes=2, ranks_per_node=4)
    with pytest.raises(ValueError, match="--emulate-nodes 3 does not divide the 8 ranks"):
        detect_cluster(8, ClusterConfig(emulate_nodes=3), {})
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
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
