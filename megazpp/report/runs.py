"""Reader of run folders, the folders with the records of training runs, for the HTML report.

A folder may belong to a run that has finished, has crashed, was resumed after a restart, or is still running. The
reader notes damaged files and otherwise ignores them, as it does missing files. Only a folder that is not a run folder,
or whose metrics have an unknown format, is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Recorded data of one training run."""

    name: str  # name in the report, unique among its runs
    flags: Mapping[str, Any]  # values of the flags at the last start, by field name; {} without args.json
    rows: Sequence[Row]  # rows of metrics.jsonl in file order; after a restart the iteration may go back
    validations: Sequence[Row]  # rows of validation.jsonl
    completions: Sequence[Row]  # rows of completions.jsonl, which post-training writes
    summary: Mapping[str, Any]  # contents of summary.json; {} if no attempt of the run has finished
    topology: str  # layout and placement of the ranks; "" without topology.txt
    notes: Sequence[str]  # messages about damaged files, and about files that tell why the run ended

    @property
    def has_ended(self) -> bool:
        """True if summary.json has the results of the run's last start; False if a later start has logged rows since.

        A later start has logged rows in two cases. In the first, the last row of metrics.jsonl has a higher iteration
        than summary.json. In the second, the last row has a lower iteration, although an earlier row has at least the
        iteration of summary.json: the later start has gone back. If all rows have lower iterations, no later start is
        assumed, because the last rows of the finished run were probably lost, for instance on a full disk.
        """
        end, iterations = number(self.summary.get("iteration"), 0), [row["iteration"] for row in self.rows]
        resumed = bool(iterations) and (iterations[-1] > end or iterations[-1] < end <= max(iterations))
        return bool(self.summary) and not resumed

    @property
    def state(self) -> str:
        """State of the run in a few words for the report, for instance "finished"."""
        if not self.rows and not self.summary:
            return "no log line yet"
        if not self.has_ended:
            return "still running, or it crashed"
        reason = self.summary.get("stop_reason")
        return f"stopped by {reason}" if reason else "finished"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the recorded data of several runs, one per run folder. A folder that is given twice is read once.

    The name of a run is the end of its folder's path, with as many parts as needed to make all names different.

    Raises:
        ValueError: a path is not a run folder, or its metrics have an unknown format.
    """
    folders = list(dict.fromkeys(path.expanduser().resolve() for path in paths))
    names, length = [folder.name for folder in folders], 1
    while len(set(names)) < len(names):
        length += 1
        names = ["/".join(folder.parts[-length:]) for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Return the recorded data of one run.

    Args:
        folder: run folder.
        name: name of the run in the report.

    Raises:
        ValueError: the folder is not a run folder, or its metrics have an unknown format.
    """
    metrics = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give run folders, whose paths pretrain_gpt.py prints at its end")
    if not metrics.is_file() and not (folder / "args.json").is_file():
        raise ValueError(f"{folder} is not a run folder: it has neither metrics.jsonl nor args.json")
    notes: list[str] = []
    rows, validations = (_rows(folder / f"{file}.jsonl", notes) for file in ("metrics", "validation"))
    endings = sorted(path.name for pattern in ("hang-*.txt", "not-finite-*.json") for path in folder.glob(pattern))
    notes += [f"{ending} tells why the run ended once" for ending in endings]
    topology = folder / "topology.txt"
    return Run(
        name=name,
        flags=_object(folder / "args.json", notes),
        rows=rows,
        validations=validations,
        completions=_rows(folder / "completions.jsonl", notes),
        summary=_object(folder / "summary.json", notes),
        topology=topology.read_text(encoding="utf-8", errors="replace") if topology.is_file() else "",
        notes=notes,
    )


def number(value: Any, default: float | None = None) -> Any:
    """Return a recorded value if it is a number (NaN and infinity included, bool excluded), otherwise `default`."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _rows(file: Path, notes: list[str]) -> list[Row]:
    """Return the lines of a run's .jsonl file that are JSON objects with an iteration; [] if the file does not exist.

    Args:
        file: path of the .jsonl file.
        notes: list of messages for the report, to which a message about ignored lines is appended.

    Raises:
        ValueError: the file has lines, but none of them is such an object or the beginning of an object.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines = [line for line in text.split("\n") if line.strip()]
    rows = [row for row in map(_parsed, lines) if isinstance(row, dict) and isinstance(row.get("iteration"), int)]
    if not rows and not all(line.startswith("{") for line in lines):
        raise ValueError(f"{file}: no line is a JSON object with an iteration, so it is not the file of a run")
    for row in rows:
        if row.get("lm_loss", 0.0) is None:  # the run writes null for a loss that is not finite
            row["lm_loss"] = math.nan
    if bad := len(lines) - len(rows):
        notes.append(f"{file.name}: {bad} line(s) are cut or damaged and were ignored")
    return rows


def _object(file: Path, notes: list[str]) -> Mapping[str, Any]:
    """Return the JSON object in a run's .json file; {} if the file does not exist or is damaged.

    A message about a damaged file is appended to `notes`.
    """
    if not file.is_file():
        return {}
    content = _parsed(file.read_text(encoding="utf-8", errors="replace"))
    if isinstance(content, dict):
        return content
    notes.append(f"{file.name} is damaged and was ignored")
    return {}


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not JSON. Integers of 19 or more digits become infinite."""
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else math.inf)
    except (ValueError, RecursionError):
        return None
