"""One optimizer step on paper: the hops of zero/, the calls of FSDP2 and the work of the model, in simulated time.

TwoHopGather, TwoHopReduce, FSDP2's counted collectives and both schedules run as they are, on paper axes and meta
tensors, so which hop goes when is decided by the code that decides it in a run (FSDP2's own calls: engine.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from megazpp.parallel.axis import Traffic, TrafficCounter
from megazpp.planner.clock import SimulatedQueue, Simulation
from megazpp.planner.comms import sharded_unit
from megazpp.planner.costs import Costs, NoCosts
from megazpp.planner.engine import PaperFSDP
from megazpp.planner.memory import (
    ACTIVATIONS,
    FEEDBACK,
    MASTER_BYTES,
    MOMENTS,
    PARAMETERS,
    SECONDARY,
    WHOLE_GRADIENTS,
    Ledger,
)
from megazpp.planner.paper import PaperAxis, PaperCodec
from megazpp.planner.recorder import BACKWARD, FORWARD
from megazpp.planner.trace import Trace
from megazpp.topology.layout import AXES, Layout
from megazpp.zero.comm_factory import CommFactory
from megazpp.zero.config import WirePlan, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce

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
        self.trace, self._moments, self._costs = trace, moments, costs or NoCosts()
        self._stage, self._on_cpu = zero.stage_over(layout.axis_size("shard")), on_cpu
        self.counter, self.simulation, self.ledger = TrafficCounter(), Simulation(), Ledger()
        self._axes = {
            name: PaperAxis(
                layout,
                name,
                rank=rank,
                counter=self.counter,
                cost=self._sending(name),
                queue=SimulatedQueue(self.simulation, name, blocks_host=on_cpu),
            )
            for name in AXES
        }
        hops = {name: self._axes[name] for name in ("cross", "local", "shard")}
        zero = dataclasses.replace(zero, zero_check_secondary=False)  # there is nothing to compare
        codec = functools.partial(PaperCodec, touch=self._touch)
        factory = CommFactory(**hops, plan=wire, zero=zero, precision=precision, codec=codec)
        self.units = [sharded_unit(parameters, factory, self._axes, wire, zero) for parameters in trace.units]
        self._fsdp = PaperFSDP(
            self.simulation,
            axes=self._axes,
            costs=self._costs,
            zero=zero,
            precision=precision,
            factory=factory,
            on_cpu=on_cpu,
        )

    def run(self, micro_batches: int) -> float:
        """One step, in seconds; the first one learns the order of use."""
        start = self.simulation.begin_step()
        self._open_ledger()
        self._fsdp.begin_step(self.ledger, self.units, micro_batches=micro_batches)
        self._sum_over_data()  # tokens
        for index in range(micro_batches):
            last = index == micro_batches - 1
            for sharded in self.units:
                if isinstance(sharded.reduce, TwoHopReduce):
                    sharded.reduce.begin_micro_batch(last=last)
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
                self._fsdp.gather(sharded)
                self._fsdp.wait_for_gather(sharded, forward=True)
            self._keep(FORWARD, index)
            self._compute(FORWARD, index)
            if first_use and not (self.trace.tied and index == 0):
                self._fsdp.release(sharded, when=self._stage == 3)
        if self.trace.tied:
            self._fsdp.release(units[0], when=self._stage == 3)
        self._fsdp.end_forward()

    def _backward(self, *, first: bool, last: bool) -> None:
        for sharded in self.units:
            sharded.unit.state.is_sharded = False
        order = [self.units[0], *self.units[:0:-1]] if self.trace.tied else self.units[::-1]
        for index, sharded in enumerate(order):
            segment = self.trace.num_segments - 1 - index
            # the loss comes before the gather of a unit, and after the root's
            loss_first = index == 0 and not self.trace.tied
            if loss_first:
                self._keep(BACKWARD, segment)
            self._fsdp.gather(sharded)
            self._fsdp.wait_for_gather(sharded, forward=False)
            if index + 1 < len(order):
                self._fsdp.gather(order[index + 1])
            if not loss_first:
                self._keep(BACKWARD, segment)
            self._compute(BACKWARD, segment)
            if not (self.trace.tied and index == 0):
                self._fsdp.finish_unit(sharded, first=first, last=last)
        if self.trace.tied:
            self._keep(BACKWARD, 0)
            self._compute(BACKWARD, 0)
            self._fsdp.finish_unit(order[0], first=first, last=last)
        self._fsdp.end_backward()
        for sharded in self.units:
            sharded.unit.state.is_sharded = True

    def _compute(self, phase: str, index: int) -> None:
        for operation in self.trace.segments[phase, index].operations:
            if operation.kind in ("matrix", "memory"):
                self.simulation.spend(f"{phase} {index}", self._costs.operation(operation))
            else:
                self._axes["tp"].count(operation.kind, operation.bytes)

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
            gather = sharded.gather if isinstance(sharded.gather, TwoHopGather) else None
            if gather is not None:
                gather.before_step()
            sharded.unit.state.version += 1
            if gather is not None:
                gather.after_step(keyframe=False)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _open_ledger(self) -> None:
        self.ledger, units = Ledger(), self.units
        self.ledger.add(PARAMETERS, MASTER_BYTES * sum(sharded.unit.size for sharded in units))
        self.ledger.add(MOMENTS, self._moments * MASTER_BYTES * sum(sharded.own_elements for sharded in units))
        self.ledger.add(SECONDARY, sum(sharded.secondary_bytes for sharded in units))
        self.ledger.add(FEEDBACK, sum(sharded.feedback_bytes for sharded in units))

    def _keep(self, phase: str, index: int) -> None:
        """What the model's own code keeps, frees and needs meanwhile."""
        segment = self.trace.segments[phase, index]
        self.ledger.pass_through(ACTIVATIONS, segment.peak)
        self.ledger.add(ACTIVATIONS, segment.kept - segment.gradients)
        self.ledger.add(WHOLE_GRADIENTS, segment.gradients)

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _sending(self, axis: str) -> Callable[[str, int], None]:
        wire = self.simulation.new_clock(axis)

        def cost(collective: str, sent_bytes: int) -> None:
            seconds = self._costs.collective(axis, collective, sent_bytes)
            taken = self._costs.taken(axis, collective, sent_bytes)
            self.simulation.occupy(wire, f"{axis} {collective}", seconds, taken=taken)

        return cost

    def _touch(self, what: str, touched_bytes: int) -> None:
        """A pass over memory on the running clock; on a CPU the process that computes does it, in any queue."""
        seconds = self._costs.memory(touched_bytes)
        self.simulation.spend(what, seconds, taken=seconds if self._on_cpu else 0.0)
