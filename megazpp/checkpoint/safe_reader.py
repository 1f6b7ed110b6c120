"""A safe reader for checkpoints in the format of torch.distributed.checkpoint: it never runs code from the files.

`torch.distributed.checkpoint.load` reads the same files. This reader differs in four ways:

- It reads only files that the checkpoint's `checksums.txt` lists, and rejects a tensor whose chunks leave gaps.
- It unpickles only the index `.metadata` and the headers of tensors, both with restricted unpicklers.
- It reads any rectangular part (a box) of a tensor, for example some rows, whatever layout has saved the tensor.
- It accepts another number of padding rows in vocabulary matrices, because this number depends on the tensor-parallel
  size.

`WeightOpener` opens the weights of a checkpoint, and `check_weights` compares their names and shapes with the model.
An optional feature, such as LoRA, can replace the opener (`WeightOpener`) to read checkpoints that contain only changes
of another checkpoint's weights.
"""

from __future__ import annotations

import bisect
import functools
import math
import pickle
import warnings
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from torch.distributed.tensor import DTensor

from megazpp.base.files import DamagedError, errors_as
from megazpp.checkpoint.checksums import INDEX, SEPARATE, read_checksums
from megazpp.checkpoint.checksums import NAME as CHECKSUMS
from megazpp.checkpoint.folder import RECORD
from megazpp.checkpoint.metadata import CheckpointMetadata, rows_problem
from megazpp.checkpoint.state import MODEL, SCALAR_HEAD, Saved
from megazpp.parallel.agreement import raise_on_all_ranks
from megazpp.parallel.axis import MeshAxis

Chunk = tuple[str, tuple[int, ...]]  # one chunk of a saved tensor: the tensor's key, and the index of the first element
# A part of a tensor to fill, as a view; and the slices that cut this part's values out of a chunk
Part = tuple[torch.Tensor, tuple[slice, ...]]
_AT_ONCE = 1 << 22  # largest number of elements that `read_box` reads from a file at once (but at least one row)


class SafeReader:
    """A reader of the tensors in one checkpoint that is safe for files from untrusted sources.

    Its methods raise ValueError in three cases: the index `.metadata` refers to classes that no index needs, an entry
    is not a tensor, or the chunks of a tensor do not cover all its elements. `torch.load(weights_only=True)` reads the
    headers of tensors, and runs no code from the file.

    Args:
        checkpoint: folder of one checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.path = checkpoint
        self._pieces: dict[MetadataIndex, tuple[Path, int]] = {}  # cache of `_find_piece`: file and byte offset
        self._covered = set[str]()  # keys of the tensors whose chunks `_check_chunks` has accepted
        self._exists = functools.cache(Path.exists)
        # While `fill` reads this host's files, `read_box` collects here, by chunk, the parts of tensors whose values
        # are only on other hosts. None at other times: a missing file is then an error.
        self._absent: dict[Chunk, list[Part]] | None = None

    @functools.cached_property
    def _index(self) -> Metadata:
        """The content of the index `.metadata`: shapes of all tensors, and files with their chunks."""
        if INDEX not in self._files:  # an unlisted index is not verified, and may be a FIFO that blocks for ever
            raise ValueError(f"{self.path}: {CHECKSUMS} does not list {INDEX}; use another checkpoint")
        # A forged file can make unpickling raise many types of errors.
        kinds = (pickle.UnpicklingError, AttributeError, EOFError, LookupError, MemoryError, TypeError)
        with (self.path / INDEX).open("rb") as file, errors_as(f"{self.path / INDEX} cannot be read", kinds):
            found: Metadata = _IndexUnpickler(file).load()
            if {type(found.state_dict_metadata), type(found.storage_data)} != {dict}:
                raise TypeError("it is not the index of a checkpoint")
            return found

    @functools.cached_property
    def _files(self) -> Collection[str]:
        """The names of the files that `checksums.txt` lists. Only these files may contain tensors."""
        return read_checksums(self.path).keys()

    @functools.cached_property
    def _saved(self) -> dict[str, TensorStorageMetadata]:
        """The shape, dtype and chunks of each tensor in the checkpoint, by key."""
        saved = self._index.state_dict_metadata
        return {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the shape, dtype and chunks of each tensor in the checkpoint, by key."""
        return self._saved

    def fill(self, targets: Mapping[str, torch.Tensor], padded: Collection[str], axis: MeshAxis | None = None) -> None:
        """Fill tensors with the values of the checkpoint, which a run with another layout may have saved.

        Args:
            targets: tensors to fill, by key. Of a DTensor, only the local shard is filled.
            padded: keys of tensors that end in padding rows. The saved tensor may have more or fewer rows. Rows of a
                target that the saved tensor lacks stay unchanged.
            axis: ranks that call this together, each with its own targets. If hosts have no shared file system, a rank
                also receives values from files that only another host has. None for a single process.
        Raises:
            ValueError: a saved tensor has another shape, or cannot be read. All ranks raise this error.
        """
        axis = axis or MeshAxis("alone")
        self._absent = absent = dict[Chunk, list[Part]]()
        raise_on_all_ranks(axis, lambda: self._fill_from_here(targets, padded))
        self._absent = None

        # ---- send chunks whose files are missing on some hosts, from a rank that has the file to all ranks
        wanted = sorted(set().union(*axis.share_object(axis.gather_objects(list(absent)))))
        there = axis.share_object(axis.gather_objects([self._is_here(chunk) for chunk in wanted])) if wanted else []
        for number, chunk in enumerate(wanted):
            holder = next((rank for rank, holds in enumerate(there) if holds[number]), None)
            if holder is None:
                raise ValueError(f"{self.path}: no host has the file with a part of {chunk[0]}{SEPARATE}")
            found = axis.gather_objects(self._read_chunk(chunk) if axis.rank == holder else None)
            content = axis.share_object(found[holder] if found else None)
            for part, place in absent.get(chunk, ()):
                part.copy_(content[place])

    def _fill_from_here(self, targets: Mapping[str, torch.Tensor], padded: Collection[str]) -> None:
        """Fill `targets` from the files on this host. Add parts whose files are only on other hosts to `_absent`."""
        saved = self.tensors()
        for key, target in targets.items():
            size, shape = tuple(saved[key].size), tuple(target.shape)
            if size != shape and (key not in padded or size[1:] != shape[1:]):
                raise ValueError(
                    f"{self.path}: {key} has shape {size}, but this run's tensor has {shape}; load a "
                    "checkpoint of the same model"
                )
            box, offsets = target, (0,) * target.dim()
            if isinstance(target, DTensor):
                (chunk,) = target.__create_chunk_list__()
                box, offsets = target.to_local(), tuple(chunk.offsets)
            self.read_box(key, offsets, box)

    def read_whole(self, key: str) -> torch.Tensor:
        """Return the complete tensor of a key on the CPU, in the dtype in which it was saved."""
        entry = self.tensors()[key]
        with self._errors_of_index(key):
            whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read_box(key, (0,) * whole.dim(), whole)
        return whole

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Fill `box` with a rectangular part of a saved tensor.

        Args:
            key: key of the saved tensor.
            offsets: index of the part's first element in the saved tensor, one number per dimension.
            box: tensor to fill, with the shape of the part. Elements outside of the saved tensor stay unchanged.
        Raises:
            ValueError: a file is too short, or its content is not a contiguous tensor.
        """
        entry = self.tensors()[key]
        if key not in self._covered:
            with self._errors_of_index(key):
                self._check_chunks(key, entry)
        if not box.dim():
            offsets, box = (0,), box.view(1)
        for chunk in entry.chunks:
            # ---- intersect the saved chunk with the box; a scalar is read as a vector of one element
            begins, sizes = tuple(chunk.offsets) or (0,), tuple(chunk.sizes) or (1,)
            places = list(zip(offsets, box.shape, begins, sizes, strict=True))
            low = [max(start, own) for start, _, own, _ in places]
            high = [min(start + size, own + length) for start, size, own, length in places]
            if any(first >= end for first, end in zip(low, high, strict=True)):
                continue
            inside = box[tuple(slice(a - start, b - start) for a, b, start in zip(low, high, offsets, strict=True))]
            place = tuple(slice(a - own, b - own) for a, b, own in zip(low, high, begins, strict=True))
            if self._absent is not None and not self._is_here((key, begins)):
                self._absent.setdefault((key, begins), []).append((inside, place))
                continue
            # ---- read complete rows of the chunk, and copy the columns that the box needs
            columns = place[1:]
            path, start = self._find_piece(MetadataIndex(key, chunk.offsets), entry.properties.dtype, chunk.sizes)
            dtype, width = entry.properties.dtype, math.prod(sizes[1:])
            for part in inside.split(max(_AT_ONCE // width, 1)):
                row = low[0] - begins[0]
                count = len(part) * width * dtype.itemsize
                content = np.fromfile(path, np.uint8, count, offset=start + row * width * dtype.itemsize)
                if content.size < count:
                    raise ValueError(f"{path} is truncated inside of the tensor {key}: copy the file again")
                part.copy_(torch.from_numpy(content).view(dtype).view(-1, *sizes[1:])[:, *columns])
                low[0] += len(part)

    def _is_here(self, chunk: Chunk) -> bool:
        """Return False if the file with this chunk of a tensor is missing on this host; otherwise True.

        The result is also True if the index `.metadata` names no file for the chunk, so that `read_box` reads the chunk
        and raises the error.
        """
        found = self._index.storage_data.get(self._place_of(chunk))
        return found is None or self._exists(self.path / found.relative_path)

    def _read_chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return the values of one chunk of a saved tensor. A scalar is returned as a vector of one element."""
        key, begins = chunk
        entry, place = self.tensors()[key], self._place_of(chunk)
        sizes = next(each.sizes for each in entry.chunks if each.offsets == place.offset)
        content = torch.empty(tuple(sizes) or (1,), dtype=entry.properties.dtype)
        self.read_box(key, begins, content)
        return content

    def _place_of(self, chunk: Chunk) -> MetadataIndex:
        """Return the key of a chunk in the index `.metadata`, which has () as offset of a scalar instead of (0,)."""
        key, begins = chunk
        return MetadataIndex(key, begins if self.tensors()[key].size else ())

    def _errors_of_index(self, key: str) -> AbstractContextManager[None]:
        """Convert the errors that a nonsensical entry of the index causes in the block to a ValueError with the key."""
        kinds = (AttributeError, IndexError, RuntimeError, TypeError)
        return errors_as(f"{self.path}: the index describes {key} wrongly", kinds)

    def _check_chunks(self, key: str, entry: TensorStorageMetadata) -> None:
        """Raise ValueError unless the chunks of a saved tensor cover each of its elements exactly once."""
        size = tuple(entry.size) or (1,)
        begins = [tuple(chunk.offsets) or (0,) for chunk in entry.chunks]
        ends = [
            tuple(map(sum, zip(begin, tuple(chunk.sizes) or (1,), strict=True)))
            for begin, chunk in zip(begins, entry.chunks, strict=True)
        ]
        # The borders of all chunks cut the tensor into cells. `counts` has the number of chunks that cover each cell: 0
        # in a gap, and more than 1 where chunks overlap.
        cuts = [sorted({0, length, *(corner[i] for corner in (*begins, *ends))}) for i, length in enumerate(size)]
        counts = np.zeros([len(cut) - 1 for cut in cuts], np.int64)
        for corners in zip(begins, ends, strict=True):
            low, high = ([bisect.bisect_left(*pair) for pair in zip(cuts, corner, strict=True)] for corner in corners)
            counts[tuple(map(slice, low, high))] += 1
        inside = all((cut[0], cut[-1]) == (0, length) for cut, length in zip(cuts, size, strict=True))
        if not inside or (counts != 1).any():
            raise ValueError(
                f"{self.path}: the chunks of {key} do not cover each of its elements exactly once; use another "
                "checkpoint"
            )
        self._covered.add(key)

    def _find_piece(self, index: MetadataIndex, dtype: torch.dtype, sizes: torch.Size) -> tuple[Path, int]:
        """Return the file that contains one chunk of a saved tensor, and the byte offset of its first element.

        The result is cached, because `read_box` may be called for many parts of a chunk.

        Args:
            index: key of the chunk in the index `.metadata`.
            dtype: dtype of the chunk according to the index.
            sizes: shape of the chunk according to the index.
        Raises:
            ValueError: the checkpoint has no readable chunk with this key. Or the stored tensor is not contiguous, or
                its dtype or shape is not `dtype` or `sizes`.
        """
        if index not in self._pieces:
            try:
                found = self._index.storage_data[index]
                if found.relative_path not in self._files:
                    raise ValueError(
                        f"{self.path}: {index.fqn} is in the file {str(found.relative_path)[:80]!r}, which {CHECKSUMS} "
                        "does not list; use another checkpoint"
                    )
                path = self.path / found.relative_path
                if not path.exists():
                    raise ValueError(f"{path} is missing{SEPARATE}")
                with path.open("rb") as file, warnings.catch_warnings(), torch.serialization.skip_data():
                    view: Any = _create_file_view(file, found.offset, found.length)
                    archive: Any = torch._C.PyTorchFileReader(view)
                    start = found.offset + archive.get_record_offset("data/0")
                    view.seek(0)
                    described = torch.load(view, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, LookupError, EOFError, OSError) as error:
                raise ValueError(
                    f"{self.path}: {index.fqn} cannot be read as a tensor: {error}; use another checkpoint"
                ) from error
            if not described.is_contiguous() or described.storage_offset():
                raise ValueError(f"{path}: {index.fqn} is not stored as a contiguous tensor; use another checkpoint")
            if (described.dtype, described.shape) != (dtype, torch.Size(sizes)):
                raise ValueError(
                    f"{path}: {index.fqn} is stored as {described.dtype} {tuple(described.shape)}, but the index "
                    f"describes {dtype} {tuple(sizes)}; use another checkpoint"
                )
            self._pieces[index] = path, start
        return self._pieces[index]


# The classes and functions to which a pickled index `.metadata` may refer, as (module, name).
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
    """An unpickler for `.metadata` that accepts only the names in `_INDEX_PARTS`, torch dtypes and enum members.

    A file with any other name could run code while it is unpickled.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_PARTS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise ValueError(
            f"a checkpoint's index must not refer to {module}.{name}, which could run code: nothing is loaded; use a "
            "checkpoint from a source that you trust"
        )


def _member(kind: type[Enum], name: str) -> Enum:
    """Return a member of an enum class by name. The unpickler uses it in place of `getattr`.

    Python 3.11.0 to 3.11.3 pickle an enum member as `getattr(its class, its name)`.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise ValueError(
            f"a checkpoint's index must not refer to an attribute of {kind}, because only enums are allowed: use a "
            "checkpoint from a source that you trust"
        )
    return kind[name]


@dataclass(frozen=True)
class WeightOpener:
    """The opener of a checkpoint's weights. This class is for checkpoints that contain all weights of their model.

    An optional feature, such as LoRA, replaces it by a subclass for checkpoints that contain only changes of another
    checkpoint's weights. That other checkpoint is called the base.

    Attributes:
        bases: folders of checkpoints in which the subclass looks for a base first.
        flags: names of flags that only checkpoints with a base have in their metadata.
    """

    bases: tuple[str, ...] = ()
    flags: ClassVar[tuple[str, ...]] = ()

    def is_whole(self, record: CheckpointMetadata) -> bool:
        """Return True if a checkpoint with this metadata contains all weights of its model.

        False means that it contains only adapters, and that the base weights are in another checkpoint.
        """
        return all(record.flags.get(name) is None for name in self.flags)

    def find_bases(self, checkpoint: Path, record: CheckpointMetadata) -> list[Path]:
        """Return the paths of checkpoints that may be the base of a checkpoint. Their weights are not compared here.

        The list is empty if the checkpoint contains all weights of its model.

        Args:
            checkpoint: folder of the checkpoint, for the message.
            record: metadata of the checkpoint.
        Raises:
            ValueError: the checkpoint needs a base, and none of the searched folders has a checkpoint.
        """
        return []

    def open(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Open all weights of a checkpoint for reading, including the weights of its base. All ranks call this.

        Args:
            checkpoint: folder of one checkpoint.
            record: metadata of the checkpoint.
            files: axis over all ranks with a process group for file operations; see `open_axis`.
        Raises:
            ValueError: the base is missing or damaged, or has other weights than the checkpoint needs. All ranks raise
                this error.
        """
        return SafeReader(checkpoint)


WHOLE_WEIGHTS = WeightOpener()


def check_weights(
    saved: Saved,
    shapes: Mapping[str, tuple[int, ...]],
    padded: Collection[str],
    record: CheckpointMetadata,
    checkpoint: Path,
    *,
    any_head: bool,
) -> None:
    """Raise DamagedError if the weights in a checkpoint have other names or shapes than the weights of the model.

    Args:
        saved: shape and dtype of each tensor in the checkpoint, by key.
        shapes: global shape of each weight of the model, by key.
        padded: keys of the weights that may end in padding rows. Their numbers of rows may differ.
        record: metadata of the checkpoint.
        checkpoint: folder of the checkpoint, for the message.
        any_head: True to accept a scalar head (of a reward model) that only the model or only the checkpoint has, as
            when a run loads only weights.
    """
    found = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith(MODEL)}
    for key in sorted(shapes.keys() | found.keys()):
        wanted, there, problem = shapes.get(key), found.get(key), None
        if any_head and key.startswith(SCALAR_HEAD) and None in (wanted, there):
            continue
        if wanted is None or there is None:
            problem = "is not in that model" if wanted is None else "is missing"
        elif there[1:] != wanted[1:] or (there != wanted and key not in padded):
            problem = f"has shape {there}, not {wanted}"
        elif key in padded:
            problem = rows_problem(record, there[0])
        if problem:
            what = f"the tensors are not of the model that {RECORD} describes: {key} {problem}"
            raise DamagedError(f"{checkpoint} is damaged: {what}")
