"""Work in other processes comes back in order, ends when a worker is killed, and leaves nobody behind."""

import errno
import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from megazpp.data.preprocess import map_in_processes

Children = Callable[[], list[BaseProcess]]


@pytest.fixture
def new_children() -> Children:
    """Child processes that the test has started: not the rank pools of tests before it, which other tests still use."""
    before = multiprocessing.active_children()
    return lambda: [process for process in multiprocessing.active_children() if process not in before]


def double_slowly_at_first(number: int) -> tuple[int, int]:
    time.sleep(0.3 if number == 0 else 0.0)
    return 2 * number, os.getpid()


def send_much(number: int) -> bytes:
    return bytes([number]) * (1 << 24)  # far more than a pipe holds


def fail_at_three(number: int) -> float:
    return 1 / (3 - number)


def print_own_and_wait(_: int) -> None:
    print(os.getpid(), flush=True)
    time.sleep(100)


def test_results_come_in_order_and_who_stops_listening_ends_the_workers(new_children):
    """Items are not read far ahead, so there may be endlessly many."""
    taken = itertools.count()
    results = map_in_processes(double_slowly_at_first, taken, 2)
    first = next(results)
    assert next(taken) <= 8  # which takes one itself
    rest = [next(results) for _ in range(30)]
    assert [number for number, _ in [first, *rest]][:6] == [0, 2, 4, 6, 8, 10]
    assert [number for number, _ in rest] == sorted(number for number, _ in rest)
    assert len({pid for _, pid in [first, *rest]} - {os.getpid()}) == 2
    assert len(new_children()) == 2
    results.close()
    assert new_children() == []


def test_workers_killed_while_they_hand_over_much_are_noticed(new_children):
    results = map_in_processes(send_much, range(100), 2)
    next(results)
    for process in new_children():
        process.kill()
    with pytest.raises(ValueError, match="--workers: one was killed"):
        list(results)
    assert new_children() == []


def test_exceptions_and_full_disks_of_workers_are_told(monkeypatch):
    with pytest.raises(ZeroDivisionError) as caught:
        list(map_in_processes(fail_at_three, range(9), 1))
    assert "in fail_at_three" in str(caught.value.__cause__)

    def full(self: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"--workers: .*/0: No space left on device; TMPDIR names another folder"):
        list(map_in_processes(fail_at_three, range(9), 1))


def test_workers_end_with_a_main_process_that_is_killed(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from test_workers import map_in_processes, print_own_and_wait\n"
        "if __name__ == '__main__':\n"
        "    list(map_in_processes(print_own_and_wait, range(1), 1))\n"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        worker = int(main.stdout.readline())
        os.kill(worker, 0)  # it lives
        main.kill()
        assert main.stdout.read() == ""  # nobody holds its output open any more
