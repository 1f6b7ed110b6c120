"""Reduce-scatters after which gradients are as in FSDP2, whatever the program does with them.

A program may divide gradients (`set_gradient_divide_factor`), clear them, end a backward by an exception, and leave
parameters without a gradient, on some ranks or on all. Plain FSDP2 gives such a parameter None if no rank has a
gradient. To make messages of equal layout on all ranks, `RestoringReduce` sends zeros for it, and a flag per parameter
that says whether any rank had a gradient. If none had, it sets `.grad` to None again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from megazpp.drop_in.accumulate import Accumulation
from megazpp.drop_in.units import ProgramUnit
from megazpp.kernels.block_quant import Feedback
from megazpp.kernels.formats import align
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import CommContext, CountedReduce, SummingReduce
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.schedule import ReduceSchedule, in_backward
from megazpp.zero.wire import Codec, Segment


class InterruptibleSchedule(ReduceSchedule):
    """A schedule of reductions whose backward may be ended by an exception.

    Attributes:
        interrupted: True while reductions of such a backward are finished.
    """

    interrupted = False

    def finish_interrupted(self) -> None:
        """Finish the reductions of an earlier backward that an exception ended, so that autograd did not finish it."""
        if self._finishing and self._backward != torch._C._current_graph_task_id():
            self.interrupted = True
            try:
                self.end_backward()
            finally:
                self.interrupted = False


class ProgramContext(CommContext):
    """The context of the collectives in a program's model; see `CommContext`.

    Attributes:
        accumulation: the sums of gradients that wait.
    """

    def __init__(self, cross: MeshAxis, local: MeshAxis, shard: MeshAxis, **settings: Any) -> None:
        super().__init__(cross, local, shard, **settings)
        self.accumulation = Accumulation()
        self.reduce_schedule: InterruptibleSchedule = InterruptibleSchedule(
            overlap=self.overlap_reduce, blocks_host=shard.queue.blocks_host
        )


class LateSum:
    """A sum over ranks that is added to `.grad` at the end of the backward.

    FSDP2's reduce-scatter returns zeros in its place.

    Args:
        indices: indices of the parameters whose gradients it holds.
        result: [n] the flat shard of the sum, valid when its work is done.
        divisor: the number by which FSDP2 divides sums.
    Attributes:
        gradients: the parameters' `.grad` as FSDP2 has set it. If `.grad` is another object later, the program has
            discarded the gradient.
        versions: the version counters of these gradients at that time.
    """

    def __init__(self, indices: Sequence[int], result: torch.Tensor, divisor: float) -> None:
        self.indices, self.result, self.divisor = tuple(indices), result, divisor
        self.gradients: list[Any] = [None] * len(self.indices)
        self.versions = [-1] * len(self.indices)

    def hold(self, unit: ProgramUnit) -> None:
        """Store the unit's gradients right after FSDP2 has set them."""
        self.gradients = [unit.gradient(index) for index in self.indices]
        self.versions = [-1 if gradient is None else gradient._version for gradient in self.gradients]

    def add(self, unit: ProgramUnit, *, interrupted: bool) -> None:
        """Add the sum to the gradients that the program has not discarded.

        Args:
            unit: the unit of the gradients.
            interrupted: whether an exception ended the backward. The program may then have cleared a gradient in place,
                so a gradient with a changed version counter is skipped too.
        """
        result = self.result if self.divisor == 1.0 else self.result.div_(self.divisor)
        wanted = list(self.gradients)
        for i, (index, gradient) in enumerate(zip(self.indices, self.gradients, strict=True)):
            changed = interrupted and gradient is not None and gradient._version != self.versions[i]
            if changed or unit.gradient(index) is not gradient:
                wanted[i] = None
        unit.add_to_gradients(result, self.indices, wanted)


class ProgramReduce(SummingReduce):
    """The base class of both reduce-scatters in a program's model: late sums, and settings that the program changes."""

    unit: ProgramUnit
    _schedule: InterruptibleSchedule

    def __init__(self, unit: ProgramUnit, context: ProgramContext) -> None:
        super().__init__(unit, context)
        self._group = context.shard.group
        self._late: LateSum | None = None  # set by FSDP2's call of this object, until FSDP2 has set `.grad`
        self._late_sums = 0  # number of late sums that have not been added yet

    def post_backward(self, *given: Any) -> None:
        """Reduce the unit's gradients through FSDP2; see `SummingReduce.post_backward`."""
        if not in_backward():
            raise RuntimeError(
                f"{self.unit.name} reduces its gradients outside a backward, where ZeRO++ cannot finish them: remove "
                "the call of set_manual_backward_finalization"
            )
        if not self.unit.reduces_gradients:
            self._fsdp2_post_backward(*given)
            return
        self._schedule.finish_interrupted()
        self.unit.force_sums()
        self.begin()
        try:
            self._fsdp2_post_backward(*given)
        finally:
            self.end()

    def fills(self, output: torch.Tensor) -> bool:
        """Return False: a program may change `.grad` during the backward, so it must never be incomplete."""
        return False

    def end(self) -> None:
        """Record the gradients that FSDP2 has just set, if a late sum must be added to them."""
        if self._late is not None:
            self._late.hold(self.unit)
            self._late = None

    def finished(self) -> None:
        """Run after a late sum has been added to the gradients; a subclass overrides it."""

    def _finish_later(self, work: Work[torch.Tensor], result: torch.Tensor) -> None:
        """Add `result` to the gradients at the end of the backward, when `work` is done.

        FSDP2's own division has run on zeros by then, so the late sum divides itself.
        """
        self.unit.refuse_gradient_hooks()
        late = self._late = LateSum(self.reduced, result, self._division_after_sum(result))
        self._late_sums += 1

        def finish() -> None:
            """Add the sum; the schedule calls this at the end of the backward."""
            self._late_sums -= 1
            late.add(self.unit, interrupted=self._schedule.interrupted)
            self.finished()

        self._schedule.finish_later(work, finish)

    def _division_after_sum(self, reduced: torch.Tensor) -> float:
        """Return the number by which FSDP2 divides a sum with the dtype and device of `reduced`."""
        factor, device = self.unit.gradient_divide_factor, reduced.device.type
        if factor == 1.0:
            return factor
        assert self._group is not None, "one rank alone reduces nothing"
        _, after, *_ = _get_gradient_divide_factors(self._group, None, reduced.dtype, device, factor, True)
        return 1.0 if after is None else after


class ProgramRingReduce(ProgramReduce, CountedReduce):
    """A reduce-scatter in one hop, in a program's model."""


class UnusedParameters:
    """The parameters of a unit whose gradient must become None again, because no rank had a gradient."""

    def __init__(self, unit: ProgramUnit) -> None:
        self._unit = unit
        self._fresh: set[int] = set()  # parameters whose `.grad` was None before the reductions in flight
        self._used: set[int] = set()  # parameters that have received a gradient on this rank since then
        self._flags: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []  # see `read_later`

    def begin(self, used: set[int], reduced: Iterable[int]) -> None:
        """Record a reduction; call it before FSDP2 reduces gradients.

        Args:
            used: indices of the parameters that have a gradient on this rank.
            reduced: indices of the parameters whose gradients are reduced; those not in `used` are zeros.
        """
        cleared = {index for index in reduced if self._unit.gradient(index) is None}
        self._fresh |= cleared
        self._used = self._used - cleared | used

    def read_later(self, indices: tuple[int, ...], flags: list[torch.Tensor]) -> None:
        """Register the list that will receive the flags of the parameters `indices`.

        The flags are [P] uint8, 1 if any rank had a gradient.
        """
        self._flags.append((indices, flags))

    def restore_none(self) -> None:
        """Set to None the gradients that no rank had; call it after FSDP2 has set them and all flags have arrived."""
        unused = self._fresh - self._used
        if unused and not self._unit.zero_fills:
            for indices, flags in self._flags:
                for flag in flags:
                    unused -= {index for index, on in zip(indices, flag.tolist(), strict=True) if on}
            for index in unused:
                self._unit.clear_gradient(index)
        self._fresh, self._used, self._flags = set(), set(), []


class NodeSums(NamedTuple):
    """A node's sums of gradients that wait for the cross-node hop.

    `sums` is [N, S], for the parameters `indices`. `flags` is [N, P] uint8, 1 for a parameter that got a gradient on
    any rank of the node.
    """

    indices: tuple[int, ...]
    sums: torch.Tensor
    flags: torch.Tensor


class RestoringReduce(ProgramReduce, TwoHopReduce):
    """A reduce-scatter in two hops after which gradients are as in FSDP2, and which can let gradients wait.

    If a unit was used, a trained parameter without a gradient contributes zeros. So does a parameter whose sums wait.

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
        num_uses: returns how often the unit was gathered, the same number on every rank.
    Attributes:
        waiting: indices of the parameters whose sums wait for the hop across nodes, the same on all ranks.
    """

    def __init__(self, unit: ProgramUnit, context: ProgramContext, num_uses: Callable[[], int]) -> None:
        super().__init__(unit, context)
        self._num_uses, self._uses_before = num_uses, 0
        self.waiting: tuple[int, ...] = ()
        self._node_sums: NodeSums | None = None  # accessed by tasks of the local queue only
        self._aside: list[Any] | None = None  # the unit's `.grad`s while FSDP2 reduces gradients that then wait
        self._errors_of: tuple[int, ...] = ()  # indices of the parameters that `kept_errors` has room for
        self._errors_settled = True  # whether an optimizer step has used the last result
        self._present: set[int] = set()  # indices of the parameters with a gradient on this rank
        self._used_flags: dict[tuple[bool, ...], torch.Tensor] = {}  # cache of `_flags_of`
        self._unused = UnusedParameters(unit)
        self._accumulation = context.accumulation
        self._accumulation.sums.append(self)

    @property
    def crosses(self) -> bool:
        """True if the gradients of the running backward cross nodes."""
        return self._every_micro_batch or not self._accumulation.is_open

    def begin(self) -> None:
        """Fix the parameters of this reduction, and give those without a gradient zeros."""
        self._accumulation.begin_reduction()
        self._present = set(self.unit.with_gradient())
        # All ranks gather a unit together, so "was gathered since the last backward" is equal on all of them. A rank
        # that has a gradient has gathered the unit.
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
        """Finish the bookkeeping after FSDP2 has set the gradients."""
        is_late = self._late is not None
        super().end()
        if self._aside is not None:
            self.unit.swap_gradients(self._aside)
            self._aside = None
        elif self.crosses and not is_late:
            self.finished()

    def finished(self) -> None:
        """Set `.grad` to None for parameters without a gradient on any rank, after the last sum of this backward."""
        if not self._late_sums:
            self._unused.restore_none()

    def drop(self) -> None:
        """Drop the sums that wait; call it between backwards."""
        if self.waiting:
            self.waiting = ()
            self._local_queue.submit(functools.partial(setattr, self, "_node_sums", None))

    # ---- the two hops ----------------------------------------------------------------------------------------------

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the intra-node hop, and unless gradients wait the cross-node hop; see `SummingReduce.start`."""
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
        """Run the intra-node hop: [N L S] in FSDP2's rank order -> sums [N, S] of all backwards that wait."""
        num_nodes, num_local, device = self._cross.size, self._local.size, gradients.device
        codec, _ = self._codecs_of(hop.indices)
        # ---- exchange messages and flags inside the node
        sent = _empty(codec, hop, num_local, num_nodes, device=device)
        codec.pack(gradients.view(num_nodes, num_local, -1).transpose(0, 1), sent[..., : codec.message_bytes])
        sent[..., codec.message_bytes :][..., : len(hop.indices)] = hop.used
        received = self._local.all_to_all(sent, of=self.unit.name)  # [L, N, M]
        flags = received[..., codec.message_bytes :][..., : len(hop.indices)].amax(0)
        # ---- add them to the sums that wait
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
        """Run the cross-node hop: sums [N, S] of a node -> `result`, this rank's [S] summed over the nodes."""
        (_, codec), sums = self._codecs_of(hop.indices), inside.join()
        assert hop.node_flags is not None
        sent = _empty(codec, hop, self._cross.size, device=result.device)
        errors = self._errors_for(hop.indices, result.device)
        codec.pack(sums, sent[..., : codec.message_bytes], errors=errors, beta=self._beta)
        sent[:, codec.message_bytes :][:, : len(hop.indices)] = hop.node_flags
        received = self._cross.all_to_all(sent, of=self.unit.name)  # [N, M]
        messages = received[:, : codec.message_bytes]
        codec.unpack_sum(messages.unsqueeze(1), result.unsqueeze(0), accumulate=False)
        hop.flags.append(received[:, codec.message_bytes :][:, : len(hop.indices)].amax(0))
        return result

    def _with_layout(self, held: NodeSums, indices: tuple[int, ...]) -> NodeSums:
        """Return a node's sums for the parameters `indices`, with zeros for those that `held` lacks."""
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
        """Return flags [P] uint8: 1 if this rank has a gradient of the parameter."""
        on = tuple(index in self._present for index in indices)
        if on not in self._used_flags:
            self._used_flags[on] = torch.tensor(on, dtype=torch.uint8, device=device)
        return self._used_flags[on]

    # ---- error feedback --------------------------------------------------------------------------------------------

    @property
    def feeds_back(self) -> bool:
        """True if quantization errors of the cross-node hop are kept and added to the next gradients."""
        _, across = self._codecs_of(self.unit.trained)
        return self._feedback and any(part.scales is not None for part in across.layout.ranges)

    def errors(self, device: torch.device) -> Feedback | None:
        """Return the error feedback, or None if it is off. Call it while no backward is running."""
        return self._errors_for(self.unit.trained, device)

    def settle_errors(self) -> None:
        """Record that an optimizer step has used the gradients to which `kept_errors` belong."""
        self._errors_settled = True

    def _errors_for(self, indices: tuple[int, ...], device: torch.device) -> Feedback | None:
        """Return the error feedback in the layout of the parameters `indices`; None if it is off.

        If the layout changes, parameters in both layouts keep their errors and new ones start at zero.
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
        """Drop quantization errors of gradients that the program has cleared.

        A zero scale drops them, without waiting for the device.
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
        """Return (index, (payload, scales)) of the error feedback of each parameter that is quantized."""
        assert self.kept_errors is not None
        _, across = self._codecs_of(self._errors_of)
        segments = self.unit.segments_of(self._errors_of)
        index_of = {segment.start: i for i, segment in zip(self._errors_of, segments, strict=True) if segment.size}
        quantized = [index_of[part.start] for part in across.layout.ranges if part.scales is not None]
        return list(zip(quantized, self.kept_errors.segments(), strict=True))


class _Hop:
    """The layout and flags of one reduction of a unit.

    Args:
        indices: indices of the parameters whose gradients are reduced.
        used: [P] uint8, 1 if this rank has a gradient of the parameter.
    Attributes:
        node_flags: [N, P] flags of the node's sums.
        flags: receives the flags [P] that arrive with the result.
    """

    def __init__(self, indices: tuple[int, ...], used: torch.Tensor) -> None:
        self.indices, self.used = indices, used
        self.node_flags: torch.Tensor | None = None
        self.flags: list[torch.Tensor] = []


def _columns(segment: Segment) -> slice:
    """Return the columns of a flat shard that hold a segment."""
    return slice(segment.start, segment.stop)


def _empty(codec: Codec, hop: _Hop, *peers: int, device: torch.device) -> torch.Tensor:
    """Allocate messages [*peers, bytes] to pack into, with room for the hop's flags after each message."""
    size = codec.message_bytes + align(len(hop.indices))
    return torch.zeros(*peers, size, dtype=torch.uint8, device=device)
