"""Fixed-length samples of documents of any length, in the order of Megatron-Core 0.16.

Three arrays define the samples. Each is a pure function of the document lengths, the number of samples, the sample
length and the seed:

    document index  documents of all epochs, shuffled; their ids, concatenated, form one long sequence
    sample index    starts of the windows in that sequence, as (position in the document index, offset). Window k
                    covers ids k * S to k * S + S, which are S + 1 ids. Neighbors share one id: the last label of a
                    window is the first input of the next
    shuffle index   order of the windows

If less than 80 % of the last epoch's samples are needed, that epoch is shuffled separately and comes last. No document
is then repeated earlier than necessary. Nothing depends on the number of ranks.

Legend: S is seq_length.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megazpp.data.cache import cache_key, load_or_save_arrays

_SEPARATE_BELOW = 0.80
_COUNT_SEQUENCES = 1024


class TooFewTokensError(ValueError):
    """The sequences have too few ids for a single sample."""


class Sequences(Protocol):
    """Input of a `GPTDataset`, such as an `IndexedDataset` or generated documents."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def digest(self) -> str:
        """Return a digest of the tokens."""
        ...


class Indices(NamedTuple):
    """The three arrays that the module's docstring describes.

    Attributes:
        documents: [epochs * documents] int32 document index.
        samples: [n + 1, 2] int32 or int64 position in `documents` and offset of each window's first id.
        shuffle: [n] uint32 or int64 shuffle index.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


class Source(NamedTuple):
    """A dataset of a training.

    Attributes:
        name: name for messages.
        digest: digest of the tokens.
        share: fraction of the training samples that come from the dataset.
        epoch: samples in one epoch of the dataset.
        order: digest of the dataset's samples in their order.
    """

    name: str
    digest: str
    share: float
    epoch: int
    order: str


class GPTDataset:
    """Samples of seq_length + 1 ids from a range of the sequences of a dataset.

    Args:
        sequences: sequences of ids.
        sequence_range: range (start, stop) of the sequences to use.
        num_samples: minimal number of samples, in as many epochs as needed; None gives one epoch.
        seq_length: tokens of a sample.
        seed: seed for the two shuffles.
        name: name of the dataset in messages.
        vocab_size: size of the vocabulary, which all ids have to be below; None checks nothing.
        cache_path: cache directory for the indices, which one process builds and all map; None builds them in memory.
    Raises:
        TooFewTokensError: the range holds too few ids for a single sample.
        ValueError: it holds ids beyond the vocabulary.
    """

    def __init__(
        self,
        sequences: Sequences,
        sequence_range: tuple[int, int],
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        name: str,
        vocab_size: int | None = None,
        cache_path: Path | None = None,
    ) -> None:
        self._sequences, self._seq_length, self._vocab_size, self.name = sequences, seq_length, vocab_size, name
        self.sequence_range, self._num_samples, self._seed = sequence_range, num_samples, seed
        lengths = np.array(sequences.lengths[slice(*sequence_range)])  # a copy is aligned, unlike the index file
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch < seq_length + 1:
            raise TooFewTokensError(
                f"{name} has {self.tokens_per_epoch} tokens, too few for one sample of --seq-length {seq_length} + 1"
            )
        facts: dict[str, Any] = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
        facts["first"] = sequence_range[0]
        build = functools.partial(build_indices, lengths, **facts)
        if cache_path is None:
            self.indices = build()
        else:
            # the lengths themselves, because other documents may have the path, size and time of earlier ones
            key = cache_key(kind="gpt-2", lengths=hashlib.blake2b(lengths.tobytes()).hexdigest(), **facts)
            entry = cache_path / f"gpt-{key}"
            self.indices = Indices(*load_or_save_arrays(entry, build))

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return sample `index`: [seq_length + 1] int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: sample {index} of {len(self)}")
        window = int(self.indices.shuffle[index])
        (first, offset), (last, end) = self.indices.samples[window : window + 2].tolist()
        documents = self.indices.documents[first : last + 1].tolist()
        if first == last:
            parts = [self._sequences.get(documents[0], offset, end - offset + 1)]
        else:
            parts = [self._sequences.get(documents[0], offset), *map(self._sequences.get, documents[1:-1])]
            parts.append(self._sequences.get(documents[-1], 0, end + 1))
        sample = np.concatenate(parts, dtype=np.int64)
        if self._vocab_size is not None:
            check_vocabulary(sample, f"{self.name}: sample {index}", self._vocab_size)
        return sample

    @property
    def description(self) -> str:
        """A line about the dataset for the log."""
        start, stop = self.sequence_range
        epochs = len(self) * self._seq_length / self.tokens_per_epoch
        return (
            f"{len(self):,} samples of {self._seq_length:,} tokens from {stop - start:,} documents of"
            f" {self.tokens_per_epoch:,} tokens in all ({epochs:.2f} epochs): {self.name}"
        )

    def order(self) -> str:
        """Return a digest of the samples in their order; see data/identity.py."""
        epochs = plan_epochs(self.tokens_per_epoch, self._num_samples, self._seq_length)
        facts = {"range": self.sequence_range, "seq_length": self._seq_length, "seed": self._seed}
        return cache_key(digest=self._digest, epochs=(epochs.epochs, epochs.separate), **facts)

    def sources(self) -> list[Source]:
        """Return a description of the dataset, with which a resumed run detects changed data (identity.py)."""
        epoch = (self.tokens_per_epoch - 1) // self._seq_length
        return [Source(self.name, self._digest, 1.0, epoch, self.order())]

    @functools.cached_property
    def _digest(self) -> str:
        return self._sequences.digest()

    def token_counts(self, size: int, *, max_tokens: int = 1 << 27) -> npt.NDArray[np.int64]:
        """Count each id in roughly the first `max_tokens` tokens of one epoch.

        Args:
            size: size of the vocabulary, which all ids have to be below.
            max_tokens: number of tokens after which counting stops.
        Returns:
            [size] counts.
        """
        counts, left = np.zeros(size, dtype=np.int64), max_tokens
        for start in range(*self.sequence_range, _COUNT_SEQUENCES):
            stop = min(start + _COUNT_SEQUENCES, self.sequence_range[1])
            ids = np.concatenate([self._sequences.get(index) for index in range(start, stop)])
            check_vocabulary(ids, f"{self.name}: one of sequences {start} to {stop - 1}", size)
            counts += np.bincount(ids, minlength=size)
            left -= len(ids)
            if left <= 0:
                break
        return counts


def check_vocabulary(ids: np.ndarray, where: str, vocab_size: int) -> None:
    """Raise ValueError if one of `ids` is not in [0, vocab_size); `where` names their place in the message."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{where} holds the token id {low if low < 0 else high}, outside the tokenizer's vocabulary of"
            f" {vocab_size}; was it written with another tokenizer?"
        )


def build_indices(
    lengths: npt.NDArray[np.int32], *, first: int, num_samples: int | None, seq_length: int, seed: int
) -> Indices:
    """Build the three indices with numpy.

    Args:
        lengths: [documents] number of ids of each document in use.
        first: number of the first of these documents in the dataset; it is added to `Indices.documents`.
        num_samples: minimal number of windows; None for one epoch.
        seq_length: S, the number of predicted ids of a window.
        seed: seed for the two shuffles.
    """
    epochs, total, before_last, separate = plan_epochs(int(lengths.sum(dtype=np.int64)), num_samples, seq_length)
    generator = np.random.RandomState(seed)
    parts = []
    for count in [epochs - 1, 1] if separate else [epochs]:
        part = np.tile(np.arange(len(lengths), dtype=np.int32), count)
        generator.shuffle(part)
        parts.append(part)
    documents = np.concatenate(parts)
    samples = build_sample_index(lengths[documents], total, seq_length)
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    ranges = [(0, before_last), (before_last, total)] if separate else [(0, total)]
    shuffle = [np.arange(start, stop, dtype=dtype) for start, stop in ranges]
    for windows in shuffle:
        generator.shuffle(windows)
    documents += np.int32(first)
    return Indices(documents, samples, np.concatenate(shuffle))


class Epochs(NamedTuple):
    """The epochs that a number of samples needs; they determine the order of the samples.

    Attributes:
        epochs: number of epochs.
        samples: samples of all epochs.
        before_last: samples of all epochs except the last.
        separate: True if the last epoch is shuffled separately.
    """

    epochs: int
    samples: int
    before_last: int
    separate: bool


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> Epochs:
    """Plan the epochs for `num_samples` samples of `seq_length` tokens; None plans one epoch."""
    wanted = 0 if num_samples is None else num_samples * seq_length + 1
    epochs = max(1, -(-wanted // tokens_per_epoch))
    total = (epochs * tokens_per_epoch - 1) // seq_length
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    separate = False
    if epochs > 1 and num_samples is not None:
        separate = num_samples - before_last < int(_SEPARATE_BELOW * ((tokens_per_epoch - 1) // seq_length))
    return Epochs(epochs, total, before_last, separate)


def build_sample_index(lengths: npt.NDArray[np.int32], num_samples: int, seq_length: int) -> np.ndarray:
    """Find the starts of the windows in the concatenated documents.

    Args:
        lengths: [n] number of ids of each document, in order; zeros are allowed.
        num_samples: number of windows, with num_samples * seq_length < sum(lengths).
        seq_length: S, the distance between the starts of two windows.
    Returns:
        [num_samples + 1, 2] document and offset of id k * seq_length, as int32 where that is large enough, or int64.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    holders = np.searchsorted(ends, starts, side="right")  # the first document that ends after the start
    small = max(len(lengths), int(lengths.max())) <= np.iinfo(np.int32).max
    index = np.empty((num_samples + 1, 2), dtype=np.int32 if small else np.int64)
    index[:, 0] = holders
    index[:, 1] = starts - (ends[holders] - lengths[holders])
    return index
