"""Detection of writes to weights, and the votes of all ranks before a forward.

Before each forward all ranks vote on which units must send their weights across nodes. They also compare whether they
accumulate gradients (accumulate.py). One file of more than 300 lines, so that a vote can be read in one place from its
reasons to its result.

A rank sees only its own shards. If it decided alone, ranks could call different collectives and deadlock. So each
forward of an outermost FSDP2 module begins with a vote, one byte per unit and one about the gradients:

    own vote     the message that this rank needs to send: none, a difference or the trained part, or whole weights
    exchange     bitwise or over the ranks of a node, then over nodes (and over tensor-parallel ranks), in a thread
                 and over separate gloo groups
    result       for each unit, all ranks send every message that any rank has voted for

A rank that votes for whole weights knows the result for that unit and sends at once, so a training step does not wait
for votes. A forward in which this rank has nothing to send waits for the result, 1.5 round trips between nodes,
because gloo announces a message before it sends it.

A rank votes for a unit for one of four reasons: an optimizer that holds its parameters has stepped, a version counter
has moved, `Handle.invalidate_weights` was called, or the checksum of its shard has changed since the shard was sent.
The checksum detects writes that move no counter (`parameter.data`, `to_local()`, `torch._foreach_*`). It is computed
at most once per forward, and only if the other reasons do not apply. A backward uses the weights of its forward.

On CUDA the host waits for a checksum only outside of a training step. Between two consecutive forwards with gradients
the device compares the checksums, and the host reads the result one forward later. If a write was missed, all ranks
then raise an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megazpp.drop_in.accumulate import Accumulation, Ballot
from megazpp.drop_in.checksum import checksum
from megazpp.drop_in.codec import byte_ranges
from megazpp.drop_in.gather import ProgramGather
from megazpp.drop_in.units import ProgramUnit
from megazpp.parallel.axis import MeshAxis
from megazpp.zero.comms import CommContext
from megazpp.zero.gather import InterNodeMessage
from megazpp.zero.schedule import in_backward

# A vote is an `InterNodeMessage`, possibly with this bit, which says that the last forward used outdated weights.
LATE = 4


class WatchedGather(ProgramGather):
    """A two-hop all-gather that sends weights between nodes when the ranks have voted for it.

    If only some parameters of a unit are trained, an optimizer step sends only those between nodes.

    Attributes:
        watch: the votes on all units; set before the first use.
        ballot: the last vote on this unit; None after a use has sent the weights that it decided on.
    """

    watch: WriteWatch

    def __init__(self, unit: ProgramUnit, context: CommContext) -> None:
        super().__init__(unit, context)
        self.ballot: Ballot | None = None
        self._trained: tuple[bool, ...] = ()  # `Unit.is_trained` when the shard was last sent
        # [2] checksums of the shards that were sent last: frozen parameters, trained parameters
        self._sums: torch.Tensor | None = None
        self._loaded: dict[str, torch.Tensor] = {}  # given to `load_kept` and not restored yet

    @property
    def has_parts(self) -> bool:
        """True if the unit can send less than whole weights: a difference, or only its trained parameters."""
        return self.secondary.sends_differences or len(set(self._trained)) > 1

    def before_step(self, held: Collection[int] | None = None) -> None:
        """Make the next use send whole weights if the weights were written to before this step.

        See `TwoHopGather.before_step`.
        """
        if any(self.unit.stepped(held)) and self.vote() == InterNodeMessage.KEYFRAME:
            self.drop()

    def after_step(self, *, keyframe: bool, held: Collection[int] | None = None) -> None:
        """Record the step of an optimizer that holds parameters of the unit; see `TwoHopGather.after_step`."""
        stepped = self.unit.stepped(held)
        if not any(stepped):
            return
        frozen_too = any(each and not trained for each, trained in zip(stepped, self._trained, strict=False))
        outdated = keyframe or self._made_from is None or self._trained != self.unit.is_trained
        if outdated or (frozen_too and not self._keeps_frozen()):
            self.drop()
        elif any(each and trained for each, trained in zip(stepped, self._trained, strict=True)):
            self._has_stepped, self._received = True, None
            if self.secondary.sends_differences:  # a later write is not part of this step's difference
                self._crossed.wait()
                self._keep_sums()
                self._made_from = self.unit.fingerprint()
        self._after_step = self.unit.fingerprint()

    def _keeps_frozen(self) -> bool:
        """Return True if an optimizer step has not changed the frozen parameters, whose gradients may be zeros.

        The host waits for the device. Only a parameter that was frozen while it had a gradient needs this.
        """
        assert self._sums is not None
        assert self._made_from is not None
        self._crossed.wait()
        if self.secondary.sends_differences:
            return False
        for trained, shards in self._parts():
            if not trained and bool(checksum(shards) != self._sums[0]):
                return False
        parts = zip(self._made_from, self.unit.fingerprint(), self._trained, strict=True)
        self._made_from = tuple(before if trained else now for before, now, trained in parts)
        return True

    def next_crossing(self) -> InterNodeMessage:
        """Return the kind of message that this rank has to send, including the evidence of checksums.

        On CUDA the host waits for the device.
        """
        vote = self.vote()
        return max([vote, *(kind for differs, kind in self.unknown(vote) if differs)])

    def vote(self) -> InterNodeMessage:
        """Return the kind of message that this rank needs to send, judged without a checksum."""
        if self.secondary.messages is None or self._made_from is None or self._trained != self.unit.is_trained:
            return InterNodeMessage.KEYFRAME
        moved = [now != then for now, then in zip(self.unit.fingerprint(), self._made_from, strict=True)]
        if self.secondary.sends_differences:
            return InterNodeMessage.KEYFRAME if any(moved) else InterNodeMessage(self._has_stepped)
        kinds = [self._kind_of(trained) for each, trained in zip(moved, self._trained, strict=True) if each]
        return max([InterNodeMessage.NOTHING, *kinds, *([self._kind_of(True)] if self._has_stepped else ())])

    def unknown(self, vote: InterNodeMessage) -> Iterator[tuple[torch.Tensor, InterNodeMessage]]:
        """Compare checksums of the parts of the unit that `vote` does not send.

        Yields:
            (differs, kind): a bool tensor on the device, True if the part was written to, and the kind to vote for
            then.
        """
        if vote == InterNodeMessage.KEYFRAME:
            return
        assert self._sums is not None
        self._crossed.wait()
        for trained, shards in self._parts():
            kind = self._kind_of(trained)
            if kind > vote:
                yield checksum(shards) != self._sums[int(trained)], kind

    def kept(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs of the resident weights; the unit must send differences.

        The entries are this rank's row of the resident weights, the checksum of the shard that they belong to, the
        kind of message that the next use sends, and the sizes of the last differences. There are none if the next use
        sends whole weights.
        """
        if self._loaded:
            return self._loaded
        crossing = self.next_crossing()
        if crossing == InterNodeMessage.KEYFRAME:
            return {}
        resident, recent = self.resident(), self.lossless().recent
        assert self._sums is not None
        row = resident.weights[resident.cross.rank]
        return {"row": row, "sum": self._sums[1], "crossing": torch.tensor(crossing, device="cpu"), "recent": recent}

    def load_kept(self, kept: dict[str, torch.Tensor]) -> None:
        """Make the next use send whole weights, or restore `kept` before the next forward if all ranks can."""
        self.drop()
        self.lossless().recent.zero_()  # equal on all ranks, because it gives the size of the next message
        self._loaded, self.watch.has_loaded = kept, True

    def fits(self) -> bool:
        """Return True if `load_kept` got the resident weights that belong to this rank's shard as it is now."""
        return bool(self._loaded) and bool(checksum(self.unit.padded_shards()) == self._loaded["sum"])

    def restore_kept(self, *, fits: bool) -> bool:
        """Restore the loaded resident weights if they fit on all ranks; return False if this rank's are dropped."""
        loaded, self._loaded = self._loaded, {}
        if not fits:
            return not loaded
        with self.secondary.cross.counter.paused():
            self.restore(
                loaded["row"].to(self.unit.padded_shards()[0].device), InterNodeMessage(int(loaded["crossing"]))
            )
        self.lossless().recent.copy_(loaded["recent"])
        self._trained = self.unit.is_trained
        self._keep_sums()
        return True

    def _crossings(self, *, early: bool = False) -> Iterable[InterNodeMessage]:
        """Return the kinds of messages to send between nodes, as voted; see `TwoHopGather._crossings`."""
        if self.secondary.messages is None:  # equal on all ranks, so no vote is needed
            self.ballot = None
            return (InterNodeMessage.KEYFRAME,)
        return self.watch.undone(self) if early else self.watch.crossings(self)

    @property
    def _is_current(self) -> bool:
        """True if the unit is sharded and everything that the last vote decided on was sent."""
        return self.unit.is_sharded and self.watch.is_done(self)

    def _start_cross_hop(self, *args: Any) -> None:
        """Submit the cross-node hop, and record which parameters are trained now."""
        self._trained = self.unit.is_trained
        super()._start_cross_hop(*args)

    def _take_in(self, crossing: InterNodeMessage, messages: torch.Tensor, shard: Callable[[], torch.Tensor]) -> None:
        """Run the cross-node hop for whole weights, a difference or the trained part; called in the cross queue."""
        is_part = crossing == InterNodeMessage.DIFFERENCE and not self.secondary.sends_differences
        self._keep_sums(of_frozen=not is_part)  # before the shard is read, so a write in between is detected later
        if is_part:
            self._take_in_part(messages, shard())
        else:
            super()._take_in(crossing, messages, shard)

    def _take_in_part(self, messages: torch.Tensor, shard: torch.Tensor) -> None:
        """Send and replace the bytes of the trained parameters in `messages` [N, M]; `shard` is this rank's [S]."""
        part, cross = self._trained_bytes(), self._cross
        own = self._codec.empty(1, device=shard.device)
        self._codec.pack(shard, own[0])
        sent = torch.cat([own[:, start:stop] for start, stop in part], dim=1)
        received = cross.all_gather(sent, of=self.unit.name).split([stop - start for start, stop in part], dim=1)
        torch._foreach_copy_([messages[:, start:stop] for start, stop in part], list(received))

    def _crossing_bytes(self, crossing: InterNodeMessage) -> int:
        """Return the bytes that this rank sends to each other node for a message of the kind `crossing`."""
        if crossing == InterNodeMessage.DIFFERENCE and not self.secondary.sends_differences:
            return sum(stop - start for start, stop in self._trained_bytes())
        return super()._crossing_bytes(crossing)

    def _trained_bytes(self) -> list[tuple[int, int]]:
        """Return the byte ranges of a message that hold the trained parameters."""
        trained = [segment for segment, each in zip(self.unit.segments, self._trained, strict=True) if each]
        return byte_ranges(self._codec, trained)

    def _kind_of(self, trained: bool) -> InterNodeMessage:
        """Return the kind of message to send after a write to the trained, or else to the frozen, parameters."""
        is_part = trained and self.has_parts and not self.secondary.sends_differences
        return InterNodeMessage.DIFFERENCE if is_part else InterNodeMessage.KEYFRAME

    def _parts(self) -> Iterator[tuple[bool, list[torch.Tensor]]]:
        """Yield (trained, shards) of the parts of the unit that have separate checksums.

        These are the trained and the frozen parameters. With differences, all parameters are one part.
        """
        shards = self.unit.padded_shards()
        if self.secondary.sends_differences:
            yield True, shards
            return
        for trained in dict.fromkeys(self._trained):
            yield trained, [shard for shard, each in zip(shards, self._trained, strict=True) if each == trained]

    def _keep_sums(self, *, of_frozen: bool = True) -> None:
        """Store the checksums of the shards, for frozen parameters only if `of_frozen`."""
        if self._sums is None:
            with torch.inference_mode(False):
                self._sums = torch.zeros(2, dtype=torch.int64, device=self.unit.padded_shards()[0].device)
        with torch.no_grad():
            for trained, shards in self._parts():
                if trained or of_frozen:
                    self._sums[int(trained)].copy_(checksum(shards))


class WriteWatch:
    """The votes of one model: before each forward, ranks agree which weights are sent between nodes.

    Args:
        gathers: the gathers of the units that keep weights, in the same order on all ranks.
        model: the outermost FSDP2 module. It may own no parameters directly, and then it has no unit.
        hosts: gloo axes that together connect all ranks of the model, over process groups that nothing else uses:
            inside a node, across nodes, and over tensor-parallel ranks if there are several.
        accumulation: the sums of gradients that wait.
    Attributes:
        has_loaded: whether a checkpoint's resident weights are restored before the next forward, the same on all ranks.
    """

    has_loaded = False

    def __init__(
        self, gathers: Sequence[WatchedGather], model: nn.Module, hosts: Sequence[MeshAxis], accumulation: Accumulation
    ) -> None:
        self._gathers, self._hosts, self._queue, self._accumulation = list(gathers), hosts, hosts[1].queue, accumulation
        self._index = {gather: index for index, gather in enumerate(gathers)}
        self._root: nn.Module | None = None  # outermost module whose forward is running
        self._decided: Sequence[WatchedGather] = ()  # units that the ranks voted on in this forward
        self._inside: dict[nn.Module, set[nn.Module]] = {}  # a module and all modules inside of it
        self._below: dict[nn.Module, list[WatchedGather]] = {}  # gathers of the units inside a module
        self._ballot: Ballot | None = None
        self._had_gradients = False  # whether autograd has recorded the last forward
        # Comparisons of checksums that the host has not read yet: ballot, units, results, and the event to wait for
        self._unread: tuple[Ballot, list[int], torch.Tensor, torch.cuda.Event] | None = None
        for gather in gathers:
            gather.watch = self
        for module in [each for each in model.modules() if isinstance(each, FSDPModule)]:
            module.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP2's hook, which gathers
            module.register_forward_hook(self._end, always_call=True)

    def crossings(self, gather: WatchedGather) -> Iterator[InterNodeMessage]:
        """Yield the kinds of messages that all ranks send of the unit now, in order.

        It votes first if the unit is used outside of a forward, and may wait for other ranks' votes.
        """
        if not (in_backward() or gather in self._decided):  # the program called `FSDPModule.unshard` itself
            self._decide([gather])
        yield from self.undone(gather)

    def undone(self, gather: WatchedGather) -> Iterator[InterNodeMessage]:
        """Yield the kinds of messages that the last vote decided on for the unit and that were not sent yet."""
        ballot, gather.ballot = gather.ballot, None
        if ballot is None:
            return
        # A rank knows part of the result from its own vote and sends that part before it waits for the other votes.
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
        """Return True if nothing that the last vote decided on for the unit remains to be sent."""
        ballot, index = gather.ballot, self._index[gather]
        return ballot is None or not (ballot.own[index] or ballot.result()[index])

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: Any) -> None:
        """Vote on which weights to send between nodes, when the forward of an outermost FSDP2 module begins."""
        if in_backward():  # activation checkpointing runs forwards inside a backward
            return
        # Torch does not call `_end` after an exception such as KeyboardInterrupt. The old outermost module is then not
        # running: a module that is running contains every other one whose forward begins.
        if self._root is not None and module is not self._root and module in self._inside[self._root]:
            return
        self._root = module
        if module not in self._inside:
            self._inside[module] = inside = set(module.modules())
            self._below[module] = [g for g in self._gathers if not inside.isdisjoint(g.unit.modules)]
        below = self._below[module]
        self._decided = below if any(gather.unit.is_sharded for gather in below) else ()
        if self._decided or torch.is_grad_enabled():
            self._decide(self._decided)

    @torch.compiler.disable
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward of an outermost module.

        Raises:
            RuntimeError: the previous forward missed a write on some rank, or not all ranks accumulate gradients;
                raised on all ranks.
        """
        if self._root is not module:
            return
        (ballot, self._ballot), self._root, self._decided = (self._ballot, None), None, ()
        if ballot is None:
            return
        late = [g.unit.name for g, votes in zip(self._gathers, ballot.result(), strict=False) if votes & LATE]
        if late:
            raise RuntimeError(
                f"{', '.join(late)}: the weights were written to between two forwards of a step, and the second "
                "forward used the old weights; call handle.invalidate_weights() after such a write"
            )
        self._accumulation.settle()

    def _decide(self, gathers: Sequence[WatchedGather]) -> None:
        """Vote on which of these units must send their weights between nodes, and start the exchange of votes."""
        if self.has_loaded:
            self._restore()

        # ---- this rank's votes, and comparisons of checksums
        votes, found = [0] * len(self._gathers), []
        with torch.no_grad():
            for gather in gathers:
                vote = votes[self._index[gather]] = gather.vote()
                found += [(self._index[gather], kind, differs) for differs, kind in gather.unknown(vote)]

        # ---- read the comparisons now, or one forward later if the host would have to wait inside a step
        differ = torch.stack([differs for _, _, differs in found]) if found else torch.zeros(0, device="cpu")
        inside_step = self._had_gradients and torch.is_grad_enabled()
        self._had_gradients = torch.is_grad_enabled()
        unread = None
        if differ.is_cuda and inside_step:
            copy = torch.empty(differ.shape, dtype=differ.dtype, device="cpu", pin_memory=True)
            copy.copy_(differ, non_blocking=True)
            unread = [index for index, _, _ in found], copy, torch.cuda.current_stream().record_event()
        else:
            for (index, kind, _), differs in zip(found, differ.tolist(), strict=True):
                votes[index] = max(votes[index], kind * int(differs))
        for index in self._read_late():
            votes[index] |= LATE

        # ---- exchange the votes
        votes.append(self._accumulation.vote())
        self._ballot = ballot = Ballot(votes, self._queue.submit(functools.partial(self._exchange, votes)))
        self._accumulation.ballots.append(ballot)
        self._unread = None if unread is None else (ballot, *unread)
        for gather in gathers:
            gather.ballot = ballot

    def _restore(self) -> None:
        """Restore the resident weights that a checkpoint has, for the units for which they fit on all ranks.

        It runs before a forward, because a program may load the model's weights after `Handle.load`.
        """
        self.has_loaded = False
        gathers = [gather for gather in self._gathers if gather.secondary.sends_differences]
        unfit = self._queue.submit(functools.partial(self._exchange, [not gather.fits() for gather in gathers])).join()
        pairs = zip(gathers, unfit, strict=True)
        dropped = [gather.unit.name for gather, lacks in pairs if not gather.restore_kept(fits=not lacks)]
        if dropped and dist.get_rank() == 0:
            print(
                f"megazpp: {', '.join(dropped)}: whole weights are sent, because the state of ZeRO++ was saved with "
                "other weights, or is missing on another rank",
                flush=True,
            )

    def _read_late(self) -> list[int]:
        """Return the indices of the units for which the last forward has missed a write on this rank."""
        if self._unread is None:
            return []
        ballot, indices, differ, event = self._unread
        event.synchronize()  # a short wait: the event was recorded when the last forward began
        found = [index for index, differs in zip(indices, differ.tolist(), strict=True) if differs]
        return [index for index in found if not ballot.result()[index]]

    def _exchange(self, votes: Sequence[int]) -> list[int]:
        """Return the bitwise or of all ranks' votes; runs in a communication thread."""
        found = torch.tensor(votes, dtype=torch.uint8, device="cpu")
        for axis in self._hosts:
            received = axis.all_to_all(found.repeat(axis.size, 1), of="votes")
            found = functools.reduce(torch.bitwise_or, received.unbind())
        return found.tolist()
