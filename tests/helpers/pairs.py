"""Build documents for tests of the data path: JSON lines, .bin/.idx pairs, and sequences in memory."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megazpp.data.indexed_builder import IndexedDatasetBuilder

TEXT = (
    "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9
)  # nine copies are enough text to train a tokenizer


def write_jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_pair(prefix: Path, documents: Iterable[Sequence[int]], dtype: str = "<u2") -> Path:
    """Write a .bin/.idx pair with each document as one sequence of token IDs, and return its prefix."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return prefix


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Lists:
    """A dataset of token sequences in memory, with the interface of a .bin/.idx file."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self.lengths = np.array([len(document) for document in documents], dtype=np.int32)
        self._ids = np.array([*itertools.chain.from_iterable(documents)], dtype=np.int64)
        self._ends = np.cumsum(self.lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        start = int(self._ends[index] - self.lengths[index]) + offset
        return self._ids[start : self._ends[index] if length is None else start + length]
