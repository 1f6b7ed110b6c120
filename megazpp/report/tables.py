"""The tables of a report: what came out of every run, which flags differ, and where the bytes went."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from megazpp.base.formatting import GIGA, MEGA
from megazpp.report.runs import Row, Run, number, state
from megazpp.report.series import times

NOTHING = "-"
COMPLETIONS = 16  # of a run, in the page
DIFFERENCES = 3  # that a legend names
OWN_FLAGS = ("run_dir",)  # of course they differ
PLACES = ("--save", "--load", "--data-cache-path")  # which say little of a run


class HtmlTable(NamedTuple):
    """Cells below a head; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def summary_table(runs: Sequence[Run]) -> HtmlTable:
    """A column per run; lines in which no run has anything are left out."""
    columns = [_came_out(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return HtmlTable(["", *(run.name for run in runs)], [row for row in rows if set(row[1:]) != {NOTHING}])


def tiles(run: Run) -> list[tuple[str, str]]:
    """The few numbers that a reader looks for first, each with its name; those that are not known are left out."""
    came_out, summary = _came_out(run), run.summary
    zero3, traffic = summary.get("zero3"), summary.get("traffic")
    rows = [row for row in traffic if isinstance(row, dict)] if isinstance(traffic, list) else []
    cross = sum(number(row.get("sent_bytes")) or 0 for row in rows if row.get("wire") == "cross")
    would = (number(zero3.get("cross_bytes")) or 0) if isinstance(zero3, dict) else 0
    fewer = f"{would / cross:.1f} x fewer" if cross and would > 1.05 * cross else NOTHING
    loss = "validation loss" if came_out["validation loss"] != NOTHING else "training loss"
    found = {
        loss: came_out[loss].partition(" (")[0],
        "training time": came_out["training time"],
        "tokens per second": came_out["tokens per second, median"],
        "bytes between nodes than ZeRO-3": fewer,
    }
    return [(name, value) for name, value in found.items() if value != NOTHING]


def differences_in_words(runs: Sequence[Run]) -> list[str]:
    """The first flags of each run that it does not share with the others, for a legend."""
    found = flag_differences(runs).rows if len(runs) > 1 else []
    rows = [row for row in found if row[0] not in PLACES][:DIFFERENCES]
    return [", ".join(f"{row[0]} {row[1 + index]}" for row in rows) for index in range(len(runs))]


def flag_differences(runs: Sequence[Run]) -> HtmlTable:
    """A row for every flag of which the runs have recorded different values."""
    names = list(dict.fromkeys(name for run in runs for name in run.flags if name not in OWN_FLAGS))
    rows = [
        [f"--{name.replace('_', '-')}", *(_flag(run.flags.get(name, NOTHING)) for run in runs)]
        for name in sorted(names)
    ]
    return HtmlTable(["flag", *(run.name for run in runs)], [row for row in rows if len({*row[1:]} - {NOTHING}) > 1])


def completions_table(run: Run) -> HtmlTable | None:
    """The latest completions that the run has kept, with their rewards; None where there is none."""
    rows = [
        [
            str(row["iteration"]),
            *(
                value if isinstance(value, str) else json.dumps(value)
                for value in (row.get("prompt"), row.get("completion"))
            ),
            _rewards(row.get("rewards")),
        ]
        for row in run.completions[-COMPLETIONS:]
    ]
    return HtmlTable(["iteration", "prompt", "completion", "rewards"], rows) if rows else None


def _rewards(rewards: Any) -> str:
    known = rewards.items() if isinstance(rewards, dict) else ()
    return ", ".join(f"{name} {number(value, math.nan):g}" for name, value in known) or NOTHING


def traffic_table(run: Run) -> HtmlTable | None:
    """The bytes that every collective put on each wire, of the run's last process; None where nothing was counted."""
    steps = max(1, number(run.summary.get("iterations"), 1))
    counted = run.summary.get("traffic")
    rows = []
    for row in counted if isinstance(counted, list) else []:
        if isinstance(row, dict):
            sent = number(row.get("sent_bytes"))
            figures = [(row.get("calls"), 0), (sent and sent / MEGA, 3), (sent and sent / MEGA / steps, 3)]
            names = [str(row.get(key, NOTHING)) for key in ("axis", "wire", "collective")]
            rows.append([*names, *(_decimal(value, digits) for value, digits in figures)])
    head = ["axis", "wire", "collective", "calls", "MB per node", "MB per node and step"]
    return HtmlTable(head, rows) if rows else None


def traffic_line(run: Run) -> str:
    """Say which steps were counted, and what ZeRO-3 would have sent between nodes for the same ones."""
    line = f"Counted over the {run.summary.get('iterations')} steps of the last start."
    zero3 = run.summary.get("zero3")
    if not isinstance(zero3, dict) or number(zero3.get("cross_bytes")) is None:
        return line
    megabytes = f"{zero3['cross_bytes'] / MEGA:,.3f}"
    return f"{line} ZeRO-3 would have sent {megabytes} MB between nodes: {zero3.get('formula')}"


def _came_out(run: Run) -> dict[str, str]:
    """The cells of a run by their line."""
    rows, at = run.rows, times(run)
    summary = {key: number(value) for key, value in run.summary.items()}
    done = max((row["iteration"] for row in rows), default=summary.get("iteration") or 0)
    wanted = number(run.flags.get("train_iters"))
    training_time = NOTHING
    if rows:
        hours, rest = divmod(round(float(at.seconds[-1])), 3600)
        training_time = f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{at.seconds[-1]:,.1f} s"
    losses = _numbers(run.validations, "lm_loss")
    validation = losses[-1] if losses else summary.get("validation_loss")
    lowest = min(filter(math.isfinite, losses), default=None)
    also = f" (lowest {lowest:.4f})" if lowest not in (None, validation) else ""
    cpu = summary.get("cpu_seconds_per_token")
    peak = max([*_numbers(rows, "peak_memory_bytes"), summary.get("peak_memory_bytes") or 0])
    went_back = int((at.steps[1:] <= at.steps[:-1]).sum())
    not_finite = sum(not math.isfinite(loss) for loss in _numbers(rows, "lm_loss"))
    return {
        "state": state(run),
        "steps": f"{done:,}" + (f" of {wanted:,}" if wanted and wanted != done else ""),
        "last log line": f"{run.written:%Y-%m-%d %H:%M:%S}" if run.written else NOTHING,
        "tokens": _decimal(max(_numbers(rows, "consumed_tokens"), default=None), 0),
        "training time": training_time,
        "training loss": _decimal(rows[-1].get("lm_loss"), 4) if rows else NOTHING,
        "validation loss": _decimal(validation, 4) + also,
        "test loss": _decimal(summary.get("test_loss"), 4),
        "unigram entropy of the validation text": _decimal(summary.get("unigram_entropy"), 4),
        "tokens per second, median": _decimal(_median(rows, "tokens_per_second"), 0),
        "seconds per step, median": _decimal(_median(rows, "step_seconds"), 4),
        "CPU microseconds per token": _decimal(cpu and 1e6 * cpu, 1),
        "peak memory, GB": _decimal(peak / GIGA, 3) if peak else NOTHING,
        "MB per step and node: between nodes": _megabytes(rows, "cross_bytes"),
        "MB per step and node: inside, data parallel": _megabytes(rows, "local_bytes"),
        "MB per step and node: inside, tensor parallel": _megabytes(rows, "tp_bytes"),
        "skipped steps": _decimal(sum(_numbers(rows, "skipped")) or None, 0),
        "losses that are not finite": _decimal(not_finite or None, 0),
        "times it went back (restarts)": _decimal(went_back or None, 0),
        "layout": run.layout.describe() if run.layout else NOTHING,
        "notes": "; ".join(run.notes) or NOTHING,
    }


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if number(row.get(key)) is not None]


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = _numbers(rows, key)
    return statistics.median_high(values) if values else None


def _megabytes(rows: Sequence[Row], key: str) -> str:
    """The mean over the steps."""
    steps = [number(row.get("steps"), 1) for row in rows]
    sent = sum(count * number(row.get(key), 0) for count, row in zip(steps, rows, strict=True))
    return f"{sent / max(1, sum(steps)) / MEGA:,.3f}" if sent else NOTHING


def _decimal(value: Any, digits: int) -> str:
    return NOTHING if number(value) is None else f"{value:,.{digits}f}"


def _flag(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value)
