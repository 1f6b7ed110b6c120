"""Write token ids into Megatron's .bin/.idx pairs. The files equal Megatron's byte for byte.

Readers see either a complete pair or none. The builder writes both files under temporary names, syncs them to disk and
then renames them. The .idx is renamed last, because readers do not accept a .bin without its .idx. If a process is
killed, its unfinished files remain, and the next builder of the same pair replaces them. Two running processes cannot
write the same pair. data/indexed_dataset.py describes the format and has the reader.
"""

from __future__ import annotations

import array
import contextlib
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megazpp.base.files import check_writable, errors_naming, sync, sync_directory, try_lock, write_synced
from megazpp.data.indexed_dataset import DTYPES, HEADER, MAGIC, pair_paths

_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
_PIECE = 1 << 24  # number of token ids that `extend` checks and converts at once, which limits its memory


def optimal_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which Megatron stores ids: uint16 for vocabularies below 65,500, otherwise int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def check_output(prefix: Path, *, overwrite: bool) -> None:
    """Raise ValueError if the .bin or the .idx of --output-prefix cannot be written.

    Args:
        prefix: path of the pair without .bin and .idx.
        overwrite: True if existing files may be replaced. If False, they are an error.
    """
    for path in pair_paths(prefix):
        check_writable(path, "--output-prefix", overwrite=overwrite)


class IndexedDatasetBuilder:
    """Writer of a .bin/.idx pair. The files get their names, and replace existing files, when `finalize` is called.

    As a context manager, the builder removes its unfinished files at the end unless `finalize` was called.

    Args:
        prefix: path of the pair without .bin and .idx, in an existing directory.
        dtype: dtype of the stored ids; see `optimal_dtype`.
    Raises:
        ValueError: another process is writing this pair.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._bin_path, self._idx_path = pair_paths(Path(prefix))
        self._unfinished_bin, self._unfinished_idx = (
            path.with_name(path.name + ".unfinished") for path in (self._bin_path, self._idx_path)
        )
        self._lengths = array.array("i")  # 4 bytes per length, less than in a list: there may be billions of sequences
        self._document_indices = array.array("q", [0])
        self._file = _claim(self._unfinished_bin)

    def __len__(self) -> int:
        """Return the number of sequences that were appended to the .bin/.idx pair so far."""
        return len(self._lengths)

    def extend(self, tokens: np.ndarray, lengths: npt.ArrayLike, document_ends: npt.ArrayLike) -> None:
        """Append n sequences and the ends of d documents.

        Args:
            tokens: [sum of lengths] token ids of the sequences, concatenated.
            lengths: [n] number of ids of each sequence.
            document_ends: [d] ascending numbers from 0 to n. Each says after how many of the n sequences a document
                ends.
        Raises:
            ValueError: a token id does not fit the dtype of the stored ids.
        """
        limits = np.iinfo(self._dtype)
        for start in range(0, len(tokens), _PIECE):
            ids = tokens[start : start + _PIECE]
            if ids.dtype != self._dtype and not (limits.min <= ids.min() and ids.max() <= limits.max):
                raise ValueError(
                    f"{self._bin_path}: token ids {ids.min()} to {ids.max()} do not fit the dtype {self._dtype} of "
                    "this pair"
                )
            with errors_naming(self._bin_path):
                self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        before = len(self._lengths)
        self._lengths.frombytes(np.asarray(lengths, dtype=np.int32).tobytes())
        self._document_indices.frombytes((np.asarray(document_ends, dtype=np.int64) + before).tobytes())

    def add_document(self, *sequences: npt.ArrayLike) -> None:
        """Append a document that consists of one or several sequences of token ids, for example one per sentence.

        Raises:
            ValueError: a token id does not fit the dtype of the stored ids.
        """
        for ids in map(np.asarray, sequences):
            self.extend(ids, [ids.size], [])
        self._document_indices.append(len(self._lengths))

    def finalize(self) -> None:
        """Write the .idx file, sync both files of the pair to disk, and rename them to their final names."""
        # ---- compute the content of the .idx
        sizes = np.asarray(self._lengths, dtype="<i4")
        pointers = np.zeros(len(sizes), dtype="<i8")
        np.cumsum(sizes[:-1], dtype="<i8", out=pointers[1:])
        pointers *= self._dtype.itemsize
        documents = np.asarray(self._document_indices, dtype="<i8")
        header = HEADER.pack(MAGIC, 1, _CODES[self._dtype], len(sizes), len(documents))
        # ---- write and rename both files
        with errors_naming(self._bin_path):
            sync(self._file)
        write_synced(self._unfinished_idx, header + sizes.tobytes() + pointers.tobytes() + documents.tobytes())
        self._idx_path.unlink(missing_ok=True)  # a reader must never open the new .bin with the old .idx
        os.replace(self._unfinished_bin, self._bin_path)
        os.replace(self._unfinished_idx, self._idx_path)
        sync_directory(self._idx_path.parent)
        # Close the .bin last, because this releases its lock. A process that gets the lock empties the unfinished file.
        self._file.close()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file.closed:  # `finalize` has closed it; unfinished files of this pair then belong to another process
            return
        for path in (self._unfinished_bin, self._unfinished_idx):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closing writes buffered bytes, which may fail on a full disk
            self._file.close()


def _claim(path: Path) -> BinaryIO:
    """Create an unfinished .bin file, or empty an existing one, and lock it for this process.

    Raises:
        ValueError: another process has locked the file, because it is writing the same pair.
    """
    while True:
        file = open(path, "ab")  # noqa: SIM115 - "wb" would truncate the file before the lock shows that it is in use
        try:
            is_locked = try_lock(file)
        except OSError:
            break  # the file system does not support locks, so other processes cannot be detected
        if not is_locked:
            file.close()
            raise ValueError(
                f"{path}: another process is writing this file; wait for its end, or write to another path"
            )
        # The builder that held the lock may have renamed or removed the file after `open`. The lock then belongs to a
        # complete .bin, or to a file without a name, so open the path again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                break
        file.close()
    file.truncate(0)
    return file
