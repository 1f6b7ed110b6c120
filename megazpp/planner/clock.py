"""Simulated time: clocks, and communication queues whose tasks take seconds instead of running.

A queue of parallel/comm_queue.py runs tasks in the order of submission, so no list of events is needed: a task starts
when the queue is free, when the submitting clock has come to it, and when the works that it waits for are done; it ends
as many seconds later as its hops and passes over memory cost. Code that calls `CommQueue.submit` and `Work.wait` runs
here unchanged. A clock stands for whatever keeps an order of its own: the compute, a stream, a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from megazpp.parallel.comm_queue import CommQueue, Work

T = TypeVar("T")


class SimulatedSpan(NamedTuple):
    """What a clock was busy with, in seconds since the simulation began."""

    clock: str
    name: str
    start: float
    end: float


class Clock:
    """One order of events.

    Attributes:
        now: seconds since the simulation began.
    """

    def __init__(self, name: str) -> None:
        self.name, self.now = name, 0.0


class Simulation:
    """All clocks of a rank; one of them is running.

    Attributes:
        compute: the clock of the model's kernels (on a CPU, the process's).
        spans: what each clock did.
    """

    def __init__(self) -> None:
        self.compute = Clock("compute")
        self.clocks = [self.compute]
        self.running = self.compute
        self.spans: list[SimulatedSpan] = []

    def new_clock(self, name: str) -> Clock:
        """A clock that the others meet at the beginning of a step."""
        self.clocks.append(Clock(name))
        return self.clocks[-1]

    def begin_step(self) -> float:
        """All clocks meet, spans are forgotten; returns the moment. Time goes on: works may be older than the step."""
        moment = max(clock.now for clock in self.clocks)
        for clock in self.clocks:
            clock.now = moment
        self.spans = []
        return moment

    @contextmanager
    def on(self, clock: Clock) -> Iterator[None]:
        """What is done inside is done on `clock`."""
        before, self.running = self.running, clock
        try:
            yield
        finally:
            self.running = before

    def spend(self, name: str, seconds: float, *, taken: float = 0.0) -> None:
        """The running clock is busy; `taken` seconds go off the compute where that is another clock."""
        start = self.running.now
        self.running.now += seconds
        self.spans.append(SimulatedSpan(self.running.name, name, start, self.running.now))
        if self.running is not self.compute and taken:
            with self.on(self.compute):
                self.spend("taken", taken)

    def wait_until(self, moment: float) -> None:
        """The running clock does not go on before `moment`."""
        self.running.now = max(self.running.now, moment)

    def occupy(self, wire: Clock, name: str, seconds: float, *, taken: float) -> None:
        """A collective on the running clock, behind the one before it on `wire`.

        Args:
            wire: of one process group, whose collectives run one at a time in the order in which they were started.
        """
        self.wait_until(wire.now)
        self.spend(name, seconds, taken=taken)
        wire.now = self.running.now


class SimulatedQueue(CommQueue):
    """A simulated communication queue. `blocks_host`: waiting holds the host (CPU), not only a stream."""

    def __init__(self, simulation: Simulation, name: str, *, blocks_host: bool = True) -> None:
        self.name, self._simulation, self._clock = name, simulation, simulation.new_clock(name)
        self.blocks_host = blocks_host

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = ()) -> Work[T]:
        simulation, clock = self._simulation, self._clock
        clock.now = max(clock.now, simulation.running.now)
        with simulation.on(clock):
            for work in after:
                work.join()
            result = task()
        return SimulatedWork(result, clock.now, simulation)


class SimulatedWork(Work[T]):
    """Done at a moment."""

    def __init__(self, result: T, done: float, simulation: Simulation) -> None:
        super().__init__(result)
        self._done, self._simulation = done, simulation

    def join(self) -> T:
        self._simulation.wait_until(self._done)
        return self._result
