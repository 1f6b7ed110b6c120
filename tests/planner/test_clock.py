"""Queues in simulated time: order, dependence, what is hidden and what the compute waits for."""

from __future__ import annotations

from megazpp.planner.clock import SimulatedQueue, Simulation


def test_a_task_is_hidden_behind_compute_until_somebody_waits_for_it():
    simulation = Simulation()
    queue = SimulatedQueue(simulation, "cross")
    work = queue.submit(lambda: simulation.spend("hop", 3.0))
    simulation.spend("forward", 2.0)
    work.wait()
    assert simulation.compute.now == 3.0


def test_a_queue_keeps_the_order_and_a_task_starts_when_what_it_needs_is_done():
    simulation = Simulation()
    cross, local = SimulatedQueue(simulation, "cross"), SimulatedQueue(simulation, "local")
    first = cross.submit(lambda: simulation.spend("a", 3.0))
    cross.submit(lambda: simulation.spend("b", 1.0))
    local.submit(lambda: simulation.spend("c", 1.0), after=(first,))
    spans = {span.name: (span.clock, span.start, span.end) for span in simulation.spans}
    assert spans == {"a": ("cross", 0.0, 3.0), "b": ("cross", 3.0, 4.0), "c": ("local", 3.0, 4.0)}
    assert simulation.compute.now == 0.0


def test_a_task_does_not_start_before_it_was_given():
    simulation = Simulation()
    queue = SimulatedQueue(simulation, "cross")
    simulation.spend("forward", 5.0)
    queue.submit(lambda: simulation.spend("hop", 1.0))
    assert simulation.spans[-1][2:] == (5.0, 6.0)


def test_a_new_step_begins_when_all_is_done_and_works_of_the_last_one_hold_nobody_up():
    simulation = Simulation()
    work = SimulatedQueue(simulation, "cross").submit(lambda: simulation.spend("hop", 3.0))
    simulation.spend("forward", 1.0)
    assert simulation.begin_step() == simulation.compute.now == 3.0
    work.wait()
    assert simulation.compute.now == 3.0
    assert not simulation.spans


def test_collectives_of_one_group_run_one_after_the_other_in_the_order_of_their_start():
    simulation = Simulation()
    wire, gathers, reductions = (simulation.new_clock(name) for name in ("shard", "gathers", "reductions"))
    for clock, name in ((reductions, "reduce"), (gathers, "gather")):
        with simulation.on(clock):
            simulation.occupy(wire, name, 2.0, taken=0.0)
    assert [(span.name, span.start, span.end) for span in simulation.spans] == [("reduce", 0, 2), ("gather", 2, 4)]


def test_a_collective_beside_the_compute_takes_from_it_and_one_that_the_compute_waits_for_does_not():
    simulation = Simulation()
    wire, gathers = simulation.new_clock("shard"), simulation.new_clock("gathers")
    with simulation.on(gathers):
        simulation.occupy(wire, "gather", 2.0, taken=0.5)
    assert simulation.compute.now == 0.5
    simulation.wait_until(gathers.now)  # it was taken from a compute that had nothing to do
    assert simulation.compute.now == 2.0
    simulation.occupy(wire, "norm", 1.0, taken=0.5)
    assert simulation.compute.now == 3.0
