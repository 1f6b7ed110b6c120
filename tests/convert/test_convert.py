"""The output folder is whole or not there, and what was there is not touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.program import ROOT

from megazpp.convert.convert import whole_folder

HOLD = """
import sys, time
from pathlib import Path
from megazpp.convert.convert import whole_folder
with whole_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    (folder / "inner").mkdir()
    print("here", flush=True)
    time.sleep(60)
"""


def fail(path: Path, failure: type[BaseException]) -> None:
    with whole_folder(path) as folder:
        (folder / "file").write_text("x")
        raise failure


def write_meanwhile(path: Path) -> None:
    with whole_folder(path):
        path.mkdir()
        (path / "mine").write_text("mine")


def test_an_error_leaves_nothing_and_an_empty_folder_empty(tmp_path: Path):
    path = tmp_path / "output"
    path.mkdir()
    for failure in (ValueError, OSError, KeyboardInterrupt):
        with pytest.raises(failure):
            fail(path, failure)
    assert list(tmp_path.iterdir()) == [path]
    assert not list(path.iterdir())


def test_what_comes_meanwhile_is_not_touched(tmp_path: Path):
    with pytest.raises(ValueError, match="is not empty"):
        write_meanwhile(tmp_path / "later")
    assert (tmp_path / "later" / "mine").read_text() == "mine"


def test_a_killed_conversion_is_cleared_away_by_the_next_and_two_at_once_exclude_each_other(tmp_path: Path):
    path = tmp_path / "output"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        with pytest.raises(ValueError, match="is being written by another conversion"), whole_folder(path):
            pass
        other.send_signal(signal.SIGKILL)
    assert not path.exists()
    with whole_folder(path) as folder:
        assert not list(folder.iterdir())
    assert list(tmp_path.iterdir()) == [path]
