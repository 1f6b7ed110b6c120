"""The tool shows a file's cluster or a described one, with the program's own flags, and names mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import show_topology

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = show_topology.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def test_a_cluster_file_is_shown(capsys: pytest.CaptureFixture[str]):
    flags = ["--cluster-file", CLUSTERS / "nvlink_pairs.yaml", "--tensor-model-parallel-size", 2]
    code, out, _ = run(capsys, *flags)
    assert code == 0
    assert out.startswith("4 node(s) x 4 rank(s) (fastest wire among 2): tensor parallel 2, shards 8")
    assert "domain (56.25 GB/s per rank)" in out


def test_flag_files_and_described_clusters_are_understood(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "@configs/gpt_13b.args", "--nodes", 2, "--ranks-per-node", 8, "--rank-order", "cyclic")
    assert code == 0
    assert "ranks in the order 0 2 4 6 8 10 12 14 ...: tensor parallel 8, shards 2 (2 across nodes x 1 inside)" in out


def test_islands_that_take_local_steps_are_shown(capsys: pytest.CaptureFixture[str]):
    flags = "--nodes 4 --ranks-per-node 2 --diloco-steps 30 --diloco-islands 2"
    code, out, _ = run(capsys, *flags.split())
    assert code == 0
    assert out.splitlines()[0].endswith("shards 4 (2 across nodes x 2 inside), replicas 1, islands 2")
    assert re.search(r"^island +2 +4 +network +0 4 +local steps", out, re.M)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "which cluster.* --cluster-file FILE, or --nodes N"),
        ("--nodes 2", "which cluster"),
        ("--nodes 0 --ranks-per-node 2", "--nodes 0 is not positive"),
        ("--nodes 2 --cluster-file x.yaml", "--cluster-file x.yaml and --nodes 2 both"),
        ("--cluster-file nowhere.yaml", "--cluster-file nowhere.yaml cannot be read"),
        ("--nodes 2 --ranks-per-node 4 --tensor-model-parallel-size 3", "--tensor-model-parallel-size 3 .* would fit"),
        ("--nodes 2 --ranks-per-node 4 --fast-domain 3", "fast_domain 3"),
        (
            "--nodes 4 --ranks-per-node 4 --diloco-steps 5 --diloco-islands 3",
            "--diloco-islands 3 does not divide the 4",
        ),
        ("--nodes 2 --ranks-per-node 4 --tensor-parallel 2", "--tensor-parallel"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_shown(capsys: pytest.CaptureFixture[str], flags: str, message: str):
    code, out, err = run(capsys, *flags.split())
    assert (code, out) == (2, "")
    assert re.search(message, err), err


def test_ranks_that_split_samples_are_shown(capsys: pytest.CaptureFixture[str]):
    flags = "--nodes 2 --ranks-per-node 8 --tensor-model-parallel-size 2 --context-parallel-size 4"
    code, out, _ = run(capsys, *flags.split())
    assert code == 0
    assert "tensor parallel 2, context parallel 4, shards 8 (2 across nodes x 4 inside)" in out
    assert re.search(r"^cp +4 +4 +domain +0 2 4 6 +heads of attention", out, re.M)
