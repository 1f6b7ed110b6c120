"""The output folder is whole or not there, and what was there is not touched."""

import multiprocessing
import time
from pathlib import Path

import pytest

from megazpp.convert.convert import whole_folder


def test_what_comes_meanwhile_is_not_touched(tmp_path):
    mine = tmp_path / "output/mine"
    with pytest.raises(ValueError, match="is not empty"), whole_folder(mine.parent):
        mine.mkdir(parents=True)
    assert [*tmp_path.rglob("*")] == [mine.parent, mine]


def hold(path: Path, ready: multiprocessing.Event) -> None:
    with whole_folder(path) as folder:
        (folder / "half").write_text("x")
        (folder / "inner").mkdir()
        ready.set()
        time.sleep(1000)


def test_a_killed_conversion_is_cleared_away_by_the_next_and_two_at_once_exclude_each_other(tmp_path):
    path, context = tmp_path / "output", multiprocessing.get_context("fork")
    path.mkdir()
    ready = context.Event()
    other = context.Process(target=hold, args=(path, ready), daemon=True)
    other.start()
    assert ready.wait(60)
    with pytest.raises(ValueError, match="is being written by another conversion"), whole_folder(path):
        pass
    other.kill()
    other.join()
    assert not any(path.iterdir())
    with whole_folder(path) as folder:
        assert not any(folder.iterdir())
        (folder / "whole").touch()
    assert [*tmp_path.rglob("*")] == [path, path / "whole"]
