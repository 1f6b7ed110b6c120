"""Things built once per node, however many processes ask for them at the same moment.

Ranks of one node share a cache directory and need no barrier: a file lock lets one of them build, and a reader sees
nothing or the whole thing. Other nodes build their own copy of the same bytes: a build is a pure function of its key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazpp.base.files import locked, remove, renamed_when_done


def check_cache_dir(path: Path, flag: str = "--data-cache-path") -> None:
    """Raise ValueError if a directory cannot be made. One that is there may be read-only: all may be in it."""
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{flag}: cannot write {path}: {existing} is no directory")
    if existing != path and not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{flag}: cannot write {path}: {existing} cannot be written to")


def cache_key(**parts: Any) -> str:
    """A file name, 32 hexadecimal digits, that follows from `parts` (anything JSON can write)."""
    description = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(description.encode()).hexdigest()[:32]


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Return the file or directory `path`, once one process had `build` write it under a temporary path beside it.

    Raises:
        ValueError: the directory cannot be written to.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):
            if not path.exists():  # else another process built it while this one waited
                unfinished = path.with_name(f".{path.name}.unfinished")
                remove(unfinished)  # of a process that died here
                with renamed_when_done(unfinished, path, synced=False):
                    build(unfinished)
    except OSError as error:  # no permission, disk full, a file system without locks, ...
        raise ValueError(f"--data-cache-path: cannot write {path}: {error}") from error
    return path


def load_or_save_arrays(path: Path, build: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
    """The arrays that `build` makes, kept as 0.npy, 1.npy, ... in directory `path` and memory-mapped from there.

    Raises:
        ValueError: the directory cannot be written to, or holds something else.
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
        raise ValueError(f"--data-cache-path: {path} is damaged ({error}); delete it to rebuild it") from error
