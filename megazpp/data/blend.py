"""Sources of sequences, and the blended samples of one split of them.

A source is a .bin/.idx pair or generated documents. A split (train, valid or test) takes the same share of each
source's sequences. If a source has too few sequences, the split takes a share of its tokens. A `GPTDataset` samples
each share, and several shares are blended. The blend is planned first, so that each source builds exactly as many
samples as the blend takes from it.

`--data-path 0.3 A 0.7 B` takes 30 % of the samples from A. Sample n comes from the dataset that is furthest behind its
share (largest weight * n - taken). Every prefix of the training therefore has the given proportions to within one
sample per dataset. The order is Megatron's, ties included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megazpp.base.program import Problems, errors_as, say
from megazpp.data.cache import cache_key, load_or_save_arrays
from megazpp.data.config import parse_blend
from megazpp.data.gpt_dataset import GPTDataset, Sequences, Source
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.kernels.blend_order import MOST_DATASETS, blend_order

_COUNTED_AT_ONCE = 1 << 24  # samples; numpy needs 8 bytes for each of them while it counts


class DataSource(NamedTuple):
    """A source of sequences of token ids.

    Attributes:
        sequences: the sequences.
        name: name for messages.
        is_cached: True if indices of these sequences belong in the cache.
        by_tokens: True if splits take shares of the tokens and cut sequences, instead of shares of the sequences.
    """

    sequences: Sequences
    name: str
    is_cached: bool = True
    by_tokens: bool = False


def open_sources(values: Sequence[str], *, flag_name: str) -> tuple[list[DataSource], tuple[float, ...] | None]:
    """Open the .bin/.idx pairs that a flag like --data-path names, and return them with their weights, if any."""
    prefixes, weights = parse_blend(values, flag_name=flag_name)
    if len(prefixes) > MOST_DATASETS:
        raise ValueError(f"{flag_name}: {len(prefixes)} datasets, a blend has at most {MOST_DATASETS}")
    problems, sources = Problems(), list[DataSource]()
    for prefix in prefixes:
        with problems:
            sources.append(indexed_source(Path(prefix).expanduser(), flag_name))
    problems.raise_all()
    return sources, weights


def indexed_source(prefix: Path, flag_name: str) -> DataSource:
    """Open one .bin/.idx pair."""
    with errors_as(f"{flag_name} {prefix}"):
        return DataSource(IndexedDataset(prefix), str(prefix))


def fit_for_split(sources: Iterable[DataSource], split: Sequence[tuple[float, float]]) -> list[DataSource]:
    """Return the sources, with `by_tokens` set on each that has too few sequences for a share of the split.

    All shares of --split count, whether this run uses them or not.
    """

    fitted = []
    for source in sources:
        edges = [_edges(bounds, len(source.sequences.lengths)) for bounds in split if bounds[0] < bounds[1]]
        fitted.append(source._replace(by_tokens=any(start >= stop for start, stop in edges)))
    return fitted


def build_split(
    use: str,
    sources: Sequence[DataSource],
    weights: Sequence[float] | None,
    bounds: tuple[float, float],
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    vocab_size: int,
    cache_path: Path,
) -> GPTDataset | BlendedDataset:
    """Build the samples of one split.

    Args:
        use: "train", "valid" or "test", for messages.
        sources: sources of sequences.
        weights: proportions of samples to take from each source; None takes them in proportion to the sources' sizes.
        bounds: shares of each source's sequences (or tokens), in [0, 1], at which the split begins and ends.
        num_samples: number of samples of the split.
        seq_length: tokens of a sample.
        seed: seed for the order of the samples.
        vocab_size: size of the vocabulary, which all ids have to be below.
        cache_path: cache directory for the indices.
    Raises:
        ValueError: the split gets too few ids of a source for one sample, or ids beyond the vocabulary.
    """
    parts = [_take(source, bounds) for source in sources]
    indices = cache_path / "indices"

    def sample(source: DataSource, span: tuple[int, int], count: int) -> GPTDataset:
        order = {"num_samples": count, "seq_length": seq_length, "seed": seed}
        folder, name = indices if source.is_cached else None, f"{source.name} ({use})"
        dataset = GPTDataset(source.sequences, span, **order, name=name, vocab_size=vocab_size, cache_path=folder)
        _ = dataset[0]  # reports ids beyond the vocabulary now instead of in the first step
        return dataset

    if len(parts) == 1:
        return sample(*parts[0], num_samples)
    # The default weights are samples per epoch, at least 1: `sample` then reports a source that is too small.
    sizes = [int(source.sequences.lengths[slice(*span)].sum(dtype=np.int64)) for source, span in parts]
    weights = tuple(weights or (float(max(1, (size - 1) // seq_length)) for size in sizes))
    path = indices / f"blend-{cache_key(kind='blend-1', weights=weights, num_samples=num_samples)}"
    chosen, numbers = load_or_save_arrays(path, lambda: blend_order(weights, num_samples, say=say))
    taken = _count(chosen, len(parts)).tolist()
    datasets = [sample(*part, count) for part, count in zip(parts, taken, strict=True)]
    return BlendedDataset(datasets, chosen, numbers, weights=weights)


class BlendedDataset:
    """A dataset that takes its samples from several datasets, in the order that `blend_order` plans.

    Args:
        datasets: datasets, each with at least as many samples as the blend takes from it.
        chosen: [n] int16 dataset of each sample.
        numbers: [n] int64 number of each sample in its dataset.
        weights: weights that the arrays were planned with; None for the number of samples taken from each dataset.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        chosen: np.ndarray,
        numbers: np.ndarray,
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.datasets, self._chosen, self._numbers, self._weights = list(datasets), chosen, numbers, weights
        self._taken = _count(chosen, len(datasets))
        for dataset, count in zip(datasets, self._taken, strict=True):
            assert len(dataset) >= count, f"a blend takes {count} samples of {dataset.name}'s {len(dataset)}"

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return sample `index`: [seq_length + 1] int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"blended dataset: sample {index} of {len(self)}")
        return self.datasets[self._chosen[index]][int(self._numbers[index])]

    @property
    def description(self) -> str:
        """A line about the blend and one about each dataset, for the log."""
        parts = zip(self._taken, self.datasets, strict=True)
        lines = [f"    {count:,} from {dataset.description}" for count, dataset in parts]
        return "\n".join([f"{len(self):,} samples:", *lines])

    def order(self) -> str:
        """Return a digest of the samples in their order; see data/identity.py."""
        parts = [(source.share, source.order) for source in self.sources()]
        return cache_key(kind="blend", parts=parts)

    def sources(self) -> list[Source]:
        """Return a description of each dataset with its share of the samples, to detect changed data (identity.py)."""
        weights = np.array(self._taken if self._weights is None else self._weights, dtype=np.float64)
        shares, sources = (weights / weights.sum()).tolist(), [each.sources()[0] for each in self.datasets]
        return [source._replace(share=share) for source, share in zip(sources, shares, strict=True)]

    def token_counts(self, size: int) -> npt.NDArray[np.float64]:
        """Return the expected count of each id below `size` among the samples: [size], up to a common factor."""
        counted = zip(self._taken, (dataset.token_counts(size) for dataset in self.datasets), strict=True)
        return np.sum([taken * counts / counts.sum() for taken, counts in counted], axis=0)


def _count(chosen: np.ndarray, num_datasets: int) -> npt.NDArray[np.int64]:
    """Return how often each dataset was chosen: [num_datasets]."""
    counts = np.zeros(num_datasets, dtype=np.int64)
    for start in range(0, len(chosen), _COUNTED_AT_ONCE):
        counts += np.bincount(chosen[start : start + _COUNTED_AT_ONCE], minlength=num_datasets)
    return counts


class TokenRange:
    """Ids `start` to `stop` of the concatenation of sequences. The first and the last sequence may be cut.

    Args:
        sequences: sequences that are concatenated.
        start: first id.
        stop: id after the last one.
    """

    def __init__(self, sequences: Sequences, start: int, stop: int) -> None:
        ends = np.cumsum(sequences.lengths, dtype=np.int64)
        begins = ends - sequences.lengths
        self._sequences, self._ids = sequences, (start, stop)
        self._first = int(np.searchsorted(ends, start, side="right"))
        used = slice(self._first, int(np.searchsorted(begins, stop, side="left")))
        self._offset = start - int(begins[self._first]) if start < stop else 0
        self.lengths = (np.minimum(ends, stop) - np.maximum(begins, start))[used].astype(np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` ids of sequence `index` from position `offset` on; None returns all remaining ids."""
        cut = self._offset if index == 0 else 0
        length = int(self.lengths[index]) - offset if length is None else length
        return self._sequences.get(self._first + index, cut + offset, length)

    def digest(self) -> str:
        """Return a digest of the tokens."""
        return cache_key(whole=self._sequences.digest(), ids=self._ids)


class MockSequences:
    """Generated documents for --mock-data, which a model can learn: 10,000 documents of 1 to 4,095 ids.

    A document counts 1, 2, 3, ... modulo the vocabulary, as in Megatron, and ends with eod if there is one.

    Args:
        vocab_size: size of the vocabulary.
        eod: id that ends a document; None for no end.
    """

    def __init__(self, *, vocab_size: int, eod: int | None) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        self.lengths: npt.NDArray[np.int32] = np.random.default_rng(0).integers(1, 4096, size=10_000, dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` ids of document `index` from position `offset` on; None returns all remaining ids."""
        size = int(self.lengths[index])
        stop = size if length is None else offset + length
        ids = (np.arange(offset, stop) + 1) % self._vocab_size
        if self._eod is not None and stop == size and stop > offset:
            ids[-1] = self._eod
        return ids

    def digest(self) -> str:
        """Return a digest of the tokens."""
        return cache_key(kind="mock-1", vocab_size=self._vocab_size, eod=self._eod)


def _take(source: DataSource, bounds: tuple[float, float]) -> tuple[DataSource, tuple[int, int]]:
    """Cut a split's share out of a source; return the source to read, and the range of its sequences."""
    lengths = source.sequences.lengths
    if not source.by_tokens:
        return source, _edges(bounds, len(lengths))
    start, stop = _edges(bounds, int(lengths.sum(dtype=np.int64)))
    part = TokenRange(source.sequences, start, stop)
    return source._replace(sequences=part), (0, len(part.lengths))


def _edges(bounds: tuple[float, float], count: int) -> tuple[int, int]:
    """Return the first and the last index of a share of `count` items, rounded as Megatron does."""
    return round(bounds[0] * count), round(bounds[1] * count)
