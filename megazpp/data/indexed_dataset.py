"""Megatron's .bin/.idx format for token ids: a reader, and a writer whose files equal Megatron's byte for byte.

`<prefix>.bin` holds the ids of all sequences, concatenated. `<prefix>.idx` is their index, little endian:

    offset        bytes  content
    0             9      b"MMIDIDX\\0\\0"
    9             8      uint64 version = 1
    17            1      uint8 code of the ids' dtype
    18            8      uint64 N, the number of sequences
    26            8      uint64 D, the number of documents + 1
    34            4N     int32 lengths, in ids
    34 + 4N       8N     int64 pointers into .bin, in bytes
    34 + 12N      8D     int64 document indices: the sequence each document starts at, and N at the end

A document is one sequence unless it was split into sentences. Both files are memory-mapped, so the ranks of a node
share their pages. Opening a pair reads the index once and no ids.

A reader sees either a complete pair or none. Both files are written under temporary names, synced to disk and then
renamed. The .idx is renamed last, because a .bin without its .idx is not a dataset. A later writer of the same pair
replaces the leftovers of a killed process. Two live processes cannot write the same pair.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megazpp.base.files import check_writable, sync, sync_directory, try_lock, write_synced

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are float64 and float32, which the GPT-NeoX library swaps. Neither stores ids, so both are refused.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_PIECE = 1 << 24  # number of ids that are checked and copied at once
_DIGEST_BYTES, _DIGEST_PIECES = 1 << 26, 64  # bytes of a file that a digest reads, and the number of their pieces


def optimal_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which Megatron stores ids: uint16 for vocabularies below 65,500, otherwise int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def pair_paths(prefix: Path) -> tuple[Path, Path]:
    """Return the paths of the .bin and the .idx file of a pair."""
    # `with_suffix` would be wrong, because a prefix may contain dots
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def check_output(prefix: Path, *, overwrite: bool) -> None:
    """Check that both files of a pair can be written, as `check_writable` does."""
    for path in pair_paths(prefix):
        check_writable(path, "--output-prefix", overwrite=overwrite)


class IndexedDataset:
    """The sequences of a .bin/.idx pair, read through the page cache.

    Args:
        prefix: path without .bin and .idx.
    Attributes:
        lengths: [N] int32 number of ids of each sequence.
        pointers: [N] int64 position of each sequence in .bin, in bytes.
        document_indices: [D] int64 first sequence of each document, and N at the end.
        tokens: all ids of .bin.
        has_modes: True if the index ends with one byte per sequence, as multimodal indices do.
    Raises:
        ValueError: a file is missing or damaged, has another format, or does not belong to the other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = pair_paths(self.prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise ValueError(f"{path} {'is a directory' if path.is_dir() else 'does not exist'}")
        self.dtype, num_sequences, num_indices = _read_header(self.idx_path)
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r", offset=_HEADER.size)
        ends = np.cumsum([4 * num_sequences, 8 * num_sequences, 8 * num_indices])
        lengths, pointers, documents, modes = np.split(index, ends)
        self.lengths: npt.NDArray[np.int32] = lengths.view("<i4")
        self.pointers: npt.NDArray[np.int64] = pointers.view("<i8")
        self.document_indices: npt.NDArray[np.int64] = documents.view("<i8")
        self.has_modes = len(modes) > 0
        self._check_arrays()
        self.tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return a view of `length` ids of sequence `index` from position `offset` on; None views all remaining ids."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        end = start + int(self.lengths[index]) if length is None else start + offset + length
        return self.tokens[start + offset : end]

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """[D - 1] number of ids of each document."""
        return np.diff(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[self.document_indices])

    def digest(self) -> str:
        """Return a digest of the content. For a large file it covers the size and evenly spaced pieces."""
        found = hashlib.blake2b(digest_size=16)
        for path in (self.idx_path, self.bin_path):
            size, piece = path.stat().st_size, _DIGEST_BYTES // _DIGEST_PIECES
            found.update(str(size).encode())
            with open(path, "rb") as file:
                if size <= _DIGEST_BYTES:
                    found.update(file.read())
                    continue
                for number in range(_DIGEST_PIECES):
                    file.seek((size - piece) * number // (_DIGEST_PIECES - 1))
                    found.update(file.read(piece))
        return found.hexdigest()

    def _check_arrays(self) -> None:
        """Check everything that can be checked without reading .bin, in one pass over the index."""
        if self.lengths.min() < 0:
            raise ValueError(f"{self.idx_path} is damaged: a sequence has the length {self.lengths.min()}")
        documents = self.document_indices
        if len(documents) < 2 or documents[[0, -1]].tolist() != [0, len(self)] or (np.diff(documents) < 0).any():
            raise ValueError(
                f"{self.idx_path} is damaged: its document indices do not rise from 0 to its {len(self)} sequences"
            )
        size, item = self.bin_path.stat().st_size, self.dtype.itemsize
        if size == 0:
            raise ValueError(f"{self.bin_path} holds no tokens")
        ends = item * self.lengths.astype(np.int64)
        ends += self.pointers
        if self.pointers[0] != 0 or not np.array_equal(self.pointers[1:], ends[:-1]):
            raise ValueError(
                f"{self.idx_path} is damaged, or not of {self.dtype}: its sequences do not lie back to back in the .bin"
            )
        expected = int(ends[-1])
        if size != expected:
            raise ValueError(
                f"{self.bin_path} is {'truncated' if size < expected else 'too long'}, or not of {self.dtype}: it"
                f" has {size} bytes and its index describes {expected}"
            )


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Return the dtype, N and D of an .idx file, after checking that its size agrees with them."""
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    size = path.stat().st_size
    if header.startswith(_OLD_MAGIC):
        raise ValueError(
            f"{path} is in the old TNTIDX format (lazy or cached); tokenize again with --dataset-impl mmap"
        )
    if not header.startswith(_MAGIC):
        raise ValueError(f"{path} is not a Megatron index: it starts with {header[:9]!r} instead of {_MAGIC!r}")
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} is truncated: {size} bytes are less than its {_HEADER.size}-byte header")
    _, version, code, num_sequences, num_indices = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{path} has version {version}; only 1 is known")
    if code not in _DTYPES:
        raise ValueError(f"{path} has the dtype code {code}, which is no integer type")
    if num_sequences == 0:
        raise ValueError(f"{path} holds no sequences")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size not in (expected, expected + num_sequences):  # a multimodal index ends with one byte per sequence
        raise ValueError(
            f"{path} is damaged: {size} bytes where {num_sequences} sequences and {num_indices} document indices"
            f" take {expected}"
        )
    return np.dtype(_DTYPES[code]), num_sequences, num_indices


class IndexedDatasetBuilder:
    """Writer of a .bin/.idx pair. `finalize` gives the files their names, and replaces existing ones.

    As a context manager it removes the unfinished files if an exception ends the writing.

    Args:
        prefix: path without .bin and .idx, in an existing directory.
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
        self._lengths = array.array("i")  # 4 bytes per sequence; there may be billions of sequences
        self._document_indices = array.array("q", [0])
        self._file = _claim(self._unfinished_bin)

    def __len__(self) -> int:
        """Return the number of sequences written so far."""
        return len(self._lengths)

    def extend(self, tokens: np.ndarray, lengths: npt.ArrayLike, document_ends: npt.ArrayLike) -> None:
        """Append many sequences.

        Args:
            tokens: [sum of lengths] ids of the sequences, concatenated.
            lengths: [n] number of ids of each sequence.
            document_ends: [d] rising numbers of these sequences after which a document ends.
        Raises:
            ValueError: an id does not fit the dtype.
        """
        limits = np.iinfo(self._dtype)
        for start in range(0, len(tokens), _PIECE):
            ids = tokens[start : start + _PIECE]
            if ids.dtype != self._dtype and not (limits.min <= ids.min() and ids.max() <= limits.max):
                raise ValueError(f"{self._bin_path}: token ids {ids.min()} to {ids.max()} do not fit {self._dtype}")
            self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        before = len(self._lengths)
        self._lengths.frombytes(np.asarray(lengths, dtype=np.int32).tobytes())
        self._document_indices.frombytes((np.asarray(document_ends, dtype=np.int64) + before).tobytes())

    def add_document(self, *sequences: npt.ArrayLike) -> None:
        """Append a document of one sequence of ids, or of several (sentences). Raises the errors of `extend`."""
        for ids in map(np.asarray, sequences):
            self.extend(ids, [ids.size], [])
        self._document_indices.append(len(self._lengths))

    def finalize(self) -> None:
        """Write the index, sync both files to disk, and rename them."""
        # the index
        sizes = np.asarray(self._lengths, dtype="<i4")
        pointers = np.zeros(len(sizes), dtype="<i8")
        np.cumsum(sizes[:-1], dtype="<i8", out=pointers[1:])
        pointers *= self._dtype.itemsize
        documents = np.asarray(self._document_indices, dtype="<i8")
        header = _HEADER.pack(_MAGIC, 1, _CODES[self._dtype], len(sizes), len(documents))
        # both files
        sync(self._file)
        write_synced(self._unfinished_idx, header + sizes.tobytes() + pointers.tobytes() + documents.tobytes())
        self._idx_path.unlink(missing_ok=True)  # a reader must never open the new .bin with the old .idx
        os.replace(self._unfinished_bin, self._bin_path)
        os.replace(self._unfinished_idx, self._idx_path)
        sync_directory(self._idx_path.parent)
        self._file.close()  # closing earlier would let others claim the unfinished file

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file.closed:  # after `finalize`, files with the unfinished names belong to another writer
            return
        for path in (self._unfinished_bin, self._unfinished_idx):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the disk may still be full
            self._file.close()


def _claim(path: Path) -> BinaryIO:
    """Open an empty file that only this process writes; raise ValueError if another process is writing it."""
    file = open(path, "ab")  # noqa: SIM115 - "wb" would truncate a file that another process writes
    try:
        mine = try_lock(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        mine = True  # a file system without locks
    if not mine:
        file.close()
        raise ValueError(f"{path}: another process is writing it")
    file.truncate(0)
    return file
