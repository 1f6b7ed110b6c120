"""FSDP2's interface for custom collectives, and implementations that send what FSDP2 sends and count the bytes.

Only this file imports the interface, which is in a private module of torch 2.11 to 2.15.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from megazpp.kernels.formats import BlockFormat, MessageLayout
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue, Work
from megazpp.zero.config import CommPlan, Dtypes, PrecisionConfig, ZeroConfig
from megazpp.zero.schedule import GatherSchedule, ReduceSchedule
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec, LosslessCodec, Segment, plan_message

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"torch {torch.__version__} has moved FSDP2's comm interface; MegaZ++ supports torch 2.11 to 2.15"
    ) from error


class CommContext:
    """The axes, communication queues, schedules and formats that the collectives of all units share.

    `--plan` creates one on simulated axes, to compute the traffic without a cluster.

    Args:
        cross: axis across nodes, for the slow hop.
        local: axis inside a node, for the fast hop.
        shard: axis of all data ranks, for collectives in one hop.
        plan: which collectives are replaced, and their message formats.
        zero: switches and intervals.
        precision: compute and reduction dtypes, for the elements that are not quantized.
        codec: makes the codec that packs and unpacks the messages of a unit.
        lossless_codec: makes the codec for lossless deltas of a unit's weights.
    Attributes:
        overlap_gather, overlap_reduce: whether gathers and reductions overlap with the compute.
        cross_queue, local_queue, shard_queue: communication queues of the axes.
        gather_schedule, reduce_schedule: decide which hop runs when.
    """

    def __init__(
        self,
        cross: MeshAxis,
        local: MeshAxis,
        shard: MeshAxis,
        *,
        plan: CommPlan,
        zero: ZeroConfig,
        precision: PrecisionConfig | Dtypes,
        codec: Callable[[MessageLayout, torch.dtype], Codec] = Codec,
        lossless_codec: Callable[[int], LosslessCodec] = LosslessCodec,
    ) -> None:
        self.plan, self.zero, self.precision = plan, zero, precision
        self._codec, self.lossless_codec = codec, lossless_codec
        two_hops, blocks_host = bool(plan.gather or plan.reduce), shard.queue.blocks_host
        overlaps = two_hops or blocks_host  # on CUDA FSDP2 already overlaps the collectives that are not replaced
        self.overlap_gather, self.overlap_reduce = plan.overlap_gather and overlaps, plan.overlap_reduce and overlaps
        self._use_axes(cross, local, shard)
        self.gather_schedule = GatherSchedule(overlap=self.overlap_gather, queue=self.cross_queue)
        self.reduce_schedule = ReduceSchedule(overlap=self.overlap_reduce, blocks_host=blocks_host)

    def over(self, cross: MeshAxis, local: MeshAxis, shard: MeshAxis) -> Self:
        """Return a copy for units that are sharded along other axes, such as experts.

        The copy shares the schedules, so that the hops of all units keep one order on every rank.
        """
        other = copy.copy(self)
        other._use_axes(cross, local, shard)
        return other

    def _use_axes(self, *axes: MeshAxis) -> None:
        """Set the axes `cross`, `local` and `shard`, and their communication queues."""
        self.cross, self.local, self.shard = axes
        beside = self.overlap_gather or self.overlap_reduce
        self.cross_queue, self.local_queue, self.shard_queue = (axis.queue if beside else CommQueue() for axis in axes)

    def codec(self, segments: Sequence[Segment], fmt: BlockFormat | None, dtype: torch.dtype) -> Codec:
        """Make the codec for flat shards with these segments.

        Args:
            segments: the parameters in the flat shard.
            fmt: quantization format; None quantizes nothing.
            dtype: dtype in which elements that are not quantized are sent.
        """
        return self._codec(plan_message(segments, fmt, exact_itemsize=dtype.itemsize), dtype)


class Pending(dist.Work):
    """The handle that FSDP2 waits for before it uses gathered parameters.

    It derives from `dist.Work` because FSDP2 silently ignores handles of other classes.
    """

    def __init__(self, work: Work[Any]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the task; `timeout` is ignored."""
        self._work.wait()
        return True


class CountedGather(DefaultAllocMixin, AllGather):
    """An all-gather over the shard axis in one hop: [n] shard -> [W n] parameters, as FSDP2's own."""

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.axis, self._queue, self._of = context.shard, context.shard_queue, unit.name
        self._overlap = context.overlap_gather

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        """Gather the parameters; FSDP2 calls this as its all-gather."""
        done = self._queue.submit(lambda: self.axis.all_gather(input_tensor, out=output_tensor, of=self._of))
        if self._overlap and self._queue.blocks_host:
            return Pending(done)
        # On CUDA this makes FSDP2's gather stream wait. Returning a Work would make the compute stream wait instead.
        done.wait()
        return None


class SummingReduce(DefaultAllocMixin, ReduceScatter):
    """The base class of reduce-scatters: [W n] gradients of a unit -> this rank's [n] of their sum over ranks.

    FSDP2 passes only the gradients that a backward has computed, and does not say which parameters they belong to. So
    `post_backward` replaces FSDP2's function of the same name and reads the unit's state before it.

    Attributes:
        reduced: indices of the parameters whose gradients FSDP2 passes.
        total: sum of this rank's own gradients since `watch`, a scalar tensor; None if there were none.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.unit, self._schedule = unit, context.reduce_schedule
        self.reduced = tuple(range(len(unit.parameters)))
        self._fsdp2_post_backward: Callable[..., None] = lambda *_: None
        self._filling: Work[Any] = Work(None)  # the work that fills `.grad` until the end of the backward
        self._waits = False  # whether the gradients of the last call are part of a later call's result
        self._last_micro_batch = True
        self._watched = False
        self.total: torch.Tensor | None = None

    def attach(self) -> None:
        """Replace FSDP2's `post_backward` for the unit by this object's method of that name."""
        self._fsdp2_post_backward = self.unit.replace_post_backward(self.post_backward)

    def post_backward(self, *given: Any) -> None:
        """Reduce the unit's gradients through FSDP2, which then calls this object; it replaces FSDP2's function."""
        if self.unit.reduces_gradients:
            self._filling.wait()  # if the backward reduces the unit twice, FSDP2 adds the second sum to the first one
            self.begin()
        self._fsdp2_post_backward(*given)
        if self._waits:  # FSDP2 has set zeros as `.grad`, which would be in the way of `fills`
            self.unit.clear_gradients(self.reduced)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Set whether the next micro-batch is the step's last one, after which its gradients are complete."""
        self._last_micro_batch = last

    def begin(self) -> None:
        """Record which parameters have gradients that FSDP2 is about to reduce."""
        self.reduced = self.unit.with_gradient()

    def watch(self) -> None:
        """Start to sum this rank's own gradients, before the sum over ranks spreads a NaN or Inf to all of them."""
        self._watched, self.total = True, None

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the reduction of `gradients` [W n].

        Returns:
            A work that returns `result` when it is complete. None if this micro-batch produces no result: these
            gradients are then part of a later call's result.
        """
        raise NotImplementedError

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce the gradients that FSDP2 passes; FSDP2 calls this as its reduce-scatter.

        With overlap the sum is complete at the end of the backward. FSDP2 makes `.grad` a view of its output, so the
        reduction fills the output meanwhile. If FSDP2 adds to an existing `.grad` instead, it gets zeros, and the sum
        is added at the end.
        """
        assert op == dist.ReduceOp.SUM, f"communication only sums, FSDP2 asked for {op}"
        # ---- sum this rank's own gradients
        if self._watched:
            total = input_tensor.sum()  # in its own dtype, one pass; a maximum takes 16 times as long on the CPU
            self.total = total if self.total is None else self.total + total
        self.reduce(input_tensor, output_tensor)

    def reduce(self, gradients: torch.Tensor, output: torch.Tensor) -> None:
        """Start the reduction of `gradients` [W n] to `output` [n]; see `__call__`."""
        # ---- start it, into a separate buffer if FSDP2 gets zeros
        overlap, result = self._schedule.overlap, output
        fills = overlap and self.fills(output)
        late = overlap and not fills
        if late:
            result = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        work = self.start(gradients, result)
        self._waits = work is None
        if work is None or late:
            output.zero_()
        # ---- wait for it now, or at the end of the backward
        if work is None:
            return
        if not overlap:
            work.wait()
        elif fills:
            self._filling = work
            self._schedule.finish_later(work, self._filled)
        else:
            self._finish_later(work, result)

    def fills(self, output: torch.Tensor) -> bool:
        """Return True if FSDP2 will use `output` itself as gradients, so that it may be filled until the backward ends.

        FSDP2 would copy another dtype than the parameters', and add to gradients that exist.
        """
        return output.dtype == torch.float32 and not self.unit.has_gradients(self.reduced)

    def _filled(self) -> None:
        """Forget the work that has filled the gradients."""
        self._filling = Work(None)

    def _finish_later(self, work: Work[torch.Tensor], result: torch.Tensor) -> None:
        """Add `result` to the gradients at the end of the backward, when `work` is done."""
        self._schedule.finish_later(work, functools.partial(self.unit.add_to_gradients, result, self.reduced))


class CountedReduce(SummingReduce):
    """A reduce-scatter in one hop over the whole shard axis, as in FSDP2; its bytes are counted."""

    def __init__(self, unit: Unit, context: CommContext) -> None:
        super().__init__(unit, context)
        self.axis, self._queue = context.shard, context.shard_queue

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        """Start the reduce-scatter in the shard axis's communication queue; see `SummingReduce.start`."""
        work = self._queue.submit(lambda: self.axis.reduce_scatter(gradients, out=result, of=self.unit.name))
        self._schedule.sent(work)
        return work
