"""The curves and the tables of a report.

A curve is cut where the iterations go back: at a restart. Training time is the seconds of all steps so far, also those
that a restart did again. Of every bucket of neighbours the lowest and the highest stay, so that no spike disappears.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megazpp.base.program import GIGA, MEGA, times_fewer
from megazpp.report.runs import Row, Run, number

Segment = list[list[float | None]]
Table = list[list[str]]

DIGITS = 6  # significant, of a point
NOTHING = "-"
COMPLETIONS = 16  # of a run, in the page
DIFFERENCES = 3  # that a legend names
PLACES = ("--save", "--load", "--data-cache-path")  # which say little of a run
TILES = ("training time", "tokens per second, median", "MFU, median", "bytes between nodes than ZeRO-3")


class Chart(NamedTuple):
    """One picture."""

    key: str  # of metrics.jsonl
    title: str
    unit: str  # of the vertical axis
    scale: str  # "fit": the values' range, "zero": from zero, "log"
    factor: float = 1.0  # from what is recorded to `unit`


CHARTS = (
    Chart("lm_loss", "Loss", "nats per token", "fit"),
    Chart("reward", "Reward", "mean of the drawn completions", "fit"),
    Chart("rewards/accuracies", "Preferences", "share of pairs in the right order", "fit"),
    Chart("accuracy", "Preferences of the reward model", "share of pairs in the right order", "fit"),
    Chart("kl", "Divergence from the reference", "nats per token", "fit"),
    Chart("entropy", "Entropy", "nats per token", "fit"),
    Chart("completions/mean_length", "Length of completions", "tokens", "zero"),
    Chart("tokens_per_second", "Throughput", "tokens per second", "zero"),
    Chart("grad_norm", "Gradient norm", "L2 norm before clipping", "log"),
    Chart("learning_rate", "Learning rate", "", "zero"),
    Chart("cross_bytes", "Sent between nodes", "MB per step and node", "zero", 1 / MEGA),
    Chart("local_bytes", "Sent inside nodes (data parallel)", "MB per step and node", "zero", 1 / MEGA),
    Chart("tp_bytes", "Sent inside nodes (tensor parallel)", "MB per step and node", "zero", 1 / MEGA),
    Chart("peak_memory_bytes", "Peak memory", "GB, rank 0", "zero", 1 / GIGA),
)

# ---- curves -------------------------------------------------------------------------------------------------------


def times(run: Run) -> np.ndarray:
    """Steps, tokens and seconds at the rows of metrics.jsonl: [3, rows]."""
    before, total, tokens, places = 0, 0.0, 0.0, []
    for row in run.rows:
        iteration = row["iteration"]
        steps = number(row.get("steps")) or max(1, iteration - before if iteration > before else 1)
        total += steps * max(0.0, _finite(row.get("step_seconds")))
        tokens += _finite(row.get("tokens"))  # where samples differ in length, those of all steps so far
        places.append([iteration, _finite(row.get("consumed_tokens", tokens)), total])
        before = iteration
    return np.array(places, dtype=np.float64).reshape(-1, 3).T


def curves(run: Run, max_points: int) -> dict[str, list[Segment]]:
    """The points of every chart that the run has something for, and of its validations.

    Returns:
        by the chart's key, and "validation": segments, each [steps, tokens, seconds, values], where None is a value
        that is not finite.
    """
    at = times(run)
    found = {chart.key: _curve(run.rows, chart.key, at, max_points, chart.factor) for chart in CHARTS}
    # Validations stand along the rows that no restart has done again: those with no later row of no higher iteration.
    latest = np.minimum.accumulate(np.append(at[0, 1:], np.inf)[::-1])[::-1][: at.shape[1]] > at[0]
    steps = np.array([row["iteration"] for row in run.validations], dtype=np.float64)
    known = np.insert(at[:, latest], 0, 0.0, axis=1)
    there = np.array([np.interp(steps, known[0], column) for column in known])
    there[0] = steps
    found["validation"] = _curve(run.validations, "lm_loss", there, max_points)
    found["validation_reward"] = _curve(run.validations, "reward", there, max_points)
    for key in ("cross_bytes", "local_bytes", "tp_bytes"):
        if not any(value for segment in found[key] for value in segment[3]):
            found[key] = []  # a wire that the run does not use
    return {key: segments for key, segments in found.items() if segments}


def thin(values: np.ndarray, max_points: int) -> np.ndarray:
    """Indices of about `max_points` values: both ends, and of each bucket the extremes and what is not finite."""
    if len(values) <= max_points:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    finite = np.isfinite(values)
    edges = np.linspace(0, len(values), max(1, max_points // 2) + 1).astype(int)
    for start, end in itertools.pairwise(edges.tolist()):
        bucket, good = values[start:end], finite[start:end]
        if good.any():
            extremes = np.argmin(np.where(good, bucket, np.inf)), np.argmax(np.where(good, bucket, -np.inf))
            kept |= {start + int(index) for index in extremes}
        if not good.all():
            kept.add(start + int(np.argmin(good)))
    return np.array(sorted(kept))


def _curve(rows: Sequence[Row], key: str, at: np.ndarray, max_points: int, factor: float = 1.0) -> list[Segment]:
    has = np.array([i for i, row in enumerate(rows) if number(row.get(key)) is not None], dtype=np.int64)
    segments: list[Segment] = []
    for index in np.split(has, np.flatnonzero(np.diff(at[0, has]) <= 0) + 1) if len(has) else ():
        values = np.array([float(rows[i][key]) * factor for i in index], dtype=np.float64)
        kept = thin(values, max_points * len(index) // len(has))
        steps, *others = at[:, index[kept]]
        exact: list[float | None] = [int(step) for step in steps]
        segments.append([exact, *([_short(x) for x in column] for column in (*others, values[kept]))])
    return segments


def _finite(value: Any) -> float:
    return float(value) if number(value) is not None and math.isfinite(value) else 0.0


def _short(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


# ---- tables -------------------------------------------------------------------------------------------------------


def summary_table(runs: Sequence[Run]) -> Table:
    """A column per run; lines in which no run has anything are left out."""
    columns = [_came_out(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return [["", *(run.name for run in runs)], *(row for row in rows if set(row[1:]) != {NOTHING})]


def tiles(run: Run) -> list[tuple[str, str]]:
    """The few numbers that a reader looks for first, each with its name; those that are not known are left out."""
    came_out = _came_out(run)
    loss = "validation loss" if came_out["validation loss"] != NOTHING else "training loss"
    found = [(name, came_out[name].partition(" (")[0]) for name in (loss, *TILES)]
    return [(name, value) for name, value in found if value != NOTHING]


def differences_in_words(runs: Sequence[Run]) -> list[str]:
    """The first flags of each run that it does not share with the others, for a legend."""
    rows = [row for row in flag_differences(runs)[1:] if row[0] not in PLACES][:DIFFERENCES]
    return [", ".join(f"{row[0]} {row[1 + index]}" for row in rows) for index in range(len(runs))]


def flag_differences(runs: Sequence[Run]) -> Table:
    """A row for every flag of which the runs have recorded different values."""
    names = sorted({name for run in runs for name in run.flags} - {"run_dir"})  # of course that differs
    rows = [[f"--{name.replace('_', '-')}", *(_flag(run.flags.get(name, NOTHING)) for run in runs)] for name in names]
    return [["flag", *(run.name for run in runs)], *(row for row in rows if len({*row[1:]} - {NOTHING}) > 1)]


def completions_table(run: Run) -> Table:
    """The latest completions that the run has kept, with their rewards."""
    rows = []
    for row in run.completions[-COMPLETIONS:]:
        texts = [text if isinstance(text, str) else json.dumps(text) for text in map(row.get, ("prompt", "completion"))]
        known = rewards.items() if isinstance(rewards := row.get("rewards"), dict) else ()
        shown = ", ".join(f"{name} {number(value, math.nan):g}" for name, value in known)
        rows.append([str(row["iteration"]), *texts, shown or NOTHING])
    return [["iteration", "prompt", "completion", "rewards"], *rows]


def traffic_table(run: Run) -> Table:
    """The bytes that every collective put on each wire, of the run's last process."""
    steps = max(1, number(run.summary.get("iterations"), 1))
    rows = []
    for row in _traffic(run):
        sent = number(row.get("sent_bytes"))
        figures = [(row.get("calls"), 0), (sent and sent / MEGA, 3), (sent and sent / MEGA / steps, 3)]
        names = [str(row.get(key, NOTHING)) for key in ("axis", "wire", "collective")]
        rows.append([*names, *(_decimal(value, digits) for value, digits in figures)])
    return [["axis", "wire", "collective", "calls", "MB per node", "MB per node and step"], *rows]


def traffic_line(run: Run) -> str:
    """Name the steps that were counted, and what ZeRO-3 would have sent between nodes for the same ones."""
    line = f"Counted over the {run.summary.get('iterations')} steps of the last start."
    if (would := _zero3_bytes(run)) is None:
        return line
    return f"{line} ZeRO-3 would have sent {would / MEGA:,.3f} MB between nodes: {run.summary['zero3'].get('formula')}"


def _traffic(run: Run) -> list[Row]:
    counted = run.summary.get("traffic")
    return [row for row in counted if isinstance(row, dict)] if isinstance(counted, list) else []


def _zero3_bytes(run: Run) -> float | None:
    zero3 = run.summary.get("zero3")
    return number(zero3.get("cross_bytes")) if isinstance(zero3, dict) else None


def _came_out(run: Run) -> dict[str, str]:
    """The cells of a run by their line."""
    rows, at = run.rows, times(run)
    cross = sum(number(row.get("sent_bytes")) or 0 for row in _traffic(run) if row.get("wire") == "cross")
    summary = {key: number(value) for key, value in run.summary.items()}
    done = max((row["iteration"] for row in rows), default=summary.get("iteration") or 0)
    wanted, samples = (number(run.flags.get(name)) for name in ("train_iters", "train_samples"))
    consumed = max(_numbers(rows, "consumed_samples"), default=0)
    steps = f"{done:,}" + (f" of {wanted:,}" if wanted and wanted != done else "")
    if samples:
        steps += f", {consumed:,}" + (f" of {samples:,}" if samples != consumed else "") + " samples"
    seconds = float(at[2, -1]) if rows else 0.0
    duration = f"{seconds:,.1f} s" if seconds < 3600 else str(datetime.timedelta(seconds=round(seconds)))
    losses, speeds = _numbers(run.validations, "lm_loss"), _numbers(rows, "tokens_per_second")
    mfu = _numbers(rows, "mfu")
    validation = losses[-1] if losses else summary.get("validation_loss")
    lowest = min(filter(math.isfinite, losses), default=None)
    also = f" (lowest {lowest:.4f})" if lowest not in (None, validation) else ""
    peak = max([*_numbers(rows, "peak_memory_bytes"), summary.get("peak_memory_bytes") or 0])
    went_back = int((at[0, 1:] <= at[0, :-1]).sum())
    not_finite = sum(not math.isfinite(loss) for loss in _numbers(rows, "lm_loss"))
    return {
        "state": run.state,
        "steps": steps,
        "tokens": _decimal(max(at[1]) if rows and max(at[1]) else None, 0),
        "training time": duration if rows else NOTHING,
        "training loss": _decimal(rows[-1].get("lm_loss"), 4) if rows else NOTHING,
        "validation loss": _decimal(validation, 4) + also,
        "test loss": _decimal(summary.get("test_loss"), 4),
        "unigram entropy of the validation text": _decimal(summary.get("unigram_entropy"), 4),
        "tokens per second, median": _decimal(statistics.median_high(speeds) if speeds else None, 0),
        "MFU, median": f"{100 * statistics.median_high(mfu):.1f} %" if mfu else NOTHING,
        "peak memory, GB": _decimal(peak / GIGA, 3) if peak else NOTHING,
        "MB per step and node: between nodes": _megabytes(rows, "cross_bytes"),
        "MB per step and node: inside, data parallel": _megabytes(rows, "local_bytes"),
        "MB per step and node: inside, tensor parallel": _megabytes(rows, "tp_bytes"),
        "bytes between nodes than ZeRO-3": times_fewer(cross, _zero3_bytes(run) or 0) or NOTHING,
        "skipped steps": _decimal(sum(_numbers(rows, "skipped")) or None, 0),
        "losses that are not finite": _decimal(not_finite or None, 0),
        "times it went back (restarts)": _decimal(went_back or None, 0),
        "layout": run.layout.describe() if run.layout else NOTHING,
        "notes": "; ".join(run.notes) or NOTHING,
    }


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if number(row.get(key)) is not None]


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
