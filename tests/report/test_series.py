"""Curves are where they were measured, keep their extremes when they are thinned, and break at a restart."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazpp.report.runs import read_runs
from megazpp.report.series import curves, thin, times

MakeRun = Callable[..., Path]
MakeRow = Callable[..., dict[str, Any]]


def test_training_time_counts_every_step_also_those_that_a_restart_does_again(make_run: MakeRun, make_row: MakeRow):
    rows = [make_row(10, steps=10), make_row(20, steps=10), make_row(15, steps=5, step_seconds=3.0)]
    at = times(read_runs([make_run(rows=rows)])[0])
    assert at.steps.tolist() == [10, 20, 15]
    assert at.tokens.tolist() == [1000, 2000, 1500]
    assert at.seconds.tolist() == [10, 20, 35]


def test_lines_that_do_not_say_how_many_steps_they_cover_cover_those_since_the_line_before(
    make_run: MakeRun, make_row: MakeRow
):
    rows = [make_row(i, steps=None) for i in (10, 20, 15)]
    assert times(read_runs([make_run(rows=rows)])[0]).seconds.tolist() == [10, 20, 21]


def test_a_curve_breaks_where_the_iterations_go_back(make_run: MakeRun, make_row: MakeRow):
    rows = [make_row(i, lm_loss=float(i)) for i in (2, 4, 6, 4, 6, 8)]
    found = curves(read_runs([make_run(rows=rows)])[0], 100)
    assert found["lm_loss"] == [
        [[2, 4, 6], [200, 400, 600], [2, 4, 6], [2, 4, 6]],
        [[4, 6, 8], [400, 600, 800], [8, 10, 12], [4, 6, 8]],
    ]


def test_a_validation_stands_at_the_time_of_the_steps_that_were_not_done_again(make_run: MakeRun, make_row: MakeRow):
    rows = [make_row(i) for i in (2, 4, 6, 4, 6, 8)]
    run = read_runs([make_run(rows=rows, validation=[{"iteration": 5, "lm_loss": 7.0}])])[0]
    assert curves(run, 100)["validation"] == [[[5], [500], [9], [7]]]


def test_values_that_are_not_finite_are_kept_as_gaps_and_missing_ones_are_left_out(
    make_run: MakeRun, make_row: MakeRow
):
    rows = [make_row(1, grad_norm=None), make_row(2, lm_loss=math.nan), make_row(3, grad_norm=math.inf)]
    found = curves(read_runs([make_run(rows=rows)])[0], 100)
    assert [segment[3] for segment in found["lm_loss"]] == [[5, None, 5]]
    assert [segment[0] for segment in found["grad_norm"]] == [[2, 3]]
    assert [segment[3] for segment in found["grad_norm"]] == [[1, None]]


def test_bytes_and_memory_are_in_the_unit_of_their_axis_and_unused_wires_have_no_curve(
    make_run: MakeRun, make_row: MakeRow
):
    found = curves(read_runs([make_run(rows=[make_row(2)])])[0], 100)
    assert (found["cross_bytes"][0][3], found["peak_memory_bytes"][0][3]) == ([4], [3])
    assert not {"tp_bytes", "local_bytes", "validation"} & set(found)


@pytest.mark.parametrize("length", [1, 63, 1000, 100_003])
def test_thinning_keeps_ends_spikes_and_what_is_not_finite(length: int):
    values = np.random.default_rng(0).normal(size=length)
    low, high, bad = length // 7, length // 3, length // 2
    values[low], values[high] = -100.0, 100.0
    values[bad] = math.nan
    kept = thin(values, 200)
    assert len(kept) <= 200 + 4
    assert {0, length - 1, bad} <= set(kept.tolist())
    if length >= 63:
        assert {low, high} <= set(kept.tolist())
    assert np.all(np.diff(kept) > 0)
    if length <= 200:
        assert len(kept) == length


def test_a_long_run_keeps_a_spike_in_a_small_page(make_run: MakeRun, make_row: MakeRow):
    rows = [make_row(i, steps=1, lm_loss=99.0 if i == 4321 else 5 + math.sin(i)) for i in range(1, 10_001)]
    ((steps, _, _, losses),) = curves(read_runs([make_run(rows=rows)])[0], 300)["lm_loss"]
    assert losses[steps.index(4321)] == 99.0
    assert len(steps) <= 304
