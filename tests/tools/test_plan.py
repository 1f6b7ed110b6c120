"""tools/plan.py: a row for each size of the cluster, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import plan
import pytest

TINY = [
    "@configs/gpt_tiny.args",
    "--num-layers",
    "2",
    "--seq-length",
    "16",
    "--micro-batch-size",
    "4",
    "--nodes",
    "1",
    "3",
]
CLUSTER = """
nodes: 1
ranks_per_node: 2
links: {domain: {gigabytes_per_second: 100, source: none}, network: {gigabits_per_second: 10, source: none}}
device: {name: a GPU, teraflops: 10, gigabytes: 1, gigabytes_per_second: 100, source: none}
"""


def test_a_row_for_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    assert plan.main([*TINY, "--cluster-file", str(tmp_path / "cluster.yaml")]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()]
    assert rows == ["GPUs", "---", "2", "6"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--cluster-file and --vocab-size are needed"),
        (["--cluster-file", "missing.yaml"], "--cluster-file missing.yaml cannot be read"),
    ],
)
def test_what_is_missing_is_said_in_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert plan.main([*TINY, *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
