"""Build a `RunContext` (mesh, device, log and run folder), for a test of one part of a training run alone."""

from pathlib import Path
from typing import Any

import torch

from megazpp.training.context import Console, RunContext, RunFolder


def context(dims: Any, folder: str | Path | None = None) -> tuple[RunContext, list[str]]:
    """Return the context of a training run on a CPU, and the list to which this rank's log lines are appended.

    Rank 0 writes the records of the run to `folder`; None writes no records.
    """
    console, lines = Console(enabled=False), list[str]()
    console.log = lambda text, *, short=None: lines.append(text)
    recorded = None if folder is None or dims.world.rank != 0 else RunFolder(folder)
    return RunContext(dims=dims, device=torch.device("cpu"), console=console, folder=recorded), lines
