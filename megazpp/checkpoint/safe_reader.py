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
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

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
    def _pieces(self) -> dict[str, list[_Piece | None]]:
        """The places of the pieces of tensors that were asked for so far: one is often read in many boxes."""
        return {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and type of every tensor, by key."""
        saved = self.index.state_dict_metadata
        return {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Fill `box` with the part of a saved tensor that begins at `offsets`; no other rank takes part.

        Of tensors that lie in the file as they are, only what is asked for is read; the library reads whole pieces.
        """
        if key not in self._pieces:
            self._pieces[key] = [self._piece(key, chunk) for chunk in self.tensors()[key].chunks]
        pieces = self._pieces[key]
        if box.dim() in (1, 2) and box.is_contiguous() and all(piece is not None for piece in pieces):
            for piece in pieces:
                assert piece is not None
                piece.read(offsets, box)
            return
        with alone():
            load({key: box}, storage_reader=self, planner=_BoxPlanner(offsets), no_dist=True)

    def _piece(self, key: str, chunk: ChunkStorageMetadata) -> _Piece | None:
        """The place of a piece of a tensor; None if it is not there row by row."""
        entry = self.tensors()[key]
        found = self.index.storage_data.get(MetadataIndex(key, chunk.offsets))
        if found is None or found.transform_descriptors:
            return None
        path = Path(self.path) / found.relative_path
        size = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
        with path.open("rb") as file:
            file.seek(found.offset)
            try:
                archive = zipfile.ZipFile(_Window(file, found.offset, found.length))
                (record,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
            except (zipfile.BadZipFile, ValueError):
                return None
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != size:
                return None
            with warnings.catch_warnings(), torch.serialization.skip_data():
                window: Any = _Window(file, found.offset, found.length)
                described = torch.load(window, map_location="cpu", weights_only=True)
            if not isinstance(described, torch.Tensor) or not described.is_contiguous() or described.storage_offset():
                return None
            file.seek(found.offset + record.header_offset)
            names, extra = struct.unpack("<HH", file.read(30)[26:])  # of the local header
        return _Piece(path, found.offset + record.header_offset + 30 + names + extra, chunk)


class _Piece(NamedTuple):
    """A contiguous part of a tensor in a file."""

    path: Path
    start: int
    chunk: ChunkStorageMetadata

    def read(self, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Fill the part of `box`, which begins at `offsets` of the whole tensor, that is in this piece."""
        own, sizes = tuple(self.chunk.offsets), tuple(self.chunk.sizes)
        low = [max(a, b) for a, b in zip(offsets, own, strict=True)]
        ends = zip(offsets, box.shape, own, sizes, strict=True)
        high = [min(a + size, b + length) for a, size, b, length in ends]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return
        columns = sizes[1] if box.dim() == 2 else 1
        target = box[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
        at_once = max(_AT_ONCE // columns, 1)
        with self.path.open("rb", buffering=0) as file:
            for first in range(low[0], high[0], at_once):
                rows = min(at_once, high[0] - first)
                found = torch.empty(rows, columns, dtype=box.dtype)
                file.seek(self.start + (first - own[0]) * columns * box.element_size())
                content: Any = found.view(torch.uint8).numpy()
                if _read_all(file, memoryview(content).cast("B")) < found.nbytes:
                    raise ValueError(f"{self.path} ends too early")
                part = found[:, low[1] - own[1] : high[1] - own[1]] if box.dim() == 2 else found[:, 0]
                target[first - low[0] : first - low[0] + rows] = part


class _Window(io.RawIOBase):
    """A run of bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._length)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._place, 0)]
        self._file.seek(self._start + self._place)
        content = self._file.read(len(view))
        view[: len(content)] = content
        self._place += len(content)
        return len(content)


def _read_all(file: Any, view: memoryview) -> int:
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done


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
