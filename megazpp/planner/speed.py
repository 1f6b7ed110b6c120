"""How fast a step is, in all its pieces, for any number of micro-batches."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from megazpp.parallel.axis import Traffic
from megazpp.planner.step import PaperStep, TrafficTable
from megazpp.topology.layout import AXES

SIMULATED_MICRO_BATCHES = 3  # the first, one like all those in between, the last


class SimulatedStep(NamedTuple):
    """One optimizer step on paper.

    Attributes:
        traffic: calls and bytes of this rank, exact.
        seconds: of the step.
        busy: seconds by axis that collectives take, and under "compute" what the compute's clock does beside them.
    """

    traffic: TrafficTable
    seconds: float
    busy: dict[str, float]


def measure(step: PaperStep, micro_batches: int) -> SimulatedStep:
    """A step of any number of micro-batches, from three at most: those between the first and the last are alike."""
    step.run(1)  # learns the order of use
    if micro_batches <= SIMULATED_MICRO_BATCHES:
        return _measure(step, micro_batches)
    fewer, more = (_measure(step, k) for k in (SIMULATED_MICRO_BATCHES - 1, SIMULATED_MICRO_BATCHES))
    times = micro_batches - SIMULATED_MICRO_BATCHES
    return SimulatedStep(
        extended(fewer.traffic, more.traffic, times),
        more.seconds + times * (more.seconds - fewer.seconds),
        {key: seconds + times * (seconds - fewer.busy.get(key, 0.0)) for key, seconds in more.busy.items()},
    )


def _measure(step: PaperStep, micro_batches: int) -> SimulatedStep:
    before = step.counter.table()
    seconds = step.run(micro_batches)
    busy: dict[str, float] = defaultdict(float)
    for span in step.simulation.spans:
        axis = span.name.split()[0]
        if axis in AXES:
            busy[axis] += span.end - span.start
        elif span.clock == "compute":
            busy["compute"] += span.end - span.start
    return SimulatedStep(traffic_between(before, step.counter.table()), seconds, busy)


def traffic_between(before: TrafficTable, after: TrafficTable) -> TrafficTable:
    """What was counted since `before`."""
    none = Traffic(0, 0)
    return {key: Traffic(*(b - a for a, b in zip(before.get(key, none), after[key], strict=True))) for key in after}


def extended(fewer: TrafficTable, more: TrafficTable, times: int) -> TrafficTable:
    """`more`, and what it has above `fewer` so many times again."""
    return {
        key: Traffic(*(counted + times * above for counted, above in zip(more[key], traffic, strict=True)))
        for key, traffic in traffic_between(fewer, more).items()
    }
