"""The groups of an elastic run, from the coordinator's rounds.jsonl: a strip of versions and a row of a table for each.

A row of the file is a version. Its "groups" are the contributions that it has merged, and "sent_bytes" has an entry for
each group that took part.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megazpp.base.program import MEGA
from megazpp.report.contents import Table

Row = dict[str, Any]
STATES = {
    "whole": "whole interval",
    "part": "called early",
    "late": "merged late",
    "idle": "nothing merged",
    "out": "not in the run",
}  # states of a group in a version, with their names; page.css has a color for each


def read_rounds(file: Path) -> list[Row]:
    """Return the rows of rounds.jsonl, without damaged lines.

    Raises:
        ValueError: no line is a row of this file.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"--rounds {file} cannot be read: {error.strerror}") from error
    rows = [row for row in map(_row, lines) if row is not None]
    if not rows:
        raise ValueError(
            f"--rounds {file}: no line is about a version; give FOLDER/rounds.jsonl of tools/coordinate.py"
        )
    return rows


def states(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the state of each group in each version, by the names of `STATES`."""
    names = sorted({name for row in rows for name in (*row["sent_bytes"], *(g["group"] for g in row["groups"]))})
    found: dict[str, list[str]] = {name: [] for name in names}
    for row in rows:
        most = max((group["steps"] for group in row["groups"]), default=0)
        state = {name: "idle" if name in row["sent_bytes"] else "out" for name in names}
        for group in sorted(row["groups"], key=lambda group: -group["late"]):
            state[group["group"]] = "late" if group["late"] else "whole" if group["steps"] == most else "part"
        for name in names:
            found[name].append(state[name])
    return found


def groups_table(rows: Sequence[Row]) -> Table:
    """Return a table with a row for each group."""
    head = ["group", "versions", "steps", "of these late", "times out", "waiting, s", "MB sent"]
    table = [head]
    for name, of_group in states(rows).items():
        own = [group for row in rows for group in row["groups"] if group["group"] == name]
        steps, late = (sum(g["steps"] for g in own if g["late"] >= least) for least in (0, 1))
        outs = sum(a != "out" and b == "out" for a, b in itertools.pairwise(of_group))
        totals = [0, *(row["sent_bytes"][name] for row in rows if name in row["sent_bytes"])]
        sent = sum(b - a if b >= a else b for a, b in itertools.pairwise(totals))  # a job that starts again begins at 0
        waited = sum(group["waited"] for group in own)
        table.append([name, str(len(own)), str(steps), str(late), str(outs), f"{waited:.1f}", f"{sent / MEGA:.3f}"])
    return table


def groups_line(rows: Sequence[Row]) -> str:
    """Return a sentence about all groups together: versions, speed, late and repeated steps."""
    groups = [group for row in rows for group in row["groups"]]
    steps, late = (sum(g["steps"] for g in groups if g["late"] >= least) for least in (0, 1))
    seconds = rows[-1]["time"] - rows[0]["time"]
    tokens = sum(group["tokens"] for row in rows[1:] for group in row["groups"])
    speed = f", {tokens / seconds:,.0f} merged tokens per second" if seconds > 0 else ""
    returned = sum(row["returned"] for row in rows)
    share = 100 * late / max(1, steps)
    return f"{len(rows)} versions{speed}; {share:.1f} % of the steps were merged late, {returned} were trained again."


def strips(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the HTML of a legend, and of a strip for each group, in which equal neighbors are one rectangle."""
    boxes = (f'<li><i class="{state}"></i>{text}</li>' for state, text in STATES.items())
    yield f'<ul class="legend strips">{"".join(boxes)}</ul>'
    for name, of_group in states(rows).items():
        parts, start = [], 0
        for state, equal in itertools.groupby(of_group):
            count = len(list(equal))
            title = f"version {rows[start]['version']} to {rows[start + count - 1]['version']}: {STATES[state]}"
            parts.append(f'<i class="{state}" style="flex:{count}" title="{title}"></i>')
            start += count
        yield f'<div class="strip"><span class="name">{escape(name)}</span><div>{"".join(parts)}</div></div>'


def _row(line: str) -> Row | None:
    """Return a line as a row; None if it is cut or damaged."""
    try:
        row = json.loads(line)
        groups = [
            {"group": str(group["group"]), **{key: float(group[key]) for key in ("tokens", "waited")}}
            | {key: int(group[key]) for key in ("steps", "late")}
            for group in row["groups"]
        ]
        numbers = {key: int(row[key]) for key in ("version", "returned")} | {"time": float(row["time"])}
        return numbers | {"groups": groups, "sent_bytes": {str(k): int(v) for k, v in row["sent_bytes"].items()}}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
