"""Work in other processes comes back in order, ends when a worker is killed, and leaves nobody behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import pytest

from megazpp.data.workers import map_in_processes


def double_slowly_at_first() -> Callable[[int], tuple[int, int]]:
    def double(number: int) -> tuple[int, int]:
        time.sleep(0.3 if number == 0 else 0.0)
        return 2 * number, os.getpid()

    return double


def send_much() -> Callable[[int], bytes]:
    return lambda number: bytes([number]) * (1 << 26)  # far more than a pipe holds


def fail_at_three() -> Callable[[int], float]:
    return lambda number: 1 / (3 - number)


def test_results_come_in_the_order_of_the_items_whoever_is_slow_and_items_are_not_read_far_ahead(
    new_children: Callable[[], list[BaseProcess]],
) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    results = map_in_processes(double_slowly_at_first, items(), 2)
    first = next(results)
    assert len(taken) <= 8
    rest = list(results)
    assert [number for number, _ in [first, *rest]] == list(range(0, 100, 2))
    assert len({pid for _, pid in [first, *rest]}) == 2
    assert os.getpid() not in {pid for _, pid in rest}
    assert new_children() == []


def test_no_items_need_no_results() -> None:
    assert list(map_in_processes(double_slowly_at_first, [], 1)) == []


def test_a_worker_killed_in_the_middle_of_a_message_is_noticed(
    new_children: Callable[[], list[BaseProcess]],
) -> None:
    results = map_in_processes(send_much, range(100), 2)
    next(results)
    # the others now stand in the middle of sending: nobody reads until the next result is asked for
    time.sleep(0.2)
    for process in new_children():
        process.kill()
    with pytest.raises(ValueError, match="--workers: one was killed"):
        list(results)
    assert new_children() == []


def test_a_worker_that_fails_shows_its_traceback_and_ends_the_work(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="failed as it says above"):
        list(map_in_processes(fail_at_three, range(9), 1))
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_who_stops_listening_ends_the_workers(
    new_children: Callable[[], list[BaseProcess]],
) -> None:
    results = map_in_processes(double_slowly_at_first, iter(range(10**9)), 2)
    next(results)
    assert len(new_children()) == 2
    results.close()
    assert new_children() == []
