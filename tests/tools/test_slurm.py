"""Test the Slurm batch script with fake Slurm commands on one machine.

The job saves before the time limit, is requeued, and resumes.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from helpers.fork_python import forked_python
from helpers.pretrain import TOY
from helpers.program import Program

pytestmark = pytest.mark.slow

# Fakes of the Slurm commands that the batch script uses. srun starts two tasks with Slurm's variables, writes their
# process ids and returns the last nonzero exit code. scontrol writes the requeued job.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NUM_TASKS=2 "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" > "$(dirname "$0")/tasks.txt"
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
requeue*) echo "$2" >> "$(dirname "$0")/requeued.txt" ;;
*) exit 1 ;;
esac
"""
# Number of the first job. The ranks' port follows from it, so test runs at the same time on one machine need their own
JOB = os.getpid() % 12000
# variables that Slurm sets for a batch script; SLURM_PROCID alone would make the script look like a task of srun
BATCH = (
    "SLURM_JOB_NAME=toy SLURM_JOB_NODELIST=localhost SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 "
    "SLURM_CPUS_PER_TASK=1 SLURM_PROCID=0"
)


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Return a function that starts tools/slurm/pretrain.sbatch as the Slurm job `job_id`.

    The fake Slurm commands are in PATH.
    """
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for setting in (*BATCH.split(), f"RUN_DIR={tmp_path}/run", f"XDG_CACHE_HOME={tmp_path}/cache"):
        monkeypatch.setenv(*setting.split("=", 1))

    def start(*flags: str, job_id: int, python: object) -> Program:
        monkeypatch.setenv("SLURM_JOB_ID", str(job_id))
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(str(python)).parent}:/usr/bin:/bin")
        return Program("tools/slurm/pretrain.sbatch", *TOY, "--eval-iters", "0", *flags, folder=tmp_path, python="bash")

    return start


def test_run_is_saved_and_requeued_at_the_time_limit_and_then_resumed(submit, tmp_path):
    first = submit("--train-iters", "3000", job_id=JOB, python=forked_python())
    first.wait_for(" iteration        3/")
    for task in (tmp_path / "bin/tasks.txt").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    output = first.finish()
    assert first.process.returncode == 0, output
    assert "using world size: 2, data-parallel size: 2" in output
    assert f"job {JOB} is requeued" in output
    assert (tmp_path / "bin/requeued.txt").read_text() == f"{JOB}\n"
    done = int((tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert done >= 3
    assert json.loads((tmp_path / "run/summary.json").read_text())["stop_reason"] == "SIGUSR1"

    last = ["--train-iters", "3000", "--exit-interval", str(done + 2)]
    second = submit(*last, job_id=JOB + 1, python=forked_python())
    output = second.finish()
    assert second.process.returncode == 0, output
    assert [int(n) for n in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)] == [done + 1, done + 2]
    assert "is requeued" not in output
    assert (tmp_path / "bin/requeued.txt").read_text() == f"{JOB}\n"


def test_user_error_is_not_retried(submit):
    job = submit("--train-iters", "4", "--hidden-size", "17", job_id=9, python=forked_python())
    output = job.finish()
    assert job.process.returncode == 2
    assert output.count("pretrain_gpt.py: error: ") == 1
    assert output.endswith("a wrong flag or file, see above; not tried again\n")


def test_run_that_keeps_failing_is_given_up(submit, tmp_path, monkeypatch):
    (tmp_path / "bin/srun").write_text("#!/bin/sh\necho started\nexit 3\n")
    monkeypatch.setenv("MAX_RESTARTS", "2")
    job = submit(job_id=10, python=sys.executable)
    output = job.finish()
    assert job.process.returncode == 3
    assert output.count("started\n") == 3
    assert output.endswith("failed 3 times, the last time with exit code 3\n")
