"""The garbage collector runs between steps, after the same ones on every rank, and is given back."""

from __future__ import annotations

import gc

import pytest

from megazpp.training import garbage
from megazpp.training.garbage import GarbageCollector, GarbageConfig


def run(config: GarbageConfig, monkeypatch: pytest.MonkeyPatch, *, first: int = 1, steps: int = 10) -> list[int]:
    """After which iterations it collects; inside a step, once frozen, it must be off."""
    collected: list[int] = []
    iteration = first
    monkeypatch.setattr(garbage.gc, "collect", lambda: collected.append(iteration))
    with GarbageCollector(config) as collector:
        for iteration in range(first, first + steps):
            with collector.step(iteration):
                assert gc.isenabled() == (iteration == first or not config.manual_gc)
                assert (gc.get_freeze_count() > 0) == (iteration > first and config.manual_gc)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    return collected


def test_it_collects_after_the_first_step_and_then_every_interval(monkeypatch: pytest.MonkeyPatch):
    assert run(GarbageConfig(manual_gc_interval=4), monkeypatch) == [1, 4, 8]


def test_a_continued_run_collects_after_the_same_iterations(monkeypatch: pytest.MonkeyPatch):
    assert run(GarbageConfig(manual_gc_interval=4), monkeypatch, first=6) == [6, 8, 12]


def test_an_interval_of_0_freezes_only_and_no_manual_gc_does_nothing(monkeypatch: pytest.MonkeyPatch):
    assert run(GarbageConfig(manual_gc_interval=0), monkeypatch) == [1]
    assert run(GarbageConfig(manual_gc=False), monkeypatch) == []


def test_a_negative_interval_is_refused_by_its_flag():
    with pytest.raises(ValueError, match="--manual-gc-interval -1"):
        GarbageConfig(manual_gc_interval=-1)
