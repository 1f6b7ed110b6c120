"""Whatever several processes ask for at once is built by one of them, and never seen half built."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.disks import make_read_only, small_disk

from megazpp.data.cache import build_once, cache_key, load_or_save_arrays

# A process that asks for a directory of two files, says in `log` that it builds, and takes its time between the files.
RACER = """
import os, signal, sys, time
from pathlib import Path
from megazpp.data.cache import build_once

log, target, dies = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "dies"

def build(path):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    path.mkdir()
    (path / "first").write_text("1")
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    (path / "second").write_text("2")

result = build_once(target, build)
assert sorted(file.name for file in result.iterdir()) == ["first", "second"], list(result.iterdir())
"""


def start(number: int, log: Path, target: Path, mode: str = "lives") -> list[subprocess.Popen]:
    return [subprocess.Popen([sys.executable, "-c", RACER, str(log), str(target), mode]) for _ in range(number)]


def test_when_the_builder_is_killed_half_way_another_one_takes_over(tmp_path):
    log, target = tmp_path / "log", tmp_path / "cache" / "thing"
    (victim,) = start(1, log, target, "dies")
    while not log.exists():  # it holds the lock from here on
        assert victim.poll() is None
        time.sleep(0.01)
    racers = start(4, log, target)
    assert victim.wait(timeout=60) == -signal.SIGKILL
    assert [racer.wait(timeout=60) for racer in racers] == [0] * 4
    assert len(log.read_text().splitlines()) == 2  # racing processes build once
    assert [path.name for path in target.parent.iterdir() if path.name != "thing"] == [".thing.lock"]


def test_a_build_that_raises_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".thing.lock"]
    assert build_once(tmp_path / "thing", lambda path: path.write_text("whole") and None).read_text() == "whole"


def test_arrays_come_back_in_order_and_memory_mapped_unless_they_are_damaged(tmp_path):
    arrays = [np.arange(i + 1) for i in range(12)]
    for _ in range(2):
        loaded = load_or_save_arrays(tmp_path / "arrays", lambda: arrays)
        assert [array.tolist() for array in loaded] == [array.tolist() for array in arrays]
        assert all(isinstance(array, np.memmap) for array in loaded)
    os.truncate(tmp_path / "arrays" / "11.npy", 140)
    with pytest.raises(ValueError, match=r"arrays is damaged .*delete it"):
        load_or_save_arrays(tmp_path / "arrays", lambda: arrays)


def test_keys_depend_on_every_part_and_on_no_order():
    assert cache_key(a=1, b="x") == cache_key(b="x", a=1)
    assert len({cache_key(a=1), cache_key(a=2), cache_key(b=1), cache_key(a="1"), cache_key(a=(1,))}) == 5


def test_a_full_disk_is_named_and_nothing_unfinished_is_left_on_it(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(ValueError, match=r"--data-cache-path: cannot write .*: 131072 requested and \d+ written"):
            load_or_save_arrays(disk / "thing", lambda: [np.zeros(1 << 17, dtype=np.uint8)])
        assert [file.name for file in disk.iterdir()] == [".thing.lock"]


def test_a_read_only_disk_is_no_obstacle_to_what_is_built_already(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        load_or_save_arrays(disk / "thing", lambda: [np.arange(5)])
        make_read_only(disk)
        (array,) = load_or_save_arrays(disk / "thing", list)
        assert array.tolist() == [0, 1, 2, 3, 4]
        del array  # it is mapped
        with pytest.raises(ValueError, match=r"--data-cache-path: cannot write .*Read-only file system"):
            load_or_save_arrays(disk / "other", lambda: [np.arange(5)])
