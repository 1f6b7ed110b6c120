"""Which hop runs when: slow hops per optimizer step, fast hops per use.

    weights    first use after they changed:  cross hops of all units start, in the order of use, under the forward
               every use:                     local hop, with the next unit's behind it
    gradients  every micro-batch:             local hop
               last micro-batch:              cross hop of a unit when its local hop is done, under the rest of backward
               end of that backward:          the sums are added to `.grad`: who calls backward() finds them complete

The hops run in communication queues (parallel/comm_queue.py), one per axis, so the collectives of each group keep the
program's order on every rank. In flight at most: the gradients of `UNITS_IN_FLIGHT` units before their local hop, each
unit's partial sums [N, S] before its cross hop (accumulating over micro-batches would keep them anyway), one unit's
received weights. Without overlap the results are the same bits: only the time at which a hop runs differs.

On CUDA, memory that one stream allocates and another one uses must not be handed out again too early:

| buffer                     | of stream | also used on   | safe because                                            |
|----------------------------|-----------|----------------|---------------------------------------------------------|
| shard, gathered parameters | FSDP2's   | cross, local   | the gather stream waits for both hops, FSDP2 for it     |
| secondary partition        | gather    | cross, local   | the comm keeps it; if not kept: as above                |
| shard that is read early   | cross     |                | one stream                                              |
| messages, sent or received | the queue |                | one stream: the queue that received them unpacks them   |
| gradients of a unit        | compute   | local          | the reduce stream waits for that hop, FSDP2 for it      |
| partial sums               | local     | cross, reduce  | recorded where their works are joined                   |
| a unit's late sum          | reduce    | cross, compute | the same                                                |
| `.grad`, which it joins    | reduce    | compute        | FSDP2's own callback, queued before ours, has waited    |
| error feedback             | any       | cross          | kept for ever                                           |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Variable

from megazpp.parallel.comm_queue import CommQueue, Work

UNITS_IN_FLIGHT = 2


class CommQueues(NamedTuple):
    """Where the hops run."""

    cross: CommQueue
    local: CommQueue
    shard: CommQueue


class Startable(Protocol):
    """A unit's gather, as its schedule sees it."""

    used: bool  # since its cross hop last started

    def start_early(self) -> None:
        """Start the cross hop if the weights have changed and the modules hold the shards."""

    def prefetch(self) -> None:
        """Start the local hop of the next use."""


class GatherSchedule:
    """The order of use of the units that keep a secondary partition, learned from the uses themselves.

    Args:
        overlap: start hops before they are asked for.
        prefetch: local hops too (on CUDA the host runs ahead, which does the same).
    """

    def __init__(self, *, overlap: bool, prefetch: bool) -> None:
        self.overlap = overlap
        self._prefetch = overlap and prefetch
        self._order: list[Startable] = []

    def stale(self, gather: Startable) -> None:
        """`gather` has just started its cross hop because it was asked for: start those that will be asked for."""
        if gather not in self._order:
            self._order.append(gather)
        if self.overlap:
            for other in self._order:
                if other.used and other is not gather:
                    other.start_early()

    def prefetch_after(self, gather: Startable) -> None:
        """`gather`'s local hop has been submitted: submit the next one's too, in a forward."""
        if self._prefetch and not in_backward():  # FSDP2 prefetches in backward itself
            following = self._order[self._order.index(gather) + 1 :]
            if following:
                following[0].prefetch()


class ReduceSchedule:
    """What is in flight during a backward.

    Args:
        overlap: finish a unit's reduction only at the end of the backward.
        blocks_host: waiting blocks the host (CPU); where it does not, the caller's stream waits at once instead, so
            that FSDP2 keeps a unit's gradients until they have been sent.
    """

    def __init__(self, *, overlap: bool, blocks_host: bool) -> None:
        self.overlap, self._blocks_host = overlap, blocks_host
        self._sending: deque[Work[Any]] = deque()
        self._finishing: list[tuple[Work[Any], Callable[[], None]]] = []
        self._backward = -1

    def sent(self, work: Work[Any]) -> None:
        """Bound the gradients that wait to be sent; `work` is the latest."""
        self._sending.append(work)
        while len(self._sending) > (UNITS_IN_FLIGHT if self.overlap and self._blocks_host else 0):
            self._sending.popleft().wait()

    def finish_later(self, work: Work[Any], finish: Callable[[], None]) -> None:
        """Call `finish` at the end of the backward, when `work` is done."""
        self._finishing.append((work, finish))
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Finish what is due; autograd calls it, and who runs without autograd (the planner) calls it himself."""
        self._backward = -1
        finishing, self._finishing = self._finishing, []
        for work, finish in finishing:
            work.wait()
            finish()
        self._sending.clear()  # all sent, and a work holds its result: a unit's partial sums


def in_backward() -> bool:
    """Whether autograd is running in this thread."""
    return torch._C._current_graph_task_id() != -1
