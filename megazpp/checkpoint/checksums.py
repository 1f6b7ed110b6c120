"""Checksums of a checkpoint's files, to detect files that are truncated or changed.

The list `checksums.txt` has one line per file with its CRC-32, its size in bytes and its name. The last line has the
CRC-32 of the preceding lines:

    1a2b3c4d      12345  .metadata
    ...
    5e6f7a8b  the lines above

The checksum is CRC-32 because zlib computes it fast: 4 GB/s on one core of the development machine.
torch.distributed.checkpoint writes the tensor files through `SummingWriter`. This writer computes the checksums during
the write, so no file is read again.
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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.utils import serialization

from megazpp.base.files import DamagedError, errors_as, read_small_file, write_synced
from megazpp.base.program import in_words
from megazpp.parallel.timeline import FILES, Timeline

NAME, INDEX = "checksums.txt", ".metadata"  # INDEX is torch.distributed.checkpoint's file with shapes and locations
# The end of messages about a missing file of a checkpoint, which may be on another host.
SEPARATE = (
    " (if the hosts that saved it had no shared folder: resume on the same hosts with the same ranks, or copy the "
    "checkpoint's files of all hosts into one folder)"
)
_CHUNK_BYTES = 1 << 22  # number of bytes that `sum_file` reads at a time
_LINE = re.compile(r"([0-9a-f]{8}) +(\d+)  (.+)\n")  # a line of the list: CRC-32, size in bytes, and name of a file
_WRITER = re.compile(r"__(\d+)_")  # start of the name of a tensor file, with the rank that has written the file


class FileSum(NamedTuple):
    """The size in bytes and the CRC-32 of a file."""

    size: int
    crc: int


def write_checksums(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the list `checksums.txt` of a checkpoint or tokenizer folder, and sync it to disk.

    Args:
        folder: folder to write the list into.
        sums: size and checksum of each file of the folder, by file name.
    """
    lines = "".join(f"{sums[name].crc:08x} {sums[name].size:12d}  {name}\n" for name in sorted(sums))
    write_durably(folder / NAME, f"{lines}{zlib.crc32(lines.encode()):08x}  the lines above\n")


def read_checksums(folder: Path) -> dict[str, FileSum]:
    """Read the list `checksums.txt` of a checkpoint, and return the size and checksum of each file by file name.

    Raises:
        DamagedError: the list is missing, malformed, or does not match the checksum in its last line.
    """
    path = folder / NAME
    remedy = "copy it again, or use another checkpoint"
    with errors_as(f"{path} cannot be read", OSError, remedy=remedy, into=DamagedError):
        *lines, last = read_small_file(path).decode(errors="replace").splitlines(keepends=True) or [""]
    matches = [_LINE.fullmatch(line) for line in lines]
    if last != f"{zlib.crc32(''.join(lines).encode()):08x}  the lines above\n" or not all(matches):
        raise DamagedError(
            f"{path} is damaged: its last line is not the checksum of the lines before it; copy the folder of this "
            "file again, or use another checkpoint"
        )
    if outside := [m[3] for m in matches if m and (m[3].startswith("/") or ".." in Path(m[3]).parts)]:
        raise DamagedError(
            f"{path} names a file outside of the checkpoint: {outside[0][:80]}; use a checkpoint from a source that "
            "you trust"
        )
    return {m[3]: FileSum(int(m[2]), int(m[1], 16)) for m in matches if m}


def verify_files(checkpoint: Path, *, rank: int = 0, num_ranks: int = 1, names: Collection[str] | None = None) -> int:
    """Compare this rank's part of a checkpoint's files with the sizes and checksums in the list `checksums.txt`.

    The ranks together verify every file. If `num_ranks` ranks have written the checkpoint, each rank verifies the files
    that the rank of the same number has written.

    Args:
        checkpoint: folder with the files and the list `checksums.txt`.
        rank: rank of this process.
        num_ranks: number of ranks among which the files are divided.
        names: names of the files to verify; None verifies all files in the list.
    Returns:
        Total size in bytes of all files in the list, including the files that other ranks verify.
    Raises:
        DamagedError: a file that this rank verifies is missing or differs, or the list is damaged. The message has one
            line per file.
    """
    # ---- assign each file to one rank: the rank in the file's name, or rank 0 if the name has none
    sums = read_checksums(checkpoint)
    writers = {name: int(match[1]) if (match := _WRITER.match(name)) else 0 for name in sums}
    mine = [name for name in sums if writers[name] % num_ranks == rank and (names is None or name in names)]
    # ---- read each file that is assigned to this rank, and compare its size and checksum with the list
    problems = []
    for name in mine:
        path, expected = checkpoint / name, sums[name]
        if path.exists() and not path.is_file():  # reading a FIFO or a device might never end
            problems.append(f"{path} is not a file")
            continue
        try:
            found = sum_file(path)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}{SEPARATE * (not path.exists())}")
            continue
        if found.size != expected.size:
            problems.append(f"{path} is damaged: it has {found.size} bytes, but {expected.size} were written")
        elif found.crc != expected.crc:
            problems.append(f"{path} is damaged: its checksum is {found.crc:08x}, not {expected.crc:08x}")
    if problems:
        raise DamagedError("\n".join(problems))
    return sum(part.size for part in sums.values())


def sum_file(path: Path) -> FileSum:
    """Read a file in chunks and return its size and CRC-32."""
    crc = size = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return FileSum(size, crc)


def write_durably(path: Path, content: str | bytes) -> FileSum:
    """Write a small file, sync it to disk, and return its size and CRC-32. A string is encoded as UTF-8."""
    content = content.encode() if isinstance(content, str) else content
    write_synced(path, content)
    return FileSum(len(content), zlib.crc32(content))


def checkpoint_digest(checkpoint: Path) -> str:
    """Return a hash of a checkpoint's list `checksums.txt`, as 16 hexadecimal digits.

    The list has the checksum of every file, so the hash differs if any file differs.
    """
    return hashlib.sha256((checkpoint / NAME).read_bytes()).hexdigest()[:16]


class SummingWriter(FileSystemWriter):
    """A writer for torch.distributed.checkpoint that computes the checksum of each file while writing it.

    Each rank writes its tensors, and rank 0 also writes the index `.metadata`. Every file is synced to disk.

    Args:
        path: folder of the checkpoint to write.
        timeline: timeline that records each write to a file, so that the watchdog sees progress.
        read: function that returns a tensor by key; None if `save` gets the tensors themselves. With this function,
            `save` takes tensors on the meta device and creates each tensor only when it is written. Each tensor then
            gets a separate file, because torch.distributed.checkpoint holds all tensors of a file in memory.
    Attributes:
        sums: size and checksum of each file that this rank has written, by file name.
    """

    def __init__(self, path: Path, timeline: Timeline, read: Callable[[str], torch.Tensor] | None = None) -> None:
        super().__init__(path, sync_files=True, single_file_per_rank=read is None)
        self.fs = _SummingFiles(timeline)
        self.sums = self.fs.sums
        self._planner = DefaultSavePlanner() if read is None else _ReadingPlanner(read)

    def save(self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Write the tensors of a checkpoint. All ranks of `group` call this, each with its own tensors.

        The CRC-32 that torch.save stores for each tensor is disabled, because no reader uses it.

        Args:
            tensors: this rank's tensors by key.
            group: process group of the ranks that write the checkpoint; None for a single process.
        Raises:
            ValueError: a rank has failed. Every rank raises this error, with one line per failed rank.
        """
        without = serialization.config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with without, warnings.catch_warnings():
            # torch warns if a single process writes a checkpoint without a process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.save(dict(tensors), storage_writer=self, planner=self._planner, process_group=group)
            except CheckpointException as error:  # torch raises this error on all ranks if any rank fails
                found = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
                texts = {rank: in_words(failure) or type(failure).__name__ for rank, failure in found.items()}
                lines = [f"rank {rank}: {text}" for rank, text in texts.items()]
                raise ValueError("\n".join(lines)) from error

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write the index `.metadata` of a checkpoint so that every supported version of torch can read it.

        Since torch 2.15, the properties of a tensor are pickled with the strides as a sixth field, which older versions
        cannot read. This method drops the field. No reader needs it, because a checkpoint's tensors are contiguous.
        """
        state_of = TensorProperties.__getstate__
        TensorProperties.__getstate__ = lambda properties: state_of(properties)[:5]  # type: ignore[method-assign]
        try:
            super().finish(metadata, results)
        finally:
            TensorProperties.__getstate__ = state_of  # type: ignore[method-assign]


class _ReadingPlanner(DefaultSavePlanner):
    """A planner for torch.distributed.checkpoint that creates each tensor by `read(key)` just before it is written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._read(index.fqn)


class _SummingFiles(FileSystem):
    """A file system for `FileSystemWriter` that records the size and checksum of each written file in `sums`."""

    def __init__(self, timeline: Timeline) -> None:
        self.sums: dict[str, FileSum] = {}
        self._timeline = timeline

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", f"a writer opens {path} in mode {mode}"
        with _SummingFile(path, self._timeline) as stream:
            try:
                yield stream
            except Exception as error:
                raise (stream.failure or error) from None
        self.sums[Path(path).name] = FileSum(stream.size, stream.crc)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummingFile(io.BufferedWriter):
    """A file for torch.save that computes its size and CRC-32 during writing, and stores the OSError of a failed write.

    torch.save replaces this OSError by an error that names only a line in torch's source. `_SummingFiles` raises the
    stored OSError instead, so that the user sees the cause, such as a full disk.

    Attributes:
        size: number of bytes written.
        crc: CRC-32 of these bytes.
        failure: error of the failed write; None if no write has failed.
    """

    def __init__(self, path: str | os.PathLike[str], timeline: Timeline) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._timeline = timeline
        self.size = self.crc = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        try:
            with self._timeline.span(FILES, "write"):
                count = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.size += count
        return count

    def fileno(self) -> int:
        self.flush()  # torch 2.13 syncs `.metadata` by os.fsync(fileno()), which misses buffered bytes
        return super().fileno()
