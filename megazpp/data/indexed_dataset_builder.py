"""Writing a .bin/.idx pair, so that a reader sees a whole pair or none.

Both files are written under names of their own, brought to the disk, and then renamed, the .idx last: a .bin without
its .idx is no dataset. What a killed process left behind is replaced by the next that writes the same pair; two living
processes cannot write the same one.
"""

from __future__ import annotations

import array
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megazpp.data.indexed_dataset import CODES, HEADER, MAGIC, pair_paths
from megazpp.files import check_writable, sync, sync_directory, try_lock, write_synced

_PIECE = 1 << 24  # ids that are checked and copied at a time


def check_output(prefix: Path, *, overwrite: bool) -> None:
    """`check_writable` of both files of a pair."""
    for path in pair_paths(prefix):
        check_writable(path, "--output-prefix", overwrite=overwrite)


class IndexedDatasetBuilder:
    """Writes a .bin/.idx pair; both appear under their names, replacing others, when all is on the disk.

    Args:
        prefix: path without .bin and .idx; its directory exists.
        dtype: of the ids, see `optimal_dtype`.
    Raises:
        ValueError: the dtype is none for ids, or another process is writing this pair.

    Use as a context manager to remove the unfinished files when an exception ends the writing.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        if self._dtype not in CODES:
            raise ValueError(f"token ids cannot be stored as {self._dtype}")
        self._bin_path, self._idx_path = pair_paths(Path(prefix))
        self._unfinished_bin = self._bin_path.with_name(self._bin_path.name + ".unfinished")
        self._unfinished_idx = self._idx_path.with_name(self._idx_path.name + ".unfinished")
        self._lengths = array.array("i")  # 4 bytes a sequence: there may be billions
        self._document_indices = array.array("q", [0])
        self._file = _claim(self._unfinished_bin)

    def __len__(self) -> int:
        """The number of sequences so far."""
        return len(self._lengths)

    def extend(self, tokens: np.ndarray, lengths: npt.ArrayLike, document_ends: npt.ArrayLike) -> None:
        """Append many sequences.

        Args:
            tokens: [sum of lengths] their ids, back to back.
            lengths: [n] ids of each sequence.
            document_ends: [d] rising: after how many of these sequences a document ends.
        Raises:
            ValueError: an id does not fit the dtype.
        """
        for start in range(0, len(tokens), _PIECE):
            self._write(tokens[start : start + _PIECE])
        before = len(self._lengths)
        self._lengths.frombytes(np.asarray(lengths, dtype=np.int32).tobytes())
        self._document_indices.frombytes((np.asarray(document_ends, dtype=np.int64) + before).tobytes())

    def add_sequence(self, tokens: npt.ArrayLike) -> None:
        """Append a sequence (a sentence) to the document in progress; `end_document` ends that.

        Raises:
            ValueError: an id does not fit the dtype.
        """
        ids = np.asarray(tokens)
        self._write(ids)
        self._lengths.append(ids.size)

    def end_document(self) -> None:
        """The sequences since the last call are a document."""
        self._document_indices.append(len(self._lengths))

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append a document of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def finalize(self) -> None:
        """Write the index, bring both files to the disk and give them their names."""
        sync(self._file)
        write_synced(self._unfinished_idx, _index_bytes(self._dtype, self._lengths, self._document_indices))
        self._idx_path.unlink(missing_ok=True)  # the new .bin must never stand beside the old .idx
        os.replace(self._unfinished_bin, self._bin_path)
        os.replace(self._unfinished_idx, self._idx_path)
        sync_directory(self._idx_path.parent)
        self._file.close()  # not before: closing lets others claim the unfinished file

    def _write(self, ids: np.ndarray) -> None:
        limits = np.iinfo(self._dtype)
        if ids.size and ids.dtype != self._dtype and not (limits.min <= ids.min() and ids.max() <= limits.max):
            raise ValueError(f"{self._bin_path}: token ids {ids.min()} to {ids.max()} do not fit {self._dtype}")
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file.closed:  # finished: what now has the unfinished names is not ours
            return
        for path in (self._unfinished_bin, self._unfinished_idx):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()


def _claim(path: Path) -> BinaryIO:
    """An empty file that only we write, whatever was in it."""
    file = open(path, "ab")  # noqa: SIM115 - and not "wb": it may be another's
    try:
        mine = try_lock(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        mine = True  # a file system without locks
    if not mine:
        file.close()
        raise ValueError(f"{path}: another process is writing it")
    file.truncate(0)
    return file


def _index_bytes(dtype: np.dtype, lengths: Sequence[int], document_indices: Sequence[int]) -> bytes:
    sizes = np.asarray(lengths, dtype="<i4")
    pointers = np.zeros(len(sizes), dtype="<i8")
    np.cumsum(sizes[:-1], dtype="<i8", out=pointers[1:])
    pointers *= dtype.itemsize
    documents = np.asarray(document_indices, dtype="<i8")
    header = HEADER.pack(MAGIC, 1, CODES[dtype], len(sizes), len(documents))
    return header + sizes.tobytes() + pointers.tobytes() + documents.tobytes()
