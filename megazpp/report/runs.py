"""Reading a run folder (training/context.py) as it is: of a run that ended well, crashed, went on after a
restart, or is being written at this moment. Only a folder that is none is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazpp.topology.layout import Layout, layout_from_record

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run."""

    name: str  # tells it from the others of a report
    flags: Mapping[str, Any]  # the last start's; {} where there is no args.json
    rows: Sequence[Row]  # of metrics.jsonl, in the order of the file: iterations go back where a restart went back
    validations: Sequence[Row]  # of validation.jsonl
    completions: Sequence[Row]  # of completions.jsonl, where a post-training has drawn some
    summary: Mapping[str, Any]  # {} unless a process of this run has come to its end
    layout: Layout | None  # None where it was not recorded
    notes: Sequence[str]  # on files that are damaged, or say what ended the run

    @property
    def state(self) -> str:
        """The state of the run, in a few words."""
        if not self.rows and not self.summary:
            return "no log line yet"
        if not self.summary or (self.rows and number(self.summary.get("iteration"), 0) < self.rows[-1]["iteration"]):
            return "still running, or it crashed"
        reason = self.summary.get("stop_reason")
        return f"stopped by {reason}" if reason else "finished"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Every folder once; names are the last parts of the paths, as many as it takes for all to differ.

    Raises:
        ValueError: a path is no run folder, or its metrics are not what a run writes.
    """
    folders = list(dict.fromkeys(path.expanduser().resolve() for path in paths))
    names, length = [folder.name for folder in folders], 1
    while len(set(names)) < len(names):
        length += 1
        names = ["/".join(folder.parts[-length:]) for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Read one folder; see `read_runs`."""
    metrics = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the run folders that pretrain_gpt.py names at its end")
    if not metrics.is_file() and not (folder / "args.json").is_file():
        raise ValueError(f"{folder} is no run folder: it has neither metrics.jsonl nor args.json")
    notes: list[str] = []
    rows, validations = (_rows(folder / f"{file}.jsonl", notes) for file in ("metrics", "validation"))
    endings = sorted(path.name for pattern in ("hang-*.txt", "not-finite-*.json") for path in folder.glob(pattern))
    notes += [f"{ending} says what ended it at one time" for ending in endings]
    topology, layout = _object(folder / "topology.json", notes), None
    try:
        layout = layout_from_record(topology) if topology else None
    except ValueError as error:
        notes.append(f"topology.json is left out: {error}")
    return Run(
        name=name,
        flags=_object(folder / "args.json", notes),
        rows=rows,
        validations=validations,
        completions=_rows(folder / "completions.jsonl", notes),
        summary=_object(folder / "summary.json", notes),
        layout=layout,
        notes=notes,
    )


def number(value: Any, default: float | None = None) -> Any:
    """`value` if it is a number (NaN and infinities are), else `default`."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _rows(file: Path, notes: list[str]) -> list[Row]:
    """The objects of a .jsonl file that have an iteration; other lines are counted in a note.

    Raises:
        ValueError: it has lines, and none of them is one or the beginning of one.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines = [line for line in text.split("\n") if line.strip()]
    rows = [row for row in map(_parsed, lines) if isinstance(row, dict) and isinstance(row.get("iteration"), int)]
    if not rows and not all(line.startswith("{") for line in lines):
        raise ValueError(f"{file}: no line is a JSON object with an iteration: not what a run writes")
    if bad := len(lines) - len(rows):
        notes.append(f"{file.name}: {bad} line(s) cut or damaged, which are left out")
    return rows


def _object(file: Path, notes: list[str]) -> Mapping[str, Any]:
    """The object of a .json file; {}, with a note, if it is damaged, and without if there is none."""
    if not file.is_file():
        return {}
    content = _parsed(file.read_text(encoding="utf-8", errors="replace"))
    if isinstance(content, dict):
        return content
    notes.append(f"{file.name} is damaged and left out")
    return {}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
