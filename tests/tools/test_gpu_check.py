"""tools/gpu_check.py: what becomes of parts that fail, hang or are killed; which parts a budget has; flags."""

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
from gpu_check_parts import Check

TOOLS = Path(gpu_check.__file__).parent


def good(check: Check) -> None:
    check.row(figure=1)


def failing(check: Check) -> None:
    check.row(figure=2)
    check.fail("the bits differ")


def raising(check: Check) -> None:
    check.row(other=3)
    raise RuntimeError("no memory\nat all")


def hanging(check: Check) -> None:
    check.row(figure=4)
    program = check.folder / "hang.py"
    program.write_text("import subprocess\nsubprocess.run(['sleep', '611'])")
    code = check.run(str(program), check.folder / "log.txt", check.left())
    check.fail(f"ended with {code}")


@pytest.fixture(autouse=True)
def _stays_as_it_was(monkeypatch):
    monkeypatch.setattr(gpu_check, "exit_on_signals", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(TOOLS)


def check(parts: tuple[Part, ...], out: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, list[Any]]:
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    code = gpu_check.main(["--out", str(out), "--device", "cpu", *flags])
    return code, json.loads((out / "results.json").read_text())["parts"]


def test_parts_that_fail_or_raise_leave_their_rows_and_the_others_run(tmp_path, monkeypatch, capsys):
    parts = tuple(Part(part.__name__, "A title", part, (60, 60), 1) for part in (failing, raising, good))
    late = Part("late", "", good, (60, 60), 1000)
    code, found = check((*parts, late), tmp_path, monkeypatch)
    assert code == 1
    assert [part["status"] for part in found] == ["failed", "failed", "passed", "skipped"]
    assert [part["rows"] for part in found] == [[{"figure": 2}], [{"other": 3}], [{"figure": 1}], []]
    assert [part["failures"] for part in found] == [["the bits differ"], ["RuntimeError: no memory"], [], []]
    assert found[3]["notes"] == ["not run: less than the 1000 s that it needs are left"]
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith(gpu_check.REHEARSAL)
    assert "## failing: A title (failed, 0 s)\n\n| figure |\n|---|\n| 2 |\n\n- FAILED: the bits differ\n" in shown


def test_a_budget_has_its_parts_and_only_what_ran_counts(tmp_path, monkeypatch):
    parts = (Part("good", "", good, (60, 60), 1), Part("failing", "", failing, (0, 60), 1))
    for folder, flags, names in (
        ("short", ("--budget-minutes", "8"), ["good"]),
        ("long", ("--budget-minutes", "30"), ["good", "failing"]),
        ("asked", ("--budget-minutes", "8", "--parts", "failing"), ["failing"]),
    ):
        code, found = check(parts, tmp_path / folder, monkeypatch, *flags)
        assert (code, [part["name"] for part in found]) == (int("failing" in names), names)


def test_the_programs_of_8_and_30_minutes_fill_them():
    for long, minutes in ((False, 8), (True, 30)):
        assert sum(part.seconds[long] for part in gpu_check.PARTS) == 60 * minutes


@pytest.mark.slow
def test_a_program_that_hangs_is_ended_with_what_it_has_started(tmp_path, monkeypatch):
    parts = Part("hanging", "", hanging, (2, 2), 1), Part("good", "", good, (1, 1), 1)  # 4 of 6 s
    code, found = check(parts, tmp_path, monkeypatch, "--budget-minutes", "0.1")
    assert code == 1
    assert [part["status"] for part in found] == ["failed", "passed"]
    assert found[0]["failures"] == ["ended with None"]
    assert not running(b"sleep\x00611")


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_what_its_part_had_found(tmp_path):
    out = tmp_path / "out"
    program = (
        f"import sys; sys.path[:0] = [{str(TOOLS)!r}, {str(TOOLS.parent)!r}, {str(Path(__file__).parent)!r}]\n"
        "import gpu_check, test_gpu_check as here\n"
        "parts = (here.good, here.hanging)\n"
        "gpu_check.PARTS = tuple(gpu_check.Part(part.__name__, '', part, (9, 9), 1) for part in parts)\n"
        f"gpu_check.main(['--out', {str(out)!r}, '--device', 'cpu'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not running(b"hang.py") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    found = json.loads((out / "results.json").read_text())["parts"]
    assert [part["status"] for part in found] == ["passed", "running"]
    assert [part["rows"] for part in found] == [[{"figure": 1}], [{"figure": 4}]]
    assert "| 4 |" in (out / "table.md").read_text()
    time.sleep(0.5)
    assert not running(b"hang.py")


def running(words: bytes) -> list[Path]:
    """Processes whose command line has these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path] if words in path.read_bytes() else []
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.slow
def test_a_checkout_that_is_not_installed_is_enough(tmp_path):
    for absent in ("wandb", "torchao"):
        (tmp_path / f"{absent}.py").write_text("raise ImportError")
    paths = f"{tmp_path}:{Path(torch.__file__).parents[1]}"  # without site (-S) no .pth file leads to the checkout
    command = [sys.executable, "-S", str(TOOLS / "gpu_check.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--budget-minutes" in done.stdout
