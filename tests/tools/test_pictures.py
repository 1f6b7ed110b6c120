"""What draws looks for matplotlib before it works; what measures goes on without it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import benchmark_cluster
import pytest
import scaling_study
from benchmark_cluster import Results
from benchmark_cluster_report import Sample
from scaling_study import Study

TOOLS = {
    "plot_timeline": "missing.json --out x.png",
    "inspect_dataset": "--input missing --histogram x.png",
}


@pytest.mark.parametrize(("tool", "flags"), TOOLS.items(), ids=TOOLS)
def test_without_matplotlib_the_first_thing_said_is_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tool: str, flags: str
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("sys.argv", [f"{tool}.py", *flags.split()])
    monkeypatch.chdir(tmp_path)
    main = import_module(tool).main
    assert main(*([flags.split()] if tool == "inspect_dataset" else [])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "pip install matplotlib" in err
    assert not list(tmp_path.iterdir())


def test_a_study_without_matplotlib_says_so_first_and_writes_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["scaling_study.py", "--out", str(tmp_path)])
    tiny = Study("tiny on laptops", "two_laptops", "@configs/gpt_tiny.args --vocab-size 512 --micro-batch-size 4")
    monkeypatch.setattr(scaling_study, "STUDIES", (tiny,))
    monkeypatch.setattr(scaling_study, "SIZES", (2,))
    assert scaling_study.main() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.md"]
    assert capsys.readouterr().err == left_out(tmp_path / "scaling.svg")


def test_a_benchmark_without_matplotlib_says_so_first_and_writes_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["benchmark_cluster.py", "--out", str(tmp_path)])

    def measure(_: object, results: Results) -> None:
        assert "plot.png is left out" in capsys.readouterr().err
        results.parameters = 1
        results.samples = [Sample(1, 1, "1gbit", 0, "zero3", 1.0, 1.0, 1.0, [1, 1], [1, 1])]

    monkeypatch.setattr(benchmark_cluster, "measure", measure)
    assert benchmark_cluster.main() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]


def left_out(picture: Path) -> str:
    return f"{picture} is left out: it needs matplotlib, which is not installed (pip install matplotlib)\n"
