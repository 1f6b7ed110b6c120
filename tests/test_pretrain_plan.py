"""pretrain_gpt.py --plan and --dry-run as a program: what it prints, how it ends, what it refuses in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pretrain_gpt
from megazpp.planner.dry_run import DryRun

pytestmark = pytest.mark.slow

TINY = ["@configs/gpt_tiny.args", "--bf16", "--num-layers", "2", "--seq-length", "16"]
CLUSTER = """
nodes: 2
ranks_per_node: 2
links:
  domain: {gigabytes_per_second: 100, source: none}
  network: {gigabits_per_second: 10, source: none}
device: {name: a GPU, teraflops: 10, gigabytes: 1, gigabytes_per_second: 100, source: none}
"""


class Program:
    """Calls main() with flags."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._monkeypatch, self._capsys, self.cluster = monkeypatch, capsys, folder / "cluster.yaml"
        self.cluster.write_text(CLUSTER)

    def __call__(self, *flags: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *TINY, *flags, "--cluster-file", str(self.cluster)])
        code = pretrain_gpt.main()
        return code, *self._capsys.readouterr()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Program:
    return Program(monkeypatch, capsys, tmp_path)


def test_a_plan_is_printed_and_nothing_is_started_or_written(program: Program):
    folder = program.cluster.parent
    code, out, err = program("--plan", "--zeropp", "--run-dir", str(folder / "run"), "--save", str(folder / "save"))
    assert (code, err) == (0, "")
    assert "2 node(s) x 2 rank(s)" in out
    assert "best with these flags otherwise" in out
    assert os.listdir(folder) == ["cluster.yaml"]


def test_a_dry_run_ends_with_0_as_planned_and_with_1_where_the_plan_is_wrong(
    program: Program, monkeypatch: pytest.MonkeyPatch
):
    code, out, _ = program("--dry-run", "--dry-run-rank", "3")
    assert code == 0
    assert "rank 3 of 4, one optimizer step:" in out
    monkeypatch.setattr(DryRun, "agrees", False)
    assert program("--dry-run")[0] == 1


@pytest.mark.parametrize("show", ["--plan", "--dry-run"])
def test_a_cluster_file_that_says_nothing_is_one_line(program: Program, show: str):
    """What else it may not say: tests/topology/test_cluster_file.py."""
    for text, said in (
        (b"", "is not a list of key: value"),
        (b"\xff\xfe", "cannot be read"),
        (b"nodes: 2\n", "ranks_per_node"),
    ):
        program.cluster.write_bytes(text)
        code, out, err = program(show)
        assert (code, out, err.count("\n"), said in err) == (2, "", 1, True)
        assert err.startswith(f"pretrain_gpt.py: error: --cluster-file {program.cluster}")


@pytest.mark.parametrize(
    ("show", "flags", "said"),
    [
        ("--dry-run", ["--tensor-model-parallel-size", "8"], "--tensor-model-parallel-size 8"),
        ("--dry-run", ["--micro-batch-size", "3"], "--global-batch-size"),
        *((show, ["--vocab-size", "none"], "needs --vocab-size") for show in ("--plan", "--dry-run")),
        *((show, ["--num-attention-heads", "3"], "--num-attention-heads") for show in ("--plan", "--dry-run")),
        ("--plan", ["--price-per-gpu-hour", "2"], "--price-per-gpu-hour is gone: give the device"),
    ],
)
def test_flags_that_do_not_fit_the_cluster_are_one_line(program: Program, show: str, flags: list[str], said: str):
    code, out, err = program(show, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pretrain_gpt.py: error: ")
    assert said in err
