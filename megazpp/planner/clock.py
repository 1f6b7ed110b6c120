"""Simulated time: clocks, communication queues whose tasks take seconds instead of running, and what things cost.

A queue of parallel/comm_queue.py runs tasks in the order of submission, so no list of events is needed: a task starts
when the queue is free, when the submitting clock has come to it, and when the works that it waits for are done; it ends
as many seconds later as its hops and passes over memory cost. Code that calls `CommQueue.submit` and `Work.wait` runs
here unchanged. A clock stands for whatever keeps an order of its own: the compute, a stream, a queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from megazpp.parallel.comm_queue import CommQueue, Moment, Work
from megazpp.planner.trace import Operation
from megazpp.topology.cost import AxisCost, DeviceCost
from megazpp.topology.layout import AXES, Layout
from megazpp.topology.shares import Shares

T = TypeVar("T")


class Costs:
    """Seconds that the pieces of a step take. This base class is for counting: they take none."""

    def operation(self, operation: Operation) -> float:
        return 0.0

    def memory(self, touched_bytes: int) -> float:
        return 0.0

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 0.0

    def taken(self, axis: str, collective: str, sent_bytes: int) -> float:
        """What a collective beside the compute takes from it."""
        return 0.0


class ClusterCosts(Costs):
    """The costs of a step on a cluster whose file names links and device.

    Args:
        layout: who is where.
        free: axes whose wires take no time, to see what they cost.
    Raises:
        ValueError: a figure that is needed is not in the cluster file.
    """

    def __init__(self, layout: Layout, shares: Shares, *, free: tuple[str, ...] = ()) -> None:
        device = layout.cluster.device
        if device is None:
            raise ValueError("--cluster-file: device is not given (name, teraflops, gigabytes, gigabytes_per_second)")
        self.layout, self._beside = layout, shares.beside
        self._device = DeviceCost(device=device, shares=shares)
        self._axes = {axis: AxisCost(layout, axis, shares) for axis in AXES if axis not in free}

    def operation(self, operation: Operation) -> float:
        if operation.kind == "memory":
            return self._device.memory_seconds(operation.bytes)
        return self._device.matrix_seconds(operation.m, operation.n, operation.k, operation.batch, operation.bytes)

    def memory(self, touched_bytes: int) -> float:
        return self._device.memory_seconds(touched_bytes)

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return self._axes[axis].seconds(collective, sent_bytes) if axis in self._axes else 0.0

    def taken(self, axis: str, collective: str, sent_bytes: int) -> float:
        return self._beside * self.collective(axis, collective, sent_bytes)


class Clock:
    """One order of events; `now` is seconds since the simulation began."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def wait_until(self, moment: float) -> None:
        """Do not go on before `moment`."""
        self.now = max(self.now, moment)


class Simulation:
    """All clocks of a rank; one of them is running.

    Args:
        costs: seconds of collectives.

    Attributes:
        compute: the clock of the model's kernels (on a CPU, the process's).
        busy: seconds of this step by axis that collectives take, and under "compute" what its clock does beside them.
    """

    def __init__(self, costs: Costs) -> None:
        self.compute = self.running = Clock()
        self._costs, self._clocks = costs, [self.compute]
        self._wires = {axis: self.new_clock() for axis in AXES}
        self.busy: dict[str, float] = defaultdict(float)

    def new_clock(self) -> Clock:
        """A clock that the others meet at the beginning of a step."""
        self._clocks.append(Clock())
        return self._clocks[-1]

    def begin_step(self) -> float:
        """All clocks meet; returns the moment. Time goes on: works may be older than the step."""
        moment = max(clock.now for clock in self._clocks)
        for clock in self._clocks:
            clock.now = moment
        self.busy = defaultdict(float)
        return moment

    @contextmanager
    def on(self, clock: Clock) -> Iterator[None]:
        """What is done inside is done on `clock`."""
        before, self.running = self.running, clock
        try:
            yield
        finally:
            self.running = before

    def spend(self, seconds: float, *, axis: str | None = None, taken: float = 0.0) -> None:
        """The running clock is busy.

        Args:
            axis: whose collective it is; None for kernels.
            taken: seconds that go off the compute where that is another clock.
        """
        clock, start = self.running, self.running.now
        clock.now += seconds
        if axis or clock is self.compute:
            self.busy[axis or "compute"] += clock.now - start
        if clock is not self.compute and taken:
            with self.on(self.compute):
                self.spend(taken)

    def send(self, axis: str, collective: str, sent_bytes: int) -> None:
        """A collective on the running clock: those of an axis run one at a time, in the order of their start."""
        wire, taken = self._wires[axis], self._costs.taken(axis, collective, sent_bytes)
        self.running.wait_until(wire.now)
        self.spend(self._costs.collective(axis, collective, sent_bytes), axis=axis, taken=taken)
        wire.now = self.running.now


class SimulatedQueue(CommQueue):
    """A simulated communication queue. `blocks_host`: waiting holds the host (CPU), not only a stream."""

    def __init__(self, simulation: Simulation, name: str, *, blocks_host: bool = True) -> None:
        self.name, self._simulation, self._clock = name, simulation, simulation.new_clock()
        self.blocks_host = blocks_host

    def moment(self) -> Moment:
        return self._simulation.running.now

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        self._clock.wait_until(self.moment() if since is None else since)
        with self._simulation.on(self._clock):
            for work in after:
                work.join()
            return SimulatedWork(task(), self._clock, self._simulation)


class SimulatedWork(Work[T]):
    """Done at the moment to which its queue's clock has come."""

    def __init__(self, result: T, clock: Clock, simulation: Simulation) -> None:
        super().__init__(result)
        self._done, self._simulation = clock.now, simulation

    def join(self) -> T:
        self._simulation.running.wait_until(self._done)
        return self._result
