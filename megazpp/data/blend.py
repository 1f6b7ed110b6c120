"""Several datasets as one, mixed in given proportions.

`--data-path 0.3 A 0.7 B` means that of the samples served, 30 % come from A: the weights are proportions of samples,
not of files. Sample n is taken from the dataset that is furthest behind its share (largest weight * n - taken), so
every prefix of training has the proportions to within one sample per dataset. The order is Megatron's, ties included.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megazpp.data.gpt_dataset import GPTDataset


def parse_blend(values: Sequence[str], *, flag_name: str) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """What a flag like --data-path says: the prefixes of .bin/.idx pairs, and their positive weights if it has any.

    Args:
        values: `A B C`, or `0.3 A 0.7 B`. As in Megatron the latter is meant if every other value is a number.
        flag_name: the flag, for error messages.
    Raises:
        ValueError: a weight is not positive, or some datasets have one and others do not.
    """
    numbers = [_as_number(value) for value in values]
    if values and len(values) % 2 == 0 and all(number is not None for number in numbers[::2]):
        weights = tuple(number for number in numbers[::2] if number is not None)
        if not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"{flag_name} {' '.join(values)}: weights must be positive numbers")
        return tuple(values[1::2]), weights
    if any(number is not None for number in numbers):
        raise ValueError(f"{flag_name} {' '.join(values)}: give a weight before every dataset, or before none")
    return tuple(values), None


class BlendIndices(NamedTuple):
    """Of n samples [n] int16, which dataset each comes from, and [n] int64, which of that dataset's samples it is."""

    datasets: np.ndarray
    samples: np.ndarray


class BlendedDataset:
    """Samples of `datasets`, each with as many as the blend takes from it, in the order of `blend_indices`."""

    def __init__(self, datasets: Sequence[GPTDataset], indices: BlendIndices) -> None:
        self.datasets, self._indices = list(datasets), indices
        self._taken = np.bincount(indices.datasets, minlength=len(datasets))
        for dataset, count in zip(datasets, self._taken, strict=True):
            assert len(dataset) >= count, f"a blend takes {count} samples of {dataset.name}'s {len(dataset)}"

    def __len__(self) -> int:
        return len(self._indices.datasets)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`: [seq_length + 1] int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"blended dataset: sample {index} of {len(self)}")
        return self.datasets[self._indices.datasets[index]][int(self._indices.samples[index])]

    @property
    def description(self) -> str:
        """One line for people, and one for each dataset."""
        parts = zip(self._taken, self.datasets, strict=True)
        lines = [f"    {count:,} from {dataset.description}" for count, dataset in parts]
        return "\n".join([f"{len(self):,} samples, of which", *lines])

    def token_counts(self, size: int) -> npt.NDArray[np.float64]:
        """How often each id below `size` is to be expected among the samples served: [size], up to a factor."""
        counted = zip(self._taken, (dataset.token_counts(size) for dataset in self.datasets), strict=True)
        return np.sum([taken * counts / counts.sum() for taken, counts in counted], axis=0)


def blend_indices(weights: Sequence[float], num_samples: int) -> BlendIndices:
    """Which dataset each of `num_samples` samples comes from, and which of its samples it is.

    A loop in Python (a second or two per million samples, then cached), because each choice depends on all before
    it; the arithmetic is Megatron's, in the same order, so that rounding breaks ties the same way.
    """
    shares = (np.array(weights) / np.sum(weights)).tolist()
    taken = [0] * len(shares)
    choices = array("h")
    for n in range(num_samples):
        m = max(n, 1)
        behind = [share * m - count for share, count in zip(shares, taken, strict=True)]
        chosen = behind.index(max(behind))
        choices.append(chosen)
        taken[chosen] += 1
    datasets = np.array(choices, dtype=np.int16)
    samples = np.empty(num_samples, dtype=np.int64)
    for dataset, count in enumerate(taken):
        samples[datasets == dataset] = np.arange(count)
    return BlendIndices(datasets, samples)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
