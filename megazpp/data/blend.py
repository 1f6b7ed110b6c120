"""Open sources of token sequences, and build the blended samples of one split (train, valid or test).

A source is a .bin/.idx pair or generated documents. A split takes the same fraction of each source's sequences. If a
source has too few sequences, the split takes a fraction of the source's tokens instead. A `GPTDataset` cuts this
fraction of one source into samples. With several sources, the split blends the samples. The blend is planned first, so
that each source builds exactly as many samples as the blend takes from it.

`--data-path 0.3 A 0.7 B` takes 30 % of the samples from A. A dataset's share is its weight divided by the sum of all
weights. Sample n comes from the dataset that is furthest behind its share: the one with the largest share * n minus the
number of samples already taken from it. The first n samples of a split therefore have the given proportions to within
one sample per dataset, for every n. The order equals Megatron's, also where several datasets are equally far behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megazpp.base.files import errors_as
from megazpp.base.program import Problems, say
from megazpp.data.cache import cache_key, load_or_save_arrays
from megazpp.data.config import parse_blend
from megazpp.data.gpt_dataset import GPTDataset, Sequences, Source
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.kernels.blend_order import MOST_DATASETS, blend_order

# Number of samples that `_count` gives to np.bincount at once. np.bincount copies its argument as int64, so counting a
# large blend at once would need 8 bytes of memory per sample.
_COUNTED_AT_ONCE = 1 << 24


class DataSource(NamedTuple):
    """A source of token ids that --split divides into training, validation and test data.

    Attributes:
        sequences: the sequences of token ids: documents, or sentences if a .bin/.idx pair stores these separately.
        name: name of the source in messages, such as the path of a .bin/.idx pair without its suffix.
        is_cached: True if sample indices of this source are stored in the cache directory.
        by_tokens: True if the splits divide the tokens of the source and cut sequences. If False, they divide the list
            of sequences and cut none.
    """

    sequences: Sequences
    name: str
    is_cached: bool = True
    by_tokens: bool = False


def open_sources(values: Sequence[str], *, flag_name: str) -> tuple[list[DataSource], tuple[float, ...] | None]:
    """Open the .bin/.idx pairs that a flag like --data-path names.

    Args:
        values: values of the flag: the paths of .bin/.idx pairs without suffix, each after a weight (`0.3 A 0.7 B`) or
            all without weights.
        flag_name: name of the flag, for messages.
    Returns:
        The sources in the order of the flag, and their blend weights, or None if the flag gives no weights.
    Raises:
        ValueError: the values are not of this form, name too many pairs, or a pair is missing or damaged.
    """
    prefixes, weights = parse_blend(values, flag_name=flag_name)
    if len(prefixes) > MOST_DATASETS:
        raise ValueError(
            f"{flag_name} names {len(prefixes)} datasets, but a blend has at most {MOST_DATASETS}: merge some of them"
        )
    problems, sources = Problems(), list[DataSource]()
    for prefix in prefixes:
        with problems:
            sources.append(indexed_source(Path(prefix).expanduser(), flag_name))
    problems.raise_all()
    return sources, weights


def indexed_source(prefix: Path, flag_name: str) -> DataSource:
    """Open one .bin/.idx pair by its path without suffix. Error messages begin with `flag_name` and this path."""
    with errors_as(f"{flag_name} {prefix}"):
        return DataSource(IndexedDataset(prefix), str(prefix))


def fit_for_split(sources: Iterable[DataSource], split: Sequence[tuple[float, float]]) -> list[DataSource]:
    """Return the sources, and set `by_tokens` on each one that has too few sequences to divide them by --split.

    A source has too few sequences if training, validation or test would get none although its proportion is above 0.
    Splits that this run does not use count as well, so that all runs with the same --split divide a source alike.

    Args:
        sources: sources to divide.
        split: start and end of training, validation and test, as fractions in [0, 1].
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
    """Build the dataset of one split: the samples of its only source, or a blend of several sources.

    Args:
        use: name of the split in messages: "train", "valid" or "test".
        sources: sources of token sequences.
        weights: proportions of samples to take from each source; None takes them in proportion to the number of tokens
            that each source has in this split.
        bounds: start and end of the split, as fractions in [0, 1] of each source's sequences (or tokens).
        num_samples: number of samples to build.
        seq_length: tokens that a sample predicts; a sample has one token more.
        seed: seed for the order of the samples.
        vocab_size: size of the vocabulary. Each token id must be below it.
        cache_path: cache directory, where the sample indices are stored in the folder `indices`.
    Raises:
        ValueError: this split has too few tokens of a source for one sample, or the first sample of a source contains
            a token id that is not in the vocabulary.
    """
    parts = [_take(source, bounds) for source in sources]
    indices = cache_path / "indices"

    def sample(source: DataSource, span: tuple[int, int], count: int) -> GPTDataset:
        order = {"num_samples": count, "seq_length": seq_length, "seed": seed}
        folder, name = indices if source.is_cached else None, f"{source.name} ({use})"
        dataset = GPTDataset(source.sequences, span, **order, name=name, vocab_size=vocab_size, cache_path=folder)
        _ = dataset[0]  # if another tokenizer wrote the data, this read raises the error before the first step does
        return dataset

    if len(parts) == 1:
        return sample(*parts[0], num_samples)
    # By default, a source's weight is its number of samples per epoch. A source with less than one sample gets weight
    # 1, so that `sample` is called for it and raises the error that the source is too small.
    sizes = [int(source.sequences.lengths[slice(*span)].sum(dtype=np.int64)) for source, span in parts]
    weights = tuple(weights or (float(max(1, (size - 1) // seq_length)) for size in sizes))
    path = indices / f"blend-{cache_key(kind='blend-1', weights=weights, num_samples=num_samples)}"
    chosen, numbers = load_or_save_arrays(path, lambda: blend_order(weights, num_samples, say=say))
    taken = _count(chosen, len(parts)).tolist()
    datasets = [sample(*part, count) for part, count in zip(parts, taken, strict=True)]
    return BlendedDataset(datasets, chosen, numbers, weights=weights)


class BlendedDataset:
    """A dataset that takes its n samples from several datasets, in the order that `blend_order` plans.

    Args:
        datasets: datasets, each with at least as many samples as the blend takes from it.
        chosen: [n] int16 index in `datasets` of the dataset from which the blend takes each sample.
        numbers: [n] int64 index of each sample inside the dataset from which it is taken.
        weights: blend weights of the datasets, from which `blend_order` has planned `chosen` and `numbers`.
    """

    def __init__(
        self, datasets: Sequence[GPTDataset], chosen: np.ndarray, numbers: np.ndarray, *, weights: Sequence[float]
    ) -> None:
        self.datasets, self._chosen, self._numbers, self._weights = list(datasets), chosen, numbers, weights
        self._taken = _count(chosen, len(datasets))
        for dataset, count in zip(datasets, self._taken, strict=True):
            assert len(dataset) >= count, f"a blend takes {count} samples of {dataset.name}'s {len(dataset)}"

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the token ids of sample `index` of the blend: [seq_length + 1] int64.

        Raises:
            IndexError: `index` is negative, or not below the number of samples.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blended dataset is not one of its {len(self)} samples")
        return self.datasets[self._chosen[index]][int(self._numbers[index])]

    @property
    def description(self) -> str:
        """A text for the log: one line with the number of samples of the blend, then one line per dataset."""
        parts = zip(self._taken, self.datasets, strict=True)
        lines = [f"    {count:,} from {dataset.description}" for count, dataset in parts]
        return "\n".join([f"{len(self):,} samples:", *lines])

    def order(self) -> str:
        """Return a digest of the blend's samples in their order, with which a resumed run detects changed data."""
        parts = [(source.share, source.order) for source in self.sources()]
        return cache_key(kind="blend", parts=parts)

    def sources(self) -> list[Source]:
        """Describe each dataset and the fraction of the blend's samples that come from it.

        Checkpoints store these descriptions, so that a resumed run can detect changed data (data/identity.py).
        """
        shares = (np.array(self._weights) / np.sum(self._weights)).tolist()
        return [each.sources()[0]._replace(share=share) for each, share in zip(self.datasets, shares, strict=True)]

    def token_counts(self, size: int) -> npt.NDArray[np.float64]:
        """Return the relative frequency of each token id below `size` in the blend.

        Each dataset counts in proportion to the samples that the blend takes from it.

        Returns:
            [size] fp64 frequencies. They do not sum to 1, but to the number of samples of the blend.
        """
        counted = zip(self._taken, (dataset.token_counts(size) for dataset in self.datasets), strict=True)
        return np.sum([taken * counts / counts.sum() for taken, counts in counted], axis=0)


def _count(chosen: np.ndarray, num_datasets: int) -> npt.NDArray[np.int64]:
    """Return the number of samples that a blend takes from each dataset.

    Args:
        chosen: [n] index of the dataset of each sample.
        num_datasets: number of datasets of the blend.
    Returns:
        [num_datasets] int64 counts.
    """
    counts = np.zeros(num_datasets, dtype=np.int64)
    for start in range(0, len(chosen), _COUNTED_AT_ONCE):
        counts += np.bincount(chosen[start : start + _COUNTED_AT_ONCE], minlength=num_datasets)
    return counts


class TokenRange:
    """The token ids `start` to `stop` - 1 of a source, counted in the concatenation of all its sequences.

    A split consists of such a range if its source has too few documents to divide them. The range begins and ends
    anywhere, so its first and its last sequence may be parts of the source's sequences.

    Args:
        sequences: sequences of the source.
        start: position in the concatenation at which the range begins.
        stop: position in the concatenation after the last id of the range.
    Attributes:
        lengths: [n] int32 number of ids of each sequence of the range.
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
        """Return `length` token ids of the range's sequence `index` from position `offset` on.

        With `length` None, return all remaining ids of the sequence that are in the range. Position 0 is the sequence's
        first id inside the range, also if the range begins in the middle of the sequence.
        """
        cut = self._offset if index == 0 else 0
        length = int(self.lengths[index]) - offset if length is None else length
        return self._sequences.get(self._first + index, cut + offset, length)

    def digest(self) -> str:
        """Return a digest of the token ids in this range, to detect changed data."""
        return cache_key(whole=self._sequences.digest(), ids=self._ids)


class MockSequences:
    """The 10,000 generated documents of --mock-data, with 1 to 4,095 token ids each.

    The ids of a document are 1, 2, 3, ... modulo the vocabulary size, as in Megatron, so that a model can learn them.

    Args:
        vocab_size: size of the vocabulary.
        eod: end-of-document id, which replaces the last id of each document; None leaves the last id.
    Attributes:
        lengths: [10000] int32 number of ids of each document.
    """

    def __init__(self, *, vocab_size: int, eod: int | None) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        self.lengths: npt.NDArray[np.int32] = np.random.default_rng(0).integers(1, 4096, size=10_000, dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` token ids of document `index` from position `offset` on; None returns all remaining ids."""
        size = int(self.lengths[index])
        stop = size if length is None else offset + length
        ids = (np.arange(offset, stop) + 1) % self._vocab_size
        if self._eod is not None and stop == size and stop > offset:
            ids[-1] = self._eod
        return ids

    def digest(self) -> str:
        """Return a digest of all generated token ids, to detect changed data."""
        return cache_key(kind="mock-1", vocab_size=self._vocab_size, eod=self._eod)


def _take(source: DataSource, bounds: tuple[float, float]) -> tuple[DataSource, tuple[int, int]]:
    """Select the data of one split (train, valid or test) from a source.

    Args:
        source: source that the splits divide.
        bounds: start and end of the split, as fractions of the source in [0, 1].
    Returns:
        A source, and the range (start, stop) of its sequences that belong to the split. If `source.by_tokens` is set,
        the returned source has only the split's tokens, and the range contains all its sequences. Otherwise the
        returned source is `source`.
    """
    lengths = source.sequences.lengths
    if not source.by_tokens:
        return source, _edges(bounds, len(lengths))
    start, stop = _edges(bounds, int(lengths.sum(dtype=np.int64)))
    part = TokenRange(source.sequences, start, stop)
    return source._replace(sequences=part), (0, len(part.lengths))


def _edges(bounds: tuple[float, float], count: int) -> tuple[int, int]:
    """Return the range (start, stop) of a split among `count` sequences or tokens, rounded as Megatron does.

    `bounds` are the start and the end of the split as fractions in [0, 1].
    """
    return round(bounds[0] * count), round(bounds[1] * count)
