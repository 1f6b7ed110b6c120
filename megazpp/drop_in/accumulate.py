"""Gradient accumulation in which the sums of a node wait for the last backward of a step.

Inside `Handle.accumulate` a backward reduces gradients inside the node only. The node's sums wait, and `.grad` stays as
it was. The first backward outside of it adds its own gradients to the sums, sends them across nodes, and completes
`.grad`.

The sums of a shard are on ranks of all nodes. So if one rank discards them, or leaves `accumulate` by an exception, all
ranks have to. It tells them in the votes of its next forward (writes.py). The same votes show whether all ranks run
this forward inside `accumulate`, or all outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from megazpp.drop_in.units import ProgramUnit
from megazpp.parallel.comm_queue import Work
from megazpp.zero.schedule import in_backward

# A vote about gradients is the sum of some of these: this forward is inside `accumulate`, it is outside of it, and this
# rank has discarded sums since its last vote.
INSIDE, OUTSIDE, DISCARDED = 1, 2, 4


class Ballot:
    """The votes of one forward.

    Args:
        own: this rank's votes: for each unit, which weights it must send between nodes, and one vote about gradients.
        work: returns the bitwise or of all ranks' votes.
    """

    def __init__(self, own: Sequence[int], work: Work[list[int]]) -> None:
        self.own, self._work = own, work

    def result(self) -> list[int]:
        """Return the bitwise or of all ranks' votes; waits until every rank has voted."""
        return self._work.join()


class Sums(Protocol):
    """The sums of a unit's gradients that may wait on this node; see `RestoringReduce`."""

    unit: ProgramUnit
    waiting: tuple[int, ...]

    def drop(self) -> None: ...


class Accumulation:
    """The sums of gradients that wait for the last backward of a step, in all units of a model.

    Attributes:
        sums: the sums of each unit.
        is_open: True inside `Handle.accumulate`.
        ballots: votes whose results were not read yet.
    """

    def __init__(self) -> None:
        self.sums: list[Sums] = []
        self.is_open = False
        self.ballots: list[Ballot] = []
        self._discarded = False  # whether this rank has discarded sums since its last vote
        self._completing: int | None = None  # the backward that completes `.grad`, by autograd's number

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let gradients wait in the backwards inside this context; an exception discards the sums."""
        if self.is_open or in_backward():
            where = "another accumulate()" if self.is_open else "a backward"
            raise RuntimeError(f"accumulate() was entered inside {where}: enter it between backwards")
        self.is_open = True
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self.is_open = False

    def discard(self) -> None:
        """Drop the sums on this rank now, and on all other ranks in the next forward."""
        if in_backward():
            raise RuntimeError("discard() was called inside a backward: call it between backwards")
        self._discarded, self._completing = True, None
        self._drop()

    def vote(self) -> int:
        """Return this rank's vote about gradients for the forward that begins."""
        vote = DISCARDED if self._discarded else 0
        if torch.is_grad_enabled():
            vote |= INSIDE if self.is_open else OUTSIDE
        self._discarded = False
        return vote

    def settle(self) -> None:
        """Read the results of the last votes, and drop the sums if any rank has discarded them.

        Raises:
            RuntimeError: some ranks ran the forward inside `accumulate` and others outside of it; raised on all ranks.
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
        """Raise RuntimeError if sums of an earlier step could become part of the reduction that begins."""
        self.settle()
        if self._discarded:
            raise RuntimeError(
                "discard() was called after the forward of this backward: run a forward first, in which all ranks "
                "discard their sums of gradients"
            )
        backward = torch._C._current_graph_task_id()
        if self._completing not in (None, backward) and any(sums.waiting for sums in self.sums):
            raise RuntimeError(
                "an exception interrupted the backward that completes gradients after accumulate(): call discard() "
                "and clear the gradients"
            )
        self._completing = None if self.is_open else backward

    def waits_for(self, held: set[int] | None) -> str | None:
        """Return the name of a parameter whose gradient waits, or None if there is none.

        Args:
            held: `id`s of the parameters to consider; None means all.
        """
        for sums in self.sums:
            for index in sums.waiting:
                if held is None or sums.unit.shard_id(index) in held:
                    return sums.unit.parameters[index].name
        return None

    def _drop(self) -> None:
        """Drop all sums on this rank."""
        for sums in self.sums:
            sums.drop()
