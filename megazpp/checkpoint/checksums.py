"""A checkpoint's list of files with sizes and checksums: finds the file that was cut short or changed.

    1a2b3c4d      12345  .metadata
    ...
    5e6f7a8b  the lines above

CRC-32, because zlib sums 4 GB/s on one core here, faster than bytes are written. The last line sums the list itself.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from megazpp.base.files import write_synced

NAME = "checksums.txt"
_CHUNK_BYTES = 1 << 22
_LINE = re.compile(r"([0-9a-f]{8}) +(\d+)  (.+)\n")
_WRITER = re.compile(r"__(\d+)_")  # the rank, in the library's names


class DamagedError(ValueError):
    """A file of a checkpoint is missing, cut short or changed; the message names it."""


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
