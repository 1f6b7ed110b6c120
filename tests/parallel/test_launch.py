"""Who starts the workers."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.refusals import not_refused

from megazpp.base.program import LAUNCHER_PID
from megazpp.parallel import launch
from megazpp.parallel.launch import LaunchConfig, Place, find_place

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"}
STARTED = Place(started=True, world_size=8, rank=5, local_rank=1)


PLACES: list[tuple[dict[str, Any], dict[str, str], Place]] = [
    ({"nproc": 3}, {}, Place(started=False, world_size=3)),
    ({"nproc": 1}, {}, Place(started=True, world_size=1)),
    ({"nproc": 1, "max_restarts": 2}, {}, Place(started=False, world_size=1)),
    ({}, TORCHRUN, STARTED),
    ({}, SRUN, STARTED),
    ({}, {**TORCHRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, STARTED),  # torchrun, which srun has started
    ({"nproc": 2}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, Place(started=False, world_size=2)),  # a batch script
    ({"nproc": 8}, {**TORCHRUN, LAUNCHER_PID: "1"}, STARTED),  # our own worker
]


def test_the_environment_says_who_starts_the_workers():
    for flags, env, expected in PLACES:
        assert find_place(LaunchConfig(**flags), env) == expected, (flags, env)


def test_the_default_is_a_worker_per_gpu_or_two_to_four_by_the_cores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for cores, workers in ((1, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert find_place(LaunchConfig(), {}).world_size == workers
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    assert find_place(LaunchConfig(), {}).world_size == 7


REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"nproc": 2}, TORCHRUN, "--nproc 2: torchrun"),
    ({"nproc": 2}, SRUN, "--nproc 2: srun"),
    ({"max_restarts": 3}, TORCHRUN, "--max-restarts 3: torchrun"),
    ({"max_restarts": 3}, SRUN, "--max-restarts 3: srun"),
    ({"nproc": 0}, {}, "--nproc 0 is not positive"),
    ({"max_restarts": -1}, {}, "--max-restarts -1 is negative"),
    ({"distributed_timeout_minutes": 0}, {}, "--distributed-timeout-minutes 0 is not positive"),
    ({"distributed_timeout_seconds_after_init": -2.5}, {}, "-timeout-seconds-after-init -2.5 is not positive"),
]


def test_what_cannot_be_names_flag_and_value():
    assert not_refused(REFUSED, lambda flags, env: find_place(LaunchConfig(**flags), env)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="--distributed-backend nccl needs a GPU"):
        find_place(LaunchConfig(distributed_backend="nccl"), {})


def test_after_the_first_step_half_the_timeout_is_enough_unless_said_otherwise():
    assert LaunchConfig().hang_seconds == (600, 300)
    assert LaunchConfig(distributed_timeout_seconds_after_init=7.5).hang_seconds == (600, 7.5)


def test_the_first_ctrl_c_is_passed_on_to_the_workers_and_the_second_ends_all_at_once():
    sent: list[int] = []
    worker: Any = SimpleNamespace(send_signal=sent.append)
    with launch._passing_signals_to([worker]) as passed:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert sent == passed == [signal.SIGTERM, signal.SIGINT]
