"""Reads torch.distributed.checkpoint's files without trusting them.

The format is the library's; `torch.distributed.checkpoint.load` reads it too. Added here: the reader unpickles nothing
but the library's own index, and the planner fits the rows that pad a vocabulary, whose number follows from the
tensor-parallel size, and boxes of tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import pickle
import warnings
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

_AT_ONCE = 1 << 22  # elements that are read at once


class SafeReader(FileSystemReader):
    """Reads tensors only (`torch.load(weights_only=True)`), and an index that can name nothing but what it is made of.

    Raises ValueError if the index asks for anything else.
    """

    @functools.cached_property
    def index(self) -> Metadata:
        """The library's index of a checkpoint: what there is and where."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _IndexUnpickler(file).load()

    @functools.cached_property
    def _pieces(self) -> dict[MetadataIndex, tuple[Path, int]]:
        return {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and type of every tensor, by key."""
        saved = self.index.state_dict_metadata
        return {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Fill `box` with the part of a saved tensor that begins at `offsets`; no other rank takes part.

        Args:
            box: [rows] or [rows, columns]; only the rows that are asked for are read, the library reads whole pieces.
        """
        for chunk in self.tensors()[key].chunks:
            places = list(zip(offsets, box.shape, chunk.offsets, chunk.sizes, strict=True))
            low = [max(start, own) for start, _, own, _ in places]
            high = [min(start + size, own + length) for start, size, own, length in places]
            if all(first < end for first, end in zip(low, high, strict=True)):
                inside = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, offsets, strict=True))
                columns = [slice(a - own, b - own) for a, b, own in zip(low, high, chunk.offsets, strict=True)][1:]
                self._read_rows(key, chunk, low[0] - chunk.offsets[0], box[inside], columns)

    def _read_rows(
        self, key: str, chunk: ChunkStorageMetadata, first: int, target: torch.Tensor, columns: list[slice]
    ) -> None:
        """Fill `target` with rows of a piece, from `first` on."""
        path, start = self._find_piece(key, chunk.offsets)
        width = math.prod(chunk.sizes[1:])
        at_once = max(_AT_ONCE // width, 1)
        for row in range(0, target.shape[0], at_once):
            part = target[row : row + at_once]
            count, itemsize = part.shape[0] * width, target.element_size()
            begin = start + (first + row) * width * itemsize
            content = np.fromfile(path, np.uint8, count * itemsize, offset=begin)
            if content.size < count * itemsize:
                raise ValueError(f"{path} ends too early")
            part.copy_(torch.from_numpy(content).view(target.dtype).view(-1, *chunk.sizes[1:])[:, *columns])

    def _find_piece(self, key: str, offsets: torch.Size) -> tuple[Path, int]:
        """The file of a piece of a tensor and where its rows begin there; found once, for many boxes are read."""
        index = MetadataIndex(key, offsets)
        if index not in self._pieces:
            found = self.index.storage_data[index]
            path = Path(self.path) / found.relative_path
            with path.open("rb") as file, warnings.catch_warnings(), torch.serialization.skip_data():
                view: Any = _create_file_view(file, found.offset, found.length)
                archive: Any = torch._C.PyTorchFileReader(view)
                start = found.offset + archive.get_record_offset("data/0")
                view.seek(0)
                described = torch.load(view, map_location="cpu", weights_only=True)
            if not described.is_contiguous() or described.storage_offset():
                raise ValueError(f"{path}: {key} is not there row by row")
            self._pieces[index] = path, start
        return self._pieces[index]


_INDEX_PARTS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_PARTS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise ValueError(f"a checkpoint's index has no use for {module}.{name}")


def _member(kind: type[Enum], name: str) -> Enum:
    """Python 3.11.0 to 3.11.3 pickle a member of an enumeration as an attribute of its class."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise ValueError(f"a checkpoint's index has no use for an attribute of {kind}")
    return kind[name]


class FittingPlanner(DefaultLoadPlanner):
    """Reads each tensor's part that this rank holds, however it was spread when it was written.

    Args:
        padded: keys of tensors whose last rows are padding that stays zero: more or fewer of them may be saved.
    """

    def __init__(self, padded: Collection[str]) -> None:
        super().__init__()
        self._padded = padded

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        entries = dict(self.metadata.state_dict_metadata)
        for key in self._padded:
            entry, tensor = entries.get(key), self.state_dict.get(key)
            if isinstance(entry, TensorStorageMetadata) and isinstance(tensor, torch.Tensor):
                size = torch.Size([tensor.shape[0], *entry.size[1:]])  # rows that are not saved are not read
                entries[key] = dataclasses.replace(entry, size=size)
        self.metadata = dataclasses.replace(self.metadata, state_dict_metadata=entries)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is a pickled object; checkpoints hold tensors only")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without the library's warning that one process reads and writes by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
