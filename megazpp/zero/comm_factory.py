"""The factory of a model's comms: it makes each unit's all-gather and reduce-scatter, and installs them in FSDP2.

A unit is FSDP2's parameter group. The comms of all units share their queues and schedules. The planner
(megazpp/planner/step.py) makes its comms here too, on axes that exist on paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from kernels.formats import BlockFormat, MessageLayout
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue
from megazpp.zero.comms import CountedGather, CountedReduce, SummingReduce
from megazpp.zero.config import GatherPlan, ReducePlan, WirePlan, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.layout import plan_message
from megazpp.zero.precision import Dtypes, PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.schedule import CommQueues, GatherSchedule, ReduceSchedule
from megazpp.zero.secondary import Resident, Secondary
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec


class CommFactory:
    """Makes the custom collectives of a model's units.

    Args:
        cross, local, shard: the axes that the collectives run over.
        plan: which of FSDP2's collectives are replaced, and by what.
        zero, precision: formats and switches.
        codec: makes the codec that packs a unit's messages.

    Attributes:
        overlap_gather, overlap_reduce: whether collectives run beside the compute.
        reduce_schedule: the reductions in flight during a backward.
        gathers, reduces: the two-hop comms that have been made.
        all_reduces: `reduces` and FSDP2's own reductions.
    """

    def __init__(
        self,
        *,
        cross: MeshAxis,
        local: MeshAxis,
        shard: MeshAxis,
        plan: WirePlan,
        zero: ZeroConfig,
        precision: PrecisionConfig | Dtypes,
        codec: Callable[[MessageLayout, torch.dtype], Codec] = Codec,
    ) -> None:
        self._cross, self._local, self._shard, self._codec = cross, local, shard, codec
        self._plan, self._zero, self._precision = plan, zero, precision
        two_hops, blocks_host = bool(plan.gather or plan.reduce), shard.queue.blocks_host
        overlaps = two_hops or blocks_host  # FSDP2's own collectives run beside the compute on CUDA as they are
        self.overlap_gather, self.overlap_reduce = plan.overlap_gather and overlaps, plan.overlap_reduce and overlaps
        beside = self.overlap_gather or self.overlap_reduce
        self._queues = CommQueues(*(axis.queue if beside else CommQueue() for axis in (cross, local, shard)))
        self._gather_schedule = GatherSchedule(overlap=self.overlap_gather, queue=self._queues.cross)
        self.reduce_schedule = ReduceSchedule(overlap=self.overlap_reduce, blocks_host=blocks_host)
        self.gathers: list[TwoHopGather] = []
        self.reduces: list[TwoHopReduce] = []
        self.all_reduces: list[SummingReduce] = []

    def install(self, unit: Unit) -> None:
        """Make the unit's comms, and have FSDP2 call them for the unit's modules."""
        gather, reduce = self.comms(unit)
        for module in unit.modules:
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
            if self._plan.reduce is not None:
                _reduce_unused_parameters(module)

    def comms(self, unit: Unit) -> tuple[TwoHopGather | CountedGather, TwoHopReduce | CountedReduce]:
        """Make the unit's all-gather of parameters and its reduce-scatter of gradients."""
        gather: TwoHopGather | CountedGather = CountedGather(
            self._shard, self._queues.shard, overlap=self.overlap_gather and self._plan.gather is None, of=unit.name
        )
        reduce: TwoHopReduce | CountedReduce = CountedReduce(
            unit, self._shard, self._queues.shard, self.reduce_schedule
        )
        if self._plan.gather is not None:
            gather = self._two_hop_gather(unit, self._plan.gather)
            self.gathers.append(gather)
        if self._plan.reduce is not None and unit.trained_segments:
            reduce = self._two_hop_reduce(unit, self._plan.reduce)
            self.reduces.append(reduce)
        self.all_reduces.append(reduce)
        return gather, reduce

    def _two_hop_gather(self, unit: Unit, plan: GatherPlan) -> TwoHopGather:
        return TwoHopGather(
            unit,
            local=self._local,
            queues=self._queues,
            schedule=self._gather_schedule,
            secondary=self._secondary(unit, plan),
            keep=plan.keep,
        )

    def _secondary(self, unit: Unit, plan: GatherPlan) -> Secondary:
        dtype = self._precision.param_dtype

        def codec(fmt: BlockFormat | None) -> Codec:
            return self._codec(plan_message(unit.segments, fmt, exact_itemsize=dtype.itemsize), dtype)

        if plan.differences is None:
            return Secondary(codec(plan.fmt), self._cross, of=unit.name)
        return Resident(
            codec(plan.fmt),
            self._cross,
            of=unit.name,
            exact=codec(None),
            differences=codec(plan.differences),
        )

    def _two_hop_reduce(self, unit: Unit, plan: ReducePlan) -> TwoHopReduce:
        dtype = self._precision.reduce_dtype
        partial = torch.bfloat16 if self._zero.zero_accumulate_in_bf16 else torch.float32
        segments = unit.trained_segments
        return TwoHopReduce(
            unit,
            self.reduce_schedule,
            cross=self._cross,
            local=self._local,
            queues=self._queues,
            local_codec=self._codec(plan_message(segments, plan.local, exact_itemsize=dtype.itemsize), dtype),
            cross_codec=self._codec(plan_message(segments, plan.cross, exact_itemsize=partial.itemsize), partial),
            partial_dtype=partial,
            feedback=self._zero.zero_error_feedback,
            beta=self._zero.zero_error_feedback_beta,
            every_micro_batch=self._zero.zero_cross_every_microbatch,
        )


def _reduce_unused_parameters(module: FSDPModule) -> None:
    """Have parameters without a gradient reduced as zeros, so that every message has the same layout.

    torch 2.11 and 2.12 cannot; there `TwoHopReduce` refuses a unit in which a parameter got no gradient.
    """
    switch: Any = getattr(module, "set_reduce_scatter_unused_params", None)
    if switch is not None:
        switch(True, recurse=False)
