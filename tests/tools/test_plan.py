"""tools/plan.py: a row for each size of the cluster, and one line for what is wrong."""

from pathlib import Path

import plan
import pytest

TINY = ["@configs/gpt_tiny.args", "--num-layers", "2", "--seq-length", "16", "--micro-batch-size", "4"]
TINY += ["--bf16", "--vocab-size", "512"]
CLUSTER = """
nodes: 1
ranks_per_node: 2
links: {domain: {gigabytes_per_second: 100, source: none}, network: {gigabits_per_second: 80, source: none}}
device: {name: a GPU, teraflops: 10, gigabytes: %s, gigabytes_per_second: 100, source: none}
"""


def table(tmp_path: Path, capsys: pytest.CaptureFixture[str], gigabytes: float) -> list[dict[str, str]]:
    (tmp_path / "cluster.yaml").write_text(CLUSTER % gigabytes)
    assert plan.main([*TINY, "--nodes", "1", "2", "64", "--cluster-file", str(tmp_path / "cluster.yaml")]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_work_per_gpu_stays_and_the_ring_s_latency_grows(tmp_path, capsys):
    rows = table(tmp_path, capsys, 1.0)
    assert [row["GPUs"] for row in rows] == ["2", "4", "128"]
    assert rows[0]["HSDP"] == "-"  # one node has no copies

    def slowest(row: int, scheme: str) -> float:
        return float(rows[row][scheme].split(" to ")[0])

    assert slowest(1, "ZeRO-3") > slowest(2, "ZeRO-3") > 0
    assert slowest(2, "--zeropp") > slowest(2, "ZeRO-3")


def test_what_does_not_fit_is_in_brackets(tmp_path, capsys):
    assert all(row["ZeRO-3"].startswith("(") for row in table(tmp_path, capsys, 0.001))


def test_what_is_missing_is_said_in_one_line(capsys):
    for flags, said in (
        ("", "--cluster-file and --vocab-size are needed"),
        ("--cluster-file missing.yaml", "--cluster-file missing.yaml cannot be read"),
        ("--cluster-file x.yaml --micro-batch-size none", "--micro-batch-size is required"),
    ):
        assert plan.main([*TINY, "--nodes", "1", *flags.split()]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err
