"""torch.distributed.checkpoint's files, written with checksums and read without trusting them.

The format is the library's; `torch.distributed.checkpoint.load` reads it too. Added here: the writer sums what passes
through it, the reader unpickles nothing but the library's own index, and the planner fits the rows that pad a
vocabulary, whose number follows from the tensor-parallel size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import pickle
import zlib
from collections.abc import Callable, Collection, Generator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.utils import serialization

from megazpp.checkpoint.checksums import FileSum


class SummingWriter(FileSystemWriter):
    """Writes this rank's file, and the index on rank 0; each is on disk afterwards.

    Args:
        read: gives a tensor by its key when its turn has come, where `save` has only meta tensors; each then has a
            file of its own, because the library keeps in memory what goes into one file.
    Attributes:
        sums: of the files written, by name.
    """

    def __init__(self, path: Path, read: Callable[[str], torch.Tensor] | None = None) -> None:
        super().__init__(path, sync_files=True, single_file_per_rank=read is None)
        self.fs = _SummingFiles()
        self.sums = self.fs.sums
        self._read = read

    def save(self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Write on all ranks of `group`; torch's own checksums, one per tensor and read by nobody, are left out."""
        planner = None if self._read is None else _ReadingPlanner(self._read)
        with serialization.config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            dcp.save(dict(tensors), storage_writer=self, planner=planner, process_group=group)


class _ReadingPlanner(DefaultSavePlanner):
    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._read(index.fqn)


class _SummingFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", f"a writer opens {path} in mode {mode}"
        with _SummingFile(path) as stream:
            try:
                yield stream
            except Exception as error:
                raise (stream.failure or error) from None
        self.sums[Path(path).name] = FileSum(stream.size, stream.crc)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummingFile(io.BufferedWriter):
    """A file that knows its size, its checksum, and why it could not be written: torch.save says where instead."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.size = self.crc = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.size += count
        return count

    def fileno(self) -> int:
        self.flush()  # who asks for it means to fsync; torch 2.13 does not flush the index before it does
        return super().fileno()


class SafeReader(FileSystemReader):
    """Reads tensors only (`torch.load(weights_only=True)`), and an index that can name nothing but what it is made of.

    Raises:
        ValueError: the index asks for anything else.
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
