"""The schedules that decide which hop runs when: slow hops once per optimizer step, fast hops once per use.

    weights    first use after they changed:  its own hops, then the others' cross hops, in the order of use, under
                                              the forward (of differences also without overlap, used or not)
               every use:                     local hop, with the next unit's behind it
    gradients  every micro-batch:             local hop
               last micro-batch:              cross hop of a unit when its local hop is done, under the rest of backward
               end of that backward:          the sums are added to `.grad`, which is complete when backward() returns

The hops run in communication queues (parallel/comm_queue.py), one per axis, so the collectives of each group keep the
program's order on every rank. In flight at most: the gradients of `UNITS_IN_FLIGHT` units before their local hop, each
unit's partial sums [N, S] before its cross hop (accumulating over micro-batches would keep them anyway), one unit's
received weights. Without overlap the results are the same bits: only the time at which a hop runs differs.

On CUDA, memory that one stream allocates and another one uses must not be handed out again too early:

| buffer                     | of stream | also used on   | safe because                                            |
|----------------------------|-----------|----------------|---------------------------------------------------------|
| shard, gathered parameters | FSDP2's   | cross, local   | the gather stream waits for both hops, FSDP2 for it     |
| secondary partition        | gather    | cross, local   | the comm keeps it; if not kept: as above                |
| resident weights           | gather    | cross, local   | the comm keeps them; a cross hop waits for its caller,  |
|                            |           |                | which has waited for the last local hop                 |
| their copy for a checkpoint| compute   |                | made after the cross hop was waited for                 |
| their row out of one       | compute   | cross          | waited for before it is freed                           |
| checksum of what was sent  | cross     |                | one stream                                              |
| shard that is read early   | cross     |                | one stream; what wrote to it is waited for              |
| messages, sent or received | the queue |                | one stream: the queue that received them unpacks them   |
| gradients of a unit        | compute   | local          | the reduce stream waits for that hop, FSDP2 for it      |
| partial sums               | local     | cross, reduce  | recorded where their works are joined                   |
| a unit's late sum          | reduce    | cross, compute | the same                                                |
| `.grad`, which it joins    | reduce    | compute        | FSDP2's own callback, queued before ours, has waited    |
| error feedback             | any       | cross          | kept for ever                                           |
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from megazpp.parallel.comm_queue import CommQueue, Moment, Work

UNITS_IN_FLIGHT = 2
CROSS_HOPS_PER_USE = 2


class Finish(Protocol):
    """A function to call after a reduction; `aborted` if an exception ended its backward, and another one begins."""

    def __call__(self, *, aborted: bool) -> None: ...


class Startable(Protocol):
    """The part of a unit's gather that its schedule calls."""

    def start_early(self, since: Moment) -> bool: ...

    def prefetch(self) -> None: ...


class GatherSchedule:
    """Starts gathers ahead of use, in the order in which units that keep a secondary partition were used before.

    On CUDA the host launches what it submits, so every use starts only `CROSS_HOPS_PER_USE` other units' cross hops,
    after its own: the GPU does not wait at the beginning of a step until all are launched, and the queue never runs
    empty while a unit is stale. They wait for what the compute had been given at the first use after the weights
    changed, not for what it has been given since. On the CPU all start at once. Which use starts which hop does not
    depend on time, so it is the same on every rank.

    Args:
        overlap: whether cross hops start before they are asked for.
        queue: the cross hops' queue.
    """

    def __init__(self, *, overlap: bool, queue: CommQueue) -> None:
        self.overlap, self._queue = overlap, queue
        self._prefetch = overlap and queue.blocks_host  # of local hops; on CUDA the host's running ahead does it
        self._order: list[Startable] = []
        self._all: list[Startable] = []
        self._stale: deque[Startable] = deque()  # those whose cross hops may have to start
        self._since: Moment = None

    def add(self, gather: Startable) -> None:
        """Know of `gather` before its first use."""
        self._all.append(gather)

    def used(self, gather: Startable, *, crossed: bool) -> None:
        """Start what follows the use of `gather`, when its own hops (`crossed`: the cross hop too) are submitted."""
        if crossed:
            self._stale = deque(other for other in dict.fromkeys([*self._order, *self._all]) if other is not gather)
            self._since = self._queue.record_event()
        self.start_stale(None if self._queue.blocks_host else CROSS_HOPS_PER_USE)
        if gather not in self._order:
            self._order.append(gather)
        if self._prefetch and not in_backward():  # FSDP2 prefetches in backward itself
            following = self._order[self._order.index(gather) + 1 :]
            if following:
                following[0].prefetch()

    def forget_stale(self) -> None:
        """Clear the list of stale units; call after a step."""
        self._stale.clear()

    def start_stale(self, limit: int | None = None) -> None:
        """Start the cross hops of the units that are still stale, at most `limit` of them."""
        started = 0
        while self._stale and (limit is None or started < limit):
            started += self._stale.popleft().start_early(self._since)


class ReduceSchedule:
    """Bounds and finishes the reductions that are in flight during a backward.

    Args:
        overlap: whether a unit's reduction is finished only at the end of the backward.
        blocks_host: whether waiting blocks the host (CPU). Where it does not (CUDA), the caller's stream waits at
            once, so that FSDP2 keeps a unit's gradients until they have been sent.
    """

    def __init__(self, *, overlap: bool, blocks_host: bool) -> None:
        self.overlap, self._blocks_host = overlap, blocks_host
        self._sending: deque[Work[Any]] = deque()
        self._finishing: list[tuple[Work[Any] | None, Finish]] = []
        self._backward = -1

    def sent(self, work: Work[Any]) -> None:
        """Wait until few enough units have gradients to send; `work` sends those of the latest unit."""
        self._sending.append(work)
        while len(self._sending) > (UNITS_IN_FLIGHT if self.overlap and self._blocks_host else 0):
            self._sending.popleft().wait()

    def finish_later(self, work: Work[Any] | None, finish: Finish) -> None:
        """Call `finish` at the end of the backward, after `work`."""
        self._finishing.append((work, finish))
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Finish the reductions in flight. Autograd calls this; `--plan`, which has no autograd, does too."""
        self._backward = -1
        self._finish(aborted=False)
        self._sending.clear()  # all sent, and a work holds its result: a unit's partial sums

    def finish_aborted(self) -> None:
        """Finish what a backward has left that an exception ended, for autograd did not call `end_backward` then."""
        if self._finishing and self._backward != torch._C._current_graph_task_id():
            self._finish(aborted=True)

    def _finish(self, *, aborted: bool) -> None:
        finishing, self._finishing = self._finishing, []
        for work, finish in finishing:
            if work is not None:
                work.wait()
            finish(aborted=aborted)


def in_backward() -> bool:
    """True if autograd is running in this thread."""
    return torch._C._current_graph_task_id() != -1
