"""The first words of a program, before torch is imported; nothing here needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import megazpp

LAUNCHER_PID = "MEGAZPP_LAUNCHER_PID"  # set for the workers that we start


def announce(*names: str) -> None:
    """Say on a terminal that the program starts, where it is one of `names` and no worker of ours."""
    if Path(sys.argv[0]).name in names and launched_rank() == 0 and LAUNCHER_PID not in os.environ:
        say(f"MegaZ++ {megazpp.__version__} starts: importing torch")


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """This process's rank as torchrun's or srun's environment has it, so that one process speaks; 0 if unclear."""
    if "RANK" in env:
        return int(env["RANK"])
    return int(env["SLURM_PROCID"]) if "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env else 0


def say(text: str) -> None:
    """Print a line about the start, if somebody waits at a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
