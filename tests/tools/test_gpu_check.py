"""tools/gpu_check.py: what it does with its time and with parts that fail; and its parts at their smallest.

The parts are rehearsed here where that takes seconds; all of them by `python tools/gpu_check.py --out DIR`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_check import Part

TOOLS = Path(gpu_check.__file__).parent
HEAD = """
import time
def measure(task, report):
"""
BODIES = {
    "good": "report.row(figure=1)",
    "failing": "report.row(figure=2)\n    report.fail('the bits differ')",
    "raising": "report.row(figure=3)\n    raise RuntimeError('no memory')",
    "dying": "report.row(figure=4)\n    import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "hanging": "report.row(figure=5)\n    time.sleep(600)",
}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that do what BODIES says stand in for the parts."""
    for name, body in BODIES.items():
        (tmp_path / f"{tmp_path.name}_{name}.py").write_text(f"{HEAD}    {body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "MODULE", tmp_path.name + "_{}")
    monkeypatch.setattr(gpu_check, "exit_on_signals", lambda: None)
    return tmp_path


def check(parts: tuple[Part, ...], out: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, list[Any]]:
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    code = gpu_check.main(["--out", str(out), *flags])
    return code, json.loads((out / "results.json").read_text())["parts"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the heading is a rehearsal's")
def test_parts_that_fail_raise_or_die_leave_their_rows_and_the_others_run(
    parts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    names = ("failing", "raising", "dying", "good")
    needs = Part("good", "", 60, 1, ("a_module_that_is_not_there",))
    code, found = check(
        (*(Part(name, "", 60, 1) for name in names), needs._replace(name="lacking")), parts / "out", monkeypatch
    )
    assert code == 1
    assert [part["status"] for part in found] == ["failed", "failed", "failed", "passed", "skipped"]
    assert [row["figure"] for part in found for row in part["rows"]] == [2, 3, 4, 1]
    assert found[0]["failures"] == ["the bits differ"]
    assert found[1]["failures"] == ["RuntimeError: no memory"]
    assert "exit code -9" in found[2]["failures"][0]
    assert "a_module_that_is_not_there" in found[4]["notes"][0]
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith(gpu_check.REHEARSAL)
    assert "| 4 |" in shown
    assert "FAILED: the bits differ" in shown


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_what_no_time_is_left_for_is_not_begun(
    parts: Path, monkeypatch: pytest.MonkeyPatch
):
    hanging, late = Part("hanging", "", 2, 1), Part("good", "", 1, 20)  # 4 of 6 s
    began = time.monotonic()
    code, found = check((hanging, late), parts / "out", monkeypatch, "--budget-minutes", "0.1")
    assert time.monotonic() - began < 30
    assert code == 1
    assert found[0]["rows"] == [{"figure": 5}]
    assert "was not done in 4 s" in found[0]["failures"][0]
    assert found[1]["status"] == "skipped"
    assert "less than the 20 s" in found[1]["notes"][0]


def test_only_what_ran_and_failed_counts_in_the_exit_code(parts: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = (Part("good", "", 60, 1), Part("failing", "", 60, 1))
    code, found = check(chosen, parts / "out", monkeypatch, "--parts", "good")
    assert (code, [part["name"] for part in found]) == (0, ["good"])


@pytest.mark.slow
def test_results_are_whole_after_a_kill_and_its_part_ends_with_it(parts: Path):
    out = parts / "out"
    program = (
        f"import sys; sys.path[:0] = [{str(TOOLS)!r}, {str(TOOLS.parent)!r}]\n"
        "import gpu_check\n"
        f"gpu_check.MODULE = {gpu_check.MODULE!r}\n"
        "gpu_check.PARTS = (gpu_check.Part('good', '', 60, 1), gpu_check.Part('hanging', '', 60, 1))\n"
        f"gpu_check.main(['--out', {str(out)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.DEVNULL)
    hung = out / "hanging" / "report.json"
    deadline = time.monotonic() + 120
    while not (hung.exists() and json.loads(hung.read_text())["rows"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    [good] = json.loads((out / "results.json").read_text())["parts"]
    assert (good["name"], good["rows"]) == ("good", [{"figure": 1}])
    assert "| 1 |" in (out / "table.md").read_text()
    time.sleep(0.5)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if parts.name.encode() + b"_" in _read(path)]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_rows_with_other_headings_begin_another_table():
    rows = [{"a": 1}, {"a": 2}, {"b": 3}]
    assert gpu_check.table(rows) == ["| a |", "|---|", "| 1 |", "| 2 |", "", "| b |", "|---|", "| 3 |", ""]


def test_clocks_are_those_of_busy_moments(tmp_path: Path):
    file = tmp_path / "clocks.csv"
    file.write_text("345, 70.1, 30, 0\n1755, 690.5, 61, 100\n[N/A], 1, 1, 90\n1980, 500.0, 58, 97\n19")
    [line] = gpu_check.describe_clocks(file)
    assert line == "while busy, SM clock 1755 to 1980 MHz, at most 690 W and 61 C (2 samples)"
    assert gpu_check.describe_clocks(tmp_path / "none") == []


def test_results_of_another_run_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "results.json").write_text("{}")
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} holds the results of another run" in capsys.readouterr().err
