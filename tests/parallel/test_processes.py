"""Workers that are started, watched, and started again; nothing is left of them, however a job ends.

Seconds are limits for a loaded machine; measured on two cores: every way out takes less than one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.program import Program, run_program
from helpers.tiers import slow

JOB = str(Path(__file__).parents[1] / "helpers" / "job.py")
SECONDS = 10


@pytest.mark.slow
def test_a_job_that_ends_well_exits_with_0(tmp_path: Path):
    program = Program(JOB, "nothing", "2", folder=tmp_path)
    assert program.finish() == "sum 2\n"
    assert program.process.returncode == 0
    assert program.scratch_files() == []


@pytest.mark.slow
def test_a_single_worker_needs_no_launcher(tmp_path: Path):
    assert run_program(JOB, "nothing", "1", folder=tmp_path) == (0, "sum 1\n")


@pytest.mark.parametrize("rank", [slow(0), 1])
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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_is_named_without_a_traceback_of_the_others(tmp_path: Path, rank: int):
    program = Program(JOB, f"kill-on-{rank}", "2", folder=tmp_path)
    program.wait_for("sum 2\n")
    assert program.seconds_until_all_are_gone(SECONDS) < SECONDS
    assert program.finish() == f"sum 2\nrank {rank} was killed by SIGKILL; the job is over\n"
    assert program.process.returncode == 1


@pytest.mark.slow
def test_what_the_user_can_fix_is_shown_once_as_lines_and_not_tried_again(tmp_path: Path):
    code, output = run_program(JOB, "user-error", "2", "5", folder=tmp_path)
    assert code == 2
    lines = [line for line in output.splitlines() if line != "sum 2"]  # which another rank may say later
    assert lines == ["job.py: error: --flag 3 is wrong", "job.py: error: --other 4 too"]


@pytest.mark.slow
def test_what_all_ranks_have_found_together_is_said_once_without_a_traceback(tmp_path: Path):
    code, output = run_program(JOB, "agreed", "2", folder=tmp_path)
    assert code == 1
    *lines, last = [line for line in output.splitlines() if line != "sum 2"]  # which another rank may say later
    assert lines == ["job.py: error: all ranks have found the same", "job.py: error: and say so once"]
    assert last.endswith("ended with exit code 1; the job is over")


@pytest.mark.slow
def test_torchrun_starts_the_workers_and_nothing_else_does(tmp_path: Path):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, "nothing", "0")
    code, output = run_program(*command, folder=tmp_path)
    assert code == 0
    assert output.count("sum 2\n") == 1


@pytest.mark.slow
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


@pytest.mark.slow
def test_ctrl_c_while_the_workers_are_starting_leaves_no_process_and_no_traceback(tmp_path: Path):
    program = Program(JOB, "sleep-on-1", "2", folder=tmp_path)
    while len(program.left_behind()) < 3:
        assert program.process.poll() is None, program.output()
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.seconds_until_all_are_gone(SECONDS) < SECONDS
    assert program.finish().split() == ["ended", "by", "SIGINT"]
    assert program.process.returncode == 130


@pytest.mark.slow
def test_restarts_are_counted_and_the_last_failure_ends_the_job(tmp_path: Path):
    code, output = run_program(JOB, "kill-on-0", "2", "1", folder=tmp_path)
    assert code == 1
    assert output.splitlines()[1::2] == [
        "rank 0 was killed by SIGKILL; restart 1 of 1",
        "rank 0 was killed by SIGKILL; the job is over",
    ]
