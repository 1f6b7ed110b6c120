"""The curves of a run: which there are, what they are drawn against, and how many points of them are kept.

training time    seconds of all steps so far, those that a restart did again included; without validations and saves
segments         a curve is cut where the iterations go back: at a restart
thinning         of every bucket of neighbours the lowest and the highest stay, so that no spike disappears
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megazpp.base.formatting import GIGA, MEGA
from megazpp.report.runs import Row, Run, number

Segment = list[list[float | None]]

DIGITS = 6  # significant, in the page


class Chart(NamedTuple):
    """One picture.

    Attributes:
        key: of metrics.jsonl.
        unit: what the vertical axis says.
        scale: "fit": the values' range, "zero": from zero, "log".
        factor: from what is recorded to `unit`.
    """

    key: str
    title: str
    unit: str
    scale: str
    factor: float = 1.0


LOSS = Chart("lm_loss", "Loss", "nats per token", "fit")
CHARTS = (
    LOSS,
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


class Times(NamedTuple):
    """The places of a run's rows on the horizontal axes."""

    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray


def times(run: Run) -> Times:
    """The times of the rows of metrics.jsonl."""
    before, total, seconds = 0, 0.0, []
    for row in run.rows:
        iteration = row["iteration"]
        steps = number(row.get("steps")) or max(1, iteration - before if iteration > before else 1)
        total += steps * max(0.0, _finite(row.get("step_seconds")))
        seconds.append(total)
        before = iteration
    steps, tokens = [row["iteration"] for row in run.rows], [_finite(row.get("consumed_tokens")) for row in run.rows]
    return Times(*(np.array(column, dtype=np.float64) for column in (steps, tokens, seconds)))


def curves(run: Run, max_points: int) -> dict[str, list[Segment]]:
    """The points of every chart that the run has something for, and of its validations.

    Returns:
        by the chart's key, and "validation": segments, each [steps, tokens, seconds, values], where None is a value
        that is not finite.
    """
    at = times(run)
    found = {chart.key: _curve(run.rows, chart.key, at, max_points, chart.factor) for chart in CHARTS}
    found["validation"] = _curve(run.validations, "lm_loss", _validation_times(run, at), max_points)
    found["validation_reward"] = _curve(run.validations, "reward", _validation_times(run, at), max_points)
    for key in ("cross_bytes", "local_bytes", "tp_bytes"):
        if not any(value for segment in found[key] for value in segment[3]):
            found[key] = []  # a wire that the run does not use
    return {key: segments for key, segments in found.items() if segments}


def thin(values: np.ndarray, max_points: int) -> np.ndarray:
    """Indices of at most about `max_points` values: both ends, and of each bucket the extremes and a value that is not
    finite.
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


def _curve(rows: Sequence[Row], key: str, at: Times, max_points: int, factor: float = 1.0) -> list[Segment]:
    has = np.array([i for i, row in enumerate(rows) if number(row.get(key)) is not None], dtype=np.int64)
    if not len(has):
        return []
    restarts = np.flatnonzero(np.diff(at.steps[has]) <= 0) + 1
    segments = []
    for index in np.split(has, restarts):
        values = np.array([float(rows[i][key]) * factor for i in index], dtype=np.float64)
        kept = thin(values, max_points * len(index) // len(has))
        columns = (at.tokens[index[kept]], at.seconds[index[kept]], values[kept])
        steps: list[float | None] = [int(step) for step in at.steps[index[kept]]]
        segments.append([steps, *([_short(value) for value in column] for column in columns)])
    return segments


def _validation_times(run: Run, at: Times) -> Times:
    """By the iteration, along the rows that no restart has done again."""
    latest = np.full(len(at.steps), True)
    if len(at.steps):  # a row is done again if a later one has no higher iteration
        latest = np.minimum.accumulate(np.append(at.steps[1:], np.inf)[::-1])[::-1] > at.steps
    steps = np.array([row["iteration"] for row in run.validations], dtype=np.float64)
    known, *others = (np.insert(column[latest], 0, 0.0) for column in at)
    return Times(steps, *(np.interp(steps, known, column) for column in others))


def _finite(value: Any) -> float:
    return float(value) if number(value) is not None and math.isfinite(value) else 0.0


def _short(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded
