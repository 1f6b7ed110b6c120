"""Fixed-length samples out of documents of any length, as Megatron cuts and orders them.

Three arrays say what sample i is, and all three are pure functions of (lengths, samples wanted, length, seed):

    document index  the documents of every epoch, shuffled together; their ids back to back are one long line
    sample index    where on that line the windows start: window k covers [k * S, k * S + S], S + 1 ids, so neighbours
                    share one (a label of one is an input of the next); stored as (position in document index, offset)
    shuffle index   the order in which the windows are served

If the last epoch is needed for less than 80 % of its samples it is shuffled by itself and served at the end, so that
no document is seen more often than necessary before it. The order is bit for bit that of Megatron-Core 0.16. Nothing
depends on the number of ranks. `WholeText` is the other way to cut: all tokens in order, for a test.

Legend: S is seq_length.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megazpp.data.cache import cache_key, load_or_save_arrays
from megazpp.data.identity import Source

PADDING = -1
_SEPARATE_BELOW = 0.80
_COUNT_SEQUENCES = 1024


class Sequences(Protocol):
    """Input of a `GPTDataset`: an `IndexedDataset`, or something made up."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def digest(self) -> str:
        """Return a name for the tokens."""
        ...


class Indices(NamedTuple):
    """The three arrays of the module's docstring."""

    documents: np.ndarray  # [epochs * documents] int32
    samples: np.ndarray  # [n + 1, 2] int32 or int64: (position in `documents`, offset) of each window's first id
    shuffle: np.ndarray  # [n] uint32 or int64


class GPTDataset:
    """Samples of seq_length + 1 ids from a range of the sequences of a dataset.

    Args:
        sequence_range: the sequences to use, as (start, stop).
        num_samples: at least so many samples, in as many epochs as it takes; None gives one epoch.
        seed: of the two shuffles.
        name: the dataset in error messages.
        vocab_size: refuse ids that are not below this.
        cache_path: a directory for the indices, built by one process and mapped by all; None builds them in memory.
    Raises:
        ValueError: the range holds too few ids for a single sample, or ids beyond the vocabulary.
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
        lengths = np.array(sequences.lengths[slice(*sequence_range)])  # a copy: the index file is not aligned
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch < seq_length + 1:
            raise ValueError(
                f"{name} has {self.tokens_per_epoch} tokens, too few for one sample of --seq-length {seq_length} + 1"
            )
        build = functools.partial(
            build_indices, lengths, first=sequence_range[0], num_samples=num_samples, seq_length=seq_length, seed=seed
        )
        self.indices = build() if cache_path is None else Indices(*load_or_save_arrays(cache_path, build))

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`: [seq_length + 1] int64."""
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
        """One line for people."""
        start, stop = self.sequence_range
        epochs = len(self) * self._seq_length / self.tokens_per_epoch
        return (
            f"{len(self):,} samples of {self._seq_length:,} tokens from {stop - start:,} documents of"
            f" {self.tokens_per_epoch:,} tokens in all ({epochs:.2f} epochs): {self.name}"
        )

    def order(self) -> str:
        """Return a name for the samples in their order; see data/identity.py."""
        epochs = plan_epochs(self.tokens_per_epoch, self._num_samples, self._seq_length)
        facts = {"range": self.sequence_range, "seq_length": self._seq_length, "seed": self._seed}
        return cache_key(digest=self._digest, epochs=(epochs.epochs, epochs.separate), **facts)

    def sources(self) -> list[Source]:
        """Return the one source; see data/identity.py."""
        epoch = (self.tokens_per_epoch - 1) // self._seq_length
        return [Source(self.name, self._digest, 1.0, epoch, self.order())]

    @functools.cached_property
    def _digest(self) -> str:
        return self._sequences.digest()

    def token_counts(self, size: int, *, max_tokens: int = 1 << 27) -> npt.NDArray[np.int64]:
        """Count of each id in the first `max_tokens` or so of one epoch: [size]; larger ids are refused."""
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


class WholeText:
    """All ids of sequences in order, each to be predicted exactly once: windows of S + 1 ids.

    The ids lie back to back, with eod before the first, from which it is predicted. Window k has the ids from k S to
    (k + 1) S: the last of one window is the first input of the next. Beyond the end there is `PADDING`.

    Args:
        eod: the id before the first one; None: there is none, and the first id is not predicted.
        vocab_size: refuse ids that are not below this.
    """

    def __init__(self, sequences: Sequences, *, seq_length: int, eod: int | None, vocab_size: int, name: str) -> None:
        self._sequences, self._seq_length, self._vocab_size, self._name = sequences, seq_length, vocab_size, name
        self._before = np.array([] if eod is None else [eod], dtype=np.int64)
        self._ends = np.cumsum(sequences.lengths, dtype=np.int64)
        self.num_tokens = int(self._ends[-1]) + len(self._before) - 1  # that are predicted
        if self.num_tokens < 1:
            raise ValueError(f"{name} has no token that could be predicted")

    def __len__(self) -> int:
        """Windows that have something to predict."""
        return -(-self.num_tokens // self._seq_length)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index`: [S + 1] int64; any index from `len` on is padding alone."""
        start = index * self._seq_length - len(self._before)  # in the ids of the sequences
        stop = start + self._seq_length + 1
        parts, at = [self._before[: max(-start, 0)]], max(start, 0)
        sequence = int(np.searchsorted(self._ends, at, side="right"))
        while at < stop and sequence < len(self._ends):
            end = int(self._ends[sequence])
            size = int(self._sequences.lengths[sequence])
            parts.append(self._sequences.get(sequence, at - end + size, min(stop, end) - at))
            at, sequence = max(at, min(stop, end)), sequence + 1
        ids = np.concatenate(parts, dtype=np.int64)
        check_vocabulary(ids, f"{self._name}: window {index}", self._vocab_size)
        return np.pad(ids, (0, self._seq_length + 1 - len(ids)), constant_values=PADDING)


def check_vocabulary(ids: np.ndarray, where: str, vocab_size: int) -> None:
    """Raises ValueError if one of `ids` is not below `vocab_size`."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{where} holds the token id {low if low < 0 else high}, outside the tokenizer's vocabulary of"
            f" {vocab_size}; was it written with another tokenizer?"
        )


def build_indices(
    lengths: npt.NDArray[np.int32], *, first: int, num_samples: int | None, seq_length: int, seed: int
) -> Indices:
    """The three indices, without a Python loop over anything but the two shuffles.

    Args:
        lengths: [documents] ids of the documents in use.
        first: the number of the first of them, added to what `Indices.documents` holds.
        num_samples: windows wanted; None for one epoch.
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
    """The epochs of a number of samples, from which the order of the samples follows.

    Attributes:
        samples: of all epochs.
        before_last: samples of all epochs but the last.
        separate: the last epoch is shuffled by itself.
    """

    epochs: int
    samples: int
    before_last: int
    separate: bool


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> Epochs:
    """Plan the epochs that give `num_samples` samples; None for one epoch."""
    wanted = 0 if num_samples is None else num_samples * seq_length + 1
    epochs = max(1, -(-wanted // tokens_per_epoch))
    total = (epochs * tokens_per_epoch - 1) // seq_length
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    separate = False
    if epochs > 1 and num_samples is not None:
        separate = num_samples - before_last < int(_SEPARATE_BELOW * ((tokens_per_epoch - 1) // seq_length))
    return Epochs(epochs, total, before_last, separate)


def build_sample_index(lengths: npt.NDArray[np.int32], num_samples: int, seq_length: int) -> np.ndarray:
    """Starts of the windows on the line of documents.

    Args:
        lengths: [n] ids of the documents in line order; zeros are allowed.
        num_samples: windows; they fit: num_samples * seq_length < sum(lengths).
    Returns:
        [num_samples + 1, 2] (document, offset) of id k * seq_length; int32 if that holds them, else int64.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    holders = np.searchsorted(ends, starts, side="right")  # the first document that ends beyond the start
    small = max(len(lengths), int(lengths.max())) <= np.iinfo(np.int32).max
    index = np.empty((num_samples + 1, 2), dtype=np.int32 if small else np.int64)
    index[:, 0] = holders
    index[:, 1] = starts - (ends[holders] - lengths[holders])
    return index
