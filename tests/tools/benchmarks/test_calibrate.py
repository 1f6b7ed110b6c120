"""The table without a fit: the recorded shares, a line for each row, the medians."""

from __future__ import annotations

import calibrate
import pytest

from megazpp.planner import published
from megazpp.planner.published import ROWS, SPEED_ROWS
from megazpp.topology.shares import DGX2_SHARES, H100_SHARES


def test_the_table_shows_recorded_shares_and_each_row_s_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(published, "ROWS", ROWS[:1])
    monkeypatch.setattr(published, "SPEED_ROWS", SPEED_ROWS[:1])
    monkeypatch.setattr(published, "median_errors", lambda shares: (0.25, 0.5))
    monkeypatch.setattr("sys.argv", ["calibrate.py", "--table"])
    calibrate.main()
    lines = capsys.readouterr().out.splitlines()
    assert f"ZeRO++: {DGX2_SHARES}" in lines
    assert lines[-5].startswith("ZeRO++   18B     1     400    1024   25.0 ->  35.0 ")
    assert lines[-5].endswith("calibration")
    assert lines[-4] == "median error on the rows that were not fitted: ratio 25.0%, TFLOP/s 50.0%"
    assert lines[-3] == f"H100: {H100_SHARES}"
    assert lines[-1].startswith("A100-SXM4-80GB   Llama 3 8B     64    8192         50%      2904 ")
