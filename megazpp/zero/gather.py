"""qwZ and hpZ: weights gathered in two hops, with a secondary partition that stays.

    shard [S] --pack--> cross all-gather --> secondary [N, M] --> local all-gather --> [L, N, M] --unpack--> [N, L, S]

N nodes (cross axis), L ranks of a node that share a tensor-parallel index (local axis), S elements of a shard, M bytes
of its message. The secondary partition (hpZ) is kept as the bytes it arrived in: every later use until the weights
change, forward or backward, repeats the local hop only and sees bit-identical weights (DeepSpeed quantizes again for
backward). Source: ZeRO++ (arXiv 2306.10209) sections 3.1 and 3.2.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist

from megazpp.parallel.axis import MeshAxis, SilentAxis
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import AllGather, FreshBuffers, Pending
from megazpp.zero.schedule import CommQueues, GatherSchedule
from megazpp.zero.units import Fingerprint, Unit
from megazpp.zero.wire import Codec


class StaleWeightsError(RuntimeError):
    """The secondary partition that is kept does not hold the weights that the shards hold."""


class TwoHopGather(FreshBuffers, AllGather):
    """FSDP2's all-gather of one unit.

    Args:
        unit: whose parameters; its fingerprint, equal on all ranks, is read at every use.
        cross, local: the two axes; FSDP2's flat rank is cross rank x L + local rank.
        queues: where the hops run.
        schedule: what else starts with them.
        codec: the unit's messages; its elements are FSDP2's compute dtype.
        keep: keep the secondary partition for later uses (hpZ).
        check: compare the secondary partition with the shards at every use, on all ranks.
    """

    def __init__(
        self,
        unit: Unit,
        *,
        cross: MeshAxis,
        local: MeshAxis,
        queues: CommQueues,
        schedule: GatherSchedule,
        codec: Codec,
        keep: bool,
        check: bool = False,
    ) -> None:
        self._unit, self._cross, self._local, self._queues = unit, cross, local, queues
        self._schedule, self._codec, self._keep, self._check = schedule, codec, keep, check
        self._secondary: torch.Tensor | None = None
        self._made_from: Fingerprint | None = None
        self._crossed: Work[None] | None = None  # the secondary partition has arrived
        self._received: Work[torch.Tensor] | None = None  # a local hop that was started early
        self.used = False

    def drop(self) -> None:
        """Forget the secondary partition: the weights have changed, or its memory is wanted."""
        self._made_from = self._received = None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        size = self._codec.layout.size
        assert input_tensor.numel() == size, f"a shard of {input_tensor.numel()} elements, planned {size}"
        secondary = self._fresh_secondary(input_tensor)
        self.used = True
        received = self._received or self._start_local_hop(secondary)
        self._received = None
        done = self._queues.local.submit(functools.partial(self._unpack, received, output_tensor))
        if self._keep:
            self._schedule.prefetch_after(self)
        else:
            self._secondary = self._made_from = None
        if self._schedule.overlap and self._queues.local.blocks_host:
            return Pending(done)
        done.wait()  # on CUDA the gather stream waits, on which FSDP2 goes on
        return None

    @property
    def message_bytes(self) -> int:
        """Of a shard, as it travels."""
        return self._codec.layout.message_bytes

    @property
    def kind(self) -> Hashable:
        """Units of the same kind use the same kernels."""
        return self._codec.layout, self._codec.dtype

    def rehearse(self, device: torch.device) -> None:
        """Pack and unpack zeros as a use does, which compiles its kernels; sends nothing and changes nothing."""
        twin, codec, size = copy.copy(self), self._codec, self._codec.layout.size
        twin._cross, twin._local = SilentAxis(self._cross), SilentAxis(self._local)
        secondary = codec.empty(self._cross.size, device=device)
        output = torch.zeros(self._cross.size * self._local.size, size, dtype=codec.dtype, device=device)
        slot = output[self._cross.rank * self._local.size + self._local.rank]  # where FSDP2 puts the shard
        for shard in (slot, torch.zeros_like(slot)):  # and where `start_early` does: other alignments, other kernels
            twin._hop_across(secondary, functools.partial(torch.Tensor.detach, shard))
        twin._unpack(Work(twin._hop_inside(secondary)), output.view(-1))

    def start_early(self) -> None:
        """Start the cross hop if the weights have changed and the modules hold the shards."""
        shard = self._unit.shard_reader(self._codec.dtype)
        if shard is not None and self._secondary is not None and self._made_from != self._unit.fingerprint():
            self._start_cross_hop(self._secondary, shard)

    def prefetch(self) -> None:
        """Start the local hop of the next use, if the secondary partition is there."""
        fresh = self._unit.is_sharded and self._made_from == self._unit.fingerprint()
        if fresh and self._received is None and self._secondary is not None:
            self._received = self._start_local_hop(self._secondary)

    def _fresh_secondary(self, shard: torch.Tensor) -> torch.Tensor:
        if self._secondary is None or self._made_from != self._unit.fingerprint():
            if self._secondary is None:
                with torch.inference_mode(False):  # it outlives the mode in which it is first made
                    self._secondary = self._codec.empty(self._cross.size, device=shard.device)
                if self._keep and self._schedule.overlap:  # what `start_early` will rely on
                    self._unit.check_shard_reader(shard)
            self._start_cross_hop(self._secondary, lambda: shard)
            if self._keep:
                self._schedule.stale(self)
        elif self._check:
            self._compare_secondary(self._secondary, shard)
        return self._secondary

    def _start_cross_hop(self, secondary: torch.Tensor, shard: Callable[[], torch.Tensor]) -> None:
        self._received, self.used = None, False
        self._made_from = self._unit.fingerprint()
        self._crossed = self._queues.cross.submit(functools.partial(self._hop_across, secondary, shard))

    def _hop_across(self, secondary: torch.Tensor, shard: Callable[[], torch.Tensor]) -> None:
        mine = secondary[self._cross.rank]
        self._codec.pack(shard(), mine)
        self._cross.all_gather(mine.unsqueeze(0), out=secondary, of=self._unit.name)

    def _start_local_hop(self, secondary: torch.Tensor) -> Work[torch.Tensor]:
        assert self._crossed is not None
        return self._queues.local.submit(functools.partial(self._hop_inside, secondary), after=(self._crossed,))

    def _hop_inside(self, secondary: torch.Tensor) -> torch.Tensor:
        """[N, M] -> [L, N, M]"""
        return self._local.all_gather(secondary, of=self._unit.name).view(self._local.size, *secondary.shape)

    def _unpack(self, received: Work[torch.Tensor], output: torch.Tensor) -> None:
        """[L, N, M] -> [N L, S] in FSDP2's rank order, written through [L, N, S]."""
        shards = output.view(self._cross.size, self._local.size, -1).transpose(0, 1)
        self._codec.unpack(received.join(), shards)

    def _compare_secondary(self, secondary: torch.Tensor, shard: torch.Tensor) -> None:
        """Raise StaleWeightsError on all ranks if one of them keeps other bytes than its shard packs to."""

        def across() -> torch.Tensor:
            packed = self._codec.empty(device=shard.device)
            self._codec.pack(shard, packed)
            return self._cross.max_((packed != secondary[self._cross.rank]).any().to(torch.int32))

        crossed = self._queues.cross.submit(across)
        if int(self._queues.local.submit(lambda: self._local.max_(crossed.join()), after=(crossed,)).wait()):
            raise StaleWeightsError(
                "weights have changed since they were gathered, in a way that moves no version counter "
                "(parameter.data or a foreach operation): call Sharding.weights_changed() after such a write"
            )
