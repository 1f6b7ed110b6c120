"""A cache on disk whose entries are built once per node, however many processes ask for them at the same time.

The ranks of a node share a cache directory and need no barrier. A file lock lets one of them build an entry, and
readers see either no entry or a complete one. Every node builds its own copy. The copies are equal, because an entry
is a pure function of its key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazpp.base.files import cache_name, locked, remove, renamed_when_done
from megazpp.base.program import errors_as

FLAG = "--data-cache-path"


def check_cache_dir(path: Path, flag: str = FLAG) -> None:
    """Raise ValueError if a directory cannot be created. An existing one may be read-only, if it is already filled."""
    flag = cache_name(path, flag)
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{flag}: cannot write {path}: {existing} is no directory")
    if existing != path and not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{flag}: cannot write {path}: {existing} cannot be written to")


def cache_key(**parts: Any) -> str:
    """Return a file name of 32 hexadecimal digits that depends on `parts`, which are values that JSON can hold."""
    description = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(description.encode()).hexdigest()[:32]


def build_once(path: Path, build: Callable[[Path], None], *, flag: str = FLAG) -> Path:
    """Return `path`, after exactly one process has built it if it did not exist.

    Args:
        path: file or directory of the cache.
        build: function that writes the entry to the temporary path it is given; that is then renamed to `path`.
        flag: flag of the cache directory, for messages.
    Raises:
        ValueError: the directory cannot be written to.
    """
    if path.exists():
        return path
    with errors_as(
        f"{cache_name(path, flag)}: cannot write {path}", OSError
    ):  # no permission, disk full, no locks, ...
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):
            if not path.exists():  # another process may have built it while this one waited for the lock
                unfinished = path.with_name(f".{path.name}.unfinished")
                remove(unfinished)  # left by a process that died while building
                with renamed_when_done(unfinished, path, synced=False):
                    build(unfinished)
    return path


def load_or_save_arrays(path: Path, build: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return the arrays of a cache entry, memory-mapped from its files 0.npy, 1.npy, ...

    Args:
        path: directory of the entry.
        build: function that computes the arrays if the entry does not exist.
    Raises:
        ValueError: the directory cannot be written to, or is damaged.
    """

    def save(directory: Path) -> None:
        directory.mkdir()
        for i, array in enumerate(build()):
            np.save(directory / f"{i}.npy", array)

    build_once(path, save)
    try:
        files = sorted(path.glob("*.npy"), key=lambda file: int(file.stem))
        return [np.load(file, mmap_mode="r") for file in files]
    except (OSError, ValueError) as error:
        raise ValueError(f"{cache_name(path, FLAG)}: {path} is damaged ({error}); delete it to rebuild it") from error
