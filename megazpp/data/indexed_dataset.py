"""Megatron's .bin/.idx pair: token ids on disk, byte for byte what Megatron writes; read here and written here.

`<prefix>.bin` is the ids of all sequences back to back. `<prefix>.idx` says where they are, little endian:

    offset        bytes  content
    0             9      b"MMIDIDX\\0\\0"
    9             8      uint64 version = 1
    17            1      uint8 code of the ids' dtype
    18            8      uint64 N, the number of sequences
    26            8      uint64 D, the number of documents + 1
    34            4N     int32 lengths, in ids
    34 + 4N       8N     int64 pointers into .bin, in bytes
    34 + 12N      8D     int64 document indices: the sequence each document starts at, and N at the end

A document is one sequence unless it was split into sentences. Both files are memory-mapped: the ranks of a node
share the pages, and opening a pair reads the index once and none of the ids.

A reader sees a whole pair or none: both files are written under names of their own, brought to the disk, and then
renamed, the .idx last, for a .bin without its .idx is no dataset. Leftovers of a killed process are replaced by the
next that writes the same pair; two living processes cannot write the same one.
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
# 6 and 7 are float64 and float32, and GPT-NeoX swaps the two: no ids are stored so, and both are refused.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_PIECE = 1 << 24  # ids that are checked and copied at a time
_WHOLE_INDEX, _WHOLE_IDS, _DIGEST_PIECES = 1 << 26, 1 << 20, 64  # bytes that a digest reads, and in how many pieces


def optimal_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron stores ids of such a vocabulary in: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def pair_paths(prefix: Path) -> tuple[Path, Path]:
    """The .bin and the .idx file of a pair."""
    # not with_suffix: a prefix may contain dots
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def check_output(prefix: Path, *, overwrite: bool) -> None:
    """`check_writable` of both files of a pair."""
    for path in pair_paths(prefix):
        check_writable(path, "--output-prefix", overwrite=overwrite)


class IndexedDataset:
    """The sequences of a .bin/.idx pair, read through the page cache.

    Args:
        prefix: path without .bin and .idx.
    Attributes:
        lengths, pointers, document_indices: of the index.
        tokens: all ids of .bin.
        has_modes: true if the index ends with a byte for each sequence, as a multimodal one does.
    Raises:
        ValueError: a file is missing, of another format, damaged, or the two do not belong together.
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
        """The number of sequences."""
        return len(self.lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """A view of `length` ids (default: all the rest) of sequence `index`, from its id number `offset`."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        end = start + int(self.lengths[index]) if length is None else start + offset + length
        return self.tokens[start + offset : end]

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """[D - 1] ids of each document."""
        return np.diff(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[self.document_indices])

    def digest(self) -> str:
        """Return a name for the content, which is cheap: of large files the size and evenly spaced pieces count."""
        found = hashlib.blake2b(digest_size=16)
        for path, whole in ((self.idx_path, _WHOLE_INDEX), (self.bin_path, _WHOLE_IDS)):
            size, piece = path.stat().st_size, whole // _DIGEST_PIECES
            found.update(str(size).encode())
            with open(path, "rb") as file:
                if size <= whole:
                    found.update(file.read())
                    continue
                for number in range(_DIGEST_PIECES):
                    file.seek((size - piece) * number // (_DIGEST_PIECES - 1))
                    found.update(file.read(piece))
        return found.hexdigest()

    def _check_arrays(self) -> None:
        """Check all that can be checked without reading .bin, in one pass over the index."""
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
    """dtype, N and D of an .idx file, once its size is known to agree with them."""
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
    if size not in (expected, expected + num_sequences):  # multimodal indices end with a byte per sequence
        raise ValueError(
            f"{path} is damaged: {size} bytes where {num_sequences} sequences and {num_indices} document indices"
            f" take {expected}"
        )
    return np.dtype(_DTYPES[code]), num_sequences, num_indices


class IndexedDatasetBuilder:
    """Writes a .bin/.idx pair; both appear under their names, replacing others, when all is on the disk.

    As a context manager it removes the unfinished files when an exception ends the writing.

    Args:
        prefix: path without .bin and .idx; its directory exists.
        dtype: of the ids, see `optimal_dtype`.
    Raises:
        ValueError: the dtype is none for ids, or another process is writing this pair.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        if self._dtype not in _CODES:
            raise ValueError(f"token ids cannot be stored as {self._dtype}")
        self._bin_path, self._idx_path = pair_paths(Path(prefix))
        self._unfinished_bin, self._unfinished_idx = (
            path.with_name(path.name + ".unfinished") for path in (self._bin_path, self._idx_path)
        )
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
        """Append a document: mostly one sequence of ids, or several (its sentences). Raises as `extend` does."""
        for ids in map(np.asarray, sequences):
            self.extend(ids, [ids.size], [])
        self._document_indices.append(len(self._lengths))

    def finalize(self) -> None:
        """Write the index, bring both files to the disk and give them their names."""
        sync(self._file)
        write_synced(self._unfinished_idx, self._index_bytes())
        self._idx_path.unlink(missing_ok=True)  # the new .bin must never stand beside the old .idx
        os.replace(self._unfinished_bin, self._bin_path)
        os.replace(self._unfinished_idx, self._idx_path)
        sync_directory(self._idx_path.parent)
        self._file.close()  # not before: closing lets others claim the unfinished file

    def _index_bytes(self) -> bytes:
        sizes = np.asarray(self._lengths, dtype="<i4")
        pointers = np.zeros(len(sizes), dtype="<i8")
        np.cumsum(sizes[:-1], dtype="<i8", out=pointers[1:])
        pointers *= self._dtype.itemsize
        documents = np.asarray(self._document_indices, dtype="<i8")
        header = _HEADER.pack(_MAGIC, 1, _CODES[self._dtype], len(sizes), len(documents))
        return header + sizes.tobytes() + pointers.tobytes() + documents.tobytes()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *_: object) -> None:
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
