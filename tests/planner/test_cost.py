"""Test the cost model: rings, trees, all-to-alls, shared network adapters and matrix products.

Expected seconds are computed by hand.
"""

import math

import pytest

from megazpp.planner.cost import (
    CALIBRATIONS,
    CALL_MICROSECONDS,
    DGX2_EFFICIENCY,
    H100_500W_EFFICIENCY,
    HOST_MICROSECONDS,
    AxisCost,
    ClusterCosts,
    Efficiency,
    Operation,
    calibration_for,
)
from megazpp.topology.cluster import CALIBRATION_NAMES, Cluster, Device, Link, Links
from megazpp.topology.layout import Layout
from megazpp.topology.plan import plan_layout

LINKS = Links(domain=Link(100.0, 2.0), network=Link(10.0, 5.0))
FAST = Links(domain=Link(100.0, 2.0), network=Link(20.0, 5.0))
OWN = Links(domain=Link(100.0, 2.0), network=Link(100.0, 5.0))
MEASURED = Links(domain=Link(100.0, 2.0), network=Link(10.0, 5.0, "measured over cross"))
CALL = 1e-6 * CALL_MICROSECONDS
DEVICE = Device("a GPU", teraflops=100.0, gigabytes=80.0, gigabytes_per_second=1000.0)
HALF, PATH = Efficiency(network=0.5), Efficiency(network=0.5, uplink=20.0)


def layout(links: Links = LINKS, device: Device | None = DEVICE, tp: int = 1) -> Layout:
    cluster = Cluster(num_nodes=4, ranks_per_node=8, links=links, device=device)
    return plan_layout(cluster, tp=tp, replicas=1)


# layout, axis, efficiency, and expected seconds to send 1 GB on that axis, with the latency of each message
SECONDS = {
    "inside a node a ring sends at the rank's rate": (layout(), "local", Efficiency(), 7 * 2e-6 + 0.01),
    "all ranks of a node share its adapters": (layout(), "cross", Efficiency(), 3 * 5e-6 + 8 * 0.1),
    "in a ring over all ranks one rank of a node sends to another node": (
        layout(),
        "shard",
        Efficiency(),
        28 * 2e-6 + 15e-6 + 0.1,
    ),
    "with two rings two ranks of a node send to another node": (
        layout(tp=2),
        "shard",
        Efficiency(),
        12 * 2e-6 + 15e-6 + 2 * 0.1,
    ),
    "a share of the link's bandwidth takes longer": (layout(), "cross", HALF, 15e-6 + 8 * 0.2),
    "bytes cross the rank's path to shared adapters and then the network": (layout(FAST), "cross", PATH, 15e-6 + 0.45),
    "with slow adapters a share of the bandwidth counts": (layout(), "cross", PATH, 15e-6 + 8 * 0.2),
    "with an adapter per rank a share of the bandwidth counts": (layout(OWN), "cross", PATH, 15e-6 + 8 * 0.02),
    "inside a node bytes do not cross the path to the adapters": (layout(), "local", PATH, 14e-6 + 0.01),
    "a measured rate needs no share": (layout(MEASURED), "cross", PATH, 15e-6 + 8 * 0.1),
}


@pytest.mark.parametrize(("on", "axis", "efficiency", "expected"), SECONDS.values(), ids=SECONDS)
def test_ring_seconds_equal_latency_plus_bytes_over_links(on, axis, efficiency, expected):
    assert AxisCost(on, axis, efficiency).seconds("all_gather", 10**9) == pytest.approx(CALL + expected)


def test_small_all_reduce_uses_tree_and_one_rank_costs_nothing():
    tree = 2 * (7 * 2e-6 + math.log2(4) * 5e-6)
    assert AxisCost(layout(), "shard", Efficiency()).seconds("all_reduce", 0) == pytest.approx(CALL + tree)
    assert AxisCost(layout(), "tp", Efficiency()).seconds("all_reduce", 10**9) == 0.0


def test_product_costs_full_tiles_or_bytes_and_memory_pass_its_share():
    """A matrix product takes the time of its full tiles or of its bytes, whichever is longer.

    A pass over memory reaches the share `Efficiency.memory` of the data sheet's bandwidth.
    """
    costs = ClusterCosts(layout(), Efficiency(matrix=0.5, memory=0.25))
    full = 2 * 1024 * 1024 * 4096 / 50e12
    product = Operation("matrix", 0, m=1024, n=1024, k=4096, batch=1.0)
    assert costs.operation(product) == pytest.approx(full)
    # Sizes that fill the last tiles only partly cost as much as full tiles.
    assert costs.operation(product._replace(m=1024 - 127, n=1024 - 127)) == pytest.approx(full)
    assert costs.operation(product._replace(batch=2.0)) == pytest.approx(2 * full)
    assert costs.operation(product._replace(bytes=10**9)) == costs.memory(10**9) == pytest.approx(4e-3)
    assert costs.operation(Operation("memory", 10**9)) == pytest.approx(4e-3)


def test_last_wave_of_tiles_costs_a_full_wave():
    costs = ClusterCosts(layout(), Efficiency(multiprocessors=100))
    wave = 2 * 128 * 128 * 4096 * 100 / 100e12
    for m, waves in ((128 * 10, 1), (128 * 11, 2), (128 * 20, 2)):
        assert costs.operation(Operation("matrix", 0, m=m, n=1280, k=4096, batch=1.0)) == pytest.approx(waves * wave)


def test_device_of_unknown_speed_has_no_host_time():
    assert ClusterCosts(layout(), Efficiency()).launch == 1e-6 * HOST_MICROSECONDS
    unknown = DEVICE._replace(teraflops=math.inf, gigabytes_per_second=math.inf)
    assert ClusterCosts(layout(device=unknown), Efficiency()).launch == 0.0


def test_cpu_rank_encodes_at_its_own_rate_and_computes_beside_nothing_but_the_network():
    """Compare the costs of a rank on a CPU, whose rates of encoding are given, with the costs of a rank on a GPU.

    `beside` gives the seconds by which one second of a collective delays compute. On a CPU it is 1 for a collective
    inside a node, which uses the same cores, and 0 between nodes.
    """
    gpu = ClusterCosts(layout(), Efficiency())
    # encoding reads old and new weights twice, and writes the message of 0.1 GB
    assert gpu.encode(10**9, 10**8) == pytest.approx(4.1e-3)
    assert gpu.decode(10**9, 10**8) == pytest.approx(2.1e-3)
    rates = {"encode_gigabytes_per_second": 0.5, "decode_gigabytes_per_second": 2.0}
    cpu = ClusterCosts(layout(device=DEVICE._replace(**rates)), Efficiency())
    assert (cpu.encode(10**9, 10**8), cpu.decode(10**9, 10**8)) == (2.0, 0.5)
    assert (cpu.beside("local"), cpu.beside("cross"), gpu.beside("local")) == (1.0, 0.0, 0.0)
    product = Operation("matrix", 0, m=16, n=1024, k=4096, batch=1.0)
    # 16 rows cost a GPU as much as a full tile of 128 rows, but a CPU only an eighth
    assert cpu.operation(product) == pytest.approx(gpu.operation(product) / 8)


def test_free_axis_costs_nothing():
    """Check that collectives take no time on an axis in `free`, but take time on other axes.

    The planner estimates a run with and without a free axis to find how much time the axis costs.
    """
    costs = ClusterCosts(layout(), Efficiency(), free=("cross",))
    assert costs.collective("local", "all_gather", 10**8) > 0
    assert costs.collective("cross", "all_gather", 10**8) == 0.0


def test_calibration_follows_the_key_not_the_device_name():
    assert tuple(CALIBRATIONS) == CALIBRATION_NAMES  # CALIBRATION_NAMES lists the names that a cluster file may use
    assert calibration_for(DEVICE._replace(name="H100", calibration="v100")).efficiency == DGX2_EFFICIENCY
    assert calibration_for(DEVICE._replace(calibration="h100_500w")).efficiency == H100_500W_EFFICIENCY
    assert calibration_for(DEVICE._replace(name="v100")) == calibration_for(None)
