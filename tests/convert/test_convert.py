"""The output folder is whole or not there, and what was there is not touched."""

import multiprocessing
import time
from pathlib import Path

import pytest

from megazpp.convert.convert import whole_folder


def fail(path: Path, failure: type[BaseException]) -> None:
    with whole_folder(path) as folder:
        (folder / "file").write_text("x")
        raise failure


def write_meanwhile(path: Path) -> None:
    with whole_folder(path):
        path.mkdir()
        (path / "mine").write_text("mine")


def test_an_error_leaves_nothing_and_an_empty_folder_empty(tmp_path):
    path = tmp_path / "output"
    path.mkdir()
    for failure in (ValueError, OSError, KeyboardInterrupt):
        with pytest.raises(failure):
            fail(path, failure)
    assert list(tmp_path.iterdir()) == [path]
    assert not list(path.iterdir())


def test_what_comes_meanwhile_is_not_touched(tmp_path):
    with pytest.raises(ValueError, match="is not empty"):
        write_meanwhile(tmp_path / "later")
    assert (tmp_path / "later" / "mine").read_text() == "mine"


def hold(path: Path, ready: multiprocessing.Event) -> None:
    with whole_folder(path) as folder:
        (folder / "half").write_text("x")
        (folder / "inner").mkdir()
        ready.set()
        time.sleep(1000)


def test_a_killed_conversion_is_cleared_away_by_the_next_and_two_at_once_exclude_each_other(tmp_path):
    path, context = tmp_path / "output", multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=hold, args=(path, ready), daemon=True)
    other.start()
    assert ready.wait(60)
    with pytest.raises(ValueError, match="is being written by another conversion"), whole_folder(path):
        pass
    other.kill()
    other.join()
    assert not path.exists()
    with whole_folder(path) as folder:
        assert not list(folder.iterdir())
    assert list(tmp_path.iterdir()) == [path]
