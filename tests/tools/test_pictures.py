"""What draws looks for matplotlib before it works."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

TOOLS = {
    "plot_timeline": "missing.json --out x.png",
    "inspect_dataset": "--input missing --histogram x.png",
    "scaling_study": "--out out",
    "benchmark_cluster": "--out out",
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
