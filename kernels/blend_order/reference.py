"""The order of a blend in Python, for machines without a C compiler; native.c explains groups, candidates and floor."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

NARROW = 32  # with more groups, samples are planned in blocks, and each block compares only its candidates


def groups_of(
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


class PythonPlanner:
    """Plans the samples of a blend in their order.

    Args:
        shares: [D] shares of the datasets, with sum 1.
    """

    def __init__(self, shares: npt.NDArray[np.float64]) -> None:
        self._shares, starts, members = groups_of(shares)
        self._members = [part.tolist() for part in np.split(members, starts[1:-1])]
        self._taken, self._turns = np.zeros(len(self._shares)), [0] * len(self._shares)
        self._floor, self._margin = -math.inf, 1.0 / len(self._shares)
        self._block = (1 << 16) if len(self._shares) <= NARROW else max(8, round(len(self._shares) ** 0.5 / 2))

    def plan(self, first: int, datasets: npt.NDArray[np.int16], numbers: npt.NDArray[np.int64]) -> None:
        """Plan the next samples and fill both arrays.

        Args:
            first: number of the first sample; each call continues after the previous one.
            datasets: [n] the dataset of each sample.
            numbers: [n] the number of each sample among the samples of its dataset.
        """
        done, wide, turns = 0, len(self._shares) > NARROW, self._turns
        while done < len(datasets):
            # ---- the candidates of this block
            size = min(self._block, len(datasets) - done)
            last = max(first + done + size - 1, 1)
            groups = np.flatnonzero(self._shares * last - self._taken >= self._floor).tolist()
            shares, taken = self._shares[groups].tolist(), self._taken[groups].tolist()
            members = [self._members[group] for group in groups]
            # ---- choose among them, until a lag is below the floor
            planned, least, lag = list[tuple[int, float]](), math.inf, self._floor
            for n in range(first + done, first + done + size if groups else 0):
                at = n or 1
                lags = [share * at - count for share, count in zip(shares, taken, strict=True)]
                lag = max(lags)
                if lag < self._floor:
                    break
                j = lags.index(lag)
                if lags.count(lag) > 1:
                    equal = (k for k, other in enumerate(lags) if other == lag)
                    j = min(equal, key=lambda k: members[k][turns[groups[k]]])
                group, own = groups[j], members[j]
                least = min(least, lag)
                planned.append((own[turns[group]], taken[j]))
                turns[group] += 1
                if turns[group] == len(own):
                    turns[group] = 0
                    taken[j] += 1.0
            # ---- store the choices, and set the next floor
            self._taken[groups] = taken
            if planned:
                part = slice(done, done + len(planned))
                datasets[part], numbers[part] = np.array(planned).T
            done += len(planned)
            if len(planned) < size:  # the floor was too high
                self._margin *= 2.0
                self._floor = lag - self._margin
            elif wide:
                self._margin *= 0.98
                self._floor = least - self._margin
