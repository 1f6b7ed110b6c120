"""A dataset that divides a text into samples so that each token is predicted exactly once, for scores of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megazpp.data.gpt_dataset import Sequences, check_vocabulary
from megazpp.data.loader import MicroBatch, make_micro_batch

PADDING = -1  # fills the last sample after the end of the text, in place of token ids


class WholeText:
    """A dataset of all token ids of a text in windows of S + 1 ids, so that each id is predicted exactly once.

    The sequences of the text are concatenated. An end-of-document token (eod) comes before them, so that the first id
    of the text can be predicted. Window k has the ids k * S to (k + 1) * S of this concatenation. So the last id of a
    window is also the first input of the next window. The last window is filled with `PADDING`.

    Args:
        sequences: sequences of token ids.
        seq_length: S, the number of predicted ids of a window.
        eod: token id that is put before the text; None adds no token, and then the first id is not predicted.
        vocab_size: size of the vocabulary; all ids must be smaller.
        name: name of the text in error messages.
    Attributes:
        num_tokens: number of ids that are predicted.
    Raises:
        ValueError: no id could be predicted.
    """

    def __init__(self, sequences: Sequences, *, seq_length: int, eod: int | None, vocab_size: int, name: str) -> None:
        self._sequences, self._seq_length, self._vocab_size, self._name = sequences, seq_length, vocab_size, name
        self._before = np.array([] if eod is None else [eod], dtype=np.int64)
        self._ends = np.cumsum(sequences.lengths, dtype=np.int64)
        self.num_tokens = int(self._ends[-1]) + len(self._before) - 1
        if self.num_tokens < 1:
            raise ValueError(f"{name} has no token that could be predicted: the text is too short")

    def __len__(self) -> int:
        """Return the number of windows of the text that have at least one token to predict."""
        return -(-self.num_tokens // self._seq_length)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the token ids of window `index`: [seq_length + 1] int64.

        Windows after the end of the text have only `PADDING`.
        """
        # position of the window's first id in the concatenated sequences; an eod before the text has position -1
        start = index * self._seq_length - len(self._before)
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


def make_padded_batch(samples: torch.Tensor, **options: Any) -> MicroBatch:
    """Make a micro-batch of samples that may contain `PADDING`, which is left out of the loss.

    Args:
        samples: [B, S + 1] int64 token ids or `PADDING`, for B samples with S inputs each.
        **options: options of `make_micro_batch`.
    """
    batch = make_micro_batch(samples.clamp(min=0), **options)
    return batch._replace(loss_mask=batch.loss_mask * (samples[:, 1:] != PADDING))
