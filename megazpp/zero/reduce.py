"""The reduce-scatters of gradients that replace FSDP2's, in one hop and in two.

Two hops are ZeRO++'s qgZ. Between the hops, partial sums accumulate over the micro-batches of a step:

    gradients [N, L, S] --pack--> local all-to-all, sum over L --> partial sums [N, S], over all micro-batches of a step
    partial sums [N, S] --pack--> cross all-to-all, sum over N --> [S], once per optimizer step

N: nodes (cross axis); L: ranks of a node (local axis); S: elements of a flat shard. Both hops only sum, without
division. If a rank's gradient has a NaN or Inf, the sum over ranks has a NaN or Inf too.

With error feedback, the cross-node hop adds the quantization errors of earlier steps to the gradients that it
quantizes. If a step's gradients are clipped, the errors of this step are scaled by the same factor. If the optimizer
skips the step, the factor is 0.

Source: ZeRO++ (arXiv 2306.10209) section 3.3, which runs the cross-node hop in every micro-batch. The moving average of
errors is from LoCo (arXiv 2407.04480).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megazpp.kernels.block_quant import Feedback
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import CommContext, DefaultAllocMixin, ReduceScatter
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec


class SummingReduce(DefaultAllocMixin, ReduceScatter):
    """The base class of the reduce-scatters that replace FSDP2's for one sharding unit.

    A reduce-scatter sums the unit's gradients over the data ranks, and gives each rank its shard of the sum. FSDP2
    passes only the gradients that a backward has computed, and does not say to which parameters they belong. So
    `post_backward` replaces FSDP2's function of the same name, and first records which parameters have gradients.

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
    Attributes:
        reduced: indices, in the unit, of the parameters whose gradients FSDP2 passes to the reduce-scatter.
        total: sum of all elements of this rank's unreduced gradients since the last call of `watch`, a scalar tensor;
            None if there were no gradients.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        self.unit, self._schedule = unit, context.reduce_schedule
        self.reduced = tuple(range(len(unit.parameters)))
        self._fsdp2_post_backward: Callable[..., None] = lambda *_: None
        self._filling: Work[Any] = Work(None)  # task of the reduction that is filling `.grad`; a finished task if none
        # True if the last reduction has not put its result into `.grad`, so that `post_backward` must set `.grad` to
        # None. The reduction has then only added gradients to partial sums, or its result goes to host memory
        # (host_states/reduce.py)
        self._waits = False
        self._last_micro_batch = True
        self._watched = False
        self.total: torch.Tensor | None = None

    def attach(self) -> None:
        """Make FSDP2 call this object's `post_backward` for the unit instead of its own function of that name."""
        self._fsdp2_post_backward = self.unit.replace_post_backward(self.post_backward)

    def post_backward(self, *given: Any) -> None:
        """Reduce the unit's gradients after its backward. FSDP2 calls this method instead of its own function.

        The method calls FSDP2's own function, which calls this object as its reduce-scatter.

        Args:
            given: arguments of FSDP2's function.
        """
        if self.unit.reduces_gradients:
            self._filling.wait()  # a second reduction in one backward adds to `.grad`, which must be complete by then
            self.begin()
        self._fsdp2_post_backward(*given)
        if self._waits:
            # FSDP2 has set `.grad` to its output tensor: zeros if the gradients wait as partial sums, or the unit's
            # host buffer with --optimizer-cpu-offload. FSDP2 would add the output of the next reduction to this tensor.
            self.unit.clear_gradients(self.reduced)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Tell the reduction whether the next micro-batch is the last one of its training step.

        Args:
            last: True if the step's gradients are complete after this micro-batch.
        """
        self._last_micro_batch = last

    def begin(self) -> None:
        """Record in `reduced` the parameters that have gradients, which FSDP2 is about to pass to this reduction."""
        self.reduced = self.unit.with_gradient()

    def watch(self) -> None:
        """Start to add up in `total` all elements of this rank's gradients, before they are summed over ranks.

        The sum over ranks spreads a NaN or Inf to all ranks. `total` shows on which rank a NaN or Inf arises.
        """
        self._watched, self.total = True, None

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the reduce-scatter of the unit's gradients; subclasses implement this method.

        Args:
            gradients: [W n] unreduced gradients of this rank, n elements for each of the W data ranks.
            result: [n] tensor for this rank's shard of the sum over ranks.
        Returns:
            A task that returns `result` when the sum is complete. None if `gradients` are only added to partial sums,
            which the call for a later micro-batch reduces.
        """
        raise NotImplementedError

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum the gradients `input_tensor` over ranks into `output_tensor`; FSDP2 calls this as its reduce-scatter.

        With overlap, the sum is complete only at the end of the backward. If FSDP2 makes `.grad` a view of
        `output_tensor`, the reduction fills that tensor until then. If FSDP2 would add the output to an existing
        `.grad`, the output is zeros, and the sum is added to `.grad` at the end of the backward.
        """
        assert op == dist.ReduceOp.SUM, f"collectives of gradients support only SUM, but FSDP2 asked for {op}"
        # ---- add up the elements of this rank's gradients, if `watch` was called
        if self._watched:
            # A maximum would show a NaN or Inf too, but takes 16 times as long on the CPU as a sum in the same dtype.
            total = input_tensor.sum()
            self.total = total if self.total is None else self.total + total
        self.reduce(input_tensor, output_tensor)

    def reduce(self, gradients: torch.Tensor, output: torch.Tensor) -> None:
        """Sum `gradients` over W ranks into `output`, or start this sum if reductions overlap; see `__call__`.

        Args:
            gradients: [W n] unreduced gradients of this rank, n elements for each of the W data ranks.
            output: [n] tensor for this rank's shard of the sum.
        """
        # ---- start the reduction. If the reduction may still run when FSDP2 reads `output`, the result is a separate
        # tensor, and FSDP2 reads zeros
        overlap, result = self._schedule.overlap, output
        fills = overlap and self.fills(output)
        late = overlap and not fills
        if late:
            result = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        work = self.start(gradients, result)
        self._waits = work is None
        if work is None or late:
            output.zero_()
        # ---- wait for the reduction now, or with overlap at the end of the backward. If `work` is None, the gradients
        # were only added to partial sums, which the last micro-batch of the step reduces
        if work is None:
            return
        if not overlap:
            work.wait()
        elif fills:
            self._filling = work
            self._schedule.finish_later(work, self._filled)
        else:
            self._finish_later(work, result)

    def fills(self, output: torch.Tensor) -> bool:
        """Return True if FSDP2 will make `.grad` a view of `output`.

        The reduction may then fill `output` until the backward ends. Otherwise FSDP2 reads `output` at once, to cast it
        to fp32 or to add it to an existing `.grad`.
        """
        return output.dtype == torch.float32 and not self.unit.has_gradients(self.reduced)

    def _filled(self) -> None:
        """Drop the finished task that has filled `.grad`, because a reference to it keeps gradients in memory."""
        self._filling = Work(None)

    def _finish_later(self, work: Work[torch.Tensor], result: torch.Tensor) -> None:
        """Wait for a running reduction at the end of the backward, and add its result to the unit's gradients.

        Args:
            work: task that completes `result`.
            result: [n] this rank's shard of the gradients, summed over ranks; n: its number of elements.
        """
        self._schedule.finish_later(work, functools.partial(self.unit.add_to_gradients, result, self.reduced))


class CountedReduce(SummingReduce):
    """The reduce-scatter of a unit's gradients in one hop over the shard axis, like FSDP2's own.

    The traffic counter counts the bytes that this reduce-scatter sends.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        super().__init__(unit, context)
        self.axis, self._queue = context.shard, context.shard_queue

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor]:
        """Start the reduce-scatter of the unit's gradients in the communication queue of the shard axis.

        See `SummingReduce.start` for arguments and result.
        """
        work = self._queue.submit(lambda: self.axis.reduce_scatter(gradients, out=result, of=self.unit.name))
        self._schedule.sent(work)
        return work


class TwoHopReduce(SummingReduce):
    """The reduce-scatter of one unit's gradients in two hops, inside the node and across nodes, instead of FSDP2's.

    With L ranks per node, FSDP2's rank in the data mesh is cross rank x L + local rank. The layout of a message depends
    on the parameters whose gradients FSDP2 passes, and must be equal on all ranks. So a trained parameter without a
    gradient contributes zeros.

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
    Attributes:
        kept_errors: error feedback of the cross-node hop; None before its first use, and if error feedback is off.
            During a backward, only tasks of the cross queue access it.
    """

    def __init__(self, unit: Unit, context: CommContext) -> None:
        super().__init__(unit, context)
        plan, zero = context.plan.reduce, context.zero
        assert plan is not None
        self._plan, self._dtype, self._codec = plan, context.precision.reduce_dtype, context.codec
        self._cross, self._local = context.cross, context.local
        self._cross_queue, self._local_queue = context.cross_queue, context.local_queue
        self._feedback, self._beta = zero.zero_error_feedback, zero.zero_error_feedback_beta
        self._every_micro_batch = zero.zero_cross_every_microbatch
        self._partial_dtype = torch.bfloat16 if zero.zero_accumulate_in_bf16 else torch.float32
        self._codecs: dict[tuple[tuple[int, ...], torch.dtype], tuple[Codec, Codec]] = {}
        # Gradients that wait for the step's last micro-batch, summed over the node's ranks and the micro-batches so
        # far: [N, S], S elements for each of N nodes. None if no gradients wait. Only tasks of the local queue use
        # them.
        self._partial_sums: torch.Tensor | None = None
        self.kept_errors: Feedback | None = None

    @property
    def crosses(self) -> bool:
        """True if the cross-node hop runs in this micro-batch, False if the gradients then wait as partial sums."""
        return self._every_micro_batch or self._last_micro_batch

    def begin(self) -> None:
        """Give zeros to trained parameters without a gradient, and record which gradients FSDP2 will reduce.

        All ranks then reduce the gradients of the same parameters, so their messages have the same layout.
        """
        self.unit.list_once()
        self.unit.fill_gradients(self.unit.trained)
        super().begin()

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the intra-node hop, and if `crosses` is True also the cross-node hop.

        See `SummingReduce.start` for arguments and result.
        """
        keep, (inside, across) = not self.crosses, self._codecs_of(self.reduced)
        sums = self._local_queue.submit(functools.partial(self._hop_inside, gradients, inside, keep=keep))
        self._schedule.sent(sums)
        if keep:
            return None
        return self._cross_queue.submit(functools.partial(self._hop_across, sums, across, result), after=(sums,))

    def _hop_inside(self, gradients: torch.Tensor, codec: Codec, *, keep: bool) -> torch.Tensor:
        """Run the intra-node hop, and return the partial sums [N, S] over the node's ranks.

        Args:
            gradients: [N L S] unreduced gradients of one micro-batch, in FSDP2's rank order: S elements for each of the
                L ranks of N nodes.
            codec: codec of the messages inside the node.
            keep: True if later micro-batches of the step add to the returned sums, False if the cross-node hop follows.
        """
        num_nodes, num_local, device = self._cross.size, self._local.size, gradients.device
        sent = codec.empty(num_local, num_nodes, device=device)
        codec.pack(gradients.view(num_nodes, num_local, -1).transpose(0, 1), sent)
        received = self._local.all_to_all(sent, of=self.unit.name)  # [L, N, M]: N messages from each of L ranks
        sums, accumulate = self._partial_sums, self._partial_sums is not None
        if sums is None:
            sums = torch.empty(num_nodes, codec.layout.size, dtype=self._partial_dtype, device=device)
        codec.unpack_sum(received, sums, accumulate=accumulate)
        self._partial_sums = sums if keep else None
        return sums

    def _hop_across(self, inside: Work[torch.Tensor], codec: Codec, result: torch.Tensor) -> torch.Tensor:
        """Run the cross-node hop: sum the partial sums of all nodes into `result`, and return it.

        Args:
            inside: task of the intra-node hop, which returns the partial sums [N, S], S elements for each of N nodes.
            codec: codec of the messages between nodes.
            result: [S] tensor for this rank's shard of the gradients, summed over all ranks.
        """
        partial_sums = inside.join()
        sent = codec.empty(self._cross.size, device=result.device)
        codec.pack(partial_sums, sent, errors=self.errors(result.device), beta=self._beta)
        received = self._cross.all_to_all(sent, of=self.unit.name)  # [N, M]: one message from each of N nodes
        codec.unpack_sum(received.unsqueeze(1), result.unsqueeze(0), accumulate=False)
        return result

    def errors(self, device: torch.device) -> Feedback | None:
        """Return the error feedback of the cross-node hop, whose quantization errors are on `device`.

        The first call allocates the error feedback. The result is None if error feedback is off, or if the hop
        quantizes no gradient. Outside the cross queue, call this method only while no backward is running.
        """
        if self._feedback and self.kept_errors is None:
            _, across = self._codecs_of(self.unit.trained)
            self.kept_errors = across.new_errors(self._cross.size, device=device)
        return self.kept_errors

    @property
    def message_bytes(self) -> tuple[int, int]:
        """The sizes in bytes of the two messages that carry one flat shard: inside a node, and across nodes.

        These sizes hold for a backward in which all trained parameters get gradients.
        """
        inside, across = self._codecs_of(self.unit.trained)
        return inside.layout.message_bytes, across.layout.message_bytes

    def warm_up(self, device: torch.device) -> None:
        """Compile the kernels of both hops for `device`, by packing and summing zeros in temporary tensors.

        No rank communicates, and neither partial sums nor error feedback change. A unit without trained parameters
        needs no kernels.
        """
        if not self.unit.trained:
            return
        # ---- compile the kernels of the intra-node hop by calling them with zeros
        nodes, peers = self._cross.size, self._local.size
        inside, across = self._codecs_of(self.unit.trained)
        size = inside.layout.size
        gradients = torch.zeros(nodes, peers, size, dtype=inside.dtype, device=device)
        messages = inside.empty(peers, nodes, device=device)
        inside.pack(gradients.transpose(0, 1), messages)
        sums = torch.zeros(nodes, size, dtype=self._partial_dtype, device=device)
        for accumulate in (False,) if self._every_micro_batch else (False, True):
            inside.unpack_sum(messages, sums, accumulate=accumulate)
        # ---- compile the kernels of the cross-node hop by calling them with zeros
        sent = across.empty(nodes, device=device)
        errors = across.new_errors(nodes, device=device) if self._feedback else None
        across.pack(sums, sent, errors=errors, beta=self._beta)
        across.unpack_sum(sent.unsqueeze(1), gradients[0, :1], accumulate=False)

    def _codecs_of(self, indices: tuple[int, ...]) -> tuple[Codec, Codec]:
        """Return two codecs for messages of gradients: one for the intra-node hop, and one for the cross-node hop.

        Args:
            indices: indices, in the unit, of the parameters whose gradients the messages carry.
        """
        key = indices, self._dtype
        if key not in self._codecs:
            segments = self.unit.segments_of(indices)
            # The intra-node hop sends unquantized gradients in FSDP2's reduction dtype, the cross-node hop in the dtype
            # in which partial sums are stored.
            inside = self._codec(segments, self._plan.local, self._dtype)
            self._codecs[key] = inside, self._codec(segments, self._plan.cross, self._partial_dtype)
        return self._codecs[key]
