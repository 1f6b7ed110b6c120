"""What a part of tools/gpu_check.py is given, and what it gives back: rows of a table, remarks, and what is wrong.

A part is a program of its own. It writes its report again after every row, so that what it had found is there whatever
ends it: a failure, the time limit, the memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megazpp.errors import end_with
from megazpp.files import write_whole

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

    @property
    def sizes(self) -> str:
        """The key of a part's table of sizes."""
        return "rehearsal" if self.rehearse else "gpu"

    def words(self) -> str:
        return json.dumps({**self._asdict(), "folder": str(self.folder)})


@dataclass
class Report:
    """What a part has found so far.

    Attributes:
        rows: of the table: heading -> cell, the same headings in each.
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
        self.rows.append({name.replace("_", " "): cell for name, cell in cells.items()})
        print("  ".join(f"{name} {cell}" for name, cell in self.rows[-1].items()), flush=True)
        self.write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)
        self.write()

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"FAILED: {text}", flush=True)
        self.write()

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def write(self) -> None:
        content = {"rows": self.rows, "notes": self.notes, "failures": self.failures}
        write_whole(self.file, json.dumps(content).encode())


def read_report(folder: Path) -> dict[str, Any]:
    """What the part that worked in `folder` has written; empty lists where it has not come to that."""
    file = folder / "report.json"
    empty: dict[str, Any] = {"rows": [], "notes": [], "failures": []}
    return json.loads(file.read_text()) if file.exists() else empty


def describe(results: dict[str, Any]) -> str:
    """Markdown: a heading, a table with remarks for each part, and which parts came to what."""
    lines = [
        f"# {results['heading']}",
        "",
        f"torch {results['torch']}, CUDA {results['cuda']}, Triton {results['triton']}, commit {results['commit']}",
    ]
    for part in results["parts"]:
        lines += ["", f"## {part['name']}: {part['title']} ({part['status']}, {part['seconds']} s)", ""]
        lines += table(part["rows"])
        lines += [f"- {note}" for note in part["notes"]]
        lines += [f"- FAILED: {failure}" for failure in part["failures"]]
    words = [f"{part['name']} {part['status']}" for part in results["parts"]]
    return "\n".join([*lines, "", ", ".join(words) or "no part has run", results["heading"]]) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One per set of headings, in the order in which they come."""
    lines: list[str] = []
    headings: list[str] | None = None
    for row in rows:
        if list(row) != headings:
            headings = list(row)
            lines += [*([""] if lines else []), f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        lines.append(f"| {' | '.join(str(cell) for cell in row.values())} |")
    return [*lines, ""] if lines else []


def run_part(body: Callable[[Task, Report], None]) -> int:
    """Do the task on the command line; returns the exit code."""
    fields = json.loads(sys.argv[1])
    task = Task(**{**fields, "folder": Path(fields["folder"])})
    report = Report(task.folder / "report.json")
    report.write()
    try:
        body(task, report)
    except Exception as error:
        traceback.print_exc()
        report.fail(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
    return 1 if report.failures else 0


def start(command: list[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program that writes to `log` and that the kernel ends when we are gone."""
    launcher = os.getpid()
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=os.environ | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with(launcher),
        )


def tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log that say something."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([line for line in text if line.strip()][-lines:])
