"""What the parts of tools/gpu_check.py give back."""

from __future__ import annotations

from gpu_parts.part import table


def test_rows_with_other_headings_begin_another_table():
    rows = [{"a": 1}, {"a": 2}, {"b": 3}]
    assert table(rows) == ["| a |", "|---|", "| 1 |", "| 2 |", "", "| b |", "|---|", "| 3 |", ""]
