"""Output files replace nothing unasked and are seen whole."""

import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from helpers.refusals import not_refused

from megazpp.base.files import cache_folder, check_writable, first_free, write_whole


def test_an_output_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    check, path = partial(check_writable, flag="--output-prefix"), tmp_path / "a"
    check(path, overwrite=False)
    path.touch()
    check(path, overwrite=True)
    rows = [
        (path, False, f"--output-prefix: {path} exists (--overwrite replaces it)"),
        (tmp_path, True, f"--output-prefix: {tmp_path} exists"),  # never a folder
        (tmp_path / "none" / "a", True, "none is no directory"),
    ]
    assert not not_refused(rows, lambda path, overwrite: check(path, overwrite=overwrite))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert not not_refused([(path, f"{tmp_path} cannot be written to")], partial(check, overwrite=True))


def test_the_first_free_name_has_the_lowest_number_that_nothing_has(tmp_path):
    for number in (1, 2, 4):
        (tmp_path / f"a.{number}").mkdir()
    assert first_free(lambda number: tmp_path / f"a.{number}") == tmp_path / "a.3"


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    write_whole(path, b"old")
    with mock.patch("os.fsync", side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_default_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "megazpp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ishmael")
    assert cache_folder() == Path("/home/ishmael/.cache/megazpp")
