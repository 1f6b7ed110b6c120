"""The order of a blend's samples in Python: the definition, which also serves machines without a C compiler.

For each sample numpy compares all datasets. native.c compares only a few candidates, but choosing these would take
longer in Python than it saves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class PythonPlanner:
    """Planner of a blend in Python: each call of `plan` chooses the datasets of the next samples.

    Args:
        shares: [D] fraction of the blend's samples that each of D datasets provides, with sum 1.
    """

    def __init__(self, shares: npt.NDArray[np.float64]) -> None:
        self._shares, self._taken = shares, np.zeros(len(shares))

    def plan(self, first: int, datasets: npt.NDArray[np.int16], numbers: npt.NDArray[np.int64]) -> None:
        """Choose the datasets of the blend's next n samples, and write them into both arrays.

        Args:
            first: number of the first of these samples in the blend; each call continues after the previous one.
            datasets: [n], receives the index of each sample's dataset.
            numbers: [n], receives each sample's number among the blend's samples from its dataset.
        """
        for index in range(len(datasets)):
            behind = self._shares * max(first + index, 1) - self._taken
            chosen = int(behind.argmax())  # the dataset furthest behind its share; argmax takes the first in a tie
            datasets[index], numbers[index] = chosen, self._taken[chosen]
            self._taken[chosen] += 1.0
