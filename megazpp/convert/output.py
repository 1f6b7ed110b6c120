"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megazpp.base.files import remove, renamed_when_done, try_lock


def check_output(path: Path) -> None:
    """Refuse an output folder before the work for it begins: raises ValueError if there is something in its place."""
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"--output {path} is not empty")
        if path.is_mount():  # nothing can be renamed onto it
            raise ValueError(f"--output {path} is where a file system is mounted; give a folder inside it")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"--output {path} exists and is no folder")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `path` if nothing is raised meanwhile, and else is gone.

    What a killed conversion has left is removed by the next one with the same output.

    Raises:
        ValueError: it cannot be made, or another process is at it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written to: {error.strerror}") from error
    try:
        if not try_lock(descriptor):
            raise ValueError(f"--output {path} is being written by another conversion")
        for entry in unfinished.iterdir():
            remove(entry)
        with renamed_when_done(unfinished, path):
            yield unfinished
            check_output(path)  # once more: a conversion takes its time
    finally:
        os.close(descriptor)
