"""A run context for a part that is tested alone."""

from pathlib import Path
from typing import Any

import torch

from megazpp.training.context import Console, RunContext, RunFolder


class Kept(Console):
    """Keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.lines: list[str] = []

    def log(self, text: str, *, short: str | None = None) -> None:
        self.lines.append(text)


def context(dims: Any, folder: str | Path | None = None) -> tuple[RunContext, list[str]]:
    """A run on the CPU that is recorded in `folder` by rank 0, and the lines that it logs on this rank."""
    console, mine = Kept(), folder is not None and dims.world.rank == 0
    run_folder = RunFolder(folder) if folder is not None and mine else None
    return RunContext(dims=dims, device=torch.device("cpu"), console=console, folder=run_folder), console.lines
