"""Reduce-scatters whose reduced gradients go to host memory (--optimizer-cpu-offload); see memory.py.

The task that reduces a unit's gradients also moves the result to host memory, and frees the result on the device. So
the device never holds the reduced gradients of many units. With --zero-offload-partial-sums, the partial sums that
wait for the hop across nodes are also moved to host memory.
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
from megazpp.zero.comms import CommContext
from megazpp.zero.reduce import CountedReduce, SummingReduce, TwoHopReduce
from megazpp.zero.wire import Codec


class HostedReduce(SummingReduce):
    """The base class of reduce-scatters whose reduced gradients go to host memory (--optimizer-cpu-offload).

    FSDP2 gets the host buffer of the unit's gradients as its output tensor. With an output tensor on the device, FSDP2
    would itself copy the gradients to the host. `post_backward` clears the `.grad` that FSDP2 then sets. In each
    reduction, either all trained parameters of a unit must have gradients, or none.
    """

    unit: HostedUnit

    def begin(self) -> None:
        """Record the parameters of this reduction, and check that all or none of the trained ones have a gradient."""
        super().begin()
        missing = [self.unit.parameters[index].name for index in self.unit.trained if index not in self.reduced]
        assert not self.reduced or not missing, (
            f"--optimizer-cpu-offload requires gradients of all trained parameters of a unit, but {', '.join(missing)} "
            "have none: freeze these parameters (requires_grad False), or leave the flag out"
        )
        self._allocates_input = True  # the next call of `allocate` is the first one in this reduction

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor [size] for FSDP2, which calls this method twice in each reduction.

        The first call returns a new tensor on the device, for the unreduced gradients. The second call returns a view
        of the host buffer of the unit's gradients, for the reduced gradients.
        """
        if self._allocates_input:
            self._allocates_input = False
            return super().allocate(size, dtype=dtype, device=device)
        return self.unit.states.gradients[: math.prod(size)]

    def reduce(self, gradients: torch.Tensor, output: torch.Tensor) -> None:
        """Start the reduction of `gradients` [W * n], n elements for each of W ranks, and the move to host memory.

        `output` [n] gets this rank's sum.
        """
        work = self.start(gradients, output)
        # Make `post_backward` clear `.grad`, which FSDP2 sets to a view of the host buffer. Otherwise FSDP2 would add
        # the buffer to itself in the next micro-batch.
        self._waits = True
        if work is not None:
            self._schedule.finish_later(work, functools.partial(self.unit.states.finish, work))


class HostedRingReduce(HostedReduce, CountedReduce):
    """The reduce-scatter of a unit's gradients in one hop, whose result goes to host memory."""

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        """Start a task that reduce-scatters the gradients and moves the result to host memory.

        See `SummingReduce.start` for the arguments.
        """
        last = self._last_micro_batch

        def reduce() -> torch.Tensor:
            return self.unit.states.take(self.axis.reduce_scatter(gradients, of=self.unit.name), last=last)

        work = self._queue.submit(reduce)
        self._schedule.sent(work)
        return work


class HostedSum(HostedReduce):
    """The object that moves the gradients of an unsharded unit to host memory, without a reduce-scatter.

    A unit is unsharded if its mesh has one rank. FSDP2 would copy these gradients to the host itself, and make the host
    wait for each copy.
    """

    def __init__(self, unit: HostedUnit, context: CommContext) -> None:
        super().__init__(unit, context)
        # On CUDA the copies to the host always run in the queue of the shard axis, which overlaps them with compute.
        # Without configured overlap, `context.shard_queue` would run them at once, on the compute stream.
        self._queue = context.shard_queue if context.shard.queue.blocks_host else context.shard.queue

    def post_backward(self, *given: Any) -> None:
        """Let FSDP2 convert and accumulate the unit's gradients, and then start to move them to host memory.

        FSDP2 converts them to the reduction dtype. If there are no gradients, nothing is moved. FSDP2 calls this method
        after the unit's backward, see `SummingReduce.post_backward`.
        """
        with self.unit.without_reduction():
            self._fsdp2_post_backward(*given)
        self.begin()
        if self.reduced:
            gradients = torch.cat([gradient.reshape(-1) for gradient in self.unit.pop_gradients(self.reduced)])
            # Call this object as FSDP2 calls a reduce-scatter, so that `SummingReduce.watch` sees these gradients too.
            self(gradients, gradients, None, dist.ReduceOp.SUM)  # type: ignore[arg-type]

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        """Start the move of `gradients` to host memory, in a queue; see `SummingReduce.start` for the result."""
        take = functools.partial(self.unit.states.take, gradients, last=self._last_micro_batch)
        work = self._queue.submit(take)
        self._schedule.sent(work)
        return work


class HostedTwoHopReduce(HostedReduce, TwoHopReduce):
    """The reduce-scatter of a unit's gradients in two hops, whose result goes to host memory.

    With --zero-offload-partial-sums, partial sums that wait for the hop across nodes go to host memory too.
    """

    def __init__(self, unit: HostedUnit, context: CommContext) -> None:
        super().__init__(unit, context)
        # Slot of device memory for the partial sums of the running reduction; None without --zero-offload-partial-sums
        self._slot: SumSlot | None = None
        self._sums_wait = False  # True if partial sums of the step's earlier micro-batches are in host memory

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the hops of a unit's gradient reduction; see `SummingReduce.start`.

        With --zero-offload-partial-sums, partial sums use one of two slots of device memory. So at most two units have
        partial sums on the device, even if the network between nodes is slow.
        """
        slot = None
        if self.unit.states.memory.num_sums:
            slot = self.unit.states.memory.take_sum_slot()
            # `_hop_inside` waits for `used_by`, the previous hop across nodes that used this slot. Give it a copy of
            # the slot, because `used_by` of the slot itself is set to the new hop below.
            self._slot = dataclasses.replace(slot)
        work = super().start(gradients, result)
        if work is not None and slot is not None:
            slot.used_by = work
        return work

    def _hop_inside(self, gradients: torch.Tensor, codec: Codec, *, keep: bool) -> torch.Tensor:
        """Run the intra-node hop; see `TwoHopReduce._hop_inside`.

        With --zero-offload-partial-sums, upload the partial sums of earlier micro-batches first. If `keep` is True,
        because later micro-batches of the step follow, also move the new partial sums to host memory, and return an
        empty tensor.
        """
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
        """Run the cross-node hop, and move the reduced gradients to host memory.

        See `TwoHopReduce._hop_across` for the arguments; `result` is ignored. Returns the result of `HostShard.take`.
        """
        total = torch.empty(codec.layout.size, dtype=self._dtype, device=inside.join().device)
        return self.unit.states.take(super()._hop_across(inside, codec, total), last=self._last_micro_batch)
