"""The run context: what nearly every part of a run needs, made once when the process groups stand.

The console is what a user sees while training: log lines, and on a terminal short ones over a progress bar with the
time left. What is short there is whole in the run folder's log.txt, and where the output is no terminal.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from megazpp.parallel.dims import ParallelDims
from megazpp.training.run_folder import RunFolder


class Console:
    """Prints on one rank and is silent on the others.

    Args:
        enabled: whether this rank prints.
        out: where to; the bar is drawn, and lines are short, only if it is a terminal.
    """

    def __init__(self, *, enabled: bool, out: TextIO | None = None) -> None:
        self._enabled, self._out = enabled, out or sys.stdout
        self._bar: tqdm | None = None
        self._file: Path | None = None

    @property
    def is_terminal(self) -> bool:
        """True if somebody looks at it."""
        return self._enabled and self._out.isatty()

    def keep(self, path: Path) -> None:
        """Write all lines, whole, to the end of a file, too, for as long as it can be written to."""
        self._file = path

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines, above the bar if there is one.

        Args:
            short: what a terminal gets in their place; nothing if it is empty.
        """
        if not self._enabled:
            return
        self._append(text)
        if short is not None and self.is_terminal:
            text = short
            if not text:
                return
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def _append(self, text: str) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                print(text, file=file)
        except OSError as error:
            print(f"warning: {self._file}: {error}; it gets no more lines, and training goes on", file=self._out)
            self._file = None

    def start_bar(self, total_iterations: int, done: int) -> None:
        if self.is_terminal:
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
    """All that a part of a run may use on this rank, beside its own config.

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

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines on rank 0; `short` are those of a terminal."""
        self.console.log(text, short=short)
