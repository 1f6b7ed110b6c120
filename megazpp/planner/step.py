"""One optimizer step on paper: the hops of zero/, the calls of FSDP2 and the work of the model, in simulated time.

One file of more than 300 lines: FSDP2's order of calls is told in one piece, as FSDP2 has it.

The hops of zero/, FSDP2's counted collectives, both schedules and diloco/outer.py's OuterUnit run as they are, on
paper axes and meta tensors. Only FSDP2's own part is written down a second time: when it gathers, prefetches, waits,
reduces and frees (torch 2.13, _fsdp_param_group.py). FSDP2 itself cannot run here: on CUDA its order is that of
streams, which tensors without memory do not have, and three layers of it take 2 s where a plan has a hundred steps.
On CUDA the host runs ahead and streams keep the order; on a CPU the process does everything that no queue does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import OuterUnit, send_fragment
from megazpp.model.gpt import GPTModel
from megazpp.optim.muon import MuonConfig, Orthogonalizer, row_dtype
from megazpp.optim.muon_plan import products
from megazpp.packed_weights.frozen import frozen_bytes
from megazpp.parallel.axis import Traffic, TrafficCounter
from megazpp.planner.cost import Costs, Operation
from megazpp.planner.simulator import (
    META,
    Clock,
    Ledger,
    Memory,
    SimulatedAxis,
    SimulatedCodec,
    SimulatedLosslessCodec,
    SimulatedQueue,
    SimulatedUnit,
    Simulation,
    own_shapes,
)
from megazpp.planner.trace import BACKWARD, FORWARD, Documents, trace_model
from megazpp.topology.layout import AXES, NODE, Layout
from megazpp.training.setup import ModelSpec
from megazpp.zero.comms import CommContext
from megazpp.zero.config import plan_comm
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.reduce import TwoHopReduce

MASTER_BYTES = 4  # parameters, their gradients and moments are fp32
SIMULATED_MICRO_BATCHES = 3  # the first, one like all those in between, the last
NOTHING = Traffic(0, 0)
TrafficTable = dict[tuple[str, str, str], Traffic]  # by (wire, axis, collective)


class SimulatedStep(NamedTuple):
    """One optimizer step on paper, or one synchronization of islands: exact calls and bytes of this rank, and seconds.

    Attributes:
        seconds: of the step, or by which a synchronization holds steps up.
        busy: seconds by axis that collectives take, and under "compute" what the compute's clock does beside them.
    """

    traffic: TrafficTable
    seconds: float
    busy: dict[str, float]


class StepSimulator:
    """The steps of one rank.

    Args:
        documents, with_entropy, prepare: see `trace_model`; what is not trained is in frozen units.
        costs: how long things take; None for counting.
        on_cpu: whether the process itself computes; for times also that nothing runs beside the compute.
        moments: of the optimizer, per parameter; one less of a matrix with Muon.
        muon: settings of --optimizer muon.
        frozen_bits: of frozen units' matrices at rest; None: as the model computes.
        islands: local steps; None where every step is synchronized.
        lossless_share: the size of lossless differences against that of the weights.

    Attributes:
        counter: bytes of this rank by (wire, axis, collective), as a run counts them.
        units: in the order of use.
        fragments: outer weights, by what synchronizes together; [] where every step is synchronized.
        ledger: memory of the last step, and of what has followed it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        *,
        seq_length: int,
        micro_batch_size: int,
        documents: Documents | None = None,
        costs: Costs | None = None,
        rank: int = 0,
        on_cpu: bool = False,
        moments: int = 2,
        muon: MuonConfig | None = None,
        with_entropy: bool = False,
        prepare: Callable[[GPTModel], None] | None = None,
        frozen_bits: int | None = None,
        islands: DilocoPlan | None = None,
        lossless_share: float = 1.0,
    ) -> None:
        self._zero, self._precision = zero, precision = spec.zero, spec.precision
        self._on_cpu = on_cpu
        self.trace = trace_model(
            spec.config,
            vocab_size=spec.vocab_size,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            tp=layout.tp,
            cp=layout.cp,
            sequence_parallel=spec.sequence_parallel and layout.tp > 1,
            dtype=precision.param_dtype,
            documents=documents,
            with_entropy=with_entropy,
            prepare=prepare,
        )
        self._moments, self._costs = moments, costs or Costs()
        self._simulation = Simulation(self._costs)
        self.counter, self.ledger = TrafficCounter(), Ledger()
        self._axes = {
            name: SimulatedAxis(
                layout,
                name,
                rank=rank,
                counter=self.counter,
                cost=functools.partial(self._simulation.send, name),
                queue=SimulatedQueue(self._simulation, name, blocks_host=on_cpu),
            )
            for name in (*AXES, NODE)
        }
        self._shard, self._replicate = self._axes["shard"], self._axes["replicate"]
        self._stage = zero.stage_over(self._shard.size)
        wire = plan_comm(zero, layout, precision.param_dtype) if spec.wire is None else spec.wire
        self._context = CommContext(
            *(self._axes[name] for name in ("cross", "local", "shard")),
            plan=wire,
            zero=zero,
            precision=precision,
            codec=functools.partial(SimulatedCodec, touch=self._touch),
            lossless_codec=functools.partial(SimulatedLosslessCodec, share=lossless_share, touch=self._touch),
        )
        self.units = [SimulatedUnit(parameters, self._shard.size, self._shard.rank) for parameters in self.trace.units]
        for unit, frozen in zip(self.units, self.trace.frozen, strict=True):
            unit.connect(self._context)
            unit.frozen = frozen_bytes(dict(frozen), self._axes["local"].size, precision.param_dtype, frozen_bits)
        self.muon: Orthogonalizer | None = None
        if muon is not None and self.trace.matrices:
            self.muon = Orthogonalizer(
                self.trace.matrices,
                muon,
                layout,
                node=self._axes[NODE],
                cross=self._axes["cross"],
                dtype=row_dtype(precision.param_dtype),
                codec=functools.partial(SimulatedCodec, touch=self._touch),
                iterate=self._newton_schulz,
            )
        self._islands, self.fragments = islands, [] if islands is None else self._outer_units(islands)
        self._received: SimulatedUnit | None = None  # whose frozen weights were gathered ahead of their use
        self._gathers, self._reductions, self._copies = (self._simulation.new_clock() for _ in range(3))
        self._copied_out = 0.0  # when the last gather's parameters had been
        self._copied_from = self._sent_from = 0  # bytes of the buffers of the last gather and of the last reduction
        self._partial_sums_wait = False

    def run(self, micro_batches: int) -> SimulatedStep:
        """One step; the first one learns the order of use."""
        before, start = self.counter.table(), self._simulation.begin_step()
        self._copied_out, self._copied_from, self._sent_from = start, 0, 0
        self._partial_sums_wait = micro_batches > 1 and not self._zero.zero_cross_every_microbatch
        self._open_ledger()
        self._sum_over_data()  # tokens
        for index in range(micro_batches):
            last = index == micro_batches - 1
            for unit in self.units:
                if isinstance(unit.reduce, TwoHopReduce):
                    unit.reduce.begin_micro_batch(last=last)
            self._forward()
            self._backward(first=index == 0, last=last)
        self._sum_over_data()  # the loss
        self._optimizer()
        traffic = traffic_between(before, self.counter.table())
        return SimulatedStep(traffic, self._simulation.compute.now - start, self._simulation.busy)

    def run_forward(self) -> None:
        self._simulation.begin_step()
        self._open_ledger()
        self._forward()

    def synchronize(self, step_seconds: float = 0.0) -> SimulatedStep:
        """A synchronization of all fragments, one after the other, behind the last step; nothing without local steps.

        Args:
            step_seconds: of each step under which messages travel.
        """
        plan, compute, axis = self._islands, self._simulation.compute, self._axes["island"]
        if plan is None:
            return SimulatedStep({}, 0.0, {})
        before, start, hidden = self.counter.table(), self._simulation.begin_step(), plan.hiding_steps * step_seconds
        for kind in (Memory.GRADIENTS, Memory.PARTIAL_SUMS, Memory.OUTER_MESSAGES):
            self.ledger.free(kind)
        for units in self.fragments:
            sizes = [unit.rows.nbytes for unit in units]
            self._touch(8 * sum(sizes))  # the difference: zeros, the weights into them, R less that, times a weight
            send_fragment(units, axis, plan, torch.empty((), dtype=torch.float64, device=META))
            for unit, size in zip(units, sizes, strict=True):  # at the end of a run all fragments are under way at once
                self.ledger.add(Memory.OUTER_MESSAGES, unit.sent_bytes)
                received = unit.sent_bytes + axis.size * unit.common.crossing_bytes(keyframe=False)
                self.ledger.pass_through(Memory.BUFFERS, size + received + unit.outer.nbytes)
            compute.wait_until(compute.now + hidden)
            for unit in units:
                unit.merge(plan.merge_alpha)
            self._touch((3 if plan.merge_alpha else 2) * sum(sizes))
        seconds = compute.now - start - len(self.fragments) * hidden
        return SimulatedStep(traffic_between(before, self.counter.table()), seconds, self._simulation.busy)

    # ---- the model ------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        units, tied = self.units, self.trace.tied
        for index, (unit, following) in enumerate(zip(units, [*units[1:], None], strict=True)):
            self._unpack(unit, following)
            self._gather(unit)
            self._wait_for_gather(unit, forward=True)
            self._work(FORWARD, index)
            if not (tied and index == 0):
                self._release(unit, when=self._stage == 3)
                self._free_unpacked(unit)
        if tied:  # the head uses the first unit again
            self._work(FORWARD, len(units))
            self._release(units[0], when=self._stage == 3)
            self._free_unpacked(units[0])
        self.ledger.add(Memory.BUFFERS, -self._copied_from)  # the last gather's
        self._copied_from = 0

    def _backward(self, *, first: bool, last: bool) -> None:
        tied, units, segment = self.trace.tied, self.units, self.trace.num_segments - 1
        for unit in units:
            unit.is_sharded = False
        order = [units[0], *units[:0:-1]] if tied else units[::-1]
        for unit, following in zip(order, [*order[1:], None], strict=True):
            reached = self._has_backward(segment)
            if reached:
                self._unpack(unit, following if self._has_backward(segment - 1) else None)
            self._gather(unit)
            self._wait_for_gather(unit, forward=False)
            if following is not None:
                self._gather(following)
            self._work(BACKWARD, segment)
            if not (tied and unit is order[0]):
                self._finish_unit(unit, first=first, last=last)
                if reached:
                    self._free_unpacked(unit)
            segment -= 1
        if tied:
            self._work(BACKWARD, 0)
            self._finish_unit(order[0], first=first, last=last)
            self._free_unpacked(order[0])
        for clock in (self._reductions, self._copies):  # the root's last hook waits for all reductions
            self._simulation.running.wait_until(clock.now)
        self._context.reduce_schedule.end_backward()
        self.ledger.free(Memory.BUFFERS)
        self._sent_from = 0
        for unit in self.units:
            unit.is_sharded = True

    def _work(self, phase: str, index: int) -> None:
        """Run a segment of the model: memory that it keeps, frees and needs meanwhile, and then its operations."""
        segment = self.trace.segments[phase, index]
        self.ledger.pass_through(Memory.ACTIVATIONS, segment.peak)
        self.ledger.add(Memory.ACTIVATIONS, segment.kept - segment.gradients)
        self.ledger.add(Memory.WHOLE_GRADIENTS, segment.gradients)
        for operation in segment.operations:
            if operation.kind in ("matrix", "memory"):
                self._simulation.spend(self._costs.operation(operation))
            else:
                self._axes[operation.axis].count(operation.kind, operation.bytes)

    def _has_backward(self, segment: int) -> bool:
        """False below the first layer that has something trained, to which no gradient comes."""
        return segment >= 0 and bool(self.trace.segments[BACKWARD, segment].operations)

    def _outer_units(self, plan: DilocoPlan) -> list[list[OuterUnit]]:
        axis, codec = self._axes["island"], functools.partial(SimulatedCodec, touch=self._touch)
        common: dict[str, Any] = {"plan": plan, "precision": self._precision, "device": META, "codec": codec}
        return plan.in_fragments([OuterUnit(unit, unit.shapes, axis, **common) for unit in self.units])

    def _sum_over_data(self) -> None:
        for axis in (self._shard, self._replicate):
            axis.all_reduce_(torch.empty((), dtype=torch.float64, device=META))

    def _optimizer(self) -> None:
        partial = sum(map(math.prod, own_shapes(self.trace.partial, self._shard.size, self._shard.rank)))
        if self._axes["tp"].size > 1 and partial:
            flat = self._axes["tp"].all_reduce_(torch.empty(partial, device=META))
            self.ledger.pass_through(Memory.BUFFERS, flat.nbytes)
            self._touch(4 * flat.nbytes)
        for name in ("tp", "shard"):  # the norm
            self._axes[name].all_reduce_(torch.empty((), dtype=torch.float64, device=META))
        if self.muon is not None:
            self.orthogonalize(iteration=1)
        passes = 1 + 8  # norm; AdamW reads four values and writes them, the gradient clipped
        self._touch(passes * 4 * sum(unit.size for unit in self.units))
        for unit in self.units:
            gather = unit.gather if isinstance(unit.gather, TwoHopGather) else None
            if gather is not None:
                gather.before_step()
            unit.version += 1
            if gather is not None:
                gather.after_step(keyframe=False)

    def orthogonalize(self, *, iteration: int) -> SimulatedStep:
        """Muon's part of a step: rows to their owners and back, Newton-Schulz there."""
        assert self.muon is not None
        before, start = self.counter.table(), self._simulation.running.now
        updates = [torch.empty(shape, device=META) for shape in self._matrix_shards]
        held = sum(update.nbytes for update in updates) + self.muon.buffer_bytes(iteration)
        self.ledger.add(Memory.BUFFERS, held)
        self.muon(updates, iteration=iteration)
        self.ledger.add(Memory.BUFFERS, -held)
        return SimulatedStep(traffic_between(before, self.counter.table()), self._simulation.running.now - start, {})

    def _newton_schulz(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for m, n, k in products(*x.shape[1:]) * steps:
            size = x.element_size() * len(x) * (m * k + k * n + 2 * m * n)
            self._simulation.spend(self._costs.operation(Operation("matrix", size, m, n, k, len(x))))
        low, itemsize = min(x.shape[1:]), 4 if self._on_cpu else x.element_size()
        products_bytes = itemsize * (2 * x.numel() + 2 * len(x) * low * low)
        self.ledger.pass_through(Memory.BUFFERS, 2 * x.nbytes + products_bytes)
        return x

    @property
    def _matrix_shards(self) -> list[tuple[int, ...]]:
        named = [(matrix.name, matrix.shape) for matrix in self.trace.matrices]
        return list(own_shapes(named, self._shard.size, self._shard.rank))

    @property
    def unpacked_bytes(self) -> int:
        return sum(unit.frozen.unpacked for unit in self.units)

    def _unpack(self, unit: SimulatedUnit, following: SimulatedUnit | None) -> None:
        """`FrozenUnit.unpack`: the messages of all ranks become weights, while those of what follows are gathered."""
        if not unit.frozen.unpacked:
            return
        if unit is not self._received:
            self.ledger.add(Memory.UNPACKED, unit.frozen.received)
        self.ledger.add(Memory.UNPACKED, unit.frozen.unpacked + (0 if following is None else following.frozen.received))
        self._received = following
        self.ledger.add(Memory.UNPACKED, -unit.frozen.received)

    def _free_unpacked(self, unit: SimulatedUnit) -> None:
        self.ledger.add(Memory.UNPACKED, -unit.frozen.unpacked)

    # ---- FSDP2 ----------------------------------------------------------------------------------------------------

    def _gather(self, unit: SimulatedUnit) -> None:
        """`unshard`: hand the shard to the gather, whose clock waits for it."""
        if unit.gathered or unit.ready is not None or unit.gather is None:
            return
        clock = self._gathers
        if self._on_cpu:  # the process, or with overlap something that only the queues hold up
            compute = self._simulation.compute
            clock = Clock(compute.now) if self._context.overlap_gather else compute
        if self._shard.size > 1:
            with self._simulation.on(clock):
                out = self._whole(unit)
                self.ledger.add(Memory.BUFFERS, out.nbytes)
                self.ledger.pass_through(Memory.BUFFERS, unit.gather_buffer)
                shard = out.new_empty(unit.size)
                pending = unit.gather(out, shard, self._shard.group)  # type: ignore[arg-type]
                if pending is not None:
                    pending.wait()
        unit.ready = clock.now

    def _wait_for_gather(self, unit: SimulatedUnit, *, forward: bool) -> None:
        """`wait_for_unshard`: copy out; the next gather but one may start after it in forward, the next in backward."""
        if unit.gathered or unit.gather is None:
            return
        assert unit.ready is not None
        compute, size = self._simulation.compute, self._whole(unit).nbytes
        compute.wait_until(unit.ready)
        if forward:
            self._gathers.wait_until(self._copied_out)
        if self._shard.size > 1 and forward:  # the buffer of the gather before is free now, this one's later
            self.ledger.add(Memory.BUFFERS, -self._copied_from)
            self._copied_from = size
        self.ledger.add(Memory.GATHERED, size)
        if self._shard.size > 1 and not forward:
            self.ledger.add(Memory.BUFFERS, -size)
        self._touch(2 * size)
        self._copied_out = compute.now
        if not forward:
            self._gathers.wait_until(self._copied_out)
        unit.gathered, unit.ready, unit.is_sharded = True, None, False

    def _release(self, unit: SimulatedUnit, *, when: bool) -> None:
        """`reshard`."""
        if when and unit.gathered:
            self.ledger.add(Memory.GATHERED, -self._whole(unit).nbytes)
            unit.gathered, unit.is_sharded = False, True

    def _finish_unit(self, unit: SimulatedUnit, *, first: bool, last: bool) -> None:
        """`post_backward`: reshard and reduce; one reduction at a time is in flight."""
        if unit.reduce is None:
            return
        self._release(unit, when=self._stage == 3 or last)
        unit.is_sharded = False
        computed = unit.elements * self._precision.param_dtype.itemsize
        accumulated = unit.elements * self._precision.reduce_dtype.itemsize
        if self._stage <= 1 and not last:  # accumulated in the format of the reduction
            self.ledger.add(Memory.WHOLE_GRADIENTS, (accumulated if first else 0) - computed)
            return
        simulation, compute, whole = self._simulation, self._simulation.compute, self._whole(unit, reduced=True)
        reductions, copies = (compute, compute) if self._on_cpu else (self._reductions, self._copies)
        compute.wait_until(reductions.now)
        self.ledger.add(Memory.BUFFERS, whole.nbytes - self._sent_from)
        self._sent_from = whole.nbytes
        self.ledger.add(Memory.WHOLE_GRADIENTS, -computed - (accumulated if self._stage <= 1 and not first else 0))
        self._touch(2 * whole.nbytes)
        reductions.wait_until(compute.now)
        result = whole.new_empty(unit.size)
        # what the reduction of a unit leaves behind and holds meanwhile
        partial = 0 if self._partial_sums_wait else unit.partial_bytes
        self.ledger.pass_through(Memory.BUFFERS, unit.reduce_buffer + partial + result.nbytes)
        if last or self._zero.zero_cross_every_microbatch:
            self.ledger.pass_through(Memory.BUFFERS, unit.cross_buffer + partial + result.nbytes)
            if self._context.overlap_reduce:  # at worst, sums and results of all units wait for the cross hop
                self.ledger.add(Memory.BUFFERS, partial + result.nbytes)
        if first or (self._stage <= 1 and last):
            self.ledger.add(Memory.GRADIENTS, MASTER_BYTES * unit.size)
        if self._shard.size > 1:
            with simulation.on(reductions):
                unit.reduce(result, whole, self._shard.group, dist.ReduceOp.SUM)  # type: ignore[arg-type]
        if last and self._replicate.size > 1:
            copies.wait_until(reductions.now)
            with simulation.on(copies):
                self._replicate.all_reduce_(result)

    def _open_ledger(self) -> None:
        self.ledger, units = Ledger(), self.units
        own = sum(math.prod(shape) for unit in units for shape in unit.shapes)
        self.ledger.add(Memory.PARAMETERS, MASTER_BYTES * sum(unit.size for unit in units))
        less = 0 if self.muon is None else sum(map(math.prod, self._matrix_shards))
        self.ledger.add(Memory.MOMENTS, MASTER_BYTES * (self._moments * own - less))
        self.ledger.add(Memory.SECONDARY, sum(unit.secondary_bytes for unit in units))
        self.ledger.add(Memory.FROZEN, sum(unit.frozen.kept for unit in units))
        self.ledger.add(Memory.FEEDBACK, sum(unit.feedback_bytes for unit in units))
        if self._partial_sums_wait:
            self.ledger.add(Memory.PARTIAL_SUMS, sum(unit.partial_bytes for unit in units))
        if self._islands is not None:
            self.ledger.add(Memory.OUTER_MESSAGES, most_under_way(self.fragments, self._islands)[0])
        for outer in itertools.chain(*self.fragments):
            self.ledger.add(Memory.COMMON, outer.common.kept_bytes)
            self.ledger.add(Memory.OUTER, outer.outer.nbytes * (1 if outer.momentum is None else 2))
            self.ledger.add(Memory.OUTER_FEEDBACK, 0 if outer.errors is None else outer.errors.messages.nbytes)

    def _whole(self, unit: SimulatedUnit, *, reduced: bool = False) -> torch.Tensor:
        """The unit's gathered parameters, or its gradients as they are reduced."""
        dtype = self._precision.reduce_dtype if reduced else self._precision.param_dtype
        return torch.empty(unit.size * self._shard.size, dtype=dtype, device=META)

    def _touch(self, touched_bytes: int) -> None:
        """A pass over memory on the running clock; on a CPU the process that computes does it, in any queue."""
        seconds = self._costs.memory(touched_bytes)
        self._simulation.spend(seconds, taken=seconds if self._on_cpu else 0.0)


def measure(step: StepSimulator, micro_batches: int) -> SimulatedStep:
    """A step of any number of micro-batches, from three at most: those between the first and the last are alike."""
    step.run(1)  # learns the order of use
    if micro_batches <= SIMULATED_MICRO_BATCHES:
        return step.run(micro_batches)
    fewer, more = (step.run(k) for k in (SIMULATED_MICRO_BATCHES - 1, SIMULATED_MICRO_BATCHES))
    times = micro_batches - SIMULATED_MICRO_BATCHES
    return SimulatedStep(
        summed((1 + times, more.traffic), (-times, fewer.traffic)),
        more.seconds + times * (more.seconds - fewer.seconds),
        {key: seconds + times * (seconds - fewer.busy.get(key, 0.0)) for key, seconds in more.busy.items()},
    )


def most_under_way(fragments: Sequence[Sequence[OuterUnit]], plan: DilocoPlan) -> tuple[int, int]:
    """The most bytes of outer gradients' messages that a rank keeps during a step, and the last fragment of them."""
    sizes = [sum(unit.sent_bytes for unit in fragment) for fragment in fragments]
    count = math.ceil(plan.delay * plan.fragments / plan.steps)
    return max((sum(sizes[last - before] for before in range(count)), last) for last in range(len(sizes)))


def summed(*parts: tuple[int, TrafficTable]) -> TrafficTable:
    """The sum of tables, each so many times; entries that come to nothing are left out."""
    found: dict[tuple[str, str, str], Traffic] = {}
    for times, table in parts:
        for key, traffic in table.items():
            found[key] = Traffic(*(a + times * b for a, b in zip(found.get(key, NOTHING), traffic, strict=True)))
    return {key: traffic for key, traffic in found.items() if traffic != NOTHING}


def traffic_between(before: TrafficTable, after: TrafficTable) -> TrafficTable:
    """Calls and bytes counted since `before`."""
    return summed((1, after), (-1, before))


def sent_on(table: TrafficTable, wire: str) -> int:
    """Bytes that this rank sends over a wire."""
    return sum(traffic.sent_bytes for key, traffic in table.items() if key[0] == wire)
