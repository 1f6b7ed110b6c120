"""The order of a blend in C: compiles native.c at first use and calls it through ctypes.

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
AT_ONCE = 16  # equal to AT_ONCE in native.c
NARROW = 128  # with more groups, samples are planned in blocks, and each block compares only its candidates


class _Plan(Structure):
    """The struct `plan` of native.c."""

    _fields_ = [
        *((name, c_int64) for name in ("num_groups", "block")),
        *((name, c_void_p) for name in ("shares", "taken", "starts", "members", "turns")),
        *((name, c_double) for name in ("floor", "slope", "margin", "expected")),
        *((name, c_void_p) for name in ("some_shares", "some_taken", "candidates", "lags")),
    ]


class NativePlanner:
    """Plans the samples of a blend in their order. It needs the library.

    Args:
        shares: [D] shares of the datasets, with sum 1.
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
        self._arrays = own, room  # keeps the memory alive to which the C struct points
        places = [[c_void_p(array.ctypes.data) for array in arrays] for arrays in self._arrays]
        block = (1 << 31) - 1 if size <= NARROW else round(2 * size**0.5)
        self._plan = _Plan(size, block, *places[0], -float("inf"), 0.0, 0.5 / size, float("nan"), *places[1])

    def plan(self, first: int, datasets: npt.NDArray[np.int16], numbers: npt.NDArray[np.int64]) -> None:
        """Plan the next samples and fill both arrays.

        Args:
            first: number of the first sample; each call continues after the previous one.
            datasets: [n] the dataset of each sample.
            numbers: [n] the number of each sample among the samples of its dataset.
        """
        arrays = [c_void_p(array.ctypes.data) for array in (datasets, numbers)]
        self._function(byref(self._plan), c_int64(first), c_int64(len(datasets)), *arrays)


def _groups_of(
    shares: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Group datasets by equal shares.

    Args:
        shares: [D] shares of the datasets.
    Returns:
        The distinct shares [G], the start [G + 1] of each group, and the groups' members [D], ascending in each group.
    """
    distinct, group = np.unique(shares, return_inverse=True)
    starts = np.zeros(len(distinct) + 1, dtype=np.int32)
    np.cumsum(np.bincount(group), out=starts[1:])
    return distinct, starts, np.argsort(group, kind="stable").astype(np.int32)
