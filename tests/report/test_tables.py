"""Tables say what the folders hold, and nothing where they hold nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megazpp.report.runs import read_runs
from megazpp.report.tables import (
    differences_in_words,
    flag_differences,
    summary_table,
    tiles,
    traffic_line,
    traffic_table,
)

MakeRun = Callable[..., Path]
MakeRow = Callable[..., dict[str, Any]]


def test_the_summary_says_what_came_out_of_each_run(make_run: MakeRun, make_row: MakeRow):
    whole = make_run(
        "whole",
        [make_row(2, tokens_per_second=100.0), make_row(4, lm_loss=4.5, skipped=1, tokens_per_second=300.0)],
        validation=[{"iteration": 2, "lm_loss": 4.0}, {"iteration": 4, "lm_loss": 4.25}],
        args={"train_iters": 4},
        summary={"iteration": 4, "unigram_entropy": 6.5, "cpu_seconds_per_token": 2e-6, "test_loss": None},
    )
    cut = make_run("cut", [make_row(2, lm_loss=math.nan)], args={"train_iters": 4})
    table = summary_table(read_runs([whole, cut]))
    assert table.head == ["", "whole", "cut"]
    cells = {row[0]: tuple(row[1:]) for row in table.rows}
    del cells["last log line"]
    assert cells == {
        "state": ("finished", "still running, or it crashed"),
        "steps": ("4", "2 of 4"),
        "tokens": ("400", "200"),
        "training time": ("4.0 s", "2.0 s"),
        "training loss": ("4.5000", "nan"),
        "validation loss": ("4.2500 (lowest 4.0000)", "-"),
        "unigram entropy of the validation text": ("6.5000", "-"),
        "tokens per second, median": ("300", "100"),
        "seconds per step, median": ("1.0000", "1.0000"),
        "CPU microseconds per token": ("2.0", "-"),
        "peak memory, GB": ("3.000", "3.000"),
        "MB per step and node: between nodes": ("4.000", "4.000"),
        "skipped steps": ("1", "-"),
        "losses that are not finite": ("-", "1"),
    }


def test_restarts_that_went_back_are_counted(make_run: MakeRun, make_row: MakeRow):
    (run,) = read_runs([make_run(rows=[make_row(i) for i in (2, 4, 4, 6, 2)])])
    assert ["times it went back (restarts)", "2"] in summary_table([run]).rows


def test_only_flags_that_differ_are_shown(make_run: MakeRun, make_row: MakeRow):
    flags = {"lr": 0.1, "seed": 1, "zeropp": True, "run_dir": "a", "save": None}
    one = make_run("one", [make_row(2)], args=flags)
    other = make_run("other", [make_row(2)], args=flags | {"lr": 0.2, "run_dir": "b", "save": "x"})
    older = make_run("older", [make_row(2)], args={"lr": 0.1})
    table = flag_differences(read_runs([one, other, older]))
    assert table.head == ["flag", "one", "other", "older"]
    assert table.rows == [["--lr", "0.1", "0.2", "0.1"], ["--save", "none", "x", "-"]]


def test_bytes_are_shown_by_axis_beside_what_zero_3_would_have_sent(make_run: MakeRun, make_row: MakeRow):
    traffic = [{"collective": "all_gather", "axis": "shard", "wire": "cross", "calls": 8, "sent_bytes": 12_000_000}]
    summary = {"iterations": 4, "traffic": traffic, "zero3": {"cross_bytes": 9_000_000, "formula": "3 k M"}}
    (run,) = read_runs([make_run(rows=[make_row(2)], summary=summary)])
    table = traffic_table(run)
    assert table is not None
    assert table.rows == [["shard", "cross", "all_gather", "8", "12.000", "3.000"]]
    assert traffic_line(run).startswith("Counted over the 4 steps of the last start. ZeRO-3 would have sent 9.000 MB")
    (without,) = read_runs([make_run("without", [make_row(2)])])
    assert traffic_table(without) is None


def test_tiles_are_what_is_looked_for_first_and_legends_say_what_differs(make_run: MakeRun, make_row: MakeRow):
    traffic = [{"axis": "cross", "wire": "cross", "sent_bytes": 2_000_000}]
    summary = {"traffic": traffic, "zero3": {"cross_bytes": 15_000_000}}
    first = make_run("a", [make_row(2), make_row(4)], args={"lr": 0.1, "save": "a"}, summary=summary)
    second = make_run("b", [make_row(2)], args={"lr": 0.2, "save": "b"}, validation=[{"iteration": 2, "lm_loss": 4.5}])
    runs = read_runs([first, second])
    assert tiles(runs[0]) == [
        ("training loss", "5.0000"),
        ("training time", "4.0 s"),
        ("tokens per second", "100"),
        ("bytes between nodes than ZeRO-3", "7.5 x fewer"),
    ]
    assert tiles(runs[1])[0] == ("validation loss", "4.5000")
    assert differences_in_words(runs) == ["--lr 0.1", "--lr 0.2"]
    assert differences_in_words(runs[:1]) == [""]
