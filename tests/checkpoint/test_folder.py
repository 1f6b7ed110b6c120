"""Test a folder of checkpoints: its names and renames, the tracker file, the lock, and the copies of the tokenizer."""

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.refusals import not_refused

import megazpp.checkpoint.folder as folder_module
from megazpp.base.files import DamagedError
from megazpp.checkpoint.folder import TRACKER, CheckpointFolder, kept_iterations, read_tokenizer, write_tokenizer
from megazpp.data.tokenizer import TokenizerConfig

TOKENIZER = {"tokenizer.model": b"pieces", "tokenizer_config.json": b"{}"}


def save(folder: CheckpointFolder, iteration: int, text: str = "") -> list[Path]:
    folder.begin(iteration)
    (folder.partial(iteration) / "file").write_text(text)
    return folder.complete(iteration)


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path, "--save")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoint_has_megatrons_name_and_tracker_names_the_latest(folder):
    assert (folder.latest(), folder.iterations()) == (None, [])
    for iteration in (20, 100, 12345678):
        assert save(folder, iteration) == []
    assert (folder.path / "iter_0000100" / "file").exists()
    assert (folder.path / TRACKER).read_text() == "12345678\n"
    assert (folder.latest(), folder.iterations()) == (12345678, [20, 100, 12345678])


def test_unfinished_checkpoints_are_ignored_and_removed_by_the_next_run(folder):
    save(folder, 1)
    folder.begin(2)
    (folder.path / "tokenizer-0123456789abcdef.partial").mkdir()
    (folder.path / "iter_0000003").write_text("a file")
    assert folder.iterations() == [1]
    unfinished = ("iter_0000002", "tokenizer-0123456789abcdef")
    assert folder.recover() == [f"removed {folder.path}/{name}.partial, which was not finished" for name in unfinished]
    assert folder.latest() == 1
    assert folder.recover() == []


def test_complete_checkpoint_is_never_overwritten(folder):
    aside = [save(folder, 5, text) for text in ("first", "second", "third")]
    assert aside == [[], [folder.path / "iter_0000005.replaced-1"], [folder.path / "iter_0000005.replaced-2"]]
    assert [(path / "file").read_text() for path in (folder.of(5), *aside[1], *aside[2])] == [
        "third",
        "first",
        "second",
    ]
    assert folder.iterations() == [5]


@pytest.mark.parametrize("first", [15, 20, 25])
def test_first_save_of_a_branch_sets_later_checkpoints_of_the_other_aside(folder, first):
    """Save iteration `first` after going back to iteration 10, and check that later checkpoints are renamed.

    Otherwise a resume could find checkpoints of the branch that the run has abandoned.
    """
    for iteration in (10, 20, 30):
        save(folder, iteration, f"left {iteration}")
    folder.track(10)
    left = [iteration for iteration in (20, 30) if iteration >= first]
    assert save(folder, first) == [folder.path / f"iter_00000{iteration}.replaced-1" for iteration in left]
    assert folder.iterations() == sorted({10, 20, first} - {*left} | {first})
    (folder.path / TRACKER).unlink()
    assert folder.latest() == first


def test_checkpoints_that_were_set_aside_are_deleted_when_the_run_has_passed_them(folder):
    """Go back to iteration 10, and save iterations 20, 30 and 40 again.

    The first save sets the old checkpoints of 20 and 30 aside. Each is deleted when the run has saved a later
    iteration.
    """
    for iteration in (10, 20, 30):
        save(folder, iteration)
    folder.track(10)
    found = []
    for iteration in (20, 30, 40):
        save(folder, iteration)
        folder.keep_only([iteration])
        found.append(sorted(path.name for path in folder.path.glob("iter_*")))
    assert found[0] == ["iter_0000020", "iter_0000020.replaced-1", "iter_0000030.replaced-1"]
    assert found[1:] == [["iter_0000030", "iter_0000030.replaced-1"], ["iter_0000040"]]


def test_going_back_many_times_keeps_one_abandoned_checkpoint_per_iteration(folder):
    """Go back to iteration 10 several times, each time from a new checkpoint of iteration 20.

    Of the checkpoints of iteration 20 that saves have set aside, only the last one may be kept.
    """
    for number in range(4):
        for iteration in (10, 20):
            save(folder, iteration, f"branch {number} {iteration}")
            folder.keep_only([10, iteration])
        folder.track(10)
    (aside,) = folder.path.glob("iter_0000020.replaced-*")
    assert (aside / "file").read_text() == "branch 2 20"


class Killed(BaseException):
    """The exception by which a test ends a save like `kill -9`: no handler catches it, so nothing is cleaned up."""


def killed_before(moment: int, work: Callable[[], Any]) -> bool:
    """Call `work`, and raise Killed before its disk operation number `moment`, counted from 0.

    Operations are rename, unlink, rmtree, `write_synced` and `sync_directory`. Return True if `work` was ended, and
    False if it completed before that operation.
    """
    left = itertools.count(moment, -1)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if next(left) == 0:
                raise Killed
            return function(*args, **kwargs)

        return guarded

    changes = ((Path, "rename"), (Path, "unlink"), (shutil, "rmtree"))
    with contextlib.ExitStack() as stack:
        for owner, name in (*changes, (folder_module, "sync_directory"), (folder_module, "write_synced")):
            stack.enter_context(mock.patch.object(owner, name, before(getattr(owner, name))))
        stack.enter_context(contextlib.suppress(Killed))
        work()
        return False
    return True


@pytest.mark.parametrize(
    # `latest` has one entry per moment of the kill: the iteration from which a run resumes afterwards
    ("saved", "latest"),
    [
        # A kill before the folder of iteration 5 is renamed leaves iteration 3 as the latest. The rename follows the
        # sync of the files.
        ([3], [3, 3, 3, 3, 3, 5, 5, 5, 5]),
        # Iteration 5 is saved again after going back: first the tracker is set to 3, then checkpoints 5 and 7 are
        # renamed, and then the new iteration 5 is completed.
        ([3, 5, 7], [7, 7, 7, 3, 3, 3, 3, 3, 3, 3, 3, 5, 5, 5, 5]),
    ],
)
def test_save_killed_at_any_moment_is_completed_or_removed_without_loss(tmp_path, saved, latest):
    """Kill a save, and its recovery, before each of their disk operations.

    No checkpoint is lost, and a recovery that was killed and is repeated gives the same result.
    """
    named = []
    for moment in itertools.count():
        folder = CheckpointFolder(tmp_path / str(moment), "--save")
        folder.path.mkdir()
        for iteration in saved:
            save(folder, iteration, f"old {iteration}")
        killed = killed_before(moment, lambda folder=folder: save(folder, 5, "new"))
        assert folder.latest() in {*saved, 5}  # even before `recover`, the folder names a complete checkpoint
        before = shutil.copytree(folder.path, tmp_path / f"{moment} before")
        folder.recover()
        named.append(folder.latest())
        found = content(folder.path)
        assert found[f"iter_000000{named[-1]}/file"] == (b"new" if named[-1] == 5 else b"old %d" % named[-1])
        assert {*found.values()} >= {b"old %d" % iteration for iteration in saved}
        assert not [path for path in folder.path.iterdir() if path.suffix in (".partial", ".new")]
        assert folder.recover() == []
        for later in itertools.count():
            again = CheckpointFolder(shutil.copytree(before, tmp_path / f"{moment} {later}"), "--save")
            interrupted = killed_before(later, again.recover)
            again.recover()
            assert content(again.path) == found, (moment, later)
            if not interrupted:
                break
        if not killed:
            break
    assert named == latest


def test_newest_checkpoint_counts_without_a_complete_tracker(folder):
    save(folder, 3)
    save(folder, 15)
    for text in ("", "x", "1"):
        (folder.path / f"{TRACKER}.new").write_text(text)
        assert folder.recover() == []
        assert folder.latest() == 15
    (folder.path / TRACKER).unlink()  # as after a first save that was killed between its rename and the tracker file
    assert folder.latest() == 15


def test_tracker_with_an_invalid_or_missing_iteration_is_an_error(folder):
    save(folder, 7)

    def latest(tracker: str) -> None:
        (folder.path / TRACKER).write_text(tracker)
        folder.latest()

    rows = [(text, f"{TRACKER} is damaged: it says") for text in ("", "x", "-3", "1e3", "7\n8", "release")]
    missing = f"names iteration 8, but {folder.of(8)} is missing"
    assert not_refused([*rows, ("8", missing)], latest, DamagedError) == []
    aside = folder.path / "iter_0000008.replaced-1"
    aside.mkdir()
    assert not_refused([("8", f"{missing}; {aside} may be it")], latest, DamagedError) == []


def test_unwritable_folder_is_rejected_with_flag_and_reason(tmp_path):
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path / "gone")
    file.touch()
    rows = [
        (link, f"--save {link} cannot be written to: it is a link to {tmp_path / 'gone'}, which does not exist"),
        (file / "below", f"--save {file}/below cannot be written to: Not a directory"),
    ]
    assert not_refused(rows, lambda path: CheckpointFolder(path, "--save").lock()) == []
    (tmp_path / "gone").mkdir()
    CheckpointFolder(link, "--save").lock()


def test_folder_that_takes_files_but_no_folders_is_rejected_and_unlocked(folder, monkeypatch):
    folder.lock()
    folder.unlock()
    # root may write to read-only folders, so a failing mkdtemp stands for a missing permission
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", mock.Mock(side_effect=OSError(13, "Permission denied")))
        with pytest.raises(ValueError, match=f"--save {folder.path} cannot be written to: Permission denied"):
            folder.lock()
    folder.lock(patience_seconds=0.0)
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_removed_folder_is_recreated_and_stays_locked_by_its_job(tmp_path):
    folder, next_job = (CheckpointFolder(tmp_path / "runs/save", "--save") for _ in range(2))
    folder.lock()
    save(folder, 1)
    shutil.rmtree(tmp_path / "runs")
    save(folder, 2)
    assert (folder.iterations(), folder.latest()) == ([2], 2)
    with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on "):
        next_job.lock(patience_seconds=0.0)
    threading.Timer(0.3, folder.unlock).start()
    next_job.lock(patience_seconds=60.0)


def test_save_after_a_file_has_replaced_the_folder_is_an_error_with_the_flag(tmp_path):
    folder = CheckpointFolder(tmp_path / "save", "--save")
    folder.lock()
    folder.path.rename(tmp_path / "moved")
    folder.path.touch()
    with pytest.raises(ValueError, match=r"^--save .*/save cannot be written to: File exists"):
        folder.begin(1)
    folder.abandon(1)


def test_checkpoints_moved_to_another_disk_lose_only_their_links(folder, tmp_path):
    """Replace checkpoints by links to folders elsewhere. Deleting a checkpoint may remove its link, but no files there.

    This also holds for links under the names of unfinished checkpoints.
    """
    for iteration in (1, 2, 3):
        save(folder, iteration)
        folder.of(iteration).rename(tmp_path / f"moved{iteration}")
        folder.of(iteration).symlink_to(tmp_path / f"moved{iteration}")
    folder.keep_only([3])
    assert folder.iterations() == [3]
    folder.partial(1).symlink_to(tmp_path / "moved1")
    folder.partial(2).touch()
    assert len(folder.recover()) == 2
    left = sorted(path.name for path in folder.path.iterdir())
    assert left == ["iter_0000003", TRACKER, "moved1", "moved2", "moved3"]


def test_wait_for_the_checkpoint_of_another_job_is_announced_once(tmp_path, monkeypatch):
    folder, next_job, lines = *(CheckpointFolder(tmp_path, "--save") for _ in range(2)), list[str]()
    folder.lock()
    monkeypatch.setattr("megazpp.base.files.LOCK_SECONDS", 0.1)

    def announced(line: str) -> None:
        lines.append(line)
        threading.Timer(0.3, folder.unlock).start()

    next_job.lock(patience_seconds=60.0, say=announced)
    (line,) = lines
    assert line.startswith(f"--save {tmp_path} is in use by process {os.getpid()} on ")
    assert line.endswith(": waiting for at most 60 s")


def test_deleted_checkpoint_loses_its_name_before_its_files(folder, monkeypatch):
    for iteration in (1, 2, 3):
        save(folder, iteration)
    # deletion does nothing here, as if the process was killed after the renames and before it deleted files
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    folder.keep_only([3])
    assert folder.iterations() == [3]
    assert {path.name for path in folder.path.glob("*.partial")} == {"iter_0000001.partial", "iter_0000002.partial"}


@pytest.mark.parametrize(
    ("newest", "keep_last", "retain_interval", "kept"),
    [
        (60, 2, None, {50, 60}),
        (60, 1, None, {60}),
        (60, None, 20, {20, 40, 60}),
        (50, None, 20, {20, 40, 50}),
        (60, 2, 30, {30, 50, 60}),
        (60, 9, None, {10, 20, 30, 40, 50, 60}),
    ],
)
def test_kept_iterations_follow_the_flags(newest, keep_last, retain_interval, kept):
    iterations = range(10, newest + 1, 10)
    assert kept_iterations(iterations, keep_last=keep_last, retain_interval=retain_interval) == kept


def test_tokenizer_is_written_once_and_found_next_to_its_checkpoints(tmp_path):
    name = write_tokenizer(tmp_path, TOKENIZER)
    folder, when = tmp_path / name, (tmp_path / name).stat().st_mtime_ns
    assert content(folder).keys() == {*TOKENIZER, "checksums.txt"}
    assert write_tokenizer(tmp_path, TOKENIZER) == name
    assert folder.stat().st_mtime_ns == when
    assert write_tokenizer(tmp_path, {}) is None
    other = write_tokenizer(tmp_path, TOKENIZER | {"tokenizer.model": b"others"})
    assert {path.name for path in tmp_path.iterdir()} == {name, other}
    elsewhere = shutil.copytree(tmp_path, tmp_path / "elsewhere")
    found = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=f"{elsewhere}/{name}")
    assert read_tokenizer(elsewhere, name) == found
    alone = write_tokenizer(tmp_path, {"tokenizer.model": b"pieces", "chat_template.jinja": b"t"})
    model = f"{tmp_path}/{alone}/tokenizer.model"
    found = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    assert read_tokenizer(tmp_path, alone) == found
    nested = write_tokenizer(tmp_path, TOKENIZER | {"additional_chat_templates/rag.jinja": b"t"})
    assert (tmp_path / nested / "additional_chat_templates" / "rag.jinja").read_bytes() == b"t"


def test_damaged_tokenizer_is_named_and_moved_aside_by_the_next_save(tmp_path):
    name = write_tokenizer(tmp_path, TOKENIZER)
    for number, file in enumerate(("tokenizer.model", "checksums.txt"), 1):
        os.truncate(tmp_path / name / file, 3)
        kept = content(tmp_path / name)
        with pytest.raises(DamagedError, match=f"{name}/{file} is damaged"):
            read_tokenizer(tmp_path, name)
        assert write_tokenizer(tmp_path, TOKENIZER) == name
        read_tokenizer(tmp_path, name)
        assert content(tmp_path / f"{name}.replaced-{number}") == kept


def test_missing_or_invalid_tokenizer_folder_is_rejected(tmp_path):
    name = write_tokenizer(tmp_path, TOKENIZER)
    shutil.move(tmp_path / name, tmp_path / "outside")
    names = ("outside", "../x", str(tmp_path / "outside"), f"{name}/../outside")
    rows = [(other, "is not the name of a tokenizer folder") for other in names]
    rows.append((name, f"{name}, the tokenizer of these checkpoints, is missing: copy it too, or name a tokenizer"))
    assert not_refused(rows, lambda name: read_tokenizer(tmp_path, name), DamagedError) == []


def test_tokenizer_on_a_full_disk_leaves_no_files(tmp_path):
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch("os.fsync", full), pytest.raises(OSError, match="No space left"):
        write_tokenizer(tmp_path, TOKENIZER)
    assert not list(tmp_path.iterdir())


def test_missing_checkpoint_is_explained_by_the_folder(tmp_path):
    folder = CheckpointFolder(tmp_path, "--load")
    assert folder.without_checkpoint() == f"--load {tmp_path} has no checkpoint"
    none = CheckpointFolder(tmp_path / "none", "--load")
    assert none.without_checkpoint() == f"--load {tmp_path}/none has no checkpoint: it does not exist"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / TRACKER).write_text("1")
    assert folder.without_checkpoint().endswith(f"has no checkpoint, but {tmp_path}/checkpoints has: give that folder")
