"""A checkpoint's list of files with sizes and checksums, which finds the file that was cut short or changed.

    1a2b3c4d      12345  .metadata
    ...
    5e6f7a8b  the lines above

CRC-32, because zlib sums 4 GB/s on one core here, faster than bytes are written. The last line sums the list itself.
The tensors' files are torch.distributed.checkpoint's; what passes through its writer is summed on the way.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils import serialization

from megazpp.base.files import DamagedError, write_synced

NAME = "checksums.txt"
_CHUNK_BYTES = 1 << 22
_LINE = re.compile(r"([0-9a-f]{8}) +(\d+)  (.+)\n")
_WRITER = re.compile(r"__(\d+)_")  # the rank, in the library's names


class FileSum(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc: int


def write_checksums(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the list and have it on disk when this returns."""
    lines = "".join(f"{sums[name].crc:08x} {sums[name].size:12d}  {name}\n" for name in sorted(sums))
    write_durably(folder / NAME, f"{lines}{zlib.crc32(lines.encode()):08x}  the lines above\n")


def read_checksums(folder: Path) -> dict[str, FileSum]:
    """The list of a checkpoint; raises DamagedError if it is missing or damaged itself."""
    path = folder / NAME
    try:
        *lines, last = path.read_bytes().decode(errors="replace").splitlines(keepends=True) or [""]
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    matches = [_LINE.fullmatch(line) for line in lines]
    if last != f"{zlib.crc32(''.join(lines).encode()):08x}  the lines above\n" or not all(matches):
        raise DamagedError(f"{path} is damaged")
    return {m[3]: FileSum(int(m[2]), int(m[1], 16)) for m in matches if m}


def verify_files(checkpoint: Path, *, rank: int = 0, num_ranks: int = 1, names: Collection[str] | None = None) -> int:
    """Read this rank's share of a checkpoint's files; the shares of all ranks are all files.

    At the same number of ranks these are the files that the rank has written, and will read.

    Args:
        names: only these files.
    Returns:
        Bytes of all files.
    Raises:
        DamagedError: a line for each file of the share that is not as it was written, or the list itself is damaged.
    """
    sums = read_checksums(checkpoint)
    writers = {name: int(match[1]) if (match := _WRITER.match(name)) else 0 for name in sums}
    mine = [name for name in sums if writers[name] % num_ranks == rank and (names is None or name in names)]
    problems = []
    for name in mine:
        path, expected = checkpoint / name, sums[name]
        try:
            found = sum_file(path)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        if found.size != expected.size:
            problems.append(f"{path} is damaged: it has {found.size} bytes, {expected.size} were written")
        elif found.crc != expected.crc:
            problems.append(f"{path} is damaged: its checksum is {found.crc:08x}, not {expected.crc:08x}")
    if problems:
        raise DamagedError("\n".join(problems))
    return sum(part.size for part in sums.values())


def sum_file(path: Path) -> FileSum:
    """Read the whole file."""
    crc = size = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return FileSum(size, crc)


def write_durably(path: Path, content: str | bytes) -> FileSum:
    """Write a small file and have its content on disk when this returns."""
    content = content.encode() if isinstance(content, str) else content
    write_synced(path, content)
    return FileSum(len(content), zlib.crc32(content))


def checkpoint_digest(checkpoint: Path) -> str:
    """16 hexadecimal digits that name a checkpoint's files by their sizes and checksums."""
    return hashlib.sha256((checkpoint / NAME).read_bytes()).hexdigest()[:16]


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
        self._planner = DefaultSavePlanner() if read is None else _ReadingPlanner(read)

    def save(self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Write on all ranks of `group`; torch's own checksums, one per tensor and read by nobody, are left out."""
        without = serialization.config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with without, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process by itself
            try:
                dcp.save(dict(tensors), storage_writer=self, planner=self._planner, process_group=group)
            except CheckpointException as error:  # some ranks' failures, raised on all ranks
                found = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
                lines = [f"rank {rank}: {str(failure) or type(failure).__name__}" for rank, failure in found.items()]
                raise ValueError("\n".join(lines)) from error


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
