"""Test the writing of output files. Only --overwrite replaces a file, and readers never see a partial file."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.disks import small_disk
from helpers.refusals import not_refused

from megazpp.base import files
from megazpp.base.files import (
    cache_folder,
    cache_name,
    check_writable,
    first_free,
    lock_for_this_job,
    read_small_file,
    write_whole,
)


def test_unwritable_output_is_rejected(tmp_path, monkeypatch):
    check, path = partial(check_writable, flag="--output-prefix"), tmp_path / "a"
    check(path, overwrite=False)
    path.touch()
    check(path, overwrite=True)
    rows = [
        (path, False, f"--output-prefix: {path} exists (--overwrite replaces it)"),
        (tmp_path, True, f"--output-prefix: {tmp_path} exists"),  # --overwrite replaces a file but never a folder
        (tmp_path / "none" / "a", True, "none is not a directory"),
    ]
    assert not not_refused(rows, lambda path, overwrite: check(path, overwrite=overwrite))
    # root may write anywhere, so the missing permission is simulated
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not not_refused([(path, f"{tmp_path} cannot be written to")], partial(check, overwrite=True))


def test_first_free_returns_the_lowest_unused_number(tmp_path):
    for number in (1, 2, 4):
        (tmp_path / f"a.{number}").mkdir()
    assert first_free(lambda number: tmp_path / f"a.{number}") == tmp_path / "a.3"


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_whole(path, b"old")
    with mock.patch("os.fsync", side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_is_reported_with_the_lock_file(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match="No space"):
            (disk / "ballast").write_bytes(bytes(65 << 10))
        with pytest.raises(OSError, match=f"No space left on device: '{disk}/lock'"):
            lock_for_this_job(disk / "lock", "--save x")


def test_lock_file_is_closed_and_named_if_the_file_system_has_no_locks(tmp_path, monkeypatch):
    opened, path = [], tmp_path / "lock"

    def refuse(file: Any) -> bool:
        opened.append(file)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "try_lock", refuse)
    with pytest.raises(OSError, match=f"No locks available: '{path}'"):
        lock_for_this_job(path, "--save x")
    assert opened[0].closed


def test_two_writers_of_a_file_never_make_an_incomplete_one_visible(tmp_path, monkeypatch):
    path, sync = tmp_path / "a", files.sync

    def interrupted(file: Any) -> None:
        """Let a second writer write its shorter file while the first one flushes its own to disk."""
        monkeypatch.setattr(files, "sync", sync)
        write_whole(path, b"short")
        assert path.read_bytes() == b"short"
        sync(file)

    monkeypatch.setattr(files, "sync", interrupted)
    write_whole(path, b"much longer")
    assert path.read_bytes() == b"much longer"
    assert list(tmp_path.iterdir()) == [path]


def test_cache_folder_follows_the_environment_and_messages_name_it(monkeypatch, tmp_path):
    own, home, name = tmp_path / "megazpp" / "x", Path("/home/ishmael/.cache/megazpp"), partial(cache_name, flag="--f")
    monkeypatch.setenv("HOME", "/home/ishmael")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "megazpp"
    assert (name(own), name(home)) == (f"XDG_CACHE_HOME={tmp_path} (without --f)", "--f")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == home
    assert (name(own), name(home)) == ("--f", "HOME=/home/ishmael (without --f)")
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError))
    assert not not_refused([("set XDG_CACHE_HOME",)], cache_folder)
    assert name(home) == "--f"


def test_small_file_is_regular_and_bounded(monkeypatch, tmp_path):
    path, fifo = tmp_path / "a", tmp_path / "fifo"
    path.write_bytes(b"12345678")
    os.mkfifo(fifo)
    monkeypatch.setattr(files, "MOST_BYTES", 8)
    assert read_small_file(path) == b"12345678"
    path.write_bytes(b"123456789")
    rows = [(path, "it has 9 bytes, more than the allowed 8"), (fifo, "not a regular"), (tmp_path, "not a regular")]
    assert not not_refused(rows, read_small_file, OSError)
