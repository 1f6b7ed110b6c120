"""FSDP2 on paper: when it gathers, prefetches, waits, reduces and frees (torch 2.13, _fsdp_param_group.py).

The one thing of a step that is written down a second time. On CUDA the host runs ahead and streams keep the order; on a
CPU the process does everything that no queue does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megazpp.planner.clock import Clock, Simulation
from megazpp.planner.comms import ShardedUnit
from megazpp.planner.costs import Costs
from megazpp.planner.memory import BUFFERS, GATHERED, GRADIENTS, MASTER_BYTES, PARTIAL_SUMS, WHOLE_GRADIENTS, Ledger
from megazpp.planner.paper import PaperAxis
from megazpp.zero.comm_factory import CommFactory
from megazpp.zero.config import ZeroConfig
from megazpp.zero.precision import PrecisionConfig


class PaperFSDP:
    """FSDP2's part in a step.

    Args:
        simulation: its clocks; three of our own stand for streams.
        axes: by name.
        costs: of passes over memory.
        zero, precision: of the run.
        factory: makes the units' comms.
        on_cpu: whether the process itself computes.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        axes: dict[str, PaperAxis],
        costs: Costs,
        zero: ZeroConfig,
        precision: PrecisionConfig,
        factory: CommFactory,
        on_cpu: bool,
    ) -> None:
        self._simulation, self._shard, self._replicate = simulation, axes["shard"], axes["replicate"]
        self._costs, self._precision, self._factory = costs, precision, factory
        self._stage = zero.stage_over(self._shard.size)
        self._on_cpu = on_cpu
        self._keeps_partial_sums = not zero.zero_cross_every_microbatch
        self._clocks = [simulation.new_clock(name) for name in ("gathers", "reductions", "copies")]
        self._ledger = Ledger()
        self._copied_out, self._copied_from, self._sent_from, self._partial_sums_wait = 0.0, 0, 0, False

    def begin_step(self, ledger: Ledger, units: Sequence[ShardedUnit], *, micro_batches: int) -> None:
        """Note in `ledger` from now on what comes and goes."""
        self._ledger, self._copied_from, self._sent_from = ledger, 0, 0
        self._copied_out = self._simulation.compute.now
        self._partial_sums_wait = micro_batches > 1 and self._keeps_partial_sums
        ledger.add(PARTIAL_SUMS, sum(sharded.partial_bytes for sharded in units) if self._partial_sums_wait else 0)

    def end_forward(self) -> None:
        """The last gather's buffer goes."""
        self._ledger.add(BUFFERS, -self._copied_from)
        self._copied_from = 0

    def end_backward(self) -> None:
        """The root's last hook: wait for all reductions; their buffers go."""
        for clock in self._clocks[1:]:
            self._simulation.wait_until(clock.now)
        self._factory.reduce_schedule.end_backward()
        self._ledger.set(BUFFERS, 0)
        self._sent_from = 0

    def gather(self, sharded: ShardedUnit) -> None:
        """`unshard`: hand the shard to the gather, whose clock waits for it."""
        if sharded.gathered or sharded.ready is not None:
            return
        size, world = sharded.unit.size, self._shard.size
        clock = self._gather_clock()
        with self._simulation.on(clock):
            if world > 1:
                shard, out = self._empty(size), self._empty(size * world)
                self._ledger.add(BUFFERS, out.nbytes)
                self._ledger.pass_through(BUFFERS, sharded.gather_buffer)
                pending = sharded.gather(out, shard, self._shard.group)  # type: ignore[arg-type]
                if pending is not None:
                    pending.wait()
        sharded.ready = clock.now

    def _gather_clock(self) -> Clock:
        """On CUDA a stream; on a CPU the process, or with overlap something that only the queues hold up."""
        if not self._on_cpu:
            return self._clocks[0]
        if not self._factory.overlap_gather:
            return self._simulation.compute
        clock = Clock("gathers")
        clock.now = self._simulation.compute.now
        return clock

    def wait_for_gather(self, sharded: ShardedUnit, *, forward: bool) -> None:
        """`wait_for_unshard`: copy out; the next gather but one may start after it in forward, the next in backward."""
        if sharded.gathered:
            return
        assert sharded.ready is not None
        simulation, stream = self._simulation, self._clocks[0]
        simulation.wait_until(sharded.ready)
        if forward:
            stream.now = max(stream.now, self._copied_out)
        whole = self._whole(sharded)
        if self._shard.size > 1 and forward:  # the buffer of the gather before is free now, this one's later
            self._ledger.add(BUFFERS, -self._copied_from)
            self._copied_from = 0
        self._ledger.add(GATHERED, whole.nbytes)
        if self._shard.size > 1:
            if forward:
                self._copied_from = whole.nbytes
            else:
                self._ledger.add(BUFFERS, -whole.nbytes)
        simulation.spend("copy", self._costs.memory(2 * whole.nbytes))
        self._copied_out = simulation.compute.now
        if not forward:
            stream.now = max(stream.now, self._copied_out)
        sharded.gathered, sharded.ready = True, None
        sharded.unit.state.is_sharded = False

    def release(self, sharded: ShardedUnit, *, when: bool) -> None:
        """`reshard`."""
        if when and sharded.gathered:
            self._ledger.add(GATHERED, -self._whole(sharded).nbytes)
            sharded.gathered, sharded.unit.state.is_sharded = False, True

    def finish_unit(self, sharded: ShardedUnit, *, first: bool, last: bool) -> None:
        """`post_backward`: reshard and reduce; one reduction at a time is in flight."""
        self.release(sharded, when=self._stage == 3 or last)
        sharded.unit.state.is_sharded = False
        whole = self._whole(sharded, reduced=True)
        computed = sharded.whole_elements * self._precision.param_dtype.itemsize
        accumulated = sharded.whole_elements * self._precision.reduce_dtype.itemsize
        if self._stage <= 1 and not last:  # accumulated in the format of the reduction
            self._ledger.add(WHOLE_GRADIENTS, (accumulated if first else 0) - computed)
            return
        simulation, world = self._simulation, self._shard.size
        reductions, copies = self._clocks[1:]
        if not self._on_cpu:
            simulation.wait_until(reductions.now)
        self._ledger.add(BUFFERS, whole.nbytes - self._sent_from)
        self._sent_from = whole.nbytes
        self._ledger.add(WHOLE_GRADIENTS, -computed - (accumulated if self._stage <= 1 and not first else 0))
        simulation.spend("copy", self._costs.memory(2 * whole.nbytes))
        if self._on_cpu:
            reductions = copies = simulation.compute
        reductions.now = max(reductions.now, simulation.compute.now)
        result = self._empty(sharded.unit.size, reduced=True)
        self._note_reduction(sharded, result.nbytes, first=first, last=last)
        with simulation.on(reductions):
            if world > 1:
                sharded.reduce(result, whole, self._shard.group, dist.ReduceOp.SUM)  # type: ignore[arg-type]
        if last and self._replicate.size > 1:
            copies.now = max(copies.now, reductions.now)
            with simulation.on(copies):
                self._replicate.all_reduce_(result)

    def _note_reduction(self, sharded: ShardedUnit, result_bytes: int, *, first: bool, last: bool) -> None:
        """What the reduction of a unit leaves behind and holds meanwhile."""
        partial = 0 if self._partial_sums_wait else sharded.partial_bytes
        self._ledger.pass_through(BUFFERS, sharded.reduce_buffer + partial + result_bytes)
        if last or not self._keeps_partial_sums:
            self._ledger.pass_through(BUFFERS, sharded.cross_buffer + partial + result_bytes)
            if self._factory.overlap_reduce:  # at worst, sums and results of all units wait for the cross hop
                self._ledger.add(BUFFERS, partial + result_bytes)
        if first or (self._stage <= 1 and last):
            self._ledger.add(GRADIENTS, MASTER_BYTES * sharded.unit.size)

    def _whole(self, sharded: ShardedUnit, *, reduced: bool = False) -> torch.Tensor:
        return self._empty(sharded.unit.size * self._shard.size, reduced=reduced)

    def _empty(self, size: int, *, reduced: bool = False) -> torch.Tensor:
        dtype = self._precision.reduce_dtype if reduced else self._precision.param_dtype
        return torch.empty(size, dtype=dtype, device="meta")
