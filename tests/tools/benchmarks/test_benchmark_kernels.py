"""tools/benchmarks/benchmark_kernels.py: what counts, on a GPU that only keeps time."""

from __future__ import annotations

import benchmark_kernels
import pytest
import torch
from benchmark_kernels import Piece


class Gpu:
    """Its clock, in milliseconds, goes on when something runs on it."""

    now = 0.0


class FakeEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Gpu.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


def test_the_first_round_and_what_keeps_the_gpu_busy_do_not_count(monkeypatch):
    def last(milliseconds: float) -> None:
        Gpu.now += milliseconds

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: last(50.0))
    durations = {"copy": iter((900.0, 1.0, 3.0, 2.0)), "kernel": iter((900.0, 5.0, 4.0, 70.0))}
    pieces = [Piece(name, 1, 1.0, lambda times=times: last(next(times))) for name, times in durations.items()]
    assert benchmark_kernels.time_on("cuda", pieces, 3) == [pytest.approx(2e-3), pytest.approx(5e-3)]
