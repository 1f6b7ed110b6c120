"""Test the order in which a save writes files, and saves that a full disk interrupts.

The tracker file always names a complete checkpoint, which can be loaded.
"""

import os
import re
import shutil
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
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import read_record
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.axis import MeshAxis


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


def fill_and_save(disk: Path, *space: int, **flags: Any) -> list[tuple[str, int | None, list[str]]]:
    """Save while the disk has room. Then, for each number of bytes in `space`, save twice.

    The first of these two saves finds only so many free bytes and must fail; before the second one, space is freed.

    Returns:
        For each save with little space: (error message, iteration in the tracker file, names in the folder).
    """
    attempt, ballast, folder = Attempt(Case(), **flags), disk / "ballast", CheckpointFolder(disk / "save", "--save")
    progress, first, found = attempt.load(), attempt.dims.world.rank == 0, []

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
    for saved, left in zip(range(1, 2 * len(space), 2), space, strict=True):
        if first:
            ballast.write_bytes(bytes(shutil.disk_usage(disk).free - left))
        dist.barrier()
        said = save(saved + 1)
        found.append((said, folder.latest(), sorted(path.name for path in folder.path.iterdir())))
        dist.barrier()
        if first:
            ballast.unlink()
        dist.barrier()
        assert save(saved + 2) == "saved"
    attempt.checkpoints.finish()
    return found


@pytest.mark.parametrize(("space", "asynchronous"), [((0, 100_000), False), ((8_192,), True)])
def test_disk_that_fills_up_during_a_save_keeps_the_previous_checkpoint(tmp_path, space, asynchronous):
    """Let a disk fill up at different points of a save, and check that the previous checkpoint can be loaded.

    The error has one line per rank, with the same words wherever in a file torch's writer ran out of space.
    """
    with small_disk(tmp_path / "disk", "1m") as disk:
        save, line = (
            str(disk / "save"),
            r"(rank [01]: )?No space left on device; free disk space, or choose another disk",
        )
        flags = {"save": save, "async_save": asynchronous, "keep_last": 1}
        for found in ranks(2).run(fill_and_save, disk, *space, **flags):
            for saved, (said, latest, names) in zip(range(1, 2 * len(space), 2), found, strict=True):
                beginning = (
                    f"--save {save}: iteration {saved + 1} could not be saved, earlier checkpoints are unchanged: "
                )
                assert re.fullmatch(rf"{beginning}{line}(\n{line})*", said)
                assert latest == saved
                assert names == [f"iter_{saved:07}", "latest_checkpointed_iteration.txt", "lock"]
        last = 2 * len(space) + 1
        assert [result.start.iteration for result in ranks(2).run(run, Case(), last, load=save)] == [last, last]
