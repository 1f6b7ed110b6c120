"""The picture of a timeline: that it is drawn, for the ranks that were asked for, and readable errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plot_timeline
import pytest

from megazpp.parallel.timeline import Span
from megazpp.training.step_timeline import chrome_trace

STEP = [
    Span("step", "step 3", 1.0, 2.0, True),
    Span("compute", "forward", 1.0, 0.75, True),
    Span("compute", "backward", 1.75, 1.0, True),
    Span("wait", "local gather", 1.25, 0.25, True),
    Span("cross", "all_gather", 1.25, 0.5),
    Span("cross", "all_to_all", 1.5, 0.75),  # crosses the one before
    Span("an axis of its own", "all_reduce", 2.25, 0.5, True),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(chrome_trace([STEP, STEP[:3]], ["rank 0, node 0", "rank 1, node 1"])))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    monkeypatch.setattr("sys.argv", ["plot_timeline.py", *map(str, argv)])
    return plot_timeline.main()


@pytest.mark.parametrize(
    ("ranks", "seen"),
    [((), {"rank 0, node 0", "rank 1, node 1"}), ((1,), {"rank 1, node 1"}), ((0,), {"rank 0, node 0"})],
)
def test_the_picture_has_the_tracks_of_the_ranks_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, trace: Path, ranks: tuple[int, ...], seen: set[str]
):
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"  # text stays text
    out = trace.with_name("picture.svg")
    assert run(monkeypatch, trace, "--out", out, *(["--ranks", *ranks] if ranks else [])) == 0
    picture = out.read_text()
    assert {name for name in ("rank 0, node 0", "rank 1, node 1") if name in picture} == seen
    assert "step 3, 2.000 s" in picture
    assert "forward" in picture
    assert ("an axis of its own" in picture) == (0 in (ranks or (0,)))
    if 0 in (ranks or (0,)):
        assert "75% of the cross axis" in picture  # a quarter of its second lies under the wait


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["timeline.json", "--out", "x.png", "--ranks", "2"], "--ranks 2: the trace has ranks 0 to 1"),
        (["missing.json", "--out", "x.png"], "missing.json"),
        (["timeline.json", "--out", "x.nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path, flags: list[Any], message: str
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(trace.parent)
    assert run(monkeypatch, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("plot_timeline.py: error: ")
    assert message in error
    assert error.count("\n") == 1
