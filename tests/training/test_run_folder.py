"""A run folder loses nothing, also when it is used again or a run died while writing."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import pytest
from helpers.disks import make_read_only, small_disk

from megazpp.training.context import RunFolder, default_run_dir, make_writable


def lines(folder: RunFolder) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_a_restart_follow_those_before_it(tmp_path: Path):
    for iteration in (1, 2):
        RunFolder(tmp_path).append("metrics.jsonl", {"iteration": iteration})
    assert lines(RunFolder(tmp_path)) == [{"iteration": 1}, {"iteration": 2}]


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iterat')
    RunFolder(tmp_path).append("metrics.jsonl", {"iteration": 3})
    first, broken, third = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (first, broken, third) == ('{"iteration": 1}', '{"iterat', '{"iteration": 3}')


def test_a_loss_that_is_not_finite_survives_the_file(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.append("metrics.jsonl", {"lm_loss": math.nan, "grad_norm": math.inf})
    (record,) = lines(folder)
    assert math.isnan(record["lm_loss"])
    assert record["grad_norm"] == math.inf


def test_replaced_files_keep_a_numbered_name(tmp_path: Path):
    for lr in (1, 2, 2, 3):
        folder = RunFolder(tmp_path)
        folder.write_json("args.json", {"lr": lr, "path": Path("x")}, indent=2)
        folder.write("args.txt", f"--lr {lr}\n")
        folder.write_json("summary.json", {"final_loss": lr})
    assert json.loads((tmp_path / "args.json").read_text()) == {"lr": 3, "path": "x"}
    assert json.loads((tmp_path / "args.1.json").read_text())["lr"] == 1
    assert json.loads((tmp_path / "args.2.json").read_text())["lr"] == 2
    assert (tmp_path / "args.txt").read_text() == "--lr 3\n"
    assert (tmp_path / "args.1.txt").read_text() == "--lr 1\n"
    assert json.loads((tmp_path / "summary.2.json").read_text()) == {"final_loss": 2}
    assert len(list(tmp_path.iterdir())) == 9


def test_the_wandb_run_id_is_drawn_once(tmp_path: Path):
    first = RunFolder(tmp_path / "a").wandb_run_id()
    assert first == RunFolder(tmp_path / "a").wandb_run_id()
    assert first != RunFolder(tmp_path / "b").wandb_run_id()
    assert len(first) == 8


def test_wandb_s_own_variable_names_the_run_that_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = RunFolder(tmp_path / "a").wandb_run_id()
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert [RunFolder(tmp_path / name).wandb_run_id() for name in "ab"] == ["mine", "mine"]
    monkeypatch.delenv("WANDB_RUN_ID")
    assert [RunFolder(tmp_path / name).wandb_run_id() for name in "ab"] == [drawn, "mine"]


def test_a_folder_that_cannot_be_written_to_is_refused_with_flag_path_and_reason(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"--run-dir .*file/below is not a folder .* Not a directory"):
        RunFolder(file / "below")
    with pytest.raises(ValueError, match=r"--run-dir .*file is not a folder .* File exists"):
        RunFolder(file)
    with pytest.raises(ValueError, match="--tensorboard-dir /proc/none"):
        make_writable("/proc/none", "--tensorboard-dir")


def test_trying_a_folder_leaves_nothing_in_it(tmp_path: Path):
    RunFolder(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_the_default_folder_is_named_by_time_and_config_and_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    for name in ("20260102-030405-gpt_tiny", "20260102-030405-gpt_tiny-2", "20260102-030405-gpt_tiny-3"):
        path = default_run_dir("gpt_tiny", now)
        assert path == Path("runs") / name
        RunFolder(path)


def test_a_full_disk_is_found_before_anything_is_written_to_it(tmp_path: Path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(ValueError, match=f"--run-dir {disk} is not .*No space left on device"):
            RunFolder(disk)
        assert list(disk.iterdir()) == []


def test_a_read_only_disk_is_found_at_the_start(tmp_path: Path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        make_read_only(disk)
        with pytest.raises(ValueError, match=r"--run-dir .* is not .*Read-only file system"):
            RunFolder(disk / "run")
