"""A part of tools/gpu_check.py: what it is given, what it gives back, and how it runs.

A part is a module whose `measure(task, report)` runs in a process of its own. The report is written again after every
row, so that what it had found is there whatever ends it: a failure, the time limit, the memory.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megazpp.errors import end_with
from megazpp.files import write_whole

T = TypeVar("T")
Cell = str | int | float


class Task(NamedTuple):
    """What a part is asked for.

    Attributes:
        folder: for its files; report.json is there.
        rehearse: there is no GPU: toy sizes, on the CPU.
        seconds: of the time limit.
        corpus: a file of text; None: the one that ships with the program.
    """

    folder: Path
    rehearse: bool
    seconds: float
    corpus: str | None

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def size(self, on_gpu: T, toy: T) -> T:
        """Whichever of the two this run is to have."""
        return toy if self.rehearse else on_gpu


@dataclass
class Report:
    """What a part has found so far.

    Attributes:
        rows: of the table: heading -> cell.
        notes: sentences below it.
        failures: what is not as it must be; goals of speed that are missed belong into rows.
    """

    file: Path
    rows: list[dict[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def row(self, **cells: Cell) -> None:
        """One more row; a heading's underscores are spaces."""
        row = {name.replace("_", " "): cell for name, cell in cells.items()}
        self._add(self.rows, row, "  ".join(f"{name} {cell}" for name, cell in row.items()))

    def note(self, text: str) -> None:
        self._add(self.notes, text, text)

    def fail(self, text: str) -> None:
        self._add(self.failures, text, f"FAILED: {text}")

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def _add(self, found: list[Any], item: Any, line: str) -> None:
        found.append(item)
        print(line, flush=True)
        content = {"rows": self.rows, "notes": self.notes, "failures": self.failures}
        write_whole(self.file, json.dumps(content).encode())


def run_part(module: str, words: str) -> int:
    """Do the task `words` (a Task as JSON) by a module's `measure`; returns the exit code."""
    fields = json.loads(words)
    task = Task(**fields | {"folder": Path(fields["folder"])})
    report = Report(task.folder / "report.json")
    try:
        importlib.import_module(module).measure(task, report)
    except Exception as error:
        traceback.print_exc()
        report.fail(f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")
    return 1 if report.failures else 0


def start(command: list[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program that writes to `log` and that the kernel ends when we are gone."""
    launcher = os.getpid()
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with(launcher),
        )


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(text) if line.strip()), "")
