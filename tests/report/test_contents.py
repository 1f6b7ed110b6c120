"""Test the contents of a report: curves keep extremes and break at a restart, and tables show values of run folders."""

import datetime
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.run_folders import make_run, row

from megazpp.report.contents import (
    completions_table,
    curves,
    differences_in_words,
    experts_table,
    flag_differences,
    same_loss_table,
    summary_table,
    thin,
    times,
    traffic_line,
    traffic_table,
)
from megazpp.report.page import report_html
from megazpp.report.runs import Run, read_runs

# ---- curves of a report -----------------------------------------------------------------------------------------


def read(folder: Path, *rows: dict[str, Any], **files: Any) -> Run:
    return read_runs([make_run(folder, rows, **files)])[0]


def test_training_time_includes_steps_that_a_restart_repeats(tmp_path):
    for name, steps, seconds, sent in (
        ("said", (10, 10, 5), [10, 20, 35], [40e6, 80e6, 100e6]),
        # a record without a number of steps stands for the iterations since the record before, or for one step if the
        # iteration decreased
        ("not said", (None, None, None), [10, 20, 23], [40e6, 80e6, 84e6]),
    ):
        rows = [row(i, steps=n, step_seconds=x) for i, n, x in zip((10, 20, 15), steps, (1.0, 1.0, 3.0), strict=True)]
        assert times(read(tmp_path / name, *rows)).tolist() == [[10, 20, 15], [1000, 2000, 1500], seconds, sent], name


def test_curve_breaks_at_a_restart_and_validations_keep_their_steps(tmp_path):
    rows = [row(i, lm_loss=float(i)) for i in (2, 4, 6, 4, 6, 8)]
    found = curves(read(tmp_path / "run", *rows, validation=[{"iteration": 5, "lm_loss": 7.0}]), 100)
    assert found["lm_loss"] == [
        [[2, 4, 6], [200, 400, 600], [2, 4, 6], [8_000_000, 16_000_000, 24_000_000], [2, 4, 6]],
        [[4, 6, 8], [400, 600, 800], [8, 10, 12], [32_000_000, 40_000_000, 48_000_000], [4, 6, 8]],
    ]
    assert found["validation"] == [[[5], [500], [9], [36_000_000], [7]]]


def test_non_finite_values_become_gaps_and_missing_ones_are_left_out(tmp_path):
    rows = [row(1, grad_norm=None), row(2, lm_loss=math.nan), row(3, grad_norm=math.inf)]
    found = curves(read(tmp_path / "run", *rows), 100)
    assert [segment[4] for segment in found["lm_loss"]] == [[5, None, 5]]
    assert [(segment[0], segment[4]) for segment in found["grad_norm"]] == [([2, 3], [1, None])]
    # Values are in the unit of the curve's axis (MB, GB), and links over which nothing was sent have no curve.
    assert (found["cross_bytes"][0][4], found["peak_memory_bytes"][0][4]) == ([4] * 3, [3] * 3)
    assert not {"tp_bytes", "local_bytes", "validation"} & set(found)


@pytest.mark.parametrize("length", [1000, 100_003])
def test_thinning_keeps_ends_spikes_and_non_finite_values(length):
    values = np.random.default_rng(0).normal(size=length)
    low, high, bad = length // 7, length // 3, length // 2
    values[[low, high, bad]] = -100.0, 100.0, math.nan
    kept = thin(values, 200).tolist()
    assert kept == sorted(kept)
    assert {0, low, high, bad, length - 1} <= {*kept}
    assert len(kept) == len({*kept}) <= 200 + 4
    assert thin(np.ones(200), 200).tolist() == list(range(200))


# ---- tables of a report -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterations", "end", "state", "steps"),
    [
        ([2, 4, 6, 8, 6], 6, "finished", "6"),  # went back to iteration 4, and finished earlier than before
        ([2, 4, 6, 8, 6], 8, "still running, or it crashed", "6 of 8"),  # went back after it had finished
        ([2, 4], 2, "still running, or it crashed", "4 of 2"),  # trains longer than before
        ([2, 4], 8, "finished", "8"),  # lost its last rows on a full disk
        ([], 0, "finished", "0"),
    ],
)
def test_state_and_steps_are_those_of_the_last_start(iterations, end, state, steps, tmp_path):
    folder = make_run(
        tmp_path / "run", list(map(row, iterations)), summary={"iteration": end}, args={"train_iters": end}
    )
    cells = dict(summary_table(read_runs([folder])))
    assert (cells["state"], cells["steps"]) == (state, steps)


def test_summary_table_shows_the_result_of_each_run(tmp_path):
    whole = make_run(
        tmp_path / "whole",
        [row(2, tokens_per_second=100.0), row(4, lm_loss=4.5, skipped=1, tokens_per_second=300.0)],
        validation=[{"iteration": 2, "lm_loss": 4.0}, {"iteration": 4, "lm_loss": 4.25}],
        args={"train_iters": 4},
        summary={"iteration": 4, "unigram_entropy": 6.5, "test_loss": None},
    )
    cut = make_run(tmp_path / "cut", [row(2, lm_loss=math.nan), row(1), row(1)], args={"train_iters": 4})
    cells = {name: tuple(cells) for name, *cells in summary_table(read_runs([whole, cut]))}
    assert cells == {
        "": ("whole", "cut"),
        "state": ("finished", "still running, or it crashed"),
        "steps": ("4", "1 of 4"),
        "tokens": ("400", "100"),
        "training time": ("4.0 s", "6.0 s"),
        "training loss": ("4.5000", "5.0000"),
        "validation loss": ("4.2500 (lowest 4.0000)", "-"),
        "unigram entropy of the validation text": ("6.5000", "-"),
        "tokens per second, median": ("300", "100"),
        "peak memory, GB": ("3.000", "3.000"),
        "inter-node MB per step and node": ("4.000", "4.000"),
        "skipped steps": ("1", "-"),
        "non-finite losses": ("-", "1"),
        "restarts from an earlier step": ("-", "2"),
    }


def test_only_differing_flags_are_shown_and_legend_names_them(tmp_path):
    flags = {"lr": 0.1, "seed": 1, "zeropp": True, "run_dir": "a", "save": None}
    one = read(tmp_path / "one", row(2), args=flags)
    other = read(tmp_path / "other", row(2), args=flags | {"lr": 0.2, "run_dir": "b", "save": "x"})
    older = read(tmp_path / "older", row(2), args={"lr": 0.1})
    assert flag_differences([one, other, older]) == [
        ["flag", "one", "other", "older"],
        ["--lr", "0.1", "0.2", "0.1"],
        ["--save", "none", "x", "-"],
    ]
    # The legend leaves out flags with paths, because they do not describe a run.
    assert differences_in_words([one, other]) == ["--lr 0.1", "--lr 0.2"]
    assert differences_in_words([one]) == [""]


def test_bytes_are_shown_by_axis_and_compared_with_zero_3(tmp_path):
    traffic = [{"collective": "all_gather", "axis": "shard", "wire": "cross", "calls": 8, "sent_bytes": 12_000_000}]
    summary = {"iterations": 4, "traffic": traffic, "zero3": {"cross_bytes": 90_000_000, "formula": "3 k M"}}
    run = read(tmp_path / "run", row(2), row(4), summary=summary)
    assert traffic_table(run)[1:] == [["shard", "inter-node", "all_gather", "8", "12.000", "3.000"]]
    assert traffic_line(run).startswith("Counted over the 4 steps since the last start. ZeRO-3 would have sent 90.000")
    known = read(tmp_path / "known", row(2, mfu=0.25), row(4, mfu=0.5))
    summary = {name: tuple(cells) for name, *cells in summary_table([run, known])}
    assert summary["inter-node bytes, compared with ZeRO-3"] == ("7.5 x fewer", "-")
    assert summary["MFU, median"] == ("-", "50.0 %")


def test_cost_of_the_same_loss_is_read_at_the_first_validation_that_reaches_it(tmp_path):
    def validations(*losses: float) -> list[dict[str, float]]:
        return [{"iteration": 2 * at, "lm_loss": loss} for at, loss in enumerate(losses, 1)]

    rows = [row(at, step_seconds=900.0, cross_bytes=500_000_000) for at in (2, 4, 6)]
    cheap = [row(at, step_seconds=450.0, cross_bytes=0) for at in (2, 4, 6)]
    best = read(tmp_path / "best", *rows, validation=validations(5.0, 3.9, 3.5))
    worst = read(tmp_path / "worst", *cheap, validation=validations(5.0, 4.5, 4.0))
    assert same_loss_table([best, worst]) == [
        ["", "best", "worst"],
        ["steps to a validation loss of 4.0000", "4", "6"],
        ["tokens", "400", "600"],
        ["hours of training", "1.0000", "0.7500"],
        ["inter-node GB per node", "2.000", "0.000"],
    ]
    assert len(same_loss_table([best, read(tmp_path / "none", row(2))])) == 1
    page = report_html([best, worst], datetime.datetime(2026, 1, 2))
    assert page.count("<h2>Cost of the same loss</h2>") == 1
    assert "<h2>Cost" not in report_html([best], datetime.datetime(2026, 1, 2))


def test_report_on_one_run_lists_its_flags_and_its_sample(tmp_path):
    sample = {"iteration": 4, "prompt": "Call me", "completion": " Ishmael."}
    run = read(tmp_path / "run", row(4), args={"lr": 0.125, "save": None}, completions=[sample])
    assert completions_table(run) == [["iteration", "prompt", "completion"], ["4", "Call me", " Ishmael."]]
    page = report_html([run], datetime.datetime(2026, 1, 2))
    assert "<summary>All 2 flags</summary>" in page
    assert '<th scope="row">--lr</th><td>0.125</td>' in page


def test_latest_completions_are_shown_with_rewards(tmp_path):
    drawn = {"iteration": 3, "prompt": "p", "completion": ["a"], "rewards": {"right": 0.5, "long": None}}
    run = read(tmp_path / "run", row(2), completions=[{"iteration": 2}, *[drawn] * 16])
    assert completions_table(run)[1:] == [["3", "p", '["a"]', "right 0.5, long nan"]] * 16
    without = read(tmp_path / "without", row(2))
    assert len(traffic_table(without)) == len(completions_table(without)) == 1


def test_loads_of_experts_are_shown_by_layer(tmp_path):
    loads = {"max_expert_load": 1.5, "max_expert_load/layer_1": 2.0, "idle_experts/layer_1": 0.25}
    table = experts_table(read(tmp_path / "run", row(1), row(2, **loads)))
    assert table[1:] == [["1", "2.000", "0.250", "-", "-"]]
    assert len(experts_table(read(tmp_path / "dense", row(1)))) == 1
