"""Test the output folder of a checkpoint conversion.

A conversion that fails or is killed leaves the folder missing or empty, as it was before. Existing files never change.
"""

import multiprocessing
import time
from pathlib import Path

import pytest

from megazpp.convert.convert import whole_folder


def test_files_created_during_a_conversion_are_kept(tmp_path):
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


def test_killed_conversion_is_cleaned_up_and_concurrent_ones_are_rejected(tmp_path):
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
