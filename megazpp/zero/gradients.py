"""The state of a unit's `.grad` that decides whether a late sum is still wanted.

    UnusedParameters    resets the gradient of a parameter to None if no rank had one; zeros were sent for it
    GradientMarks       detects that the program has cleared gradients whose partial sums have not crossed nodes yet

While partial sums wait for the last backward of a step, `.grad` holds zeros, so clearing it would leave no trace. No
version counter sees `torch._foreach_zero_` on a DTensor either. A mark, one very small non-zero element, shows it.

Only `megazpp.zeropp` uses these classes. They wait for the device only if a parameter got no gradient on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megazpp.zero.schedule import Finish
from megazpp.zero.units import Unit

MARKS = {torch.float16: 2.0**-12}  # fp16 cannot represent MARK
MARK = 2.0**-90  # far above subnormal numbers, far below any non-zero gradient


class UnusedParameters:
    """The parameters of a unit whose gradient must become None again, because no rank had a gradient."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._fresh: set[int] = set()  # parameters whose `.grad` was None before the reductions in flight
        self._used: set[int] = set()  # parameters that got a gradient on this rank since then
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


class GradientMarks:
    """Marks in a unit's gradients, in the first element of each shard that is not empty on this rank."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        # Per parameter the marked value, and whether the element was zero before
        self._marked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def place_later(self, indices: Sequence[int]) -> Finish:
        """Return a function that marks the gradients of the parameters `indices` at the end of the backward."""

        def place(*, aborted: bool) -> None:
            """Replace first elements that are zero by the mark, and remember the values of all first elements."""
            firsts = self._first_elements(indices)
            if firsts:
                found = torch.cat(list(firsts.values()))
                zero = found == 0
                values = torch.where(zero, MARKS.get(found.dtype, MARK), found)
                torch._foreach_copy_(list(firsts.values()), list(values.split(1)))
                self._marked = dict(zip(firsts, zip(values.split(1), zero.split(1), strict=True), strict=True))

        return place

    def take(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Remove the marks, and return the factors by which the program has scaled the gradients since.

        Args:
            indices: indices of parameters that have a gradient.
        Returns:
            One factor per index, 0 for a gradient that was zeroed. A parameter whose shard is empty on this rank gets
            the largest factor of the others. None means that nothing changed, as far as the host can tell without
            waiting.
        """
        marked, self._marked = self._marked, {}
        firsts = self._first_elements([index for index in indices if index in marked])
        if not firsts:
            return None

        # ---- compare the elements with the marked values
        now = torch.cat([first.float() for first in firsts.values()])
        before = torch.cat([marked[index][0].float() for index in firsts])
        was_zero = torch.cat([marked[index][1] for index in firsts])
        factors = torch.where(now == 0, 0.0, torch.nan_to_num(now / before, nan=1.0, posinf=1.0, neginf=1.0))

        # ---- remove the marks
        torch._foreach_copy_(list(firsts.values()), list(torch.where(was_zero, 0.0, now).split(1)))
        if not factors.is_cuda and bool((factors == 1).all()):
            return None
        found, others = dict(zip(firsts, factors.split(1), strict=True)), factors.max().view(1)
        return torch.cat([found.get(index, others) for index in indices])

    def is_wanted(self, index: int) -> bool:
        """Return True if a marked gradient was not zeroed since, and its shard is not empty. Waits for the device."""
        firsts = self._first_elements([index])
        return index in firsts and bool(firsts[index].any())

    def _first_elements(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return a view [1] of the first element of each gradient whose shard is not empty on this rank, by index."""
        found = {}
        for index in indices:
            gradient = self._unit.gradient(index)
            if gradient is not None and gradient._local_tensor.numel():
                found[index] = gradient._local_tensor.detach().view(-1)[:1]
        return found
