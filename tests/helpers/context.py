"""A run context for testing one part of a run alone."""

from pathlib import Path
from typing import Any

import torch

from megazpp.training.context import Console, RunContext, RunFolder


def context(dims: Any, folder: str | Path | None = None) -> tuple[RunContext, list[str]]:
    """Return the context of a CPU run, which rank 0 records in `folder`, and the lines logged on this rank."""
    console, lines = Console(enabled=False), list[str]()
    console.log = lambda text, *, short=None: lines.append(text)
    recorded = None if folder is None or dims.world.rank != 0 else RunFolder(folder)
    return RunContext(dims=dims, device=torch.device("cpu"), console=console, folder=recorded), lines
