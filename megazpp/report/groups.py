"""The report's section on the replica groups of an elastic DiLoCo run, from the coordinator's rounds.jsonl.

Each row of the file describes a version of the outer weights. "groups" lists the contributions of groups that the
version has merged. A group trains a contribution from the weights of an earlier version. The number "late" counts the
outer steps of the same fragment between that version and the version that has merged the contribution. If the number
is above 0, the contribution is late. "sent_bytes" has an entry for each group that takes part in the run at this
version. The report shows each group as a strip, which has the group's state at each version (`STATES`), and as a row
of a table.
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
}  # states of a replica group in a version, with the names that the report shows; page.css has a color for each state


def read_rounds(file: Path) -> list[Row]:
    """Return the rows of the coordinator's rounds.jsonl, one per version, without damaged lines.

    Raises:
        ValueError: the file cannot be read, or none of its lines describes a version.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"--rounds {file} cannot be read: {error.strerror}") from error
    rows = [row for row in map(_row, lines) if row is not None]
    if not rows:
        raise ValueError(
            f"--rounds {file}: no line is about a version of an elastic run; give tools/coordinate.py's rounds.jsonl"
        )
    return rows


def states(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the states of each replica group of an elastic DiLoCo run, by the name of the group.

    The states of a group are a list with one key of STATES for each version of the outer weights. A contribution that
    is not late counts as a whole interval ("whole") if it has as many steps as the version's longest contribution. With
    fewer steps it counts as called early ("part"): its group published it before the end of the interval, because other
    groups would have waited for the group. If a version has merged several contributions of a group, the least late one
    determines the group's state.
    """
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
    """Return the report's table of an elastic DiLoCo run, with a row of totals for each replica group.

    The totals are the numbers of the group's merged contributions, of their steps, and of the steps that were merged
    late. Further columns are how often the group went out of the run, the seconds for which its contributions waited
    for a commit, and the MB that the group sent.
    """
    head = ["group", "versions", "steps", "of these late", "times out", "waiting, s", "MB sent"]
    table = [head]
    for name, of_group in states(rows).items():
        own = [group for row in rows for group in row["groups"] if group["group"] == name]
        steps, late = (sum(g["steps"] for g in own if g["late"] >= least) for least in (0, 1))
        outs = sum(a != "out" and b == "out" for a, b in itertools.pairwise(of_group))
        totals = [0, *(row["sent_bytes"][name] for row in rows if name in row["sent_bytes"])]
        # The rows have cumulative bytes, which begin at 0 again if the job of the group is restarted. So if a total is
        # below the previous total, all of its bytes are added.
        sent = sum(b - a if b >= a else b for a, b in itertools.pairwise(totals))
        waited = sum(group["waited"] for group in own)
        table.append([name, str(len(own)), str(steps), str(late), str(outs), f"{waited:.1f}", f"{sent / MEGA:.3f}"])
    return table


def groups_line(rows: Sequence[Row]) -> str:
    """Return the report's sentence about an elastic DiLoCo run.

    It states the number of versions and the merged tokens per second. It also states the percentage of merged training
    steps whose contribution was late, and the number of steps that were trained again.
    """
    groups = [group for row in rows for group in row["groups"]]
    steps, late = (sum(g["steps"] for g in groups if g["late"] >= least) for least in (0, 1))
    # The difference between the first and the last time would be wrong if the coordinator was started again on a host
    # whose clock is behind: its first row then has an earlier time than the row before. So add up the times between
    # successive rows, and count such a pair of rows as 0 s.
    seconds = sum(max(0.0, b["time"] - a["time"]) for a, b in itertools.pairwise(rows))
    tokens = sum(group["tokens"] for row in rows[1:] for group in row["groups"])
    speed = f", {tokens / seconds:,.0f} merged tokens per second" if seconds > 0 else ""
    returned = sum(row["returned"] for row in rows)
    share = 100 * late / max(1, steps)
    return f"{len(rows)} versions{speed}; {share:.1f} % of the steps were merged late, {returned} were trained again."


def strips(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the HTML of a legend, and of a strip for each replica group with its states in all versions.

    Successive versions with equal states are one rectangle of the strip.
    """
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
    """Return a line of rounds.jsonl as a row with values of the right types; None if the line is cut or damaged."""
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
