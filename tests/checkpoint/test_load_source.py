"""What a run begins with."""

from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import record_of
from helpers.refusals import not_refused
from helpers.training import Case

from megazpp.base.files import DamagedError
from megazpp.checkpoint.checksums import write_checksums, write_durably
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD as NAME
from megazpp.checkpoint.folder import TRACKER, CheckpointFolder
from megazpp.checkpoint.read import LoadSource, choose_source, peek
from megazpp.checkpoint.record import TrainingProgress


@pytest.fixture
def used(tmp_path) -> Path:
    """A folder with checkpoints of iterations 10, 20 and 30; the tracker says 20."""
    folder = CheckpointFolder(tmp_path / "used", "--save")
    folder.path.mkdir()
    for iteration in (10, 30, 20):
        folder.begin(iteration)
        folder.complete(iteration)
    return folder.path


def choose(*, restarted: bool = False, **flags: Any) -> LoadSource | None:
    return choose_source(CheckpointConfig(**flags), restarted=restarted)


def candidates(**flags: Any) -> list[int]:
    source = choose(**flags)
    assert source is not None
    return source.candidates()


def test_without_flags_training_begins_anew(tmp_path):
    assert choose() is None
    assert choose(save=str(tmp_path / "new")) is None
    assert list(tmp_path.iterdir()) == []
    assert peek(None) is None


def test_load_takes_what_the_tracker_names_or_ckpt_step_and_fallback_the_newest_of_the_others(used):
    for flags, expected in (
        ({}, [20]),
        ({"ckpt_step": 10}, [10]),
        ({"load_fallback": True}, [20, 30, 10]),
        ({"load_fallback": True, "ckpt_step": 10}, [10, 30, 20]),
        ({"save": str(used)}, [20]),
        ({"save": f"{used}/../{used.name}"}, [20]),
    ):
        assert candidates(load=str(used), **flags) == expected, flags
    missing = str(used / "missing")
    assert candidates(load=missing) == candidates(load=missing, load_fallback=True) == []


def test_without_a_tracker_the_newest_is_loaded_and_with_a_bad_one_only_fallback_finds_it(used):
    (used / TRACKER).unlink()
    assert candidates(load=str(used)) == [30]
    for tracker in ("garbage", "99"):
        (used / TRACKER).write_text(tracker)
        with pytest.raises(DamagedError, match=TRACKER):
            candidates(load=str(used))
        assert candidates(load=str(used), load_fallback=True) == [30, 20, 10]


def test_a_folder_to_load_from_or_to_save_to_that_cannot_be_meant_is_refused(used, tmp_path, monkeypatch):
    load, missing = str(used), str(tmp_path / "missing")
    (used / "iter_0000020" / NAME).touch()
    (used / "iter_0000020.replaced-1").mkdir()
    (used / "iter_0000020.replaced-1" / NAME).touch()
    monkeypatch.chdir(used / "iter_0000020")
    one = "is one checkpoint, not the folder of checkpoints: give"
    taken = f"--save {load} holds checkpoints already (up to iteration 30): --load"
    rows: list[tuple[dict[str, Any], str]] = [
        ({"load": load, "ckpt_step": 15}, f"--ckpt-step 15: {used}/iter_0000015 is missing; --load {used} has "),
        ({"load": missing, "exit_on_missing_checkpoint": True}, f"--load {missing} has no checkpoint ({missing}/"),
        ({"save": load}, taken),
        ({"save": load, "load": missing}, taken),
        ({"save": load, "load": missing, "finetune": True}, taken),
        ({"save": load, "load": f"{load}/", "finetune": True}, f"--finetune begins a new training: --save {load} can"),
        ({"load": "."}, f"--load . {one} --load {used} (and --ckpt-step 20)"),
    ]
    for name, step in (("iter_0000020", " (and --ckpt-step 20)"), ("iter_0000020.replaced-1", "")):
        for slash, fallback in (("", False), ("/", True)):
            flags = {"load": f"{used}/{name}{slash}", "load_fallback": fallback}
            rows.append((flags, f"--load {used}/{name} {one} --load {used}{step}"))
        rows.append(({"save": f"{used}/{name}", "load": load}, f"{one} --save {used}"))
    assert not_refused(rows, lambda flags: candidates(**flags)) == []


def test_a_restarted_job_goes_on_from_what_it_has_saved_else_begins_as_it_was_told(used, tmp_path):
    source = choose(restarted=True, save=str(used), load=str(tmp_path / "base"), finetune=True, save_rng=False)
    assert source is not None
    assert source.folder.path == used
    assert source[1:6] == (None, True, True, False, False)
    source = choose(restarted=True, save=str(tmp_path / "empty"), load=str(used), finetune=True)
    assert source is not None
    assert (source.folder.path, source.continues) == (used, False)
    assert choose(restarted=True, save=str(tmp_path / "empty")) is None


def test_what_is_loaded(used):
    for flags, parts in (
        ({}, (True, True, True)),
        ({"finetune": True}, (False, False, False)),
        ({"load_optim": False}, (True, False, True)),
        ({"load_rng": False}, (True, True, False)),
    ):
        source = choose(load=str(used), **flags)
        assert source is not None
        assert (source.continues, source.optimizer, source.rng) == parts


def test_peeking_at_what_cannot_be_read_is_an_error(used):
    for fallback, iteration in ((False, 20), (True, 10)):
        with pytest.raises(DamagedError, match=rf"iter_00000{iteration}/checksums.txt cannot be read"):
            peek(choose(load=str(used), load_fallback=fallback))


def test_a_record_that_was_changed_is_damage_before_anything_believes_it(tmp_path):
    folder = CheckpointFolder(tmp_path, "--load")
    folder.begin(7)
    text = record_of(Case(), progress=TrainingProgress(iteration=7)).as_json()
    write_checksums(folder.partial(7), {NAME: write_durably(folder.partial(7) / NAME, text)})
    folder.complete(7)
    found = peek(choose(load=str(tmp_path)))
    assert found is not None
    (folder.of(7) / NAME).write_text(text.replace('"num_layers": 2', '"num_layers": 1'))
    with pytest.raises(DamagedError, match=r"iter_0000007/run.json is damaged: its checksum is"):
        peek(choose(load=str(tmp_path)))
