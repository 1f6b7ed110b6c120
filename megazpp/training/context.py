"""The run context: what nearly every part of a run needs, made once when the process groups stand.

The console is what a user sees while training: log lines, and on a terminal a progress bar with the time left below.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

import torch
from tqdm import tqdm

from megazpp.parallel.dims import ParallelDims
from megazpp.training.run_folder import RunFolder


class Console:
    """Prints on one rank and is silent on the others.

    Args:
        enabled: whether this rank prints.
        out: where to; the bar is drawn only if it is a terminal.
    """

    def __init__(self, *, enabled: bool, out: TextIO | None = None) -> None:
        self._enabled, self._out = enabled, out or sys.stdout
        self._bar: tqdm | None = None

    def log(self, text: str) -> None:
        """Print lines, above the bar if there is one."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def start_bar(self, total_iterations: int, done: int) -> None:
        if self._enabled and self._out.isatty():
            self._bar = tqdm(total=total_iterations, initial=done, file=self._out, unit="step", dynamic_ncols=True)

    def advance(self, loss: float) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a part of a run may use on this rank, beside its own config.

    Attributes:
        dims: the axes of the cluster, and the timeline and the traffic counter that they feed.
        device: what this rank computes on.
        console: prints on rank 0 and is silent on the others.
        folder: where rank 0 keeps the run's records; None on the other ranks.
    """

    dims: ParallelDims
    device: torch.device
    console: Console
    folder: RunFolder | None = None

    def log(self, text: str) -> None:
        """Print lines on rank 0."""
        self.console.log(text)
