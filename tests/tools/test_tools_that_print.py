"""Test the tools that only print: env.py and show_topology.py."""

import re
from pathlib import Path
from unittest.mock import Mock

import env as env_report
import show_topology
from env import collect

from megazpp.kernels.c_library import CLibrary

SECTIONS = ["versions", "devices", "back ends", "environment"]


def test_env_report_has_its_sections(run_main, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    report = collect()
    assert list(report) == SECTIONS
    assert "cores usable" in report["devices"]["CPU"]
    assert report["back ends"]["optimizer"].startswith("torch.optim.AdamW")
    assert not any("not available" in section for section in report.values()), report
    out = run_main(env_report.main)[1]
    assert [line for line in out.splitlines() if line and line[0] != " "] == SECTIONS


def test_only_the_first_rank_prints_the_env_report(run_main, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for launcher in ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, {"SLURM_PROCID": "0", "RANK": "1"}):
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        assert run_main(env_report.main) == (0, "", "")


def test_missing_packages_are_listed_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(env_report, "_version", lambda name: None if name in ("wandb", "pyarrow", "triton") else "1")
    monkeypatch.setattr(env_report.native, "library", lambda: CLibrary(missing="no C compiler found"))
    report = collect()
    assert report["versions"]["wandb"] == "not installed (needed: pip install wandb)"
    assert report["versions"]["pyarrow"] == "not installed (Parquet files: pip install pyarrow)"
    assert report["versions"]["numpy"] == "1"
    assert report["back ends"]["C library"] == "no: no C compiler found (apt install gcc)"


def test_empty_section_says_what_is_absent(run_main, monkeypatch):
    monkeypatch.setattr(env_report, "environment", dict)
    out = run_main(env_report.main)[1]
    assert "environment\n  no variable is set that affects a run\n" in out


def test_failing_section_reports_its_error_and_others_continue(monkeypatch):
    monkeypatch.setattr(env_report, "devices", Mock(side_effect=RuntimeError("the driver is gone")))
    report = collect()
    assert report["devices"] == {"not available": "RuntimeError: the driver is gone"}
    assert report["versions"]["torch version"]


def test_relevant_variables_are_shown_without_secrets(monkeypatch):
    shown = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "", "SLURM_PROCID": "0", "RANK": "0"}
    env = {**shown, "WANDB_API_KEY": "abc", "HOME": "/root", "AWS_SECRET": "abc"}
    monkeypatch.setattr(env_report.os, "environ", env)
    assert collect()["environment"] == shown | {"WANDB_API_KEY": "(set, not shown)"}


PAIRS = f"--cluster-file {Path(__file__).parents[2]}/configs/clusters/nvlink_pairs.yaml"
LARGE = "@configs/gpt_13b.args --nodes 2 --ranks-per-node 8 --rank-order cyclic"
REPLICA_GROUPS = "--nodes 4 --ranks-per-node 2 --diloco-steps 30 --diloco-replica-groups 2"
SPLIT = "--nodes 2 --ranks-per-node 8 --tensor-model-parallel-size 2 --context-parallel-size 4"
MAPS = [  # each entry: flags of show_topology.py, and a pattern that its output must match
    (
        f"{PAIRS} --tensor-model-parallel-size 2",
        r"^4 node.* x 4 rank.* \(fastest links among 2\): tensor parallel 2, shards 8",
    ),
    (PAIRS, r"domain \(56.25 GB/s per rank\)"),
    (LARGE, r"ranks in the order 0 2 4 6 8 10 12 14 ...: tensor parallel 8, shards 2 \(2 across nodes x 1 inside\)"),
    (REPLICA_GROUPS, r"^4 node.* shards 4 \(2 across nodes x 2 inside\), replicas 1, replica groups 2$"),
    (SPLIT, r"^cp +4 +4 +domain +0 2 4 6 +parts of samples"),
]


def test_topology_is_shown_from_a_cluster_file_or_flags(run_main):
    for flags, pattern in MAPS:
        code, out, _ = run_main(show_topology.main, *flags.split())
        assert code == 0, flags
        assert re.search(pattern, out, re.M), (flags, out)
    _, _, err = run_main(show_topology.main, *PAIRS.split(), "--DDP-impl", "local")
    assert err.startswith("note: command line: --DDP-impl is ignored: ")
