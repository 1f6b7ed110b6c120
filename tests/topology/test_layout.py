"""Test layouts: each axis partitions the ranks and uses the expected links, and invalid sizes are rejected."""

import contextlib
import itertools
from collections import Counter
from unittest import mock

import pytest
from helpers.refusals import not_refused, table
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.topology.cluster import Cluster, nested_sizes
from megazpp.topology.layout import AXES, Layout
from megazpp.topology.plan import plan_layout

CYCLIC = (0, 2, 4, 6, 1, 3, 5, 7)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Generate clusters of up to 48 ranks in block, cyclic or random order.

    Their fast domains are smaller than a node, equal to it, or larger.
    """
    num_nodes, ranks_per_node = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    world = num_nodes * ranks_per_node
    cyclic = tuple(index * num_nodes + node for node in range(num_nodes) for index in range(ranks_per_node))
    return Cluster(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        domain_size=draw(st.sampled_from([None, *nested_sizes(ranks_per_node, world)])),
        order=draw(st.one_of(st.none(), st.just(cyclic), st.permutations(range(world)).map(tuple))),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Generate layouts with all valid tensor-parallel sizes, context-parallel sizes and numbers of replicas."""
    cluster = draw(clusters())
    tp = draw(st.sampled_from(nested_sizes(cluster.local_domain_size, cluster.world_size)))
    per_domain, data = max(cluster.local_domain_size // tp, 1), cluster.world_size // tp
    replicas = data // draw(st.sampled_from(nested_sizes(per_domain, data)))
    cp = draw(st.sampled_from(nested_sizes(per_domain, data)))
    return plan_layout(cluster, tp=tp, replicas=replicas, cp=cp, cp_across=True)


@settings(max_examples=25)
@given(layouts())
def test_axis_groups_partition_ranks_and_differ_in_one_coordinate(layout):
    world = range(layout.cluster.world_size)
    place = {rank: {axis: layout.axis_ranks(axis, rank).index(rank) for axis in AXES} for rank in world}
    # For each axis, the other axes on which all ranks of one of its groups have equal coordinates. So ranks that
    # communicate over `cross` or `replicate` have equal indices in their nodes, and use the same rail of the network.
    others = {
        "tp": ("cp", "local", "cross", "replicate"),
        "cp": ("tp",),
        "local": ("tp", "cross", "replicate"),
        "cross": ("tp", "local", "replicate"),
        "shard": ("tp", "replicate"),
        "replicate": ("tp", "shard"),
        "replica_group": (),
    }
    for axis in AXES:
        groups = list(layout.axis_groups(axis))
        assert sorted(itertools.chain(*groups)) == list(world)
        for group in groups:
            assert len(group) == layout.axis_size(axis)
            assert {layout.axis_ranks(axis, rank) for rank in group} == {group}
            assert len({tuple(place[rank][other] for other in others[axis]) for rank in group}) == 1
    # The mesh is [replicate, shard, tp], and the dim shard is cross x local
    coordinates = itertools.product(*map(range, (layout.replicate, layout.shard, layout.tp)))
    for rank, expected in zip(layout.mesh_ranks(), coordinates, strict=True):
        at = place[rank]
        assert (at["replicate"], at["shard"], at["tp"]) == expected
        assert at["shard"] == at["cross"] * layout.local + at["local"]


@settings(max_examples=25)
@given(layouts())
def test_axis_peers_are_as_near_as_possible_and_wires_match_links(layout):
    cluster, size, tp = layout.cluster, layout.cluster.local_domain_size, layout.tp
    domains = {"tp": -(-tp // size), "cp": max(tp * layout.cp // max(size, tp), 1), "local": 1, "cross": layout.cross}
    for axis in AXES:
        far = pairs = 0
        for group in layout.axis_groups(axis):
            spanned = len({*map(cluster.local_domain_of, group)})
            assert spanned == domains.get(axis, spanned)
            if axis == "tp" and cluster.ranks_per_domain % tp == 0:
                assert len({*map(cluster.domain_of, group)}) == 1
            if axis == "cross":
                assert len({cluster.position_of(rank) % size for rank in group}) == 1
            for rank, successor in zip(group, (*group[1:], group[0]), strict=True):
                leaves = cluster.local_domain_of(rank) != cluster.local_domain_of(successor)
                assert layout.wire(axis, rank) == ("cross" if leaves else "tp" if axis == "tp" else "local")
                assert layout.link(axis, rank) == cluster.link_between(rank, successor)
            between = list(itertools.permutations(group, 2))
            far += sum(cluster.local_domain_of(one) != cluster.local_domain_of(other) for one, other in between)
            pairs += len(between)
            near = "tp" if axis == "tp" else "local"
            for one, other in between:
                leaves = cluster.local_domain_of(one) != cluster.local_domain_of(other)
                assert layout.wires(axis, one)[group.index(other)] == ("cross" if leaves else near)
        assert layout.network_share(axis) == pytest.approx(far / max(pairs, 1))
        ring = Counter(layout.link(axis, rank) for rank in range(cluster.world_size) if layout.axis_size(axis) > 1)
        hops = Counter(cluster.link_between(*pair) for pair in itertools.pairwise(layout.axis_ranks(axis, 0)))
        assert (layout.links(axis), layout.hops(axis)) == (ring, hops)
    slow_tp = tp > 1 and list(layout.links("tp")) != ["domain"]
    assert len(layout.notices) == slow_tp + ("network" in layout.links("cp"))


def test_layout_docstring_example():
    for order, expected in (
        (None, {"tp": "01 23 45 67", "local": "02 13 46 57", "cross": "04 15 26 37", "shard": "0246 1357"}),
        (CYCLIC, {"tp": "02 46 13 57", "local": "04 26 15 37", "cross": "01 23 45 67", "shard": "0415 2637"}),
    ):
        layout = plan_layout(Cluster(num_nodes=2, ranks_per_node=4, order=order), tp=2, replicas=1)
        for axis, groups in expected.items():
            assert {"".join(map(str, ranks)) for ranks in layout.axis_groups(axis)} == {*groups.split()}, (order, axis)


def test_local_axis_fills_nodes_or_racks_and_replicas_are_even_parts():
    for nodes, ranks_per_node, domain, tp, replicas, sizes in (
        (2, 8, 2, 2, 1, (1, 2, 4)),  # tensor parallelism fits into NVLink pairs
        (36, 4, 72, 8, 1, (1, 2, 9)),  # domains are racks of 18 nodes
        (3, 4, None, 4, 1, (1, 3, 1)),
        (1, 4, None, 1, 2, (2, 1, 2)),
        (4, 2, None, 1, 2, (2, 2, 2)),
    ):
        cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node, domain_size=domain)
        layout = plan_layout(cluster, tp=tp, replicas=replicas)
        assert (layout.replicate, layout.cross, layout.local, layout.notices) == (*sizes, ()), cluster


def test_tensor_parallelism_beyond_fastest_links_adds_a_priced_notice():
    [notice] = plan_layout(Cluster(num_nodes=2, ranks_per_node=8, domain_size=2), tp=4, replicas=1).notices
    assert notice.startswith(
        "--tensor-model-parallel-size 4 does not fit into the 2 ranks that the fastest links connect"
    )
    assert "each rank sends 12 x --hidden-size bytes per token and layer" in notice
    layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=4), tp=8, replicas=1)
    assert (layout.local, layout.cross, layout.links("tp")) == (1, 2, {"domain": 12, "network": 4})
    [notice] = layout.notices
    assert notice.startswith("warning: --tensor-model-parallel-size 8 spans 2 nodes of 4 ranks")
    sent = 4 * 2 * 7 / 8 * 2  # four ring all-reduces over 8 ranks, with two bytes per channel and token
    assert f"each rank sends {sent:g} x --hidden-size bytes per token and layer in 16 bit" in notice


def test_context_parallelism_stays_in_a_node_unless_allowed_across():
    assert [*SPLIT.axis_groups("cp")] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert (SPLIT.data, SPLIT.shard, SPLIT.notices) == (2, 4, ())
    assert "tensor parallel 2, context parallel 2, shards 4 (2 across" in SPLIT.describe()
    across = plan_layout(SPLIT.cluster, tp=2, replicas=1, cp=4, cp_across=True)
    assert across.links("cp") == {"domain": 4, "network": 4}
    # queries, keys, values and outputs; forward and backward; two bytes; to 3 of 4 ranks; half the heads with tp 2
    sent = 2 * 4 * 2 * 3 / 4 / 2
    assert f"each rank sends {sent:g} x --hidden-size bytes per layer and local token" in across.notices[0]


# Columns: nodes | ranks per node | tp | replicas | cp | piece of the error message
REFUSED = """
    2 | 4 | 3  | 1 | 1 | --tensor-model-parallel-size 3 must divide the 4 ranks of a node
    2 | 4 | 3  | 1 | 1 | 1, 2, 4, 8 would fit, or a mult
    2 | 4 | 16 | 1 | 1 | --tensor-model-parallel-size 16 must divide
    2 | 4 | 0  | 1 | 1 | --tensor-model-parallel-size 0 must divide
    2 | 4 | 2  | 1 | 0 | --context-parallel-size 0 does not divide the 2 ranks
    2 | 4 | 2  | 1 | 4 | 1, 2 would fit, and 4 with --allow-cp
    2 | 4 | 1  | 3 | 1 | --num-distributed-optimizer-instances 3 does not divide the 8 data ranks
    2 | 4 | 1  | 0 | 1 | --num-distributed-optimizer-instances 0
    3 | 6 | 1  | 2 | 1 | 1, 3, 6, 9, 18 would fit
"""


def test_invalid_parallel_sizes_are_rejected_with_valid_ones():
    def plan(nodes: str, ranks_per_node: str, tp: str, replicas: str, cp: str) -> None:
        cluster = Cluster(num_nodes=int(nodes), ranks_per_node=int(ranks_per_node))
        plan_layout(cluster, tp=int(tp), replicas=int(replicas), cp=int(cp))

    assert not not_refused(table(REFUSED), plan)


@given(clusters(), st.integers(1, 60))
def test_sizes_suggested_by_the_error_are_exactly_the_valid_ones(cluster, tp):
    fits = tp in nested_sizes(cluster.local_domain_size, cluster.world_size)
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="would fit"):
        plan_layout(cluster, tp=tp, replicas=1)


def test_layout_of_131072_ranks_in_any_order_is_planned():
    world = 131_072
    # The factor is odd and the number of ranks a power of two, so that this order is a permutation
    order = tuple(rank * 48_271 % world for rank in range(world))
    layout = plan_layout(Cluster(num_nodes=world // 8, ranks_per_node=8, order=order), tp=4, replicas=16)
    assert sum(map(len, layout.axis_groups("local"))) == len(layout.mesh_ranks()) == world
    assert [len(layout.axis_ranks(axis, 77_777)) for axis in AXES] == [4, 1, 2, 1024, 2048, 16, 1]
    assert [layout.wire(axis, 77_777) for axis in AXES][:4] == ["tp", "local", "local", "cross"]


def test_links_of_a_million_ranks_need_no_loop_over_ranks():
    layout = plan_layout(
        Cluster(num_nodes=1 << 17, ranks_per_node=8, domain_size=2), tp=4, replicas=16, num_replica_groups=2
    )
    with mock.patch.object(Cluster, "position_of", return_value=0) as asked:
        links = {axis: layout.links(axis) for axis in AXES}
        assert layout.hops("shard") == {"node": 1 << 12, "network": (1 << 12) - 1}
    assert (links["tp"], links["local"]) == ({"domain": 1 << 19, "node": 1 << 19}, {"node": 1 << 20})
    assert links["cross"] == links["replica_group"] == {"network": 1 << 20}
    assert asked.call_count < 10


ON_PAIRS = plan_layout(Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=CYCLIC), tp=2, replicas=2)
RACKS = plan_layout(Cluster(num_nodes=4, ranks_per_node=2, domain_size=4), tp=1, replicas=1)
SPLIT = plan_layout(Cluster(num_nodes=2, ranks_per_node=4), tp=2, replicas=1, cp=2)
