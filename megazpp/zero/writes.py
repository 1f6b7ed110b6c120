"""Writes to weights: before each forward all ranks agree which units' weights have to cross nodes.

One file of more than 300 lines: a vote is read from its reasons to its result without leaving the page.

A rank sees only its own shards, so what it knows of them must not choose a collective. Each forward of an outermost
FSDP2 module begins with a vote, one byte per unit:

    own vote     what this rank has to send of the unit: nothing, a difference or the trained part, whole weights
    exchange     bitwise or over the ranks of a node, then over nodes, in a thread, over gloo groups of its own
    each unit    all ranks send what any rank has voted for

A rank that votes for whole weights knows the outcome and sends at once, so a training step does not wait for votes. A
forward in which this rank has nothing to send waits for them: 1.5 round trips between nodes, because gloo announces a
message before it sends it.

A rank votes for a unit if an optimizer that holds its parameters has made a step, if a version counter has moved, if
`Sharding.invalidate_weights` was called, or if the checksum of its shard differs from that of the shard it sent last.
The checksum sees writes that move no counter (`parameter.data`, `to_local()`, `torch._foreach_*`). It is computed at
most once per forward, and only where the rest is silent. Backward uses the weights of its forward.

On CUDA the host waits for a checksum only outside of a step. Between two forwards with gradients in succession it
compares on the device, reads the result one forward later, and then all ranks raise an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.zero.checksum import checksum
from megazpp.zero.comms import CommContext
from megazpp.zero.gather import InterNodeMessage, TwoHopGather
from megazpp.zero.schedule import in_backward
from megazpp.zero.units import Unit

LATE = 4  # a bit of a vote beside those of `InterNodeMessage`: the last forward has used weights that were written to


class Ballot:
    """The votes of one forward on all units.

    Args:
        own: this rank's votes.
        work: returns those of all ranks, bitwise or.
    """

    def __init__(self, own: Sequence[int], work: Work[list[int]]) -> None:
        self.own, self._work = own, work

    def result(self) -> list[int]:
        """Return the votes of all ranks; waits for those that have not voted yet."""
        return self._work.join()


class WatchedGather(TwoHopGather):
    """A `TwoHopGather` that sends what ranks have voted for.

    Of a unit that is trained in part, only the trained part crosses after a step.

    Attributes:
        watch: holds the votes; set before the first use.
        ballot: the last vote, until a use has sent what it has decided.
    """

    watch: WriteWatch

    def __init__(self, unit: Unit, context: CommContext) -> None:
        super().__init__(unit, context)
        self.ballot: Ballot | None = None
        self._trained: tuple[bool, ...] = ()  # what was trained when the shard was last sent
        self._sums: torch.Tensor | None = None  # [2] checksums of what was sent: of frozen and of trained parameters

    @property
    def has_parts(self) -> bool:
        """True if there is less to send than whole weights."""
        return self.secondary.sends_differences or len(set(self._trained)) > 1

    def before_step(self, held: Collection[int] | None = None) -> None:
        if any(self.unit.stepped(held)) and self.vote() == InterNodeMessage.KEYFRAME:
            self.drop()

    def after_step(self, *, keyframe: bool, held: Collection[int] | None = None) -> None:
        stepped = self.unit.stepped(held)
        if not any(stepped):
            return
        frozen_too = any(each and not trained for each, trained in zip(stepped, self._trained, strict=False))
        if keyframe or frozen_too or self._made_from is None or self._trained != self.unit.is_trained:
            self.drop()
        else:
            self._has_stepped, self._received = True, None
            if self.secondary.sends_differences:  # what else is written from here on is no difference
                assert self._crossed is not None
                self._crossed.wait()
                self._keep_sums()
                self._made_from = self.unit.fingerprint()
        self._after_step = self.unit.fingerprint()

    def next_crossing(self) -> InterNodeMessage:
        """The kind of message that this rank has to send, as far as it knows; on CUDA this waits for the device."""
        vote = self.vote()
        return max([vote, *(kind for differs, kind in self.unknown(vote) if differs)])

    def vote(self) -> InterNodeMessage:
        """Return what this rank has to send, as far as it knows without a checksum."""
        if self.secondary.messages is None or self._made_from is None or self._trained != self.unit.is_trained:
            return InterNodeMessage.KEYFRAME
        moved = [now != then for now, then in zip(self.unit.fingerprint(), self._made_from, strict=True)]
        if self.secondary.sends_differences:
            return InterNodeMessage.KEYFRAME if any(moved) else InterNodeMessage(self._has_stepped)
        kinds = [self._kind_of(trained) for each, trained in zip(moved, self._trained, strict=True) if each]
        return max([InterNodeMessage.NOTHING, *kinds, *([self._kind_of(True)] if self._has_stepped else ())])

    def unknown(self, vote: InterNodeMessage) -> Iterator[tuple[torch.Tensor, InterNodeMessage]]:
        """Yield, of each part that `vote` does not send, whether it was written to, and what to vote for if it was."""
        if vote == InterNodeMessage.KEYFRAME:
            return
        assert self._crossed is not None
        assert self._sums is not None
        self._crossed.wait()
        for trained, shards in self._parts():
            kind = self._kind_of(trained)
            if kind > vote:
                yield checksum(shards) != self._sums[int(trained)], kind

    def restore(self, row: torch.Tensor, crossing: InterNodeMessage) -> None:
        super().restore(row, crossing)
        self._trained = self.unit.is_trained
        self._keep_sums()

    def _crossings(self, *, early: bool = False) -> Iterable[InterNodeMessage]:
        if self.secondary.messages is None:  # on all ranks
            self.ballot = None
            return (InterNodeMessage.KEYFRAME,)
        return self.watch.undone(self) if early else self.watch.crossings(self)

    @property
    def _is_current(self) -> bool:
        return self.unit.is_sharded and self.watch.is_done(self)

    def _start_cross_hop(self, *args: Any) -> None:
        self._trained = self.unit.is_trained
        super()._start_cross_hop(*args)

    def _take_in(self, crossing: InterNodeMessage, messages: torch.Tensor, shard: Callable[[], torch.Tensor]) -> None:
        is_part = crossing == InterNodeMessage.DIFFERENCE and not self.secondary.sends_differences
        self._keep_sums(of_frozen=not is_part)  # before the shard is read: a write in between is sent once more
        if is_part:
            self.secondary.take_in_part(messages, shard(), self._trained_bytes())
        else:
            super()._take_in(crossing, messages, shard)

    def _crossing_bytes(self, crossing: InterNodeMessage) -> int:
        if crossing == InterNodeMessage.DIFFERENCE and not self.secondary.sends_differences:
            return sum(stop - start for start, stop in self._trained_bytes())
        return super()._crossing_bytes(crossing)

    def _trained_bytes(self) -> list[tuple[int, int]]:
        trained = [segment for segment, each in zip(self.unit.segments, self._trained, strict=True) if each]
        return self._codec.byte_ranges(trained)

    def _kind_of(self, trained: bool) -> InterNodeMessage:
        """The kind of message that sends a write to the trained or to the frozen parameters."""
        is_part = trained and self.has_parts and not self.secondary.sends_differences
        return InterNodeMessage.DIFFERENCE if is_part else InterNodeMessage.KEYFRAME

    def _parts(self) -> Iterator[tuple[bool, list[torch.Tensor]]]:
        """Yield the shards of trained and of frozen parameters, each of which has a checksum; differences have one."""
        shards = self.unit.padded_shards()
        if self.secondary.sends_differences:
            yield True, shards
            return
        for trained in dict.fromkeys(self._trained):
            yield trained, [shard for shard, each in zip(shards, self._trained, strict=True) if each == trained]

    def _keep_sums(self, *, of_frozen: bool = True) -> None:
        """Keep the checksums of the shard, or only those of its trained part."""
        if self._sums is None:
            with torch.inference_mode(False):
                self._sums = torch.zeros(2, dtype=torch.int64, device=self.unit.padded_shards()[0].device)
        with torch.no_grad():
            for trained, shards in self._parts():
                if trained or of_frozen:
                    self._sums[int(trained)].copy_(checksum(shards))


class WriteWatch:
    """Holds the votes on the units of one model.

    Args:
        gathers: the units' gathers, in an order that is the same on all ranks.
        model: the outermost FSDP2 module, which may have no parameters of its own and thus no unit.
        local, cross: axes over groups that nothing else uses.
    """

    def __init__(self, gathers: Sequence[WatchedGather], model: nn.Module, local: MeshAxis, cross: MeshAxis) -> None:
        self._gathers, self._axes, self._queue = list(gathers), (local, cross), cross.queue
        self._index = {gather: index for index, gather in enumerate(gathers)}
        self._root: nn.Module | None = None  # the outermost module whose forward is running
        self._decided: Sequence[WatchedGather] = ()  # the units that its vote was on
        self._below: dict[nn.Module, list[WatchedGather]] = {}
        self._ballot: Ballot | None = None
        self._had_gradients = False  # whether autograd has recorded the last forward
        self._unread: tuple[Ballot, list[int], torch.Tensor, torch.cuda.Event] | None = None
        for gather in gathers:
            gather.watch = self
        for module in [each for each in model.modules() if isinstance(each, FSDPModule)]:
            module.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP2's, which gathers
            module.register_forward_hook(self._end, always_call=True)

    def crossings(self, gather: WatchedGather) -> Iterator[InterNodeMessage]:
        """Yield the kinds of messages that all ranks send of the unit now, in order; waits where it has to."""
        if not (in_backward() or gather in self._decided):  # `FSDPModule.unshard` outside of a forward
            self._decide([gather])
        yield from self.undone(gather)

    def undone(self, gather: WatchedGather) -> Iterator[InterNodeMessage]:
        """Yield what the last vote has decided of the unit and no use has sent yet."""
        ballot, gather.ballot = gather.ballot, None
        if ballot is None:
            return
        index, own = self._index[gather], InterNodeMessage(ballot.own[self._index[gather]] & ~LATE)
        if own == InterNodeMessage.KEYFRAME and not gather.has_parts:
            yield InterNodeMessage.KEYFRAME
            return
        if own == InterNodeMessage.DIFFERENCE:
            yield InterNodeMessage.DIFFERENCE
        agreed = ballot.result()[index]
        if agreed & InterNodeMessage.DIFFERENCE and own != InterNodeMessage.DIFFERENCE:
            yield InterNodeMessage.DIFFERENCE
        if agreed & InterNodeMessage.KEYFRAME:
            yield InterNodeMessage.KEYFRAME

    def is_done(self, gather: WatchedGather) -> bool:
        """Return True if nothing that was decided of the unit has still to be sent."""
        ballot, index = gather.ballot, self._index[gather]
        return ballot is None or not (ballot.own[index] or ballot.result()[index])

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._root is not None or in_backward():  # activation checkpoints run forwards in backward
            return
        self._root, below = module, self._units_below(module)
        if any(gather.unit.is_sharded for gather in below):
            self._decided = below
            self._decide(below)

    @torch.compiler.disable
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._root is not module:
            return
        (ballot, self._ballot), self._root, self._decided = (self._ballot, None), None, ()
        if ballot is None:
            return
        late = [g.unit.name for g, votes in zip(self._gathers, ballot.result(), strict=True) if votes & LATE]
        if late:
            raise RuntimeError(
                f"{', '.join(late)}: the weights were written to between two forwards of a step, and the second one "
                "has used the old weights; call sharding.invalidate_weights() after such a write"
            )

    def _units_below(self, module: nn.Module) -> list[WatchedGather]:
        if module not in self._below:
            inside = set(module.modules())
            self._below[module] = [g for g in self._gathers if not inside.isdisjoint(g.unit.modules)]
        return self._below[module]

    def _decide(self, gathers: Sequence[WatchedGather]) -> None:
        """Vote on these units, and start the exchange of votes."""
        votes, found = [0] * len(self._gathers), []
        with torch.no_grad():
            for gather in gathers:
                vote = votes[self._index[gather]] = gather.vote()
                found += [(self._index[gather], kind, differs) for differs, kind in gather.unknown(vote)]
        differ = torch.stack([differs for _, _, differs in found]) if found else torch.zeros(0)
        inside_step = self._had_gradients and torch.is_grad_enabled()
        self._had_gradients = torch.is_grad_enabled()
        unread = None
        if differ.is_cuda and inside_step:
            copy = torch.empty(differ.shape, dtype=differ.dtype, pin_memory=True).copy_(differ, non_blocking=True)
            unread = [index for index, _, _ in found], copy, torch.cuda.current_stream().record_event()
        else:
            for (index, kind, _), differs in zip(found, differ.tolist(), strict=True):
                votes[index] = max(votes[index], kind * int(differs))
        for index in self._read_late():
            votes[index] |= LATE
        self._ballot = ballot = Ballot(votes, self._queue.submit(functools.partial(self._exchange, votes)))
        self._unread = None if unread is None else (ballot, *unread)
        for gather in gathers:
            gather.ballot = ballot

    def _read_late(self) -> list[int]:
        """Return the units of which the last forward has used weights that this rank had written to."""
        if self._unread is None:
            return []
        ballot, indices, differ, event = self._unread
        event.synchronize()  # it was recorded when the last forward began
        found = [index for index, differs in zip(indices, differ.tolist(), strict=True) if differs]
        return [index for index in found if not ballot.result()[index]]

    def _exchange(self, votes: Sequence[int]) -> list[int]:
        """Return the votes of all ranks, bitwise or."""
        found = torch.tensor(votes, dtype=torch.uint8)
        for axis in self._axes:
            received = axis.all_to_all(found.repeat(axis.size, 1), of="votes")
            found = functools.reduce(torch.bitwise_or, received.unbind())
        agreed: list[int] = found.tolist()
        return agreed
