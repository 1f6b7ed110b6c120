"""Reads torch.distributed.checkpoint's files without trusting them, by boxes: any part of any tensor, of any layout.

The format is the library's; `torch.distributed.checkpoint.load` reads it too. This reader unpickles nothing but the
library's own index and the descriptions of tensors, takes rows alone where they are wanted, and fits the rows that pad
a vocabulary, whose number follows from the tensor-parallel size.
"""

from __future__ import annotations

import functools
import math
import pickle
import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from torch.distributed.tensor import DTensor

_AT_ONCE = 1 << 22  # elements that are read at once


class SafeReader:
    """Reads tensors only (`torch.load(weights_only=True)`), and an index that can name nothing but what it is made of.

    Raises ValueError if the index asks for anything else.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.path = checkpoint
        self._pieces: dict[MetadataIndex, tuple[Path, int]] = {}

    @functools.cached_property
    def _index(self) -> Metadata:
        with (self.path / ".metadata").open("rb") as file:
            return _IndexUnpickler(file).load()

    @functools.cached_property
    def _saved(self) -> dict[str, TensorStorageMetadata]:
        saved = self._index.state_dict_metadata
        return {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and type of every tensor, by key."""
        return self._saved

    def fill(self, targets: Mapping[str, torch.Tensor], padded: Collection[str]) -> None:
        """Read this rank's parts of tensors, however they were spread when they were written.

        Args:
            targets: by key; of a DTensor the local part is read.
            padded: keys of tensors whose last rows are padding: more or fewer of them may be saved. Those that are not
                saved stay as they are.
        """
        saved = self.tensors()
        for key, target in targets.items():
            size, shape = tuple(saved[key].size), tuple(target.shape)
            if size != shape and (key not in padded or size[1:] != shape[1:]):
                raise ValueError(f"{self.path}: {key} has shape {size}, not {shape}")
            box, offsets = target, (0,) * target.dim()
            if isinstance(target, DTensor):
                (chunk,) = target.__create_chunk_list__()
                box, offsets = target.to_local(), tuple(chunk.offsets)
            self.read_box(key, offsets, box)

    def read_whole(self, key: str) -> torch.Tensor:
        """A tensor, whatever ranks have written its parts."""
        entry = self.tensors()[key]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read_box(key, (0,) * whole.dim(), whole)
        return whole

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Fill `box` with the part of a saved tensor that begins at `offsets`, row by row."""
        entry = self.tensors()[key]
        if not box.dim():
            offsets, box = (0,), box.view(1)
        for chunk in entry.chunks:
            begins, sizes = tuple(chunk.offsets) or (0,), tuple(chunk.sizes) or (1,)  # a scalar is a row of one
            places = list(zip(offsets, box.shape, begins, sizes, strict=True))
            low = [max(start, own) for start, _, own, _ in places]
            high = [min(start + size, own + length) for start, size, own, length in places]
            if any(first >= end for first, end in zip(low, high, strict=True)):
                continue
            inside = box[tuple(slice(a - start, b - start) for a, b, start in zip(low, high, offsets, strict=True))]
            columns = [slice(a - own, b - own) for a, b, own in zip(low, high, begins, strict=True)][1:]
            path, start = self._find_piece(MetadataIndex(key, chunk.offsets))
            dtype, width = entry.properties.dtype, math.prod(sizes[1:])
            for part in inside.split(max(_AT_ONCE // width, 1)):
                row = low[0] - begins[0]
                count = len(part) * width * dtype.itemsize
                content = np.fromfile(path, np.uint8, count, offset=start + row * width * dtype.itemsize)
                if content.size < count:
                    raise ValueError(f"{path} ends too early")
                part.copy_(torch.from_numpy(content).view(dtype).view(-1, *sizes[1:])[:, *columns])
                low[0] += len(part)

    def _find_piece(self, index: MetadataIndex) -> tuple[Path, int]:
        """The file of a piece of a tensor and where its rows begin there; found once, for many boxes are read."""
        if index not in self._pieces:
            try:
                found = self._index.storage_data[index]
                path = self.path / found.relative_path
                with path.open("rb") as file, warnings.catch_warnings(), torch.serialization.skip_data():
                    view: Any = _create_file_view(file, found.offset, found.length)
                    archive: Any = torch._C.PyTorchFileReader(view)
                    start = found.offset + archive.get_record_offset("data/0")
                    view.seek(0)
                    described = torch.load(view, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, LookupError, EOFError) as error:
                raise ValueError(f"{self.path}: {index.fqn} is not there as a tensor: {error}") from error
            if not described.is_contiguous() or described.storage_offset():
                raise ValueError(f"{path}: {index.fqn} is not there row by row")
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
