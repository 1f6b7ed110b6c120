"""qgZ: gradients are reduced in two hops, with partial sums that are accumulated between them.

    gradients [N, L, S] --pack--> local all-to-all, sum over L --> partial sums [N, S], over all micro-batches of a step
    partial sums [N, S] --pack--> cross all-to-all, sum over N --> [S], once per optimizer step

N: nodes (cross axis); L: ranks of a node (local axis); S: elements of a flat shard. Both hops only sum. A NaN or Inf
arrives as NaN or Inf.

With error feedback the cross-node hop adds its last quantization errors to the next gradients. These errors are
clipped, dropped or rescaled together with the gradients of their step.

Source: ZeRO++ (arXiv 2306.10209) section 3.3, which runs the cross-node hop in every micro-batch. The moving average of
errors is from LoCo (arXiv 2407.04480).

One file of more than 300 lines, because both hops share the partial sums, whose layout depends on the trained
parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from megazpp.kernels.block_quant import Feedback
from megazpp.kernels.formats import align
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import CommContext, LateSum, SummingReduce, division_after_sum
from megazpp.zero.gradients import GradientMarks, UnusedParameters, disagree
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec, Segment


class PartialSums(NamedTuple):
    """A node's sums of gradients that wait for the cross-node hop.

    `sums` is [N, S], for the parameters `indices`. `flags` is [N, P] uint8, 1 for a parameter that got a gradient on
    any rank of the node; None if flags are not needed.
    """

    indices: tuple[int, ...]
    sums: torch.Tensor
    flags: torch.Tensor | None


class Hop:
    """The layouts and flags of one reduction of a unit.

    Args:
        reduced: indices of the parameters whose gradients FSDP2 passes.
        target: indices of the parameters in the result: `reduced`, and those whose partial sums wait.
        used: [P] uint8, 1 if this rank has a gradient of the parameter in `reduced`; None if flags are not needed.
    Attributes:
        node_flags: [N, P] flags of `target` in the partial sums.
        flags: receives the flags [P] that arrive with the result.
    """

    def __init__(self, reduced: tuple[int, ...], target: tuple[int, ...], used: torch.Tensor | None) -> None:
        self.reduced, self.target, self.used = reduced, target, used
        self.node_flags: torch.Tensor | None = None
        self.flags: list[torch.Tensor] = []


class TwoHopReduce(SummingReduce):
    """The reduce-scatter of one unit in two hops, inside the node and across nodes, which replaces FSDP2's.

    FSDP2's flat rank is cross rank x L + local rank. The layout of a message depends on the parameters whose gradients
    FSDP2 passes, and must be equal on all ranks. So if a unit was used, a trained parameter without a gradient
    contributes zeros.

    Args:
        unit: the sharding unit.
        context: axes, schedules and formats that all units share.
        num_uses: returns how often the unit was gathered, the same number on every rank.
    Attributes:
        waiting: indices of the parameters whose partial sums wait for the hop across nodes. They are the same on all
            ranks, and count even if the program has cleared the gradients.
        kept_errors: the error feedback of the hop across nodes; None before the first quantization and if it is off.
            Only tasks of the cross queue access it during a backward.
        restores_none: True if gradients end as in FSDP2, with None for unused parameters.
    """

    def __init__(self, unit: Unit, context: CommContext, num_uses: Callable[[], int] = lambda: 0) -> None:
        super().__init__(unit, context)
        plan, zero = context.plan.reduce, context.zero
        assert plan is not None
        self._plan, self._dtype, self._codec = plan, context.precision.reduce_dtype, context.codec
        self._cross, self._local, self._group = context.cross, context.local, context.shard.group
        self._cross_queue, self._local_queue = context.cross_queue, context.local_queue
        self._feedback, self._beta = zero.zero_error_feedback, zero.zero_error_feedback_beta
        self._every_micro_batch = zero.zero_cross_every_microbatch
        self._partial_dtype = torch.bfloat16 if zero.zero_accumulate_in_bf16 else torch.float32
        self._codecs: dict[tuple[tuple[int, ...], torch.dtype], tuple[Codec, Codec]] = {}
        self._num_uses, self._uses_before = num_uses, 0
        self.waiting: tuple[int, ...] = ()
        self._partial_sums: PartialSums | None = None  # accessed by tasks of the local queue only
        self.kept_errors: Feedback | None = None
        self._errors_of: tuple[int, ...] = ()  # indices of the parameters that `kept_errors` has room for
        self._errors_settled = True  # whether an optimizer step has used the last result
        self._last_micro_batch = True
        self._present: set[int] = set()  # indices of the parameters with a gradient on this rank
        self._used_flags: dict[tuple[bool, ...], torch.Tensor] = {}  # cache of `_flags_of`
        self.restores_none = context.restores_none
        self._unused = UnusedParameters(unit) if context.restores_none else None
        self._marks = GradientMarks(unit, (self._cross.rank + self._local.rank) % 2) if context.restores_none else None
        self._agreement = context.agreement
        if self._agreement is not None:
            self._agreement.add(self)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Set whether the next micro-batch is the step's last one, after which the partial sums cross nodes."""
        self._last_micro_batch = last

    def begin(self) -> None:
        """Fix the parameters of this reduction, and give trained parameters without a gradient zeros."""
        super().begin()
        if self._agreement is not None:
            self._agreement.begin()
        self._present = set(self.reduced)
        # All ranks gather a unit together, so "was gathered since the last backward" is equal on all of them. A rank
        # that has a gradient has gathered the unit.
        uses = self._num_uses()
        in_use = self._unused is None or self._present or self.unit.is_gathered or uses != self._uses_before
        self._uses_before = uses
        if in_use:
            missing = [i for i in self.unit.trained if i not in self._present and self.unit.can_fill(i)]
            self.unit.fill_gradients(missing)
            self.reduced = tuple(sorted(self._present.union(missing)))
        if self._marks is not None:
            self._marks.begin(self.waiting, self.reduced)
        self._drop_discarded_errors()
        if self._unused is not None:
            self._unused.begin(self._present, {*self.reduced, *self.waiting})

    def end(self) -> None:
        """Finish the bookkeeping after FSDP2 has set the gradients.

        In a last backward in which the unit has no gradients, its partial sums cross now.
        """
        if not self.reduced and self.waiting and self.crosses:
            self._cross_waiting()
        is_late = self._late is not None
        super().end()
        if self.waiting and self._marks is not None:
            self._schedule.finish_later(None, self._marks.place_later(self.waiting))
        elif not is_late and self._unused is not None and not self._late_sums:
            self._unused.restore_none()

    def finished(self) -> None:
        """Set the gradients that no rank had to None, when the last sum of this backward has been added to `.grad`."""
        if self._unused is not None and not self._late_sums and not self.waiting:
            self._unused.restore_none()

    @property
    def result_indices(self) -> tuple[int, ...]:
        """Indices of the parameters in the next result: those that are reduced now, and those that wait."""
        return tuple(sorted({*self.reduced, *self.waiting}))

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        """Start the intra-node hop, and after the last micro-batch the cross-node hop; see `SummingReduce.start`."""
        self._dtype, keep = gradients.dtype, not self.crosses
        hop = Hop(self.reduced, self.result_indices, self._flags_of(self.reduced, gradients.device))
        inside = self._local_queue.submit(functools.partial(self._hop_inside, gradients, hop, keep=keep))
        self._schedule.sent(inside)
        if keep:
            self.waiting = hop.target
            return None
        return self._start_cross_hop(inside, hop, result)

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes of one shard's message inside a node and across nodes, if all trained parameters have gradients."""
        inside, across = self._codecs_of(self.unit.trained)
        return inside.layout.message_bytes, across.layout.message_bytes

    @property
    def feeds_back(self) -> bool:
        """True if quantization errors of the cross-node hop are kept and added to the next gradients."""
        _, across = self._codecs_of(self.unit.trained)
        return self._feedback and any(part.scales is not None for part in across.layout.ranges)

    def errors(self, device: torch.device) -> Feedback | None:
        """Return the error feedback, or None if it is off. Call it while no backward is running."""
        return self.kept_errors if self._errors_of else self._errors_for(self.unit.trained, device)

    def settle_errors(self) -> None:
        """Record that an optimizer step has used the gradients to which `kept_errors` belong."""
        self._errors_settled = True

    @property
    def crosses(self) -> bool:
        """True if the gradients of the running backward cross nodes."""
        return self._every_micro_batch or (self._last_micro_batch and self.unit.in_last_backward)

    def waits_for(self, parameters: set[int]) -> str | None:
        """Return the name of a parameter whose gradient has not crossed nodes yet and was not cleared.

        Returns None if there is none.

        Args:
            parameters: `id`s of the parameters to consider.
        """
        for index in self.waiting:
            gradient = self.unit.gradient(index)
            if gradient is None or self.unit.shard_id(index) not in parameters:
                continue
            if self._marks is None or self._marks.is_wanted(index):
                return self.unit.parameters[index].name
        return None

    def warm_up(self, device: torch.device) -> None:
        """Compile the kernels by reducing zeros; nothing is communicated and no state changes."""
        if not self.unit.trained:
            return
        # ---- the intra-node hop
        nodes, peers = self._cross.size, self._local.size
        inside, across = self._codecs_of(self.unit.trained)
        size = inside.layout.size
        gradients = torch.zeros(nodes, peers, size, dtype=inside.dtype, device=device)
        messages = inside.empty(peers, nodes, device=device)
        inside.pack(gradients.transpose(0, 1), messages)
        sums = torch.zeros(nodes, size, dtype=self._partial_dtype, device=device)
        for accumulate in (False,) if self._every_micro_batch else (False, True):
            inside.unpack_sum(messages, sums, accumulate=accumulate)
        # ---- the cross-node hop
        sent = across.empty(nodes, device=device)
        errors = across.new_errors(nodes, device=device) if self._feedback else None
        across.pack(sums, sent, errors=errors, beta=self._beta)
        across.unpack_sum(sent.unsqueeze(1), gradients[0, :1], accumulate=False)

    # ---- discarded gradients --------------------------------------------------------------------------------------

    def take_writes(self) -> torch.Tensor:
        """Return [P] the program's changes to the gradients that wait; see `GradientMarks.take`."""
        assert self._marks is not None
        return self._marks.take(self.waiting)

    def scale_partial_sums(self, states: Work[torch.Tensor], columns: slice) -> None:
        """Apply the program's changes of `.grad` to the partial sums, in the local queue.

        Args:
            states: its result [N, *] has a row for each shard whose partial sums this rank holds, from its rank.
            columns: the columns of `waiting` in this result.
        """
        scale = functools.partial(self._scale_partial_sums, self.waiting, states, columns)
        self._local_queue.submit(scale, after=(states,))

    def drop_partial_sums(self) -> None:
        """Drop all partial sums and the marks in `.grad`; call it at the end of a backward."""
        if self._marks is not None:
            self._marks.begin(self.waiting, ())
        if self._unused is not None:
            self._unused.forget()
        self.waiting = ()

        def drop() -> None:
            """Free the partial sums; runs in the local queue."""
            self._partial_sums = None

        self._local_queue.submit(drop)

    def _drop_discarded_errors(self) -> None:
        """Drop quantization errors of gradients that the program has cleared.

        A zero scale drops them, without waiting for the device.
        """
        discards = self.restores_none and not self._errors_settled and not self._late_sums
        if discards and self.kept_errors is not None:
            for index, (_, scales) in self._parts_of_errors():
                gradient = self.unit.gradient(index)
                if gradient is None:
                    scales.zero_()
                elif gradient._local_tensor.numel():
                    scales.mul_(gradient._local_tensor.any())

    def _scale_partial_sums(self, indices: tuple[int, ...], states: Work[torch.Tensor], columns: slice) -> None:
        """Scale the partial sums of the parameters `indices`; see `scale_partial_sums`."""
        held, found = self._partial_sums, states.join()[:, columns]
        assert held is not None
        if not found.is_cuda and bool((found == 1).all()):
            return
        held = self._partial_sums = self._with_layout(held, indices)
        sizes = torch.tensor([segment.size for segment in self.unit.segments_of(indices)], device=found.device)
        # NaN leads to an error. Infinity means that the gradient is None, so its sums are dropped.
        factors = torch.nan_to_num(found, nan=1.0, posinf=0.0)
        factor = torch.repeat_interleave(factors, sizes, dim=1, output_size=held.sums.shape[1])
        held.sums.copy_(torch.where(factor == 0, 0.0, held.sums * factor))  # 0 * NaN would be NaN
        # A gradient that the program has set to None becomes None again if no rank has a later one.
        if held.flags is not None:
            held.flags.masked_fill_(found.isinf(), 0)

    # ---- layouts --------------------------------------------------------------------------------------------------

    def _codecs_of(self, indices: tuple[int, ...]) -> tuple[Codec, Codec]:
        """Return the codecs of the intra-node and the cross-node hop for gradients of the parameters `indices`."""
        key = indices, self._dtype
        if key not in self._codecs:
            segments = self.unit.segments_of(indices)
            inside = self._codec(segments, self._plan.local, self._dtype)
            self._codecs[key] = inside, self._codec(segments, self._plan.cross, self._partial_dtype)
        return self._codecs[key]

    def _with_layout(self, held: PartialSums, indices: tuple[int, ...]) -> PartialSums:
        """Return partial sums for the parameters `indices`, with zeros for those that `held` lacks."""
        if held.indices == indices:
            return held
        num_nodes, segments = held.sums.shape[0], self.unit.segments_of(indices)
        moved = PartialSums(
            indices,
            held.sums.new_zeros(num_nodes, segments[-1].stop),
            None if held.flags is None else held.flags.new_zeros(num_nodes, len(indices)),
        )
        self._add(held, moved)
        return moved

    def _add(self, held: PartialSums, onto: PartialSums) -> None:
        """Add the partial sums in `held` to those in `onto`, for the parameters that both contain."""
        parts = dict(zip(held.indices, self.unit.segments_of(held.indices), strict=True))
        for position, (index, segment) in enumerate(
            zip(onto.indices, self.unit.segments_of(onto.indices), strict=True)
        ):
            if (part := parts.get(index)) is None:
                continue
            onto.sums[:, _columns(segment)].add_(held.sums[:, _columns(part)])
            if onto.flags is not None and held.flags is not None:
                flags = held.flags[:, held.indices.index(index)]
                onto.flags[:, position] = torch.maximum(onto.flags[:, position], flags)

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

    def _parts_of_errors(self) -> list[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Return (index, (payload, scales)) of the error feedback of each parameter that is quantized."""
        assert self.kept_errors is not None
        _, across = self._codecs_of(self._errors_of)
        segments = self.unit.segments_of(self._errors_of)
        index_of = {segment.start: i for i, segment in zip(self._errors_of, segments, strict=True) if segment.size}
        quantized = [index_of[part.start] for part in across.layout.ranges if part.scales is not None]
        return list(zip(quantized, self.kept_errors.segments(), strict=True))

    # ---- the two hops, inside a node and across nodes ---------------------------------------------------------------

    def _hop_inside(self, gradients: torch.Tensor, hop: Hop, *, keep: bool) -> torch.Tensor:
        """Run the intra-node hop: [N L S] in FSDP2's rank order -> partial sums [N, S] of all micro-batches so far."""
        num_nodes, num_local = self._cross.size, self._local.size
        (codec, _), device = self._codecs_of(hop.reduced), gradients.device
        # ---- exchange messages inside the node
        sent = _empty(codec, hop, num_local, num_nodes, device=device)
        codec.pack(gradients.view(num_nodes, num_local, -1).transpose(0, 1), sent[..., : codec.message_bytes])
        if hop.used is not None:
            sent[..., codec.message_bytes :][..., : len(hop.reduced)] = hop.used
        received = self._local.all_to_all(sent, of=self.unit.name)  # [L, N, M]
        flags = None if hop.used is None else received[..., codec.message_bytes :][..., : len(hop.reduced)].amax(0)
        # ---- add them to the partial sums
        messages, held = received[..., : codec.message_bytes], self._partial_sums
        if held is not None:
            held = self._with_layout(held, hop.target)
        if held is None or hop.reduced != hop.target:
            sums = torch.empty(num_nodes, codec.layout.size, dtype=self._partial_dtype, device=device)
            codec.unpack_sum(messages, sums, accumulate=False)
            found = PartialSums(hop.reduced, sums, flags)
            if held is None:
                held = found
            else:
                self._add(found, held)
        else:
            codec.unpack_sum(messages, held.sums, accumulate=True)
            if held.flags is not None and flags is not None:
                held = held._replace(flags=torch.maximum(held.flags, flags))
        return self._hold(held, hop, keep=keep)

    def _hold(self, held: PartialSums, hop: Hop, *, keep: bool) -> torch.Tensor:
        """Store a node's partial sums for the next micro-batch if `keep`, and return the sums [N, S]."""
        hop.node_flags, self._partial_sums = held.flags, held if keep else None
        return held.sums

    def _start_cross_hop(self, inside: Work[torch.Tensor], hop: Hop, result: torch.Tensor) -> Work[torch.Tensor]:
        """Submit the hop across nodes for the partial sums that `inside` returns; its work returns `result`."""
        self.waiting, self._errors_settled = (), False
        if self._unused is not None:
            self._unused.read_later(hop.target, hop.flags)
        votes = Work([]) if self._agreement is None else self._agreement.votes
        return self._cross_queue.submit(
            functools.partial(self._hop_across, inside, hop, result, votes), after=(inside,)
        )

    def _hop_across(
        self, inside: Work[torch.Tensor], hop: Hop, result: torch.Tensor, votes: Work[list[int]]
    ) -> torch.Tensor:
        """Run the cross-node hop: partial sums [N, S] -> `result`, this rank's [S] summed over the nodes.

        It does nothing if the ranks have voted differently on whether to run it.
        """
        (_, codec), partial_sums = self._codecs_of(hop.target), inside.join()
        device = partial_sums.device
        if disagree(votes):
            return result.zero_()
        sent = _empty(codec, hop, self._cross.size, device=device)
        errors = self._errors_for(hop.target, device)
        codec.pack(partial_sums, sent[..., : codec.message_bytes], errors=errors, beta=self._beta)
        if hop.node_flags is not None:
            sent[:, codec.message_bytes :][:, : len(hop.target)] = hop.node_flags
        received = self._cross.all_to_all(sent, of=self.unit.name)  # [N, M]
        messages = received[:, : codec.message_bytes]
        codec.unpack_sum(messages.unsqueeze(1), result.unsqueeze(0), accumulate=False)
        if hop.node_flags is not None:
            hop.flags.append(received[:, codec.message_bytes :][:, : len(hop.target)].amax(0))
        return result

    def _cross_waiting(self) -> None:
        """Start the cross-node hop of partial sums in a last backward in which the unit has no gradients."""
        self.unit.refuse_gradient_hooks()
        device = self.unit.padded_shards()[0].device
        assert self._group is not None, "one rank alone reduces nothing"
        hop = Hop((), self.waiting, self._flags_of((), device))
        result = torch.empty(self.unit.segments_of(hop.target)[-1].stop, dtype=self._dtype, device=device)

        def take() -> torch.Tensor:
            """Take the partial sums; runs in the local axis's communication queue."""
            assert self._partial_sums is not None
            return self._hold(self._with_layout(self._partial_sums, hop.target), hop, keep=False)

        work = self._start_cross_hop(self._local_queue.submit(take), hop, result)
        self._finish_later(work, LateSum(hop.target, result, division_after_sum(self.unit, self._group, result)))

    def _flags_of(self, indices: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """Return flags [P] uint8: 1 if this rank has a gradient of the parameter. None if flags are not needed."""
        if self._unused is None:
            return None
        on = tuple(index in self._present for index in indices)
        if on not in self._used_flags:
            self._used_flags[on] = torch.tensor(on, dtype=torch.uint8, device=device)
        return self._used_flags[on]


def _columns(segment: Segment) -> slice:
    """Return the columns of a flat shard that hold a segment."""
    return slice(segment.start, segment.stop)


def _empty(codec: Codec, hop: Hop, *peers: int, device: torch.device) -> torch.Tensor:
    """Allocate messages [*peers, bytes] to pack into, with room for the hop's flags after each message."""
    if hop.used is None:
        return codec.empty(*peers, device=device)
    size = codec.message_bytes + align(len(hop.target))
    return torch.zeros(*peers, size, dtype=torch.uint8, device=device)
