"""Detection of a program's writes to weights, and the votes of all ranks before a forward, for `megazpp.zeropp`.

Before each forward all ranks vote on which units must send their weights across nodes. They also compare whether they
accumulate gradients (accumulate.py). This file is longer than most, so that a reader finds a vote's reasons and its
result in one place.

A rank sees only its own shards. If each rank decided alone, ranks could call different collectives and deadlock. So
each forward of an outermost FSDP2 module begins with a vote, one byte per unit and one about the gradients:

    own vote     kind of message with the unit's weights that this rank needs to send: none, a weight delta or the
                 trained parameters, or whole weights
    exchange     bitwise or over the ranks of a node, then over nodes (and over tensor-parallel ranks), in a thread
                 and over separate gloo groups
    result       for each unit, all ranks send every kind of message for which any rank has voted

If a unit can send only whole weights (`WatchedGather.has_parts` is False), one vote for whole weights decides the
result. So a rank with this vote sends the unit at once. Without weight deltas and frozen parameters, all ranks vote for
whole weights in the first forward after an optimizer step, so gathers do not wait for votes then. A rank that votes for
a weight delta or the trained parameters sends them at once, and then waits for the result. All other ranks wait for the
result first. A wait takes 1.5 round trips between nodes, because gloo announces a message before it sends the message.

A rank votes for a message of a unit for one of four reasons:

- an optimizer that holds the unit's parameters has stepped
- a version counter of the shard has moved
- the program has called `Handle.invalidate_weights`
- the checksum of the shard has changed since the shard was sent

The checksum detects writes that move no counter (`parameter.data`, `to_local()`, `torch._foreach_*`). It is computed
at most once per forward, and only if the other reasons do not apply. A backward uses the weights of its forward, so it
begins without a vote.

On CUDA the host waits for a checksum only outside of a training step. Between two consecutive forwards with gradients
the device compares the checksums, and the host reads the result one forward later. If the result then shows a write of
the program, the forward in between has used outdated weights, and all ranks raise an error.
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
from megazpp.drop_in.units import ProgramUnit, in_backward_of
from megazpp.parallel.axis import MeshAxis
from megazpp.zero.comms import CommContext
from megazpp.zero.gather import InterNodeMessage, Resident
from megazpp.zero.wire import LosslessCodec

# A vote on a unit is an `InterNodeMessage`. The additional bit LATE says that the last forward used outdated weights.
LATE = 4


class WatchedGather(ProgramGather):
    """The all-gather of a unit's weights in two hops, which sends weights between nodes when ranks have voted for it.

    If the program trains only some parameters of the unit, only these cross nodes after an optimizer step.

    Attributes:
        watch: object that holds the ranks' votes on all units of the model; its constructor sets this attribute.
        ballot: last vote on this unit. None before the first vote. Also None after `WriteWatch.undone` has begun to
            yield the messages that the last vote asks for, until the next vote.
    """

    watch: WriteWatch

    def __init__(self, unit: ProgramUnit, context: CommContext) -> None:
        super().__init__(unit, context)
        self.ballot: Ballot | None = None
        # For each parameter, whether it was trained when the unit's weights were last sent; () before that
        self._trained: tuple[bool, ...] = ()
        # Two checksums of this rank's shards when they were last sent: of the frozen and of the trained parameters.
        # With weight deltas, the second checksum covers all parameters, and the first one is not used. None before the
        # shards are first sent
        self._sums: torch.Tensor | None = None
        # Tensors of a checkpoint, by name, which `load_kept` stores here until `restore_kept` copies or discards them;
        # otherwise empty
        self._loaded: dict[str, torch.Tensor] = {}

    @property
    def has_parts(self) -> bool:
        """True if the unit can send less than all its weights: a weight delta, or only its trained parameters."""
        return self.secondary.sends_differences or len(set(self._trained)) > 1

    def before_step(self, held: Collection[int] | None = None) -> None:
        """Detect writes to the weights before an optimizer step; after a write, the next use sends whole weights.

        See `TwoHopGather.before_step`.

        Args:
            held: `id`s of the sharded parameters that the optimizer holds; None means all parameters.
        """
        if any(self.unit.stepped(held)) and self.vote() == InterNodeMessage.KEYFRAME:
            self.drop()

    def after_step(self, *, held: Collection[int] | None = None) -> None:
        """Record an optimizer step, if it may have changed parameters of this unit; see `TwoHopGather.after_step`.

        Args:
            held: `id`s of the sharded parameters that the optimizer holds; None means all parameters.
        """
        stepped = self.unit.stepped(held)
        if not any(stepped):
            return
        # In two cases, neither a weight delta nor the trained parameters alone contain all changes: if parameters were
        # frozen or unfrozen since the last cross-node hop, and if the step has changed frozen parameters. The next use
        # must then send whole weights.
        frozen_too = any(each and not trained for each, trained in zip(stepped, self._trained, strict=False))
        outdated = self._made_from is None or self._trained != self.unit.is_trained
        if outdated or (frozen_too and not self._keeps_frozen()):
            self.drop()
        elif any(each and trained for each, trained in zip(stepped, self._trained, strict=True)):
            self._has_stepped, self._received = True, None
            # Store fingerprint and checksums of the weights after the step. If a later write changes them, the next
            # use sends whole weights instead of a weight delta.
            if self.secondary.sends_differences:
                self._crossed.wait()
                self._keep_sums()
                self._made_from = self.unit.fingerprint()
        self._after_step = self.unit.fingerprint()

    def _keeps_frozen(self) -> bool:
        """Return True if an optimizer step has left the unit's frozen parameters unchanged, as checksums show.

        An optimizer step can change a frozen parameter, if the parameter still has a gradient from before it was
        frozen. If the checksums are equal, record the frozen parameters' new fingerprints, so that the step does not
        count as a write to them. The host waits for the device. With weight deltas, return False without a check,
        because the only checksum covers all parameters.
        """
        self._crossed.wait()
        assert self._sums is not None
        assert self._made_from is not None
        if self.secondary.sends_differences:
            return False
        for trained, shards in self._parts():
            if not trained and bool(checksum(shards) != self._sums[0]):
                return False
        parts = zip(self._made_from, self.unit.fingerprint(), self._trained, strict=True)
        self._made_from = tuple(before if trained else now for before, now, trained in parts)
        return True

    def next_crossing(self) -> InterNodeMessage:
        """Return the kind of message that this rank needs to send between nodes, after a comparison of checksums.

        The kinds are NOTHING, DIFFERENCE (a weight delta, or only the trained parameters if nodes exchange no weight
        deltas) and KEYFRAME (the weights of all parameters). On CUDA the host waits for the device.
        """
        vote = self.vote()
        return max([vote, *(kind for differs, kind in self.unknown(vote) if differs)])

    def vote(self) -> InterNodeMessage:
        """Return the kind of message that this rank needs to send between nodes, without a comparison of checksums.

        The kinds are NOTHING, DIFFERENCE (a weight delta, or only the trained parameters if nodes exchange no weight
        deltas) and KEYFRAME (the weights of all parameters). Version counters and recorded optimizer steps decide, so
        the host does not wait for the device.
        """
        if self.secondary.messages is None or self._made_from is None or self._trained != self.unit.is_trained:
            return InterNodeMessage.KEYFRAME
        moved = [now != then for now, then in zip(self.unit.fingerprint(), self._made_from, strict=True)]
        if self.secondary.sends_differences:
            return InterNodeMessage.KEYFRAME if any(moved) else InterNodeMessage(self._has_stepped)
        kinds = [self._kind_of(trained) for each, trained in zip(moved, self._trained, strict=True) if each]
        return max([InterNodeMessage.NOTHING, *kinds, *([self._kind_of(True)] if self._has_stepped else ())])

    def unknown(self, vote: InterNodeMessage) -> Iterator[tuple[torch.Tensor, InterNodeMessage]]:
        """Compare the unit's parameters with their last sent values, by checksums, to find writes of the program.

        The parameters form one or two groups: frozen and trained parameters, or all parameters with weight deltas. A
        group that a message of the kind `vote` sends anyway is left out.

        Yields:
            (differs, kind) for each group. `differs` is a bool tensor on the device, True if the program has written to
            the group's parameters. `kind` is the kind of message for which this rank must vote in that case.
        """
        if vote == InterNodeMessage.KEYFRAME:
            return
        self._crossed.wait()  # the unit's first hop, which creates the checksums, may still run after an async unshard
        assert self._sums is not None
        for trained, shards in self._parts():
            kind = self._kind_of(trained)
            if kind > vote:
                yield checksum(shards) != self._sums[int(trained)], kind

    def kept(self) -> dict[str, torch.Tensor]:
        """Return the tensors with which a checkpoint can restore the unit's resident weights, by name.

        The unit must send weight deltas. The dict is empty if the unit's next use sends whole weights. Otherwise it has
        four entries:

            row       this rank's row of the resident weights
            sum       checksum of this rank's shards, which `fits` compares with the checksum of the present shards
            crossing  kind of message that the unit's next use sends, an `InterNodeMessage` as a number
            recent    sizes of the last weight deltas, see `LosslessCodec`
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
        """Store resident weights of a checkpoint, which the next forward restores or drops.

        The forward restores them if, on all ranks, the checksum that was saved with them equals the checksum of the
        unit's present weights (`fits`). Otherwise the next use of the unit sends whole weights.

        Args:
            kept: result of the method `kept` when the checkpoint was saved.
        """
        self.drop()
        # `recent` sets the size of the next message, so it must be equal on all ranks of the cross axis. It stays zero
        # if the next forward drops `kept`. Otherwise it gets the saved sizes, which are equal on these ranks.
        self.lossless().recent.zero_()
        self._loaded, self.watch.has_loaded = kept, True

    def fits(self) -> bool:
        """Return True if `load_kept` got resident weights that belong to the present weights of this rank."""
        return bool(self._loaded) and bool(checksum(self.unit.padded_shards()) == self._loaded["sum"])

    def restore_kept(self, *, fits: bool) -> bool:
        """Restore the resident weights that `load_kept` got, or drop them.

        Args:
            fits: True if the loaded resident weights fit the unit's present weights on all ranks.
        Returns:
            False if this rank has dropped loaded weights; True if it has restored them or had none.
        """
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
        """Return the kinds of messages that all ranks must send of this unit between nodes now, as ranks have voted.

        The result has at most two kinds. DIFFERENCE is a weight delta, or only the trained parameters if nodes exchange
        no weight deltas. KEYFRAME is the weights of all parameters. See `TwoHopGather._crossings` for `early`.
        """
        if self.secondary.messages is None:  # the unit's first use on all ranks: they send keyframes without a vote
            self.ballot = None
            return (InterNodeMessage.KEYFRAME,)
        return self.watch.undone(self) if early else self.watch.crossings(self)

    @property
    def _is_current(self) -> bool:
        """True if the unit is sharded, and ranks have sent all its messages that the last vote on the unit asks for."""
        return self.unit.is_sharded and self.watch.is_done(self)

    def _start_cross_hop(self, *args: Any) -> None:
        """Submit the cross-node hop, and record which parameters are trained now; see the base class for arguments."""
        self._trained = self.unit.is_trained
        super()._start_cross_hop(*args)

    def _take_in(self, crossing: InterNodeMessage, messages: torch.Tensor, shard: Callable[[], torch.Tensor]) -> None:
        """Run the cross-node hop for whole weights, a weight delta, or only the trained parameters.

        The communication queue of the cross axis calls this method; see `TwoHopGather._start_cross_hop` for arguments.
        """
        is_part = crossing == InterNodeMessage.DIFFERENCE and not self.secondary.sends_differences
        # Compute checksums before `shard()` reads the weights. If the program writes to the weights in between, they
        # differ from the checksums, so the next vote asks to send them again.
        self._keep_sums(of_frozen=not is_part)
        weights = shard()
        if is_part:
            self._take_in_part(messages, weights)
            return
        super()._take_in(crossing, messages, lambda: weights)
        if isinstance(self.secondary, Resident) and crossing == InterNodeMessage.DIFFERENCE:
            differences = self.secondary.differences
            assert isinstance(differences, LosslessCodec)
            # A delta may need more room than its message has, because the learning rate has jumped or because another
            # optimizer has stepped. The forward must use all changes, as in plain FSDP2, so send whole weights then.
            # The size counters are equal on all ranks of the cross axis. On CUDA the host waits for them.
            if differences.read_counters():
                super()._take_in(InterNodeMessage.KEYFRAME, messages, lambda: weights)

    def _take_in_part(self, messages: torch.Tensor, shard: torch.Tensor) -> None:
        """Run the cross-node hop for the trained parameters only, and update their bytes in `messages`.

        Args:
            messages: [N, M] uint8 secondary partition, messages of M bytes from N nodes.
            shard: [S] flat shard of this rank, S elements.
        """
        part, cross = self._trained_bytes(), self._cross
        own = self._codec.empty(1, device=shard.device)
        self._codec.pack(shard, own[0])
        sent = torch.cat([own[:, start:stop] for start, stop in part], dim=1)
        received = cross.all_gather(sent, of=self.unit.name).split([stop - start for start, stop in part], dim=1)
        torch._foreach_copy_([messages[:, start:stop] for start, stop in part], list(received))

    def _crossing_bytes(self, crossing: InterNodeMessage) -> int:
        """Return the bytes that this rank sends to each other node in a message of the kind `crossing`.

        DIFFERENCE is a weight delta, or only the trained parameters if nodes exchange no weight deltas. KEYFRAME is the
        weights of all parameters.
        """
        if crossing == InterNodeMessage.DIFFERENCE and not self.secondary.sends_differences:
            return sum(stop - start for start, stop in self._trained_bytes())
        return super()._crossing_bytes(crossing)

    def _trained_bytes(self) -> list[tuple[int, int]]:
        """Return the byte ranges (start, stop) of the unit's message that hold its trained parameters."""
        trained = [segment for segment, each in zip(self._segments, self._trained, strict=True) if each]
        return byte_ranges(self._codec, trained)

    def _kind_of(self, trained: bool) -> InterNodeMessage:
        """Return the kind of message that the unit must send after a write to its parameters.

        The kind is DIFFERENCE if sending the trained parameters suffices, otherwise KEYFRAME.

        Args:
            trained: True for a write to trained parameters, False for a write to frozen parameters.
        """
        is_part = trained and self.has_parts and not self.secondary.sends_differences
        return InterNodeMessage.DIFFERENCE if is_part else InterNodeMessage.KEYFRAME

    def _parts(self) -> Iterator[tuple[bool, list[torch.Tensor]]]:
        """Yield the groups of the unit's parameters that have separate checksums, as (trained, shards).

        `trained` is True for the trained parameters and False for the frozen parameters. `shards` are this rank's
        shards of the group's parameters. With weight deltas there is only one group of all parameters, with `trained`
        True.
        """
        shards = self.unit.padded_shards()
        if self.secondary.sends_differences:
            yield True, shards
            return
        for trained in dict.fromkeys(self._trained):
            yield trained, [shard for shard, each in zip(shards, self._trained, strict=True) if each == trained]

    def _keep_sums(self, *, of_frozen: bool = True) -> None:
        """Store checksums of the unit's shards, with which later votes detect writes.

        Args:
            of_frozen: False leaves the checksum of the frozen parameters unchanged.
        """
        if self._sums is None:
            with torch.inference_mode(False):
                self._sums = torch.zeros(2, dtype=torch.int64, device=self.unit.padded_shards()[0].device)
        with torch.no_grad():
            for trained, shards in self._parts():
                if trained or of_frozen:
                    self._sums[int(trained)].copy_(checksum(shards))


class WriteWatch:
    """The votes on a model of `megazpp.zeropp`: before each forward, ranks agree which units send weights across nodes.

    Args:
        gathers: all-gathers of the units that keep a secondary partition, in the same order on all ranks.
        model: outermost FSDP2 module. It has no unit if all parameters belong to nested units.
        hosts: gloo axes that together connect all ranks of the model, over process groups that nothing else uses:
            inside a node, across nodes, and over tensor-parallel ranks if there are several.
        accumulation: partial sums of gradients that wait inside `Handle.accumulate`.
    Attributes:
        has_loaded: True if resident weights of a checkpoint must be restored before the next forward, the same on all
            ranks.
    """

    has_loaded = False

    def __init__(
        self, gathers: Sequence[WatchedGather], model: nn.Module, hosts: Sequence[MeshAxis], accumulation: Accumulation
    ) -> None:
        self._gathers, self._hosts, self._queue, self._accumulation = list(gathers), hosts, hosts[1].queue, accumulation
        self._index = {gather: index for index, gather in enumerate(gathers)}
        self._root: nn.Module | None = None  # outermost FSDP2 module whose forward is running; None between forwards
        # All-gathers of the units on which ranks have voted at the start of the running forward; empty between forwards
        self._decided: Sequence[WatchedGather] = ()
        self._inside: dict[nn.Module, set[nn.Module]] = {}  # cache: for an outermost FSDP2 module, all its submodules
        # Cache: for an outermost FSDP2 module, the all-gathers of the units inside of it
        self._below: dict[nn.Module, list[WatchedGather]] = {}
        self._ballot: Ballot | None = None  # the votes of the running forward; None between forwards
        self._had_gradients = False  # True if gradients were enabled in the last forward, as in a training step
        # Comparisons of checksums that the last forward has started and the host has not read yet; None if there are
        # none. The tuple has the votes before that forward, the indices of the compared units, a host tensor for the
        # results of the comparisons, and the CUDA event after which the results are in this tensor.
        self._unread: tuple[Ballot, list[int], torch.Tensor, torch.cuda.Event] | None = None
        for gather in gathers:
            gather.watch = self
        for module in [each for each in model.modules() if isinstance(each, FSDPModule)]:
            module.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP2's hook gathers weights
            module.register_forward_hook(self._end, always_call=True)

    def crossings(self, gather: WatchedGather) -> Iterator[InterNodeMessage]:
        """Yield the kinds of the messages that all ranks must send of a unit between nodes now, see `undone`.

        If the program gathers the unit outside of a forward, the ranks first vote on the unit. This method may wait for
        the votes of other ranks.
        """
        # If the program has called `FSDPModule.unshard` outside of a forward, ranks have not voted on this unit yet.
        if not (gather in self._decided or in_backward_of(gather.unit.modules[0])):
            self._decide([gather])
        yield from self.undone(gather)

    def undone(self, gather: WatchedGather) -> Iterator[InterNodeMessage]:
        """Yield the kinds of the messages of a unit that the last vote asks for, and that ranks have not sent yet.

        DIFFERENCE is a weight delta, or only the trained parameters if nodes exchange no weight deltas. KEYFRAME is the
        weights of all parameters. If ranks have voted for both kinds, DIFFERENCE comes first.
        """
        ballot, gather.ballot = gather.ballot, None
        if ballot is None:
            return
        # All ranks send every kind of message for which any rank has voted. So this rank can send the kind of its own
        # vote before the other ranks' votes have arrived. There is one exception: a keyframe must wait for the votes if
        # another rank may have voted for DIFFERENCE, because all ranks send DIFFERENCE first.
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
        """Return True if ranks have sent all messages of a unit that the last vote on this unit asks for.

        This method may wait for the votes of other ranks.
        """
        ballot, index = gather.ballot, self._index[gather]
        return ballot is None or not (ballot.own[index] or ballot.result()[index])

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: Any) -> None:
        """Vote on which units send weights between nodes, when the forward of an outermost FSDP2 module begins.

        Torch calls this hook before the forward of each FSDP2 module.
        """
        # In a backward of this model, activation checkpointing repeats the model's forwards. They use the weights on
        # which ranks have voted, so there is no further vote. A forward in another model's backward needs a vote.
        if in_backward_of(module):
            return
        # While a forward of the outermost module runs, only modules inside of it begin forwards. A forward of another
        # module shows that an exception such as KeyboardInterrupt has ended the old forward without a call of `_end`.
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
        """Read the results of the votes when the forward of an outermost module ends.

        Torch calls this hook after the forward of each FSDP2 module.

        Raises:
            RuntimeError: the previous forward has used outdated weights, because the program had written to the weights
                of some rank; or only some ranks run the forward inside `Handle.accumulate`. All ranks raise this error.
        """
        if self._root is not module:
            return
        (ballot, self._ballot), self._root, self._decided = (self._ballot, None), None, ()
        if ballot is None:
            return
        late = [g.unit.name for g, votes in zip(self._gathers, ballot.result(), strict=False) if votes & LATE]
        if late:
            raise RuntimeError(
                f"the program has written to weights of {', '.join(late)} between two forwards of a step, and the "
                "second forward used the old weights: call handle.invalidate_weights() after such a write"
            )
        self._accumulation.settle()

    def _decide(self, gathers: Sequence[WatchedGather]) -> None:
        """Compute this rank's votes on which units must send weights between nodes, and start the exchange of votes.

        Args:
            gathers: all-gathers of the units on which the ranks vote.
        """
        if self.has_loaded:
            self._restore()

        # ---- compute this rank's votes, and start the comparisons of checksums
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

        # ---- start the exchange of votes in a communication thread
        votes.append(self._accumulation.vote())
        self._ballot = ballot = Ballot(votes, self._queue.submit(functools.partial(self._exchange, votes)))
        self._accumulation.ballots.append(ballot)
        self._unread = None if unread is None else (ballot, *unread)
        for gather in gathers:
            gather.ballot = ballot

    def _restore(self) -> None:
        """Restore the resident weights that `Handle.load` has read for each unit, if they fit the unit on all ranks.

        Resident weights fit a unit if they were saved together with the unit's present weights. If the resident weights
        of a unit do not fit on one rank, all ranks drop the resident weights of this unit.

        A forward calls this method, and not `Handle.load`: a program may load the model's weights after `Handle.load`.
        """
        self.has_loaded = False
        gathers = [gather for gather in self._gathers if gather.secondary.sends_differences]
        unfit = self._queue.submit(functools.partial(self._exchange, [not gather.fits() for gather in gathers])).join()
        pairs = zip(gathers, unfit, strict=True)
        dropped = [gather.unit.name for gather, lacks in pairs if not gather.restore_kept(fits=not lacks)]
        if dropped and dist.get_rank() == 0:
            print(
                f"megazpp: {', '.join(dropped)}: the next forward sends whole weights between nodes, because the state "
                "of ZeRO++ was saved with other weights, or is missing on another rank",
                flush=True,
            )

    def _read_late(self) -> list[int]:
        """Return the indices of the units whose weights the last forward used, although they were outdated.

        The program had written to this rank's weights of these units, and no rank had voted to send them. Inside a
        training step on CUDA, a forward starts the comparisons of checksums that show such writes, but does not wait
        for the results. This method reads the results. The list is empty if there are none.
        """
        if self._unread is None:
            return []
        ballot, indices, differ, event = self._unread
        event.synchronize()  # hardly waits: the event was recorded at the start of the last forward
        found = [index for index, differs in zip(indices, differ.tolist(), strict=True) if differs]
        return [index for index in found if not ballot.result()[index]]

    def _exchange(self, votes: Sequence[int]) -> list[int]:
        """Exchange votes with all ranks, and return the bitwise or of all ranks' votes.

        A communication thread runs this method, so the thread of the forward does not wait.
        """
        found = torch.tensor(votes, dtype=torch.uint8, device="cpu")
        for axis in self._hosts:
            received = axis.all_to_all(found.repeat(axis.size, 1), of="votes")
            found = functools.reduce(torch.bitwise_or, received.unbind())
        return found.tolist()
