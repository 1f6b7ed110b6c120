"""One optimizer step on paper: the hops of zero/, the calls of FSDP2 and the work of the model, in simulated time.

TwoHopGather, TwoHopReduce, FSDP2's counted collectives and both schedules run as they are, on paper axes and meta
tensors, so which hop goes when is decided by the code that decides it in a run. What is written down here a second time
is FSDP2 itself: when it gathers, prefetches, waits and reduces (torch 2.13, _fsdp_param_group.py). On CUDA the host
runs ahead and streams keep the order; on a CPU the process does everything that no lane does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megazpp.parallel.axis import Traffic, TrafficCounter
from megazpp.parallel.lane import Lane
from megazpp.planner.clock import Clock, SimulatedLane, Simulation
from megazpp.planner.comms import PaperPlugs, PaperReduceSchedule, ShardedUnit
from megazpp.planner.costs import Costs, NoCosts
from megazpp.planner.memory import (
    ACTIVATIONS,
    BUFFERS,
    FEEDBACK,
    GATHERED,
    GRADIENTS,
    MASTER_BYTES,
    MIDDLE,
    MOMENTS,
    PARAMETERS,
    SECONDARY,
    WHOLE_GRADIENTS,
    Ledger,
)
from megazpp.planner.paper import PaperAxis
from megazpp.planner.trace import BACKWARD, FORWARD, Trace
from megazpp.topology.layout import AXES, Layout
from megazpp.zero.config import WirePlan, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.schedule import GatherSchedule, Lanes

TrafficTable = dict[tuple[str, str, str], Traffic]  # by (wire, axis, collective)


class PaperStep:
    """The steps of one rank.

    Args:
        trace: the model's work.
        layout, wire, zero, precision: of the run.
        costs: how long things take.
        rank: whose links are used and whose bytes are counted.
        on_cpu: whether the process itself computes.
        moments: of the optimizer, per parameter.

    Attributes:
        counter: bytes of this rank by (wire, axis, collective), as a run counts them.
        simulation: clocks and spans of the last step.
        units: in the order of use.
        ledger: memory of the last step.
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
        moments: int = 2,
    ) -> None:
        self.trace, self.layout, self.stage = trace, layout, zero.stage
        self._precision, self._costs, self._on_cpu = precision, costs or NoCosts(), on_cpu
        self.counter, self.simulation, self.ledger = TrafficCounter(), Simulation(), Ledger()
        self._copied_out, self._copied_from, self._sent_from, self._middle_waits = 0.0, 0, 0, False
        self._axes = {
            name: PaperAxis(layout, name, rank=rank, counter=self.counter, cost=self._sending(name)) for name in AXES
        }
        two_hops = bool(wire.gather or wire.reduce)
        overlaps = two_hops or on_cpu
        self._overlap_gather, self._overlap_reduce = wire.overlap_gather and overlaps, wire.overlap_reduce and overlaps
        self._reduce_schedule = PaperReduceSchedule(overlap=self._overlap_reduce, blocks_host=on_cpu)
        plugs = PaperPlugs(
            axes=self._axes,
            wire=wire,
            zero=zero,
            precision=precision,
            lanes=self._lanes(overlap=self._overlap_gather or self._overlap_reduce),
            gathers=GatherSchedule(overlap=self._overlap_gather, prefetch=on_cpu),
            reduces=self._reduce_schedule,
            overlap_gather=self._overlap_gather,
            touch=self._touch,
        )
        self.units = [plugs.sharded(parameters) for parameters in trace.units]
        self._moments = moments
        self._keeps_middle = not zero.zero_cross_every_microbatch
        self._clocks = [self.simulation.new_clock(name) for name in ("gathers", "reductions", "copies")]
        self._copied_out = 0.0

    def run(self, micro_batches: int) -> float:
        """One step, in seconds; the first one learns the order of use."""
        start = self.simulation.begin_step()
        self._copied_out = start
        self._open_ledger(micro_batches)
        self._sum_over_data()  # tokens
        for index in range(micro_batches):
            last = index == micro_batches - 1
            for sharded in self.units:
                if isinstance(sharded.reduce, TwoHopReduce):
                    sharded.reduce.last_micro_batch = last
            self._forward()
            self._backward(first=index == 0, last=last)
        self._sum_over_data()  # the loss
        self._optimizer()
        return self.simulation.compute.now - start

    # ---- the model ------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        units, head = self.units, self.trace.num_segments - 1
        for index in range(self.trace.num_segments):
            sharded = units[min(index, len(units) - 1)]
            first_use = not (self.trace.tied and index == head)  # tied: the first unit is still gathered
            if first_use:
                self._gather(sharded)
                self._wait_for_gather(sharded, forward=True)
            self._keep(FORWARD, index)
            self._compute(FORWARD, index)
            if first_use and not (self.trace.tied and index == 0):
                self._release(sharded, when=self.stage == 3)
        if self.trace.tied:
            self._release(units[0], when=self.stage == 3)
        self.ledger.add(BUFFERS, -self._copied_from)
        self._copied_from = 0

    def _backward(self, *, first: bool, last: bool) -> None:
        for sharded in self.units:
            sharded.unit.state.at_hand = False
        order = [self.units[0], *self.units[:0:-1]] if self.trace.tied else self.units[::-1]
        for index, sharded in enumerate(order):
            segment = self.trace.num_segments - 1 - index
            loss_first = (
                index == 0 and not self.trace.tied
            )  # the root's gather comes before the loss, a unit's after it
            if loss_first:
                self._keep(BACKWARD, segment)
            self._gather(sharded)
            self._wait_for_gather(sharded, forward=False)
            if index + 1 < len(order):
                self._gather(order[index + 1])
            if not loss_first:
                self._keep(BACKWARD, segment)
            self._compute(BACKWARD, segment)
            if not (self.trace.tied and index == 0):
                self._finish_unit(sharded, first=first, last=last)
        if self.trace.tied:
            self._keep(BACKWARD, 0)
            self._compute(BACKWARD, 0)
            self._finish_unit(order[0], first=first, last=last)
        for clock in self._clocks[1:]:
            self.simulation.wait_until(clock.now, "reductions")
        self._reduce_schedule.end_backward()
        self.ledger.set(BUFFERS, 0)
        self._sent_from = 0
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
                self.ledger.add(BUFFERS, out.nbytes)
                self.ledger.pass_through(BUFFERS, sharded.gather_buffer)
                pending = sharded.gather(out, shard, self._axes["shard"].group)  # type: ignore[arg-type]
                if pending is not None:
                    pending.wait()
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
        whole = self._whole(sharded)
        if self.layout.shard > 1 and forward:  # the buffer of the gather before is free now, this one's later
            self.ledger.add(BUFFERS, -self._copied_from)
            self._copied_from = 0
        self.ledger.add(GATHERED, whole.nbytes)
        if self.layout.shard > 1:
            if forward:
                self._copied_from = whole.nbytes
            else:
                self.ledger.add(BUFFERS, -whole.nbytes)
        simulation.spend("copy", self._costs.memory(2 * whole.nbytes))
        self._copied_out = simulation.compute.now
        if not forward:
            stream.now = max(stream.now, self._copied_out)
        sharded.gathered, sharded.ready = True, None
        sharded.unit.state.at_hand = False

    def _release(self, sharded: ShardedUnit, *, when: bool) -> None:
        """`reshard`."""
        if when and sharded.gathered:
            self.ledger.add(GATHERED, -self._whole(sharded).nbytes)
            sharded.gathered, sharded.unit.state.at_hand = False, True

    def _finish_unit(self, sharded: ShardedUnit, *, first: bool, last: bool) -> None:
        """`post_backward`: reshard and reduce; one reduction at a time is in flight."""
        self._release(sharded, when=self.stage == 3 or last)
        sharded.unit.state.at_hand = False
        whole = self._whole(sharded, reduced=True)
        computed = sharded.whole_elements * self._precision.param_dtype.itemsize
        accumulated = sharded.whole_elements * self._precision.reduce_dtype.itemsize
        if self.stage <= 1 and not last:  # accumulated in the format of the reduction
            self.ledger.add(WHOLE_GRADIENTS, (accumulated if first else 0) - computed)
            return
        simulation, world = self.simulation, self.layout.shard
        reductions, copies = self._clocks[1:]
        if not self._on_cpu:
            simulation.wait_until(reductions.now, "gradients")
        self.ledger.add(BUFFERS, whole.nbytes - self._sent_from)
        self._sent_from = whole.nbytes
        self.ledger.add(WHOLE_GRADIENTS, -computed - (accumulated if self.stage <= 1 and not first else 0))
        simulation.spend("copy", self._costs.memory(2 * whole.nbytes))
        if self._on_cpu:
            reductions = copies = simulation.compute
        reductions.now = max(reductions.now, simulation.compute.now)
        result = self._empty(sharded.unit.size, reduced=True)
        self._note_reduction(sharded, result.nbytes, first=first, last=last)
        with simulation.on(reductions):
            if world > 1:
                sharded.reduce(result, whole, self._axes["shard"].group, dist.ReduceOp.SUM)  # type: ignore[arg-type]
        if last and self.layout.replicate > 1:
            copies.now = max(copies.now, reductions.now)
            with simulation.on(copies):
                self._axes["replicate"].all_reduce_(result)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _open_ledger(self, micro_batches: int) -> None:
        self.ledger, self._copied_from, self._sent_from = Ledger(), 0, 0
        self._middle_waits = micro_batches > 1 and self._keeps_middle
        units = self.units
        self.ledger.add(PARAMETERS, MASTER_BYTES * sum(sharded.unit.size for sharded in units))
        self.ledger.add(MOMENTS, self._moments * MASTER_BYTES * sum(sharded.own_elements for sharded in units))
        self.ledger.add(SECONDARY, sum(sharded.secondary_bytes for sharded in units))
        self.ledger.add(FEEDBACK, sum(sharded.feedback_bytes for sharded in units))
        self.ledger.add(MIDDLE, sum(sharded.middle_bytes for sharded in units) if self._middle_waits else 0)

    def _keep(self, phase: str, index: int) -> None:
        """What the model's own code keeps, frees and needs meanwhile."""
        segment = self.trace.segments[phase, index]
        self.ledger.pass_through(ACTIVATIONS, segment.peak)
        self.ledger.add(ACTIVATIONS, segment.kept - segment.gradients)
        self.ledger.add(WHOLE_GRADIENTS, segment.gradients)

    def _note_reduction(self, sharded: ShardedUnit, result_bytes: int, *, first: bool, last: bool) -> None:
        """What the reduction of a unit leaves behind and holds meanwhile."""
        middle = 0 if self._middle_waits else sharded.middle_bytes
        self.ledger.pass_through(BUFFERS, sharded.reduce_buffer + middle + result_bytes)
        if last or not self._keeps_middle:
            self.ledger.pass_through(BUFFERS, sharded.cross_buffer + middle + result_bytes)
            if self._overlap_reduce:  # at worst, sums and results of all units wait for the cross hop
                self.ledger.add(BUFFERS, middle + result_bytes)
        if first or (self.stage <= 1 and last):
            self.ledger.add(GRADIENTS, MASTER_BYTES * sharded.unit.size)

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _whole(self, sharded: ShardedUnit, *, reduced: bool = False) -> torch.Tensor:
        return self._empty(sharded.unit.size * self.layout.shard, reduced=reduced)

    def _empty(self, size: int, *, reduced: bool = False) -> torch.Tensor:
        dtype = self._precision.reduce_dtype if reduced else self._precision.param_dtype
        return torch.empty(size, dtype=dtype, device="meta")

    def _sending(self, axis: str) -> Callable[[str, int], None]:
        def cost(collective: str, sent_bytes: int) -> None:
            self.simulation.spend(f"{axis} {collective}", self._costs.collective(axis, collective, sent_bytes))

        return cost

    def _touch(self, what: str, touched_bytes: int) -> None:
        """A pass over memory on the running clock."""
        self.simulation.spend(what, self._costs.memory(touched_bytes))

    def _lanes(self, *, overlap: bool) -> Lanes:
        if not overlap:
            return Lanes(Lane(), Lane(), Lane())
        return Lanes(*(SimulatedLane(self.simulation, name) for name in ("cross", "local", "shard")))
