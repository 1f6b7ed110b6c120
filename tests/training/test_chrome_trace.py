"""The Chrome trace: what it says about ranks and tracks, and that it reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazpp.parallel.timeline import Span
from megazpp.training.chrome_trace import chrome_trace, read_chrome_trace, rows_without_crossings, sorted_tracks

SPANS = [
    [
        Span("step", "step 3", 0.0, 1.0, True),
        Span("cross", "all_gather", 0.25, 0.5),
        Span("wait", "a", 0.5, 0.25, True),
    ],
    [Span("zebra", "x", 0.0, 0.125)],
]


def test_a_trace_has_a_process_per_rank_a_thread_per_lane_and_times_in_microseconds():
    events = chrome_trace(SPANS, ["rank 0", "rank 1"])["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["step", "wait", "cross", "zebra"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {0: "rank 0", 1: "rank 1"}
    (gather,) = (e for e in events if e["name"] == "all_gather")
    assert (gather["ph"], gather["ts"], gather["dur"]) == ("X", 250_000, 500_000)
    assert names[gather["pid"], gather["tid"]] == "cross"


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path):
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(chrome_trace(SPANS, ["rank 0", "rank 1"])))
    read = read_chrome_trace(path)
    assert list(read) == ["rank 0", "rank 1"]
    assert [sorted(spans) for spans in read.values()] == [sorted(spans) for spans in SPANS]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{"name": "process_name"}]}', "\N{SNOWMAN}"]
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-16")
    with pytest.raises(ValueError, match=r"other\.json is not a timeline"):
        read_chrome_trace(path)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json is not a timeline"):
        read_chrome_trace(path)


def test_spans_that_cross_get_rows_of_their_own_and_nested_ones_do_not():
    outer, inner, later = Span("cross", "outer", 0, 4), Span("cross", "inner", 1, 3), Span("cross", "later", 4, 1)
    crossing, again = Span("cross", "crossing", 2, 3), Span("cross", "again", 3, 4)
    spans = [again, later, crossing, inner, outer, Span("local", "other track", 0, 9)]
    rows = rows_without_crossings(spans, "cross")
    assert [[s.name for s in row] for row in rows] == [["outer", "inner", "later"], ["crossing"], ["again"]]


def test_lanes_stand_in_one_order_and_unknown_ones_below():
    tracks = ["shard", "cross", "compute", "wait", "another", "tp", "local", "step"]
    spans = [Span(track, "x", 0.0, 1.0) for track in tracks]
    assert sorted_tracks(spans) == ["step", "compute", "wait", "tp", "local", "cross", "another", "shard"]
