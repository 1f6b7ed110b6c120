"""Simulated time: order, dependence, what is hidden, what the compute waits for, and what things cost."""

from __future__ import annotations

import pytest

from megazpp.planner.clock import ClusterCosts, Costs, SimulatedQueue, Simulation
from megazpp.planner.trace import Operation
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.cost import AxisCost, DeviceCost
from megazpp.topology.layout import Layout, plan_layout
from megazpp.topology.shares import Shares


def test_a_task_is_hidden_behind_compute_until_somebody_waits_for_it():
    simulation = Simulation(Costs())
    queue = SimulatedQueue(simulation, "cross")
    work = queue.submit(lambda: simulation.spend(3.0))
    simulation.spend(2.0)
    work.wait()
    assert simulation.compute.now == 3.0


def moment(simulation: Simulation) -> float:
    """To which the running clock has come."""
    return simulation.running.now


def test_a_queue_keeps_the_order_and_a_task_starts_when_what_it_needs_is_done():
    simulation = Simulation(Costs())
    cross, local = SimulatedQueue(simulation, "cross"), SimulatedQueue(simulation, "local")
    began: dict[str, float] = {}

    def task(name: str, seconds: float) -> None:
        began[name] = moment(simulation)
        simulation.spend(seconds)

    first = cross.submit(lambda: task("a", 3.0))
    cross.submit(lambda: task("b", 1.0))
    local.submit(lambda: task("c", 1.0), after=(first,))
    assert began == {"a": 0.0, "b": 3.0, "c": 3.0}
    assert simulation.compute.now == 0.0


def test_a_task_does_not_start_before_it_was_given():
    simulation = Simulation(Costs())
    queue = SimulatedQueue(simulation, "cross")
    simulation.spend(5.0)
    assert queue.submit(lambda: moment(simulation)).wait() == 5.0


def test_a_new_step_begins_when_all_is_done_and_works_of_the_last_one_hold_nobody_up():
    simulation = Simulation(Costs())
    work = SimulatedQueue(simulation, "cross").submit(lambda: simulation.spend(3.0))
    simulation.spend(1.0)
    assert simulation.busy == {"compute": 1.0}
    assert simulation.begin_step() == simulation.compute.now == 3.0
    work.wait()
    assert simulation.compute.now == 3.0
    assert not simulation.busy


class TwoSeconds(Costs):
    """Of every collective; a quarter of it is taken from the compute."""

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 2.0

    def taken(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 0.5


def test_collectives_of_one_group_run_one_after_the_other_in_the_order_of_their_start():
    simulation = Simulation(TwoSeconds())
    gathers, reductions = simulation.new_clock(), simulation.new_clock()
    for clock in (reductions, gathers):
        with simulation.on(clock):
            simulation.send("shard", "all_gather", 1)
    assert (reductions.now, gathers.now) == (2.0, 4.0)
    assert simulation.busy["shard"] == 4.0


def test_a_collective_beside_the_compute_takes_from_it_and_one_that_the_compute_waits_for_does_not():
    simulation = Simulation(TwoSeconds())
    gathers = simulation.new_clock()
    with simulation.on(gathers):
        simulation.send("shard", "all_gather", 1)
    assert simulation.compute.now == 0.5
    simulation.running.wait_until(gathers.now)  # it was taken from a compute that had nothing to do
    assert simulation.compute.now == 2.0
    simulation.send("shard", "all_reduce", 1)
    assert simulation.compute.now == 4.0


# ---- costs ----------------------------------------------------------------------------------------------------------

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
    costs = Costs()
    assert costs.operation(Operation("memory", 10)) == costs.memory(10) == 0.0
    assert costs.collective("tp", "all_reduce", 10) == costs.taken("tp", "all_reduce", 10) == 0.0
