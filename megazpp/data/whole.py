"""All tokens of a dataset in order, each to be predicted exactly once: the samples of a test.

The sequences' ids lie back to back, with eod before the first, from which it is predicted. Window k has the ids from
k S to (k + 1) S: the last of one window is the first input of the next. Beyond the end there is `PADDING`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megazpp.data.gpt_dataset import Sequences
from megazpp.data.loader import MicroBatch, make_micro_batch

PADDING = -1


class WholeText:
    """Windows of S + 1 ids, of which `num_tokens` in all are predicted.

    Args:
        eod: the id before the first one; None: there is none, and the first id is not predicted.
        vocab_size: refuse ids that are not below this.
    """

    def __init__(self, sequences: Sequences, *, seq_length: int, eod: int | None, vocab_size: int, name: str) -> None:
        self._sequences, self._seq_length, self._vocab_size, self._name = sequences, seq_length, vocab_size, name
        self._before = np.array([] if eod is None else [eod], dtype=np.int64)
        lengths = np.array(sequences.lengths, dtype=np.int64)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self.num_tokens = int(self._ends[-1]) + len(self._before) - 1
        if self.num_tokens < 1:
            raise ValueError(f"{name} has no token that could be predicted")

    def __len__(self) -> int:
        """Windows that have something to predict."""
        return -(-self.num_tokens // self._seq_length)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index`: [S + 1] int64; any index from `len` on is padding alone."""
        window = np.full(self._seq_length + 1, PADDING, dtype=np.int64)
        start = index * self._seq_length - len(self._before)  # in the ids of the sequences
        ids = self._ids(max(start, 0), start + self._seq_length + 1)
        if start < 0:
            ids = np.concatenate((self._before, ids))
        window[: len(ids)] = ids
        return window

    def token_counts(self, size: int) -> npt.NDArray[np.int64]:
        """Count of each id below `size`."""
        counts = [np.bincount(self._sequences.get(i), minlength=size) for i in range(len(self._ends))]
        return np.sum(counts, axis=0)

    def _ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        parts: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._starts, stop, side="left"))
        for sequence in range(first, last):
            begin, end = int(self._starts[sequence]), int(self._ends[sequence])
            offset = max(start - begin, 0)
            parts.append(self._sequences.get(sequence, offset, min(stop, end) - begin - offset))
        ids = np.concatenate(parts, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise ValueError(
                f"{self._name} holds ids from {ids.min()} to {ids.max()}, outside the tokenizer's vocabulary of "
                f"{self._vocab_size}; was it written with another tokenizer?"
            )
        return ids


def make_padded_batch(samples: torch.Tensor, **options: Any) -> MicroBatch:
    """`make_micro_batch` of samples that may hold `PADDING`, which is never predicted."""
    batch = make_micro_batch(samples.clamp(min=0), **options)
    return batch._replace(loss_mask=batch.loss_mask * (samples[:, 1:] != PADDING))
