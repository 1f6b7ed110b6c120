"""kill -9 and a full disk at any moment: the tracker points at a complete checkpoint, and all goes on from there."""

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from helpers.checkpoints import Attempt, record_of, run
from helpers.disks import small_disk
from helpers.ranks import ranks
from helpers.training import Case

from megazpp.base.program import UserError
from megazpp.checkpoint.checkpoints import write_checkpoint
from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.record import TrainingProgress
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.parallel.axis import MeshAxis

KILLS = 30
TENSORS = {f"tensor {index}": (1 << 14, index + 1) for index in range(4)}


def save_forever(path: Path, pipe: Any) -> None:
    """A job: load the latest checkpoint, check that it is one moment's, and save without end."""
    folder = CheckpointFolder(path, "--save")
    folder.lock()
    folder.recover()
    pipe.send("begun")
    iteration = folder.latest() or 0
    tensors = {key: torch.zeros(shape) for key, shape in TENSORS.items()}
    if iteration:
        verify_files(folder.of(iteration))
        SafeReader(folder.of(iteration)).fill(tensors, ())
        assert all((tensor == iteration).all() for tensor in tensors.values())
    pipe.send(iteration)
    while True:
        iteration += 1
        for tensor in tensors.values():
            tensor.fill_(iteration)
        now = record_of(Case(), progress=TrainingProgress(iteration=iteration))
        write_checkpoint(now, tensors, folder, MeshAxis("all"), keep_last=2)
        pipe.send(iteration)


def test_thirty_kills_at_random_moments_of_load_and_save_lose_nothing_that_was_complete(tmp_path):
    """Moments are spread over what the last load or save took, so that a busy machine does not miss any phase."""
    generator, context = random.Random(7), multiprocessing.get_context("fork")
    complete, killed_in = 0, []
    seconds = [0.1]
    for _ in range(KILLS):
        ours, theirs = context.Pipe(duplex=False)
        job = context.Process(target=save_forever, args=(tmp_path, theirs), daemon=True)
        job.start()
        theirs.close()
        told = []
        for _ in range(generator.choice([1, 2, 3])):
            since = time.monotonic()
            told.append(ours.recv())
            seconds.append(time.monotonic() - since)
        job.join(generator.uniform(0.0, 1.2 * seconds[-1]))
        assert job.exitcode is None, "the job failed"
        job.kill()
        job.join()
        with contextlib.suppress(EOFError):
            while True:
                told.append(ours.recv())
        killed_in.append(len(told))
        if len(told) > 1:
            # it began with what the tracker named when the last one was killed, or what it was about to name
            assert told[1] in (complete, complete + 1)
            complete = told[-1]
        latest = CheckpointFolder(tmp_path, "--save").latest() or 0
        # the last one may have been complete before it could say so, and one that was about to be named is now
        assert complete <= latest <= complete + 2
        complete = latest
    assert complete >= KILLS // 3
    assert killed_in.count(1) > 3  # while loading
    assert sum(count > 1 for count in killed_in) > 10  # while saving
    left = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert len(left) <= 4  # two that are kept, one that was about to be deleted, one that was being written


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name_and_before_the_tracker_names_it(
    monkeypatch, tmp_path
):
    done: list[tuple[str, str]] = []  # in order: what was brought to the disk, and new names
    sizes: dict[str, int] = {}  # of what was brought there
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        name = os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)
        done.append(("sync", name))
        sizes[name] = os.fstat(descriptor).st_size

    def record_rename(old: Any, new: Any, **where: Any) -> None:
        rename(old, new, **where)
        done.append((os.path.relpath(old, tmp_path), os.path.relpath(new, tmp_path)))

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    record = record_of(Case(), progress=TrainingProgress(iteration=7))
    write_checkpoint(
        record, {"x": torch.ones(3)}, CheckpointFolder(tmp_path, "--save"), MeshAxis("all"), tokenizer={"a": b"b"}
    )
    partial, whole, tracker = "iter_0000007.partial", "iter_0000007", "latest_checkpointed_iteration.txt"
    named = done.index((partial, whole))
    written = {f"{partial}/{path.name}" for path in (tmp_path / whole).iterdir()}
    index, unfinished = f"{partial}/.metadata", f"{partial}/.metadata.tmp"
    assert {f"{partial}/__0_0.distcp", f"{partial}/run.json", f"{partial}/checksums.txt", index} == written
    synced = [name for what, name in done[:named] if what == "sync"]
    assert written - {index} | {unfinished} <= set(synced)
    sizes[index] = sizes[unfinished]
    assert {name: sizes[name] for name in written} == {
        f"{partial}/{path.name}": path.stat().st_size for path in (tmp_path / whole).iterdir()
    }
    assert done.index(("sync", unfinished)) < done.index((unfinished, index)) < done.index(("sync", partial))
    assert done[named - 3 :] == [
        ("sync", partial),
        ("sync", f"{tracker}.new"),
        ("sync", "."),
        (partial, whole),
        ("sync", "."),
        (f"{tracker}.new", tracker),
        ("sync", "."),
    ]


def fill_and_save(disk: Path, *, left: int, **flags: Any) -> dict[str, Any]:
    """Save once, leave `left` bytes on the disk, save again; then, with space again, once more."""
    attempt = Attempt(Case(), **flags)
    progress, ballast, folder = attempt.load(), disk / "ballast", CheckpointFolder(disk / "save", "--save")
    checkpoints, world = attempt.checkpoints, attempt.dims.world

    def barrier() -> None:
        world.max_(torch.zeros(1))

    def save(iteration: int) -> None:
        checkpoints.after_step(progress._replace(iteration=iteration), last=True)
        checkpoints.finish()

    checkpoints.after_step(progress._replace(iteration=1), last=True)
    checkpoints._finish_writing()
    if world.rank == 0:
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - left))
    barrier()
    try:
        save(2)
        said = "saved"
    except UserError as error:
        said = str(error)
    barrier()
    names = sorted(path.name for path in folder.path.iterdir())
    found = {"said": said, "latest": folder.latest(), "names": names}
    barrier()
    if world.rank == 0:
        ballast.unlink()
    barrier()
    save(3)
    return found | {"at last": folder.latest()}


def test_a_disk_that_fills_up_during_a_save_leaves_the_checkpoint_before_it_and_says_so_and_no_more(tmp_path):
    """Whatever part of torch's archives it is that has no space."""
    full = re.compile(r"(rank [01]: )?\[Errno 28\] No space left on device")
    for left, asynchronous in ((0, False), (4_096, False), (8_192, True), (20_000, True), (100_000, False)):
        with small_disk(tmp_path / str(left), "1m") as disk:
            save = str(disk / "save")
            for found in ranks(2).run(fill_and_save, disk, left=left, save=save, async_save=asynchronous):
                where, could_not, lines = found["said"].partition(": iteration 2 could not be saved: ")
                assert (where, bool(could_not)) == (f"--save {save}", True)
                assert all(full.fullmatch(line) for line in lines.splitlines()), (left, lines)
                assert (found["latest"], found["at last"]) == (1, 3)
                assert found["names"] == ["iter_0000001", "latest_checkpointed_iteration.txt", "lock"]
            result, _ = ranks(2).run(run, Case(), 3, load=save)
            assert result.start.iteration == 3
