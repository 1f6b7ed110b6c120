"""Costs by hand: rings, trees, all-to-alls, shared adapters, and the roofline of a product."""

import math

import pytest

from megazpp.planner.cost import (
    CALIBRATIONS,
    CALL_MICROSECONDS,
    DGX2_SHARES,
    H100_SHARES,
    AxisCost,
    ClusterCosts,
    Operation,
    Shares,
    calibration_for,
)
from megazpp.topology.cluster import SHARES, Cluster, Device, Link, Links
from megazpp.topology.layout import Layout, plan_layout

LINKS = Links(domain=Link(100.0, 2.0), network=Link(10.0, 5.0))
NO_SHARES = Shares()
CALL = 1e-6 * CALL_MICROSECONDS
DEVICE = Device("a GPU", teraflops=100.0, gigabytes=80.0, gigabytes_per_second=1000.0)


def cost(axis: str, *, tp: int = 1, shares: Shares = NO_SHARES) -> AxisCost:
    layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=8, links=LINKS), tp=tp, replicas=1)
    return AxisCost(layout, axis, shares)


HALF = Shares(network=0.5)
PATH = Shares(network=0.5, uplink=20.0)
SECONDS = {  # a GB by the axis, and beside it the latency of each message
    "inside a node a ring sends at the rank's rate": ("local", 1, Shares(), 7 * 2e-6 + 0.01),
    "all ranks of a node share its adapters": ("cross", 1, Shares(), 3 * 5e-6 + 8 * 0.1),
    "of a ring over all ranks one per tp index sends to another node": ("shard", 1, Shares(), 28 * 2e-6 + 15e-6 + 0.1),
    "of two rings two do": ("shard", 2, Shares(), 12 * 2e-6 + 15e-6 + 2 * 0.1),
    "a share of the link makes it slower": ("cross", 1, HALF, 15e-6 + 8 * 0.2),
    "a byte takes its rank's path to the adapters, and then its share of them": ("cross", 1, PATH, 15e-6 + 1.6 + 0.05),
    "inside a node there is no such path": ("local", 1, PATH, 14e-6 + 0.01),
}


def test_a_ring_takes_its_bytes_over_its_links():
    for name, (axis, tp, shares, expected) in SECONDS.items():
        found = cost(axis, tp=tp, shares=shares).seconds("all_gather", 10**9)
        assert found == pytest.approx(CALL + expected), name


def test_a_small_all_reduce_goes_along_the_tree_and_an_axis_of_one_rank_costs_nothing():
    assert cost("shard").seconds("all_reduce", 0) == pytest.approx(CALL + 2 * (7 * 2e-6 + math.log2(4) * 5e-6))
    assert cost("tp").seconds("all_reduce", 10**9) == 0.0


def test_a_measured_rate_is_what_programs_reach():
    links = Links(network=Link(10.0, 5.0, "measured over cross"))
    layout = plan_layout(Cluster(num_nodes=4, ranks_per_node=1, links=links), tp=1, replicas=1)
    found = AxisCost(layout, "cross", Shares(network=0.5, uplink=1.0)).seconds("all_gather", 10**9)
    assert found == pytest.approx(CALL + 15e-6 + 0.1)


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
    costs = ClusterCosts(on_device(), NO_SHARES, free=("cross",))
    expected = AxisCost(on_device(), "local", NO_SHARES).seconds("all_gather", 10**8)
    assert costs.collective("local", "all_gather", 10**8) == expected > 0
    assert costs.collective("cross", "all_gather", 10**8) == 0.0


def test_figures_that_are_needed_and_not_known_are_named():
    layout = plan_layout(Cluster(num_nodes=2, ranks_per_node=2, links=Links(domain=Link(1.0))), tp=1, replicas=1)
    with pytest.raises(ValueError, match=r"links\.network is not given, and axis cross"):
        AxisCost(layout, "cross", NO_SHARES)
    with pytest.raises(ValueError, match=r"--cluster-file: device is not given"):
        ClusterCosts(on_device(device=None), NO_SHARES)


def test_a_device_has_the_calibration_that_it_names_whatever_its_own_name_is():
    assert tuple(CALIBRATIONS) == SHARES  # what a cluster file may name
    for name in ("V100-SXM3-32GB", "Tesla V100", "v100"):
        assert calibration_for(DEVICE._replace(name=name, shares="v100")).shares == DGX2_SHARES
        assert calibration_for(DEVICE._replace(name=name)) == calibration_for(None)
    assert calibration_for(DEVICE._replace(shares="h100")).shares == H100_SHARES
