"""Made-up documents for `--mock-data`: ids that count up from 1, as in Megatron, so that a model can learn them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class MockSequences:
    """100,000 documents of 1 to 4,095 ids; document d is 1, 2, 3, ... modulo the vocabulary, with eod at its end.

    Args:
        vocab_size: ids are below this.
        eod: the last id of each document; None lets the counting go on.
    """

    def __init__(self, *, vocab_size: int, eod: int | None) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        self.lengths: npt.NDArray[np.int32] = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` ids (default: all the rest) of document `index`, from its id number `offset`."""
        size = int(self.lengths[index])
        stop = size if length is None else offset + length
        ids = (np.arange(offset, stop) + 1) % self._vocab_size
        if self._eod is not None and stop == size and stop > offset:
            ids[-1] = self._eod
        return ids
