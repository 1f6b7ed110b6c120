"""Gradient accumulation for programs that use `megazpp.zeropp`: gradients cross nodes once per optimizer step.

Inside `Handle.accumulate` a backward reduces gradients only inside the node. The resulting partial sums wait in the
node, and `.grad` stays as it was. The first backward outside of `accumulate` adds its own gradients to the partial
sums, sends them across nodes, and completes `.grad`.

The cross-node hop adds up the partial sums of all nodes. So if one rank discards its partial sums, or leaves
`accumulate` by an exception, all ranks must discard theirs. The rank informs the other ranks by its vote in the next
forward (writes.py). The same votes show whether all ranks run this forward inside `accumulate`, or all outside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from megazpp.drop_in.units import ProgramUnit
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import at_end_of_backward, in_backward

# A rank's vote about gradients is the sum of some of these bits. INSIDE: the forward runs inside `Handle.accumulate`.
# OUTSIDE: the forward runs outside of it. DISCARDED: the rank has discarded partial sums since its last vote.
INSIDE, OUTSIDE, DISCARDED = 1, 2, 4


class Ballot(NamedTuple):
    """The votes of all ranks before one forward: which weights to send between nodes, and what happens to gradients.

    Attributes:
        own: votes of this rank as bit masks: for each unit, which weights this rank must send; and at the end the sum
            of INSIDE, OUTSIDE and DISCARDED that holds for this rank.
        work: task that exchanges the votes and returns the bitwise or of all ranks' votes.
    """

    own: Sequence[int]
    work: Work[list[int]]

    def result(self) -> list[int]:
        """Wait until every rank has voted, and return the bitwise or of all ranks' votes."""
        return self.work.join()


class Sums(Protocol):
    """The interface to one unit's partial sums of gradients that wait in the node: `RestoringReduce` implements it."""

    unit: ProgramUnit
    waiting: tuple[int, ...]  # indices of the parameters whose partial sums wait for the cross-node hop now

    def drop(self) -> None: ...


class Accumulation:
    """The partial sums of gradients that wait for the last backward of a step, in all units of a program's model.

    Attributes:
        sums: objects that hold the partial sums, one per unit.
        is_open: True inside `Handle.accumulate`.
        ballots: votes of forwards whose results this rank has not read yet.
    """

    def __init__(self) -> None:
        self.sums: list[Sums] = []
        self.is_open = False
        self.ballots: list[Ballot] = []
        self._discarded = False  # True if this rank has discarded partial sums since its last vote
        # Weak reference, from `at_end_of_backward`, to the backward outside of `accumulate` that completes `.grad`. A
        # call of the reference returns None if an exception has ended that backward. The attribute is None before that
        # backward, after its regular end, and after `discard`.
        self._completing: Callable[[], object] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Return the context of `Handle.accumulate`: gradients of backwards inside the context wait in the node.

        The first backward after the context adds its own gradients to the waiting ones, and sends the sums across
        nodes. If an exception leaves the context, all waiting partial sums are discarded.
        """
        if self.is_open or in_backward():
            where = "another accumulate()" if self.is_open else "a backward"
            raise RuntimeError(f"accumulate() was entered inside {where}: enter it once, and between backwards")
        self.is_open = True
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self.is_open = False

    def discard(self) -> None:
        """Drop all waiting partial sums of gradients on this rank now, and on all other ranks in the next forward."""
        if in_backward():
            raise RuntimeError("discard() was called inside a backward: call it between backwards")
        self._discarded, self._completing = True, None
        self._drop()

    def vote(self) -> int:
        """Return this rank's vote about gradients for the next forward: the sum of the bits that apply.

        INSIDE or OUTSIDE says whether the forward runs inside `Handle.accumulate`. A forward without gradients sets
        neither of the two. DISCARDED says that this rank has discarded partial sums since its last vote.
        """
        vote = DISCARDED if self._discarded else 0
        if torch.is_grad_enabled():
            vote |= INSIDE if self.is_open else OUTSIDE
        self._discarded = False
        return vote

    def settle(self) -> None:
        """Wait for the votes about gradients in all forwards since the last call, and act on their results.

        If any rank has discarded its waiting partial sums, drop this rank's sums too.

        Raises:
            RuntimeError: some ranks have run the forward inside `Handle.accumulate`, others outside of it. All ranks
                raise this error.
        """
        ballots, self.ballots = self.ballots, []
        for votes in [ballot.result()[-1] for ballot in ballots]:
            if votes & DISCARDED:
                self._drop()
            if votes & INSIDE and votes & OUTSIDE:
                raise RuntimeError(
                    "some ranks run this forward inside accumulate() and others outside of it: the same micro-batch "
                    "must be the last one of a step on all ranks"
                )

    def begin_reduction(self) -> None:
        """Check, before the reduction of a unit, that it will not add partial sums of an earlier, abandoned step.

        Raises:
            RuntimeError: this rank has discarded partial sums between the forward and this backward, so no vote has yet
                made the other ranks discard theirs; or an exception has interrupted an earlier backward outside of
                `Handle.accumulate`, which was to complete the gradients.
        """
        self.settle()
        if self._discarded:
            raise RuntimeError(
                "discard() was called between a forward and its backward: run another forward before the backward, so "
                "that all ranks discard their sums of gradients"
            )
        interrupted = self._completing is not None and self._completing() is None
        if interrupted and any(sums.waiting for sums in self.sums):
            raise RuntimeError(
                "an exception has interrupted the backward that completes gradients after accumulate(), so sums of "
                "gradients of that step still wait: call discard() and clear the gradients"
            )
        if self.is_open:
            self._completing = None
        elif self._completing is None or interrupted:
            self._completing = at_end_of_backward(functools.partial(setattr, self, "_completing", None))

    def waits_for(self, held: set[int] | None) -> str | None:
        """Return the name of one parameter whose gradient waits since `Handle.accumulate`; None if no gradient waits.

        Args:
            held: `id`s of the sharded parameters that an optimizer holds; only these are considered. None considers all
                parameters.
        """
        for sums in self.sums:
            for index in sums.waiting:
                if held is None or sums.unit.shard_id(index) in held:
                    return sums.unit.parameters[index].name
        return None

    def _drop(self) -> None:
        """Free the partial sums of gradients that wait on this rank since `Handle.accumulate`, in all units."""
        for sums in self.sums:
            sums.drop()
