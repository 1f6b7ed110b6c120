"""Files and folders that appear whole or not at all, are on the disk before they are seen, and have one writer.

Whoever writes does so under another name, brings the bytes to the disk, renames, and brings the folder with the new
name to the disk. A lock is the kernel's (flock): it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO


class DamagedError(ValueError):
    """A stored file is missing, cut short or changed; the message names it."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/megazpp`, or `~/.cache/megazpp`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazpp"


def check_writable(path: Path, flag: str, *, overwrite: bool) -> None:
    """Refuse an output file before the work for it begins; `flag` is the one whose value it is, for messages.

    Raises:
        ValueError: its directory does not exist or cannot be written to, or the file is there.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "cannot be written to" if path.parent.is_dir() else "is no directory"
        raise ValueError(f"{flag}: {path} cannot be made: {path.parent} {reason}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{flag}: {path} exists" + ("" if path.is_dir() else " (--overwrite replaces it)"))


def first_free(name: Callable[[int], Path]) -> Path:
    """The first of `name(1)`, `name(2)`, ... where there is nothing yet."""
    return next(path for number in itertools.count(1) if not (path := name(number)).exists())


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees all of it or what was there before."""
    with renamed_when_done(path.with_name(path.name + ".unfinished"), path) as unfinished:
        write_synced(unfinished, content)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and bring it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


@contextlib.contextmanager
def renamed_when_done(unfinished: Path, path: Path, *, synced: bool = True) -> Iterator[Path]:
    """Write a file or folder as `unfinished`, which becomes `path` if nothing is raised meanwhile, and else is deleted.

    A `path` that is a file or an empty folder is replaced. With `synced` the names are brought to the disk; the content
    of files is their writer's to `sync`. A cache needs neither.
    """
    try:
        yield unfinished
        if synced and unfinished.is_dir():
            sync_directory(unfinished)
        unfinished.rename(path)
        if synced:
            sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(unfinished)
        raise


def sync(file: BinaryIO) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Bring the names of a directory's files to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock file `path` and hold it; it is never deleted, for then two could hold two files of one name."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def try_lock(file: IO[Any] | int) -> bool:
    """Take the lock of an open file or folder, until it is closed; False where another process has it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
