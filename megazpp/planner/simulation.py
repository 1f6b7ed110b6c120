"""Simulated time and memory: clocks, communication queues whose tasks take seconds instead of running, and a ledger.

A queue of parallel/comm_queue.py runs tasks in the order of submission, so no list of events is needed: a task starts
when the queue is free, when the submitting clock has come to it, and when the works that it waits for are done; it ends
as many seconds later as its hops and passes over memory cost. Code that calls `CommQueue.submit` and `Work.wait` runs
here unchanged. A clock stands for whatever keeps an order of its own: the compute, a stream, a queue.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

from megazpp.parallel.comm_queue import CommQueue, Moment, Work
from megazpp.planner.cost import Costs
from megazpp.topology.layout import AXES

T = TypeVar("T")


class Clock:
    """One order of events; `now` is seconds since the simulation began."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class Simulation:
    """All clocks of a rank; one of them is running.

    Attributes:
        compute: the clock of the model's kernels (on a CPU, the process's).
        busy: seconds of this step by axis that collectives take, and under "compute" what its clock does beside them.
    """

    def __init__(self, costs: Costs) -> None:
        self.compute = self.running = Clock()
        self._costs, self._clocks = costs, [self.compute]
        self._links = {axis: self.new_clock() for axis in AXES}
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
        """Have `clock` run inside."""
        before, self.running = self.running, clock
        try:
            yield
        finally:
            self.running = before

    def spend(self, seconds: float, *, axis: str | None = None, taken: float = 0.0) -> None:
        """Keep the running clock busy.

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
        link, seconds = self._links[axis], self._costs.collective(axis, collective, sent_bytes)
        self.running.wait_until(link.now)
        self.spend(seconds, axis=axis, taken=self._costs.beside * seconds)
        link.now = self.running.now


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


class Memory(StrEnum):
    """Kinds of memory by their use."""

    PARAMETERS = "parameters"
    MOMENTS = "moments"
    GRADIENTS = "gradients"
    SECONDARY = "secondary partition"
    PARTIAL_SUMS = "partial sums"
    FEEDBACK = "error feedback"
    COMMON = "outer weights, common copy"
    OUTER = "outer weights and momentum"
    OUTER_FEEDBACK = "outer feedback"
    OUTER_MESSAGES = "outer messages"
    GATHERED = "gathered weights"
    WHOLE_GRADIENTS = "whole gradients"
    BUFFERS = "communication buffers"
    ACTIVATIONS = "activations"
    FROZEN = "frozen base"
    UNPACKED = "unpacked frozen weights"
    REFERENCE = "reference model"
    REWARD = "reward model"
    KEYS_AND_VALUES = "keys and values"


class Ledger:
    """Bytes that live now, by kind; `peak` is the same at the moment at which it was most."""

    def __init__(self) -> None:
        self._now: Counter[Memory] = Counter()
        self.peak: Counter[Memory] = Counter()

    def add(self, kind: Memory, size: int) -> None:
        """`size` bytes come, or go if it is negative."""
        self._now[kind] += size
        if size > 0 and self._now.total() > self.peak.total():
            self.peak = self._now.copy()

    def free(self, kind: Memory) -> None:
        """All bytes of a kind go."""
        self._now[kind] = 0

    def pass_through(self, kind: Memory, size: int) -> None:
        """`size` bytes come and go."""
        self.add(kind, size)
        self.add(kind, -size)
