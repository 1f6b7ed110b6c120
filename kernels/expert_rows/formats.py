"""The result type of `sort_rows`, which all implementations return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sorted(NamedTuple):
    """An order of n rows in which the rows of each expert are adjacent.

    Attributes:
        order: [n] int64, rows sorted by expert, and by their number inside an expert.
        inverse: [n] int64, the inverse permutation: the place of each row in `order`.
        counts: [E] int64, number of rows of each expert.
        ends: [E] int32, cumulative sum of `counts`.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    ends: Tensor
