"""Test the cache of data files.

Several processes that request an entry build it once, and never see a partial entry.
"""

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

# The program of a test process. It requests a cache entry, which is a folder of two files, and builds the entry slowly
# if it does not exist. It appends the words "asks" and "builds" to the file `log`.
RACER = """
import sys, time
from pathlib import Path
from megazpp.data.cache import build_once

def say(text):
    with open(sys.argv[1], "a") as file:
        file.write(text)

def build(path):
    path.mkdir()
    (path / "first").write_text("1")
    say("builds ")
    time.sleep(float(sys.argv[3]))
    (path / "second").write_text("2")

say("asks ")
result = build_once(Path(sys.argv[2]), build)
assert sorted(file.name for file in result.iterdir()) == ["first", "second"], list(result.iterdir())
"""


def start(number: int, log: Path, target: Path, seconds: float) -> list[subprocess.Popen]:
    log.touch()
    return [subprocess.Popen([sys.executable, "-c", RACER, str(log), str(target), str(seconds)]) for _ in range(number)]


def wait_for(log: Path, word: str, times: int) -> None:
    deadline = time.monotonic() + 60
    while log.read_text().count(word) < times:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def test_another_process_takes_over_when_the_builder_is_killed(tmp_path):
    log, target = tmp_path / "log", tmp_path / "cache" / "thing"
    (victim,) = start(1, log, target, seconds=300)
    wait_for(log, "builds", 1)  # the victim holds the cache entry's lock from now on
    racers = start(4, log, target, seconds=0.3)
    wait_for(log, "asks", 5)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    assert [racer.wait(timeout=60) for racer in racers] == [0] * 4
    # the victim began one build, and only one of the four racers built again
    assert log.read_text().count("builds") == 2
    assert [path.name for path in target.parent.iterdir() if path.name != "thing"] == [".thing.lock"]


def test_failed_build_leaves_nothing_and_can_be_retried(tmp_path):
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".thing.lock"]
    assert build_once(tmp_path / "thing", Path.touch).read_text() == ""


def test_cached_arrays_are_memory_mapped_in_order_unless_damaged(tmp_path):
    arrays = [np.arange(i + 1) for i in range(12)]
    for _ in range(2):
        loaded = load_or_save_arrays(tmp_path / "arrays", lambda: arrays)
        assert [array.tolist() for array in loaded] == [array.tolist() for array in arrays]
        assert all(isinstance(array, np.memmap) for array in loaded)
    os.truncate(tmp_path / "arrays" / "11.npy", 140)
    with pytest.raises(ValueError, match=r"arrays is damaged: .*; delete it"):
        load_or_save_arrays(tmp_path / "arrays", lambda: arrays)


def test_entry_is_on_disk_before_it_is_visible(tmp_path, monkeypatch):
    """Record the calls of fsync and rename: after a power failure, a visible entry must not contain zeros."""
    calls, fsync, rename = list[str](), os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda file: (calls.append(Path(os.readlink(f"/proc/self/fd/{file}")).name), fsync(file))
    )
    monkeypatch.setattr(Path, "rename", lambda path, to: (calls.append(f"rename to {to.name}"), rename(path, to))[1])
    load_or_save_arrays(tmp_path / "arrays", lambda: [np.arange(2), np.arange(3)])
    assert calls == ["0.npy", "1.npy", ".arrays.unfinished", "rename to arrays", tmp_path.name]


def test_cache_keys_depend_on_every_part_but_not_on_order():
    assert cache_key(a=1, b="x") == cache_key(b="x", a=1)
    assert len({cache_key(a=1), cache_key(a=2), cache_key(b=1), cache_key(a="1"), cache_key(a=(1,))}) == 5


def test_full_disk_is_named_and_no_partial_file_is_left(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(ValueError, match=r"--data-cache-path: cannot write .*: 131072 requested and \d+ written"):
            load_or_save_arrays(disk / "thing", lambda: [np.zeros(1 << 17, dtype=np.uint8)])
        assert [file.name for file in disk.iterdir()] == [".thing.lock"]


def test_read_only_disk_serves_existing_entries(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        load_or_save_arrays(disk / "thing", lambda: [np.arange(5)])
        make_read_only(disk)
        (array,) = load_or_save_arrays(disk / "thing", list)
        assert array.tolist() == [0, 1, 2, 3, 4]
        del array  # drops the memory map, so that the disk can be unmounted
        with pytest.raises(ValueError, match=r"--data-cache-path: cannot write .*Read-only file system"):
            load_or_save_arrays(disk / "other", lambda: [np.arange(5)])
