"""From sources of sequences to the samples of one split.

A source is a .bin/.idx pair or made-up documents. A split takes the same share of each source's sequences (of its
tokens, where there are too few sequences for that), samples it with a `GPTDataset`, and blends if there are several.
The blend is planned first, so that each source builds exactly as many samples as are taken from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megazpp.data.blend import BlendedDataset, BlendIndices, blend_indices, parse_blend
from megazpp.data.cache import cache_key, load_or_save_arrays
from megazpp.data.gpt_dataset import GPTDataset, Sequences
from megazpp.data.indexed_dataset import IndexedDataset


class DataSource(NamedTuple):
    """Sequences of token ids.

    Attributes:
        sequences: the ids.
        name: in messages.
        fingerprint: equal for equal sequences, for cache keys; None if indices are not to be cached.
        by_tokens: splits take shares of its tokens and cut sequences, not shares of its sequences.
    """

    sequences: Sequences
    name: str
    fingerprint: tuple[str | int, ...] | None
    by_tokens: bool = False


class SourceBlend(NamedTuple):
    """Sources and the proportions of samples to take from each; None for in proportion to their sizes."""

    sources: tuple[DataSource, ...]
    weights: tuple[float, ...] | None

    def fit_for(self, split: Sequence[tuple[float, float]]) -> SourceBlend:
        """The same, in which sources with too few sequences for some share are cut by tokens.

        Whether that share is then used does not matter: another run on the same data trains on the same tokens.
        """
        shares = [bounds for bounds in split if bounds[0] < bounds[1]]

        def fit(source: DataSource) -> DataSource:
            edges = [_edges(bounds, len(source.sequences.lengths)) for bounds in shares]
            return source._replace(by_tokens=any(start >= stop for start, stop in edges))

        return self._replace(sources=tuple(map(fit, self.sources)))


class Sampling(NamedTuple):
    """How the samples of a split are drawn: arguments of `GPTDataset`, and the folder for all indices."""

    num_samples: int
    seq_length: int
    seed: int
    vocab_size: int
    cache_path: Path


def open_sources(values: Sequence[str], *, flag_name: str) -> SourceBlend:
    """Open the .bin/.idx pairs that a flag like --data-path names.

    Raises:
        ValueError: a weight is out of place, or a file is missing or damaged.
    """
    prefixes, weights = parse_blend(values, flag_name=flag_name)
    return SourceBlend(tuple(indexed_source(Path(prefix).expanduser(), flag_name) for prefix in prefixes), weights)


def indexed_source(prefix: Path, flag_name: str) -> DataSource:
    """Open one .bin/.idx pair; its fingerprint is where it is, how large, and when it was written."""
    try:
        sequences = IndexedDataset(prefix)
    except ValueError as error:
        raise ValueError(f"{flag_name} {prefix}: {error}") from error
    facts = [path.stat() for path in (sequences.idx_path, sequences.bin_path)]
    numbers = [number for fact in facts for number in (fact.st_size, fact.st_mtime_ns)]
    return DataSource(sequences, str(prefix), (str(prefix.resolve()), *numbers))


def build_split(
    use: str, blend: SourceBlend, bounds: tuple[float, float], sampling: Sampling
) -> GPTDataset | BlendedDataset:
    """The samples of one split of `blend`; raises ValueError if that gets too few ids of a source for one sample.

    Args:
        use: "train", "valid" or "test", for messages.
        bounds: the share of each source's sequences (or tokens) at which the split begins and ends.
    """
    pairs = [_take(source, bounds) for source in blend.sources]
    if len(pairs) == 1:
        return _sample(use, *pairs[0], sampling)
    weights = blend.weights or tuple(_num_windows(*pair, sampling.seq_length) for pair in pairs)
    key = cache_key(kind="blend-1", weights=weights, num_samples=sampling.num_samples)
    path = sampling.cache_path / "indices" / f"blend-{key}"
    indices = BlendIndices(*load_or_save_arrays(path, lambda: blend_indices(weights, sampling.num_samples)))
    taken = np.bincount(indices.datasets, minlength=len(pairs)).tolist()
    datasets = [_sample(use, *pair, sampling._replace(num_samples=n)) for pair, n in zip(pairs, taken, strict=True)]
    return BlendedDataset(datasets, indices)


class TokenRange:
    """Ids `start` to `stop` of the line that the sequences make: the first and the last of them may be cut."""

    def __init__(self, sequences: Sequences, start: int, stop: int) -> None:
        ends = np.cumsum(sequences.lengths, dtype=np.int64)
        begins = ends - sequences.lengths
        self._sequences = sequences
        self._first = int(np.searchsorted(ends, start, side="right"))
        used = slice(self._first, int(np.searchsorted(begins, stop, side="left")))
        self._offset = start - int(begins[self._first]) if start < stop else 0
        self.lengths = (np.minimum(ends, stop) - np.maximum(begins, start))[used].astype(np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` ids (default: all the rest) of sequence `index` from its id number `offset`."""
        cut = self._offset if index == 0 else 0
        length = int(self.lengths[index]) - offset if length is None else length
        return self._sequences.get(self._first + index, cut + offset, length)


def _take(source: DataSource, bounds: tuple[float, float]) -> tuple[DataSource, tuple[int, int]]:
    """A split's share of a source: what to read, and which of its sequences."""
    lengths = source.sequences.lengths
    if not source.by_tokens:
        return source, _edges(bounds, len(lengths))
    start, stop = _edges(bounds, int(lengths.sum(dtype=np.int64)))
    part = TokenRange(source.sequences, start, stop)
    fingerprint = None if source.fingerprint is None else (*source.fingerprint, "tokens", start, stop)
    return source._replace(sequences=part, fingerprint=fingerprint), (0, len(part.lengths))


def _edges(bounds: tuple[float, float], count: int) -> tuple[int, int]:
    """Megatron's rounding: each edge to the nearest of `count`."""
    return round(bounds[0] * count), round(bounds[1] * count)


def _num_windows(source: DataSource, span: tuple[int, int], seq_length: int) -> float:
    """Samples in one epoch; at least 1, for `_sample` to complain about the source if it has none."""
    return float(max(1, (int(source.sequences.lengths[slice(*span)].sum(dtype=np.int64)) - 1) // seq_length))


def _sample(use: str, source: DataSource, span: tuple[int, int], sampling: Sampling) -> GPTDataset:
    order = {name: getattr(sampling, name) for name in ("num_samples", "seq_length", "seed")}
    path = None
    if source.fingerprint is not None:
        key = cache_key(kind="gpt-1", source=source.fingerprint, span=span, **order)
        path = sampling.cache_path / "indices" / f"gpt-{key}"
    name, size = f"{source.name} ({use})", sampling.vocab_size
    dataset = GPTDataset(source.sequences, span, **order, name=name, vocab_size=size, cache_path=path)
    _ = dataset[0]  # ids of another vocabulary are found now, not in the first step
    return dataset


class MockSequences:
    """Made-up documents for --mock-data, which a model can learn: 100,000 of 1 to 4,095 ids, made when they are read.

    A document is 1, 2, 3, ... modulo the vocabulary as in Megatron, with eod at its end; without one counting goes on.
    """

    def __init__(self, *, vocab_size: int, eod: int | None) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        self.lengths: npt.NDArray[np.int32] = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` ids (default: all the rest) of document `index`, from its id number `offset`."""
        size = int(self.lengths[index])
        stop = size if length is None else offset + length
        ids = (np.arange(offset, stop) + 1) % self._vocab_size
        if self._eod is not None and stop == size and stop > offset:
            ids[-1] = self._eod
        return ids
