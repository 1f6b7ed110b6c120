"""The report on a machine: what it has in it, that it prints once, and that nothing stops it."""

import json

import env as env_report
from env import collect, main

from kernels.c_library import CLibraryError

SECTIONS = ["versions", "devices", "back ends", "environment", "missing"]


def test_the_report_has_its_sections_as_text_and_as_json(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == SECTIONS
    assert "cores usable" in report["devices"]["CPU"]
    assert report["back ends"]["optimizer"].startswith("torch.optim.AdamW")
    assert not any("not found out" in section for section in report.values()), report
    assert main([]) == 0
    out = capsys.readouterr().out
    for title in SECTIONS:
        assert f"\n{title}\n" in f"\n{out}"


def test_of_several_ranks_only_the_first_prints(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    for launcher in ({"RANK": "1"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}):
        with monkeypatch.context() as patch:
            for name, value in launcher.items():
                patch.setenv(name, value)
            assert main([]) == 0
    assert capsys.readouterr().out == ""


def test_what_slows_a_run_down_is_missing_with_the_line_that_mends_it(monkeypatch):
    monkeypatch.setattr(env_report, "_version", lambda name: None if name in ("wandb", "pyarrow", "triton") else "1")
    monkeypatch.setattr(env_report.native, "library", lambda: CLibraryError("no C compiler found"))
    monkeypatch.setattr(env_report.torch, "__version__", "2.9.1")
    report = collect()
    assert report["missing"]["wandb"] == "needed: pip install wandb"
    assert report["missing"]["pyarrow"] == "Parquet files: pip install pyarrow"
    assert "apt install gcc" in report["missing"]["C compiler"]
    assert "pip install 'torch>=2.11,<2.14'" in report["missing"]["torch >=2.11,<2.14"]
    assert report["back ends"]["C library"] == "no: no C compiler found"
    assert "triton" not in report["missing"]  # of no use without a GPU


def test_a_part_that_breaks_says_so_and_the_others_go_on(monkeypatch):
    def broken() -> dict[str, str]:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(env_report, "devices", broken)
    report = collect()
    assert report["devices"] == {"not found out": "RuntimeError: the driver is gone"}
    assert report["versions"]["torch version"]


def test_variables_that_matter_are_shown_and_secrets_are_not(monkeypatch):
    shown = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "", "SLURM_PROCID": "0", "RANK": "0"}
    env = {**shown, "WANDB_API_KEY": "abc", "HOME": "/root", "AWS_SECRET": "abc"}
    monkeypatch.setattr(env_report.os, "environ", env)
    assert collect()["environment"] == shown | {"WANDB_API_KEY": "(set, not shown)"}
