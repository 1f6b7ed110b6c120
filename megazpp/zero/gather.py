"""ZeRO++'s qwZ and hpZ: the all-gather of a unit's weights in two hops, with a secondary partition for later uses.

    shard [S] --pack--> cross all-gather --> secondary [N, M] --> local all-gather --> [L, N, M] --unpack--> [N, L, S]

N: nodes (cross axis); L: ranks of a node with the same tensor-parallel index (local axis); S: elements of a flat shard;
M: bytes of its message.

The secondary partition (hpZ, secondary.py) consists of the messages that the cross-node hop has received. Until the
weights change, each later use in forward or backward repeats only the intra-node hop and gathers the same bits.
DeepSpeed instead quantizes again for the backward. Source: ZeRO++ (arXiv 2306.10209) sections 3.1 and 3.2.

Each rank decides by itself what the unit's next use sends between nodes. The decision depends only on values that are
equal on all ranks:

    nothing         the shards are unchanged since they were sent
    a weight delta  only an optimizer step has changed the shards, and nodes keep resident weights (secondary.py)
    a keyframe      whole weights, at the first use and after every other possible write to the shards

In programs that use `megazpp.zeropp` ranks may decide differently, so they vote first (drop_in/writes.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from enum import IntEnum

import torch
import torch.distributed as dist

from megazpp.parallel.comm_queue import Moment, Work
from megazpp.zero.comms import AllGather, CommContext, DefaultAllocMixin, Pending
from megazpp.zero.secondary import Resident, Secondary
from megazpp.zero.units import Fingerprint, Unit
from megazpp.zero.wire import Codec, LosslessCodec


class InterNodeMessage(IntEnum):
    """The kind of message that the next use of a sharding unit sends between nodes.

    The kinds are no message, a weight delta, and a keyframe with whole weights. Checkpoints store a kind by its number,
    so the numbers must not change.
    """

    NOTHING = 0
    DIFFERENCE = 1  # a weight delta; without weight deltas, `megazpp.zeropp` sends a unit's trained parameters
    KEYFRAME = 2


class TwoHopGather(DefaultAllocMixin, AllGather):
    """The all-gather of one unit's weights in two hops, across nodes and inside the node, which replaces FSDP2's.

    With L ranks per node, FSDP2's rank in the data mesh is cross rank x L + local rank. To detect changed weights, each
    use compares the unit's fingerprint (`Unit.fingerprint`) with its fingerprint at the last cross-node hop.
    Fingerprints change on the same occasions on all ranks.

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
    Attributes:
        secondary: secondary partition of the unit, which runs the cross-node hop and holds its result.
        crossing_key: key in checkpoints of the kind of message that the unit's next use sends between nodes.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        plan = context.plan.gather
        assert plan is not None
        self.unit, self._plan, self._keep = unit, plan, plan.keep
        self.crossing_key = f"{unit.key}.crossing"
        self._cross, self._local = context.cross, context.local
        self._cross_queue, self._local_queue = context.cross_queue, context.local_queue
        self._context, self._schedule = context, context.gather_schedule
        self._plan_messages()
        # Fingerprint of the shards from which `secondary` was made; None if the next use must send whole weights. If
        # `_has_stepped` is True, it is the fingerprint after an optimizer step, and the next use sends a weight delta.
        self._made_from: Fingerprint | None = None
        self._has_stepped = False
        # Fingerprint of the shards right after the last optimizer step; None before it, and after another write
        self._after_step: Fingerprint | None = None
        self._crossed = Work(None)  # task of the unit's last cross-node hop; a finished task before the first hop
        # Task of the intra-node hop that `prefetch` has started for the next use; None if that use must start the hop
        self._received: Work[torch.Tensor] | None = None
        self._used = False  # True if FSDP2 has gathered the unit since its last cross-node hop started
        # True once `Unit.check_shard_reader` has shown that `start_early` can read the same flat shard as FSDP2
        self._compared = False
        # Bytes of the last cross-node hop if it ran while the traffic counter was paused; 0 after they were counted
        self._uncounted = 0
        self._schedule.add(self)

    def _plan_messages(self) -> None:
        """Create the codec of the unit's messages, and an empty secondary partition that will hold these messages."""
        context, self._codec = self._context, self._new_codec()
        self.secondary = Secondary(self._codec, self._cross, of=self.unit.name)
        if self._plan.differences:
            differences = context.lossless_codec(self._codec.layout.size)
            self.secondary = Resident(self._codec, self._cross, of=self.unit.name, differences=differences)

    def _new_codec(self) -> Codec:
        """Return a codec that packs the unit's flat shard into a message, in the plan's block format."""
        return self._context.codec(self.unit.segments, self._plan.fmt, self._context.precision.param_dtype)

    def drop(self) -> None:
        """Record that the unit's weights have changed, so that the next use sends whole weights between nodes."""
        self._made_from = self._received = self._after_step = None

    def before_step(self) -> None:
        """Prepare the unit's gather for an optimizer step; call this method before the step on all ranks.

        If the weights were written to since they were sent, the next use sends whole weights instead of a weight delta.
        """
        # Units that no forward has used since the last optimizer step have not sent that step's weight deltas. Send the
        # deltas now, so that the resident weights depend only on the steps, not on which units a forward has used.
        self._schedule.start_stale()
        if not self.unit.is_sharded or self._made_from != self.unit.fingerprint():
            self.drop()

    def after_step(self, *, keyframe: bool) -> None:
        """Record that an optimizer step has changed the unit's weights; call this method after the step on all ranks.

        Args:
            keyframe: True if the next use must send whole weights instead of a weight delta.
        """
        if keyframe or not self.secondary.sends_differences or self._made_from is None:
            self.drop()
        elif not self.unit.is_frozen:
            self._made_from, self._has_stepped, self._received = self.unit.fingerprint(), True, None
        self._schedule.forget_stale()
        if self.unit.is_sharded:
            self._after_step = self.unit.fingerprint()

    def next_crossing(self) -> InterNodeMessage:
        """Return what the unit's next use sends between nodes: nothing, a weight delta or a keyframe.

        Call this method while the unit is sharded.
        """
        if self.secondary.messages is None or self._made_from is None or self._made_from != self.unit.fingerprint():
            return InterNodeMessage.KEYFRAME
        return InterNodeMessage.DIFFERENCE if self._has_stepped else InterNodeMessage.NOTHING

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        """Gather the unit's parameters; FSDP2 calls this object as its all-gather.

        Args:
            output_tensor: [N L S] tensor for the gathered flat shards, S elements from each of L ranks on N nodes.
            input_tensor: [S] flat shard of this rank.
            group: FSDP2's process group, which is not used.
            async_op: ignored.
        Returns:
            A handle that FSDP2 waits for, or None if the parameters are complete, or if FSDP2's gather stream waits.
        """
        # ---- the cross-node hop, if the weights have changed
        size = self._codec.layout.size
        assert input_tensor.numel() == size, f"FSDP2 gathers {input_tensor.numel()} elements per rank, planned {size}"
        crossed = False
        for crossing in self._crossings():
            messages = self.secondary.messages
            if messages is None:
                messages = self.secondary.allocate(input_tensor.device)
            starts_early = self._keep and (self._schedule.overlap or self.secondary.sends_differences)
            if starts_early and not self._compared:  # check once that `start_early` can read shards like FSDP2
                self.unit.check_shard_reader(input_tensor)
                self._compared = True
            self._start_cross_hop(crossing, messages, self.unit.input_reader(input_tensor))
            crossed = True
        messages = self.secondary.messages
        assert messages is not None
        if self._uncounted and not self._cross.counter.is_paused:
            # Evaluations pause the traffic counter. Weights that an evaluation has sent between nodes also serve this
            # training step, so their bytes count now.
            self._cross.count("all_gather", self._uncounted)
            self._uncounted = 0
        self._used = True

        # ---- the intra-node hop, unless it was prefetched, and the unpacking of its messages
        received, self._received = self._received, None
        receive = functools.partial(self._hop_inside, messages) if received is None else received.join
        # One task for the hop and the unpacking takes less host time than two tasks.
        unpack = functools.partial(self._unpack, receive, output_tensor)
        done = self._local_queue.submit(unpack, after=(self._crossed,))

        # ---- start other units' hops; without a secondary partition to keep, free this unit's messages instead
        if self._keep:
            self._schedule.used(self, crossed=crossed)
        else:
            self.secondary.free()
            self._made_from = None
        if self._schedule.overlap and self._local_queue.blocks_host:
            return Pending(done)
        done.wait()  # on CUDA this makes FSDP2's gather stream wait, not the host
        return None

    @property
    def message_bytes(self) -> int:
        """The bytes of one flat shard's message in the hop inside a node."""
        return self._codec.message_bytes

    def new_row(self, device: torch.device) -> torch.Tensor:
        """Return zeros [S] in the compute dtype, into which this rank's row of the resident weights can be loaded."""
        return torch.zeros(self._codec.layout.size, dtype=self._codec.dtype, device=device)

    def warm_up(self, device: torch.device) -> None:
        """Compile the kernels of both hops for `device`, by packing and unpacking zeros in temporary tensors.

        No rank communicates, and the secondary partition does not change.
        """
        nodes, peers, codec = self._cross.size, self._local.size, self._codec
        output = torch.zeros(nodes * peers, codec.layout.size, dtype=codec.dtype, device=device)
        # A kernel is compiled for the alignment of its arguments. FSDP2's all-gather input is a view of the output like
        # `slot`; `start_early` copies the shard into a separate tensor, which may have another alignment.
        slot = output[self._cross.rank * peers + self._local.rank]
        for shard in (slot, torch.zeros_like(slot)):
            self.secondary.warm_up(shard)
        self._unpack(lambda: codec.empty(peers, nodes, device=device), output.view(-1))

    def start_early(self, since: Moment) -> bool:
        """Start the cross-node hop, the all-gather between nodes, before the unit's next use.

        The hop starts only if the weights have changed and the unit is sharded. With weight deltas it starts for every
        unit, used or not, with or without overlap. So the resident weights, to which weight deltas are added, depend
        only on the optimizer's steps, not on which units a forward has used between two steps.

        Args:
            since: CUDA event after the last optimizer step, for which the hop waits. If the weights were written to
                after that step, the hop waits for all work on the current stream instead.
        Returns:
            True if a cross-node hop was started.
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
        """Start the intra-node hop, the all-gather inside the node, before the unit's next use.

        The hop starts only if the messages that this rank has received from other nodes are up to date.
        """
        if self._received is None and self.secondary.messages is not None and self._is_current:
            hop = functools.partial(self._hop_inside, self.secondary.messages)
            self._received = self._local_queue.submit(hop, after=(self._crossed,))

    def resident(self) -> Resident:
        """Wait for the last cross-node hop, and return the unit's resident weights.

        Weight deltas from other nodes are added to these weights. The unit must send weight deltas.
        """
        self._crossed.wait()
        assert isinstance(self.secondary, Resident)
        return self.secondary

    def lossless(self) -> LosslessCodec:
        """Wait for the last cross-node hop, and return the unit's codec of lossless deltas.

        The codec's size counters then include those of the last delta.
        """
        differences = self.resident().differences
        assert isinstance(differences, LosslessCodec)
        differences.read_counters()
        return differences

    def restore(self, row: torch.Tensor, crossing: InterNodeMessage) -> None:
        """Restore the unit's resident weights, to which weight deltas are added, from a checkpoint.

        Call this method on all ranks while the unit is sharded.

        Args:
            row: [S] this rank's row of the resident weights, as read from the checkpoint.
            crossing: kind of message that the unit's next use had to send when the checkpoint was saved.
        """
        secondary = self.resident()
        messages = secondary.messages if secondary.messages is not None else secondary.allocate(row.device)
        self._crossed = self._cross_queue.submit(functools.partial(secondary.take_in, messages, row, keyframe=True))
        self._crossed.wait()
        self._made_from, self._received = self.unit.fingerprint(), None
        self._has_stepped = crossing == InterNodeMessage.DIFFERENCE

    def _crossings(self, *, early: bool = False) -> Iterable[InterNodeMessage]:
        """Return the messages that this unit must send between nodes now: none, a weight delta or a keyframe.

        The result is the same on all ranks.

        Args:
            early: True if `start_early` calls this method before a use of the unit. It has an effect only in models of
                `megazpp.zeropp`, where a use may have to wait for votes of other ranks, but an early start does not.
        """
        crossing = self.next_crossing()
        return () if crossing == InterNodeMessage.NOTHING else (crossing,)

    @property
    def _is_current(self) -> bool:
        """True if the secondary partition holds the weights that the next use needs."""
        return self.unit.is_sharded and self.next_crossing() == InterNodeMessage.NOTHING

    def _start_cross_hop(
        self,
        crossing: InterNodeMessage,
        messages: torch.Tensor,
        shard: Callable[[], torch.Tensor],
        since: Moment = None,
    ) -> None:
        """Submit the cross-node hop to its queue, and record the fingerprint of the shards that the hop sends.

        Args:
            crossing: kind of message that the hop sends.
            messages: [N, M] uint8 secondary partition, messages of M bytes from N nodes, which the hop updates.
            shard: function that returns this rank's flat shard, S elements; the cross queue calls it.
            since: CUDA event for which the hop waits; None waits for all work on the current stream.
        """
        self._received, self._used, self._has_stepped = None, False, False
        self._made_from = self.unit.fingerprint()
        self._uncounted = 0
        if self._cross.counter.is_paused:
            # Compute this hop's bytes now, to count them when the counter runs again. The size of a lossless delta
            # depends on size counters that the previous hop receives, so wait for the previous hop.
            self._crossed.wait()
            self._uncounted = (self._cross.size - 1) * self._crossing_bytes(crossing)
        self._crossed = self._cross_queue.submit(lambda: self._take_in(crossing, messages, shard), since=since)

    def _take_in(self, crossing: InterNodeMessage, messages: torch.Tensor, shard: Callable[[], torch.Tensor]) -> None:
        """Run the cross-node hop, the all-gather between nodes, which updates the secondary partition.

        The communication queue of the cross axis calls this method; the arguments are those of `_start_cross_hop`.
        """
        self.secondary.take_in(messages, shard(), keyframe=crossing == InterNodeMessage.KEYFRAME)

    def _crossing_bytes(self, crossing: InterNodeMessage) -> int:
        """Return the bytes that this rank sends to each other node for a weight delta or a keyframe, see `crossing`."""
        return self.secondary.crossing_bytes(keyframe=crossing == InterNodeMessage.KEYFRAME)

    def _hop_inside(self, messages: torch.Tensor) -> torch.Tensor:
        """Gather the secondary partitions of the node's L ranks, and return them as [L, N, M].

        Args:
            messages: [N, M] uint8 secondary partition of this rank: messages of M bytes from N nodes.
        """
        return self._local.all_gather(messages, of=self.unit.name).view(self._local.size, *messages.shape)

    def _unpack(self, receive: Callable[[], torch.Tensor], output: torch.Tensor) -> None:
        """Unpack all ranks' messages into FSDP2's output tensor, in FSDP2's rank order.

        A transposed view of `output` changes the order of ranks, without a copy.

        Args:
            receive: function that returns the messages [L, N, M], M bytes from each of L ranks on N nodes.
            output: [N L S] tensor for the unpacked flat shards of S elements.
        """
        shards = output.view(self._cross.size, self._local.size, -1).transpose(0, 1)
        self._codec.unpack(receive(), shards)
