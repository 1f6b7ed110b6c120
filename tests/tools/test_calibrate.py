"""The table without a fit: the recorded shares, a line for each row, the medians."""

from __future__ import annotations

import calibrate
import pytest

from megazpp.planner.published import ROWS
from megazpp.topology.shares import DGX2_SHARES


def test_the_table_shows_recorded_shares_and_each_row_s_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(calibrate, "ROWS", ROWS[:1])
    monkeypatch.setattr(calibrate, "median_errors", lambda shares: (0.25, 0.5))
    monkeypatch.setattr("sys.argv", ["calibrate.py", "--table"])
    calibrate.main()
    lines = capsys.readouterr().out.splitlines()
    assert f"ZeRO++: {DGX2_SHARES}" in lines
    assert lines[-2].startswith("ZeRO++   18B     1     400    1024   25.0 ->  35.0 ")
    assert lines[-2].endswith("calibration")
    assert lines[-1] == "median error on the rows that were not fitted: ratio 25.0%, TFLOP/s 50.0%"
