"""A sharding unit on paper: its comms, which zero/comm_factory.py makes, and what their buffers hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazpp.planner.memory import own_elements
from megazpp.planner.paper import PaperAxis, PaperUnit, paper_unit
from megazpp.planner.trace import Parameters
from megazpp.zero.comm_factory import CommFactory
from megazpp.zero.comms import CountedGather, SummingReduce
from megazpp.zero.config import WirePlan, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.reduce import TwoHopReduce


@dataclass(kw_only=True)
class ShardedUnit:
    """A unit as FSDP2 sees it.

    Attributes:
        own_elements: of this rank's shard, without padding.
        whole_elements: of the parameters, without padding.
        gather_buffer, reduce_buffer: bytes of messages that a local hop holds while it lasts.
        cross_buffer: bytes of messages that the cross hop of a reduction holds.
        secondary_bytes: of the weights that are kept (hpZ).
        partial_bytes: of the sums that wait for the cross hop (qgZ).
        feedback_bytes: of the error feedback.
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
    partial_bytes: int = 0
    feedback_bytes: int = 0
    gathered: bool = False
    ready: float | None = None


def sharded_unit(
    parameters: Parameters, factory: CommFactory, axes: dict[str, PaperAxis], wire: WirePlan, zero: ZeroConfig
) -> ShardedUnit:
    """The unit of `parameters` with its comms."""
    shard, nodes, peers = axes["shard"], axes["cross"].size, axes["local"].size
    unit = paper_unit(parameters, shard.size)
    gather, reduce = factory.comms(unit)
    made = ShardedUnit(
        unit=unit,
        gather=gather,
        reduce=reduce,
        own_elements=own_elements(parameters, shard.size, shard.rank),
        whole_elements=own_elements(parameters, 1, 0),
    )
    if isinstance(gather, TwoHopGather) and wire.gather is not None:
        secondary = nodes * gather.message_bytes
        made.secondary_bytes = gather.secondary.kept_bytes if wire.gather.keep else 0
        made.gather_buffer = (peers * secondary if peers > 1 else 0) + (0 if wire.gather.keep else secondary)
    if isinstance(reduce, TwoHopReduce):
        inside, across = reduce.message_bytes
        copies = 2 if peers > 1 else 1  # sent and received
        made.reduce_buffer = copies * peers * nodes * inside
        made.cross_buffer = 2 * nodes * across
        made.partial_bytes = nodes * unit.size * (2 if zero.zero_accumulate_in_bf16 else 4)
        made.feedback_bytes = sum(part.nbytes for error in reduce.errors(torch.device("meta")) for part in error)
    return made
