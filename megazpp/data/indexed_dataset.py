"""Megatron's .bin/.idx format for token ids, and a reader for it. data/indexed_builder.py has the writer.

`<prefix>.bin` contains the token ids of all sequences, concatenated. `<prefix>.idx` is their index, little endian:

    offset        bytes  content
    0             9      b"MMIDIDX\\0\\0"
    9             8      uint64 version = 1
    17            1      uint8 code of the ids' dtype
    18            8      uint64 N, the number of sequences
    26            8      uint64 D, the number of documents + 1
    34            4N     int32 lengths, in ids
    34 + 4N       8N     int64 pointers into .bin, in bytes
    34 + 12N      8D     int64 document indices: the sequence each document starts at, and N at the end

A document is one sequence unless it was split into sentences. The reader memory-maps both files, so the ranks of a node
share the pages in memory. Opening a pair reads the complete .idx, but nothing of the .bin.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# dtype of the token ids by its code in the .idx. Codes 6 and 7 (float64 and float32, in either order depending on the
# library) are not supported, because token ids are integers.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# A digest reads at most _DIGEST_BYTES bytes of a file. Of a larger file, it reads _DIGEST_PIECES evenly spaced pieces.
_DIGEST_BYTES, _DIGEST_PIECES = 1 << 26, 64


def pair_paths(prefix: Path) -> tuple[Path, Path]:
    """Return the paths of the .bin and the .idx file of the pair with this prefix.

    Raises:
        ValueError: the prefix is a folder such as `.` or `/`, so that the names of the files would be empty.
    """
    if not prefix.name:
        raise ValueError(f"{prefix} is a folder: give the path of a .bin/.idx pair without .bin")
    # `with_suffix` would replace the end of a prefix that contains a dot, such as `data.v2`.
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def find_pair(prefix: Path) -> tuple[Path, Path]:
    """Return the paths of the .bin and the .idx file as `pair_paths` does; raise ValueError if one is no file."""
    paths = pair_paths(prefix)
    for path in reversed(paths):
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "does not exist"
            raise ValueError(f"{path} {what}: name another .bin/.idx pair")
    return paths


class IndexedDataset:
    """The N sequences of token ids of a .bin/.idx pair, memory-mapped.

    Args:
        prefix: path of the pair without .bin and .idx.
    Attributes:
        prefix, bin_path, idx_path: the argument as a path, and the paths of the two files.
        dtype: dtype of the stored ids.
        lengths: [N] int32 number of ids of each sequence.
        pointers: [N] int64 position of each sequence in the .bin, in bytes.
        document_indices: [D] int64 number of the first sequence of each of the D - 1 documents, and N at the end.
        tokens: all token ids of the .bin.
        has_modes: True if the .idx ends with one byte per sequence, as Megatron's multimodal datasets do.
    Raises:
        ValueError: a file is missing or damaged, is not of this format, or the two files do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = find_pair(self.prefix)
        self.dtype, num_sequences, num_indices = _read_header(self.idx_path)
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r", offset=HEADER.size)
        ends = np.cumsum([4 * num_sequences, 8 * num_sequences, 8 * num_indices])
        lengths, pointers, documents, modes = np.split(index, ends)
        self.lengths: npt.NDArray[np.int32] = lengths.view("<i4")
        self.pointers: npt.NDArray[np.int64] = pointers.view("<i8")
        self.document_indices: npt.NDArray[np.int64] = documents.view("<i8")
        self.has_modes = len(modes) > 0
        self._check_arrays()
        self.tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        """Return the number of sequences of the .bin/.idx pair."""
        return len(self.lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` ids of sequence `index` from position `offset` on, as a view of the mapped file.

        With `length` None, the view ends with the sequence.
        """
        start = int(self.pointers[index]) // self.dtype.itemsize
        end = start + int(self.lengths[index]) if length is None else start + offset + length
        return self.tokens[start + offset : end]

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """The number of token ids of each document: [number of documents] int64."""
        return np.diff(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[self.document_indices])

    def digest(self) -> str:
        """Return a digest of both files of the pair, to detect changed data.

        Of a file above 64 MiB, the digest covers the size and 64 evenly spaced pieces of 1 MiB.
        """
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
        """Check the arrays of the .idx against each other and against the size of the .bin, without reading the .bin.

        Raises:
            ValueError: a length is negative; the document indices decrease, or do not begin with 0 and end with the
                number of sequences; or the sequences do not cover the .bin without gaps.
        """
        if self.lengths.min() < 0:
            raise _unusable(self.idx_path, f"is damaged: a sequence has the length {self.lengths.min()}")
        documents = self.document_indices
        if len(documents) < 2 or documents[[0, -1]].tolist() != [0, len(self)] or (np.diff(documents) < 0).any():
            problem = f"is damaged: its document indices do not rise from 0 to its {len(self)} sequences"
            raise _unusable(self.idx_path, problem)
        size, item = self.bin_path.stat().st_size, self.dtype.itemsize
        if size == 0:
            raise _unusable(self.bin_path, "holds no tokens")
        ends = item * self.lengths.astype(np.int64)
        ends += self.pointers
        if self.pointers[0] != 0 or not np.array_equal(self.pointers[1:], ends[:-1]):
            problem = f"is damaged, or not of {self.dtype}: its sequences do not lie back to back in the .bin"
            raise _unusable(self.idx_path, problem)
        expected = int(ends[-1])
        if size != expected:
            problem = f"is {'truncated' if size < expected else 'too long'}, or not of {self.dtype}"
            raise _unusable(self.bin_path, f"{problem}: it has {size} bytes and its index describes {expected}")


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Read the header of an .idx file, and check that the size of the file agrees with it.

    Returns:
        The dtype of the token ids, the number of sequences, and the number of document indices.
    Raises:
        ValueError: the file is not a Megatron index of token ids, has another version, or is truncated.
    """
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    size = path.stat().st_size
    if header.startswith(_OLD_MAGIC):
        raise _unusable(path, "is in the old TNTIDX format (lazy or cached)")
    if not header.startswith(MAGIC):
        raise _unusable(path, f"is not a Megatron index: it starts with {header[:9]!r} instead of {MAGIC!r}")
    if len(header) < HEADER.size:
        raise _unusable(path, f"is truncated: {size} bytes are less than its {HEADER.size}-byte header")
    _, version, code, num_sequences, num_indices = HEADER.unpack(header)
    if version != 1:
        raise _unusable(path, f"has version {version} of the format, but only version 1 is supported")
    if code not in DTYPES:
        raise _unusable(path, f"has the dtype code {code}; codes of integer types are {', '.join(map(str, DTYPES))}")
    if num_sequences == 0:
        raise _unusable(path, "holds no sequences, so the dataset is empty")
    expected = HEADER.size + 12 * num_sequences + 8 * num_indices
    if size not in (expected, expected + num_sequences):  # the .idx of multimodal data has a byte more per sequence
        described = f"{num_sequences} sequences and {num_indices} document indices"
        raise _unusable(path, f"is damaged: {size} bytes where {described} take {expected}")
    return np.dtype(DTYPES[code]), num_sequences, num_indices


def _unusable(path: Path, problem: str) -> ValueError:
    """Return the error for a file of a .bin/.idx pair that cannot be used: path, `problem`, and what to do."""
    return ValueError(f"{path} {problem}; tokenize the data again with preprocess_data.py")
