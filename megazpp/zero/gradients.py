"""Detection of a program's changes to `.grad` while the partial sums of the gradients wait for the last backward.

    UnusedParameters    resets the gradient of a parameter to None if no rank had one; zeros were sent for it
    GradientMarks       detects changes to gradients whose partial sums have not crossed nodes yet
    RankAgreement       shares these changes, and whether a backward is the last one of its step, between all ranks

The partial sums of a gradient are summed over a node and over the micro-batches of a step. With
`set_is_last_backward(False)` they cross nodes only in the last backward. Until then `.grad` holds no gradient. Zeros
there would hide that the program clears, scales or changes it, and no version counter sees `torch._foreach_zero_` on a
DTensor. So `.grad` holds marks: a very small number in the first half of the shard, and a large one in the second half.
In the next backward each rank compares `.grad` with the marks that it has placed:

    unchanged                               the partial sums are kept
    all zero, or `.grad` is None            the partial sums are dropped
    all multiplied by the same number       the partial sums are multiplied by it
    anything else                           an error on all ranks

Addition changes small numbers only, and clipping changes large ones only, so neither looks like a multiplication. The
partial sums of a shard are on the ranks of other nodes. The rank of the shard sends them the result of its comparison
in a small message.

Only `megazpp.zeropp` uses these classes. On CUDA they wait for the device at the end of a last backward in which
partial sums waited, and if a parameter got no gradient on this rank.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue, Work
from megazpp.zero.schedule import Finish, ReduceSchedule
from megazpp.zero.units import Unit

# The marks of the two halves of a shard. The small one is far above subnormal numbers. The norm of the large ones does
# not overflow. Numbers by which a program multiplies gradients are far from their ratio, and within FACTORS.
MARKS = (2.0**-90, 2.0**40)
MARKS_OF_FP16 = (2.0**-12, 2.0**4)  # marks of fp16 gradients, which cannot represent MARKS
FACTORS = (2.0**-32, 2.0**32)
# The change of a parameter's gradient, which a rank reports to others, is a factor or one of these values
IS_NONE, IS_CHANGED = math.inf, math.nan
# Votes of a rank for a unit: its gradients cross nodes in this backward, or they wait
CROSSES, WAITS = 1, 2


class UnusedParameters:
    """The parameters of a unit whose gradient must become None again, because no rank had a gradient."""

    def __init__(self, unit: Unit) -> None:
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
        self.forget()

    def forget(self) -> None:
        """Forget the reductions that were recorded."""
        self._fresh, self._used, self._flags = set(), set(), []


class GradientMarks:
    """Marks in a unit's gradients, see the top of this file.

    Args:
        unit: the sharding unit.
        parity: 0 or 1. A shard of one element gets the small mark with 0, and the large one with 1.
    """

    def __init__(self, unit: Unit, parity: int) -> None:
        self._unit, self._parity = unit, parity
        # Per marked parameter: a weak reference to its gradient, and the gradient's values unless they were zeros
        self._marked: dict[int, tuple[weakref.ref[Any], torch.Tensor | None]] = {}
        self._zero: set[int] = set()  # parameters whose gradients are known to be zeros apart from the marks
        self._constants: dict[object, torch.Tensor] = {}  # cache of small tensors on the device

    def begin(self, waiting: Sequence[int], reduced: Iterable[int]) -> None:
        """Remove the marks; call it before FSDP2 reduces the unit's gradients.

        Args:
            waiting: indices of the parameters whose partial sums wait.
            reduced: indices of the parameters whose gradients are reduced now.
        """
        for index in waiting:
            marked, flat = self._marked.pop(index, None), self._flat(index)
            if marked is not None and flat is not None:
                _, values = marked
                flat.zero_() if values is None else flat.copy_(values)
        self._zero &= set(waiting)
        self._zero |= {index for index in {*waiting, *reduced} if self._unit.gradient(index) is None}

    def place_later(self, indices: Sequence[int]) -> Finish:
        """Return a function that marks the gradients of the parameters `indices` at the end of the backward."""

        def place(*, aborted: bool) -> None:
            """Replace the gradients by marks, and keep their values if they may not be zeros."""
            for index in indices:
                gradient, flat = self._unit.gradient(index), self._flat(index)
                if gradient is None or flat is None or index in self._marked:
                    continue
                is_zero = index in self._zero or not (flat.is_cuda or bool(flat.any()))
                self._marked[index] = weakref.ref(gradient), None if is_zero else flat.clone()
                self._fill(flat)

        return place

    def take(self, indices: Sequence[int]) -> torch.Tensor:
        """Return the program's changes to the gradients since they were marked, and mark them again.

        Args:
            indices: indices of the parameters whose partial sums wait.
        Returns:
            [P] fp32 on the device. Per parameter the factor by which the program has multiplied the gradient, 0 if it
            has zeroed it, `IS_NONE` or `IS_CHANGED`. 1 if this rank's shard is empty.
        """
        # ---- changes that the host can detect without waiting for the device
        found: list[torch.Tensor | None] = []
        measured: list[int] = []
        for index in indices:
            gradient, (marked, values) = self._unit.gradient(index), self._marked.get(index, (None, None))
            before = None if marked is None else marked()
            if gradient is None:
                self._marked.pop(index, None)
            elif marked is not None:
                self._marked[index] = weakref.ref(gradient), values
            if before is not None and before is not gradient:  # the program keeps it, perhaps to add it back later
                found.append(self._constant(IS_CHANGED))
            elif gradient is None:
                found.append(self._constant(IS_NONE))
            elif marked is None or not gradient._local_tensor.numel():
                found.append(self._constant(1.0))
            else:
                measured.append(index)
                found.append(None)

        # ---- compare marks, and scale the values that they have replaced
        factors = iter(self._measure(measured))
        for index in measured:
            self._fill(self._flat(index))
        states = [next(factors) if state is None else state for state in found]
        for index, factor in zip(indices, states, strict=True):
            if index in measured and (values := self._marked[index][1]) is not None:
                values.copy_(torch.where(factor == 0, 0.0, values * factor))  # 0 * NaN would be NaN
        return torch.stack(states)

    def is_wanted(self, index: int) -> bool:
        """Return True if a gradient was not zeroed since it was marked. Waits for the device."""
        flat = self._flat(index)
        return flat is not None and bool(flat.any())

    def _measure(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return for each marked gradient a scalar: the factor that all elements have in common, or `IS_CHANGED`."""
        if not indices:
            return ()
        # ---- the smallest and the largest number of each half; a shard of one element has one half
        extremes, marks = [], []
        for index in indices:
            flat = self._flat(index)
            assert flat is not None
            halves = [(part, mark) for part, mark in self._halves(flat) if len(part)]
            for part, mark in (halves[0], halves[-1]):
                extremes += [extreme.float() for extreme in part.aminmax()]
                marks += [mark, mark]
        if (key := tuple(marks)) not in self._constants:
            self._constants[key] = torch.tensor(marks, dtype=torch.float32, device=extremes[0].device)
        # ---- the four quotients are exact and equal if all elements were multiplied by one number
        quotients = (torch.stack(extremes) / self._constants[key]).view(-1, 4)
        factors, size = quotients[:, 0], quotients[:, 0].abs()
        valid = (quotients == factors[:, None]).all(1) & ((size == 0) | (size >= FACTORS[0]) & (size <= FACTORS[1]))
        return torch.where(valid, factors, IS_CHANGED).unbind()

    def _fill(self, flat: torch.Tensor | None) -> None:
        """Write the marks into the flat shard [n] of a gradient."""
        for part, mark in () if flat is None else self._halves(flat):
            part.fill_(mark)

    def _halves(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
        """Return the two halves of the flat shard [n] of a gradient, and the mark of each."""
        middle = (len(flat) + 1 - self._parity) // 2
        marks = MARKS_OF_FP16 if flat.dtype == torch.float16 else MARKS
        return list(zip((flat[:middle], flat[middle:]), marks, strict=True))

    def _flat(self, index: int) -> torch.Tensor | None:
        """Return the flat shard [n] of a parameter's gradient as a view; None without a gradient."""
        gradient = self._unit.gradient(index)
        return None if gradient is None else gradient._local_tensor.detach().view(-1)

    def _constant(self, value: float) -> torch.Tensor:
        """Return a scalar fp32 tensor on the unit's device; `value` is one of the changes that the host can detect."""
        key = str(value)  # NaN is unequal to itself
        if key not in self._constants:
            device = self._unit.padded_shards()[0].device
            self._constants[key] = torch.tensor(value, dtype=torch.float32, device=device)
        return self._constants[key]


class WaitingReduce(Protocol):
    """The parts of a unit's reduce-scatter that `RankAgreement` uses; see `TwoHopReduce`."""

    unit: Unit

    @property
    def crosses(self) -> bool: ...

    @property
    def waiting(self) -> tuple[int, ...]: ...

    def take_writes(self) -> torch.Tensor: ...

    def scale_partial_sums(self, states: Work[torch.Tensor], columns: slice) -> None: ...

    def drop_partial_sums(self) -> None: ...


class RankAgreement:
    """Exchange between all ranks about a backward, at its first reduction of gradients.

    A vote between hosts checks that all ranks agree whether this backward is the last one of its step. It runs in a
    thread, and a hop across nodes waits for it. If partial sums wait, two further small messages run in the
    communication queues. They report changes of `.grad` to the ranks that hold the partial sums, and errors to all.

    Args:
        schedule: calls `_check` at the end of the backward.
        hosts: gloo axes for votes, which together connect all ranks of the model.
        axes: axes inside the node and across nodes, over which gradients are reduced.
        queues: communication queues of `axes`.
    Attributes:
        votes: the votes on the running backward, see `disagree`.
    """

    def __init__(
        self,
        schedule: ReduceSchedule,
        hosts: Sequence[MeshAxis],
        axes: tuple[MeshAxis, MeshAxis],
        queues: tuple[CommQueue, CommQueue],
    ) -> None:
        self._schedule, self._hosts, self._axes, self._queues = schedule, hosts, axes, queues
        self._reduces: list[WaitingReduce] = []
        self._backward = -1
        self.votes: Work[list[int]] = Work([])
        self._states: torch.Tensor | None = None  # keeps a tensor alive that the cross queue reads
        # Names of the parameters whose sums waited, and the work that returns which of them were changed: [P] bool
        self._changed: list[tuple[list[str], Work[torch.Tensor]]] = []

    def add(self, reduce: WaitingReduce) -> None:
        """Register a unit's reduce-scatter, in the same order on all ranks."""
        self._reduces.append(reduce)

    def begin(self) -> None:
        """Start the exchange if this is the first reduction of a backward."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self._schedule.check_later(self._check)

        # ---- the vote on the last backward
        votes = [CROSSES if reduce.crosses else WAITS for reduce in self._reduces]
        self.votes = self._vote(self._hosts, votes)

        # ---- the program's changes to gradients that wait
        waiting = [reduce for reduce in self._reduces if reduce.waiting]
        if not waiting:
            return
        (local, cross), (local_queue, cross_queue) = self._axes, self._queues
        taken = [reduce.take_writes() for reduce in waiting]
        states = self._states = torch.cat(taken).view(1, -1)
        everywhere = cross_queue.submit(lambda: cross.all_gather(states, of="writes to .grad"))  # [N, P]

        def find_changed() -> torch.Tensor:
            """Return [P] bool: whether any rank has changed the gradient; runs in the local queue."""
            changed = everywhere.join().isnan().any(0, keepdim=True).to(torch.uint8)
            return local.all_gather(changed, of="writes to .grad").any(0)

        names = [reduce.unit.parameters[index].name for reduce in waiting for index in reduce.waiting]
        self._changed.append((names, local_queue.submit(find_changed, after=(everywhere,))))
        stop = 0
        for reduce, part in zip(waiting, taken, strict=True):
            stop += len(part)
            reduce.scale_partial_sums(everywhere, slice(stop - len(part), stop))

    def _vote(self, hosts: Sequence[MeshAxis], votes: Sequence[int]) -> Work[list[int]]:
        """Start a vote over some of the hosts' axes. All votes run in one queue, so their order is the same."""
        return self._hosts[1].queue.submit(functools.partial(combine_votes, hosts, votes))

    def _check(self) -> None:
        """Raise RuntimeError on all ranks if they disagree, or if a rank has changed gradients that wait."""
        self._backward = -1
        votes = self.votes.join()
        pairs = zip(self._reduces, votes, strict=True)
        if differ := [reduce.unit.key for reduce, vote in pairs if vote == CROSSES | WAITS]:
            for reduce in self._reduces:
                reduce.drop_partial_sums()  # some ranks have them and others do not
            self._changed = []
            raise RuntimeError(
                "some ranks called set_is_last_backward(False) before this backward, others did not "
                f"({differ[0]} and others): call it with the same value on all ranks. The step's gradients are dropped"
            )
        if WAITS in votes and not self._queues[0].blocks_host:
            return  # the host waits for the device only in a last backward
        changed, self._changed = self._changed, []
        for names, work in changed:
            flags = work.wait().tolist()
            if len(self._hosts) > 2:  # the work covers only the ranks with this rank's tensor-parallel index
                flags = self._vote(self._hosts[2:], flags).join()
            if found := [name for name, each in zip(names, flags, strict=True) if each]:
                raise RuntimeError(
                    f"the gradients of {', '.join(found[:3])}{' and others' * (len(found) > 3)} were written to or put "
                    "aside after a backward with set_is_last_backward(False): until the last backward of a step, .grad "
                    "holds placeholders, which may only be cleared or multiplied by a number. Use gradients after the "
                    "last backward, or call set_is_last_backward(True) before every backward, which makes gradients "
                    "complete in every micro-batch"
                )


def disagree(votes: Work[list[int]]) -> bool:
    """Return True if the ranks disagree on whether a backward is the last one. Waits for votes, not for the device."""
    return CROSSES | WAITS in votes.join()


def combine_votes(axes: Iterable[MeshAxis], votes: Sequence[int]) -> list[int]:
    """Return the bitwise or of the votes of all ranks on the hosts' axes; each vote is below 256."""
    found = torch.tensor(votes, dtype=torch.uint8, device="cpu")
    for axis in axes:
        received = axis.all_to_all(found.repeat(axis.size, 1), of="votes")
        found = functools.reduce(torch.bitwise_or, received.unbind())
    return found.tolist()
