"""The order of a blend's samples in C: compiles native.c at first use, and calls its function through ctypes.

A call releases Python's global interpreter lock.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megazpp.kernels.c_library import find_c_library

library = partial(find_c_library, Path(__file__).with_name("native.c"))
# The arrays of candidates have AT_ONCE more elements than there are groups, because native.c writes padding after the
# last candidate.
AT_ONCE = 16
# Datasets with equal shares form a group. Up to NARROW groups, the C code compares all groups for each sample; with
# more groups it compares only candidates.
NARROW = 128


class _Plan(Structure):
    """The struct `plan` of native.c: the state of a blend's planner, which each call of the C function updates."""

    _fields_ = [
        *((name, c_int64) for name in ("num_groups", "block")),
        *((name, c_void_p) for name in ("shares", "taken", "starts", "members", "turns")),
        *((name, c_double) for name in ("floor", "slope", "margin", "expected")),
        *((name, c_void_p) for name in ("some_shares", "some_taken", "candidates", "lags")),
    ]


class NativePlanner:
    """Planner of a blend in C: each call of `plan` chooses the datasets of the next samples.

    `library()` must have loaded the compiled C code.

    Args:
        shares: [D] fraction of the blend's samples that each of D datasets provides, with sum 1.
    """

    def __init__(self, shares: npt.NDArray[np.float64]) -> None:
        self._function = library().functions.megazpp_blend_order
        distinct, starts, members = _groups_of(shares)
        size = len(distinct)
        own: tuple[npt.NDArray[Any], ...] = (distinct, np.zeros(size), starts, members, np.zeros(size, dtype=np.int32))
        room: tuple[npt.NDArray[Any], ...] = (
            *(np.empty(size + AT_ONCE) for _ in range(2)),
            np.empty(size + AT_ONCE, dtype=np.int32),
            np.empty(size),
        )
        self._arrays = own, room  # a reference that keeps the arrays alive, because the C struct points to their memory
        places = [[c_void_p(array.ctypes.data) for array in arrays] for arrays in self._arrays]
        block = (1 << 31) - 1 if size <= NARROW else round(2 * size**0.5)
        self._plan = _Plan(size, block, *places[0], -float("inf"), 0.0, 0.5 / size, float("nan"), *places[1])

    def plan(self, first: int, datasets: npt.NDArray[np.int16], numbers: npt.NDArray[np.int64]) -> None:
        """Choose the datasets of the blend's next n samples, and write them into both arrays.

        Args:
            first: number of the first of these samples in the blend; each call continues after the previous one.
            datasets: [n], receives the index of each sample's dataset.
            numbers: [n], receives each sample's number among the blend's samples from its dataset.
        """
        arrays = [c_void_p(array.ctypes.data) for array in (datasets, numbers)]
        self._function(byref(self._plan), c_int64(first), c_int64(len(datasets)), *arrays)


def _groups_of(
    shares: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Group the datasets of a blend by equal shares, because members of a group provide samples in turn.

    Args:
        shares: [D] fraction of the blend's samples that each of D datasets provides.
    Returns:
        Three arrays for G groups: [G] the share of each group's datasets, ascending; [G + 1] the offset in the third
        array at which each group begins, then the length of that array; [D] the datasets' indices, group after group.
    """
    distinct, group = np.unique(shares, return_inverse=True)
    starts = np.zeros(len(distinct) + 1, dtype=np.int32)
    np.cumsum(np.bincount(group), out=starts[1:])
    return distinct, starts, np.argsort(group, kind="stable").astype(np.int32)
