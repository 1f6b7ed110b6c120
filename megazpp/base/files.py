"""Atomic and durable writes of files and folders, file locks, and checks of paths.

A writer creates a file under a temporary name, flushes the file to disk, renames the file, and flushes the folder to
disk. Readers therefore never see an incomplete file, and a visible file survives a power failure. Locks are kernel
locks (flock). The kernel releases a lock when the process that holds it ends for any reason.
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
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

_PACKAGE = Path(__file__).resolve().parents[1]
# The folder that contains configs/: the package in a wheel, or its parent in a checkout
HOME = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent
# Seconds to wait for a lock, because the job that holds it may be about to end. After this time, `lock_for_this_job`
# gives up or, with larger `patience_seconds`, prints a line about the wait.
LOCK_SECONDS = 5.0
PROBE_BYTES = 1 << 20  # size of the file that `make_writable` writes and deletes
MOST_BYTES = 64 << 20  # largest flag file or other text file that `read_small_file` reads


class DamagedError(ValueError):
    """Error about a stored file that is missing, truncated or corrupt. The message names the file."""


def find_file(path: str | Path) -> Path:
    """Return the path of a file that a flag names.

    A relative path that the working directory lacks is searched in `HOME`, the folder with the shipped configs.
    """
    given = Path(path).expanduser()
    return HOME / given if not given.exists() and (HOME / given).exists() else given


def read_small_file(path: Path) -> bytes:
    """Return the content of a regular file of at most `MOST_BYTES`.

    Raises:
        OSError: the file cannot be read, is larger, or is not a regular file. (Reading a FIFO could block forever.)
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than the allowed {MOST_BYTES}", str(path))
    return path.read_bytes()


def cause(error: BaseException) -> str:
    """Return the text of an error, without errno and path if it is an OSError, for a message that has the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def encoding_problem(text: str) -> str | None:
    """Return the reason why a file in the locale's encoding cannot contain `text`; None if the file can contain it.

    The text is a path or a flag's value, which the files with the records of a run have to contain.
    """
    encoding = locale.getpreferredencoding(False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        other = "" if encoding.lower() == "utf-8" else ", or set PYTHONUTF8=1"
        return f"{text!a} has characters that the locale's encoding, {encoding}, lacks: use others{other}"
    return None


def cache_folder() -> Path:
    """Return the folder for caches, `$XDG_CACHE_HOME/megazpp` or `~/.cache/megazpp`, without creating it.

    Raises:
        ValueError: there is no home directory, and XDG_CACHE_HOME is not set; or the path has characters that the
            locale's encoding lacks.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazpp"
    except RuntimeError:
        raise ValueError("this user has no home directory for caches: set XDG_CACHE_HOME") from None
    if problem := encoding_problem(str(folder)):
        raise ValueError(f"the folder for caches {problem}, or set XDG_CACHE_HOME")
    return folder


def cache_name(path: Path, flag: str) -> str:
    """Return the setting that has chosen the cache folder `path`, for an error message about the folder.

    Args:
        path: the cache folder.
        flag: flag that can choose a cache folder.

    Returns:
        XDG_CACHE_HOME or HOME with its value if `path` is inside the default folder; otherwise `flag`.
    """
    variable = "XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "HOME"
    with contextlib.suppress(ValueError):
        if path.is_relative_to(cache_folder()):
            return f"{variable}={os.environ.get(variable, '')} (without {flag})"
    return flag


def check_writable(path: Path, flag: str, *, overwrite: bool) -> None:
    """Check that an output file can be created, before a program computes its content.

    Args:
        path: the output file.
        flag: flag whose value is `path`, for the error message.
        overwrite: True if an existing file may be replaced. An existing folder is always an error.

    Raises:
        ValueError: the parent directory is missing or not writable, or `path` exists and may not be replaced.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "cannot be written to" if path.parent.is_dir() else "is not a directory"
        raise ValueError(f"{flag}: {path} cannot be created, because {path.parent} {reason}: choose another path")
    if path.is_dir() or (path.exists() and not overwrite):
        hint = "and is a folder: choose another path" if path.is_dir() else "(--overwrite replaces it)"
        raise ValueError(f"{flag}: {path} exists {hint}")


def check_prefix(prefix: str, flag: str) -> None:
    """Raise ValueError if `prefix`, the value of `flag`, does not end with the beginning of a file name.

    Examples are `data/`, `..` and `~`. A program appends suffixes such as `.bin` to a prefix, so with `data/` the file
    would be named `.bin`. The function looks only at the text: `data` is accepted even if it is an existing folder.
    """
    if prefix.endswith(("/", "/.", "/..")) or Path(prefix).name in ("", "..", "~"):
        folder = prefix.rstrip("/") or "/"
        raise ValueError(
            f"{flag} {prefix} is a folder: add the beginning of the files' names, for example {Path(folder) / 'my'}"
        )


def make_writable(path: str | Path, flag: str) -> Path:
    """Create the folder at `path`, and test it by writing and deleting a file of PROBE_BYTES.

    The file must not be empty, because a full disk may still accept new empty files.

    Args:
        path: path of the folder; `~` is expanded.
        flag: flag that gave the path, for the error message.
    Returns:
        The path of the folder, with `~` expanded.
    Raises:
        ValueError: the folder is not writable. The message names the flag, the path and the reason.
    """
    path = Path(path).expanduser()
    probe = path / f".{uuid.uuid4().hex}"
    with errors_as(f"{flag} {path} is not a folder that can be written to", OSError, remedy="choose another folder"):
        path.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(probe, bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    return path


def first_free(name: Callable[[int], Path]) -> Path:
    """Return the first path that does not exist among the paths that `name` returns for the numbers 1, 2, and so on."""
    return next(path for number in itertools.count(1) if not (path := name(number)).exists())


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents; do nothing if `path` does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically and durably: readers see either the complete new content or the previous file.

    The temporary name is random, so that several processes may write the same file; the last one wins.
    """
    with renamed_when_done(path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.unfinished"), path) as unfinished:
        write_synced(unfinished, content)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk. Unlike with `write_whole`, readers can see an incomplete file meanwhile."""
    with errors_naming(path), path.open("wb") as file:
        file.write(content)
        sync(file)


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """If the block raises an OSError without a file's name, such as a write to a full disk, add `path` to the error."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def errors_as(
    message: str,
    kinds: type[Exception] | tuple[type[Exception], ...] = ValueError,
    *,
    remedy: str = "",
    into: type[ValueError] = ValueError,
) -> Iterator[None]:
    """Convert an error of the block to a ValueError with the text "`message`: text of the error; `remedy`".

    Args:
        message: description of the failed action, with the flag or the file.
        kinds: type or types of the errors to convert.
        remedy: action for the user; "" for a message that needs no remedy.
        into: type of the new error, ValueError or a subclass.
    """
    try:
        yield
    except kinds as error:
        raise into(f"{message}: {cause(error)}{remedy and f'; {remedy}'}") from error


@contextlib.contextmanager
def renamed_when_done(unfinished: Path, path: Path, *, synced: bool = True) -> Iterator[Path]:
    """Rename the file or folder `unfinished` to `path` when the block has written it.

    An existing file or empty folder at `path` is replaced. If the block raises an exception, `unfinished` is deleted.

    Args:
        unfinished: temporary path that the block writes, in the same folder as `path`.
        path: final path.
        synced: True to flush directory entries to disk; the block itself must `sync` the contents of its files. False
            is enough for output that the next start of the program writes again.
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
    """Flush the content of an open file to disk, so that it survives a power failure."""
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
    """Hold an exclusive lock on the file `path` during the block. Wait first while another process holds the lock.

    The lock file is created if it does not exist. It is never deleted, because one process could then hold the lock of
    the deleted file while another process locks a new file of that name.
    """
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # leaving the `with` block closes the file, which releases the lock


def append_line(path: Path, line: str) -> None:
    """Append `line` and a newline to the text file `path`.

    If the file does not end with a newline, because a crash or a full disk has truncated its last line, a newline is
    written first.
    """
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")


def lock_for_this_job(
    path: Path, name: str, *, patience_seconds: float = LOCK_SECONDS, say: Callable[[str], None] | None = None
) -> IO[str]:
    """Lock a folder for this job, by a lock file, and return the open lock file. Closing the file releases the lock.

    The lock file contains this process's id, its host and the time, so that another job's error message can name them.

    Args:
        path: lock file; it is created if it does not exist, and never deleted (see `locked`).
        name: flag and path of the folder that the lock protects, for the error message.
        patience_seconds: seconds to wait for another job that holds the lock and may be about to end.
        say: function that prints a line about the wait, once, after LOCK_SECONDS. The default `patience_seconds` ends
            the wait before this. None to print nothing.

    Raises:
        OSError: the file cannot be opened, or the file system does not support locks.
        ValueError: another job still holds the lock after `patience_seconds`.
    """
    with errors_naming(path), contextlib.ExitStack() as on_error:
        file, began = on_error.enter_context(path.open("a+")), time.monotonic()
        while not try_lock(file):
            waited = time.monotonic() - began
            if waited > patience_seconds or (say is not None and waited > LOCK_SECONDS):
                file.seek(0)
                used = f"{name} is in use by {file.read().strip() or 'another job'}"
                if waited > patience_seconds:
                    raise ValueError(f"{used}: give each job its own folder")
                if say is not None:
                    say(f"{used}: waiting for at most {patience_seconds:g} s")
                    say = None
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        on_error.pop_all()
    return file


def try_lock(file: IO[Any] | int) -> bool:
    """Try to lock an open file or folder until it is closed. Return False if another process holds the lock.

    Args:
        file: open file, or file descriptor of a folder.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
