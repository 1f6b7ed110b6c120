"""Cut documents of any length into samples of fixed length, in the order of Megatron-Core 0.16.

Three arrays define the samples. Each array depends only on the document lengths, the number of samples, the sample
length and the seed, so it does not depend on the number of ranks:

    document index  shuffled list of the documents of all epochs. The token ids of these documents, concatenated, form
                    one long sequence
    sample index    starts of windows in this sequence, as (position in the document index, offset). Window k consists
                    of the S + 1 ids k * S to k * S + S. Neighboring windows have one id in common: the last label of
                    one window is the first input of the next
    shuffle index   order in which the windows become samples

If less than 80 % of the last epoch's samples are needed, the last epoch is shuffled separately, and its samples come
after the samples of all other epochs. Each document is then used equally often before the incomplete last epoch repeats
some of the documents.

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

_SEPARATE_BELOW = 0.80  # the last epoch is shuffled separately if a smaller fraction of its samples is needed
_COUNT_SEQUENCES = 1024  # number of sequences that `GPTDataset.token_counts` concatenates at a time


class TooFewTokensError(ValueError):
    """Error for a dataset, or its part for one split, with fewer token ids than a single sample."""


class Sequences(Protocol):
    """The sequences of token ids from which a `GPTDataset` cuts samples, such as an `IndexedDataset`.

    `lengths` has the number of ids of each sequence. `get` returns `length` ids of sequence `index` from position
    `offset` on, or all remaining ids if `length` is None.
    """

    @property
    def lengths(self) -> npt.NDArray[np.int32]: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def digest(self) -> str:
        """Return a digest of all token ids, to detect changed data. Large files may be digested in part."""
        ...


class Indices(NamedTuple):
    """The three arrays that define the n samples of a `GPTDataset`.

    Attributes:
        documents: [epochs * documents] int32 numbers of the documents of all epochs, shuffled.
        samples: [n + 1, 2] int32 or int64. Row k has the start of window k: a position in `documents`, and the offset
            of the window's first token id in that document. The last row has the place of the last window's last id.
        shuffle: [n] uint32 or int64 number of the window that becomes each sample.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


class Source(NamedTuple):
    """Description of one dataset of a training run. Checkpoints store it, so that a resumed run detects changed data.

    Attributes:
        name: name of the dataset in messages.
        digest: digest of the dataset's token ids.
        share: fraction of the run's training samples that come from the dataset.
        epoch: number of samples in one epoch of the dataset.
        order: digest of the dataset's samples in their order.
    """

    name: str
    digest: str
    share: float
    epoch: int
    order: str


class GPTDataset:
    """Samples of seq_length + 1 token ids, cut from a range of the sequences of one dataset.

    Args:
        sequences: sequences of token ids, which are documents.
        sequence_range: range (start, stop) of the sequences to use.
        num_samples: smallest number of samples. The documents are repeated for as many epochs as this number requires.
            None gives the samples of one epoch.
        seq_length: tokens that a sample predicts.
        seed: seed for shuffling the documents and the samples.
        name: name of the dataset in messages.
        vocab_size: size of the vocabulary. Reading a sample with an id that is not below it raises ValueError. None
            checks nothing.
        cache_path: cache directory for the arrays that define the samples. One process per node builds the arrays, and
            all processes map them. None builds the arrays in memory.
    Raises:
        TooFewTokensError: the range has fewer than seq_length + 1 token ids.
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
        # Copy the lengths: in a memory-mapped .idx they are not aligned in memory, which makes numpy slow.
        lengths = np.array(sequences.lengths[slice(*sequence_range)])
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch < seq_length + 1:
            raise TooFewTokensError(
                f"{name} has {self.tokens_per_epoch} tokens, too few for one sample of --seq-length {seq_length} + 1; "
                "give more data, or a smaller --seq-length"
            )
        facts: dict[str, Any] = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
        facts["first"] = sequence_range[0]
        build = functools.partial(build_indices, lengths, **facts)
        if cache_path is None:
            self.indices = build()
        else:
            # The cache key contains a hash of the lengths, because a changed file may have the same path, size and
            # modification time as before.
            key = cache_key(kind="gpt-2", lengths=hashlib.blake2b(lengths.tobytes()).hexdigest(), **facts)
            entry = cache_path / f"gpt-{key}"
            self.indices = Indices(*load_or_save_arrays(entry, build))

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the token ids of sample `index`: [seq_length + 1] int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name} is not one of its {len(self)} samples")
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
        """A line for the log: numbers of samples, documents, tokens and epochs, and the dataset's name."""
        start, stop = self.sequence_range
        epochs = len(self) * self._seq_length / self.tokens_per_epoch
        return (
            f"{len(self):,} samples of {self._seq_length:,} tokens from {stop - start:,} documents of"
            f" {self.tokens_per_epoch:,} tokens in all ({epochs:.2f} epochs): {self.name}"
        )

    def order(self) -> str:
        """Return a digest of the dataset's samples in their order, with which a resumed run detects changed data."""
        epochs = plan_epochs(self.tokens_per_epoch, self._num_samples, self._seq_length)
        facts = {"range": self.sequence_range, "seq_length": self._seq_length, "seed": self._seed}
        return cache_key(digest=self._digest, epochs=(epochs.epochs, epochs.separate), **facts)

    def sources(self) -> list[Source]:
        """Return a list with one entry, the description of this dataset by which a resumed run detects changed data."""
        epoch = (self.tokens_per_epoch - 1) // self._seq_length
        return [Source(self.name, self._digest, 1.0, epoch, self.order())]

    @functools.cached_property
    def _digest(self) -> str:
        return self._sequences.digest()

    def token_counts(self, size: int, *, max_tokens: int = 1 << 27) -> npt.NDArray[np.int64]:
        """Count how often each token id occurs in the dataset's sequences, or in the first ones of a large dataset.

        Args:
            size: size of the vocabulary. Each token id must be below it.
            max_tokens: number of tokens after which counting stops, at the end of a group of 1024 sequences.
        Returns:
            [size] int64 count of each id.
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
    """Raise ValueError if a token id is not in [0, vocab_size). The message begins with `where`, such as a sample."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{where} holds the token id {low if low < 0 else high}, outside the tokenizer's vocabulary of"
            f" {vocab_size}; was it written with another tokenizer?"
        )


def build_indices(
    lengths: npt.NDArray[np.int32], *, first: int, num_samples: int | None, seq_length: int, seed: int
) -> Indices:
    """Build the arrays that define the samples of a range of documents: document, sample and shuffle index.

    Args:
        lengths: [documents] number of token ids of each document of the range.
        first: number of the range's first document in the dataset. It is added to the numbers in `Indices.documents`,
            which count from the dataset's first document.
        num_samples: smallest number of samples; None builds the samples of one epoch.
        seq_length: number of ids that a sample predicts; a sample has one id more.
        seed: seed for shuffling the documents and the samples.
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
    """The epochs over a dataset that provide the samples of a `GPTDataset`. They determine the order of the samples.

    Attributes:
        epochs: number of epochs.
        samples: number of samples in all epochs.
        before_last: number of samples in all epochs except the last.
        separate: True if the last epoch is shuffled separately, because less than 80 % of its samples are needed.
    """

    epochs: int
    samples: int
    before_last: int
    separate: bool


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> Epochs:
    """Plan the epochs over a dataset from which a `GPTDataset` takes its samples.

    Args:
        tokens_per_epoch: token ids of the dataset.
        num_samples: smallest number of samples; None plans one epoch.
        seq_length: number of ids that a sample predicts; a sample has one id more.
    """
    wanted = 0 if num_samples is None else num_samples * seq_length + 1
    epochs = max(1, -(-wanted // tokens_per_epoch))
    total = (epochs * tokens_per_epoch - 1) // seq_length
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    separate = False
    if epochs > 1 and num_samples is not None:
        separate = num_samples - before_last < int(_SEPARATE_BELOW * ((tokens_per_epoch - 1) // seq_length))
    return Epochs(epochs, total, before_last, separate)


def build_sample_index(lengths: npt.NDArray[np.int32], num_samples: int, seq_length: int) -> np.ndarray:
    """Find where each sample of a `GPTDataset` starts in the concatenated documents of all epochs.

    Args:
        lengths: [n] number of token ids of each document, in the order of the concatenation. A length may be 0.
        num_samples: number of samples. num_samples * seq_length must be below sum(lengths).
        seq_length: number of ids from the start of one sample to the start of the next.
    Returns:
        [num_samples + 1, 2] array. Row k has the index of the document that contains id k * seq_length of the
        concatenation, and the offset of this id in the document. The dtype is int32 if all values fit, otherwise int64.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    holders = np.searchsorted(ends, starts, side="right")  # document in which each sample starts, never an empty one
    small = max(len(lengths), int(lengths.max())) <= np.iinfo(np.int32).max
    index = np.empty((num_samples + 1, 2), dtype=np.int32 if small else np.int64)
    index[:, 0] = holders
    index[:, 1] = starts - (ends[holders] - lengths[holders])
    return index
