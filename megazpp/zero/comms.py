"""FSDP2's comm interface, and its own collectives over our axes, which count the bytes that are sent.

Only this file names the interface, which lives in a private module in torch 2.11 to 2.13.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

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
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"torch {torch.__version__} has moved FSDP2's comm interface; MegaZ++ knows torch 2.11 to 2.13"
    ) from error


class CommContext:
    """The axes, queues, schedules and formats that the comms of all units share.

    `--plan` makes its comms with one too, on axes that exist on paper.

    Args:
        zero, precision: switches, and the dtypes of what is not quantized.
        restores_none: whether a parameter that got a gradient on no rank has None, as in FSDP2, and not zeros; and
            whether gradients that wait are dropped when the program zeroes them.
        codec, lossless_codec: make the codecs that pack a unit's messages, and what has changed of its weights.
    Attributes:
        overlap_gather, overlap_reduce: whether collectives run beside the compute.
        cross_queue, local_queue, shard_queue: communication queues of the axes.
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
        restores_none: bool = False,
        codec: Callable[[MessageLayout, torch.dtype], Codec] = Codec,
        lossless_codec: Callable[[int], LosslessCodec] = LosslessCodec,
    ) -> None:
        self.cross, self.local, self.shard, self._codec = cross, local, shard, codec
        self.plan, self.zero, self.precision, self.lossless_codec = plan, zero, precision, lossless_codec
        self.restores_none = restores_none
        two_hops, blocks_host = bool(plan.gather or plan.reduce), shard.queue.blocks_host
        overlaps = two_hops or blocks_host  # FSDP2's own collectives run beside the compute on CUDA as they are
        self.overlap_gather, self.overlap_reduce = plan.overlap_gather and overlaps, plan.overlap_reduce and overlaps
        beside = self.overlap_gather or self.overlap_reduce
        self.cross_queue, self.local_queue, self.shard_queue = (
            axis.queue if beside else CommQueue() for axis in (cross, local, shard)
        )
        self.gather_schedule = GatherSchedule(overlap=self.overlap_gather, queue=self.cross_queue)
        self.reduce_schedule = ReduceSchedule(overlap=self.overlap_reduce, blocks_host=blocks_host)

    def over(self, cross: MeshAxis, local: MeshAxis, shard: MeshAxis) -> CommContext:
        """Return the context of units that are sharded along other axes; all units keep one order of hops."""
        other = copy.copy(self)
        other.cross, other.local, other.shard = cross, local, shard
        beside = self.overlap_gather or self.overlap_reduce
        other.cross_queue, other.local_queue, other.shard_queue = (
            axis.queue if beside else CommQueue() for axis in (cross, local, shard)
        )
        return other

    def codec(self, segments: Sequence[Segment], fmt: BlockFormat | None, dtype: torch.dtype) -> Codec:
        """Make the codec of shards of these segments; what is not quantized in `fmt` has `dtype`."""
        return self._codec(plan_message(segments, fmt, exact_itemsize=dtype.itemsize), dtype)


class FreshBuffers:
    """A new buffer whenever FSDP2 asks its comms for one; the allocator knows how long it lives."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Pending(dist.Work):
    """The handle that FSDP2 waits for before it uses gathered parameters; it accepts only torch's own class."""

    def __init__(self, work: Work[None]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        return True


class CountedGather(FreshBuffers, AllGather):
    """[n] shard -> [W n] parameters over the shard axis, as FSDP2's own gather does."""

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.axis, self._queue, self._of = context.shard, context.shard_queue, unit.name
        self._overlap, self.num_uses = context.overlap_gather, 0

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        assert group is self.axis.group, f"FSDP2 gathers over another group than {self.axis.name}"
        self.num_uses += 1
        done = self._queue.submit(lambda: self._gather(input_tensor, output_tensor))
        if self._overlap and self._queue.blocks_host:
            return Pending(done)
        done.wait()  # on CUDA the gather stream waits, on which FSDP2 goes on; for a Work the compute would
        return None

    def _gather(self, shard: torch.Tensor, out: torch.Tensor) -> None:
        self.axis.all_gather(shard, out=out, of=self._of)


class LateSum:
    """A sum over ranks that FSDP2 does not get in its reduce-scatter, because it comes later.

    Args:
        indices: the parameters in whose `.grad` it ends up.
        result: [n] the sum, when its work is done; `divisor` is what FSDP2 divides sums by.
    Attributes:
        gradients: their `.grad` when FSDP2 has set it: what is another object later was discarded.
        versions: how often autograd had seen these change.
    """

    def __init__(self, indices: Sequence[int], result: torch.Tensor, divisor: float) -> None:
        self.indices, self.result, self.divisor = tuple(indices), result, divisor
        self.gradients: list[Any] = [None] * len(self.indices)
        self.versions = [-1] * len(self.indices)

    def hold(self, unit: Unit) -> None:
        """Remember the gradients that FSDP2 has set."""
        self.gradients = [unit.gradient(index) for index in self.indices]
        self.versions = [-1 if gradient is None else gradient._version for gradient in self.gradients]

    def add(self, unit: Unit, *, aborted: bool) -> None:
        """Add the sum to the gradients that are still there.

        After an `aborted` backward the program may have cleared a gradient in place, which counts as a change.
        """
        result = self.result if self.divisor == 1.0 else self.result.div_(self.divisor)
        wanted = list(self.gradients)
        for i, (index, gradient) in enumerate(zip(self.indices, self.gradients, strict=True)):
            changed = aborted and gradient is not None and gradient._version != self.versions[i]
            if changed or unit.gradient(index) is not gradient:
                wanted[i] = None
        unit.add_to_gradients(result, self.indices, wanted)


class SummingReduce(FreshBuffers, ReduceScatter):
    """The base of reduce-scatters: [W n] gradients of a unit -> this rank's [n] of their sum over ranks.

    FSDP2 passes the gradients that a backward has computed and does not say of which parameters they are. So
    `post_backward` stands in the place of FSDP2's function of that name, and looks before and after.

    Attributes:
        reduced: indices of the parameters whose gradients FSDP2 passes.
        total: sum of this rank's own gradients since `watch`, a scalar; None if there were none.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.unit, self._schedule = unit, context.reduce_schedule
        self.reduced = tuple(range(len(unit.parameters)))
        self._late: LateSum | None = None  # the one that `__call__` has begun
        self._fsdp2_post_backward: Callable[..., None] = lambda *_: None
        self._late_sums = 0  # that have not been added yet
        self._watched = False
        self.total: torch.Tensor | None = None

    def attach(self) -> None:
        """Look at every reduction of the unit before and after FSDP2 does it."""

        def wrap(original: Callable[..., None]) -> Callable[..., None]:
            self._fsdp2_post_backward = original
            return self.post_backward

        self.unit.wrap_post_backward(wrap)

    def post_backward(self, *given: Any) -> None:
        """Have FSDP2 reduce the unit's gradients; called instead of its own function."""
        if not self.unit.reduces_gradients:
            self._fsdp2_post_backward(*given)
            return
        self._schedule.finish_aborted()
        self.unit.force_sums()
        self.begin()
        self._fsdp2_post_backward(*given)
        self.end()

    def begin(self) -> None:
        """Look at what FSDP2 is about to reduce."""
        self.reduced = tuple(sorted(self.unit.with_gradient()))

    def end(self) -> None:
        """Look at the gradients that FSDP2 has set."""
        if self._late is not None:
            self._late.hold(self.unit)
            self._late = None

    def watch(self) -> None:
        """Add up this rank's own gradients from now on, before the sum over ranks spreads a NaN or Inf."""
        self._watched, self.total = True, None

    @property
    def result_indices(self) -> tuple[int, ...]:
        """Indices of the parameters that the next result has gradients of."""
        return self.reduced

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start to reduce `gradients` [W n]; the work returns `result` when that is complete.

        None in a micro-batch without a result: a later call's result contains these gradients too.
        """
        raise NotImplementedError

    def finished(self) -> None:
        """Do what follows when a sum has been added to the gradients."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"communication only sums, FSDP2 asked for {op}"
        if self._watched:
            total = input_tensor.sum()  # in its dtype: one pass; a maximum takes 16 times as long on the CPU
            self.total = total if self.total is None else self.total + total
        indices = self.result_indices
        late = self._schedule.overlap or indices != self.reduced
        if late:
            self.unit.refuse_gradient_hooks()
            size = output_tensor.numel() if indices == self.reduced else self.unit.segments_of(indices)[-1].stop
        result = output_tensor.new_empty(size) if late else output_tensor
        divisor = division_after_sum(self.unit, group, result) if late else 1.0
        work = self.start(input_tensor, result)
        if work is not None and not late:
            work.wait()
            return
        output_tensor.zero_()  # FSDP2 adds it to the gradient; the rest is in partial sums or comes at the end
        if work is None:
            self.unit.refuse_gradient_hooks()
        else:
            self._finish_later(work, LateSum(indices, result, divisor))

    def _finish_later(self, work: Work[torch.Tensor], late: LateSum) -> None:
        """Add a sum to the gradients at the end of the backward; FSDP2 has divided its output before."""
        self._late = late
        self._late_sums += 1

        def finish(*, aborted: bool) -> None:
            self._late_sums -= 1
            late.add(self.unit, aborted=aborted)
            self.finished()

        self._schedule.finish_later(work, finish)


class CountedReduce(SummingReduce):
    """The reduce-scatter over the shard axis, as FSDP2's own does."""

    def __init__(self, unit: Unit, context: CommContext) -> None:
        super().__init__(unit, context)
        self.axis, self._queue = context.shard, context.shard_queue

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        work = self._queue.submit(lambda: self.axis.reduce_scatter(gradients, out=result, of=self.unit.name))
        self._schedule.sent(work)
        return work


def division_after_sum(unit: Unit, group: dist.ProcessGroup, reduced: torch.Tensor) -> float:
    """The number by which FSDP2 divides the sum over the ranks of `group`."""
    factor, device = unit.gradient_divide_factor, reduced.device.type
    if factor == 1.0:
        return factor
    _, after, *_ = _get_gradient_divide_factors(group, None, reduced.dtype, device, factor, True)
    return 1.0 if after is None else after
