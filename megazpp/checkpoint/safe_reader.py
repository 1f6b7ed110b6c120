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
import pickle
import warnings
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


class SafeReader(FileSystemReader):
    """Reads tensors only (`torch.load(weights_only=True)`), and an index that can name nothing but what it is made of.

    Raises ValueError if the index asks for anything else.
    """

    @functools.cached_property
    def index(self) -> Metadata:
        """The library's index of a checkpoint: what there is and where."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _IndexUnpickler(file).load()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and type of every tensor, by key."""
        saved = self.index.state_dict_metadata
        return {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Fill `box` with the part of a saved tensor that begins at `offsets`; no other rank takes part."""
        with alone():
            load({key: box}, storage_reader=self, planner=_BoxPlanner(offsets), no_dist=True)


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


class _BoxPlanner(DefaultLoadPlanner):
    """Reads the part of a tensor that begins at `offsets`."""

    def __init__(self, offsets: tuple[int, ...]) -> None:
        super().__init__()
        self._offsets = torch.Size(offsets)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, box in self.state_dict.items():
            entry = self.metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata), key
            chunk = ChunkStorageMetadata(offsets=self._offsets, sizes=box.shape)
            items += create_read_items_for_chunk_list(key, entry, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without the library's warning that one process reads and writes by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
