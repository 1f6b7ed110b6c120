"""Output files replace nothing unasked and are seen whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megazpp.base.files import cache_folder, check_writable, first_free, write_whole


def test_what_exists_is_refused_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    check_writable(path, "--output-prefix", overwrite=False)
    path.touch()
    check_writable(path, "--output-prefix", overwrite=True)
    with pytest.raises(ValueError, match=r"--output-prefix: .*/a exists \(--overwrite replaces it\)"):
        check_writable(path, "--output-prefix", overwrite=False)
    with pytest.raises(ValueError, match=r"exists$"):
        check_writable(tmp_path, "--output-prefix", overwrite=True)  # never a folder


def test_the_first_free_name_has_the_lowest_number_that_nothing_has(tmp_path: Path) -> None:
    for number in (1, 2, 4):
        (tmp_path / f"a.{number}").mkdir()
    assert first_free(lambda number: tmp_path / f"a.{number}") == tmp_path / "a.3"


def test_a_place_that_is_no_directory_or_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="none is no directory"):
        check_writable(tmp_path / "none" / "a", "--output-prefix", overwrite=True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be written to"):
        check_writable(tmp_path / "a", "--output-prefix", overwrite=True)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="disk full"):
            write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_default_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "megazpp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ishmael")
    assert cache_folder() == Path("/home/ishmael/.cache/megazpp")
