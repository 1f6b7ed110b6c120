"""The all-gathers of weights that replace FSDP2's: in one hop, and in two hops with a kept secondary partition.

Two hops are ZeRO++'s qwZ and hpZ:

    shard [S] --pack--> cross all-gather --> secondary [N, M] --> local all-gather --> [L, N, M] --unpack--> [N, L, S]

N: nodes (cross axis); L: ranks of a node with the same tensor-parallel index (local axis); S: elements of a flat shard;
M: bytes of its message.

The secondary partition (hpZ) consists of the messages that the cross-node hop has received. Until the weights change,
each later use in forward or backward repeats only the intra-node hop and gathers the same bits.
DeepSpeed instead quantizes again for the backward. Source: ZeRO++ (arXiv 2306.10209) sections 3.1 and 3.2.

A use of a sharding unit is a call of its all-gather by FSDP2. Each rank decides by itself what the next use of a unit
sends between nodes. The decision depends only on values that are equal on all ranks:

    nothing         the shards are unchanged since they were sent
    a weight delta  only an optimizer step has changed the shards, and nodes keep resident weights
    a keyframe      whole weights, at the first use and after every other possible write to the shards

In programs that use `megazpp.zeropp` ranks may decide differently, so they vote first (drop_in/writes.py).

Two classes store the secondary partition in different ways:

    Secondary    messages [N, M] uint8, as received in the cross-node hop
    Resident     resident weights R [N, S] in the compute dtype, with the same bits on every node

With resident weights, nodes send changes as weight deltas d from R. Let w be a rank's flat shard [S] and `me` its node.
Each rank applies the weight delta of every node n, including its own:

    lossless     d encodes how R[me] becomes w, bit for bit (kernels/weight_delta); R[n] becomes w of node n
    4 bits       d = w - R[me], quantized; R[n] becomes round(R[n] + d[n])

So a change that was left out or rounded off is part of the next weight delta. 4-bit deltas are for the outer weights of
DiLoCo (diloco/outer.py). A keyframe replaces R[n] by w of node n. Keyframes are sent at the first use, and after
changes that are not an optimizer step.

R is a view of the elements in a keyframe's messages, which the intra-node hop sends. For a model of P parameters, R
takes 2 P / L bytes on each rank, because the L ranks of a node share 2 bytes per weight. Source of 4-bit deltas:
SDP4Bit (arXiv 2410.15526), which keeps all weights on each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Moment, Work
from megazpp.zero.comms import AllGather, CommContext, DefaultAllocMixin
from megazpp.zero.units import Fingerprint, Unit
from megazpp.zero.wire import Codec, LosslessCodec


class Pending(dist.Work):
    """The handle of a running all-gather, for which FSDP2 waits before it uses the gathered parameters.

    The class derives from `dist.Work`, because FSDP2 silently ignores handles of other classes.

    Args:
        work: task of a communication queue that completes the all-gather.
    """

    def __init__(self, work: Work[Any]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the gathered parameters are complete; return True, as FSDP2 expects. `timeout` is ignored."""
        self._work.wait()
        return True


class CountedGather(DefaultAllocMixin, AllGather):
    """The all-gather of a unit's weights in one hop over the shard axis, like FSDP2's own.

    The result is a tensor [W n] with the flat shards of the W ranks of the shard axis, n elements each. The traffic
    counter counts the bytes that this all-gather sends.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.axis, self._queue, self._of = context.shard, context.shard_queue, unit.name
        self._overlap = context.overlap_gather

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        """Gather `input_tensor`, n elements from each of W ranks, into `output_tensor` [W n]; FSDP2 calls this.

        Returns a handle that FSDP2 waits for, if gathers overlap with the compute on the CPU. Otherwise returns None:
        the parameters are complete, or on CUDA FSDP2's gather stream waits for them.
        """
        done = self._queue.submit(lambda: self.axis.all_gather(input_tensor, out=output_tensor, of=self._of))
        if self._overlap and self._queue.blocks_host:
            return Pending(done)
        # On CUDA, wait() makes FSDP2's gather stream wait. Returning a Work would make the compute stream wait instead.
        done.wait()
        return None


class InterNodeMessage(IntEnum):
    """The kind of message that the next use of a sharding unit sends between nodes.

    The kinds are no message, a weight delta, and a keyframe with whole weights. Checkpoints store a kind by its number,
    so the numbers must not change.
    """

    NOTHING = 0
    # A weight delta. In models of `megazpp.zeropp` without weight deltas, this kind sends the weights of the unit's
    # parameters that require a gradient, but no frozen parameters.
    DIFFERENCE = 1
    KEYFRAME = 2


class TwoHopGather(DefaultAllocMixin, AllGather):
    """The all-gather of one unit's weights in two hops, across nodes and inside the node, which replaces FSDP2's.

    With L ranks per node, FSDP2's rank in the data mesh is cross rank x L + local rank. To detect changed weights, each
    use compares the unit's fingerprint (`Unit.fingerprint`) with its fingerprint at the last cross-node hop.
    All ranks run the same program, so a write to the weights changes the fingerprints on all ranks.

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
    Attributes:
        secondary: object of the unit's secondary partition, which runs the cross-node hop and stores the received
            weights.
        crossing_key: key under which a checkpoint stores the kind of message that the unit's next use sends between
            nodes.
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
        # Fingerprint of the shards right after the last optimizer step; None before the first step, and if code other
        # than the optimizer has written to the shards since the last step
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
        """Forget that the unit's weights were sent between nodes, so that its next use sends whole weights, no delta.

        Call this method on all ranks after code other than the optimizer has changed the weights, for example by
        loading a checkpoint.
        """
        self._made_from = self._received = self._after_step = None

    def before_step(self) -> None:
        """Start all cross-node hops that the last step's weights still need, and detect writes to the unit's weights.

        Call this method on all ranks before an optimizer step. If the program has written to the weights since they
        were sent, or if the unit is still gathered, the next use sends whole weights instead of a weight delta.
        """
        # Units that no forward has used since the last optimizer step have not sent that step's weight deltas. Send the
        # deltas now, so that the resident weights depend only on the steps, not on which units a forward has used.
        self._schedule.start_stale()
        if not self.unit.is_sharded or self._made_from != self.unit.fingerprint():
            self.drop()

    def after_step(self) -> None:
        """Record that an optimizer step has changed the unit's weights; call this method after the step on all ranks.

        If nodes exchange weight deltas, the unit's next use sends a weight delta, or nothing if the unit is frozen. The
        next use sends whole weights if nodes exchange no weight deltas, or if it had to send whole weights before the
        step too.
        """
        if not self.secondary.sends_differences or self._made_from is None:
            self.drop()
        elif not self.unit.is_frozen:
            self._made_from, self._has_stepped, self._received = self.unit.fingerprint(), True, None
        self._schedule.forget_stale()
        if self.unit.is_sharded:
            self._after_step = self.unit.fingerprint()

    def next_crossing(self) -> InterNodeMessage:
        """Return the kind of message that the unit's next use sends between nodes: none, a weight delta or a keyframe.

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
            output_tensor: [N L S] tensor for the gathered flat shards, S elements from each of the L ranks of N nodes.
            input_tensor: [S] flat shard of this rank.
            group: FSDP2's process group, which is not used.
            async_op: ignored.
        Returns:
            A handle that FSDP2 waits for, if gathers overlap with the compute on the CPU. Otherwise None: the
            parameters are complete, or on CUDA FSDP2's gather stream waits for them.
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
            # `start_early` reads the shard without FSDP2. Before its first use, check that it would read the values
            # that FSDP2 passes to the all-gather.
            if starts_early and not self._compared:
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

        # ---- start other units' hops; if this unit keeps no secondary partition, free its received messages instead
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
        """Return zeros in the compute dtype, one per element of a flat shard.

        checkpoint/state.py loads this rank's row of the resident weights into the result, and passes it to `restore`.
        """
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

        The hop starts only after the unit's first use, if the weights have changed and the unit is sharded. Without
        weight deltas there are two more conditions: overlap is on, and FSDP2 has gathered the unit since its last
        cross-node hop. With weight deltas, neither of these two is required. So the resident weights, to which weight
        deltas are added, depend only on the optimizer's steps, not on which units a forward has used between two steps.

        Args:
            since: CUDA event, recorded after the last optimizer step, for which the hop waits. If the weights were
                written to after that step, the hop waits for all work on the current stream instead.
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
        """Wait for the unit's last cross-node hop, and return `secondary`, the object with the unit's resident weights.

        Call this method only if nodes exchange the unit's weights as weight deltas, which change the resident weights.
        """
        self._crossed.wait()
        assert isinstance(self.secondary, Resident)
        return self.secondary

    def lossless(self) -> LosslessCodec:
        """Wait for the last cross-node hop, and return the unit's codec of lossless deltas.

        The codec's attribute `recent` then includes the size of the last delta.
        """
        differences = self.resident().differences
        assert isinstance(differences, LosslessCodec)
        differences.read_counters()
        return differences

    def restore(self, row: torch.Tensor, crossing: InterNodeMessage) -> None:
        """Restore the unit's resident weights, to which weight deltas are added, from a checkpoint.

        Call this method on all ranks while the unit is sharded.

        Args:
            row: [S] this rank's row of the resident weights, S elements, as read from the checkpoint.
            crossing: kind of message that the unit's next use had to send when the checkpoint was saved.
        """
        secondary = self.resident()
        messages = secondary.messages if secondary.messages is not None else secondary.allocate(row.device)
        self._crossed = self._cross_queue.submit(functools.partial(secondary.take_in, messages, row, keyframe=True))
        self._crossed.wait()
        self._made_from, self._received = self.unit.fingerprint(), None
        self._has_stepped = crossing == InterNodeMessage.DIFFERENCE

    def _crossings(self, *, early: bool = False) -> Iterable[InterNodeMessage]:
        """Return the kinds of the messages that this unit must send between nodes now; empty if it must send none.

        A kind is a weight delta or a keyframe with whole weights. The result is the same on all ranks.

        Args:
            early: True if `start_early` calls this method before a use of the unit. The argument has an effect only in
                models of `megazpp.zeropp`: there a use outside of a forward first makes the ranks vote on the unit, but
                an early start does not.
        """
        crossing = self.next_crossing()
        return () if crossing == InterNodeMessage.NOTHING else (crossing,)

    @property
    def _is_current(self) -> bool:
        """True if the unit is sharded, and its next use needs no cross-node hop because its weights are unchanged."""
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

        The communication queue of the cross axis calls this method.

        Args:
            crossing: kind of message that the hop sends, a weight delta or a keyframe.
            messages: [N, M] uint8 secondary partition, messages of M bytes from N nodes, updated in place.
            shard: function that returns this rank's flat shard.
        """
        self.secondary.take_in(messages, shard(), keyframe=crossing == InterNodeMessage.KEYFRAME)

    def _crossing_bytes(self, crossing: InterNodeMessage) -> int:
        """Return the bytes that this rank sends to each other node in a message of the kind `crossing`.

        `crossing` is a weight delta or a keyframe.
        """
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


class Secondary:
    """The secondary partition (hpZ) of a sharding unit, stored as the messages of all nodes.

    `take_in` runs in the communication queue of the cross axis.

    Args:
        codec: codec that packs a flat shard into the message that both hops send.
        cross: axis across nodes.
        of: name of the unit, for the timeline of collectives.
    Attributes:
        messages: [N, M] uint8 messages of M bytes from N nodes, which the intra-node hop sends; None before `allocate`
            and after `free`.
    """

    sends_differences = False

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str) -> None:
        self.codec, self.cross, self._of = codec, cross, of
        self.messages: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Allocate `messages` with zeros on `device`, and return it: [N, M] uint8, M bytes for each of N nodes."""
        # Leave inference mode, in which an evaluation may call this method: training could not write to inference
        # tensors.
        with torch.inference_mode(False):
            self.messages = self.codec.empty(self.cross.size, device=device)
        return self.messages

    def free(self) -> None:
        """Free the received messages of the secondary partition; the unit's next use allocates them again."""
        self.messages = None

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        """Run the cross-node hop: send this rank's weights, and update `messages` to the weights of all nodes.

        Args:
            messages: [N, M] uint8 secondary partition, messages of M bytes from N nodes.
            shard: [S] flat shard of S elements with this rank's current weights.
            keyframe: True to send whole weights, False to send a weight delta; the same on all ranks. This class always
                sends whole weights.
        """
        self.codec.pack(shard, messages[self.cross.rank])
        self._exchange(messages)

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Return the bytes that this rank sends to each other node in one cross-node hop.

        Args:
            keyframe: True for a hop that sends whole weights, False for a hop that sends a weight delta. This class
                ignores the argument, because it always sends whole weights.
        """
        return self.codec.message_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes that the unit's secondary partition takes on this rank when it is allocated."""
        return self.cross.size * self.codec.message_bytes

    def warm_up(self, shard: torch.Tensor) -> None:
        """Compile the kernels that the cross-node hop needs to send the flat shard `shard`; no rank communicates."""
        self.codec.pack(shard, self.codec.empty(self.cross.size, device=shard.device)[self.cross.rank])

    def _exchange(self, messages: torch.Tensor) -> None:
        """All-gather `messages` between nodes in place: this rank sends one row and receives all other rows.

        Args:
            messages: [N, M] uint8, one row of M bytes for each of N nodes.
        """
        self.cross.all_gather(messages[self.cross.rank].unsqueeze(0), out=messages, of=self._of)


class Resident(Secondary):
    """The secondary partition (hpZ) of a sharding unit, stored as resident weights R, which weight deltas update.

    `take_in` runs in the communication queue of the cross axis.

    Args:
        codec: codec that packs whole weights without quantization; R is a view of the messages of this codec.
        cross: axis across nodes.
        of: name of the unit, for the timeline of collectives.
        differences: codec that packs weight deltas into the messages that cross nodes.
    """

    sends_differences = True

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str, differences: Codec | LosslessCodec) -> None:
        super().__init__(codec, cross, of=of)
        self.differences = differences

    @property
    def weights(self) -> torch.Tensor:
        """The resident weights [N, S], a flat shard of S elements from each of N nodes: a view of `messages`.

        `messages` must be allocated.
        """
        assert self.messages is not None, "the resident weights are not allocated: call allocate() first"
        return self.codec.elements(self.messages)

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        """Run the cross-node hop, which updates R, the resident weights of all nodes.

        See `Secondary.take_in` for the arguments. This rank sends its whole weights if `keyframe` is True, otherwise a
        weight delta.
        """
        if keyframe:
            self.weights[self.cross.rank].copy_(shard)
            self._exchange(messages)
            return
        sent = self._add(shard, self.weights, self._exchange)
        if isinstance(self.differences, LosslessCodec):
            self.differences.learn(sent)

    def warm_up(self, shard: torch.Tensor) -> None:
        """Compile the kernels that pack and apply weight deltas of the flat shard `shard`, with temporary tensors.

        No rank communicates.
        """
        weights = self.codec.elements(self.codec.empty(self.cross.size, device=shard.device))
        self._add(shard, weights, lambda sent: None)

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Return the bytes that this rank sends to each other node in a cross-node hop.

        Args:
            keyframe: True for a hop that sends whole weights, False for a hop that sends a weight delta.
        """
        return (self.codec if keyframe else self.differences).message_bytes

    def _add(
        self, shard: torch.Tensor, weights: torch.Tensor, exchange: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Send this rank's weight delta, and apply the weight deltas of all nodes to `weights`.

        Args:
            shard: [S] flat shard of S elements with this rank's current weights.
            weights: [N, S] resident weights of N nodes, updated in place.
            exchange: function that all-gathers messages [N, M], M bytes from each node, between nodes in place.
        Returns:
            The messages [N, M] with the weight deltas of all nodes.
        """
        sent = self.differences.empty(self.cross.size, device=shard.device)
        self.differences.pack(shard, sent[self.cross.rank], base=weights[self.cross.rank])
        exchange(sent)
        self.differences.unpack_onto(sent, weights)
        return sent
