"""Simulated time: order, dependence, what is hidden, and what the compute waits for."""

from __future__ import annotations

from megazpp.planner.cost import Costs
from megazpp.planner.paper import SimulatedQueue, Simulation


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

    beside = 0.25

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 2.0


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
