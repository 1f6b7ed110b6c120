"""The planner's simulation of one optimizer step of one rank: communication, memory and time.

The gathers and reductions of megazpp/zero, their schedules, and `OuterUnit` of diloco/outer.py run unchanged, on
simulated axes and meta tensors. Only FSDP2's part is reimplemented here: when it gathers, prefetches, waits, reduces
and frees (as in torch 2.13, _fsdp_param_group.py). FSDP2 itself cannot run in a simulation, because CUDA streams define
its order, and meta tensors have no streams. FSDP2 would also be too slow: three layers take 2 s, and a plan simulates
about a hundred steps.

On CUDA, the simulated host runs ahead of the streams. On a CPU, the process itself executes everything that no
communication queue executes. This is one file of more than 300 lines, to keep FSDP2's order of calls in one place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import OuterUnit, send_fragment
from megazpp.diloco.rows import WholeRows
from megazpp.host_states.memory import NUM_SLOTS
from megazpp.optim.config import MuonConfig
from megazpp.optim.muon import JointOrthogonalizer, Orthogonalizer, row_dtype
from megazpp.optim.muon_plan import products
from megazpp.packed_weights.frozen import frozen_bytes
from megazpp.parallel.axis import Traffic, TrafficCounter
from megazpp.planner.cost import Costs, Operation
from megazpp.planner.simulator import (
    META,
    Clock,
    KernelSeries,
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
from megazpp.planner.trace import BACKWARD, FORWARD, Trace, TraceSegment
from megazpp.topology.layout import AXES, DOWNLOAD, EXPERT_AXES, HOST, NODE, PCIE, UPLOAD, Layout
from megazpp.training.config import ModelSpec
from megazpp.zero.comms import CommContext
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.reduce import TwoHopReduce

MASTER_BYTES = 4  # bytes per element of master weights, sharded gradients and moments, which are fp32
NOTHING = Traffic(0, 0)
HOP_AXES = ("cross", "local", "shard")  # names of the axes that the constructor of `CommContext` takes, in its order
TrafficTable = dict[tuple[str, str, str], Traffic]  # calls and sent bytes by (wire, axis, collective)


class SimulatedStep(NamedTuple):
    """Result of the planner's simulation of an optimizer step, or of a synchronization of DiLoCo's replica groups.

    Attributes:
        traffic: exact calls and sent bytes of the simulated rank's collectives.
        seconds: seconds that the step takes, or seconds by which the synchronization delays training.
        busy: seconds of collectives by axis; for the key "compute" the seconds of kernels, and for "host" the seconds
            of launches.
    """

    traffic: TrafficTable
    seconds: float
    busy: dict[str, float]


class StepSimulator:
    """Simulator of the optimizer steps of one rank, for the estimates of --plan.

    Args:
        trace: operations and memory of the model's forward and backward on the simulated rank.
        spec: precision, ZeRO flags and wire formats of the run.
        layout: sizes and links of the parallel axes.
        costs: cost model that gives the seconds of operations; None to count bytes without times.
        rank: global rank to simulate.
        on_cpu: True to simulate a CPU process, which computes and copies on its own thread, instead of CUDA streams.
        moments: number of fp32 moments per parameter; matrices that Muon trains have one less.
        muon: flags of Muon; None for other optimizers.
        frozen_bits: bits per value of packed frozen matrices; None for the dtype in which the model computes.
        diloco: plan of DiLoCo (local steps); None without DiLoCo.
        elastic: True if the replica groups are separate jobs (elastic DiLoCo). Each job then computes the whole outer
            step.
        lossless_share: size of lossless weight deltas as a fraction of the 16-bit weights.

    Attributes:
        trace: operations and memory of the model's forward and backward.
        counter: calls and sent bytes of the simulated rank by (wire, axis, collective); see `TrafficCounter`.
        units: simulated sharding units in the order of use.
        fragments: outer weights of DiLoCo by fragment; [] without DiLoCo and for elastic DiLoCo.
        whole: outer weights of elastic DiLoCo by sharding unit, which each rank has for all replica groups; [] without
            elastic DiLoCo.
        ledger: bytes of device memory by kind, and their peak since the last simulated step began.
        muon: Muon's orthogonalization on simulated axes; None for other optimizers.
    """

    def __init__(
        self,
        trace: Trace,
        spec: ModelSpec,
        layout: Layout,
        *,
        costs: Costs | None = None,
        rank: int = 0,
        on_cpu: bool = False,
        moments: int = 2,
        muon: MuonConfig | None = None,
        frozen_bits: int | None = None,
        diloco: DilocoPlan | None = None,
        elastic: bool = False,
        lossless_share: float = 1.0,
    ) -> None:
        self._zero, self._precision = zero, precision = spec.zero, spec.precision
        self.trace, self._layout, self._on_cpu = trace, layout, on_cpu
        # ---- create the simulated mesh axes, each with a communication queue
        self._moments, self._costs = moments, costs or Costs()
        self._simulation = Simulation(self._costs)
        # Layers of the same kind share one traced segment. The durations of its kernels are summed once, in a
        # `KernelSeries`, and not in each simulated layer, which would be slow.
        segments = {id(segment): segment for segment in self.trace.segments.values()}
        self._series = {key: self._series_of(segment) for key, segment in segments.items()}
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
            for name in (*AXES, NODE, *EXPERT_AXES)
        }
        self._shard, self._replicate = self._axes["shard"], self._axes["replicate"]
        # ---- create the simulated sharding units, with their gathers and reductions
        self._context = CommContext(
            *(self._axes[name] for name in HOP_AXES),
            plan=spec.wire,
            zero=zero,
            precision=precision,
            codec=functools.partial(SimulatedCodec, touch=self._touch),
            lossless_codec=functools.partial(
                SimulatedLosslessCodec, share=lossless_share, costs=self._costs, spend=self._spend
            ),
        )
        dense, experts = ([self._axes[name] for name in names] for names in (HOP_AXES, expert_axes(layout)))
        contexts = {False: self._context, True: self._context.over(*experts)}
        # A group has the units that are in use at the same time: the unit of a layer, and then the unit of its experts.
        self.units, self._groups = list[SimulatedUnit](), list[list[SimulatedUnit]]()
        for parameters, frozen, expert in zip(self.trace.units, self.trace.frozen, self.trace.experts, strict=True):
            _, local, shard = experts if expert else dense
            unit = SimulatedUnit(parameters, shard, exact=self.trace.exact)
            unit.connect(contexts[expert])
            unit.frozen = frozen_bytes(dict(frozen), local.size, precision.param_dtype, frozen_bits)
            if zero.optimizer_cpu_offload and unit.secondary_bytes:
                unit.read = functools.partial(self._read_from_host, unit)
            self.units.append(unit)
            self._groups += [] if expert else [[]]
            self._groups[-1].append(unit)
        # ---- create the clocks of copies of training states in host memory (--optimizer-cpu-offload)
        self._on_host = zero.optimizer_cpu_offload
        self._sums_on_host = zero.zero_offload_partial_sums and spec.wire.reduce is not None
        self._uploads, self._downloads = (self._simulation.new_clock() for _ in range(2))
        # ---- create Muon's orthogonalizer and DiLoCo's outer weights, if the run uses them
        self.muon: JointOrthogonalizer | None = None
        if muon is not None and self.trace.matrices:
            settings: dict[str, Any] = {
                "cross": self._axes["cross"],
                "dtype": row_dtype(precision.param_dtype),
                "codec": functools.partial(SimulatedCodec, touch=self._touch),
                "iterate": self._newton_schulz,
            }
            # Layout and axis inside a node, first for dense matrices, then for experts' matrices. A rank has complete
            # experts, so the layout for experts has no tensor parallelism (tp=1).
            parts = (layout, self._axes[NODE]), (dataclasses.replace(layout.for_experts(), tp=1), experts[1])
            self.muon = JointOrthogonalizer([
                Orthogonalizer(
                    [m for m in self.trace.matrices if m.expert == expert], muon, placed, node=node, **settings
                )
                for expert, (placed, node) in enumerate(parts)
            ])  # fmt: skip
        self._diloco, self.fragments, self.whole = diloco, list[list[OuterUnit]](), list[WholeRows]()
        if diloco is not None:
            given: dict[str, Any] = {"plan": diloco, "precision": precision, "device": META}
            given["codec"] = functools.partial(SimulatedCodec, touch=self._touch)
            axis = self._axes["replica_group"]
            if elastic:
                self.whole = [WholeRows(unit, unit.shapes, axis.size, **given) for unit in self.units]
            else:
                self.fragments = diloco.in_fragments([OuterUnit(u, u.shapes, axis, **given) for u in self.units])
        # ---- initialize the simulated state of FSDP2's streams and buffers
        self._received: SimulatedUnit | None = None  # unit whose frozen weights are gathered but not yet unpacked
        self._gathers, self._reductions, self._copies = (self._simulation.new_clock() for _ in range(3))
        self._copied_out = 0.0  # time at which FSDP2 has copied the last gather's parameters out of the gather's buffer
        # Bytes of two buffers that FSDP2 has not freed: of the last gather whose parameters were copied out of the
        # buffer, and of the last reduction
        self._copied_from = self._sent_from = 0
        self._partial_sums_wait = False  # True if partial sums wait for the cross hop at the end of the step

    def run(self, micro_batches: int, *, repeats: bool = False) -> SimulatedStep:
        """Simulate an optimizer step of `micro_batches` micro-batches, and return its traffic and seconds.

        The schedules of gathers learn the order of the units in the first simulated step. So the seconds of the first
        step differ from later steps.

        Args:
            micro_batches: number of micro-batches of the step.
            repeats: True to simulate only one of the micro-batches between the first and the last, which are alike. Its
                traffic and seconds then count for each of these micro-batches.
        """
        simulation, compute = self._simulation, self._simulation.compute
        before, start = self.counter.table(), simulation.begin_step()
        self._copied_out, self._copied_from, self._sent_from = start, 0, 0
        self._partial_sums_wait = micro_batches > 1 and not self._zero.zero_cross_every_microbatch
        self._open_ledger()
        self._sum_over_data()  # simulates the all-reduce of the step's number of tokens
        self._micro_batch(first=True, last=micro_batches == 1)
        for left in reversed(range(micro_batches - 2)):
            began, busy, traffic = compute.now, dict(simulation.busy), self.counter.table()
            self._micro_batch(first=False, last=False)
            if repeats:
                simulation.repeat(left, began, busy)
                for key, (calls, sent_bytes) in traffic_between(traffic, self.counter.table()).items():
                    self.counter.add(*key, left * sent_bytes, calls=left * calls)
                break
        if micro_batches > 1:
            self._micro_batch(first=False, last=True)
        self._sum_over_data()  # simulates the all-reduce of the loss
        self._optimizer()
        return SimulatedStep(traffic_between(before, self.counter.table()), compute.now - start, simulation.busy)

    def _micro_batch(self, *, first: bool, last: bool) -> None:
        """Simulate forward and backward of a micro-batch, which may be the first or the last one of the step."""
        for unit in self.units:
            if isinstance(unit.reduce, TwoHopReduce):
                unit.reduce.begin_micro_batch(last=last)
        self._forward()
        self._backward(first=first, last=last)

    def learn_order(self) -> None:
        """Simulate a gather of each unit and an optimizer step, so that the schedules learn the units' order."""
        gathers = [unit for unit in self.units if isinstance(unit.gather, TwoHopGather)]
        for unit in gathers:
            unit.gather(unit.whole, unit.shard, unit.axis.group)  # type: ignore[arg-type, misc]
            unit.is_sharded = False  # so that the gathers of other units do not look for changed weights of this unit
        for unit in gathers:
            unit.is_sharded = True
        if gathers:
            self._optimizer()

    def run_forward(self) -> None:
        """Simulate a forward without backward. `ledger` then has the memory of this forward alone.

        `counter` adds the forward's sent bytes to the bytes of earlier simulated steps.
        """
        self._simulation.begin_step()
        self._open_ledger()
        self._forward()

    def synchronize(self, step_seconds: float = 0.0) -> SimulatedStep:
        """Simulate DiLoCo's synchronization of all fragments one after another, as after the last step of a run.

        Without DiLoCo, the result has no traffic and 0 seconds.

        Args:
            step_seconds: seconds of an optimizer step. With a delay between sending and merging, the messages overlap
                with `DilocoPlan.hiding_steps` such steps.
        """
        plan, compute, axis = self._diloco, self._simulation.compute, self._axes["replica_group"]
        if plan is None:
            return SimulatedStep({}, 0.0, {})
        before, start, hidden = self.counter.table(), self._simulation.begin_step(), plan.hiding_steps * step_seconds
        for kind in (Memory.GRADIENTS, Memory.PARTIAL_SUMS, Memory.OUTER_MESSAGES):
            self.ledger.free(kind)
        for units in self.fragments:
            sizes = [unit.rows.nbytes for unit in units]
            # The outer gradient takes 8 reads or writes of the bytes of each `unit.rows`: write zeros (1), copy the
            # weights (2), subtract them from R, the common copy (3), and scale the difference (2).
            self._touch(8 * sum(sizes))
            send_fragment(units, axis, plan, torch.empty((), dtype=torch.float64, device=META))
            # The messages of all fragments count together, because they all are in flight at the end of a run.
            for unit, size in zip(units, sizes, strict=True):
                self.ledger.add(Memory.OUTER_MESSAGES, unit.sent_bytes)
                received = unit.sent_bytes + axis.size * unit.common.crossing_bytes(keyframe=False)
                # Besides the messages, buffers hold the mean outer gradient, and the mean times the learning rate.
                crossing = received + 2 * unit.outer.nbytes
                # On a GPU the next unit's outer gradient is packed while this unit's messages are in flight, so the
                # buffers of both are in memory at once.
                self.ledger.pass_through(Memory.BUFFERS, max(size, crossing) if self._on_cpu else size + crossing)
            compute.wait_until(compute.now + hidden)
            # The merge reads R and writes the weights (2). A mix of both (`merge_alpha`) also reads the weights (3).
            for unit in units:
                unit.merge(plan.merge_alpha)
            self._touch((3 if plan.merge_alpha else 2) * sum(sizes))
        for rows in plan.in_fragments(self.whole) if self.whole else ():
            self._merge_messages(rows, hidden)
        seconds = compute.now - start - plan.fragments * hidden
        return SimulatedStep(traffic_between(before, self.counter.table()), seconds, self._simulation.busy)

    def _merge_messages(self, units: Sequence[WholeRows], hidden: float) -> None:
        """Simulate an outer step of elastic DiLoCo.

        This group sends its messages to all other groups. Then it updates its outer weights by the messages of all
        groups (`WholeRows.apply`).

        Args:
            units: outer weights of the fragment that the outer step updates, by sharding unit.
            hidden: seconds of the optimizer steps during which the messages are in flight.
        """
        axis, weight, messages = self._axes["replica_group"], torch.empty((), device=META), list[torch.Tensor]()
        groups = axis.size
        for unit in units:
            self._touch(8 * unit.rows.nbytes)  # the outer gradient's passes over memory, as in `synchronize`
            messages.append(unit.pack(weight).view(1, -1).expand(groups, -1))
        sent_bytes = (groups - 1) * sum(unit.message_bytes for unit in units)
        work = axis.queue.submit(lambda: axis.count("send", sent_bytes, calls=groups - 1))
        self._simulation.compute.wait_until(self._simulation.compute.now + hidden)
        work.join()
        for unit, received in zip(units, messages, strict=True):
            size = unit.rows.nbytes
            unit.apply(received, [1.0] * groups, weight)
            # The update makes 10 reads or writes of `size` bytes: zeros for the mean outer gradient (1), its scaling
            # (2), its product with the learning rate (2), the subtraction of the product from the outer weights (3),
            # and the merge into the inner weights (2). Momentum adds 10: its decay (2), the addition of the mean (3), a
            # scaling (2) and a subtraction (3).
            self._touch((10 if unit.momentum is None else 20) * size)
            mean_and_product = 2 * size  # buffers of the mean outer gradient, and of the mean times the learning rate
            self.ledger.pass_through(Memory.BUFFERS, (groups + 1) * unit.message_bytes + mean_and_product)

    # ---- forward, backward and optimizer --------------------------------------------------------------------------

    def _forward(self) -> None:
        """Simulate a micro-batch's forward: gather each unit's parameters, compute, and free them with ZeRO stage 3."""
        units, tied, following = self.units, self.trace.tied, iter([*self.units[1:], None])
        # FSDP2's root module makes the streams of gathers wait for the compute stream
        self._gathers.wait_until(self._simulation.compute.now)
        for index, group in enumerate(self._groups):
            for unit in group:
                self._unpack(unit, next(following))
                self._gather(unit)
                self._wait_for_gather(unit, forward=True)
            self._work(FORWARD, index)
            for unit in group if not (tied and index == 0) else ():
                self._release(unit, when=self._stage_of(unit) == 3)
                self._free_unpacked(unit)
        if tied:  # the output layer uses the word embedding, so the first unit is freed only after the output layer
            self._work(FORWARD, len(self._groups))
            self._release(units[0], when=self._stage_of(units[0]) == 3)
            self._free_unpacked(units[0])
        self.ledger.add(Memory.BUFFERS, -self._copied_from)  # FSDP2 frees the last gather's buffer after the forward
        self._copied_from = 0

    def _backward(self, *, first: bool, last: bool) -> None:
        """Simulate the backward of a micro-batch: gather units ahead of their use, compute, and reduce gradients.

        Args:
            first: True for the first micro-batch of the step.
            last: True for the last micro-batch of the step.
        """
        # ---- determine the order of the sharding units in backward
        # With tied embeddings the first unit is used first, because its embedding is also the output layer's weight.
        tied, groups, segment = self.trace.tied, self._groups, self.trace.num_segments - 1
        for unit in self.units:
            unit.is_sharded = False
        order = [groups[0], *groups[:0:-1]] if tied else groups[::-1]
        # ---- gather each unit, compute its backward, and reduce its gradients
        for group, following in zip(order, [*order[1:], None], strict=True):
            reached = self._has_backward(segment)
            after = following[0] if following is not None and self._has_backward(segment - 1) else None
            for unit, then in zip(group, [*group[1:], after], strict=True):
                if reached:
                    self._unpack(unit, then)
                self._gather(unit)
                self._wait_for_gather(unit, forward=False)
            if following is not None:
                self._gather(following[0])
            self._work(BACKWARD, segment)
            for unit in reversed(group) if not (tied and group is order[0]) else ():
                self._finish_unit(unit, first=first, last=last)
                if reached:
                    self._free_unpacked(unit)
            segment -= 1
        if tied:
            self._work(BACKWARD, 0)
            self._finish_unit(order[0][0], first=first, last=last)
            self._free_unpacked(order[0][0])
        # ---- end the backward: FSDP2's hook of the root module waits for all reductions and copies
        for clock in (self._reductions, self._copies, self._downloads):
            self._simulation.running.wait_until(clock.now)
        self._context.reduce_schedule.end_backward()
        self.ledger.free(Memory.BUFFERS)
        self._sent_from = 0
        for unit in self.units:
            unit.is_sharded = True

    def _work(self, phase: str, index: int) -> None:
        """Simulate the forward or backward of a segment of the model: embedding, layer or head.

        Args:
            phase: FORWARD or BACKWARD.
            index: index of the segment, as in `Trace.segments`.
        """
        segment = self.trace.segments[phase, index]
        self.ledger.pass_through(Memory.ACTIVATIONS, segment.peak)
        self.ledger.add(Memory.ACTIVATIONS, segment.kept - segment.gradients)
        self.ledger.add(Memory.WHOLE_GRADIENTS, segment.gradients)
        series, traffic = self._series[id(segment)]
        self._simulation.compute_series(series)
        for (axis, collective), (calls, sent_bytes) in traffic.items():
            for wire, part in self._axes[axis].by_wire(collective, sent_bytes).items():
                self.counter.add(wire, axis, collective, part, calls=calls)

    def _series_of(self, segment: TraceSegment) -> tuple[KernelSeries, dict[tuple[str, str], Traffic]]:
        """Return the kernel series of a segment of the model, and the segment's traffic by (axis, collective)."""
        seconds, before = list[tuple[str, float]](), ""
        traffic: dict[tuple[str, str], Traffic] = {}
        for operation in segment.operations:
            kind, axis = operation.kind, operation.axis
            if kind not in ("matrix", "memory"):
                seconds.append((axis, self._costs.collective(axis, kind, operation.bytes)))
                calls, sent_bytes = traffic.get((axis, kind), NOTHING)
                traffic[axis, kind] = Traffic(calls + 1, sent_bytes + operation.bytes)
            # torch.compile fuses successive passes over memory into one kernel, which costs one launch.
            elif kind == before == "memory":
                seconds[-1] = "compute", seconds[-1][1] + self._costs.operation(operation)
            else:
                seconds.append(("compute", self._costs.operation(operation)))
            before = kind
        return KernelSeries.of(seconds, self._costs.launch), traffic

    def _has_backward(self, segment: int) -> bool:
        """Return True if backward computes the segment with this index; False for a negative index.

        Backward runs from the head to the first segment with trained parameters. Earlier segments have no backward.
        """
        return segment >= 0 and bool(self.trace.segments[BACKWARD, segment].operations)

    def _sum_over_data(self) -> None:
        """Simulate the sum of one fp64 number, the loss or the number of tokens, over all data-parallel ranks."""
        for axis in (self._shard, self._replicate):
            axis.all_reduce_(torch.empty((), dtype=torch.float64, device=META))

    def _optimizer(self) -> None:
        """Simulate the end of a step: sum gradients over tp, compute their norm, and update all weights."""
        # ---- simulate the all-reduce over tp of gradients that are partial sums on each tp rank, for example of norms
        partial = sum(map(math.prod, own_shapes(self.trace.partial, self._shard.size, self._shard.rank)))
        if self._axes["tp"].size > 1 and partial:
            flat = self._axes["tp"].all_reduce_(torch.empty(partial, device=META))
            self.ledger.pass_through(Memory.BUFFERS, flat.nbytes)
            self._touch(4 * flat.nbytes)  # copy the gradients into one buffer (2), and the sums back (2)
        # ---- simulate the all-reduces of the gradient norm, and the orthogonalization of Muon
        for name in ("tp", "shard"):
            self._axes[name].all_reduce_(torch.empty((), dtype=torch.float64, device=META))
        if self.muon is not None:
            self.orthogonalize(iteration=1)  # step 1 is a full step only if every step is one
        # ---- simulate the update of the weights by passes over 4 bytes per element of the rank's shards. The gradient
        # norm makes 1 pass: it reads gradients. AdamW makes 8: it reads and writes weights, gradients and both moments.
        passes = 1 + 8
        if not self._on_host:
            self._touch(passes * 4 * sum(unit.size for unit in self.units))
        for unit in self.units:
            if self._on_host:
                self._update_on_host(unit)
            gather = unit.gather if isinstance(unit.gather, TwoHopGather) else None
            if gather is not None:
                gather.before_step()
            unit.version += 1
            if gather is not None:
                gather.after_step()

    def _update_on_host(self, unit: SimulatedUnit) -> None:
        """Simulate the update of a unit whose states are in host memory: `HostShard.update` of --optimizer-cpu-offload.

        Weight, gradient and both moments are uploaded and updated on the device, and all but the gradient are
        downloaded. The uploads and downloads of successive units overlap.
        """
        state = MASTER_BYTES * unit.size
        self._uploads.wait_until(self._simulation.running.now)
        with self._simulation.on(self._uploads):
            self._copy(UPLOAD, 4 * state, calls=4)
        self._downloads.wait_until(self._uploads.now)
        with self._simulation.on(self._downloads):
            self._touch(8 * state)
            self._copy(DOWNLOAD, 3 * state, calls=3)
        unit.updated = self._downloads.now

    def _read_from_host(self, unit: SimulatedUnit) -> None:
        """Simulate the upload of a unit's weights from host memory (`HostShard.read`), after their last update."""
        self._simulation.running.wait_until(unit.updated)
        self._copy(UPLOAD, MASTER_BYTES * unit.size)

    def _copy(self, direction: str, num_bytes: int, *, calls: int = 1) -> None:
        """Simulate copies between the device and host memory on the running clock.

        Args:
            direction: UPLOAD or DOWNLOAD.
            num_bytes: bytes of all copies together.
            calls: number of copies.
        """
        self.counter.add(PCIE, HOST, direction, num_bytes, calls=calls)
        self._simulation.spend(self._costs.copy(num_bytes), axis=PCIE)

    @property
    def host_bytes(self) -> int:
        """Bytes of the rank's weights, moments, gradients and partial sums that are in host memory."""
        size = sum(unit.size for unit in self.units) if self._on_host else 0
        sums = sum(unit.partial_bytes for unit in self.units) if self._sums_on_host else 0
        return 4 * MASTER_BYTES * size + sums

    def orthogonalize(self, *, iteration: int) -> SimulatedStep:
        """Simulate Muon's orthogonalization of all matrices, and return its traffic and seconds.

        Args:
            iteration: number of the optimizer step, which decides whether whole matrices or parts are orthogonalized.
        """
        assert self.muon is not None
        before, start = self.counter.table(), self._simulation.running.now
        updates = [torch.empty(shape, device=META) for shape in self._matrix_shards]
        held = sum(update.nbytes for update in updates) + self.muon.buffer_bytes(iteration)
        self.ledger.add(Memory.BUFFERS, held)
        self.muon(updates, iteration=iteration)
        self.ledger.add(Memory.BUFFERS, -held)
        return SimulatedStep(traffic_between(before, self.counter.table()), self._simulation.running.now - start, {})

    def _newton_schulz(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        """Simulate the matrix products and the buffers of `newton_schulz` in optim/muon.py, and return `x`.

        Args:
            x: [matrices, rows, columns] meta tensor.
            steps: number of Newton-Schulz iterations.
        """
        for m, n, k in products(*x.shape[1:]) * steps:
            size = x.element_size() * len(x) * (m * k + k * n + 2 * m * n)
            self._simulation.spend(self._costs.operation(Operation("matrix", size, m, n, k, len(x))))
        low, itemsize = min(x.shape[1:]), 4 if self._on_cpu else x.element_size()
        products_bytes = itemsize * (2 * x.numel() + 2 * len(x) * low * low)
        self.ledger.pass_through(Memory.BUFFERS, 2 * x.nbytes + products_bytes)
        return x

    @property
    def _matrix_shards(self) -> list[tuple[int, ...]]:
        """Shapes of the simulated rank's shards of the matrices that Muon trains; [] without Muon."""
        shapes: list[tuple[int, ...]] = []
        for matrix in self.muon.parameters if self.muon is not None else ():
            axis = self._axes[expert_axes(self._layout)[2]] if matrix.expert else self._shard
            shapes += own_shapes([(matrix.name, matrix.shape)], axis.size, axis.rank)
        return shapes

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of all frozen weights in unpacked form, which the sampling of completions keeps at the same time."""
        return sum(unit.frozen.unpacked for unit in self.units)

    def _unpack(self, unit: SimulatedUnit, following: SimulatedUnit | None) -> None:
        """Account for the memory of unpacking a unit's frozen weights while the next unit's weights are gathered.

        Args:
            unit: unit whose packed frozen weights are unpacked.
            following: unit whose frozen weights are gathered meanwhile; None after the last unit.
        """
        if not unit.frozen.unpacked:
            return
        if unit is not self._received:
            self.ledger.add(Memory.UNPACKED, unit.frozen.received)
        self.ledger.add(Memory.UNPACKED, unit.frozen.unpacked + (0 if following is None else following.frozen.received))
        self._received = following
        self.ledger.add(Memory.UNPACKED, -unit.frozen.received)

    def _free_unpacked(self, unit: SimulatedUnit) -> None:
        """Count a unit's unpacked frozen weights as freed."""
        self.ledger.add(Memory.UNPACKED, -unit.frozen.unpacked)

    # ---- FSDP2 ----------------------------------------------------------------------------------------------------

    def _gather(self, unit: SimulatedUnit) -> None:
        """Simulate FSDP2's `unshard`: start the gather of a unit's parameters.

        Nothing happens if the parameters are already gathered, if their gather is in flight, or if the unit has no
        trained parameters.
        """
        if unit.gathered or unit.ready is not None or unit.gather is None:
            return
        clock = self._gathers
        # On a CPU without --overlap-param-gather, the process itself waits for the gather. With this flag the gather
        # runs in the communication queues and does not delay the process.
        if self._on_cpu:
            compute = self._simulation.compute
            clock = Clock(compute.now) if self._context.overlap_gather else compute
        if unit.axis.size > 1:
            with self._simulation.on(clock):
                self.ledger.add(Memory.BUFFERS, unit.whole.nbytes)
                self.ledger.pass_through(Memory.BUFFERS, unit.gather_buffer)
                pending = unit.gather(unit.whole, unit.shard, unit.axis.group)  # type: ignore[arg-type]
                if pending is not None:
                    pending.wait()
        unit.ready = clock.now

    def _wait_for_gather(self, unit: SimulatedUnit, *, forward: bool) -> None:
        """Simulate FSDP2's `wait_for_unshard`: wait for a unit's gather, and copy its parameters out of the buffer.

        In forward, the gather of the unit after the next one waits for this copy. In backward, the gather of the next
        unit waits for this copy. Nothing happens if the unit is already gathered, or has no gather.
        """
        if unit.gathered or unit.gather is None:
            return
        assert unit.ready is not None
        compute, size = self._simulation.compute, unit.whole.nbytes
        compute.wait_until(unit.ready)
        if forward:
            self._gathers.wait_until(self._copied_out)
        # In forward, FSDP2 keeps the buffer of a unit's gather until the next unit has been copied out of its buffer.
        if unit.axis.size > 1 and forward:
            self.ledger.add(Memory.BUFFERS, -self._copied_from)
            self._copied_from = size
        self.ledger.add(Memory.GATHERED, size)
        if unit.axis.size > 1 and not forward:
            self.ledger.add(Memory.BUFFERS, -size)
        self._touch(2 * size)
        self._copied_out = compute.now
        if not forward:
            self._gathers.wait_until(self._copied_out)
        unit.gathered, unit.ready, unit.is_sharded = True, None, False

    def _release(self, unit: SimulatedUnit, *, when: bool) -> None:
        """Simulate FSDP2's `reshard` if `when` is True: free the unit's gathered parameters, if they are in memory."""
        if when and unit.gathered:
            self.ledger.add(Memory.GATHERED, -unit.whole.nbytes)
            unit.gathered, unit.is_sharded = False, True

    def _finish_unit(self, unit: SimulatedUnit, *, first: bool, last: bool) -> None:
        """Simulate FSDP2's `post_backward`: reshard a unit and reduce its gradients.

        Only one reduction is in flight at a time, because each waits for the previous one. With ZeRO stages 0 and 1,
        only the last micro-batch reduces gradients; earlier ones add them up.

        Args:
            unit: unit whose backward has ended.
            first: True for the first micro-batch of the step.
            last: True for the last micro-batch of the step.
        """
        # ---- free the unit's gathered parameters; a unit without trained parameters has no gathers and no gradients
        if unit.reduce is None:
            return
        stage = self._stage_of(unit)
        self._release(unit, when=stage == 3 or last)
        unit.is_sharded = False
        computed = unit.elements * self._precision.param_dtype.itemsize
        accumulated = unit.elements * self._precision.reduce_dtype.itemsize
        # ---- with stages 0 and 1, before the last micro-batch, only add up unsharded gradients in the reduction dtype
        if stage <= 1 and not last:
            self.ledger.add(Memory.WHOLE_GRADIENTS, (accumulated if first else 0) - computed)
            return
        # ---- copy the unit's gradients into the buffer of the reduction
        simulation, compute, whole, result = self._simulation, self._simulation.compute, unit.gradients, unit.sum
        reductions, copies = (compute, compute) if self._on_cpu else (self._reductions, self._copies)
        compute.wait_until(reductions.now)
        self.ledger.add(Memory.BUFFERS, whole.nbytes - self._sent_from)
        self._sent_from = whole.nbytes
        self.ledger.add(Memory.WHOLE_GRADIENTS, -computed - (accumulated if stage <= 1 and not first else 0))
        self._touch(2 * whole.nbytes)
        reductions.wait_until(compute.now)
        # ---- account for the memory of the reduction
        # Partial sums that wait for the cross hop at the end of the step are already counted as persistent memory.
        partial = 0 if self._partial_sums_wait else unit.partial_bytes
        # With partial sums in host memory, the first micro-batch allocates new sums on the device. Later micro-batches
        # upload the sums into a staging slot, which is counted as `Memory.STAGING`.
        first_sums = unit.partial_bytes if self._sums_on_host and first else partial
        two_hop = isinstance(unit.reduce, TwoHopReduce)
        # With training states in host memory, the rank's reduced gradient is a buffer of the cross hop, counted below.
        own_result = 0 if self._on_host and two_hop else result.nbytes
        self.ledger.pass_through(Memory.BUFFERS, unit.reduce_buffer + first_sums + own_result)
        if last or self._zero.zero_cross_every_microbatch or (self._on_host and not two_hop):
            on_device = result.nbytes
            # With states in host memory, the device has up to two fp32 buffers: one for the reduced gradients, if there
            # are several ranks to reduce over, and one for the uploaded sum of earlier micro-batches' gradients.
            if self._on_host:
                on_device = MASTER_BYTES * unit.size * ((unit.axis.size > 1) + unit.reduced)
            self.ledger.pass_through(Memory.BUFFERS, unit.cross_buffer + partial + on_device)
            # With overlap, the partial sums of all units wait in memory for the cross hop in the worst case. If `.grad`
            # cannot be a view of FSDP2's output (`SummingReduce.fills`), the reduced gradient is a further tensor.
            if self._context.overlap_reduce:
                late_sum = 0 if self._on_host or unit.reduce.fills(result) else result.nbytes
                self.ledger.add(Memory.BUFFERS, partial + late_sum)
        if self._sums_on_host and self._partial_sums_wait and not first:
            with simulation.on(self._uploads):
                self._copy(UPLOAD, unit.partial_bytes)
            reductions.wait_until(self._uploads.now)
        # ---- simulate the reduction, and copies of its result to host memory
        if unit.axis.size > 1:
            with simulation.on(reductions):
                unit.reduce(result, whole, unit.axis.group, dist.ReduceOp.SUM)  # type: ignore[arg-type]
        # `waits` is True if this reduction only adds to the partial sums, and no reduced gradient is in memory yet.
        waits = isinstance(unit.reduce, TwoHopReduce) and not unit.reduce.crosses and self._replicate.size == 1
        if self._on_host:
            self._downloads.wait_until(reductions.now)
            with simulation.on(self._downloads):
                if not waits and unit.reduced:
                    # Host memory has the gradients of the step's earlier micro-batches. They are uploaded, so that the
                    # device can add the new gradients to them.
                    self._copy(UPLOAD, MASTER_BYTES * unit.size)
                if not waits or self._sums_on_host:
                    self._copy(DOWNLOAD, unit.partial_bytes if waits else MASTER_BYTES * unit.size)
        elif not waits and not unit.reduced:
            self.ledger.add(Memory.GRADIENTS, MASTER_BYTES * unit.size)
        unit.reduced = unit.reduced or not waits
        if last and self._replicate.size > 1:
            copies.wait_until(reductions.now)
            with simulation.on(copies):
                self._replicate.all_reduce_(result)

    def _open_ledger(self) -> None:
        """Start a new account of device memory, which begins with the memory that persists between steps."""
        self.ledger, units = Ledger(), self.units
        own = sum(math.prod(shape) for unit in units for shape in unit.shapes)
        less = 0 if self.muon is None else sum(map(math.prod, self._matrix_shards))
        if not self._on_host:
            self.ledger.add(Memory.PARAMETERS, MASTER_BYTES * sum(unit.size for unit in units))
            self.ledger.add(Memory.MOMENTS, MASTER_BYTES * (self._moments * own - less))
        else:
            itemsize = self._precision.param_dtype.itemsize
            self.ledger.add(Memory.WORKING, sum(itemsize * unit.size for unit in units if not unit.secondary_bytes))
            sums = max(unit.partial_bytes for unit in units) if self._sums_on_host else 0
            self.ledger.add(Memory.STAGING, NUM_SLOTS * (4 * MASTER_BYTES * max(unit.size for unit in units) + sums))
        self.ledger.add(Memory.SECONDARY, sum(unit.secondary_bytes for unit in units))
        self.ledger.add(Memory.FROZEN, sum(unit.frozen.kept for unit in units))
        self.ledger.add(Memory.FEEDBACK, sum(unit.feedback_bytes for unit in units))
        for unit in units:
            unit.reduced = False
        if self._partial_sums_wait and not self._sums_on_host:
            self.ledger.add(Memory.PARTIAL_SUMS, sum(unit.partial_bytes for unit in units))
        if self._diloco is not None and self.fragments:
            self.ledger.add(Memory.OUTER_MESSAGES, most_under_way(self.fragments, self._diloco)[0])
        for outer in itertools.chain(*self.fragments):
            self.ledger.add(Memory.COMMON, outer.common.kept_bytes)
            self.ledger.add(Memory.OUTER, outer.outer.nbytes * (1 if outer.momentum is None else 2))
            self.ledger.add(Memory.OUTER_FEEDBACK, 0 if outer.errors is None else outer.errors.messages.nbytes)
        for rows in self.whole:
            self.ledger.add(Memory.COMMON, rows.rows.nbytes)
            self.ledger.add(Memory.OUTER, rows.snapshot_bytes - rows.rows.nbytes)
            self.ledger.add(Memory.OUTER_FEEDBACK, 0 if rows.errors is None else rows.errors.messages.nbytes)

    def _stage_of(self, unit: SimulatedUnit) -> int:
        """Return the ZeRO stage of a unit, which depends on the number of ranks over which the unit is sharded."""
        return self._zero.stage_over(unit.axis.size)

    def _touch(self, touched_bytes: int) -> None:
        """Simulate a kernel that reads and writes `touched_bytes` of device memory on the running clock."""
        self._spend(self._costs.memory(touched_bytes))

    def _spend(self, seconds: float) -> None:
        """Simulate a kernel of `seconds` on the running clock. On a CPU the kernel also delays the compute clock."""
        self._simulation.spend(seconds, taken=seconds if self._on_cpu else 0.0)


def expert_axes(layout: Layout) -> tuple[str, str, str]:
    """Return the names of the cross, local and shard axes of experts' parameters.

    The local and the shard axis differ from the axes of other parameters if the expert-parallel size differs from the
    tensor-parallel size.
    """
    return ("cross", "expert local", "expert shard") if layout.has_expert_axes else HOP_AXES


def measure(step: StepSimulator, micro_batches: int) -> SimulatedStep:
    """Return the traffic and seconds of an optimizer step with any number of micro-batches.

    At most three micro-batches are simulated. Before the step, `StepSimulator.learn_order` lets the schedules of
    gathers learn the order of the units.
    """
    step.learn_order()
    return step.run(micro_batches, repeats=True)


def most_under_way(fragments: Sequence[Sequence[OuterUnit]], plan: DilocoPlan) -> tuple[int, int]:
    """Return the largest number of bytes of DiLoCo's messages that are in flight at the same time.

    The messages carry outer gradients. The messages of a fragment are in flight during the delay between sending and
    merging.

    Args:
        fragments: outer weights of DiLoCo, by fragment.
        plan: plan of DiLoCo, with the delay between sending and merging.

    Returns:
        the number of bytes; and, of the fragments whose messages are then in flight, the index of the fragment that was
        sent last.
    """
    sizes = [sum(unit.sent_bytes for unit in fragment) for fragment in fragments]
    count = math.ceil(plan.delay * plan.fragments / plan.steps)
    return max((sum(sizes[last - before] for before in range(count)), last) for last in range(len(sizes)))


def summed(*parts: tuple[int, TrafficTable]) -> TrafficTable:
    """Return a traffic table with the weighted sum of several traffic tables, without entries that are zero.

    Args:
        *parts: pairs (factor, table); each table has calls and sent bytes by (kind of link, axis, collective).
    """
    found: dict[tuple[str, str, str], Traffic] = {}
    for times, table in parts:
        for key, traffic in table.items():
            found[key] = Traffic(*(a + times * b for a, b in zip(found.get(key, NOTHING), traffic, strict=True)))
    return {key: traffic for key, traffic in found.items() if traffic != NOTHING}


def traffic_between(before: TrafficTable, after: TrafficTable) -> TrafficTable:
    """Return the calls and sent bytes counted between two tables of a traffic counter: `after` minus `before`."""
    return summed((1, after), (-1, before))


def sent_on(table: TrafficTable, wire: str) -> int:
    """Return the bytes in a rank's traffic table that are sent over links of the kind `wire`, such as "cross"."""
    return sum(traffic.sent_bytes for key, traffic in table.items() if key[0] == wire)
