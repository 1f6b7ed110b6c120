"""The batch script on a Slurm of one machine: saved before the limit, requeued, continued."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.fork_python import forked_python
from helpers.program import LAUNCHER_VARIABLES, ROOT

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tools" / "slurm" / "pretrain.sbatch"
SECONDS = 120
# fmt: off
TOY = [
    "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "32",
    "--max-position-embeddings", "32", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256",
    "--lr", "1e-3", "--micro-batch-size", "2", "--log-interval", "1", "--eval-iters", "0",
]
# fmt: on
# Slurm's commands as far as the script uses them: srun starts two tasks with the variables that Slurm gives them, notes
# their process ids beside itself and returns the highest exit code; scontrol notes what is requeued.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
from pathlib import Path

command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
tasks = []
for rank in "01":
    place = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2"}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **place}}))
file = Path(__file__).with_name("tasks.new")
file.write_text(" ".join(str(task.pid) for task in tasks))
file.rename(file.with_suffix(".txt"))
sys.exit(max(task.wait() & 0xFF for task in tasks))
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") echo 127.0.0.1 ;;
requeue*) echo "$2" >> "$(dirname "$0")/requeued.txt" ;;
*) exit 1 ;;
esac
"""
BATCH = {  # what Slurm sets for a batch script on one node, which is a task, too
    "SLURM_JOB_NAME": "toy",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_PROCID": "0",
}


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


class Job:
    """A submission of the script; its output goes to a file, as Slurm's does."""

    def __init__(self, home: Path, *flags: str, job_id: int, restarts: int = 3, python: str = sys.executable) -> None:
        self.bin, self.out = home / "bin", home / f"slurm-{job_id}.out"
        (self.bin / "tasks.txt").unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        env |= BATCH | {"SLURM_JOB_ID": str(job_id), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"PATH": f"{self.bin}:{Path(python).parent}:/usr/bin:/bin", "XDG_CACHE_HOME": str(home / "cache")}
        env |= {"RUN_DIR": str(home / "run"), "MAX_RESTARTS": str(restarts)}
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), *flags], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def signal_tasks_after(self, text: str) -> None:
        deadline = time.monotonic() + SECONDS
        while text not in self.out.read_text():
            assert self.process.poll() is None, self.out.read_text()
            assert time.monotonic() < deadline, self.out.read_text()
            time.sleep(0.05)
        for task in (self.bin / "tasks.txt").read_text().split():
            os.kill(int(task), signal.SIGUSR1)

    def finish(self) -> tuple[int, str]:
        code = self.process.wait(timeout=SECONDS)
        return code, self.out.read_text()


def test_at_the_time_limit_the_run_is_saved_and_requeued_and_the_next_submission_finishes_it(home):
    first = Job(home, *TOY, "--train-iters", "100000", job_id=7)
    first.signal_tasks_after(" iteration        3/")
    code, output = first.finish()
    assert code == 0, output
    assert "using world size: 2, data-parallel size: 2" in output
    assert "job 7 is requeued" in output
    assert (home / "bin" / "requeued.txt").read_text() == "7\n"
    done = int((home / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert done >= 3
    assert json.loads((home / "run/summary.json").read_text())["stop_reason"] == "SIGUSR1"

    flags = [*TOY, "--train-iters", "100000", "--exit-interval", str(done + 2)]
    code, output = Job(home, *flags, job_id=8, python=str(forked_python())).finish()
    assert code == 0, output
    iterations = [int(n) for n in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)]
    assert iterations == [done + 1, done + 2]
    assert "requeued" not in output
    assert (home / "bin" / "requeued.txt").read_text() == "7\n"


def test_what_the_user_has_to_mend_is_not_tried_again(home):
    flags = [*TOY, "--train-iters", "4", "--hidden-size", "17"]
    code, output = Job(home, *flags, job_id=9, python=str(forked_python())).finish()
    assert code == 2
    assert output.count("pretrain_gpt.py: error: ") == 1
    assert output.endswith("a wrong flag or file, see above; not tried again\n")


def test_a_run_that_fails_again_and_again_is_given_up(home):
    (home / "bin" / "srun").write_text("#!/bin/sh\necho started\nexit 3\n")
    code, output = Job(home, *TOY, job_id=10, restarts=2).finish()
    assert code == 3
    assert output.count("started\n") == 3
    assert output.endswith("failed 3 times, the last time with exit code 3\n")
