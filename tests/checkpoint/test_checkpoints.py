"""Test when a run writes checkpoints, which of them --keep-last keeps, and that loading one replaces all states."""

import os
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.checkpoints import Attempt, record_of
from helpers.disks import small_disk
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import slow
from helpers.training import Case

from megazpp.base.program import UserError
from megazpp.checkpoint import checkpoints
from megazpp.checkpoint.checkpoints import STAGER_IS_REUSABLE, Checkpoints, take_folder
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.optim.schedule import TrainingProgress
from megazpp.training.loop import AfterStep
from megazpp.zero.config import PrecisionConfig, ZeroConfig

# flags of the run, number of checkpoints that it saves, iterations of the checkpoints that remain at the end
SETTINGS: list[tuple[dict[str, Any], int, list[int]]] = [
    ({}, 1, [7]),
    ({"save_interval": 3}, 3, [3, 6, 7]),
    ({"save_interval": 7}, 1, [7]),
    ({"save_interval": 2, "keep_last": 2}, 4, [6, 7]),
    ({"save_interval": 1, "save_retain_interval": 3, "async_save": True}, 7, [3, 6, 7]),
]


def save_seven_steps(home: Path) -> list[list[str]]:
    """Run the saves of seven steps, without training, for each entry of SETTINGS in a numbered folder.

    Return the log lines of each entry.
    """
    attempt, found = Attempt(Case()), []
    for number, (flags, *_) in enumerate(SETTINGS):
        config, lines = CheckpointConfig(save=str(home / str(number)), **flags), list[str]()
        folder = CheckpointFolder(config.save, "--save")
        take_folder(folder, attempt.axis, lines.append)
        checkpoints = Checkpoints(config, attempt.state, record_of(Case()), attempt.axis, lines.append, folder=folder)
        saves = AfterStep(checkpoints.save, config.save_interval, at_end=True)
        for iteration in range(1, 8):
            if saves.due(iteration, last=iteration == 7):
                checkpoints.save(TrainingProgress(iteration=iteration))
        checkpoints.finish()
        found.append(lines)
    return found


def test_checkpoints_are_written_at_intervals_and_at_the_end_and_pruned(tmp_path):
    for number, lines in enumerate(ranks(2).run(save_seven_steps, tmp_path)[0]):
        (flags, saves, stay), folder = SETTINGS[number], tmp_path / str(number)
        tracker = folder / "latest_checkpointed_iteration.txt"
        assert {*folder.iterdir()} == {tracker, folder / "lock", *(folder / f"iter_{i:07d}" for i in stay)}, flags
        assert tracker.read_text() == "7\n"
        saved = [line for line in lines if "successfully saved" in line]
        assert len(saved) == saves
        assert saved[-1].startswith(f"  successfully saved checkpoint at iteration       7 to {folder} | 0.00")
        waited = [line for line in lines if "scheduled an async checkpoint save at iteration" in line]
        assert len(waited) == (saves if "async_save" in flags else 0)
        assert all(re.search(r" \| training waited \d+\.\d{3} s$", line) for line in waited)


def go_on_and_back(case: Case, **flags: Any) -> None:
    """Train two steps, save, and train two more; go back to the checkpoint, and repeat the last two steps.

    Check that going back restores the saved state, and that the repeated steps are bit-identical to those before.
    """
    attempt = Attempt(case, **flags)
    attempt.load()
    attempt.train(2)
    at_checkpoint = attempt.fingerprint()
    on = attempt.train(4, saves=False)
    moved = attempt.fingerprint()
    # the evaluation fills the secondary partition with step 4's weights, which must not remain after going back
    attempt.evaluate(case.batch(0, 0, 2))
    attempt.reload()
    assert attempt.progress.iteration == 2
    assert attempt.fingerprint() == at_checkpoint != moved
    assert attempt.train(4) == on
    assert attempt.fingerprint() == moved
    attempt.checkpoints.finish()


@pytest.mark.parametrize(("asynchronous", "delta"), [slow(True, "none"), slow(False, "lossless")])
def test_load_after_further_steps_restores_the_checkpoint_bit_for_bit(tmp_path, asynchronous, delta):
    zero, precision = ZeroConfig(zeropp=True, zero_weight_delta=delta), PrecisionConfig(bf16=True)
    case = Case(nodes=2, zero=zero, precision=precision, micro_batches=2)
    ranks(2).run(go_on_and_back, case, save=str(tmp_path), async_save=asynchronous)
    assert CheckpointFolder(tmp_path, "--save").iterations() == [2, 4]


def open_at_once(save: str) -> None:
    """Open a folder of --save, and fail at once if another run has locked it."""
    with mock.patch.object(checkpoints, "LOCK_SECONDS", 0.0):
        Attempt(Case(), save=save).load()


def test_folder_in_use_by_another_job_is_rejected_on_all_ranks(tmp_path):
    other = CheckpointFolder(tmp_path, "--save")
    other.lock()
    rows = [(str(tmp_path), f"--save {tmp_path} is in use by process {os.getpid()} on ")]
    assert ranks(2).run(not_refused, rows, open_at_once) == [[], []]


def test_disk_without_space_for_a_checkpoint_is_rejected_at_the_start(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        # leaves 12 free pages of 4096 bytes on the disk; the lock file takes one
        (disk / "ballast").write_bytes(bytes((1 << 20) - 12 * 4096))
        rows = [(str(disk), f"--save {disk} has 4.51e-05 GB free, a checkpoint takes about 0.0001")]
        assert ranks(2).run(not_refused, rows, open_at_once) == [[], []]


def open_asynchronous(device: str) -> Checkpoints:
    state: Any = SimpleNamespace(device=torch.device(device))
    return Checkpoints(CheckpointConfig(save="x", async_save=True), state, None, None, print, folder=None)


@pytest.mark.parametrize("reusable", [STAGER_IS_REUSABLE, False])
def test_later_saves_stage_copies_of_the_current_tensors(monkeypatch, reusable):
    """Save three times, with a stager (torch's copy of tensors to host memory) that is reusable or not.

    torch 2.11 and 2.12 close a stager after its first use, so each save needs a new one there.
    """
    monkeypatch.setattr(checkpoints, "STAGER_IS_REUSABLE", reusable)
    saves, tensors = open_asynchronous("cpu"), {"weight": torch.arange(4.0)}
    for step in range(3):
        copy = saves._stage(tensors)["weight"]
        # training changes the weight in place, which must not change the copy that is being written
        tensors["weight"].add_(1)
        assert copy.tolist() == [step, step + 1, step + 2, step + 3]
        if not reusable:
            saves._stager.close()  # torch 2.11 and 2.12 close the stager after a save


def test_failed_asynchronous_save_ends_the_run_before_the_next_step():
    saves, (writing, done) = open_asynchronous("cpu"), (Future[None](), Future[None]())
    saves._writing = writing
    with saves.watch(3):
        pass
    done.set_exception(ValueError("no space"))
    saves._writing = done
    with pytest.raises(UserError, match="no space"), saves.watch(4):
        pass


@pytest.mark.skipif(not STAGER_IS_REUSABLE, reason="torch before 2.13 closes a stager after its first use")
def test_later_saves_reuse_the_memory_of_the_copies():
    saves, tensors = open_asynchronous("cpu"), {"weight": torch.arange(4.0)}
    assert len({saves._stage(tensors)["weight"].data_ptr() for _ in range(3)}) == 1


def test_copies_of_gpu_tensors_are_pinned():
    with mock.patch.object(checkpoints, "threads_on"):
        options = open_asynchronous("cuda")._staging
    assert (options.use_pinned_memory, options.use_non_blocking_copy) == (True, True)
    assert (options.use_async_staging, options.use_shared_memory) == (False, False)
