"""Test which run folder and wandb run a resumed run continues: also after its folders were moved, copied or reused."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import record_of
from helpers.small_run import SMALL, check, parse
from helpers.training import Case

from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import Verified, choose_source
from megazpp.run.report import Records, open_tracker, records_to_continue
from megazpp.training.context import RunFolder


def make(home: Path, save: str = "ck", run_dir: str = "run") -> dict[str, Any]:
    """Write the folders of a run into `home`, and return what the metadata of its checkpoints says about it."""
    folder, records = CheckpointFolder(home / save, "--save"), RunFolder(home / run_dir)
    folder.path.mkdir(parents=True)
    folder.begin(10)
    folder.complete(10)
    records.write_json("args.json", {"save": None if save == f"{run_dir}/checkpoints" else str(folder.path)})
    return {"run_dir": str(records.path), "wandb_run_id": "w", "flags": {"save": str(folder.path)}}


def continued(saved: dict[str, Any], jobs: int = 1, **flags: Any) -> Records | None:
    config = CheckpointConfig(**flags)
    source = choose_source(config, restarted=False)
    assert source is not None
    verified = Verified(source, 10, dataclasses.replace(record_of(Case()), **saved), 0, 0.0)
    return records_to_continue(verified, config, jobs=jobs)


def test_only_a_run_that_saves_where_it_loads_continues_the_records(tmp_path):
    """Test that a run that does not save to the folder from which it loads is a fork, with records of its own."""
    (tmp_path / "link").symlink_to(tmp_path / "ck")
    saved, inner = make(tmp_path), make(tmp_path, "own/checkpoints", "own")
    load, inside, fork = str(tmp_path / "ck"), str(tmp_path / "own" / "checkpoints"), str(tmp_path / "fork")
    for record, flags, found in (
        (saved, {"load": load, "save": load}, "run"),
        (saved, {"load": load, "save": f"{tmp_path}/link"}, "run"),
        (saved, {"load": load, "save": fork}, None),
        (saved, {"load": load, "save": fork, "ckpt_step": 10}, None),
        (saved, {"load": load}, None),
        (saved, {"load": load, "save_to_run_dir": True}, None),
        (inner, {"load": inside, "save_to_run_dir": True}, "own"),
        (inner, {"load": inside, "save_to_run_dir": True, "save": fork}, None),
        (saved, {"load": load, "save": fork, "finetune": True}, None),
        (saved, {"load": load, "save": load, "jobs": 2}, None),  # the records may be of another group of an elastic run
        (inner, {"load": inside, "save_to_run_dir": True, "jobs": 2}, "own"),
    ):
        assert continued(record, **flags) == (found and Records(tmp_path / found, "w", False)), flags


# Each entry: change of the folders, folder of checkpoints that the run loads from and saves to, and the expected fields
# of `Records`: run folder (None if it is not found), wandb run (None for a new one), True if the checkpoints are a copy
CHANGES: dict[str, Any] = {
    "copy": (lambda home: shutil.copytree(home / "a", home / "b"), "b/ck", ("b/run", None, True)),
    "copy-beside": (lambda home: shutil.copytree(home / "a" / "ck", home / "a" / "ck2"), "a/ck2", (None, None, True)),
    "copy-of-ck": (lambda home: shutil.copytree(home / "a" / "ck", home / "b" / "ck"), "b/ck", (None, None, True)),
    "moved": (lambda home: (home / "a").rename(home / "b"), "b/ck", ("b/run", "w", False)),
    "ck-moved": (lambda home: (home / "a" / "ck").rename(home / "ck"), "ck", ("a/run", "w", False)),
    "link": (lambda home: (home / "b").symlink_to(home / "a"), "b/ck", ("a/run", "w", False)),
    "run-moved": (lambda home: (home / "a" / "run").rename(home / "away"), "a/ck", (None, "w", False)),
    # another run has its checkpoints elsewhere, and uses the run folder now
    "reused": (
        lambda home: RunFolder(home / "a/run").write_json("args.json", {"save": "/x"}),
        "a/ck",
        (None, "w", False),
    ),
    "damaged": (lambda home: (home / "a" / "run" / "args.json").write_text("[1"), "a/ck", (None, "w", False)),
    "no-object": (lambda home: (home / "a" / "run" / "args.json").write_text("[1]"), "a/ck", (None, "w", False)),
}


@pytest.mark.parametrize(("change", "where", "found"), CHANGES.values(), ids=CHANGES)
def test_run_continues_its_own_records_after_folders_were_changed(change, where, found, tmp_path):
    saved = make(tmp_path / "a")
    change(tmp_path)
    load = str(tmp_path / where)
    run_dir, *others = found
    assert continued(saved, load=load, save=load) == (run_dir and tmp_path / run_dir, *others)


def test_run_folder_moves_with_the_checkpoints_that_are_inside_of_it(tmp_path):
    saved = make(tmp_path, "a/checkpoints", "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    load = str(tmp_path / "b" / "checkpoints")
    for flags in ({"save": load}, {"save_to_run_dir": True}):
        assert continued(saved, load=load, **flags) == Records(tmp_path / "b", None, True)


def test_copied_run_folder_gets_a_new_wandb_run_and_keeps_the_old_id(tmp_path):
    folder = RunFolder(tmp_path)
    folder.forget_wandb_run_id()
    before = folder.wandb_run_id()
    folder.forget_wandb_run_id()
    assert folder.wandb_run_id() not in ("", before)
    assert json.dumps((tmp_path / "wandb_run_id.1").read_text()) == json.dumps(before + "\n")


@pytest.mark.parametrize("name", ["args.json", "records.lock"])
def test_run_folder_with_a_folder_in_place_of_a_file_is_an_error_with_the_flag(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(
        ValueError, match=f"^--run-dir {tmp_path} cannot be used: Is a directory; choose another folder$"
    ):
        open_tracker(parse(f"{SMALL} --run-dir {tmp_path}"), check(""), None)
