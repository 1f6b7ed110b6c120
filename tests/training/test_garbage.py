"""The garbage collector runs between steps, after the same ones on every rank, and is given back."""

from __future__ import annotations

import gc

import pytest

from megazpp.training import loop


@pytest.mark.parametrize(("first", "expected"), [(1, [1, 4, 8]), (6, [6, 8, 12])])
def test_it_collects_after_the_first_step_and_then_every_interval(
    monkeypatch: pytest.MonkeyPatch, first: int, expected: list[int]
):
    collected: list[int] = []
    iteration = first
    monkeypatch.setattr(loop, "GARBAGE_INTERVAL", 4)
    monkeypatch.setattr(loop.gc, "collect", lambda: collected.append(iteration))
    with loop.collect_garbage_between_steps() as collect_garbage:
        for iteration in range(first, first + 8):
            assert gc.isenabled() == (iteration == first)  # inside a step, once frozen, it is off
            assert (gc.get_freeze_count() > 0) == (iteration > first)
            collect_garbage(iteration)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert collected == expected
