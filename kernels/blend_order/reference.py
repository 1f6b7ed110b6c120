"""The order of a blend's samples in Python: the definition, which also serves machines without a C compiler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def plan(
    shares: npt.NDArray[np.float64],
    taken: npt.NDArray[np.float64],
    first: int,
    datasets: npt.NDArray[np.int16],
    numbers: npt.NDArray[np.int64],
) -> None:
    """Choose the datasets of the blend's next n samples, and write them into `datasets` and `numbers`.

    Args:
        shares: [D] fraction of the blend's samples that each of D datasets provides.
        taken: [D] number of samples that each dataset has provided so far; the function adds the new ones. A dataset
            whose number is infinite provides none.
        first: number of the first of these samples in the blend; each call continues after the previous one.
        datasets: [n], receives the index of each sample's dataset.
        numbers: [n], receives each sample's number among the blend's samples from its dataset.
    """
    for index in range(len(datasets)):
        behind = shares * max(first + index, 1) - taken
        chosen = int(behind.argmax())  # the dataset furthest behind its share; argmax takes the first in a tie
        datasets[index], numbers[index] = chosen, taken[chosen]
        taken[chosen] += 1.0
