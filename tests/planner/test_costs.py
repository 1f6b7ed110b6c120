"""Costs of the pieces of a step: what they are made of, what may be left out, and what a collective takes beside."""

from __future__ import annotations

import pytest

from megazpp.planner.costs import ClusterCosts, NoCosts
from megazpp.planner.recorder import Operation
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.cost import AxisCost, DeviceCost
from megazpp.topology.layout import Layout, plan_layout
from megazpp.topology.shares import Shares

DEVICE = Device("a GPU", teraflops=100.0, gigabytes=80.0, gigabytes_per_second=1000.0)
SHARES = Shares(matrix=0.5, memory=0.5, beside=0.25)


def layout(device: Device | None = DEVICE) -> Layout:
    links = Links(domain=Link(100.0, 2.0), network=Link(10.0, 5.0))
    return plan_layout(Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device), tp=1, replicas=1)


def test_work_is_a_product_or_a_pass_over_memory():
    costs, device = ClusterCosts(layout(), SHARES), DeviceCost(device=DEVICE, shares=SHARES)
    assert costs.operation(Operation("memory", 10**9)) == costs.memory(10**9) == pytest.approx(2e-3)
    product = Operation("matrix", 100, m=256, n=256, k=4096, batch=2.0)
    assert costs.operation(product) == device.matrix_seconds(256, 256, 4096, 2.0, 100)


def test_a_collective_beside_the_compute_takes_its_share_and_a_free_axis_takes_nothing():
    costs = ClusterCosts(layout(), SHARES, free=("cross",))
    seconds = costs.collective("local", "all_gather", 10**8)
    assert seconds == AxisCost(layout(), "local", SHARES).seconds("all_gather", 10**8)
    assert costs.taken("local", "all_gather", 10**8) == seconds / 4
    assert costs.collective("cross", "all_gather", 10**8) == costs.taken("cross", "all_gather", 10**8) == 0.0


def test_a_cluster_without_a_device_is_refused_by_name():
    with pytest.raises(ValueError, match=r"--cluster-file: device is not given"):
        ClusterCosts(layout(device=None), SHARES)


def test_counting_takes_no_time():
    costs = NoCosts()
    assert costs.operation(Operation("memory", 10)) == costs.memory(10) == 0.0
    assert costs.collective("tp", "all_reduce", 10) == costs.taken("tp", "all_reduce", 10) == 0.0
