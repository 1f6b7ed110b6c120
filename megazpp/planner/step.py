"""One optimizer step on paper: the hops of zero/, the calls of FSDP2 and the work of the model, in simulated time.

TwoHopGather, TwoHopReduce, FSDP2's counted collectives and both schedules run as they are, on paper axes and meta
tensors, so which hop goes when is decided by the code that decides it in a run. What is written down here a second time
is FSDP2 itself: when it gathers, prefetches, waits and reduces (torch 2.13, _fsdp_param_group.py). On CUDA the host
runs ahead and streams keep the order; on a CPU the process does everything that no lane does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megazpp.parallel.axis import Traffic, TrafficCounter
from megazpp.parallel.lane import Lane, Ticket
from megazpp.planner.clock import Clock, SimulatedLane, Simulation
from megazpp.planner.paper import PaperAxis, PaperCodec, PaperUnit, paper_unit
from megazpp.planner.trace import BACKWARD, FORWARD, Trace, Work
from megazpp.topology.layout import Layout
from megazpp.zero.comms import CountedGather, CountedReduce, SummingReduce
from megazpp.zero.config import WirePlan, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.layout import plan_message
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.schedule import GatherSchedule, Lanes, ReduceSchedule

TrafficTable = dict[tuple[str, str, str], Traffic]  # by (wire, axis, collective)
AXES = ("tp", "local", "cross", "shard", "replicate")


class Costs(Protocol):
    """How long things take."""

    def work(self, work: Work) -> float: ...

    def memory(self, touched_bytes: int) -> float: ...

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float: ...


class NoCosts:
    """Nothing takes any time: for counting."""

    def work(self, work: Work) -> float:
        return 0.0

    def memory(self, touched_bytes: int) -> float:
        return 0.0

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 0.0


class PaperReduceSchedule(ReduceSchedule):
    """What is due at the end of the backward waits for the simulation to say that it has ended."""

    def finish_later(self, ticket: Ticket[Any], finish: Callable[[], None]) -> None:
        self._finishing.append((ticket, finish))

    def end_backward(self) -> None:
        self._finish()


@dataclass(kw_only=True)
class ShardedUnit:
    """A unit as FSDP2 sees it: `gathered` parameters are there, `ready` is when those on the way will be."""

    unit: PaperUnit
    gather: TwoHopGather | CountedGather
    reduce: SummingReduce
    gathered: bool = False
    ready: float | None = None


class PaperStep:
    """The steps of one rank.

    Args:
        trace: the model's work.
        layout, wire, zero, precision: of the run.
        costs: how long things take.
        rank: whose links are used and whose bytes are counted.
        on_cpu: whether the process itself computes.

    Attributes:
        counter: bytes of this rank by (wire, axis, collective), as a run counts them.
        simulation: clocks and spans of the last step.
        units: in the order of use.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        layout: Layout,
        wire: WirePlan,
        zero: ZeroConfig,
        precision: PrecisionConfig,
        costs: Costs | None = None,
        rank: int = 0,
        on_cpu: bool = False,
    ) -> None:
        self.trace, self.layout, self.stage = trace, layout, zero.stage
        self._precision, self._costs, self._on_cpu = precision, costs or NoCosts(), on_cpu
        self.counter, self.simulation = TrafficCounter(), Simulation()
        self._axes = {
            name: PaperAxis(layout, name, rank=rank, counter=self.counter, cost=self._sending(name)) for name in AXES
        }
        two_hops = bool(wire.gather or wire.reduce)
        overlaps = two_hops or on_cpu
        self._overlap_gather, overlap_reduce = wire.overlap_gather and overlaps, wire.overlap_reduce and overlaps
        lanes = self._lanes(overlap=self._overlap_gather or overlap_reduce)
        self._gather_schedule = GatherSchedule(overlap=self._overlap_gather, prefetch=on_cpu)
        self._reduce_schedule = PaperReduceSchedule(overlap=overlap_reduce, blocks_host=on_cpu)
        make = _CommMaker(self, wire, zero, lanes)
        self.units = [make.sharded(paper_unit(parameters, layout.shard)) for parameters in trace.units]
        self._clocks = [self.simulation.new_clock(name) for name in ("gathers", "reductions", "copies")]
        self._copied_out = 0.0

    def run(self, micro_batches: int) -> float:
        """One step after the first, in seconds."""
        self.simulation.reset()
        self._copied_out = 0.0
        self._sum_over_data()  # tokens
        for index in range(micro_batches):
            last = index == micro_batches - 1
            for sharded in self.units:
                if isinstance(sharded.reduce, TwoHopReduce):
                    sharded.reduce.last_micro_batch = last
            self._forward(last)
            self._backward(last)
        self._sum_over_data()  # the loss
        self._optimizer()
        return self.simulation.compute.now

    # ---- the model ------------------------------------------------------------------------------------------------

    def _forward(self, last: bool) -> None:
        units, head = self.units, self.trace.num_segments - 1
        for index in range(self.trace.num_segments):
            sharded = units[min(index, len(units) - 1)]
            first_use = not (self.trace.tied and index == head)  # tied: the first unit is still gathered
            if first_use:
                self._gather(sharded)
                self._wait_for_gather(sharded, forward=True)
            self._compute(FORWARD, index)
            if first_use and not (self.trace.tied and index == 0):
                self._release(sharded, when=self.stage == 3)
        if self.trace.tied:
            self._release(units[0], when=self.stage == 3)

    def _backward(self, last: bool) -> None:
        for sharded in self.units:
            sharded.unit.state.at_hand = False
        order = [self.units[0], *self.units[:0:-1]] if self.trace.tied else self.units[::-1]
        for index, sharded in enumerate(order):
            self._gather(sharded)
            self._wait_for_gather(sharded, forward=False)
            if index + 1 < len(order):
                self._gather(order[index + 1])
            self._compute(BACKWARD, self.trace.num_segments - 1 - index)
            if not (self.trace.tied and index == 0):
                self._finish_unit(sharded, last)
        if self.trace.tied:
            self._compute(BACKWARD, 0)
            self._finish_unit(order[0], last)
        for clock in self._clocks[1:]:
            self.simulation.wait_until(clock.now, "reductions")
        self._reduce_schedule.end_backward()
        for sharded in self.units:
            sharded.unit.state.at_hand = True

    def _compute(self, phase: str, index: int) -> None:
        for work in self.trace.segments[phase, index].work:
            if work.kind in ("matrix", "memory"):
                self.simulation.spend(f"{phase} {index}", self._costs.work(work))
            else:
                self._axes["tp"].count(work.kind, work.bytes)

    def _sum_over_data(self) -> None:
        for name in ("shard", "replicate"):
            self._axes[name].all_reduce_(torch.empty((), dtype=torch.float64, device="meta"))

    def _optimizer(self) -> None:
        for name in ("tp", "shard"):  # the norm
            self._axes[name].all_reduce_(torch.empty((), dtype=torch.float64, device="meta"))
        shard_bytes = 4 * sum(sharded.unit.size for sharded in self.units)
        passes = 1 + 2 + 7  # norm; clipping; AdamW reads four values and writes three
        self.simulation.spend("optimizer", self._costs.memory(passes * shard_bytes))
        for sharded in self.units:
            sharded.unit.state.version += 1
            if isinstance(sharded.gather, TwoHopGather):
                sharded.gather.drop()

    # ---- FSDP2 ----------------------------------------------------------------------------------------------------

    def _gather(self, sharded: ShardedUnit) -> None:
        """`unshard`: hand the shard to the gather, whose clock waits for it."""
        if sharded.gathered or sharded.ready is not None:
            return
        size, world = sharded.unit.size, self.layout.shard
        clock = self._gather_clock()
        with self.simulation.on(clock):
            if world > 1:
                shard, out = self._empty(size), self._empty(size * world)
                sharded.gather(out, shard, self._axes["shard"].group)  # type: ignore[arg-type]
        sharded.ready = clock.now

    def _gather_clock(self) -> Clock:
        """On CUDA a stream; on a CPU the process, or with overlap something that only the lanes hold up."""
        if not self._on_cpu:
            return self._clocks[0]
        if not self._overlap_gather:
            return self.simulation.compute
        clock = Clock("gathers")
        clock.now = self.simulation.compute.now
        return clock

    def _wait_for_gather(self, sharded: ShardedUnit, *, forward: bool) -> None:
        """`wait_for_unshard`: copy out; the next gather but one may start after it in forward, the next in backward."""
        if sharded.gathered:
            return
        assert sharded.ready is not None
        simulation, stream = self.simulation, self._clocks[0]
        simulation.wait_until(sharded.ready, "weights")
        if forward:
            stream.now = max(stream.now, self._copied_out)
        whole = self._empty(sharded.unit.size * self.layout.shard)
        simulation.spend("copy", self._costs.memory(2 * whole.nbytes))
        self._copied_out = simulation.compute.now
        if not forward:
            stream.now = max(stream.now, self._copied_out)
        sharded.gathered, sharded.ready = True, None
        sharded.unit.state.at_hand = False

    def _release(self, sharded: ShardedUnit, *, when: bool) -> None:
        """`reshard`."""
        if when:
            sharded.gathered, sharded.unit.state.at_hand = False, True

    def _finish_unit(self, sharded: ShardedUnit, last: bool) -> None:
        """`post_backward`: reshard and reduce; one reduction at a time is in flight."""
        self._release(sharded, when=self.stage == 3 or last)
        sharded.unit.state.at_hand = False
        if self.stage <= 1 and not last:
            return
        simulation, world = self.simulation, self.layout.shard
        reductions, copies = self._clocks[1:]
        if not self._on_cpu:
            simulation.wait_until(reductions.now, "gradients")
        whole = self._empty(sharded.unit.size * world, reduced=True)
        simulation.spend("copy", self._costs.memory(2 * whole.nbytes))
        if self._on_cpu:
            reductions = copies = simulation.compute
        reductions.now = max(reductions.now, simulation.compute.now)
        result = self._empty(sharded.unit.size, reduced=True)
        with simulation.on(reductions):
            if world > 1:
                sharded.reduce(result, whole, self._axes["shard"].group, dist.ReduceOp.SUM)  # type: ignore[arg-type]
        if last and self.layout.replicate > 1:
            copies.now = max(copies.now, reductions.now)
            with simulation.on(copies):
                self._axes["replicate"].all_reduce_(result)

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _empty(self, size: int, *, reduced: bool = False) -> torch.Tensor:
        dtype = self._precision.reduce_dtype if reduced else self._precision.param_dtype
        return torch.empty(size, dtype=dtype, device="meta")

    def _sending(self, axis: str) -> Callable[[str, int], None]:
        def cost(collective: str, sent_bytes: int) -> None:
            self.simulation.spend(f"{axis} {collective}", self._costs.collective(axis, collective, sent_bytes))

        return cost

    def touch(self, what: str, touched_bytes: int) -> None:
        """A pass over memory on the running clock."""
        self.simulation.spend(what, self._costs.memory(touched_bytes))

    def _lanes(self, *, overlap: bool) -> Lanes:
        if not overlap:
            return Lanes(Lane(), Lane(), Lane())
        return Lanes(*(SimulatedLane(self.simulation, name) for name in ("cross", "local", "shard")))


class _CommMaker:
    """What zero/plugs.py makes, on paper."""

    def __init__(self, step: PaperStep, wire: WirePlan, zero: ZeroConfig, lanes: Lanes) -> None:
        self._step, self._wire, self._zero, self._lanes = step, wire, zero, lanes

    def sharded(self, unit: PaperUnit) -> ShardedUnit:
        return ShardedUnit(unit=unit, gather=self._gather(unit), reduce=self._reduce(unit))

    def _gather(self, unit: PaperUnit) -> TwoHopGather | CountedGather:
        step, plan = self._step, self._wire.gather
        if plan is None:
            return CountedGather(step._axes["shard"], self._lanes.shard, overlap=step._overlap_gather)
        dtype = step._precision.param_dtype
        return TwoHopGather(
            unit,
            cross=step._axes["cross"],
            local=step._axes["local"],
            lanes=self._lanes,
            schedule=step._gather_schedule,
            codec=PaperCodec(plan_message(unit.segments, plan.fmt, exact_itemsize=dtype.itemsize), dtype, step.touch),
            keep=plan.keep,
        )

    def _reduce(self, unit: PaperUnit) -> SummingReduce:
        step, plan, segments = self._step, self._wire.reduce, unit.trained_segments
        if plan is None:
            return CountedReduce(unit, step._axes["shard"], self._lanes.shard, step._reduce_schedule)
        dtype = step._precision.reduce_dtype
        middle = torch.bfloat16 if self._zero.zero_accumulate_in_bf16 else torch.float32
        return TwoHopReduce(
            unit,
            step._reduce_schedule,
            cross=step._axes["cross"],
            local=step._axes["local"],
            lanes=self._lanes,
            local_codec=PaperCodec(
                plan_message(segments, plan.local, exact_itemsize=dtype.itemsize), dtype, step.touch
            ),
            cross_codec=PaperCodec(
                plan_message(segments, plan.cross, exact_itemsize=middle.itemsize), middle, step.touch
            ),
            middle_dtype=middle,
            feedback=self._zero.zero_error_feedback,
            every_micro_batch=self._zero.zero_cross_every_microbatch,
        )


def count_traffic(step: PaperStep, micro_batches: int) -> TrafficTable:
    """Calls and bytes of one optimizer step; exact for any number of micro-batches, from three steps at most.

    All micro-batches between the first and the last send the same.
    """
    step.run(1)  # the first step learns the order of use
    two, three = (_counted(step, min(k, micro_batches)) for k in (2, 3))
    more = max(micro_batches - 3, 0)
    return {
        key: Traffic(*(b + more * (b - a) for a, b in zip(two.get(key, Traffic(0, 0)), traffic, strict=True)))
        for key, traffic in three.items()
    }


def _counted(step: PaperStep, micro_batches: int) -> TrafficTable:
    before = step.counter.table()
    step.run(micro_batches)
    return traffic_between(before, step.counter.table())


def traffic_between(before: TrafficTable, after: TrafficTable) -> TrafficTable:
    """What was counted since `before`."""
    none = Traffic(0, 0)
    return {key: Traffic(*(b - a for a, b in zip(before.get(key, none), after[key], strict=True))) for key in after}
