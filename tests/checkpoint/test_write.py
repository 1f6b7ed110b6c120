"""Test saves that kill -9 or a full disk interrupts.

The tracker file always names a complete checkpoint, which can be loaded.
"""

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import Attempt, record_of, run
from helpers.disks import small_disk
from helpers.ranks import ranks
from helpers.training import Case

from megazpp.base.program import UserError
from megazpp.checkpoint.checkpoints import write_checkpoint
from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import read_record
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.axis import MeshAxis

KILLS = 30
TENSORS = {f"tensor {index}": (1 << 14, index + 1) for index in range(4)}


def save_forever(path: Path, pipe: Any) -> None:
    """Load the latest checkpoint, check that all its tensors belong to one iteration, and then save without end.

    The function sends "begun", the loaded iteration and each saved iteration through `pipe`.
    """
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


@pytest.mark.slow
def test_thirty_random_kills_lose_no_complete_checkpoint(tmp_path):
    """Kill a saving job at random times, and check each time that the latest complete checkpoint can be loaded.

    The times follow the duration of the last load or save, so that slow machines are hit in every phase too.
    """
    generator, context = random.Random(7), multiprocessing.get_context("fork")
    complete, seconds, killed_in = 0, 0.1, []
    for _ in range(KILLS):
        ours, theirs = context.Pipe(duplex=False)
        job = context.Process(target=save_forever, args=(tmp_path, theirs), daemon=True)
        job.start()
        theirs.close()
        told = []
        for _ in range(generator.choice([1, 2, 3])):
            since = time.monotonic()
            told.append(ours.recv())
            seconds = time.monotonic() - since
        job.join(generator.uniform(0.0, 1.2 * seconds))
        assert job.exitcode is None, "the saving job ended by itself before it was killed"
        job.kill()
        job.join()
        with contextlib.suppress(EOFError):
            while True:
                told.append(ours.recv())
        killed_in.append(len(told))
        if len(told) > 1:
            # the job loads the iteration that the killed job reported last, or the next one if its save completed
            # before the kill
            assert told[1] in (complete, complete + 1)
            complete = told[-1]
        latest = CheckpointFolder(tmp_path, "--save").latest() or 0
        # The killed job may have completed a save that it did not report, and recovery may have completed one more.
        assert complete <= latest <= complete + 2
        complete = latest
    assert complete >= KILLS // 3
    # more than 3 jobs were killed before they had reported the iteration that they loaded
    assert killed_in.count(1) > 3
    assert sum(count > 1 for count in killed_in) > 10  # more than 10 jobs were killed after they had loaded
    left = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert len(left) <= 4  # at most two checkpoints that stay, one about to be deleted, and one that was being written


def test_files_are_synced_before_renames_and_before_the_tracker(monkeypatch, tmp_path):
    fsync, rename, done = os.fsync, os.rename, []
    sizes: dict[int, int] = {}  # size in bytes of each file at its fsync, by inode

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        sizes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    def record_rename(old: Any, new: Any, **where: Any) -> None:
        rename(old, new, **where)
        done.append(f"{os.path.relpath(old, tmp_path)} -> {os.path.relpath(new, tmp_path)}")

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    record, folder = record_of(Case(), progress=TrainingProgress(iteration=7)), CheckpointFolder(tmp_path, "--save")
    write_checkpoint(record, {"x": torch.ones(3)}, folder, MeshAxis("all"), tokenizer={"a": b"b"})
    whole, tokenizer, tracker = "iter_0000007", "tokenizer-6f8892e03c3cf309", "latest_checkpointed_iteration.txt"
    assert done == [
        f"{whole}.partial/__0_0.distcp",
        f"{whole}.partial/.metadata.tmp",
        f"{whole}.partial/.metadata.tmp -> {whole}.partial/.metadata",
        f"{tokenizer}.partial/a",
        f"{tokenizer}.partial/checksums.txt",
        f"{tokenizer}.partial",
        f"{tokenizer}.partial -> {tokenizer}",
        ".",
        f"{whole}.partial/run.json",
        f"{whole}.partial/checksums.txt",
        f"{whole}.partial",
        f"{tracker}.new",
        ".",
        f"{whole}.partial -> {whole}",
        ".",
        f"{tracker}.new -> {tracker}",
        ".",
    ]
    files = [path.stat() for path in tmp_path.rglob("*") if path.is_file()]
    assert {file.st_ino: file.st_size for file in files}.items() <= sizes.items()
    assert read_record(tmp_path / whole).tokenizer_folder == tokenizer


def fill_and_save(disk: Path, left: int, **flags: Any) -> tuple[str, int | None, list[str], int | None]:
    """Save three times: on a free disk, with only `left` free bytes, and with space again.

    Return the error message, the tracked iteration and the file names after the second save, and the iteration that is
    tracked in the end.
    """
    attempt, ballast, folder = Attempt(Case(), **flags), disk / "ballast", CheckpointFolder(disk / "save", "--save")
    progress, first = attempt.load(), attempt.dims.world.rank == 0

    def save(iteration: int) -> str:
        try:
            attempt.checkpoints.save(progress._replace(iteration=iteration))
            attempt.checkpoints._finish_writing()
        except UserError as error:
            return str(error)
        finally:
            dist.barrier()
        return "saved"

    assert save(1) == "saved"
    if first:
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - left))
    dist.barrier()
    said, latest, names = save(2), folder.latest(), sorted(path.name for path in folder.path.iterdir())
    dist.barrier()
    if first:
        ballast.unlink()
    dist.barrier()
    assert save(3) == "saved"
    attempt.checkpoints.finish()
    return said, latest, names, folder.latest()


@pytest.mark.parametrize(
    ("left", "asynchronous"), [(0, False), (4_096, False), (8_192, True), (20_000, True), (100_000, False)]
)
def test_disk_that_fills_up_during_a_save_keeps_the_previous_checkpoint(tmp_path, left, asynchronous):
    """Let a disk fill up at different points of a save, and check that the previous checkpoint can be loaded.

    The error has one line per rank, whichever part of torch's archive found no space.
    """
    with small_disk(tmp_path / "disk", "1m") as disk:
        save = str(disk / "save")
        for said, latest, names, at_last in ranks(2).run(fill_and_save, disk, left, save=save, async_save=asynchronous):
            line = r"(rank [01]: )?No space left on device; free disk space, or choose another disk"
            beginning = f"--save {save}: iteration 2 could not be saved, earlier checkpoints are unchanged: "
            assert re.fullmatch(rf"{beginning}{line}(\n{line})*", said)
            assert (latest, at_last) == (1, 3)
            assert names == ["iter_0000001", "latest_checkpointed_iteration.txt", "lock"]
        assert [result.start.iteration for result in ranks(2).run(run, Case(), 3, load=save)] == [3, 3]
