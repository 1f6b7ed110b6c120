"""When checkpoints are written, which stay, and going back."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.checkpoints import Attempt, Job, run_each, shared_axis, template
from helpers.disks import small_disk
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import Case
from torch.distributed.checkpoint.staging import StagingOptions

from megazpp.checkpoint import checkpoints
from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.record import TrainingProgress
from megazpp.zero.config import PrecisionConfig, ZeroConfig


def iterations(path: Path) -> list[int]:
    return CheckpointFolder(path, "--save").iterations()


SETTINGS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [7]),
    ({"save_interval": 3}, [3, 6, 7]),
    ({"save_interval": 7}, [7]),
    ({"save_interval": 2, "keep_last": 2}, [6, 7]),
    ({"save_interval": 1, "save_retain_interval": 3, "async_save": True}, [3, 6, 7]),
]


def save_seven_steps(home: Path) -> list[list[str]]:
    """The lines of a run with each of SETTINGS, in a folder of its number; without training."""
    attempt, found = Attempt(Job(case=Case(), steps=0, flags={})), []
    for number, (flags, _) in enumerate(SETTINGS):
        config, lines = CheckpointConfig(save=str(home / str(number)), **flags), list[str]()
        checkpoints = Checkpoints(config, attempt.state, template(attempt.job), shared_axis(attempt.dims), lines.append)
        checkpoints.open()
        for iteration in range(1, 8):
            checkpoints.after_step(TrainingProgress(iteration=iteration), last=iteration == 7)
        checkpoints.finish()
        found.append(lines)
    return found


def test_there_is_one_every_interval_and_one_at_the_end_and_the_others_go(tmp_path):
    of_settings = ranks(2).run(save_seven_steps, tmp_path)[0]
    for number, ((flags, expected), lines) in enumerate(zip(SETTINGS, of_settings, strict=True)):
        folder = tmp_path / str(number)
        assert iterations(folder) == expected, flags
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "7\n"
        saved = [line for line in lines if "successfully saved" in line]
        assert saved[-1].startswith(f"  successfully saved checkpoint at iteration       7 to {folder} | 0.00")
        waited = [line for line in lines if "scheduled an async checkpoint save at iteration" in line]
        assert len(waited) == (len(saved) if "async_save" in flags else 0)
        assert all(re.search(r" \| training waited \d+\.\d{3} s$", line) for line in waited)


def test_a_run_that_is_complete_already_saves_nothing(tmp_path):
    job = Job(case=Case(), steps=2, flags={"save": str(tmp_path), "load": str(tmp_path)})
    first, second = ranks(2).run(run_each, [job, job])[0]
    assert (len(first["steps"]), len(second["steps"])) == (2, 0)
    assert second["state"] == first["state"]
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000002", "latest_checkpointed_iteration.txt", "lock"}


def go_on_and_back(job: Job) -> dict[str, Any]:
    """Train to the first checkpoint, on without one, back to it, and on again."""
    attempt = Attempt(job)
    progress = attempt.load()
    checkpoints = attempt.checkpoints
    after_step, finish = checkpoints.after_step, checkpoints.finish
    checkpoints.finish = lambda: None
    attempt.train(progress)
    at_checkpoint = attempt.fingerprint()
    checkpoints.after_step = lambda progress, *, last: None
    attempt.job = Job(case=job.case, steps=4, flags=job.flags)
    on = attempt.train(progress._replace(iteration=2))
    moved = attempt.fingerprint()
    attempt.evaluate(job.case.batch(0, 0, 2))  # kept weights are the later step's
    back = checkpoints.rewind()
    returned = attempt.fingerprint()
    checkpoints.after_step = after_step
    again = attempt.train(back)
    finish()
    return {
        "moved": moved != at_checkpoint,
        "returned": returned == at_checkpoint,
        "iteration": back.iteration,
        "same": on == again and attempt.fingerprint() == moved,
    }


@pytest.mark.parametrize(("asynchronous", "delta"), [(True, "none"), slow(False, "lossless")])
def test_a_rewind_goes_back_to_the_newest_checkpoint_bit_for_bit(tmp_path, asynchronous, delta):
    zero, precision = ZeroConfig(zeropp=True, zero_weight_delta=delta), PrecisionConfig(bf16=True)
    case = Case(nodes=2, zero=zero, precision=precision, micro_batches=2)
    flags = {"save": str(tmp_path), "async_save": asynchronous}
    for result in ranks(2).run(go_on_and_back, Job(case=case, steps=2, flags=flags)):
        assert result == {"moved": True, "returned": True, "iteration": 2, "same": True}
    assert iterations(tmp_path) == [2, 4]


def refusal(job: Job) -> str:
    """Why the folder of --save, for which nobody waits, cannot be had."""
    at_once = functools.partialmethod(CheckpointFolder.lock, patience_seconds=0.0)
    try:
        with mock.patch.object(CheckpointFolder, "lock", at_once):
            Attempt(job).load()
    except ValueError as error:
        return str(error)
    return "not refused"


def test_a_folder_that_another_job_uses_is_refused_on_all_ranks(tmp_path):
    other = CheckpointFolder(tmp_path, "--save")
    other.lock()
    for said in ranks(2).run(refusal, Job(case=Case(), steps=1, flags={"save": str(tmp_path)})):
        assert said.startswith(f"--save {tmp_path} is in use by process ")
    other.unlock()


def test_a_disk_without_space_for_a_checkpoint_is_found_at_the_start(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "ballast").write_bytes(bytes((1 << 20) - 50_000))
        said = ranks(2).run(refusal, Job(case=Case(), steps=1, flags={"save": str(disk / "save")}))
        assert said[0] == said[1]
        assert re.match(f"--save {disk / 'save'} has 4.*e-05 GB free, a checkpoint takes about 0.0001", said[0])


def test_copies_are_staged_in_the_same_memory_each_time_and_pinned_for_a_gpu(monkeypatch):
    asked: list[StagingOptions] = []
    state: Any = SimpleNamespace(device=torch.device("cpu"))
    opened: list[Any] = [CheckpointConfig(save="x", async_save=True), state, None, None, print]
    stager, tensors = Checkpoints(*opened)._stager, {"weight": torch.arange(4.0)}
    assert stager is not None
    first = stager.stage(tensors)["weight"]
    tensors["weight"].add_(1)  # training goes on
    assert first.tolist() == [0, 1, 2, 3]
    assert stager.stage(tensors)["weight"].data_ptr() == first.data_ptr()
    assert first.tolist() == [1, 2, 3, 4]
    monkeypatch.setattr(checkpoints, "DefaultStager", asked.append)
    monkeypatch.setattr(checkpoints, "threads_on", lambda *_: None)
    state.device = torch.device("cuda")
    Checkpoints(*opened)
    (options,) = asked
    assert (options.use_pinned_memory, options.use_non_blocking_copy) == (True, True)
    assert (options.use_async_staging, options.use_shared_memory) == (False, False)
