"""A .bin/.idx pair with given documents."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megazpp.data.indexed_dataset import IndexedDatasetBuilder


def write_pair(prefix: Path, documents: Iterable[Sequence[int]], dtype: str = "<u2") -> Path:
    """Write each document as one sequence; returns the prefix."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return prefix
