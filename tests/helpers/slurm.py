"""Slurm's commands as far as tools/slurm/pretrain.sbatch uses them, for one machine: small programs to put into PATH.

`srun` starts SLURM_NTASKS tasks with the variables that Slurm gives them, notes their process ids in tasks.txt beside
itself, and returns the highest exit code; `scontrol` knows the hosts and notes what is requeued.
"""

from __future__ import annotations

import sys
from pathlib import Path

SRUN = """#!{python}
import os, subprocess, sys
from pathlib import Path

command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
count = os.environ["SLURM_NTASKS"]
tasks = []
for rank in range(int(count)):
    place = {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": count}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **place}}))
file = Path(__file__).with_name("tasks.txt")
file.with_suffix(".new").write_text(" ".join(str(task.pid) for task in tasks))
file.with_suffix(".new").rename(file)
sys.exit(max(task.wait() & 0xFF for task in tasks))
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") echo 127.0.0.1 ;;
requeue*) echo "$2" >> "$(dirname "$0")/requeued.txt" ;;
*) exit 1 ;;
esac
"""


def install_slurm(folder: Path) -> None:
    """Write the commands into `folder`."""
    folder.mkdir()
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def batch_variables(job_id: int, *, tasks: int, name: str) -> dict[str, str]:
    """What Slurm sets for a batch script on one node."""
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NAME": name,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_PROCID": "0",  # the batch script is a task, too
    }
