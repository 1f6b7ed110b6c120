"""The comms of one model: made from the plan, sharing lanes and schedules, plugged into FSDP2 unit by unit."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from megazpp.parallel.dims import ParallelDims
from megazpp.zero.comms import CountedGather, CountedReduce, SummingReduce
from megazpp.zero.config import GatherPlan, ReducePlan, WirePlan, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.layout import plan_message
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.schedule import GatherSchedule, ReduceSchedule, open_lanes
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec


class Plugs:
    """Makes and plugs comms.

    Args:
        dims: the axes.
        plan: what replaces FSDP2's collectives.
        zero, precision: formats and switches.

    Attributes:
        gathers, reduces: the two-hop comms so far.
        all_reduces: those and FSDP2's own.
    """

    def __init__(self, dims: ParallelDims, plan: WirePlan, zero: ZeroConfig, precision: PrecisionConfig) -> None:
        self._dims, self._plan, self._zero, self._precision = dims, plan, zero, precision
        two_hops, blocks_host = bool(plan.gather or plan.reduce), dims.shard.lane.blocks_host
        overlaps = two_hops or blocks_host  # FSDP2's own collectives run beside the compute on CUDA as they are
        self._overlap_gather, self._overlap_reduce = plan.overlap_gather and overlaps, plan.overlap_reduce and overlaps
        self._lanes = open_lanes(dims, overlap=self._overlap_gather or self._overlap_reduce)
        self._gather_schedule = GatherSchedule(overlap=self._overlap_gather, prefetch=blocks_host)
        self._reduce_schedule = ReduceSchedule(overlap=self._overlap_reduce, blocks_host=blocks_host)
        self.gathers: list[TwoHopGather] = []
        self.reduces: list[TwoHopReduce] = []
        self.all_reduces: list[SummingReduce] = []

    def plug_into(self, unit: Unit) -> None:
        """Replace the collectives of the unit's modules."""
        gather: TwoHopGather | CountedGather = CountedGather(
            self._dims.shard,
            self._lanes.shard,
            overlap=self._overlap_gather and self._plan.gather is None,
            of=unit.name,
        )
        reduce: TwoHopReduce | CountedReduce = CountedReduce(
            unit, self._dims.shard, self._lanes.shard, self._reduce_schedule
        )
        if self._plan.gather is not None:
            gather = self._two_hop_gather(unit, self._plan.gather)
            self.gathers.append(gather)
        if self._plan.reduce is not None and unit.trained_segments:
            reduce = self._two_hop_reduce(unit, self._plan.reduce)
            self.reduces.append(reduce)
        self.all_reduces.append(reduce)
        for module in unit.modules:
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
            if self._plan.reduce is not None:
                _reduce_unused_parameters(module)

    def _two_hop_gather(self, unit: Unit, plan: GatherPlan) -> TwoHopGather:
        dtype = self._precision.param_dtype
        return TwoHopGather(
            unit,
            cross=self._dims.cross,
            local=self._dims.local,
            lanes=self._lanes,
            schedule=self._gather_schedule,
            codec=Codec(plan_message(unit.segments, plan.fmt, exact_itemsize=dtype.itemsize), dtype),
            keep=plan.keep,
            check=self._zero.zero_check_secondary,
        )

    def _two_hop_reduce(self, unit: Unit, plan: ReducePlan) -> TwoHopReduce:
        dtype = self._precision.reduce_dtype
        middle = torch.bfloat16 if self._zero.zero_accumulate_in_bf16 else torch.float32
        segments = unit.trained_segments
        return TwoHopReduce(
            unit,
            self._reduce_schedule,
            cross=self._dims.cross,
            local=self._dims.local,
            lanes=self._lanes,
            local_codec=Codec(plan_message(segments, plan.local, exact_itemsize=dtype.itemsize), dtype),
            cross_codec=Codec(plan_message(segments, plan.cross, exact_itemsize=middle.itemsize), middle),
            middle_dtype=middle,
            feedback=self._zero.zero_error_feedback,
            every_micro_batch=self._zero.zero_cross_every_microbatch,
        )


def _reduce_unused_parameters(module: FSDPModule) -> None:
    """Have parameters without a gradient reduced as zeros, so that every message has the same layout.

    torch 2.11 and 2.12 cannot; there `TwoHopReduce` refuses a unit in which a parameter got no gradient.
    """
    switch: Any = getattr(module, "set_reduce_scatter_unused_params", None)
    if switch is not None:
        switch(True, recurse=False)
