"""The type of the result of `sort_rows`, which sorts the tokens of a mixture of experts by expert."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sorted(NamedTuple):
    """An order of n rows in which the rows of each expert are adjacent. A row is one token's choice of an expert.

    Attributes:
        order: [n] int64, the numbers of the rows, sorted by expert; rows of the same expert have ascending numbers.
        inverse: [n] int64, the inverse permutation: the index in `order` at which each row is.
        counts: [E] int64, number of rows of each expert.
        ends: [E] int32, cumulative sum of `counts`, as torch's grouped matrix product expects it.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    ends: Tensor
