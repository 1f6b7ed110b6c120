"""Costs by hand: rings, trees, all-to-alls, shared adapters, and the roofline of a product."""

import math

import pytest

from megazpp.planner.cost import (
    CALIBRATIONS,
    CALL_MICROSECONDS,
    DGX2_EFFICIENCY,
    H100_EFFICIENCY,
    AxisCost,
    ClusterCosts,
    Efficiency,
    Operation,
    calibration_for,
)
from megazpp.topology.cluster import CALIBRATION_NAMES, Cluster, Device, Link, Links
from megazpp.topology.layout import Layout, plan_layout

LINKS = Links(domain=Link(100.0, 2.0), network=Link(10.0, 5.0))
MEASURED = Links(domain=Link(100.0, 2.0), network=Link(10.0, 5.0, "measured over cross"))
CALL = 1e-6 * CALL_MICROSECONDS
DEVICE = Device("a GPU", teraflops=100.0, gigabytes=80.0, gigabytes_per_second=1000.0)
HALF, PATH = Efficiency(network=0.5), Efficiency(network=0.5, uplink=20.0)


def layout(links: Links = LINKS, device: Device | None = DEVICE, tp: int = 1) -> Layout:
    cluster = Cluster(num_nodes=4, ranks_per_node=8, links=links, device=device)
    return plan_layout(cluster, tp=tp, replicas=1)


SECONDS = {  # a GB by the axis, and beside it the latency of each message
    "inside a node a ring sends at the rank's rate": (layout(), "local", Efficiency(), 7 * 2e-6 + 0.01),
    "all ranks of a node share its adapters": (layout(), "cross", Efficiency(), 3 * 5e-6 + 8 * 0.1),
    "of a ring over all ranks one sends to another node": (layout(), "shard", Efficiency(), 28 * 2e-6 + 15e-6 + 0.1),
    "of two rings two do": (layout(tp=2), "shard", Efficiency(), 12 * 2e-6 + 15e-6 + 2 * 0.1),
    "a share of the link makes it slower": (layout(), "cross", HALF, 15e-6 + 8 * 0.2),
    "a byte takes its rank's path to the adapters, then its share of them": (layout(), "cross", PATH, 15e-6 + 1.65),
    "inside a node there is no such path": (layout(), "local", PATH, 14e-6 + 0.01),
    "a measured rate is what programs reach": (layout(MEASURED), "cross", PATH, 15e-6 + 8 * 0.1),
}


@pytest.mark.parametrize(("on", "axis", "efficiency", "expected"), SECONDS.values(), ids=SECONDS)
def test_a_ring_takes_its_bytes_over_its_links(on, axis, efficiency, expected):
    assert AxisCost(on, axis, efficiency).seconds("all_gather", 10**9) == pytest.approx(CALL + expected)


def test_a_small_all_reduce_goes_along_the_tree_and_an_axis_of_one_rank_costs_nothing():
    tree = 2 * (7 * 2e-6 + math.log2(4) * 5e-6)
    assert AxisCost(layout(), "shard", Efficiency()).seconds("all_reduce", 0) == pytest.approx(CALL + tree)
    assert AxisCost(layout(), "tp", Efficiency()).seconds("all_reduce", 10**9) == 0.0


def test_a_product_takes_its_full_tiles_or_its_bytes_and_a_pass_over_memory_its_share():
    costs = ClusterCosts(layout(), Efficiency(matrix=0.5, memory=0.25))
    full = 2 * 1024 * 1024 * 4096 / 50e12
    product = Operation("matrix", 0, m=1024, n=1024, k=4096, batch=1.0)
    assert costs.operation(product) == pytest.approx(full)
    assert costs.operation(product._replace(m=1024 - 127, n=1024 - 127)) == pytest.approx(full)  # tiles not full
    assert costs.operation(product._replace(batch=2.0)) == pytest.approx(2 * full)
    assert costs.operation(product._replace(bytes=10**9)) == costs.memory(10**9) == pytest.approx(4e-3)
    assert costs.operation(Operation("memory", 10**9)) == pytest.approx(4e-3)


def test_a_free_axis_takes_nothing():
    costs = ClusterCosts(layout(), Efficiency(), free=("cross",))
    assert costs.collective("local", "all_gather", 10**8) > 0
    assert costs.collective("cross", "all_gather", 10**8) == 0.0


def test_figures_that_are_needed_and_not_known_are_named():
    with pytest.raises(ValueError, match=r"links\.network is not given, and axis cross"):
        AxisCost(layout(Links(domain=Link(1.0))), "cross", Efficiency())
    with pytest.raises(ValueError, match=r"--cluster-file: device is not given"):
        ClusterCosts(layout(device=None), Efficiency())


def test_a_device_has_the_calibration_that_it_names_whatever_its_own_name_is():
    assert tuple(CALIBRATIONS) == CALIBRATION_NAMES  # what a cluster file may name
    assert calibration_for(DEVICE._replace(name="H100", calibration="v100")).efficiency == DGX2_EFFICIENCY
    assert calibration_for(DEVICE._replace(calibration="h100")).efficiency == H100_EFFICIENCY
    assert calibration_for(DEVICE._replace(name="v100")) == calibration_for(None)
