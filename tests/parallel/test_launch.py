"""Who starts the workers."""

from __future__ import annotations

import os

import pytest
import torch

from megazpp.base.starting import LAUNCHER_PID
from megazpp.parallel.launch import LaunchConfig, Place, find_place


def place(nproc: int | None = None, restarts: int = 0, **env: str) -> Place:
    return find_place(LaunchConfig(nproc=nproc, max_restarts=restarts), env)


def test_without_a_launcher_the_program_starts_the_workers_it_is_asked_for():
    assert place(3) == Place(started=False, world_size=3)


def test_a_single_worker_is_this_process():
    assert place(1) == Place(started=True, world_size=1)


def test_the_default_is_a_worker_per_gpu_or_two_to_four_by_the_cores_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for cores, workers in ((1, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert place().world_size == workers
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    assert place().world_size == 7


def test_torchrun_s_workers_are_found():
    found = place(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    assert found == Place(started=True, world_size=8, rank=5, local_rank=1)


def test_srun_s_workers_are_found():
    found = place(SLURM_PROCID="5", SLURM_LOCALID="1", SLURM_STEP_NUM_TASKS="8")
    assert found == Place(started=True, world_size=8, rank=5, local_rank=1)


def test_torchrun_inside_srun_wins():
    found = place(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", RANK="9", LOCAL_RANK="1", WORLD_SIZE="16")
    assert found == Place(started=True, world_size=16, rank=9, local_rank=1)


def test_a_batch_script_with_one_task_starts_its_own_workers():
    assert place(2, SLURM_PROCID="0", SLURM_NTASKS="2") == Place(started=False, world_size=2)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_nproc_under_a_launcher_is_refused(launcher: str):
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(ValueError, match=f"--nproc 2: .*{launcher}"):
        place(2, **(torchrun if launcher == "torchrun" else srun))


def test_nproc_in_a_worker_that_we_started_is_what_started_it():
    found = place(2, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", **{LAUNCHER_PID: "1"})
    assert found == Place(started=True, world_size=2, rank=1, local_rank=1)


@pytest.mark.parametrize("nproc", [0, -2])
def test_a_number_of_workers_that_is_not_positive_is_refused(nproc: int):
    with pytest.raises(ValueError, match=f"--nproc {nproc} is not positive"):
        place(nproc)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="--distributed-backend nccl needs a GPU"):
        find_place(LaunchConfig(distributed_backend="nccl"), {})


def test_a_single_worker_that_may_have_to_be_started_again_is_started():
    assert place(1, restarts=2) == Place(started=False, world_size=1)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_max_restarts_under_another_launcher_is_refused(launcher: str):
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(ValueError, match=f"--max-restarts 3: .*{launcher}"):
        place(restarts=3, **(torchrun if launcher == "torchrun" else srun))


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("max_restarts", -1, "negative"),
        ("distributed_timeout_minutes", 0, "not positive"),
        ("distributed_timeout_seconds_after_init", -2.5, "not positive"),
    ],
)
def test_values_that_cannot_work_name_the_flag(name: str, value: float, wrong: str):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value} is {wrong}"):
        LaunchConfig(**{name: value})


def test_after_the_first_step_half_the_timeout_is_enough_unless_said_otherwise():
    assert LaunchConfig().hang_seconds == (600, 300)
    assert LaunchConfig(distributed_timeout_seconds_after_init=7.5).hang_seconds == (600, 7.5)
