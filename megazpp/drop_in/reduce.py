"""The reduce-scatters of models of `megazpp.zeropp`, after which `.grad` is as in plain FSDP2.

A program may divide gradients (`set_gradient_divide_factor`), clear them, and end a backward by an exception. It may
also leave parameters without a gradient, on some ranks or on all. If no rank has a gradient of a parameter, plain FSDP2
leaves the parameter's `.grad` None. Messages must have the same layout on all ranks, so `RestoringReduce` sends zeros
for a missing gradient. With the gradients it sends one flag per parameter, which says whether the rank had a gradient.
If no rank had one, `.grad` becomes None again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from megazpp.drop_in.accumulate import Accumulation
from megazpp.drop_in.units import ProgramUnit
from megazpp.kernels.block_quant import Feedback
from megazpp.kernels.formats import align
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import CommContext, ReduceSchedule, in_backward
from megazpp.zero.reduce import CountedReduce, SummingReduce, TwoHopReduce
from megazpp.zero.wire import Codec, Segment


class InterruptibleSchedule(ReduceSchedule):
    """A schedule of gradient reductions for programs in which an exception may end a backward.

    Attributes:
        interrupted: True while the schedule finishes reductions of a backward that an exception has ended.
    """

    interrupted = False

    def finish_interrupted(self) -> None:
        """Finish reductions that are still in flight because an exception has ended their backward.

        Autograd calls `end_backward` only at the regular end of a backward. Without such reductions, do nothing.
        """
        if self._finishing and self._running() is None:
            self.interrupted = True
            try:
                self.end_backward()
            finally:
                self.interrupted = False


class ProgramContext(CommContext):
    """The axes, queues, schedules and formats that the collectives of a model of `megazpp.zeropp` share.

    See `CommContext` for the arguments and the other attributes.

    Attributes:
        accumulation: partial sums of gradients that wait inside `Handle.accumulate`.
    """

    def __init__(self, cross: MeshAxis, local: MeshAxis, shard: MeshAxis, **settings: Any) -> None:
        super().__init__(cross, local, shard, **settings)
        self.accumulation = Accumulation()
        self.reduce_schedule: InterruptibleSchedule = InterruptibleSchedule(
            overlap=self.overlap_reduce, blocks_host=shard.queue.blocks_host
        )


class LateSum:
    """A unit's gradients, summed over ranks, which are added to `.grad` at the end of the backward.

    Until then the reduction overlaps with the backward, and FSDP2 gets zeros as the result of its reduce-scatter.

    Args:
        indices: indices in the unit of the parameters whose gradients were reduced.
        result: flat shard (1-D) with this rank's part of the sum, valid when the task of the reduction is done.
        divisor: number by which FSDP2 divides sums of gradients.
    Attributes:
        gradients: `.grad` of each parameter, as FSDP2 has set it. If `.grad` is another object at the end of the
            backward, the program has discarded the gradient.
        versions: version counters of these gradients when FSDP2 had set them.
    """

    def __init__(self, indices: Sequence[int], result: torch.Tensor, divisor: float) -> None:
        self.indices, self.result, self.divisor = tuple(indices), result, divisor
        self.gradients: list[Any] = [None] * len(self.indices)
        self.versions = [-1] * len(self.indices)

    def hold(self, unit: ProgramUnit) -> None:
        """Record the unit's gradients (`.grad`) and their version counters, right after FSDP2 has set them."""
        self.gradients = [unit.gradient(index) for index in self.indices]
        self.versions = [-1 if gradient is None else gradient._version for gradient in self.gradients]

    def add(self, unit: ProgramUnit, *, interrupted: bool) -> None:
        """Add the sum over ranks to the unit's gradients, except gradients that the program has discarded.

        Args:
            unit: sharding unit of the gradients.
            interrupted: True if an exception has ended the backward. The program may then have cleared a gradient in
                place, so this method also skips a gradient with a changed version counter.
        """
        result = self.result if self.divisor == 1.0 else self.result.div_(self.divisor)
        wanted = list(self.gradients)
        for i, (index, gradient) in enumerate(zip(self.indices, self.gradients, strict=True)):
            changed = interrupted and gradient is not None and gradient._version != self.versions[i]
            if changed or unit.gradient(index) is not gradient:
                wanted[i] = None
        unit.add_to_gradients(result, self.indices, wanted)


class ProgramReduce(SummingReduce):
    """The base class of the reduce-scatters in a model of `megazpp.zeropp`, in one hop and in two hops.

    With overlap, sums over ranks are added to `.grad` at the end of a backward. FSDP2's settings are read at each use,
    because the program may change them.
    """

    unit: ProgramUnit
    _schedule: InterruptibleSchedule

    def __init__(self, unit: ProgramUnit, context: ProgramContext) -> None:
        super().__init__(unit, context)
        self._group = context.shard.group
        # The gradient sum of the unit that will be added to `.grad` at the end of the backward. It is set while FSDP2's
        # own `post_backward` runs, until `end` has recorded the `.grad`s to which the sum will be added; otherwise None
        self._late: LateSum | None = None
        self._late_sums = 0  # number of `LateSum`s that were not added to `.grad` yet

    def post_backward(self, *given: Any) -> None:
        """Reduce the unit's gradients after its backward, by calling FSDP2's own function of this name.

        FSDP2 calls this method instead; see `SummingReduce.post_backward`. If the unit reduces no gradients in this
        backward, only FSDP2's function runs.

        Raises:
            RuntimeError: the method is called outside of a backward.
        """
        if not in_backward():
            raise RuntimeError(
                f"{self.unit.name} reduces its gradients outside of a backward, where ZeRO++ cannot complete them: "
                "remove the call of set_manual_backward_finalization"
            )
        if not self.unit.reduces_gradients:
            self._fsdp2_post_backward(*given)
            return
        self._schedule.finish_interrupted()
        self.unit.force_sums()
        self.unit.fill_gradients(self.unit.zero_filled)  # `begin` must see all gradients that FSDP2 will pass
        self.begin()
        try:
            self._fsdp2_post_backward(*given)
        finally:
            self.end()

    def fills(self, output: torch.Tensor) -> bool:
        """Return False: FSDP2 must not make `.grad` a view of the output of a reduction that is still in flight.

        A program may read or change `.grad` during the backward. See `SummingReduce.fills`.
        """
        return False

    def end(self) -> None:
        """Record the `.grad`s that FSDP2 has just set, if the gradient sum over ranks will be added to them later.

        `post_backward` calls this method after FSDP2's own function.
        """
        if self._late is not None:
            self._late.hold(self.unit)
            self._late = None

    def finished(self) -> None:
        """Do nothing; `RestoringReduce` sets some `.grad`s to None here, after gradient sums were added to `.grad`."""

    def _finish_later(self, work: Work[torch.Tensor], result: torch.Tensor) -> None:
        """Let the end of the backward wait for a reduction, and add its result to the unit's gradients.

        FSDP2 divides the zeros that it gets instead of this result. So the result is divided when it is added.

        Args:
            work: task of the reduction, which completes `result`.
            result: [n] this rank's shard of the gradients, summed over ranks; n: its number of elements.
        """
        self.unit.refuse_gradient_hooks()
        late = self._late = LateSum(self.reduced, result, self._division_after_sum(result))
        self._late_sums += 1

        def finish() -> None:
            """Add the unit's gradients, summed over ranks, to `.grad`; runs at the end of the backward."""
            self._late_sums -= 1
            late.add(self.unit, interrupted=self._schedule.interrupted)
            self.finished()

        self._schedule.finish_later(work, finish)

    def _division_after_sum(self, reduced: torch.Tensor) -> float:
        """Return the number by which FSDP2 would divide the sum of gradients `reduced`, given its dtype and device."""
        factor, device = self.unit.gradient_divide_factor, reduced.device.type
        if factor == 1.0:
            return factor
        assert self._group is not None, "the shard axis has one rank, so there is no sum over ranks to divide"
        _, after, *_ = _get_gradient_divide_factors(self._group, None, reduced.dtype, device, factor, True)
        return 1.0 if after is None else after


class ProgramRingReduce(ProgramReduce, CountedReduce):
    """The reduce-scatter of a unit's gradients in one hop, in a model of `megazpp.zeropp`."""


class UnusedParameters:
    """The parameters of a unit for which no rank had a gradient, so that their `.grad` must become None again.

    ZeRO++ sends zeros for missing gradients, so FSDP2 sets `.grad` of such parameters to zeros.
    """

    def __init__(self, unit: ProgramUnit) -> None:
        self._unit = unit
        # `begin` and `read_later` record reductions in `_fresh`, `_used` and `_flags`. After the last reduction of a
        # backward, `restore_none` reads and empties these records, so that later reductions begin new ones.
        self._fresh: set[int] = set()  # indices of the parameters whose `.grad` was None when a reduction began
        # Indices of the parameters for which this rank has had a gradient since `.grad` was last None
        self._used: set[int] = set()
        # For each reduction: indices of its P parameters, and flags [P] uint8, which are 1 if any rank had a
        # gradient of the parameter
        self._flags: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []

    def begin(self, used: set[int], reduced: Iterable[int]) -> None:
        """Record which parameters have no `.grad`, and for which this rank has had a gradient since `.grad` was None.

        Call this method before FSDP2 reduces the unit's gradients.

        Args:
            used: indices of the parameters that have a gradient on this rank.
            reduced: indices of the parameters whose gradients are reduced. The gradients of parameters that are not in
                `used` are zeros.
        """
        cleared = {index for index in reduced if self._unit.gradient(index) is None}
        self._fresh |= cleared
        self._used = self._used - cleared | used

    def read_later(self, indices: tuple[int, ...], flags: list[torch.Tensor]) -> None:
        """Register a list to which a reduction will append one tensor of flags, which `restore_none` reads.

        Args:
            indices: indices of the P parameters whose gradients are reduced.
            flags: list for the flags, [P] uint8: 1 if any rank had a gradient of the parameter.
        """
        self._flags.append((indices, flags))

    def restore_none(self) -> None:
        """Set `.grad` to None for parameters without a gradient on any rank.

        Call this method after FSDP2 has set `.grad`, and after the flags of all reductions have arrived. If this rank
        itself had no gradient of one of the parameters, the host must read the flags, and waits until the device has
        computed them. Otherwise the host does not wait.
        """
        unused = self._fresh - self._used
        if unused:
            for indices, flags in self._flags:
                for flag in flags:
                    unused -= {index for index, on in zip(indices, flag.tolist(), strict=True) if on}
            self._unit.clear_gradients(unused)
        self._fresh, self._used, self._flags = set(), set(), []


class NodeSums(NamedTuple):
    """A node's partial sums of a unit's gradients, which wait for the cross-node hop inside `Handle.accumulate`."""

    indices: tuple[int, ...]  # indices, in the sharding unit, of the P parameters whose gradients are in `sums`
    sums: torch.Tensor  # [N, S] partial sums for the flat shards of N nodes, S elements each
    flags: torch.Tensor  # [N, P] uint8: 1 if any rank of this node had a gradient of the parameter


class RestoringReduce(ProgramReduce, TwoHopReduce):
    """The reduce-scatter of a unit's gradients in two hops, in a model of `megazpp.zeropp`.

    After a backward, `.grad` has the same shards and dtype as in plain FSDP2, and adds up over backwards in the same
    way. Inside `Handle.accumulate`, each node instead keeps partial sums of gradients until the cross-node hop.
    Messages have the same layout on all ranks, so two kinds of parameters without a gradient contribute zeros:

        trained parameters            if the unit is gathered, or was gathered since its last reduction
        parameters in `waiting`       in the same case, and in each backward that sends gradients across nodes

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
        num_uses: function that returns how often the unit was gathered so far, the same number on every rank.
    Attributes:
        waiting: indices of the parameters whose partial sums wait for the cross-node hop, the same on all ranks.
    """

    def __init__(self, unit: ProgramUnit, context: ProgramContext, num_uses: Callable[[], int]) -> None:
        super().__init__(unit, context)
        self._num_uses, self._uses_before = num_uses, 0
        self.waiting: tuple[int, ...] = ()
        # Partial sums of earlier backwards inside `Handle.accumulate`, None if there are none. Only tasks of the local
        # queue access them.
        self._node_sums: NodeSums | None = None
        # From `begin` to `end` of a reduction inside `Handle.accumulate`: the earlier `.grad` of each parameter. FSDP2
        # sets `.grad` to zeros meanwhile, and `end` puts the earlier gradients back. Otherwise None
        self._aside: list[Any] | None = None
        # Indices of the parameters for whose gradients `kept_errors`, the error feedback, has room
        self._errors_of: tuple[int, ...] = ()
        # False from a cross-node hop until an optimizer step uses the hop's result. Meanwhile `begin` drops the error
        # feedback of gradients that the program has cleared, which no step has used.
        self._errors_settled = True
        self._present: set[int] = set()  # indices of the parameters for which this rank has a gradient to reduce
        # Cache of the tensors that `_flags_of` returns, by their values as a tuple of bools. Without the cache, each
        # backward would copy a tensor from the host to the device.
        self._used_flags: dict[tuple[bool, ...], torch.Tensor] = {}
        self._unused = UnusedParameters(unit)
        self._accumulation = context.accumulation
        self._accumulation.sums.append(self)

    @property
    def crosses(self) -> bool:
        """True if the running backward sends gradients across nodes; False if they wait in the node as partial sums."""
        return self._every_micro_batch or not self._accumulation.is_open

    def begin(self) -> None:
        """Choose the parameters of this reduction, the same on all ranks, and fill their missing gradients with zeros.

        `post_backward` calls this method before FSDP2's own function.
        """
        self._accumulation.begin_reduction()
        self._present = set(self.unit.with_gradient())
        # `in_use` must be equal on all ranks, because missing gradients are sent as zeros only if the unit was used.
        # All ranks gather a unit together, so they agree whether it was gathered since the last backward. A rank that
        # has a gradient has gathered the unit.
        uses = self._num_uses()
        in_use = self._present or self.unit.is_gathered or uses != self._uses_before
        self._uses_before = uses
        filled = {*self.unit.trained, *self.waiting} if in_use else self.waiting if self.crosses else ()
        self.unit.fill_gradients(filled)
        self.reduced = self.unit.with_gradient()
        self._drop_discarded_errors()
        if self.crosses:
            self._unused.begin(self._present, self.reduced)
        elif self.reduced:
            self.unit.refuse_gradient_hooks()
            self._aside = self.unit.swap_gradients([None] * len(self.unit.parameters))

    def end(self) -> None:
        """Put back the earlier `.grad`s if gradients wait; otherwise set `.grad` to None where no rank had a gradient.

        `post_backward` calls this method after FSDP2's own function, which has set `.grad`. If a sum over ranks is
        added to `.grad` later, `finished` sets `.grad` to None at that time.
        """
        is_late = self._late is not None
        super().end()
        if self._aside is not None:
            self.unit.swap_gradients(self._aside)
            self._aside = None
        elif self.crosses and not is_late:
            self.finished()

    def finished(self) -> None:
        """Set `.grad` to None for parameters without a gradient on any rank.

        The method does nothing while a reduction still has to add its sum to `.grad`. That reduction calls the method
        again.
        """
        if not self._late_sums:
            self._unused.restore_none()

    def drop(self) -> None:
        """Free the unit's partial sums of gradients that wait for the cross-node hop; call this between backwards."""
        if self.waiting:
            self.waiting = ()
            self._local_queue.submit(functools.partial(setattr, self, "_node_sums", None))

    # ---- the two hops: sum gradients and flags inside the node and across nodes ------------------------------------

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the intra-node hop, and also the cross-node hop unless gradients wait in the node.

        See `SummingReduce.start` for the arguments.

        Returns:
            The task of the cross-node hop, which returns `result`; None if gradients wait.
        """
        self._dtype, keep, indices = gradients.dtype, not self.crosses, self.reduced
        hop = _Hop(indices, self._flags_of(indices, gradients.device))
        inside = self._local_queue.submit(functools.partial(self._sum_inside, gradients, hop, keep=keep))
        self._schedule.sent(inside)
        self.waiting = indices if keep else ()
        if keep:
            return None
        self._errors_settled = False
        self._unused.read_later(indices, hop.flags)
        return self._cross_queue.submit(functools.partial(self._sum_across, inside, hop, result), after=(inside,))

    def _sum_inside(self, gradients: torch.Tensor, hop: _Hop, *, keep: bool) -> torch.Tensor:
        """Run the intra-node hop, and return partial sums of gradients over the ranks of the node.

        The partial sums are [N, S]: S elements for each of N nodes. They include the gradients of earlier backwards
        that wait since `Handle.accumulate`.

        Args:
            gradients: [N L S] unreduced gradients of this backward, in FSDP2's rank order (L ranks per node).
            hop: parameters and flags of this reduction; this method sets its `node_flags`.
            keep: True if the returned partial sums wait for a later backward.
        """
        num_nodes, num_local, device = self._cross.size, self._local.size, gradients.device
        codec, _ = self._codecs_of(hop.indices)
        # ---- exchange messages and flags inside the node
        sent = _empty(codec, hop, num_local, num_nodes, device=device)
        codec.pack(gradients.view(num_nodes, num_local, -1).transpose(0, 1), sent[..., : codec.message_bytes])
        sent[..., codec.message_bytes :][..., : len(hop.indices)] = hop.used
        received = self._local.all_to_all(sent, of=self.unit.name)  # [L, N, M]: N messages from each of L ranks
        flags = received[..., codec.message_bytes :][..., : len(hop.indices)].amax(0)
        # ---- add this backward's gradients to the partial sums of earlier backwards that wait
        if self._node_sums is None:
            sums = torch.empty(num_nodes, codec.layout.size, dtype=self._partial_dtype, device=device)
        else:
            waiting = self._with_layout(self._node_sums, hop.indices)
            sums, flags = waiting.sums, torch.maximum(waiting.flags, flags)
        codec.unpack_sum(received[..., : codec.message_bytes], sums, accumulate=self._node_sums is not None)
        self._node_sums = NodeSums(hop.indices, sums, flags) if keep else None
        hop.node_flags = flags
        return sums

    def _sum_across(self, inside: Work[torch.Tensor], hop: _Hop, result: torch.Tensor) -> torch.Tensor:
        """Run the cross-node hop: sum the partial sums of all nodes into `result`, and return it.

        Args:
            inside: task of the intra-node hop, which returns the partial sums [N, S], S elements for each of N nodes.
            hop: parameters and flags of this reduction; this method appends the flags of all ranks to `hop.flags`.
            result: [S] tensor for this rank's flat shard of the gradients, summed over all ranks.
        """
        (_, codec), sums = self._codecs_of(hop.indices), inside.join()
        assert hop.node_flags is not None
        sent = _empty(codec, hop, self._cross.size, device=result.device)
        errors = self._errors_for(hop.indices, result.device)
        codec.pack(sums, sent[..., : codec.message_bytes], errors=errors, beta=self._beta)
        sent[:, codec.message_bytes :][:, : len(hop.indices)] = hop.node_flags
        received = self._cross.all_to_all(sent, of=self.unit.name)  # [N, M]: one message from each of N nodes
        messages = received[:, : codec.message_bytes]
        codec.unpack_sum(messages.unsqueeze(1), result.unsqueeze(0), accumulate=False)
        hop.flags.append(received[:, codec.message_bytes :][:, : len(hop.indices)].amax(0))
        return result

    def _with_layout(self, held: NodeSums, indices: tuple[int, ...]) -> NodeSums:
        """Return waiting partial sums in the layout of a flat shard of the parameters `indices`.

        Args:
            held: partial sums of a subset of these parameters.
            indices: indices of the parameters of the result, which has zeros for parameters that `held` lacks.
        """
        if held.indices == indices:
            return held
        segments = dict(zip(indices, self.unit.segments_of(indices), strict=True))
        sums = held.sums.new_zeros(len(held.sums), list(segments.values())[-1].stop)
        flags = held.flags.new_zeros(len(held.flags), len(indices))
        for position, (index, part) in enumerate(zip(held.indices, self.unit.segments_of(held.indices), strict=True)):
            sums[:, _columns(segments[index])] = held.sums[:, _columns(part)]
            flags[:, indices.index(index)] = held.flags[:, position]
        return NodeSums(indices, sums, flags)

    def _flags_of(self, indices: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return one flag per parameter, [P] uint8 on `device`: 1 if this rank has a gradient, 0 if zeros replace it.

        Args:
            indices: indices of the P parameters whose gradients are reduced.
            device: device of the flags.
        """
        on = tuple(index in self._present for index in indices)
        if on not in self._used_flags:
            self._used_flags[on] = torch.tensor(on, dtype=torch.uint8, device=device)
        return self._used_flags[on]

    # ---- error feedback: allocate it, change its layout, and drop errors of gradients that the program has cleared ---

    @property
    def feeds_back(self) -> bool:
        """True if error feedback is on and the cross-node hop quantizes any gradient of the unit."""
        _, across = self._codecs_of(self.unit.trained)
        return self._feedback and any(part.scales is not None for part in across.layout.ranges)

    def errors(self, device: torch.device) -> Feedback | None:
        """Return the error feedback of the cross-node hop, with room for the unit's trained parameters.

        Error feedback keeps the quantization errors of the parameters' gradients. The result is None if error feedback
        is off, or if no gradient is quantized. Call this method while no backward is running.
        """
        return self._errors_for(self.unit.trained, device)

    def settle_errors(self) -> None:
        """Record that an optimizer step has used the last reduced gradients, so their error feedback stays valid."""
        self._errors_settled = True

    def _errors_for(self, indices: tuple[int, ...], device: torch.device) -> Feedback | None:
        """Return the error feedback for gradients of the unit's parameters with these indices.

        The result is None if error feedback is off, or if none of these gradients is quantized.

        The error feedback has room only for these parameters. If the last call named other parameters, the parameters
        that both calls name keep their quantization errors. The errors of all other parameters start at zero.
        """
        if not self._feedback:
            return None
        if self._errors_of != indices:
            _, across = self._codecs_of(indices)
            before = {} if self.kept_errors is None else dict(self._parts_of_errors())
            self.kept_errors, self._errors_of = across.new_errors(self._cross.size, device=device), indices
            for index, parts in () if self.kept_errors is None else self._parts_of_errors():
                for part, old in zip(parts, before.get(index, ()), strict=False):
                    part.copy_(old)
        return self.kept_errors

    def _drop_discarded_errors(self) -> None:
        """Drop the quantization errors of gradients that the program has cleared before an optimizer step used them.

        A gradient counts as cleared if it is None or has only zeros. This method sets the scales of its errors to zero,
        which makes the stored errors zero, without a wait of the host for the device.
        """
        if self._errors_settled or self._late_sums or self.kept_errors is None:
            return
        for index, (_, scales) in self._parts_of_errors():
            gradient = self.unit.gradient(index)
            if gradient is None:
                scales.zero_()
            elif gradient._local_tensor.numel():
                scales.mul_(gradient._local_tensor.any())

    def _parts_of_errors(self) -> list[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Return the error feedback by parameter, as (index of the parameter, (quantized errors, their scales)).

        Parameters whose gradients are not quantized have no entry.
        """
        assert self.kept_errors is not None
        _, across = self._codecs_of(self._errors_of)
        segments = self.unit.segments_of(self._errors_of)
        index_of = {segment.start: i for i, segment in zip(self._errors_of, segments, strict=True) if segment.size}
        quantized = [index_of[part.start] for part in across.layout.ranges if part.scales is not None]
        return list(zip(quantized, self.kept_errors.segments(), strict=True))


@dataclass(eq=False)
class _Hop:
    """The parameters whose gradients one reduction of a unit sums, and flags that say which ranks had these gradients.

    Args:
        indices: indices of the P parameters whose gradients are reduced.
        used: [P] uint8: 1 if this rank has a gradient of the parameter.
    Attributes:
        node_flags: [N, P] uint8 flags, a row for the flat shard of each of N nodes: 1 if any rank of this node had a
            gradient of the parameter. The intra-node hop sets them.
        flags: list to which the cross-node hop appends flags [P]: 1 if any rank of the job had a gradient.
    """

    indices: tuple[int, ...]
    used: torch.Tensor
    node_flags: torch.Tensor | None = None
    flags: list[torch.Tensor] = field(default_factory=list)


def _columns(segment: Segment) -> slice:
    """Return the slice of a flat shard that holds the elements of one parameter, whose segment is `segment`."""
    return slice(segment.start, segment.stop)


def _empty(codec: Codec, hop: _Hop, *peers: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed messages [*peers, bytes] uint8, with room after each message for one flag byte per parameter.

    A flag says whether the sender has a gradient of the parameter.

    Args:
        codec: codec of the gradients, which sets the bytes of a message without flags.
        hop: parameters of the reduction.
        peers: leading dims of the result.
        device: device of the messages.
    """
    size = codec.message_bytes + align(len(hop.indices))
    return torch.zeros(*peers, size, dtype=torch.uint8, device=device)
