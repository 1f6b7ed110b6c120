"""Curves and tables of the HTML report about training runs.

A curve is interrupted where a restart has gone back to an earlier iteration. Training time is the sum over all steps so
far, including steps that a restart has repeated. Long curves are downsampled in buckets of neighboring points. The
lowest and the highest point of each bucket remain, so that no spike disappears.
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
from megazpp.topology.layout import WIRE_NAMES

# An uninterrupted part of a curve: lists of the steps, tokens, seconds, bytes and values of its points
Segment = list[list[float | None]]
Table = list[list[str]]  # rows of cells; the first row is the header

DIGITS = 6  # significant digits of a curve's coordinates in the page
NOTHING = "-"  # cell of a table for an unknown value
COMPLETIONS = 16  # number of completions that the report shows per run
DIFFERENCES = 3  # number of differing flags that the legend shows per run
PLACES = ("--save", "--load", "--data-cache-path")  # flags that the legend leaves out: paths say little about a run


class Chart(NamedTuple):
    """Definition of a chart of the report, which has one curve per run."""

    key: str  # key of the values in metrics.jsonl
    title: str
    unit: str  # unit of the vertical axis
    scale: str  # vertical axis: "fit" covers the range of the values, "zero" begins at zero, "log" is logarithmic
    factor: float = 1.0  # number by which recorded values are multiplied to get values in `unit`


CHARTS = (
    Chart("lm_loss", "Loss", "nats per token", "fit"),
    Chart("reward", "Reward", "mean over the sampled completions", "fit"),
    Chart("rewards/accuracies", "Preferences", "fraction of pairs in the right order", "fit"),
    Chart("accuracy", "Preferences of the reward model", "fraction of pairs in the right order", "fit"),
    Chart("kl", "Divergence from the reference", "nats per token", "fit"),
    Chart("entropy", "Entropy", "nats per token", "fit"),
    Chart("completions/mean_length", "Length of completions", "tokens", "zero"),
    Chart("tokens_per_second", "Throughput", "tokens per second", "zero"),
    Chart("max_expert_load", "Busiest expert", "choices, relative to the mean", "fit"),
    Chart("idle_experts", "Experts without tokens", "fraction of all experts", "zero"),
    Chart("router_entropy", "Entropy of the router's scores", "nats per token", "fit"),
    Chart("expert_balance", "Balance loss of the router", "1 is even", "fit"),
    Chart("grad_norm", "Gradient norm", "L2 norm before clipping", "log"),
    Chart("learning_rate", "Learning rate", "", "zero"),
    Chart("cross_bytes", "Inter-node traffic", "MB per step and node", "zero", 1 / MEGA),
    Chart("local_bytes", "Intra-node traffic (data parallel)", "MB per step and node", "zero", 1 / MEGA),
    Chart("tp_bytes", "Intra-node traffic (tensor parallel)", "MB per step and node", "zero", 1 / MEGA),
    Chart("peak_memory_bytes", "Peak memory", "GB, rank 0", "zero", 1 / GIGA),
)


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the definitions of the charts of a report on `runs`.

    The chart of the loss has no unit if a run was post-training other than SFT, whose loss is not in nats per token.
    """
    has_unit = all(run.flags.get("objective", "sft") == "sft" for run in runs)
    return [chart if has_unit or chart.key != "lm_loss" else chart._replace(unit="") for chart in CHARTS]


# ---- curves of the charts -----------------------------------------------------------------------------------------


def times(run: Run) -> np.ndarray:
    """Return a run's cumulative steps, tokens, seconds and bytes at each row of metrics.jsonl, for horizontal axes.

    The result is [4, rows]: iteration, trained tokens, seconds of training, and bytes that a node has sent to other
    nodes.
    """
    before, total, tokens, sent, places = 0, 0.0, 0.0, 0.0, []
    for row in run.rows:
        iteration = row["iteration"]
        # A row without "steps" counts as the steps since the previous row, or as 1 if the previous row has a later
        # iteration, because the run was restarted from an earlier checkpoint.
        steps = _finite(row.get("steps")) or max(1, iteration - before if iteration > before else 1)
        total += steps * max(0.0, _finite(row.get("step_seconds")))
        # If samples differ in length, rows have the tokens of their steps instead of the total "consumed_tokens".
        tokens += _finite(row.get("tokens"))
        sent += steps * _finite(row.get("cross_bytes"))
        places.append([iteration, _finite(row.get("consumed_tokens", tokens)), total, sent])
        before = iteration
    return np.array(places, dtype=np.float64).reshape(-1, 4).T


def curves(run: Run, max_points: int) -> dict[str, list[Segment]]:
    """Return the curves of a run for the report's charts, without charts for which the run has no values.

    Args:
        run: recorded data of the run.
        max_points: approximate number of points to which a curve is downsampled.

    Returns:
        the segments of each curve, by the chart's key. The keys "validation" and "validation_reward" are for curves of
        validations. A segment is the list [steps, tokens, seconds, bytes, values] of equally long lists, where the
        first four are the rows of `times`. None replaces a value that is not finite.
    """
    at, there = times(run), times_of_validations(run)
    found = {chart.key: _curve(run.rows, chart.key, at, max_points, chart.factor) for chart in CHARTS}
    found["validation"] = _curve(run.validations, "lm_loss", there, max_points)
    found["validation_reward"] = _curve(run.validations, "reward", there, max_points)
    for key in ("cross_bytes", "local_bytes", "tp_bytes"):
        if not any(value for segment in found[key] for value in segment[4]):
            found[key] = []  # the run sends no bytes over this kind of link, so the chart would show only zeros
    return {key: segments for key, segments in found.items() if segments}


def times_of_validations(run: Run) -> np.ndarray:
    """Return the cumulative steps, tokens, seconds and bytes of a run at each of its validations, [4, validations].

    The values are interpolated between the rows of metrics.jsonl, for which `times` returns them. A row is ignored if a
    restart has repeated its iteration later.
    """
    at = times(run)
    # Keep a row if the lowest iteration of all later rows is above the row's iteration.
    latest = np.minimum.accumulate(np.append(at[0, 1:], np.inf)[::-1])[::-1][: at.shape[1]] > at[0]
    steps = np.array([row["iteration"] for row in run.validations], dtype=np.float64)
    known = np.insert(at[:, latest], 0, 0.0, axis=1)
    return np.array([steps, *(np.interp(steps, known[0], column) for column in known[1:])])


def unigram_entropy(run: Run) -> float | None:
    """Return the unigram entropy of a run's validation text in nats per token; None if the run has not recorded it."""
    return _short(_finite(run.summary.get("unigram_entropy"))) or None


def thin(values: np.ndarray, max_points: int) -> np.ndarray:
    """Return the ascending indices of about `max_points` points that represent a curve with the given values.

    The indices include both ends of the curve, and for each bucket of neighboring points the lowest, the highest and
    the first non-finite value.
    """
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
    """Downsample one curve of a run, and return its segments, which the chart draws as separate lines.

    A new segment begins where the steps do not rise, because the run has resumed an earlier checkpoint. A segment is a
    list of columns: steps, tokens, seconds, bytes and values of its points.

    Args:
        rows: rows of a .jsonl file.
        key: key of the values; rows without it are skipped.
        at: [4, rows] cumulative steps, tokens, seconds and bytes at each row, from `times`.
        max_points: approximate number of points of all segments together.
        factor: number by which the values are multiplied to get the chart's unit.
    """
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
    """Return a recorded value as a float if it is a finite number; otherwise return 0.0."""
    return float(value) if number(value) is not None and math.isfinite(value) else 0.0


def _short(value: float) -> float | None:
    """Return a coordinate rounded to DIGITS digits, which keeps the page small; None if it is not finite."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


# ---- tables of the report -----------------------------------------------------------------------------------------


def summary_table(runs: Sequence[Run]) -> Table:
    """Return the report's summary table with a column per run, without rows that are unknown for all runs."""
    columns = [_came_out(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return [["", *(run.name for run in runs)], *(row for row in rows if set(row[1:]) != {NOTHING})]


def differences_in_words(runs: Sequence[Run]) -> list[str]:
    """Return for each run the legend's text: flags in which the runs differ, at most DIFFERENCES of them."""
    rows = [row for row in flag_differences(runs)[1:] if row[0] not in PLACES][:DIFFERENCES]
    return [", ".join(f"{row[0]} {row[1 + index]}" for row in rows) for index in range(len(runs))]


def flag_differences(runs: Sequence[Run]) -> Table:
    """Return a table with a column per run, and a row for each flag with different values in the runs."""
    head, *rows = flags_table(runs)
    return [head, *(row for row in rows if len({*row[1:]} - {NOTHING}) > 1 and row[0] != "--run-dir")]


def flags_table(runs: Sequence[Run]) -> Table:
    """Return a table with a column per run and a row for each flag that at least one run has recorded."""
    names = sorted({name for run in runs for name in run.flags})
    rows = [[f"--{name.replace('_', '-')}", *(_flag(run.flags.get(name, NOTHING)) for run in runs)] for name in names]
    return [["flag", *(run.name for run in runs)], *rows]


def same_loss_table(runs: Sequence[Run]) -> Table:
    """Return a table of the steps, tokens, hours and bytes that each run needed for a loss that all runs have reached.

    The common loss is the largest, over the runs, of a run's lowest validation loss. The column of a run has the values
    at its first validation whose loss is at most the common loss. If a run has no validation, the table has only a
    header.
    """
    head = ["", *(run.name for run in runs)]
    losses = [np.array([_finite(row.get("lm_loss")) or math.inf for row in run.validations]) for run in runs]
    if not all(len(of_run) and of_run.min() < math.inf for of_run in losses):
        return [head]
    common = max(of_run.min() for of_run in losses)
    found = [
        times_of_validations(run)[:, np.argmax(of_run <= common)] for run, of_run in zip(runs, losses, strict=True)
    ]
    columns = [(f"{step:,.0f}", f"{n:,.0f}", f"{t / 3600:,.4f}", f"{sent / GIGA:,.3f}") for step, n, t, sent in found]
    names = (f"steps to a validation loss of {common:.4f}", "tokens", "hours of training", "inter-node GB per node")
    return [head, *([name, *cells] for name, *cells in zip(names, *columns, strict=True))]


def completions_table(run: Run) -> Table:
    """Return a table of a run's last recorded completions, at most COMPLETIONS, with their rewards if there are any."""
    rows = []
    for row in run.completions[-COMPLETIONS:]:
        texts = [text if isinstance(text, str) else json.dumps(text) for text in map(row.get, ("prompt", "completion"))]
        known = rewards.items() if isinstance(rewards := row.get("rewards"), dict) else ()
        shown = ", ".join(f"{name} {number(value, math.nan):g}" for name, value in known)
        rows.append([str(row["iteration"]), *texts, shown or NOTHING])
    columns = 4 if any(row[-1] != NOTHING for row in rows) else 3
    return [row[:columns] for row in (["iteration", "prompt", "completion", "rewards"], *rows)]


def traffic_table(run: Run) -> Table:
    """Return a table of the bytes that a run has sent by axis, wire and collective since its last start."""
    steps = max(1, number(run.summary.get("iterations"), 1))
    rows = []
    for row in _traffic(run):
        sent = number(row.get("sent_bytes"))
        figures = [(row.get("calls"), 0), (sent and sent / MEGA, 3), (sent and sent / MEGA / steps, 3)]
        wire = str(row.get("wire", NOTHING))
        names = [str(row.get("axis", NOTHING)), WIRE_NAMES.get(wire, wire), str(row.get("collective", NOTHING))]
        rows.append([*names, *(_decimal(value, digits) for value, digits in figures)])
    return [["axis", "wire", "collective", "calls", "MB per node", "MB per node and step"], *rows]


def experts_table(run: Run) -> Table:
    """Return a table of the experts' loads in the last row of a run's metrics.jsonl, with a row per layer."""
    row = run.rows[-1] if run.rows else {}
    keys = [key for key in row if key.startswith("max_expert_load/")]
    names = ("max_expert_load", "idle_experts", "router_entropy", "expert_balance")
    layers = [key.partition("/")[2] for key in keys]
    rows = [[layer.removeprefix("layer_"), *(_decimal(row.get(f"{n}/{layer}"), 3) for n in names)] for layer in layers]
    return [["layer", "busiest expert, relative to the mean", "idle experts", "router entropy", "balance loss"], *rows]


def traffic_line(run: Run) -> str:
    """Return the text below a run's traffic table: the counted steps, and if known, ZeRO-3's bytes for these steps."""
    line = f"Counted over the {run.summary.get('iterations')} steps since the last start."
    if (would := _zero3_bytes(run)) is None:
        return line
    return f"{line} ZeRO-3 would have sent {would / MEGA:,.3f} MB between nodes: {run.summary['zero3'].get('formula')}"


def _traffic(run: Run) -> list[Row]:
    """Return the rows of the traffic that a run has recorded in summary.json, without damaged rows."""
    counted = run.summary.get("traffic")
    return [row for row in counted if isinstance(row, dict)] if isinstance(counted, list) else []


def _zero3_bytes(run: Run) -> float | None:
    """Return the bytes that ZeRO-3 would have sent between nodes in a run; None if summary.json lacks them."""
    zero3 = run.summary.get("zero3")
    return number(zero3.get("cross_bytes")) if isinstance(zero3, dict) else None


def _came_out(run: Run) -> dict[str, str]:
    """Return a run's column of the summary table: the text of each cell, by the title of the cell's row."""
    # Compute the cells about the run's progress: steps, samples and time
    rows, at = run.rows, times(run)
    cross = sum(number(row.get("sent_bytes")) or 0 for row in _traffic(run) if row.get("wire") == "cross")
    summary = {key: number(value) for key, value in run.summary.items()}
    ended = int(_finite(summary.get("iteration")))
    done = ended if run.has_ended or not rows else rows[-1]["iteration"]
    wanted, samples = (number(run.flags.get(name)) for name in ("train_iters", "train_samples"))
    consumed = next(map(_finite, reversed(_numbers(rows, "consumed_samples"))), 0)
    steps = f"{done:,}" + (f" of {wanted:,}" if wanted and wanted != done else "")
    if samples:
        steps += f", {consumed:,}" + (f" of {samples:,}" if samples != consumed else "") + " samples"
    seconds = float(at[2, -1]) if rows else 0.0
    duration = f"{seconds:,.1f} s" if seconds < 3600 else str(datetime.timedelta(seconds=round(min(seconds, 1e12))))

    # Compute the cells about the run's results: losses, speed and memory
    losses, speeds = _numbers(run.validations, "lm_loss"), _numbers(rows, "tokens_per_second")
    mfu = _numbers(rows, "mfu")
    validation = losses[-1] if losses else summary.get("validation_loss")
    lowest = min(filter(math.isfinite, losses), default=None)
    also = f" (lowest {lowest:.4f})" if lowest not in (None, validation) else ""
    peak = max([*_numbers(rows, "peak_memory_bytes"), summary.get("peak_memory_bytes") or 0])

    # Count the run's faults: restarts from an earlier step, and non-finite losses
    went_back = int((at[0, 1:] <= at[0, :-1]).sum())
    not_finite = sum(not math.isfinite(loss) for loss in _numbers(rows, "lm_loss"))
    return {
        "state": run.state,
        "steps": steps,
        "tokens": _decimal(at[1, -1] if rows and at[1, -1] else None, 0),
        "training time": duration if rows else NOTHING,
        "training loss": _decimal(rows[-1].get("lm_loss"), 4) if rows else NOTHING,
        "validation loss": _decimal(validation, 4) + also,
        "test loss": _decimal(summary.get("test_loss"), 4),
        "unigram entropy of the validation text": _decimal(summary.get("unigram_entropy"), 4),
        "tokens per second, median": _decimal(statistics.median_high(speeds) if speeds else None, 0),
        "MFU, median": f"{100 * statistics.median_high(mfu):.1f} %" if mfu else NOTHING,
        "peak memory, GB": _decimal(peak / GIGA, 3) if peak else NOTHING,
        "inter-node MB per step and node": _megabytes(rows, "cross_bytes"),
        "intra-node MB per step and node, data parallel": _megabytes(rows, "local_bytes"),
        "intra-node MB per step and node, tensor parallel": _megabytes(rows, "tp_bytes"),
        "inter-node bytes, compared with ZeRO-3": times_fewer(cross, _zero3_bytes(run) or 0) or NOTHING,
        "skipped steps": _decimal(sum(_numbers(rows, "skipped")) or None, 0),
        "non-finite losses": _decimal(not_finite or None, 0),
        "restarts from an earlier step": _decimal(went_back or None, 0),
        "layout": run.topology.partition("\n")[0] or NOTHING,
        "notes": "; ".join(run.notes) or NOTHING,
    }


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    """Return the values of `key` in rows of a .jsonl file, without values that are missing or no numbers."""
    return [row[key] for row in rows if number(row.get(key)) is not None]


def _megabytes(rows: Sequence[Row], key: str) -> str:
    """Return the mean bytes per step in MB, as a cell of a table; "-" if no bytes were recorded.

    Args:
        rows: rows of metrics.jsonl. Each row has means over several steps.
        key: key of the bytes, such as "cross_bytes".
    """
    steps = [number(row.get("steps"), 1) for row in rows]
    sent = sum(count * number(row.get(key), 0) for count, row in zip(steps, rows, strict=True))
    return f"{sent / max(1, sum(steps)) / MEGA:,.3f}" if sent else NOTHING


def _decimal(value: Any, digits: int) -> str:
    """Return a value as a cell of a table: a number with `digits` decimals, "-" for anything else."""
    return NOTHING if number(value) is None else f"{value:,.{digits}f}"


def _flag(value: Any) -> str:
    """Return the recorded value of a flag as a cell of the report's table of flags."""
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value)
