"""The state of a unit's `.grad` that decides what becomes of sums which FSDP2 does not know.

    UnusedParameters    a parameter that got a gradient on no rank has None, and not the zeros that were sent for it
    GradientMarks       partial sums are dropped when the program has cleared the gradients that they belong to

While partial sums wait for a step's last backward, `.grad` holds zeros, so nobody could tell whether the program has
zeroed it since. A mark, one element that is not zero, can: no version counter sees `torch._foreach_zero_` on a DTensor.
Both classes are used by `zeropp` alone. Neither waits for the device, unless a parameter got no gradient on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megazpp.zero.schedule import Finish
from megazpp.zero.units import Unit

MARKS = {torch.float16: 2.0**-12}
MARK = 2.0**-90  # far above subnormal numbers, far below any gradient that is not zero


class UnusedParameters:
    """The parameters of a unit whose gradient has to become None again, because no rank had one."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._fresh: set[int] = set()  # had no gradient before the sums that are on their way
        self._used: set[int] = set()  # have got one on this rank
        self._flags: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []

    def begin(self, used: set[int], reduced: Iterable[int]) -> None:
        """Call before FSDP2 reduces the gradients of `reduced`, which are zeros except where `used`."""
        cleared = {index for index in reduced if self._unit.gradient(index) is None}
        self._fresh |= cleared
        self._used = self._used - cleared | used

    def read_later(self, indices: tuple[int, ...], flags: list[torch.Tensor]) -> None:
        """Know the list in which the flags of `indices` will be: [P] uint8, 1 where any rank had a gradient."""
        self._flags.append((indices, flags))

    def restore_none(self) -> None:
        """Set the gradients to None that no rank had; call when FSDP2 has set them, and all flags are there."""
        unused = self._fresh - self._used
        if unused and not self._unit.zero_fills:
            for indices, flags in self._flags:
                for flag in flags:
                    unused -= {index for index, on in zip(indices, flag.tolist(), strict=True) if on}
            for index in unused:
                self._unit.clear_gradient(index)
        self._fresh, self._used, self._flags = set(), set(), []


class GradientMarks:
    """Marks in the gradients of a unit, in the first element of each shard that has one."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._marked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the element, and whether it was zero before

    def place_later(self, indices: Sequence[int]) -> Finish:
        """Return a function that marks the gradients of `indices`; it is called at the end of the backward."""

        def place(*, aborted: bool) -> None:
            firsts = self._first_elements(indices)
            if firsts:
                found = torch.cat(list(firsts.values()))
                zero = found == 0
                values = torch.where(zero, MARKS.get(found.dtype, MARK), found)
                torch._foreach_copy_(list(firsts.values()), list(values.split(1)))
                self._marked = dict(zip(firsts, zip(values.split(1), zero.split(1), strict=True), strict=True))

        return place

    def take(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Remove the marks, and return what the program has multiplied gradients by since they were placed.

        Args:
            indices: parameters that have a gradient.
        Returns:
            One factor per index, 0 for a gradient that was zeroed. A parameter of whose shard this rank has nothing
            has the largest factor of the others. None: nothing was changed, as far as is known on the host.
        """
        marked, self._marked = self._marked, {}
        firsts = self._first_elements([index for index in indices if index in marked])
        if not firsts:
            return None
        now = torch.cat([first.float() for first in firsts.values()])
        before = torch.cat([marked[index][0].float() for index in firsts])
        was_zero = torch.cat([marked[index][1] for index in firsts])
        factors = torch.where(now == 0, 0.0, torch.nan_to_num(now / before, nan=1.0, posinf=1.0, neginf=1.0))
        torch._foreach_copy_(list(firsts.values()), list(torch.where(was_zero, 0.0, now).split(1)))
        if not factors.is_cuda and bool((factors == 1).all()):
            return None
        found, others = dict(zip(firsts, factors.split(1), strict=True)), factors.max().view(1)
        return torch.cat([found.get(index, others) for index in indices])

    def is_wanted(self, index: int) -> bool:
        """True if a marked gradient was not zeroed since, where this rank has a part of it; waits for the device."""
        firsts = self._first_elements([index])
        return index in firsts and bool(firsts[index].any())

    def _first_elements(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """[1] of each gradient of which this rank has a part, by index."""
        found = {}
        for index in indices:
            gradient = self._unit.gradient(index)
            if gradient is not None and gradient._local_tensor.numel():
                found[index] = gradient._local_tensor.detach().view(-1)[:1]
        return found
