"""qwZ and hpZ: weights gathered in two hops, with a secondary partition that stays.

    shard [S] --pack--> cross all-gather --> secondary [N, M] --> local all-gather --> [L, N, M] --unpack--> [N, L, S]

N nodes (cross axis), L ranks of a node that share a tensor-parallel index (local axis), S elements of a shard, M bytes
of its message. The secondary partition (hpZ, secondary.py) is kept: every later use until the weights change, forward
or backward, repeats the local hop only and sees bit-identical weights (DeepSpeed quantizes again for backward).
Source: ZeRO++ (arXiv 2306.10209) sections 3.1 and 3.2.

What crosses nodes next follows from what all ranks know:

    nothing       if the shards are those that were sent last
    a difference  if since then an optimizer has made a step and nothing else was written (where R is, secondary.py)
    a keyframe    at the first use, and after anything else that has written to the shards, or may have

Where a rank may know what others do not (`megazpp.zeropp`), ranks vote on it first (writes.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum

import torch
import torch.distributed as dist

from megazpp.parallel.comm_queue import Moment, Work
from megazpp.zero.comms import AllGather, CommContext, FreshBuffers, Pending
from megazpp.zero.secondary import Resident, Secondary
from megazpp.zero.units import Fingerprint, Unit
from megazpp.zero.wire import QUANTIZABLE, LosslessCodec, MixedCodec


class InterNodeMessage(IntEnum):
    """The kind of message that crosses nodes at the next use of a unit; the numbers stand in checkpoints."""

    NOTHING = 0
    DIFFERENCE = 1
    KEYFRAME = 2


class TwoHopGather(FreshBuffers, AllGather):
    """The all-gather of one unit in two hops, in the place of FSDP2's, whose flat rank is cross rank x L + local rank.

    At every use the unit's fingerprint is read, which is equal on all ranks.

    Attributes:
        secondary: holds what arrived in the first hop, and brings it there; its elements have FSDP2's compute dtype.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        plan = context.plan.gather
        assert plan is not None
        self.unit, self._keep = unit, plan.keep
        self.crossing_key = f"{unit.key}.crossing"  # of what the next use sends, in checkpoints
        self._cross, self._local = context.cross, context.local
        self._cross_queue, self._local_queue = context.cross_queue, context.local_queue
        self._context, self._schedule = context, context.gather_schedule
        self._plan_messages()
        self._made_from: Fingerprint | None = None
        self._has_stepped = False  # since `_made_from`, which is of after the step
        self._after_step: Fingerprint | None = None  # None if others may have written to the shards since
        self._crossed: Work[None] | None = None  # the cross hop
        self._received: Work[torch.Tensor] | None = None  # a local hop that was started ahead of its use
        self._used = False  # since the cross hop last started
        self._compared = False  # the unit's shard reader with FSDP2's shard
        self._uncounted = 0  # bytes that crossed while the counter was paused
        self.num_uses = 0  # calls so far, the same number on every rank
        self._schedule.add(self)

    def _plan_messages(self) -> None:
        """Lay out messages for the dtypes in which FSDP2 gathers the unit now."""
        context, plan = self._context, self._context.plan.gather
        assert plan is not None
        dtypes = self.unit.gather_dtypes
        self._codec = (
            context.codec(self.unit.segments, plan.fmt, dtypes[0])
            if len(set(dtypes)) == 1 and dtypes[0] in QUANTIZABLE
            else MixedCodec(self.unit.segments, dtypes, plan.fmt, context.codec)
        )
        self.secondary = Secondary(self._codec, self._cross, of=self.unit.name)
        if plan.differences:
            if self._codec.dtype.itemsize != 2:
                raise ValueError(
                    f"zero_weight_delta lossless needs weights of 16 bits: those of {self.unit.name} are gathered in "
                    f"{', '.join(sorted(map(str, set(dtypes))))}"
                )
            differences = context.lossless_codec(self._codec.layout.size)
            self.secondary = Resident(self._codec, self._cross, of=self.unit.name, differences=differences)

    def drop(self) -> None:
        """Have the next use send whole weights, because they have changed."""
        self._made_from = self._received = self._after_step = None

    def before_step(self, held: Collection[int] | None = None) -> None:
        """Call before an optimizer's step: what was written by others until now is not a step's difference.

        Args:
            held: `id`s of the tensors that the optimizer holds; None: all.
        """
        self._schedule.start_stale()  # the last step's, of units that were not used
        if not self.unit.is_sharded or self._made_from != self.unit.fingerprint():
            self.drop()

    def after_step(self, *, keyframe: bool, held: Collection[int] | None = None) -> None:
        """Call after an optimizer's step, on all ranks; with `keyframe` the next use sends whole weights anyhow."""
        if keyframe or not self.secondary.sends_differences or self._made_from is None:
            self.drop()
        elif not self.unit.is_frozen:
            self._made_from, self._has_stepped, self._received = self.unit.fingerprint(), True, None
        self._schedule.forget_stale()
        if self.unit.is_sharded:
            self._after_step = self.unit.fingerprint()

    def next_crossing(self) -> InterNodeMessage:
        """The kind of message that the next use sends; ask while the unit is sharded."""
        if self.secondary.messages is None or self._made_from is None or self._made_from != self.unit.fingerprint():
            return InterNodeMessage.KEYFRAME
        return InterNodeMessage.DIFFERENCE if self._has_stepped else InterNodeMessage.NOTHING

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        if self._codec.dtype == torch.uint8:
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        if input_tensor.dtype != self._codec.dtype:  # parameters were cast between the call and the first forward
            self._plan_messages()
            self.drop()
        size = self._codec.layout.size
        assert input_tensor.numel() == size, f"a shard of {input_tensor.numel()} elements, planned {size}"
        messages, crossed = self._fresh_messages(input_tensor)
        self._count_crossing()
        self._used = True
        self.num_uses += 1
        received, self._received = self._received, None
        if received is None:
            assert self._crossed is not None
            hop = functools.partial(self._hop_inside, messages)
            unpack = functools.partial(self._unpack, hop, output_tensor)  # one task: a second one costs host time
            done = self._local_queue.submit(unpack, after=(self._crossed,))
        else:
            done = self._local_queue.submit(functools.partial(self._unpack, received.join, output_tensor))
        if self._keep:
            self._schedule.used(self, crossed=crossed)
        else:
            self.secondary.free()
            self._made_from = None
        if self._schedule.overlap and self._local_queue.blocks_host:
            return Pending(done)
        done.wait()  # on CUDA the gather stream waits, on which FSDP2 goes on
        return None

    @property
    def message_bytes(self) -> int:
        """Bytes of one shard's message inside a node."""
        return self._codec.message_bytes

    def new_row(self, device: torch.device) -> torch.Tensor:
        """[S] zeros, for this rank's row of the resident weights."""
        return torch.zeros(self._codec.layout.size, dtype=self._codec.dtype, device=device)

    def warm_up(self, device: torch.device) -> None:
        """Pack and unpack zeros as a use does, to compile the kernels; nothing is sent and no state changes."""
        nodes, peers, codec = self._cross.size, self._local.size, self._codec
        output = torch.zeros(nodes * peers, codec.layout.size, dtype=codec.dtype, device=device)
        slot = output[self._cross.rank * peers + self._local.rank]  # where FSDP2 puts the shard
        for shard in (slot, torch.zeros_like(slot)):  # and where `start_early` does: other alignments, other kernels
            self.secondary.warm_up(shard)
        self._unpack(lambda: codec.empty(peers, nodes, device=device), output.view(-1))

    def start_early(self, since: Moment) -> bool:
        """Start the cross hop ahead of use if the weights have changed and the modules hold the shards; True if so.

        With differences whether this unit is used or not, overlap or not: what the resident weights hold follows from
        the optimizer's steps, not from what happened to be used in between. `since` is a moment after the last step,
        enough to wait for unless the weights were written to later.
        """
        wanted = self.secondary.sends_differences or (self._schedule.overlap and self._used)
        messages = self.secondary.messages if wanted else None
        shard = None if messages is None else self.unit.shard_reader(self._codec.dtype)
        if messages is None or shard is None:
            return False
        crossed = False
        for crossing in self._crossings(early=True):
            untouched = self._after_step is not None and self._after_step == self.unit.fingerprint()
            self._start_cross_hop(crossing, messages, shard, since if untouched else None)
            crossed = True
        return crossed

    def prefetch(self) -> None:
        """Start the next use's local hop, if the secondary partition holds the current weights."""
        if self._received is None and self.secondary.messages is not None and self._is_current:
            self._received = self._start_local_hop(self.secondary.messages)

    def resident(self) -> Resident | None:
        """The resident weights, complete; None where there are none (yet)."""
        secondary = self.secondary
        if not isinstance(secondary, Resident) or secondary.weights is None:
            return None
        if self._crossed is not None:
            self._crossed.wait()
        return secondary

    def lossless(self) -> LosslessCodec:
        """The codec of its differences, whose numbers are those of the last one that was sent."""
        if self._crossed is not None:
            self._crossed.wait()
        differences = self.secondary.differences if isinstance(self.secondary, Resident) else None
        assert isinstance(differences, LosslessCodec)
        differences.read_counters()
        return differences

    def restore(self, row: torch.Tensor, crossing: InterNodeMessage) -> None:
        """Have the resident weights again as a checkpoint has kept them; call on all ranks, while the unit is sharded.

        [S] is this rank's own row; `crossing` is the kind that the next use had to send.
        """
        secondary = self.secondary
        assert isinstance(secondary, Resident)
        messages = secondary.messages if secondary.messages is not None else secondary.allocate(row.device)
        self._crossed = self._cross_queue.submit(functools.partial(secondary.restore, messages, row))
        self._crossed.wait()
        self._made_from, self._received = self.unit.fingerprint(), None
        self._has_stepped = crossing == InterNodeMessage.DIFFERENCE

    def _crossings(self, *, early: bool = False) -> Iterable[InterNodeMessage]:
        """Return the messages to send now, the same on all ranks; `early`: ahead of use."""
        crossing = self.next_crossing()
        return () if crossing == InterNodeMessage.NOTHING else (crossing,)

    @property
    def _is_current(self) -> bool:
        """True if the secondary partition holds the weights that the next use needs."""
        return self.unit.is_sharded and self.next_crossing() == InterNodeMessage.NOTHING

    def _fresh_messages(self, shard: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The messages of the current weights, and whether they cross nodes first."""
        crossed = False
        for crossing in self._crossings():
            messages = self.secondary.messages
            if messages is None:
                messages = self.secondary.allocate(shard.device)
            starts_early = self._keep and (self._schedule.overlap or self.secondary.sends_differences)
            if starts_early and not self._compared:  # what `start_early` will rely on
                self.unit.check_shard_reader(shard)
                self._compared = True
            self._start_cross_hop(crossing, messages, lambda: shard)
            crossed = True
        messages = self.secondary.messages
        assert messages is not None
        return messages, crossed

    def _start_cross_hop(
        self,
        crossing: InterNodeMessage,
        messages: torch.Tensor,
        shard: Callable[[], torch.Tensor],
        since: Moment = None,
    ) -> None:
        self._received, self._used, self._has_stepped = None, False, False
        self._made_from = self.unit.fingerprint()
        self._uncounted = 0
        if self._cross.counter.is_paused:
            if self._crossed is not None:
                self._crossed.wait()  # what it has received says how long the next message is
            self._uncounted = (self._cross.size - 1) * self._crossing_bytes(crossing)
        self._crossed = self._cross_queue.submit(lambda: self._take_in(crossing, messages, shard), since=since)

    def _take_in(self, crossing: InterNodeMessage, messages: torch.Tensor, shard: Callable[[], torch.Tensor]) -> None:
        self.secondary.take_in(messages, shard(), keyframe=crossing == InterNodeMessage.KEYFRAME)

    def _crossing_bytes(self, crossing: InterNodeMessage) -> int:
        return self.secondary.crossing_bytes(keyframe=crossing == InterNodeMessage.KEYFRAME)

    def _count_crossing(self) -> None:
        """Weights that crossed for an evaluation, which counts nothing, are counted by the step that uses them."""
        if self._uncounted and not self._cross.counter.is_paused:
            self._cross.count("all_gather", self._uncounted)
            self._uncounted = 0

    def _start_local_hop(self, messages: torch.Tensor) -> Work[torch.Tensor]:
        assert self._crossed is not None
        return self._local_queue.submit(functools.partial(self._hop_inside, messages), after=(self._crossed,))

    def _hop_inside(self, messages: torch.Tensor) -> torch.Tensor:
        """[N, M] -> [L, N, M]"""
        return self._local.all_gather(messages, of=self.unit.name).view(self._local.size, *messages.shape)

    def _unpack(self, receive: Callable[[], torch.Tensor], output: torch.Tensor) -> None:
        """Unpack what `receive` returns: [L, N, M] -> [N L, S] in FSDP2's rank order, written through [L, N, S]."""
        shards = output.view(self._cross.size, self._local.size, -1).transpose(0, 1)
        self._codec.unpack(receive(), shards)
