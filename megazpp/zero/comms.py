"""Axes, queues and formats that the collectives of all sharding units share, and the schedules of ZeRO++'s hops.

Cross-node hops, which are slow, run once per optimizer step. Intra-node hops run in every use of a unit's weights and
in every micro-batch of gradients:

    weights    first use after a change:   the unit's own hops, then other units' cross-node hops in the order of use,
                                           during the forward (for weight deltas also without overlap, and for
                                           units that this forward does not use)
               every use:                  the unit's intra-node hop, then a prefetch of the next unit's intra-node hop
    gradients  every micro-batch:          the unit's intra-node hop
               last micro-batch:           the unit's cross-node hop after its intra-node hop, during the rest of the
                                           backward
               end of that backward:       `.grad` is complete when backward() returns; see `SummingReduce`

Hops run in communication queues (parallel/comm_queue.py), one per axis: cross-node hops on the axis `cross`, intra-node
hops on `local`. So the collectives of each process group have the same order on every rank. A use of a unit is a call
of its all-gather by FSDP2, before the unit's forward or backward.

Overlap keeps at most the following tensors alive: the gradients of `UNITS_IN_FLIGHT` units before their intra-node
hop, the partial sums of every unit before its cross-node hop, and the received weights of one unit. Results are
bit-identical with and without overlap.

On CUDA, memory that one stream allocates and another stream uses must not be reused too early. The table names the
streams and gives the reason why each buffer is safe. "gather" and "reduce" are FSDP2's streams for its collectives,
"cross" and "local" the streams of the communication queues, and "compute" is the stream of the model's layers:

| buffer                     | allocated on | also used on   | safe because                                            |
|----------------------------|--------------|----------------|---------------------------------------------------------|
| shard, gathered parameters | FSDP2's      | cross, local   | FSDP2's gather stream waits for both hops               |
| secondary partition        | gather       | cross, local   | hpZ keeps it; without hpZ, the row above applies        |
| resident weights           | gather       | cross, local   | `TwoHopGather` keeps them; a cross hop waits for the    |
|                            |              |                | stream that submits it, after the last local hop        |
| ... copied for a checkpoint| compute      |                | the compute stream copies them after the cross hop      |
| ... read from a checkpoint | compute      | cross          | the host waits for the cross hop before freeing them    |
| checksum of a sent shard   | cross        |                | used on one stream only                                 |
| shard that is read early   | cross        |                | used on one stream, which waits for the weights' writes |
| sent and received messages | the queue    |                | the queue that receives them also unpacks them          |
| gradients of a unit        | compute      | local          | the reduce stream waits for the local hop, and FSDP2    |
|                            |              |                | frees them only after waiting for the reduce stream     |
| partial sums               | local        | cross, reduce  | `record_stream` for the streams that join their tasks   |
| sum added to `.grad` at    | reduce       | cross, compute | `record_stream` for the streams that join its task      |
| the end of the backward    |              |                |                                                         |
| `.grad`                    | reduce       | cross, compute | `record_stream` for the streams that join the task that |
|                            |              |                | fills it                                                |
| error feedback             | any          | cross          | never freed                                             |

Only this file imports FSDP2's interface for custom collectives, which is in a private module of torch 2.11 to 2.15.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch.autograd import Variable

from megazpp.kernels.formats import BlockFormat, MessageLayout
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue, Moment, Work
from megazpp.zero.config import CommPlan, Dtypes, PrecisionConfig, ZeroConfig
from megazpp.zero.wire import Codec, LosslessCodec, Segment, plan_message

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin as DefaultAllocMixin
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"torch {torch.__version__} has no FSDP2 interface for custom collectives where MegaZ++ expects it: use torch "
        "2.11 to 2.15"
    ) from error

UNITS_IN_FLIGHT = 2  # largest number of units whose gradients wait for their intra-node hop at the same time (CPU)
CROSS_HOPS_PER_USE = 2  # largest number of other units' cross-node hops that one use of a unit starts on CUDA


class CommContext:
    """The axes, communication queues, schedules and formats that the collectives of all sharding units share.

    `--plan` creates a `CommContext` on simulated axes, to compute the traffic without a cluster.

    Args:
        cross: axis across nodes, for the slow hop.
        local: axis inside a node, for the fast hop.
        shard: axis of all data ranks, for collectives in one hop.
        plan: collectives that replace FSDP2's, with their message formats.
        zero: flags of ZeRO and ZeRO++.
        precision: compute and reduction dtypes. Weights and gradients that are not quantized are sent in these dtypes.
            Partial sums in the cross-node hop are an exception: they are sent as they are stored, in fp32 or bf16.
        codec: function that creates a unit's codec from its messages' layout and the dtype of unquantized elements.
        lossless_codec: function that creates a unit's codec of lossless deltas from the size of the unit's flat shard.
    Attributes:
        overlap_gather: True if gathers of weights overlap with the compute.
        overlap_reduce: True if reductions of gradients overlap with the compute.
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
        # On CUDA, FSDP2 itself overlaps collectives in one hop with the compute, so these collectives need no schedule.
        overlaps = two_hops or blocks_host
        self.overlap_gather, self.overlap_reduce = plan.overlap_gather and overlaps, plan.overlap_reduce and overlaps
        self._use_axes(cross, local, shard)
        self.gather_schedule = GatherSchedule(overlap=self.overlap_gather, queue=self.cross_queue)
        self.reduce_schedule = ReduceSchedule(overlap=self.overlap_reduce, blocks_host=blocks_host)

    def over(self, cross: MeshAxis, local: MeshAxis, shard: MeshAxis) -> Self:
        """Return a copy of this context for units that are sharded along other axes, such as experts' units.

        The copy shares the schedules of this context, so that the hops of all units keep one order on every rank.
        The arguments are the axes of these units, as for the constructor.
        """
        other = copy.copy(self)
        other._use_axes(cross, local, shard)
        return other

    def _use_axes(self, *axes: MeshAxis) -> None:
        """Set the axes `cross`, `local` and `shard` of this context, and the communication queue of each axis.

        If neither gathers nor reductions overlap with the compute, each queue is a plain `CommQueue`, which runs a
        collective at once in the thread that submits it.
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


class Startable(Protocol):
    """The methods of a unit's all-gather that start its hops before FSDP2 uses the unit; see `TwoHopGather`."""

    def start_early(self, since: Moment) -> bool: ...

    def prefetch(self) -> None: ...


class GatherSchedule:
    """The schedule that starts all-gathers of weights before FSDP2 asks for them, in the order of earlier uses.

    Only units that keep a secondary partition take part.

    On CUDA the host launches each hop, and the compute must not wait until all units' hops are launched. So a use of a
    unit starts at most `CROSS_HOPS_PER_USE` other units' cross-node hops after its own. Such a hop waits only for the
    compute that was launched before the first use after the weights changed, not for later compute. On the CPU all
    cross-node hops start at once. The schedule does not depend on timing, so it is the same on every rank.

    Args:
        overlap: True if cross-node hops start before FSDP2 asks for the weights.
        queue: communication queue of the cross-node hops.
    """

    def __init__(self, *, overlap: bool, queue: CommQueue) -> None:
        self.overlap, self._queue = overlap, queue
        # Intra-node hops are prefetched only on the CPU. On CUDA this is not necessary: the host runs ahead of the GPU,
        # so it launches the hop of a use before the GPU needs the result.
        self._prefetch = overlap and queue.blocks_host
        self._order: list[Startable] = []  # all-gathers of used units, in the order of the first uses
        self._all: list[Startable] = []  # all-gathers of all units, used or not
        # All-gathers whose cross-node hop must still start, because the weights of their units may have changed since
        # the last cross-node hop
        self._stale: deque[Startable] = deque()
        # CUDA event that `used` records at the first use of a unit after the weights changed. The cross-node hops of
        # `_stale` wait for this event, not for later compute. None on the CPU and before the first such use.
        self._since: Moment = None

    def add(self, gather: Startable) -> None:
        """Register the all-gather of a unit before its first use, so that the schedule can start its hops."""
        self._all.append(gather)

    def used(self, gather: Startable, *, crossed: bool) -> None:
        """Start hops of the units that FSDP2 will use next; `TwoHopGather` calls this method at each use of a unit.

        Args:
            gather: all-gather of the used unit, whose own hops are already submitted.
            crossed: True if this use has sent the unit's weights between nodes. Then the weights of all other units may
                have changed too, so this call and later ones start their cross-node hops.
        """
        if crossed:
            self._stale = deque(other for other in dict.fromkeys([*self._order, *self._all]) if other is not gather)
            self._since = self._queue.record_event()
        self.start_stale(None if self._queue.blocks_host else CROSS_HOPS_PER_USE)
        if gather not in self._order:
            self._order.append(gather)
        if self._prefetch and not in_backward():  # in a backward, FSDP2 itself starts the next unit's gather early
            following = self._order[self._order.index(gather) + 1 :]
            if following:
                following[0].prefetch()

    def forget_stale(self) -> None:
        """Cancel the cross-node hops that have not started; call this method after an optimizer step.

        These hops would wait only for compute before the step, and could read weights that the step has not written
        yet. The next use of a unit that sends weights between nodes plans the hops of all other units again.
        """
        self._stale.clear()

    def start_stale(self, limit: int | None = None) -> None:
        """Start cross-node hops of units whose weights may have changed since their last cross-node hop.

        Args:
            limit: largest number of hops to start; None starts all.
        """
        started = 0
        while self._stale and (limit is None or started < limit):
            started += self._stale.popleft().start_early(self._since)


class ReduceSchedule:
    """The schedule that limits the reductions of gradients in flight, and completes them at the end of a backward.

    Args:
        overlap: True if reductions stay in flight until the end of the backward.
        blocks_host: True if waiting for a task blocks the host, as on the CPU. On CUDA a wait blocks only the current
            stream, which is FSDP2's reduce stream, so the schedule waits for each task at once. FSDP2 frees a unit's
            gradients only after the reduce stream has passed this wait, so not before the gradients have been sent.
    """

    def __init__(self, *, overlap: bool, blocks_host: bool) -> None:
        self.overlap, self._blocks_host = overlap, blocks_host
        self._sending: deque[Work[Any]] = deque()  # tasks that `sent` has registered and not waited for yet
        # For each reduction in flight: its task, and the function that `end_backward` calls after the task
        self._finishing: list[tuple[Work[Any], Callable[[], None]]] = []
        # During a backward for which `end_backward` is registered: the weak reference that `at_end_of_backward` has
        # returned. If calling it returns None, no such backward runs, and `finish_later` must register `end_backward`.
        self._running: Callable[[], object] = _nothing

    def sent(self, work: Work[Any]) -> None:
        """Register `work`, the task that sends a unit's gradients, and wait for tasks that were registered before.

        The wait limits the memory of gradients that are not sent yet. With overlap on the CPU, the latest
        `UNITS_IN_FLIGHT` tasks, `work` included, may stay unfinished. Without overlap or on CUDA, wait for all tasks.
        """
        self._sending.append(work)
        while len(self._sending) > (UNITS_IN_FLIGHT if self.overlap and self._blocks_host else 0):
            self._sending.popleft().wait()

    def finish_later(self, work: Work[Any], finish: Callable[[], None]) -> None:
        """Let the end of the running backward wait for `work`, the task of a reduction, and then call `finish`."""
        self._finishing.append((work, finish))
        if in_backward() and self._running() is None:  # not for `--plan`, which calls `end_backward` itself
            self._running = at_end_of_backward(self.end_backward)

    def end_backward(self) -> None:
        """Wait for the gradient reductions in flight, and complete the gradients of their sharding units.

        Autograd calls this method at the end of a backward. `--plan`, which runs no backward, calls it directly.
        """
        self._running = _nothing
        finishing, self._finishing = self._finishing, []
        for work, finish in finishing:
            work.wait()
            finish()
        self._sending.clear()  # drop the finished tasks, which would keep the partial sums of their units in memory


def in_backward() -> bool:
    """Return True if autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> Callable[[], object]:
    """Let autograd call `function` at the regular end of the running backward, and return a weak reference to the call.

    A call of the weak reference shows whether the backward still runs. It returns None as soon as the backward has
    ended, also if an exception has ended the backward. It does not return None while a nested backward runs, such as
    the backward of reentrant activation checkpointing.
    """
    callback = functools.partial(function)
    Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


def _nothing() -> None:
    """Return None, like a weak reference to an object that no longer exists."""
