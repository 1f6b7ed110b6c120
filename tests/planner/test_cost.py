"""Costs by hand: rings, trees, all-to-alls, shared adapters, and the roofline of a product."""

from __future__ import annotations

import itertools
import math

import pytest

from megazpp.planner.cost import (
    CALIBRATIONS,
    CALL_MICROSECONDS,
    DGX2_SHARES,
    H100_SHARES,
    AxisCost,
    ClusterCosts,
    Costs,
    Operation,
    Shares,
    calibration_for,
)
from megazpp.topology.cluster import SHARES, Cluster, Device, Link, Links
from megazpp.topology.layout import Layout, plan_layout

LINKS = Links(domain=Link(100.0, 2.0), network=Link(10.0, 5.0))
CALL = 1e-6 * CALL_MICROSECONDS
DEVICE = Device("a GPU", teraflops=100.0, gigabytes=80.0, gigabytes_per_second=1000.0)


def cost(axis: str, *, tp: int = 1, shares: Shares | None = None) -> AxisCost:
    layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=8, links=LINKS), tp=tp, replicas=1)
    return AxisCost(layout, axis, shares or Shares())


def test_inside_a_node_a_ring_sends_at_the_rank_s_rate():
    assert cost("local").seconds("all_gather", 10**9) == pytest.approx(CALL + 7 * 2e-6 + 0.01)


def test_all_ranks_of_a_node_share_its_adapters_on_the_cross_axis():
    assert cost("cross").seconds("all_to_all", 10**9) == pytest.approx(CALL + 3 * 5e-6 + 8 * 0.1)


def test_of_a_ring_over_all_ranks_one_per_tensor_parallel_index_sends_to_another_node():
    assert cost("shard").seconds("all_gather", 10**9) == pytest.approx(CALL + 28 * 2e-6 + 3 * 5e-6 + 0.1)
    two = cost("shard", tp=2).seconds("all_gather", 10**9)
    assert two == pytest.approx(CALL + 12 * 2e-6 + 3 * 5e-6 + 2 * 0.1)


def test_a_small_all_reduce_goes_along_the_tree():
    assert cost("shard").seconds("all_reduce", 0) == pytest.approx(CALL + 2 * (7 * 2e-6 + math.log2(4) * 5e-6))


def test_a_share_of_the_wire_makes_it_slower_and_an_axis_of_one_rank_costs_nothing():
    assert cost("cross", shares=Shares(network=0.5)).seconds("all_gather", 10**9) == pytest.approx(CALL + 15e-6 + 1.6)
    assert cost("tp").seconds("all_reduce", 10**9) == 0.0


def test_a_byte_takes_its_rank_s_path_to_the_adapters_and_then_its_share_of_them():
    shares = Shares(network=0.5, uplink=20.0)
    assert cost("cross", shares=shares).seconds("all_to_all", 10**9) == pytest.approx(CALL + 15e-6 + 8 / 5.0 + 0.05)
    assert cost("local", shares=shares).seconds("all_gather", 10**9) == pytest.approx(CALL + 14e-6 + 0.01)


@pytest.mark.parametrize("axis", ["shard", "cross"])
def test_more_adapters_are_always_faster_though_a_rank_s_path_stays(axis: str):
    taken = []
    for gigabits in (100, 200, 400, 800):
        links = Links(domain=Link(150.0), network=Link(gigabits / 8))
        layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=16, links=links), tp=1, replicas=1)
        taken.append(AxisCost(layout, axis, DGX2_SHARES).seconds("all_gather", 10**9))
    assert all(more < 0.95 * fewer for fewer, more in itertools.pairwise(taken))
    assert all(more > 0.5 * fewer for fewer, more in itertools.pairwise(taken))


def test_a_measured_rate_is_what_programs_reach():
    links = Links(network=Link(10.0, 5.0, "measured over cross"))
    layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=1, links=links), tp=1, replicas=1)
    found = AxisCost(layout, "cross", Shares(network=0.5, uplink=1.0)).seconds("all_gather", 10**9)
    assert found == pytest.approx(CALL + 15e-6 + 0.1)


def test_a_link_that_is_ridden_and_not_known_is_named():
    layout = plan_layout(Cluster(num_nodes=2, ranks_per_node=2, links=Links(domain=Link(1.0))), tp=1, replicas=1)
    with pytest.raises(ValueError, match=r"links\.network is not given, and axis cross"):
        AxisCost(layout, "cross", Shares())


def on_device(device: Device | None = DEVICE) -> Layout:
    return plan_layout(Cluster(num_nodes=2, ranks_per_node=2, links=LINKS, device=device), tp=1, replicas=1)


def test_a_product_takes_its_full_tiles_or_its_bytes():
    costs = ClusterCosts(on_device(), Shares(matrix=0.5))
    full = 2 * 1024 * 1024 * 4096 / 50e12
    product = Operation("matrix", 0, m=1024, n=1024, k=4096, batch=1.0)
    assert costs.operation(product) == pytest.approx(full)
    assert costs.operation(product._replace(m=1024 - 127, n=1024 - 127)) == pytest.approx(full)  # tiles not full
    assert costs.operation(product._replace(batch=2.0)) == pytest.approx(2 * full)
    assert costs.operation(Operation("matrix", 10**9, m=1, n=1, k=1, batch=1.0)) == pytest.approx(1e-3)


def test_a_pass_over_memory_takes_a_share_of_its_rate():
    costs = ClusterCosts(on_device(), Shares(memory=0.5))
    assert costs.operation(Operation("memory", 10**9)) == costs.memory(10**9) == pytest.approx(2e-3)


def test_a_free_axis_takes_nothing():
    shares = Shares(beside=0.25)
    costs = ClusterCosts(on_device(), shares, free=("cross",))
    seconds = costs.collective("local", "all_gather", 10**8)
    assert seconds == AxisCost(on_device(), "local", shares).seconds("all_gather", 10**8) > 0
    assert costs.beside == 0.25
    assert costs.collective("cross", "all_gather", 10**8) == 0.0


def test_a_cluster_without_a_device_is_refused_by_name():
    with pytest.raises(ValueError, match=r"--cluster-file: device is not given"):
        ClusterCosts(on_device(device=None), Shares())


def test_counting_takes_no_time():
    costs = Costs()
    assert costs.operation(Operation("memory", 10)) == costs.memory(10) == 0.0
    assert costs.collective("tp", "all_reduce", 10) == costs.beside == 0.0


def test_a_device_has_the_calibration_that_it_names_whatever_its_own_name_is():
    for name in ("V100-SXM3-32GB", "Tesla V100", "v100"):
        assert calibration_for(DEVICE._replace(name=name, shares="v100")).shares == DGX2_SHARES
        assert calibration_for(DEVICE._replace(name=name)) == calibration_for(None)
    assert calibration_for(DEVICE._replace(shares="h100")).shares == H100_SHARES


def test_every_name_that_a_cluster_file_may_have_is_a_calibration():
    assert tuple(CALIBRATIONS) == SHARES
