"""Output files: refused where they would replace something, and on the disk before they are seen."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def check_writable(path: Path, *, overwrite: bool) -> None:
    """Refuse an output file before the work for it begins.

    Raises:
        ValueError: its directory does not exist or cannot be written to, or the file is there.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "cannot be written to" if path.parent.is_dir() else "is no directory"
        raise ValueError(f"--output-prefix: {path} cannot be made: {path.parent} {reason}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"--output-prefix: {path} exists" + ("" if path.is_dir() else " (--overwrite replaces it)"))


def first_free(name: Callable[[int], Path]) -> Path:
    """The first of `name(1)`, `name(2)`, ... where there is nothing yet."""
    return next(path for number in itertools.count(1) if not (path := name(number)).exists())


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees all of it or what was there before."""
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        file.write(content)
        sync(file)
    os.replace(unfinished, path)
    sync_directory(path.parent)


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
