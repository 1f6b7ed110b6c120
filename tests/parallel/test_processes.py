"""Test that workers are started, watched and restarted, and that no process remains, however a job ends."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers.fork_python import forked_python
from helpers.program import Program, run_forked, run_program

pytestmark = pytest.mark.slow

JOB = str(Path(__file__).parents[1] / "helpers" / "job.py")
KILLED, OVER = "rank {} was killed by SIGKILL; ", "the job is over"
ENDED = f"rank ? ended with exit code 1; {OVER}"


@pytest.mark.parametrize(
    ("args", "code", "lines"),
    [
        ("nothing 2", 0, []),
        ("nothing 1", 0, ["sum 1"]),  # one rank runs in the first process, without a launcher
        ("kill-on-0 2 1", 1, [KILLED.format(0) + "restart 1 of 1", KILLED.format(0) + OVER]),
        ("user-error 2 5", 2, ["job.py: error: --flag 3 is wrong", "job.py: error: --other 4 too"]),
        ("agreed 2", 1, ["job.py: error: all ranks have found the same", "job.py: error: and say so once", ENDED]),
    ],
)
def test_job_ends_with_its_exit_code_and_one_reason(tmp_path, args, code, lines):
    """A killed rank is named without tracebacks of other ranks, and a user's error is not tried again."""
    program = Program(JOB, *args.split(), folder=tmp_path, python=str(forked_python()))
    output = program.finish()
    assert program.process.returncode == code
    # the other rank may print "sum 2" before or after the error
    found = [line for line in output.splitlines() if line != "sum 2"]
    assert [re.sub("^rank . ended", "rank ? ended", line) for line in found] == lines
    assert ("sum 2" in output) == (args != "nothing 1")
    assert program.left_behind() == program.scratch_files() == []


def test_exception_on_one_rank_ends_all_with_one_traceback(tmp_path):
    program = Program(JOB, "raise-on-1", "2", folder=tmp_path, python=str(forked_python()))
    program.wait_for("sum 2\n")
    assert program.all_end()
    output = program.finish()
    assert program.scratch_files() == []
    assert program.process.returncode == 1
    assert output.count("Traceback") == 1
    assert "rank 1 failed:\nTraceback" in output
    assert "RuntimeError: injected" in output
    assert output.splitlines()[-1] == "rank 1 ended with exit code 1; the job is over"


def test_torchrun_alone_starts_the_workers(tmp_path):
    python = str(forked_python())
    runner = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", python)
    code, output = run_forked(*runner, JOB, "nothing", "0", folder=tmp_path)
    assert code == 0
    assert output.count("sum 2\n") == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_launcher_leaves_no_process(tmp_path, signum):
    """When the launcher gets the signal, one rank sleeps, and the other one waits for it in a collective."""
    program = Program(JOB, "sleep-on-1", "2", folder=tmp_path)
    program.wait_for("sum 2\n")
    assert len(program.left_behind()) == 3
    program.process.send_signal(signum)
    assert program.all_end()
    output = program.finish()
    assert "Traceback" not in output
    if signum == signal.SIGKILL:
        assert program.process.returncode == -signum
    else:
        assert program.process.returncode == 128 + signum
        assert program.scratch_files() == []
        assert output.splitlines()[-1] == f"ended by {signum.name}"


def test_ctrl_c_during_worker_start_leaves_no_process_or_traceback(tmp_path):
    program = Program(JOB, "sleep-on-1", "2", folder=tmp_path)
    program.wait_until(lambda: len(program.left_behind()) >= 3)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.all_end()
    # On loaded cores the signal may arrive after the first collective
    assert program.finish().replace("sum 2\n", "").split() == ["ended", "by", "SIGINT"]
    assert program.process.returncode == 130


FORKED = """
import os, secrets, signal, sys, threading
import torch
from megazpp.parallel import launch
from megazpp.base.program import leave

made_once, launcher = secrets.token_hex(), os.getpid()

def main():
    if "RANK" not in os.environ:
        print("printed once, by the launcher")
        ends = threading.Event()
        other = threading.Thread(target=ends.wait)
        other.start()
        print("forks beside threads:", launch.can_fork())
        ends.set()
        other.join()
        return launch.launch_workers(main, 2)
    handlers = [signal.getsignal(number) == signal.SIG_DFL for number in launch.STOP_SIGNALS[1:]]
    handlers.append(signal.getsignal(signal.SIGINT) == signal.default_int_handler)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    alone = (os.getsid(0) == os.getpid() != launcher == os.getppid())
    print(made_once, os.environ["RANK"], torch.get_num_threads(), all(handlers), blocked == {signal.SIGINT}, alone)
    return 3 if os.environ["RANK"] == "1" else 0

print(made_once)
leave(main())
"""


def test_workers_are_forks_that_look_like_new_processes(tmp_path, monkeypatch):
    """Forked workers have what the launcher imported, but their own session, signals, threads and exit code."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    (tmp_path / "forked.py").write_text(FORKED)
    code, output = run_program(str(tmp_path / "forked.py"), folder=tmp_path)
    lines = output.splitlines()
    assert code == 1, output
    assert sorted(line for line in lines if line.startswith(f"{lines[0]} ")) == [
        f"{lines[0]} {rank} {threads} True True True" for rank in range(2)
    ]
    assert lines.count("printed once, by the launcher") == 1
    assert "rank 1 ended with exit code 3; the job is over" in lines
    assert "forks beside threads: False" in lines
