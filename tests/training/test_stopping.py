"""When training stops: the same answer on all ranks, whichever of them knows."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import ranks

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.training.loop import StopConditions, StopConfig

ALONE: Any = SimpleNamespace(world=MeshAxis("world"), mesh=SimpleNamespace(device_type="cpu"))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_after_the_step_and_hurries(signum: signal.Signals):
    before = signal.getsignal(signum)
    with StopConditions(StopConfig()) as stops:
        assert stops.reason(1, ALONE) is None
        os.kill(os.getpid(), signum)
        assert not stops.hurried  # the step goes on
        assert stops.reason(2, ALONE) == signum.name
        assert stops.hurried
        os.kill(os.getpid(), signum)  # once more does no harm
    assert signal.getsignal(signum) is before


def reasons(signalled_rank: int, tp: int) -> list[str | None]:
    plan = plan_dims(
        ParallelConfig(tensor_model_parallel_size=tp), Cluster(num_nodes=1, ranks_per_node=4), zero_stage=3
    )
    dims = ParallelDims(plan, device_type="cpu")
    with StopConditions(StopConfig()) as stops:
        first = stops.reason(1, dims)
        if dims.world.rank == signalled_rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        return [first, stops.reason(2, dims)]


@pytest.mark.parametrize(("rank", "tp"), [(3, 2), (1, 1)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(rank: int, tp: int):
    assert ranks(4).run(reasons, rank, tp) == [[None, "SIGUSR1"]] * 4


def test_exit_interval_stops_after_its_multiples():
    stops = StopConditions(StopConfig(exit_interval=4))
    assert [stops.reason(i, ALONE) for i in (3, 4, 5, 8)] == [None, "--exit-interval 4", None, "--exit-interval 4"]
    assert not stops.hurried


def test_exit_duration_stops_when_the_minutes_are_over(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 1000, 50))  # 50 seconds pass between two looks
    monkeypatch.setattr("megazpp.training.loop.time.monotonic", lambda: float(next(clock)))
    stops = StopConditions(StopConfig(exit_duration_in_mins=2))
    assert [stops.reason(i, ALONE) for i in (1, 2, 3)] == [None, None, "--exit-duration-in-mins 2"]


@pytest.mark.parametrize("name", ["exit_interval", "exit_duration_in_mins"])
def test_limits_that_are_not_positive_name_the_flag(name: str):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} 0 is not positive"):
        StopConfig(**{name: 0})


@pytest.mark.gpu
def test_several_ranks_on_cuda_stop_a_step_later_and_never_wait_for_the_device():
    world = SimpleNamespace(size=2, max_=lambda numbers: numbers)
    dims: Any = SimpleNamespace(world=world, mesh=SimpleNamespace(device_type="cuda"))
    found = []
    with StopConditions(StopConfig()) as stops:
        for iteration in (1, 2, 3):
            if iteration == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            torch.cuda.set_sync_debug_mode("error")
            try:
                found.append(stops.reason(iteration, dims))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()  # a step reads its loss
    assert found == [None, None, "SIGUSR1"]
