"""The comms of every unit, on paper: what zero/plugs.py makes for a run, and what its buffers hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megazpp.parallel.lane import Ticket
from megazpp.planner.memory import own_elements
from megazpp.planner.paper import Cost, PaperAxis, PaperCodec, PaperUnit, paper_unit
from megazpp.planner.trace import Parameters
from megazpp.zero.comms import CountedGather, CountedReduce, SummingReduce
from megazpp.zero.config import GatherPlan, ReducePlan, WirePlan, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.layout import plan_message
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.schedule import GatherSchedule, Lanes, ReduceSchedule


@dataclass(kw_only=True)
class ShardedUnit:
    """A unit as FSDP2 sees it.

    Attributes:
        own_elements: of this rank's shard, without padding.
        whole_elements: of the parameters, without padding.
        gather_buffer, reduce_buffer: bytes of messages that a local hop holds while it lasts.
        cross_buffer: bytes of messages that the cross hop of a reduction holds.
        secondary_bytes: of the weights that are kept (hpZ).
        middle_bytes: of the sums that wait for the cross hop (qgZ).
        gathered: the parameters are there.
        ready: when those on the way will be.
    """

    unit: PaperUnit
    gather: TwoHopGather | CountedGather
    reduce: SummingReduce
    own_elements: int
    whole_elements: int
    gather_buffer: int = 0
    reduce_buffer: int = 0
    cross_buffer: int = 0
    secondary_bytes: int = 0
    middle_bytes: int = 0
    gathered: bool = False
    ready: float | None = None

    @property
    def feedback_bytes(self) -> int:
        """Of the error feedback."""
        if not isinstance(self.reduce, TwoHopReduce):
            return 0
        return sum(part.nbytes for error in self.reduce.errors(torch.device("meta")) for part in error)


class PaperReduceSchedule(ReduceSchedule):
    """What is due at the end of the backward waits for the simulation to say that it has ended."""

    def finish_later(self, ticket: Ticket[Any], finish: Callable[[], None]) -> None:
        self._finishing.append((ticket, finish))

    def end_backward(self) -> None:
        self._finish()


@dataclass(frozen=True, kw_only=True)
class PaperPlugs:
    """Makes the comms of a rank.

    Attributes:
        axes: by name.
        wire, zero, precision: of the run.
        lanes, gathers, reduces: shared by all units.
        touch: told of passes over memory.
    """

    axes: dict[str, PaperAxis]
    wire: WirePlan
    zero: ZeroConfig
    precision: PrecisionConfig
    lanes: Lanes
    gathers: GatherSchedule
    reduces: ReduceSchedule
    overlap_gather: bool
    touch: Cost

    def sharded(self, parameters: Parameters) -> ShardedUnit:
        """The unit of `parameters` with its comms."""
        shard = self.axes["shard"]
        unit = paper_unit(parameters, shard.size)
        made = ShardedUnit(
            unit=unit,
            gather=CountedGather(shard, self.lanes.shard, overlap=self.overlap_gather),
            reduce=CountedReduce(unit, shard, self.lanes.shard, self.reduces),
            own_elements=own_elements(parameters, shard.size, shard.rank),
            whole_elements=own_elements(parameters, 1, 0),
        )
        if self.wire.gather is not None:
            self._gather_in_two_hops(made, self.wire.gather)
        if self.wire.reduce is not None:
            self._reduce_in_two_hops(made, self.wire.reduce)
        return made

    def _gather_in_two_hops(self, made: ShardedUnit, plan: GatherPlan) -> None:
        dtype, cross, local = self.precision.param_dtype, self.axes["cross"], self.axes["local"]
        message = plan_message(made.unit.segments, plan.fmt, exact_itemsize=dtype.itemsize)
        made.gather = TwoHopGather(
            made.unit,
            cross=cross,
            local=local,
            lanes=self.lanes,
            schedule=self.gathers,
            codec=PaperCodec(message, dtype, self.touch),
            keep=plan.keep,
        )
        middle = cross.size * message.message_bytes
        made.secondary_bytes = middle if plan.keep else 0
        made.gather_buffer = (local.size * middle if local.size > 1 else 0) + (0 if plan.keep else middle)

    def _reduce_in_two_hops(self, made: ShardedUnit, plan: ReducePlan) -> None:
        dtype, cross, local = self.precision.reduce_dtype, self.axes["cross"], self.axes["local"]
        middle = torch.bfloat16 if self.zero.zero_accumulate_in_bf16 else torch.float32
        segments = made.unit.trained_segments
        inside = plan_message(segments, plan.local, exact_itemsize=dtype.itemsize)
        across = plan_message(segments, plan.cross, exact_itemsize=middle.itemsize)
        made.reduce = TwoHopReduce(
            made.unit,
            self.reduces,
            cross=cross,
            local=local,
            lanes=self.lanes,
            local_codec=PaperCodec(inside, dtype, self.touch),
            cross_codec=PaperCodec(across, middle, self.touch),
            middle_dtype=middle,
            feedback=self.zero.zero_error_feedback,
            every_micro_batch=self.zero.zero_cross_every_microbatch,
        )
        copies = 2 if local.size > 1 else 1  # sent and received
        made.reduce_buffer = copies * local.size * cross.size * inside.message_bytes
        made.cross_buffer = 2 * cross.size * across.message_bytes
        made.middle_bytes = cross.size * made.unit.size * middle.itemsize
