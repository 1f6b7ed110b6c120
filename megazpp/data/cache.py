"""A cache on disk for sample indices, tokenized text and trained tokenizers. Each node builds an entry once.

The ranks of a node share a cache directory and need no barrier. A file lock lets one rank build an entry, and the other
ranks see either no entry or a complete entry. Every node builds its own copy of an entry. The copies are equal, because
the key of an entry determines its content.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from megazpp.base.files import cache_name, errors_as, locked, remove, renamed_when_done, sync

FLAG = "--data-cache-path"


def check_cache_dir(path: Path, flag: str = FLAG) -> None:
    """Raise ValueError if a cache directory does not exist and cannot be created.

    An existing directory may be read-only, because it may already contain all entries that the run needs.

    Args:
        path: cache directory.
        flag: flag that names the directory, for the message.
    """
    flag = cache_name(path, flag)
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{flag}: cannot write {path}, because {existing} is a file: name another directory")
    if existing != path and not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"{flag}: cannot write {path}, because {existing} cannot be written to: name another directory"
        )


def cache_key(**parts: Any) -> str:
    """Return a hash of the keyword arguments, to name a cache entry or to detect that one of the values has changed.

    The hash has 32 hexadecimal digits. Values that JSON does not support are hashed as strings. The order of the
    keywords does not matter.
    """
    description = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(description.encode()).hexdigest()[:32]


def build_once(path: Path, build: Callable[[Path], None], *, flag: str = FLAG) -> Path:
    """Build a cache entry unless it exists, and return its path. Of all processes of a node, exactly one builds it.

    Args:
        path: file or directory of the cache entry.
        build: function that writes the entry to its argument, a temporary path, which is then renamed to `path`. The
            function must sync the files to disk: otherwise the entry could contain zeros after a power failure.
        flag: flag of the cache directory, for messages.
    Raises:
        ValueError: the cache directory cannot be written to.
    """
    if path.exists():
        return path
    # An OSError can mean no permission, a full disk, or a file system without locks. Its message does not name the flag
    # of the cache directory, so `errors_as` puts the flag before it.
    with errors_as(f"{cache_name(path, flag)}: cannot write {path}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):
            if not path.exists():  # another process may have built the entry while this one waited for the lock
                unfinished = path.with_name(f".{path.name}.unfinished")
                remove(unfinished)  # a process that was killed while it built the entry may have left this path
                with renamed_when_done(unfinished, path):
                    build(unfinished)
    return path


def load_or_save_arrays(path: Path, build: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return the numpy arrays of a cache entry, memory-mapped. Build the entry if it does not exist.

    Args:
        path: directory of the entry, with one file 0.npy, 1.npy, ... per array.
        build: function that computes the arrays of the entry.
    Raises:
        ValueError: the cache directory cannot be written to, or a file of the entry is damaged.
    """

    def save(directory: Path) -> None:
        directory.mkdir()
        for i, array in enumerate(build()):
            with open(directory / f"{i}.npy", "wb") as file:
                np.save(file, array)
                sync(file)

    build_once(path, save)
    with errors_of_damage(path):
        files = sorted(path.glob("*.npy"), key=lambda file: int(file.stem))
        return [np.load(file, mmap_mode="r") for file in files]


def errors_of_damage(path: Path) -> AbstractContextManager[None]:
    """Return a context that replaces an error of reading the cache entry at `path` by a ValueError with a remedy."""
    what = f"{cache_name(path, FLAG)}: {path} is damaged"
    return errors_as(what, (OSError, ValueError, RuntimeError), remedy="delete it to rebuild it")
