"""Test how benchmark_kernels.py measures times on the host and on a GPU."""

from unittest.mock import Mock

import benchmark_kernels
import torch
from benchmark_kernels import Piece, gpu_seconds, time_on


def test_times_are_the_median_of_later_rounds_and_the_first_round(monkeypatch):
    monkeypatch.setattr(benchmark_kernels, "host_seconds", lambda run, clock: next(run))
    times = ((900.0, 1.0, 3.0, 2.0), (900.0, 5.0, 4.0, 70.0))
    assert time_on("cpu", [Piece("", 1, 1.0, iter(each)) for each in times], rounds=3) == ([2.0, 5.0], [900.0, 900.0])


def test_gpu_is_kept_busy_until_kernel_and_events_are_launched(monkeypatch):
    cuda = Mock()
    cuda.Event.return_value.elapsed_time.return_value = 3.0  # CUDA events return milliseconds
    monkeypatch.setattr(torch, "cuda", cuda)
    assert gpu_seconds(cuda.run) == 3e-3
    launched = [name.removeprefix("Event().") for name, *_ in cuda.mock_calls if name != "Event"]
    assert launched == ["_sleep", "record", "run", "record", "synchronize", "elapsed_time"]
