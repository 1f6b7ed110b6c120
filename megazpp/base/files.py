"""Atomic and durable writes of files and folders, and file locks.

A writer writes under a temporary name, flushes the data to disk, renames it, and flushes the folder that has the new
name. Readers therefore never see an incomplete file, and a visible file survives a power failure. Locks are kernel
locks (flock), which are released when their process ends for any reason.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import locale
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

_PACKAGE = Path(__file__).resolve().parents[1]
HOME = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent  # the folder of configs/, in a wheel or not
LOCK_SECONDS = 5.0  # wait for a lock whose holder may be about to end; a line is printed before a longer wait
MOST_BYTES = 64 << 20  # largest size of a file that is read as a whole for its text


class DamagedError(ValueError):
    """A stored file is missing, truncated or corrupt. The message names the file."""


def find_file(path: str | Path) -> Path:
    """Return a file that a flag names; one that the working directory lacks may be in `HOME`, like a flag file."""
    given = Path(path).expanduser()
    return HOME / given if not given.exists() and (HOME / given).exists() else given


def read_small_file(path: Path) -> bytes:
    """Return the content of a regular file of at most `MOST_BYTES`.

    Raises:
        OSError: the file cannot be read, is larger, or is no regular file. A FIFO would block for ever.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if status.st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {MOST_BYTES}", str(path))
    return path.read_bytes()


def cause(error: BaseException) -> str:
    """Return the text of an error, without the number and the path of an OSError, for a message with the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def encoding_problem(text: str) -> str | None:
    """Return why files in the locale's encoding cannot contain `text`, such as a path; None if they can."""
    encoding = locale.getpreferredencoding(False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        other = "" if encoding.lower() == "utf-8" else ", or set PYTHONUTF8=1"
        return f"{text!a} has characters that the locale's encoding, {encoding}, lacks: use others{other}"
    return None


def cache_folder() -> Path:
    """Return the folder for caches: `$XDG_CACHE_HOME/megazpp` or `~/.cache/megazpp`. It may not exist.

    Raises:
        ValueError: there is no home directory, and XDG_CACHE_HOME is not set; or files cannot contain the path.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazpp"
    except RuntimeError:
        raise ValueError("this user has no home directory for caches: set XDG_CACHE_HOME") from None
    if problem := encoding_problem(str(folder)):
        raise ValueError(f"the folder for caches {problem}, or set XDG_CACHE_HOME")
    return folder


def cache_name(path: Path, flag: str) -> str:
    """Return what has chosen the cache folder `path`, for a message: a variable of the environment, or else `flag`."""
    variable = "XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "HOME"
    with contextlib.suppress(ValueError):
        if path.is_relative_to(cache_folder()):
            return f"{variable}={os.environ.get(variable, '')} (without {flag})"
    return flag


def check_writable(path: Path, flag: str, *, overwrite: bool) -> None:
    """Check that an output file can be created, before the work for it begins.

    Args:
        path: the output file.
        flag: flag whose value is `path`, for the error message.
        overwrite: whether an existing file may be replaced. An existing folder is always an error.

    Raises:
        ValueError: the parent directory is missing or not writable, or `path` exists.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "cannot be written to" if path.parent.is_dir() else "is no directory"
        raise ValueError(f"{flag}: {path} cannot be made: {path.parent} {reason}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{flag}: {path} exists" + ("" if path.is_dir() else " (--overwrite replaces it)"))


def first_free(name: Callable[[int], Path]) -> Path:
    """Return the first of the paths `name(1)`, `name(2)`, ... that does not exist."""
    return next(path for number in itertools.count(1) if not (path := name(number)).exists())


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents; do nothing if `path` does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the complete new content or the previous file."""
    with renamed_when_done(path.with_name(path.name + ".unfinished"), path) as unfinished:
        write_synced(unfinished, content)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk, without the protection against readers that `write_whole` has."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


@contextlib.contextmanager
def renamed_when_done(unfinished: Path, path: Path, *, synced: bool = True) -> Iterator[Path]:
    """Rename `unfinished` to `path` when the block ends, or delete it if the block raises an exception.

    The block writes the file or folder `unfinished`. An existing file or empty folder at `path` is replaced.

    Args:
        unfinished: temporary name, in the same folder as `path`.
        path: final name.
        synced: whether to flush directory entries to disk. The block itself must `sync` the content of its files. A
            cache needs neither, because it can be rebuilt.
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
    """Flush an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, so that new and renamed files survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` during the block, after waiting for other holders.

    The file is never deleted. Otherwise one process could lock a deleted file and another a new file of that name.
    """
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def lock_for_this_job(
    path: Path, name: str, *, patience_seconds: float = LOCK_SECONDS, say: Callable[[str], None] | None = None
) -> IO[str]:
    """Lock the file `path` until it is closed, and write this process into it, so that another job can name it.

    Args:
        path: lock file; it is created if needed, and never deleted.
        name: flag and path of the folder that the lock protects, for the message.
        patience_seconds: seconds to wait for another job that holds the lock and may be about to end.
        say: function that prints one line if the wait is longer than LOCK_SECONDS; None: no line.
    Raises:
        OSError: the file cannot be opened, or the file system does not support locks.
        ValueError: another job holds the lock.
    """
    file, began = path.open("a+"), time.monotonic()
    while not try_lock(file):
        waited = time.monotonic() - began
        if waited > patience_seconds or (say is not None and waited > LOCK_SECONDS):
            file.seek(0)
            used = f"{name} is in use by {file.read().strip() or 'another job'}"
            if waited > patience_seconds:
                file.close()
                raise ValueError(f"{used}: give each job its own folder")
            if say is not None:
                say(f"{used}: waiting for at most {patience_seconds:g} s")
                say = None
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def try_lock(file: IO[Any] | int) -> bool:
    """Try to lock an open file or folder until it is closed; return False if another process holds the lock.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
