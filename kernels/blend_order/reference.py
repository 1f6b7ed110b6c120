"""The order of a blend in Python: the definition, which also serves machines without a C compiler.

numpy compares all datasets for each sample. Candidates as in native.c would take longer in Python than they save.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class PythonPlanner:
    """Plans the samples of a blend in their order.

    Args:
        shares: [D] shares of the datasets, with sum 1.
    """

    def __init__(self, shares: npt.NDArray[np.float64]) -> None:
        self._shares, self._taken = shares, np.zeros(len(shares))

    def plan(self, first: int, datasets: npt.NDArray[np.int16], numbers: npt.NDArray[np.int64]) -> None:
        """Plan the next samples and fill both arrays.

        Args:
            first: number of the first sample; each call continues after the previous one.
            datasets: [n] the dataset of each sample.
            numbers: [n] the number of each sample among the samples of its dataset.
        """
        for index in range(len(datasets)):
            behind = self._shares * max(first + index, 1) - self._taken
            chosen = int(behind.argmax())  # the first dataset in a tie
            datasets[index], numbers[index] = chosen, self._taken[chosen]
            self._taken[chosen] += 1.0
