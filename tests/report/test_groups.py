"""Test the report on the groups of an elastic DiLoCo run: their state in each version, and their sums."""

import datetime
import json

import pytest
from helpers.run_folders import make_run, row

from megazpp.report.groups import groups_line, groups_table, read_rounds, states
from megazpp.report.page import report_html
from megazpp.report.runs import read_runs


def version(number: int, sent: dict[str, int], *merged: tuple[str, int, int], returned: int = 0) -> str:
    groups = [
        {"group": g, "steps": steps, "tokens": 10.0 * steps, "late": late, "waited": 0.5} for g, steps, late in merged
    ]
    fields = {"version": number, "time": 100.0 + number, "returned": returned, "sent_bytes": sent, "groups": groups}
    return json.dumps(fields)


LINES = [
    version(1, {"a": 10**6, "<b>": 10**6}, ("a", 10, 0), ("<b>", 10, 0)),
    version(2, {"a": 2 * 10**6, "<b>": 2 * 10**6}, ("a", 10, 0), ("<b>", 4, 0)),
    version(3, {"a": 3 * 10**6}, ("a", 10, 0), returned=6),
    version(4, {"a": 4 * 10**6, "<b>": 5 * 10**5}, ("a", 10, 0)),
    version(5, {"a": 5 * 10**6, "<b>": 10**6}, ("a", 10, 0), ("<b>", 10, 1)),
    '{"version": 6, "time": ',
    '{"version": 7, "time": 1, "returned": 0, "sent_bytes": [], "groups": []}',
]


@pytest.fixture
def rounds(tmp_path):
    file = tmp_path / "rounds.jsonl"
    file.write_text("\n".join(LINES))
    return read_rounds(file)


def test_group_is_whole_called_out_idle_or_late_in_each_version(rounds):
    """Check the state of each group in each version of LINES.

    "whole" stands for as many steps as the version's longest contribution, "part" for fewer steps, "late" for a
    contribution that a later version merges, "idle" for a group without a merged contribution, and "out" for a group
    that is not in the run.
    """
    assert states(rounds) == {"a": ["whole"] * 5, "<b>": ["whole", "part", "out", "idle", "late"]}


def test_table_sums_steps_and_bytes_of_a_group_that_started_again(rounds):
    _, b, a = groups_table(rounds)
    assert a == ["a", "5", "50", "0", "0", "2.5", "5.000"]
    # group b has sent 3 MB: 2 MB before its restart, and 1 MB after it, because its counter begins at 0 again
    assert b == ["<b>", "3", "24", "10", "1", "1.5", "3.000"]
    assert groups_line(rounds) == (
        "5 versions, 135 merged tokens per second; 13.5 % of the steps were merged late, 6 were trained again."
    )
    for later in rounds[2:]:
        later["time"] -= 50.0  # the coordinator was started again, on a host with another clock
    assert "180 merged tokens per second" in groups_line(rounds)


def test_page_has_a_strip_for_each_group_only_with_rounds(tmp_path, rounds):
    runs = read_runs([make_run(tmp_path / "run", [row(2)])])
    now = datetime.datetime(2026, 1, 2)
    assert "Replica groups" not in report_html(runs, now)
    html = report_html(runs, now, rounds)
    assert html.count('<div class="strip">') == 2
    assert '<i class="out" style="flex:1" title="version 3 to 3: not in the run"></i>' in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_file_without_versions_is_refused(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"iteration": 3}\n[1]\n')
    for name, message in (("other.jsonl", "no line is about a version"), ("none.jsonl", "cannot be read")):
        with pytest.raises(ValueError, match=f"--rounds .*{name}.*{message}"):
            read_rounds(tmp_path / name)
