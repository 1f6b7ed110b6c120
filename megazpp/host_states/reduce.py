"""Reductions whose sums go to host memory (--optimizer-cpu-offload); see memory.py.

The task that computes a sum also moves it to host memory and frees it on the device, so that the sums of units do not
pile up there. With --zero-offload-partial-sums the sums that wait for the hop across nodes are moved too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.distributed as dist

from megazpp.host_states.memory import HostedUnit, SumSlot
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import CommContext, CountedReduce, SummingReduce
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.wire import Codec


class HostedReduce(SummingReduce):
    """The base class of reductions whose sums go to host memory.

    FSDP2 gets the host's buffer as its output, because it would copy another output to the host, and it leaves no
    `.grad`. In each step all trained parameters of a unit must have gradients, or none.
    """

    unit: HostedUnit

    def begin(self) -> None:
        """Record the parameters of this reduction."""
        super().begin()
        missing = [self.unit.parameters[index].name for index in self.unit.trained if index not in self.reduced]
        assert not self.reduced or not missing, f"--optimizer-cpu-offload: no gradients of {', '.join(missing)}"
        self._allocates_input = True

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return FSDP2's input on the device, and at the next call its output, which is the host's buffer."""
        if self._allocates_input:
            self._allocates_input = False
            return super().allocate(size, dtype=dtype, device=device)
        return self.unit.states.gradients[: math.prod(size)]

    def reduce(self, gradients: torch.Tensor, output: torch.Tensor) -> None:
        """Start the reduction, which also moves its result to host memory."""
        work = self.start(gradients, output)
        self._waits = True  # `.grad` is cleared, because FSDP2 would add the buffer to itself next time
        if work is not None:
            self._schedule.finish_later(work, functools.partial(self.unit.states.finish, work))


class HostedRingReduce(HostedReduce, CountedReduce):
    """A reduce-scatter in one hop whose sums go to host memory."""

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        """Start the reduce-scatter; see `SummingReduce.start`. The task frees the sum on the device."""
        last = self._last_micro_batch

        def reduce() -> torch.Tensor:
            return self.unit.states.take(self.axis.reduce_scatter(gradients, of=self.unit.name), last=last)

        work = self._queue.submit(reduce)
        self._schedule.sent(work)
        return work


class HostedSum(HostedReduce):
    """The gradients of a unit on one rank, which go to host memory.

    FSDP2 would copy them there itself, and make the host wait for each copy.
    """

    def __init__(self, unit: HostedUnit, context: CommContext) -> None:
        super().__init__(unit, context)
        # on CUDA the copies run beside the compute, whose streams wait in `ReduceSchedule.sent`
        self._queue = context.shard_queue if context.shard.queue.blocks_host else context.shard.queue

    def post_backward(self, *given: Any) -> None:
        """Let FSDP2 only convert and accumulate the unit's gradients, and move them to host memory."""
        with self.unit.without_reduction():
            self._fsdp2_post_backward(*given)
        self.begin()
        if self.reduced:
            gradients = torch.cat([gradient.reshape(-1) for gradient in self.unit.pop_gradients(self.reduced)])
            self(gradients, gradients, None, dist.ReduceOp.SUM)  # type: ignore[arg-type]

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        """Start the move to host memory; see `SummingReduce.start`."""
        take = functools.partial(self.unit.states.take, gradients, last=self._last_micro_batch)
        work = self._queue.submit(take)
        self._schedule.sent(work)
        return work


class HostedTwoHopReduce(HostedReduce, TwoHopReduce):
    """A reduce-scatter in two hops whose sums go to host memory, and with the flag also its partial sums."""

    def __init__(self, unit: HostedUnit, context: CommContext) -> None:
        super().__init__(unit, context)
        self._slot: SumSlot | None = None
        self._sums_wait = False  # whether partial sums of earlier micro-batches are in host memory

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the hops; see `SummingReduce.start`. A slot bounds the partial sums that wait on a slow network."""
        slot = None
        if self.unit.states.memory.num_sums:
            slot = self.unit.states.memory.take_sum_slot()
            self._slot = dataclasses.replace(slot)  # the task waits for the use of the slot before this one
        work = super().start(gradients, result)
        if work is not None and slot is not None:
            slot.used_by = work
        return work

    def _hop_inside(self, gradients: torch.Tensor, codec: Codec, *, keep: bool) -> torch.Tensor:
        """Run the intra-node hop with partial sums from host memory, and move them back if `keep`."""
        if self._slot is None:
            return super()._hop_inside(gradients, codec, keep=keep)
        memory, count = self.unit.states.memory, self._cross.size * codec.layout.size
        waiting = self.unit.states.partial_sums[:count].view(self._cross.size, -1)
        if self._sums_wait:
            self._slot.used_by.join()
            self._partial_sums = memory.upload(waiting, self._slot.buffer[:count].view_as(waiting))
        sums = super()._hop_inside(gradients, codec, keep=keep)
        self._sums_wait, self._partial_sums = keep, None
        if keep:
            memory.download(sums, waiting)
        return sums.new_empty(0) if keep else sums

    def _hop_across(self, inside: Work[torch.Tensor], codec: Codec, result: torch.Tensor) -> torch.Tensor:
        """Run the cross-node hop and move the sum to host memory; the task frees the sum on the device."""
        total = torch.empty(codec.layout.size, dtype=self._dtype, device=inside.join().device)
        return self.unit.states.take(super()._hop_across(inside, codec, total), last=self._last_micro_batch)
