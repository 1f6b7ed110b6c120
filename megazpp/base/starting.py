"""The first words of a program, before torch is imported; nothing here needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import megazpp


def announce(*names: str) -> None:
    """Say on a terminal that the program starts, where it is one of `names` and no worker."""
    if Path(sys.argv[0]).name in names and int(os.environ.get("RANK", "0")) == 0 and not is_worker():
        say(f"MegaZ++ {megazpp.__version__} starts: importing torch")


def is_worker() -> bool:
    """True if a launcher of ours has started this process."""
    return "MEGAZPP_LAUNCHER_PID" in os.environ


def say(text: str) -> None:
    """Print a line about the start, if somebody waits at a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
