"""Who gets which rank: every axis covers the ranks once, on the wires it should; a layout survives its record."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.topology.cluster import Cluster, nested_sizes
from megazpp.topology.layout import AXES, Layout, layout_from_record, layout_record, plan_layout

CYCLIC = tuple(index * 2 + node for node in range(2) for index in range(4))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to 48 ranks in block, cyclic or any other order, with domains smaller, as large and larger than a node."""
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
    """Every tp and every number of replicas that fits."""
    cluster = draw(clusters())
    tp = draw(st.sampled_from(nested_sizes(cluster.local_domain_size, cluster.world_size)))
    per_domain, data = max(cluster.local_domain_size // tp, 1), cluster.world_size // tp
    replicas = data // draw(st.sampled_from(nested_sizes(per_domain, data)))
    cp = draw(st.sampled_from(nested_sizes(per_domain, data)))
    return plan_layout(cluster, tp=tp, replicas=replicas, cp=cp, cp_across=True)


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    return {axis: layout.axis_ranks(axis, rank).index(rank) for axis in AXES}


@settings(max_examples=50)
@given(layouts())
def test_every_axis_partitions_the_ranks_into_groups_that_differ_in_that_coordinate_only(layout: Layout):
    place = {rank: coordinates(layout, rank) for rank in range(layout.cluster.world_size)}
    others = {  # cross and replica peers share tp and local index: one rail
        "tp": ("cp", "local", "cross", "replicate"),
        "cp": ("tp",),
        "local": ("tp", "cross", "replicate"),
        "cross": ("tp", "local", "replicate"),
        "shard": ("tp", "replicate"),
        "replicate": ("tp", "shard"),
        "island": (),
    }
    for axis in AXES:
        groups = list(layout.axis_groups(axis))
        assert sorted(rank for group in groups for rank in group) == list(place)
        for group in groups:
            assert len(group) == layout.axis_size(axis)
            assert {layout.axis_ranks(axis, rank) for rank in group} == {group}
            assert len({tuple(place[rank][other] for other in others[axis]) for rank in group}) == 1


@settings(max_examples=50)
@given(layouts())
def test_ranks_follow_each_other_by_replica_shard_and_tp_and_shard_is_cross_times_local(layout: Layout):
    sizes = (layout.replicate, layout.shard, layout.tp)
    for rank, expected in zip(layout.mesh_ranks(), itertools.product(*map(range, sizes)), strict=True):
        at = coordinates(layout, rank)
        assert tuple(at[axis] for axis in ("replicate", "shard", "tp")) == expected
        assert at["shard"] == at["cross"] * layout.local + at["local"]


@settings(max_examples=50)
@given(layouts())
def test_peers_are_as_near_as_the_cluster_allows(layout: Layout):
    cluster = layout.cluster
    for rank in range(cluster.world_size):
        tp = layout.axis_ranks("tp", rank)
        if cluster.ranks_per_domain % layout.tp == 0:
            assert {cluster.domain_of(peer) for peer in tp} == {cluster.domain_of(rank)}
        assert len({cluster.local_domain_of(peer) for peer in tp}) == -(-layout.tp // cluster.local_domain_size)
        assert {cluster.local_domain_of(peer) for peer in layout.axis_ranks("local", rank)} == {
            cluster.local_domain_of(rank)
        }
        cp = {cluster.local_domain_of(peer) for peer in layout.axis_ranks("cp", rank)}
        assert len(cp) == max(layout.tp * layout.cp // max(cluster.local_domain_size, layout.tp), 1)
        across = layout.axis_ranks("cross", rank)
        assert len({cluster.local_domain_of(peer) for peer in across}) == len(across)
        assert len({cluster.position_of(peer) % cluster.local_domain_size for peer in across}) == 1


@settings(max_examples=50)
@given(layouts())
def test_only_links_between_local_domains_are_cross_and_a_notice_says_when_tp_leaves_the_fastest_wire(layout: Layout):
    cluster = layout.cluster
    for axis in AXES:
        for group in layout.axis_groups(axis):
            for rank, successor in zip(group, (*group[1:], group[0]), strict=True):
                leaves = cluster.local_domain_of(rank) != cluster.local_domain_of(successor)
                inside = "tp" if axis == "tp" else "local"
                assert layout.wire(axis, rank) == ("cross" if leaves else inside)
                assert layout.link(axis, rank) == cluster.link_between(rank, successor)
        ring = Counter(layout.link(axis, rank) for rank in range(cluster.world_size) if layout.axis_size(axis) > 1)
        hops = Counter(cluster.link_between(*pair) for pair in itertools.pairwise(layout.axis_ranks(axis, 0)))
        assert (layout.links(axis), layout.hops(axis)) == (ring, hops)
    slow_tp = layout.axis_size("tp") > 1 and list(layout.links("tp")) != ["domain"]
    assert len(layout.notices) == slow_tp + ("network" in layout.links("cp"))


@pytest.mark.parametrize(("order", "expected"), [
    (None, {"tp": "01 23 45 67", "local": "02 13 46 57", "cross": "04 15 26 37", "shard": "0246 1357"}),
    (CYCLIC, {"tp": "02 46 13 57", "local": "04 26 15 37", "cross": "01 23 45 67", "shard": "0415 2637"}),
])  # fmt: skip
def test_the_docstring_example(order: tuple[int, ...] | None, expected: dict[str, str]):
    layout = plan_layout(Cluster(num_nodes=2, ranks_per_node=4, order=order), tp=2, replicas=1)
    for axis, groups in expected.items():
        assert {"".join(map(str, ranks)) for ranks in layout.axis_groups(axis)} == {*groups.split()}, axis


def test_tp_stays_inside_a_pair_and_the_local_axis_takes_the_rest_of_the_node():
    pairs = Cluster(num_nodes=2, ranks_per_node=8, domain_size=2)
    layout = plan_layout(pairs, tp=2, replicas=1)
    assert (layout.tp, layout.local, layout.cross, layout.notices) == (2, 4, 2, ())
    assert (layout.links("tp"), layout.links("local"), layout.links("cross")) == (
        {"domain": 16},
        {"node": 16},
        {"network": 16},
    )
    [notice] = plan_layout(pairs, tp=4, replicas=1).notices
    assert notice.startswith("--tensor-model-parallel-size 4 does not fit into the 2 ranks that share the fastest wire")
    assert "each rank sends 12 x --hidden-size bytes per token and layer" in notice


def test_a_rack_is_one_local_domain_so_tp_and_the_local_axis_reach_over_its_nodes():
    racks = Cluster(num_nodes=36, ranks_per_node=4, domain_size=72)
    layout = plan_layout(racks, tp=8, replicas=1)
    assert (layout.local, layout.cross, layout.notices) == (9, 2, ())
    assert layout.links("tp") == layout.links("local") == {"domain": 144}
    assert layout.wire("local", 0) == "local"
    assert layout.wire("cross", 0) == "cross"


def test_tp_of_a_whole_node_leaves_a_local_axis_of_one():
    layout = plan_layout(Cluster(num_nodes=3, ranks_per_node=4), tp=4, replicas=1)
    assert (layout.local, layout.cross, layout.shard, layout.notices) == (1, 3, 3, ())
    assert layout.links("local") == {}


def test_tp_over_nodes_is_laid_out_with_a_warning_that_gives_the_price():
    layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=4), tp=8, replicas=1)
    assert (layout.local, layout.cross, layout.links("tp")) == (1, 2, {"domain": 12, "network": 4})
    [notice] = layout.notices
    assert notice.startswith("warning: --tensor-model-parallel-size 8 spans 2 nodes of 4 ranks")
    sent = 4 * 2 * 7 / 8 * 2  # four all-reduces of a ring of 8, of two bytes for each channel and token
    assert f"each rank sends {sent:g} x --hidden-size bytes per token and layer in 16 bit" in notice


def test_samples_are_split_inside_a_node_unless_that_is_asked_for():
    assert [*SPLIT.axis_groups("cp")] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert (SPLIT.data, SPLIT.shard, SPLIT.notices) == (2, 4, ())
    assert "tensor parallel 2, context parallel 2, shards 4 (2 across" in SPLIT.describe()
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    for cp in (0, 3, 4, 16):
        message = f"--context-parallel-size {cp} does not divide the 2 ranks .* 1, 2 would fit, and 4 with --allow-cp"
        with pytest.raises(ValueError, match=message):
            plan_layout(cluster, tp=2, replicas=1, cp=cp)
    across = plan_layout(cluster, tp=2, replicas=1, cp=4, cp_across=True)
    assert across.links("cp") == {"domain": 4, "network": 4}
    sent = 2 * 4 * 2 * 3 / 4 / 2  # queries, keys, values, outputs; there and back; two bytes; to 3 of 4 ranks; tp 2
    assert f"each rank sends {sent:g} x --hidden-size bytes per token of its own" in across.notices[0]


def test_replicas_are_groups_of_nodes_or_even_parts_of_one():
    layout = plan_layout(Cluster(num_nodes=1, ranks_per_node=4), tp=1, replicas=2)
    assert (layout.cross, layout.local, layout.shard) == (1, 2, 2)
    layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=2), tp=1, replicas=2)
    assert (layout.cross, layout.local, layout.replicate) == (2, 2, 2)
    with pytest.raises(ValueError, match=r"--num-distributed-optimizer-instances 2 .* 1, 3, 6, 9, 18 would fit"):
        plan_layout(Cluster(num_nodes=3, ranks_per_node=6), tp=1, replicas=2)


@pytest.mark.parametrize(("tp", "replicas", "message"), [
    (3, 1, "-parallel-size 3 neither divides the 4 ranks of a node .*1, 2, 4, 8 would fit, or a mult"),
    (16, 1, "--tensor-model-parallel-size 16 neither"),
    (0, 1, "--tensor-model-parallel-size 0"),
    (-1, 1, "--tensor-model-parallel-size -1"),
    (1, 3, "--num-distributed-optimizer-instances 3 does not divide the 8 data ranks .*1, 2, 4, 8 would fit"),
    (1, 0, "--num-distributed-optimizer-instances 0"),
])  # fmt: skip
def test_degrees_that_do_not_fit_name_the_flag_and_what_would(tp: int, replicas: int, message: str):
    with pytest.raises(ValueError, match=message):
        plan_layout(Cluster(num_nodes=2, ranks_per_node=4), tp=tp, replicas=replicas)


@given(clusters(), st.integers(1, 60))
def test_what_the_message_says_would_fit_fits_and_nothing_else(cluster: Cluster, tp: int):
    if tp in nested_sizes(cluster.local_domain_size, cluster.world_size):
        plan_layout(cluster, tp=tp, replicas=1)
    else:
        with pytest.raises(ValueError, match="would fit"):
            plan_layout(cluster, tp=tp, replicas=1)


def test_131072_ranks_in_any_order_are_planned_in_under_two_seconds():
    world = 131_072
    order = tuple(rank * 48_271 % world for rank in range(world))  # odd, so a permutation
    start = time.process_time()
    layout = plan_layout(Cluster(num_nodes=world // 8, ranks_per_node=8, order=order), tp=4, replicas=16)
    assert len(layout.mesh_ranks()) == world
    assert all(sum(map(len, layout.axis_groups(axis))) == world for axis in AXES)
    assert [len(layout.axis_ranks(axis, 77_777)) for axis in AXES] == [4, 1, 2, 1024, 2048, 16, 1]
    assert [layout.wire(axis, 77_777) for axis in AXES][:4] == ["tp", "local", "local", "cross"]
    assert time.process_time() - start < 2


def test_what_the_links_of_a_million_ranks_are_follows_from_one_node_of_them():
    start = time.process_time()
    layout = plan_layout(Cluster(num_nodes=1 << 17, ranks_per_node=8, domain_size=2), tp=4, replicas=16, islands=2)
    links = {axis: layout.links(axis) for axis in AXES}
    assert (links["tp"], links["local"]) == ({"domain": 1 << 19, "node": 1 << 19}, {"node": 1 << 20})
    assert links["cross"] == links["island"] == {"network": 1 << 20}
    assert layout.hops("shard") == {"node": 1 << 12, "network": (1 << 12) - 1}
    assert time.process_time() - start < 1


def test_the_log_line_names_domains_and_an_order_of_its_own():
    text = ON_PAIRS.describe()
    assert text.startswith("2 node(s) x 4 rank(s) (fastest wire among 2), ranks in the order 0 2 4 6 1 3 5 7: ")
    assert text.endswith("tensor parallel 2, shards 2 (1 across nodes x 2 inside), replicas 2")


ON_PAIRS = plan_layout(Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=CYCLIC), tp=2, replicas=2)
RACKS = plan_layout(Cluster(num_nodes=4, ranks_per_node=2, domain_size=4), tp=1, replicas=1)
SPLIT = plan_layout(Cluster(num_nodes=2, ranks_per_node=4), tp=2, replicas=1, cp=2)


@pytest.mark.parametrize("layout", [ON_PAIRS, RACKS, SPLIT])
def test_a_layout_comes_back_from_json_as_it_was(layout: Layout):
    assert layout_from_record(json.loads(json.dumps(layout_record(layout)))) == layout


@pytest.mark.parametrize("change", [
    *({"tp": wrong} for wrong in (None, "2", 4)),
    *({"order": wrong} for wrong in (3, [0] * 8, ["0"])),
    *({"num_nodes": wrong} for wrong in (0, True)),
    {"domain_size": 3},
    {"cross": -1},
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(change: dict[str, Any]):
    with pytest.raises(ValueError, match=r"."):
        layout_from_record(layout_record(ON_PAIRS) | change)
