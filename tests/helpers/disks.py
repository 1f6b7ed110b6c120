"""Small or read-only file systems, mounted as tmpfs in tests that may mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount an empty file system of `size` ("64k", "1m") at `path`; skip the test if mounting is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no right to mount: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def make_read_only(disk: Path) -> None:
    """Remount the file system of `small_disk` as read-only."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
