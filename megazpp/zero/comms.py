"""FSDP2's interface for custom collectives, and collectives in one hop that send what FSDP2's own would send.

They count the bytes that they send. Only this file imports the interface, which is in a private module of torch 2.11
to 2.15.
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
        f"torch {torch.__version__} has no FSDP2 interface for custom collectives where MegaZ++ expects it: use torch "
        "2.11 to 2.15"
    ) from error


class CommContext:
    """The axes, communication queues, schedules and formats that the collectives of all sharding units share.

    `--plan` creates a `CommContext` on simulated axes, to compute the traffic without a cluster.

    Args:
        cross: axis across nodes, for the slow hop.
        local: axis inside a node, for the fast hop.
        shard: axis of all data ranks, for collectives in one hop.
        plan: collectives that replace FSDP2's, with their message formats.
        zero: flags of ZeRO and ZeRO++.
        precision: compute and reduction dtypes, in which elements without quantization are sent.
        codec: constructor of a unit's codec, from the layout of its messages and the dtype of unquantized elements.
        lossless_codec: constructor of a unit's codec of lossless deltas, from the number of elements of its flat shard.
    Attributes:
        overlap_gather, overlap_reduce: True if gathers and reductions overlap with the compute.
        cross_queue, local_queue, shard_queue: communication queues of the three axes.
        gather_schedule, reduce_schedule: schedules that decide when each hop of a unit runs.
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
        # On CUDA, FSDP2 itself overlaps collectives in one hop with the compute, so no schedule is necessary for them.
        overlaps = two_hops or blocks_host
        self.overlap_gather, self.overlap_reduce = plan.overlap_gather and overlaps, plan.overlap_reduce and overlaps
        self._use_axes(cross, local, shard)
        self.gather_schedule = GatherSchedule(overlap=self.overlap_gather, queue=self.cross_queue)
        self.reduce_schedule = ReduceSchedule(overlap=self.overlap_reduce, blocks_host=blocks_host)

    def over(self, cross: MeshAxis, local: MeshAxis, shard: MeshAxis) -> Self:
        """Return a copy of this context for units that are sharded along other axes, such as those of experts.

        The copy shares the schedules of this context, so that the hops of all units keep one order on every rank.
        The arguments are the axes of these units, as for the constructor.
        """
        other = copy.copy(self)
        other._use_axes(cross, local, shard)
        return other

    def _use_axes(self, *axes: MeshAxis) -> None:
        """Set the axes `cross`, `local` and `shard` of this context, and the communication queue of each axis.

        If neither gathers nor reductions overlap with the compute, a queue runs each collective at once, in the caller.
        """
        self.cross, self.local, self.shard = axes
        overlap = self.overlap_gather or self.overlap_reduce
        self.cross_queue, self.local_queue, self.shard_queue = (axis.queue if overlap else CommQueue() for axis in axes)

    def codec(self, segments: Sequence[Segment], fmt: BlockFormat | None, dtype: torch.dtype) -> Codec:
        """Return a codec that packs flat shards with these segments into messages, and unpacks such messages.

        Args:
            segments: segments of the flat shard, one per parameter.
            fmt: block format of quantized segments; None quantizes no segment.
            dtype: dtype in which elements without quantization are sent.
        """
        return self._codec(plan_message(segments, fmt, exact_itemsize=dtype.itemsize), dtype)


class Pending(dist.Work):
    """The handle of a running all-gather, for which FSDP2 waits before it uses the gathered parameters.

    The class derives from `dist.Work`, because FSDP2 silently ignores handles of other classes.

    Args:
        work: task of a communication queue that completes the all-gather.
    """

    def __init__(self, work: Work[Any]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the gathered parameters are complete; return True, as FSDP2 expects. `timeout` is ignored."""
        self._work.wait()
        return True


class CountedGather(DefaultAllocMixin, AllGather):
    """The all-gather of a unit's weights in one hop over the shard axis, like FSDP2's own; its bytes are counted.

    It gathers this rank's flat shard [n] to the unit's parameters [W n]; W: ranks of the shard axis.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.axis, self._queue, self._of = context.shard, context.shard_queue, unit.name
        self._overlap = context.overlap_gather

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        """Gather `input_tensor`, n elements from each of W ranks, into `output_tensor` [W n]; FSDP2 calls this.

        Returns a handle that FSDP2 waits for, or None if the parameters are complete, or if FSDP2's gather stream
        waits for them.
        """
        done = self._queue.submit(lambda: self.axis.all_gather(input_tensor, out=output_tensor, of=self._of))
        if self._overlap and self._queue.blocks_host:
            return Pending(done)
        # On CUDA, wait() makes FSDP2's gather stream wait. Returning a Work would make the compute stream wait instead.
        done.wait()
        return None


class SummingReduce(DefaultAllocMixin, ReduceScatter):
    """The base class of the reduce-scatters that replace FSDP2's for one sharding unit.

    A reduce-scatter sums the unit's gradients [W n] over the W data ranks, and gives this rank its shard [n] of the
    sum. FSDP2 passes only the gradients that a backward has computed, and does not say to which parameters they belong.
    So `post_backward` replaces FSDP2's function of the same name, and first records which parameters have gradients.

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
    Attributes:
        reduced: indices in the unit of the parameters whose gradients FSDP2 passes.
        total: sum of all elements of this rank's unreduced gradients since `watch`, a scalar tensor; None if there were
            no gradients.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.unit, self._schedule = unit, context.reduce_schedule
        self.reduced = tuple(range(len(unit.parameters)))
        self._fsdp2_post_backward: Callable[..., None] = lambda *_: None
        self._filling: Work[Any] = Work(None)  # task of the reduction that is filling `.grad`; a finished task if none
        # True if `post_backward` must set `.grad` to None: the last call has only added to partial sums, which a later
        # call reduces, or its result goes to host memory (host_states/reduce.py)
        self._waits = False
        self._last_micro_batch = True
        self._watched = False
        self.total: torch.Tensor | None = None

    def attach(self) -> None:
        """Make FSDP2 call this object's `post_backward` for the unit instead of its own function of that name."""
        self._fsdp2_post_backward = self.unit.replace_post_backward(self.post_backward)

    def post_backward(self, *given: Any) -> None:
        """Reduce the unit's gradients after its backward. FSDP2 calls this method instead of its own function.

        The method calls FSDP2's own function, which calls this object as its reduce-scatter.

        Args:
            given: arguments of FSDP2's function.
        """
        if self.unit.reduces_gradients:
            self._filling.wait()  # a second reduction in one backward adds to `.grad`, which must be complete by then
            self.begin()
        self._fsdp2_post_backward(*given)
        if self._waits:
            # FSDP2 has set `.grad` to the output, which is zeros because the gradients wait as partial sums (or a host
            # buffer with --optimizer-cpu-offload). With `.grad` None instead, FSDP2 does not add the next output to it.
            self.unit.clear_gradients(self.reduced)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Tell the reduction whether the next micro-batch is the last one of its training step.

        Args:
            last: True if the step's gradients are complete after this micro-batch.
        """
        self._last_micro_batch = last

    def begin(self) -> None:
        """Record in `reduced` the parameters that have gradients, which FSDP2 is about to pass to this reduction."""
        self.reduced = self.unit.with_gradient()

    def watch(self) -> None:
        """Start to add up in `total` all elements of this rank's gradients, before they are summed over ranks.

        The sum over ranks spreads a NaN or Inf to all ranks. `total` shows on which rank a NaN or Inf arises.
        """
        self._watched, self.total = True, None

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the reduce-scatter of the unit's gradients; subclasses implement this method.

        Args:
            gradients: [W n] unreduced gradients of this rank, n elements for each of the W data ranks.
            result: [n] tensor for this rank's shard of the sum over ranks.
        Returns:
            A task that returns `result` when the sum is complete. None if `gradients` are only added to partial sums,
            which the call for a later micro-batch reduces.
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
        """Sum the gradients `input_tensor` over ranks into `output_tensor`; FSDP2 calls this as its reduce-scatter.

        With overlap, the sum is complete only at the end of the backward. If FSDP2 makes `.grad` a view of
        `output_tensor`, the reduction fills that tensor until then. If FSDP2 would add the output to an existing
        `.grad`, the output is zeros, and the sum is added to `.grad` at the end of the backward.
        """
        assert op == dist.ReduceOp.SUM, f"collectives of gradients support only SUM, but FSDP2 asked for {op}"
        # ---- add up the elements of this rank's gradients, if `watch` was called
        if self._watched:
            total = input_tensor.sum()  # one pass in the gradients' dtype; a maximum takes 16 times as long on the CPU
            self.total = total if self.total is None else self.total + total
        self.reduce(input_tensor, output_tensor)

    def reduce(self, gradients: torch.Tensor, output: torch.Tensor) -> None:
        """Sum `gradients` over W ranks into `output`, or start to do so if reductions overlap; see `__call__`.

        Args:
            output: [n] this rank's shard of the sum, n elements.
            gradients: [W n] unreduced gradients of this rank.
        """
        # ---- start the reduction. If it may still run when FSDP2 reads `output`, FSDP2 finds zeros there, and the
        # result is a separate tensor
        overlap, result = self._schedule.overlap, output
        fills = overlap and self.fills(output)
        late = overlap and not fills
        if late:
            result = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        work = self.start(gradients, result)
        self._waits = work is None
        if work is None or late:
            output.zero_()
        # ---- wait for the reduction now, or with overlap at the end of the backward. If `work` is None, the gradients
        # were only added to partial sums, which the last micro-batch of the step reduces
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
        """Return True if FSDP2 makes `.grad` a view of `output`, which may then be filled until the backward ends.

        Otherwise FSDP2 reads `output` at once: it casts gradients that are not fp32, and adds to an existing `.grad`.
        """
        return output.dtype == torch.float32 and not self.unit.has_gradients(self.reduced)

    def _filled(self) -> None:
        """Drop the finished task that has filled `.grad`, because its reference keeps gradients in memory."""
        self._filling = Work(None)

    def _finish_later(self, work: Work[torch.Tensor], result: torch.Tensor) -> None:
        """Wait for a running reduction at the end of the backward, and add its result to the unit's gradients.

        Args:
            work: task that completes `result`.
            result: [n] this rank's shard of the gradients, summed over ranks; n: its number of elements.
        """
        self._schedule.finish_later(work, functools.partial(self.unit.add_to_gradients, result, self.reduced))


class CountedReduce(SummingReduce):
    """The reduce-scatter of a unit's gradients in one hop over the shard axis, like FSDP2's own.

    The bytes that it sends are counted.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        super().__init__(unit, context)
        self.axis, self._queue = context.shard, context.shard_queue

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        """Start the reduce-scatter of the unit's gradients in the communication queue of the shard axis.

        See `SummingReduce.start` for arguments and result.
        """
        work = self._queue.submit(lambda: self.axis.reduce_scatter(gradients, out=result, of=self.unit.name))
        self._schedule.sent(work)
        return work
