"""Parts of tools/gpu_check.py at their smallest where that takes seconds; `python tools/gpu_check.py` rehearses all."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from gpu_parts import correct, kernels, overhead
from gpu_parts.part import Report, Task

pytestmark = pytest.mark.slow


def rehearsed(tmp_path: Path) -> tuple[Task, Report]:
    return Task(tmp_path, True, 600.0, None), Report(tmp_path / "report.json")


def test_a_pass_over_the_gradients_is_timed_with_its_parts(tmp_path: Path):
    task, report = rehearsed(tmp_path)
    kernels.whole_pass(task.device, 16 * 1024, 1, report)
    *pieces, whole = report.rows
    assert whole["elements"] == 16 * 1024
    assert whole["us"] == pytest.approx(sum(float(row["us"]) for row in pieces[1:]), rel=1e-2, abs=0.5)


def test_one_rank_pretends_to_be_sixteen(tmp_path: Path):
    task, report = rehearsed(tmp_path)
    overhead.measure(task, report)
    assert [row["layers"] for row in report.rows] == ["2 of gpt_1b3, TP 1", "1 of gpt_6b7, TP 2"]
    assert all(float(row["ms of a step"]) > 0 for row in report.rows)
    assert json.loads(report.file.read_text())["rows"] == report.rows


def test_tests_that_did_not_end_in_time_are_counted_and_those_that_failed_are_failures(tmp_path: Path):
    _, report = rehearsed(tmp_path)
    log = """
tests/kernels/test_a.py::test_x[8-128-dtype0] PASSED                     [ 33%]
tests/kernels/test_a.py::test_x[8-256-dtype0] FAILED                     [ 66%]
tests/kernels/test_a.py::test_x[8-512-dtype0] """
    correct.add_rows(Counter({"kernels/test_a": 4}), Counter(correct.DONE.findall(log)), report)
    assert report.rows == [{"tests": "kernels/test_a", "passed": 1, "failed": 1, "skipped": 0, "no time": 2}]
    assert "1 tests of kernels/test_a" in report.failures[0]
    assert [correct.is_late(f"a.py::quantizes[8-{block}-dtype0]") for block in (32, 128, 256)] == [True, False, False]
