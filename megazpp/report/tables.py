"""The tables of a report: what came out of every run, which flags differ, and where the bytes went."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megazpp.formatting import GIGA, MEGA
from megazpp.report.runs import Run, number, state
from megazpp.report.series import times

NOTHING = "-"
OWN_FLAGS = ("run_dir",)  # of course they differ


class HtmlTable(NamedTuple):
    """Cells below a head; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def summary_table(runs: Sequence[Run]) -> HtmlTable:
    """A column per run; lines in which no run has anything are left out."""
    lines: list[tuple[str, Callable[[Run], str]]] = [
        ("state", state),
        ("steps", _steps),
        ("last log line", lambda run: f"{run.written:%Y-%m-%d %H:%M:%S}" if run.written else NOTHING),
        ("tokens", lambda run: _decimal(max((number(r.get("consumed_tokens"), 0) for r in run.rows), default=None), 0)),
        ("training time", _training_time),
        ("training loss", lambda run: _decimal(run.rows[-1].get("lm_loss"), 4) if run.rows else NOTHING),
        ("validation loss", _validation),
        ("test loss", lambda run: _decimal(_of_summary(run, "test_loss"), 4)),
        ("unigram entropy of the validation text", lambda run: _decimal(_of_summary(run, "unigram_entropy"), 4)),
        ("tokens per second, median", lambda run: _decimal(_median(run, "tokens_per_second"), 0)),
        ("seconds per step, median", lambda run: _decimal(_median(run, "step_seconds"), 4)),
        ("CPU microseconds per token", lambda run: _decimal(_of_summary(run, "cpu_seconds_per_token", 1e6), 1)),
        ("peak memory, GB", lambda run: _decimal(_peak_memory(run), 3)),
        ("MB per step and node: between nodes", lambda run: _megabytes(run, "cross_bytes")),
        ("MB per step and node: inside, data parallel", lambda run: _megabytes(run, "local_bytes")),
        ("MB per step and node: inside, tensor parallel", lambda run: _megabytes(run, "tp_bytes")),
        ("skipped steps", lambda run: _count(sum(number(row.get("skipped"), 0) for row in run.rows))),
        ("losses that are not finite", lambda run: _count(sum(_is_bad(row.get("lm_loss")) for row in run.rows))),
        ("times it went back (restarts)", lambda run: _count(_went_back(run))),
        ("layout", lambda run: run.layout.describe() if run.layout else NOTHING),
        ("notes", lambda run: "; ".join(run.notes) or NOTHING),
    ]
    rows = [[name, *(cell(run) for run in runs)] for name, cell in lines]
    return HtmlTable(["", *(run.name for run in runs)], [row for row in rows if set(row[1:]) != {NOTHING}])


def flag_differences(runs: Sequence[Run]) -> HtmlTable:
    """A row for every flag of which the runs have recorded different values."""
    names = list(dict.fromkeys(name for run in runs for name in run.flags if name not in OWN_FLAGS))
    rows = [[f"--{name.replace('_', '-')}", *(_flag(run.flags, name) for run in runs)] for name in sorted(names)]
    return HtmlTable(["flag", *(run.name for run in runs)], [row for row in rows if len({*row[1:]} - {NOTHING}) > 1])


def traffic_table(run: Run) -> HtmlTable | None:
    """What every collective put on which wire, of the run's last process; None where nothing was counted."""
    summary = run.summary or {}
    steps = max(1, number(summary.get("iterations"), 1))
    counted = summary.get("traffic")
    rows = [
        [*(str(row.get(key, NOTHING)) for key in ("axis", "wire", "collective")), *_traffic_cells(row, steps)]
        for row in (counted if isinstance(counted, list) else [])
        if isinstance(row, dict)
    ]
    head = ["axis", "wire", "collective", "calls", "MB per node", "MB per node and step"]
    return HtmlTable(head, rows) if rows else None


def traffic_line(run: Run) -> str:
    """Which steps were counted, and what ZeRO-3 would have sent between nodes for the same ones."""
    summary = run.summary or {}
    line, zero3 = f"Counted over the {summary.get('iterations')} steps of the last start.", summary.get("zero3")
    if not isinstance(zero3, dict) or number(zero3.get("cross_bytes")) is None:
        return line
    megabytes = f"{zero3['cross_bytes'] / MEGA:,.3f}"
    return f"{line} ZeRO-3 would have sent {megabytes} MB between nodes: {zero3.get('formula')}"


def _traffic_cells(row: Mapping[str, Any], steps: int) -> list[str]:
    sent = number(row.get("sent_bytes"))
    per_step = None if sent is None else sent / MEGA / steps
    return [
        _decimal(row.get("calls"), 0),
        _decimal(None if sent is None else sent / MEGA, 3),
        _decimal(per_step, 3),
    ]


def _steps(run: Run) -> str:
    done = max((row["iteration"] for row in run.rows), default=number((run.summary or {}).get("iteration"), 0))
    wanted = number(run.flags.get("train_iters"))
    return f"{done:,}" + (f" of {wanted:,}" if wanted and wanted != done else "")


def _training_time(run: Run) -> str:
    seconds = times(run).seconds
    if not len(seconds):
        return NOTHING
    hours, rest = divmod(round(float(seconds[-1])), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{seconds[-1]:,.1f} s"


def _validation(run: Run) -> str:
    losses = [row["lm_loss"] for row in run.validations if number(row.get("lm_loss")) is not None]
    if not losses:
        return _decimal(_of_summary(run, "validation_loss"), 4)
    best = min((loss for loss in losses if math.isfinite(loss)), default=losses[-1])
    return _decimal(losses[-1], 4) + ("" if best == losses[-1] else f" (lowest {best:.4f})")


def _peak_memory(run: Run) -> float | None:
    recorded = [number(row.get("peak_memory_bytes"), 0) for row in run.rows]
    peak = max([*recorded, _of_summary(run, "peak_memory_bytes") or 0], default=0)
    return peak / GIGA if peak else None


def _megabytes(run: Run, key: str) -> str:
    """The mean over the steps."""
    steps = [number(row.get("steps"), 1) for row in run.rows]
    sent = sum(count * number(row.get(key), 0) for count, row in zip(steps, run.rows, strict=True))
    return f"{sent / max(1, sum(steps)) / MEGA:,.3f}" if sent else NOTHING


def _median(run: Run, key: str) -> float | None:
    values = sorted(row[key] for row in run.rows if number(row.get(key)) is not None)
    return values[len(values) // 2] if values else None


def _went_back(run: Run) -> int:
    steps = times(run).steps
    return int((steps[1:] <= steps[:-1]).sum())


def _of_summary(run: Run, key: str, factor: float = 1.0) -> float | None:
    value = number((run.summary or {}).get(key))
    return None if value is None else value * factor


def _is_bad(loss: Any) -> bool:
    return number(loss) is not None and not math.isfinite(loss)


def _count(value: int) -> str:
    return f"{value:,}" if value else NOTHING


def _decimal(value: Any, digits: int) -> str:
    return NOTHING if number(value) is None else f"{value:,.{digits}f}"


def _flag(flags: Mapping[str, Any], name: str) -> str:
    value = flags.get(name, NOTHING)
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value)
