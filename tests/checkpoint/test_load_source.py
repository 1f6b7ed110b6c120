"""Test from which checkpoint a run starts, and the errors for flags that contradict each other or the folders."""

import dataclasses
import shutil
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
from megazpp.checkpoint.read import LoadSource, check_still_chosen, choose_source, peek
from megazpp.optim.schedule import TrainingProgress
from megazpp.run.start import RUN_DIR, own_checkpoints
from megazpp.training.config import TrackingConfig


@pytest.fixture
def used(tmp_path) -> Path:
    """Make a folder with checkpoints of iterations 10, 20 and 30, whose tracker file names 20. Return its path."""
    folder = CheckpointFolder(tmp_path / "used", "--save")
    folder.path.mkdir()
    for iteration in (10, 20, 30):
        folder.begin(iteration)
        folder.complete(iteration)
    folder.track(20)
    return folder.path


def choose(*, restarted: bool = False, **flags: Any) -> LoadSource | None:
    return choose_source(CheckpointConfig(**flags), restarted=restarted)


def candidates(**flags: Any) -> list[int] | None:
    source = choose(**flags)
    return None if source is None else source.candidates()


BOTH = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"save": "x", "save_interval": 0}, "--save-interval 0 is not positive"),
    ({"save": "x", "keep_last": 0}, "--keep-last 0 is not positive"),
    ({"load": "x", "ckpt_step": -1}, "--ckpt-step -1 is negative"),
    ({"keep_last": 5}, "--keep-last needs --save"),
    ({"async_save": True}, "--async-save needs --save"),
    ({"save_retain_interval": 5, "load": "x"}, "--save-retain-interval needs --save"),
    ({"finetune": True, "save": "x"}, "--finetune needs --load"),
    ({"load_fallback": True}, "--load-fallback needs --load"),
    ({"ckpt_step": 0}, "--ckpt-step needs --load"),
    ({"use_checkpoint_args": True}, "--use-checkpoint-args needs --load"),
    (BOTH, "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"),
]


def test_contradictory_checkpoint_flags_are_rejected_by_name_and_value():
    assert not_refused(CONTRADICTIONS, lambda flags: CheckpointConfig(**flags)) == []


def test_unsuitable_load_or_save_folder_is_rejected(used, tmp_path, monkeypatch):
    load, missing = str(used), str(tmp_path / "missing")
    (used / "iter_0000020" / NAME).touch()
    (used / "iter_0000020.replaced-1").mkdir()
    (used / "lock").touch()
    (used / "iter_0000020.replaced-1" / NAME).touch()
    monkeypatch.chdir(used / "iter_0000020")
    one = "is one checkpoint, not the folder of checkpoints: give"
    taken = f"--save {load} holds checkpoints already (up to iteration 30): pass --load"
    rows: list[tuple[dict[str, Any], str]] = [
        ({"load": load, "ckpt_step": 15}, f"--ckpt-step 15: {used}/iter_0000015 is missing; --load {used} has "),
        ({"load": missing, "exit_on_missing_checkpoint": True}, f"--load {missing} has no checkpoint ({missing}/"),
        ({"save": load}, taken),
        ({"save": load, "load": missing}, taken),
        ({"save": load, "load": missing, "finetune": True}, taken),
        ({"save": load, "load": f"{load}/", "finetune": True}, f"--finetune starts a new run: --save {load} can"),
        ({"load": f"{used}/lock"}, f"--load {used}/lock is a file, not the folder of checkpoints"),
        ({"load": "."}, f"--load . {one} --load {used} (and --ckpt-step 20)"),
    ]
    for name, step in (("iter_0000020", " (and --ckpt-step 20)"), ("iter_0000020.replaced-1", "")):
        for slash, fallback in (("", False), ("/", True)):
            flags = {"load": f"{used}/{name}{slash}", "load_fallback": fallback}
            rows.append((flags, f"--load {used}/{name} {one} --load {used}{step}"))
        rows.append(({"save": f"{used}/{name}", "load": load}, f"{one} --save {used}"))
    assert not_refused(rows, lambda flags: candidates(**flags)) == []


def test_job_with_the_same_command_resumes_from_its_own_checkpoints(tmp_path):
    """Start a job again with its old command, `--load base --save run`, after it has saved a checkpoint in `run`.

    The job must resume from `run` and not start again from `base`. Other flags would make another run, so they are
    rejected.
    """
    own = CheckpointFolder(tmp_path / "run", "--save")
    flags = {"load": f"{tmp_path}/base", "finetune": True, "ckpt_step": 3, "save": str(own.path)}
    folder, record = own.of(20), record_of(Case(), progress=TrainingProgress(20, 40, 40, 20))
    folder.mkdir(parents=True)
    text = dataclasses.replace(record, flags=record.flags | flags).as_json()
    write_checksums(folder, {NAME: write_durably(folder / NAME, text)})
    own.track(20)
    again = choose(**flags)
    assert again is not None
    assert (again.folder.path, again.continues, again.candidates()) == (own.path, True, [20])
    assert candidates(**flags | {"load": f"{tmp_path}/./base/"}) == [20]
    taken = [(flags | other, "holds checkpoints already") for other in ({"load": "other"}, {"ckpt_step": None})]
    taken.append((flags | {"finetune": False}, "holds checkpoints already"))
    assert not_refused(taken, lambda flags: candidates(**flags)) == []


def test_load_takes_the_tracked_iteration_ckpt_step_or_a_fallback(used, tmp_path):
    load, missing, new = (str(tmp_path / name) for name in ("used", "missing", "new"))
    for flags, expected in (
        ({}, None),
        ({"save": new}, None),
        ({"load": load}, [20]),
        ({"load": load, "ckpt_step": 10}, [10]),
        ({"load": load, "load_fallback": True}, [20, 10]),
        ({"load": load, "load_fallback": True, "ckpt_step": 10}, [10]),
        ({"load": load, "load_fallback": True, "ckpt_step": 30}, [30, 20, 10]),
        ({"load": load, "save": f"{load}/../used"}, [20]),
        ({"load": missing}, []),
        ({"load": missing, "load_fallback": True}, []),
    ):
        assert candidates(**flags) == expected, flags
    assert [*tmp_path.iterdir()] == [used]  # choosing the checkpoint creates no folder


def test_newest_is_loaded_without_a_tracker_but_a_bad_one_needs_fallback(used):
    (used / TRACKER).unlink()
    assert candidates(load=str(used)) == [30]
    for tracker in ("garbage", "99"):
        (used / TRACKER).write_text(tracker)
        with pytest.raises(DamagedError, match=TRACKER):
            candidates(load=str(used))
        assert candidates(load=str(used), load_fallback=True) == [30, 20, 10]


def test_fallback_from_a_missing_checkpoint_takes_no_later_one(used):
    """Fall back from a missing checkpoint to earlier ones only.

    The tracker names the iteration to which the run went back with --ckpt-step, so later checkpoints belong to an
    abandoned branch.
    """
    for missing, expected in ((25, [20, 10]), (15, [10])):
        (used / TRACKER).write_text(str(missing))
        assert candidates(load=str(used), load_fallback=True) == expected
    (used / TRACKER).write_text("5")
    with pytest.raises(DamagedError, match=r"names iteration 5, but .*iter_0000005 is missing"):
        candidates(load=str(used), load_fallback=True)


def test_restarted_job_resumes_its_own_save_or_starts_as_flags_say(used, tmp_path):
    own = choose(restarted=True, save=str(used), load=str(tmp_path / "base"), finetune=True, save_rng=False)
    assert (own.folder.path, *own[1:6]) == (used, None, True, True, False, False)
    told = choose(restarted=True, save=str(tmp_path / "empty"), load=str(used), finetune=True)
    assert (told.folder.path, told.continues) == (used, False)
    assert choose(restarted=True, save=str(tmp_path / "empty")) is None


def test_restarted_job_finds_the_checkpoints_of_its_run_folder():
    given, torchrun = CheckpointConfig(save_to_run_dir=True), {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert own_checkpoints(given, TrackingConfig(run_dir="run"), restarted=True, env={}).save == "run/checkpoints"
    assert own_checkpoints(given, TrackingConfig(), restarted=True, env={RUN_DIR: "held"}).save == "held/checkpoints"
    # torchrun's restarts would not find the run folder; the error comes at the first start, while --run-dir can still
    # be added
    for restarted in (False, True):
        with pytest.raises(ValueError, match=r"--save-to-run-dir with torchrun's --max-restarts 3: .*add --run-dir or"):
            own_checkpoints(given, TrackingConfig(), restarted=restarted, env=torchrun)
    assert own_checkpoints(given, TrackingConfig(), restarted=False, env={}) == given
    saving = CheckpointConfig(save_to_run_dir=True, save="elsewhere")
    assert own_checkpoints(saving, TrackingConfig(), restarted=True, env=torchrun) == saving


def test_job_stops_if_another_job_has_saved_while_it_waited_for_the_lock(used, tmp_path):
    """Test jobs that chose their checkpoint while --save was empty, before another job saved there and ended."""
    held, base = tmp_path / "held", str(tmp_path / "base")
    shutil.copytree(used, base)
    rows = []
    for flags, error in (
        ({"save": str(held)}, f"--save {held} holds checkpoints already (up to iteration 30)"),
        ({"save": str(held), "load": str(held)}, f"another job has saved checkpoints to --save {held}"),
        ({"save": str(held), "load": base}, f"--save {held} holds checkpoints already (up to iteration 30)"),
    ):
        config = CheckpointConfig(**flags)
        rows.append(((choose(**flags), config), error))
        check_still_chosen(rows[-1][0][0], config, restarted=False)
    own = CheckpointConfig(load=base, save=base)
    check_still_chosen(choose(load=base, save=base), own, restarted=False)
    shutil.copytree(used, held)
    assert not_refused(rows, lambda chosen: check_still_chosen(*chosen, restarted=False)) == []


def test_flags_choose_which_parts_are_loaded(used):
    for flags, parts in (
        ({}, (True, True, True)),
        ({"finetune": True}, (False, False, False)),
        ({"load_optim": False}, (True, False, True)),
        ({"load_rng": False}, (True, True, False)),
    ):
        source = choose(load=str(used), **flags)
        assert (source.continues, source.optimizer, source.rng) == parts


def test_unreadable_or_changed_record_is_reported_as_damage(used):
    checkpoint, text = used / "iter_0000010", record_of(Case(), progress=TrainingProgress(iteration=10)).as_json()
    write_checksums(checkpoint, {NAME: write_durably(checkpoint / NAME, text)})
    assert peek(None) is None
    assert peek(choose(load=str(used), load_fallback=True)).progress.iteration == 10
    (checkpoint / NAME).write_text(text.replace('"num_layers": 2', '"num_layers": 1'))
    rows = [
        ({}, "iter_0000020/checksums.txt cannot be read"),
        ({"load_fallback": True}, "iter_0000010/run.json is damaged: its checksum is"),
    ]
    assert not_refused(rows, lambda flags: peek(choose(load=str(used), **flags)), DamagedError) == []
