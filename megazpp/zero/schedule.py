"""The schedules that decide when each hop runs: slow hops once per optimizer step, fast hops once per use.

    weights    first use after a change:   the unit's own hops, then other units' cross-node hops in the order of use,
                                           during the forward (for weight deltas also without overlap, and for
                                           units that are not used)
               every use:                  the unit's intra-node hop, followed by a prefetch of the next unit's
    gradients  every micro-batch:          the unit's intra-node hop
               last micro-batch:           the unit's cross-node hop after its intra-node hop, during the rest of the
                                           backward
               end of that backward:       `.grad` is complete when backward() returns; see `SummingReduce`

Hops run in communication queues (parallel/comm_queue.py), one per axis: cross-node hops on the axis `cross`, intra-node
hops on `local`. So the collectives of each process group have the same order on every rank.

At most the following is in flight: the gradients of `UNITS_IN_FLIGHT` units before their intra-node hop, the partial
sums [N, S] of every unit before its cross-node hop, and the received weights of one unit. Results do not depend on
overlap, bit for bit.

On CUDA, memory that one stream allocates and another one uses must not be reused too early:

| buffer                     | allocated on | also used on   | safe because                                            |
|----------------------------|--------------|----------------|---------------------------------------------------------|
| shard, gathered parameters | FSDP2's      | cross, local   | the gather stream waits for both hops, FSDP2 for it     |
| secondary partition        | gather       | cross, local   | the unit's gather keeps it; if not kept, as above       |
| resident weights           | gather       | cross, local   | the unit's gather keeps them; a cross hop waits for its |
|                            |              |                | caller, which has waited for the last local hop         |
| their copy for a checkpoint| compute      |                | made after the cross hop was waited for                 |
| their row from a checkpoint| compute      | cross          | waited for before it is freed                           |
| checksum of a sent shard   | cross        |                | used on one stream only                                 |
| shard that is read early   | cross        |                | one stream, which waits for the writes to the weights   |
| sent and received messages | the queue    |                | the queue that receives them also unpacks them          |
| gradients of a unit        | compute      | local          | the reduce stream waits for that hop, FSDP2 waits for it|
| partial sums               | local        | cross, reduce  | recorded on the streams that join their works           |
| a unit's late sum          | reduce       | cross, compute | recorded on the streams that join its work              |
| `.grad`                    | reduce       | cross, compute | recorded on the streams that join the work that fills it|
| error feedback             | any          | cross          | never freed                                             |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from megazpp.parallel.comm_queue import CommQueue, Moment, Work

UNITS_IN_FLIGHT = 2  # units whose gradients may wait for their intra-node hop at the same time
CROSS_HOPS_PER_USE = 2  # other units' cross-node hops that one use starts on CUDA


class Startable(Protocol):
    """The methods of a unit's gather that `GatherSchedule` calls; see `TwoHopGather`."""

    def start_early(self, since: Moment) -> bool: ...

    def prefetch(self) -> None: ...


class GatherSchedule:
    """Starts gathers before they are needed, in the order in which the units were used before.

    Only units that keep a secondary partition take part.

    On CUDA the host launches the hops itself, so each use starts at most `CROSS_HOPS_PER_USE` other units' cross-node
    hops after its own. The GPU then need not wait at the start of a step until the host has launched all of them. A
    cross-node hop waits only for the compute that was launched before the first use after the weights changed, not for
    later compute. On the CPU all cross-node hops start at once. The schedule does not depend on timing, so it is the
    same on every rank.

    Args:
        overlap: whether cross-node hops start before they are needed.
        queue: communication queue of the cross-node hops.
    """

    def __init__(self, *, overlap: bool, queue: CommQueue) -> None:
        self.overlap, self._queue = overlap, queue
        # Intra-node hops are prefetched on the CPU only: on CUDA the host runs ahead, which has the same effect.
        self._prefetch = overlap and queue.blocks_host
        self._order: list[Startable] = []  # in the order of first use
        self._all: list[Startable] = []
        self._stale: deque[Startable] = deque()  # units whose weights may have changed since their last cross-node hop
        self._since: Moment = None  # CUDA event of the first use after the weights changed, see `CommQueue.submit`

    def add(self, gather: Startable) -> None:
        """Register a unit's gather before its first use."""
        self._all.append(gather)

    def used(self, gather: Startable, *, crossed: bool) -> None:
        """Start the hops of other units that follow a use of `gather`.

        Args:
            gather: the gather of the used unit, whose own hops are already submitted.
            crossed: whether these included its cross-node hop, so that the weights of the other units may have changed
                too.
        """
        if crossed:
            self._stale = deque(other for other in dict.fromkeys([*self._order, *self._all]) if other is not gather)
            self._since = self._queue.record_event()
        self.start_stale(None if self._queue.blocks_host else CROSS_HOPS_PER_USE)
        if gather not in self._order:
            self._order.append(gather)
        if self._prefetch and not in_backward():  # in a backward FSDP2 itself prefetches the next unit
            following = self._order[self._order.index(gather) + 1 :]
            if following:
                following[0].prefetch()

    def forget_stale(self) -> None:
        """Clear the list of stale units; call it after an optimizer step."""
        self._stale.clear()

    def start_stale(self, limit: int | None = None) -> None:
        """Start the cross-node hops of units that are still stale, at most `limit` of them."""
        started = 0
        while self._stale and (limit is None or started < limit):
            started += self._stale.popleft().start_early(self._since)


class ReduceSchedule:
    """Limits the reductions in flight during a backward, and finishes them at its end.

    Args:
        overlap: whether reductions stay in flight until the end of the backward.
        blocks_host: whether waiting for a work blocks the host, as on the CPU. On CUDA only the current stream waits,
            so the schedule waits for each work at once. FSDP2 then keeps a unit's gradients until they have been sent.
    """

    def __init__(self, *, overlap: bool, blocks_host: bool) -> None:
        self.overlap, self._blocks_host = overlap, blocks_host
        self._sending: deque[Work[Any]] = deque()
        self._finishing: list[tuple[Work[Any], Callable[[], None]]] = []
        self._backward = -1

    def sent(self, work: Work[Any]) -> None:
        """Register `work`, which sends a unit's gradients, and wait until few enough units have unsent gradients."""
        self._sending.append(work)
        while len(self._sending) > (UNITS_IN_FLIGHT if self.overlap and self._blocks_host else 0):
            self._sending.popleft().wait()

    def finish_later(self, work: Work[Any], finish: Callable[[], None]) -> None:
        """Call `finish` at the end of the backward, after waiting for `work`."""
        self._finishing.append((work, finish))
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Finish the reductions in flight. Autograd calls this at the end of a backward; `--plan` calls it directly."""
        self._backward = -1
        finishing, self._finishing = self._finishing, []
        for work, finish in finishing:
            work.wait()
            finish()
        self._sending.clear()  # all are done; a work would keep its result in memory, the partial sums of a unit


def in_backward() -> bool:
    """Return True if autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1
