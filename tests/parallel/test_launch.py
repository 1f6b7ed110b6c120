"""Who starts the workers, and that nothing is left of them, however a job ends.

Seconds are limits for a loaded machine; measured on two cores: every way out takes less than one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.program import Program, run_program

from megazpp.parallel.launch import LAUNCHER_PID, LaunchConfig, Place, find_place

JOB = str(Path(__file__).parents[1] / "helpers" / "job.py")
SECONDS = 10


def place(nproc: int | None = None, **env: str) -> Place:
    return find_place(LaunchConfig(nproc=nproc), env)


def test_without_a_launcher_the_program_starts_the_workers_it_is_asked_for():
    assert place(3) == Place(started=False, world_size=3)


def test_a_single_worker_is_this_process():
    assert place(1) == Place(started=True, world_size=1)


def test_the_default_is_a_worker_per_gpu_or_four_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert place().world_size == 4
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


@pytest.mark.parametrize("repetition", range(3))
def test_a_job_that_ends_well_exits_with_0(tmp_path: Path, repetition: int):
    program = Program(JOB, "nothing", "2", folder=tmp_path)
    assert program.finish() == "sum 2\n"
    assert program.process.returncode == 0
    assert program.scratch_files() == []


def test_a_single_worker_needs_no_launcher(tmp_path: Path):
    assert run_program(JOB, "nothing", "1", folder=tmp_path) == (0, "sum 1\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_all_with_its_traceback_shown_once(tmp_path: Path, rank: int):
    program = Program(JOB, f"raise-on-{rank}", "2", folder=tmp_path)
    program.wait_for("sum 2\n")
    assert program.seconds_until_all_are_gone(SECONDS) < SECONDS
    output = program.finish()
    assert program.scratch_files() == []
    assert program.process.returncode == 1
    assert output.count("Traceback") == 1
    assert f"rank {rank} failed:\nTraceback" in output
    assert "RuntimeError: injected" in output
    assert output.splitlines()[-1] == f"rank {rank} ended with exit code 1; the job is over"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_is_named_without_a_traceback_of_the_others(tmp_path: Path, rank: int):
    program = Program(JOB, f"kill-on-{rank}", "2", folder=tmp_path)
    program.wait_for("sum 2\n")
    assert program.seconds_until_all_are_gone(SECONDS) < SECONDS
    assert program.finish() == f"sum 2\nrank {rank} was killed by SIGKILL; the job is over\n"
    assert program.process.returncode == 1


def test_what_the_user_can_mend_is_shown_once_as_lines(tmp_path: Path):
    code, output = run_program(JOB, "user-error", "2", folder=tmp_path)
    assert code == 2
    assert output == "sum 2\njob.py: error: --flag 3 is wrong\njob.py: error: --other 4 too\n"


def test_torchrun_starts_the_workers_and_nothing_else_does(tmp_path: Path):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, "nothing", "0")
    code, output = run_program(*command, folder=tmp_path)
    assert code == 0
    assert output.count("sum 2\n") == 1


@pytest.mark.parametrize(
    ("signum", "whole_group", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGKILL, False, -9),
    ],
)
def test_a_signal_to_the_launcher_leaves_no_process(tmp_path: Path, signum: int, whole_group: bool, code: int):
    """One rank is busy, the other waits for it in a collective."""
    program = Program(JOB, "sleep-on-1", "2", folder=tmp_path)
    program.wait_for("sum 2\n")
    assert len(program.left_behind()) == 3
    (os.killpg if whole_group else os.kill)(program.process.pid, signum)
    assert program.seconds_until_all_are_gone(SECONDS) < SECONDS
    output = program.finish()
    assert program.process.returncode == code
    assert "Traceback" not in output
    if code > 0:
        assert program.scratch_files() == []
        assert output.splitlines()[-1] == f"ended by {signal.Signals(signum).name}"


def test_ctrl_c_while_the_workers_are_starting_leaves_no_process_and_no_traceback(tmp_path: Path):
    program = Program(JOB, "sleep-on-1", "2", folder=tmp_path)
    while len(program.left_behind()) < 3:
        assert program.process.poll() is None, program.output()
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.seconds_until_all_are_gone(SECONDS) < SECONDS
    assert program.finish().split() == ["ended", "by", "SIGINT"]
    assert program.process.returncode == 130
