"""The tool writes one page, by default into the first folder, or says in a line why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "lm_loss": 5.0}) + "\n")
    return tmp_path / "run"


def test_the_page_is_in_the_first_folder_or_where_it_was_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert report.main([str(folder)]) == 0
    assert report.main([str(folder), "--output", str(tmp_path / "my.html")]) == 0
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\nreport: {tmp_path / 'my.html'}\n"
    for page in (folder / "report.html", tmp_path / "my.html"):
        assert page.read_text().endswith("</body></html>\n")


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, ["none"], "none is no folder"),
        (b"\x00\xff junk", ["run"], "metrics.jsonl: line 1 is no JSON object"),
        (None, ["run", "--output", "run/metrics.jsonl"], "metrics.jsonl exists and is no report"),
        (None, ["run", "--output", "none/r.html"], "none/r.html cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_work_is_one_line_and_destroys_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    content: bytes | None, arguments: list[str], message: str,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (folder / "metrics.jsonl").write_bytes(content)
    before = (folder / "metrics.jsonl").read_bytes()
    assert report.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("report.py: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("metrics.jsonl", before)]
