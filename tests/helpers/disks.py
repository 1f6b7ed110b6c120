"""Mount small or read-only file systems as tmpfs, for tests of full and write-protected disks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount an empty tmpfs of `size` ("64k", "1m") at `path`, and unmount it at the end of the context.

    The test is skipped if this process may not mount file systems.
    """
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no right to mount: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def make_read_only(disk: Path) -> None:
    """Remount as read-only a file system that `small_disk` has mounted at `disk`."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
