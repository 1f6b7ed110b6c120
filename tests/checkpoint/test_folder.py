"""Names, renames, the tracker and the lock."""

import functools
import itertools
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import not_refused

import megazpp.checkpoint.folder as folder_module
from megazpp.base.files import DamagedError
from megazpp.checkpoint.folder import TRACKER, CheckpointFolder, kept_iterations


def save(folder: CheckpointFolder, iteration: int, text: str = "") -> Path | None:
    folder.begin(iteration)
    (folder.partial(iteration) / "file").write_text(text)
    return folder.complete(iteration)


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path, "--save")


def test_a_checkpoint_has_megatrons_name_and_the_tracker_says_which_is_the_latest(folder):
    assert folder.latest() is None
    assert folder.iterations() == []
    for iteration in (100, 20, 12345678):
        assert save(folder, iteration) is None
    assert (folder.path / "iter_0000100" / "file").exists()
    assert (folder.path / TRACKER).read_text() == "12345678\n"
    assert folder.latest() == 12345678
    assert folder.iterations() == [20, 100, 12345678]


def test_what_is_being_written_does_not_count_and_is_removed_by_the_next_run(folder):
    save(folder, 1)
    folder.begin(2)
    (folder.path / "iter_0000003").write_text("a file")
    assert folder.iterations() == [1]
    assert folder.recover() == [f"removed {folder.path}/iter_0000002.partial, which was not finished"]
    assert folder.latest() == 1
    assert folder.recover() == []


def test_nothing_complete_is_overwritten(folder):
    assert save(folder, 5, "first") is None
    assert save(folder, 5, "second") == folder.path / "iter_0000005.replaced-1"
    assert save(folder, 5, "third") == folder.path / "iter_0000005.replaced-2"
    texts = [(folder.path / f"iter_0000005{end}" / "file").read_text() for end in ("", ".replaced-1", ".replaced-2")]
    assert texts == ["third", "first", "second"]
    assert folder.iterations() == [5]


class Killed(BaseException):
    """Ends a save as `kill -9` does: nothing is cleaned up."""


def killed_before(moment: int, work: Callable[[], Any]) -> bool:
    """Do `work`, but end before the `moment`th thing that is done to the disk; whether it came to that."""
    left = itertools.count(moment, -1)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if next(left) == 0:
                raise Killed
            return function(*args, **kwargs)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (Path, "rename"),
            (Path, "unlink"),
            (shutil, "rmtree"),
            (folder_module, "sync_directory"),
            (folder_module, "write_synced"),
        ):
            patch.setattr(owner, name, before(getattr(owner, name)))
        try:
            work()
        except Killed:
            return True
    return False


def killed_at_each_moment(
    home: Path, saved: list[tuple[int, str]], again: tuple[int, str]
) -> Iterator[CheckpointFolder]:
    """Folders in which a save has ended before the first thing it does to the disk, the second, and so on."""
    for moment in itertools.count():
        folder = CheckpointFolder(home / str(moment), "--save")
        folder.path.mkdir()
        for iteration, text in saved:
            save(folder, iteration, text)
        killed = killed_before(moment, functools.partial(save, folder, *again))
        yield folder
        if not killed:
            return


def texts(folder: CheckpointFolder) -> set[str]:
    return {(path / "file").read_text() for path in folder.path.glob("iter_*")}


def content(folder: CheckpointFolder) -> dict[str, str]:
    return {str(path.relative_to(folder.path)): path.read_text() for path in folder.path.rglob("*") if path.is_file()}


def test_a_save_killed_at_any_moment_is_finished_or_gone_and_done_again_leaves_nothing_behind(tmp_path):
    latest = []
    for folder in killed_at_each_moment(tmp_path, [(3, "third")], (5, "fifth")):
        folder.recover()
        latest.append(folder.latest())
        assert folder.iterations() == ([3, 5] if latest[-1] == 5 else [3])
        assert folder.recover() == []
        if latest[-1] == 3:
            save(folder, 5, "fifth")
        assert {path.name for path in folder.path.iterdir()} == {"iter_0000003", "iter_0000005", TRACKER}
        assert (folder.latest(), texts(folder)) == (5, {"third", "fifth"})
    # syncs of the files and of the tracker to be come before the name; then nothing is done again
    assert latest == [3, 3, 3, 3, 3, 5, 5, 5, 5]


def test_a_save_over_a_complete_one_killed_at_any_moment_keeps_both_or_the_older_one(tmp_path):
    """A recovery that is killed at any moment, too, comes to what it would have come to, done again."""
    saved, moment = [(3, "third"), (5, "fifth"), (7, "seventh")], 0
    for moment, folder in enumerate(killed_at_each_moment(tmp_path, saved, (5, "again"))):
        assert folder.latest() in (3, 5, 7)  # before anything is mended
        before = shutil.copytree(folder.path, f"{folder.path} before")
        folder.recover()
        assert folder.latest() in (3, 5, 7)
        assert texts(folder) >= {"third", "fifth", "seventh"}
        if folder.latest() == 5:
            assert (folder.of(5) / "file").read_text() == "again"
        assert not [path for path in folder.path.iterdir() if path.suffix in (".partial", ".new")]
        for later in itertools.count():
            again = CheckpointFolder(f"{folder.path} {later}", "--save")
            shutil.copytree(before, again.path)
            interrupted = killed_before(later, again.recover)
            again.recover()
            assert content(again) == content(folder), (moment, later)
            if not interrupted:
                break
    assert moment > 8


def test_half_a_tracker_to_be_is_no_tracker_and_without_one_the_newest_counts(folder):
    save(folder, 3)
    save(folder, 15)
    for text in ("", "x", "1"):
        (folder.path / f"{TRACKER}.new").write_text(text)
        assert folder.recover() == []
        assert folder.latest() == 15
    (folder.path / TRACKER).unlink()  # as in a first save that is killed before it
    assert folder.latest() == 15


def test_a_tracker_that_names_no_iteration_or_one_that_is_missing_is_an_error(folder):
    save(folder, 7)
    for content in ("", "x", "-3", "1e3", "7\n8", "release"):
        (folder.path / TRACKER).write_text(content)
        with pytest.raises(DamagedError, match=f"{TRACKER} is damaged: it says"):
            folder.latest()
    (folder.path / TRACKER).write_text("8")
    with pytest.raises(DamagedError, match=r"names iteration 8, but .*iter_0000008 is missing$"):
        folder.latest()
    (folder.path / "iter_0000008.replaced-1").mkdir()
    with pytest.raises(DamagedError, match=r"is missing; .*/iter_0000008.replaced-1 may be it$"):
        folder.latest()


def test_a_folder_that_cannot_be_written_to_names_the_flag_and_why(tmp_path):
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path / "gone")
    file.touch()
    rows = [
        (link, f"--save {link} cannot be written to: it is a link to {tmp_path / 'gone'}, which is not there"),
        (file / "below", f"--save {file}/below cannot be written to: Not a directory"),
    ]
    assert not_refused(rows, lambda path: CheckpointFolder(path, "--save").lock()) == []
    (tmp_path / "gone").mkdir()
    CheckpointFolder(link, "--save").lock()


def test_a_folder_that_is_removed_meanwhile_is_made_again_and_still_this_job_s(tmp_path):
    folder = CheckpointFolder(tmp_path / "runs/save", "--save")
    folder.lock()
    save(folder, 1)
    shutil.rmtree(tmp_path / "runs")
    save(folder, 2)
    assert (folder.iterations(), folder.latest()) == ([2], 2)
    with pytest.raises(ValueError, match="is in use by process"):
        CheckpointFolder(folder.path, "--save").lock(patience_seconds=0.0)
    folder.unlock()


def test_a_job_that_is_killed_gives_its_folder_back(folder):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    job = context.Process(target=_hold, args=(folder.path, ready), daemon=True)
    job.start()
    assert ready.wait(20)
    with pytest.raises(ValueError, match=f"in use by process {job.pid} "):
        folder.lock(patience_seconds=0)
    job.kill()
    folder.lock(patience_seconds=20)
    folder.unlock()
    job.join()


def _hold(path: Path, ready: multiprocessing.Event) -> None:
    folder = CheckpointFolder(path, "--save")
    folder.lock()
    ready.set()
    time.sleep(1000)


def test_a_deleted_checkpoint_is_gone_under_its_name_before_its_files_go(folder, monkeypatch):
    for iteration in (1, 2, 3):
        save(folder, iteration)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed at that moment
    folder.keep_only([3])
    assert folder.iterations() == [3]
    assert sorted(path.name for path in folder.path.glob("*.partial")) == [
        "iter_0000001.partial",
        "iter_0000002.partial",
    ]


def test_which_checkpoints_stay():
    for newest, keep_last, retain, kept in (
        (60, None, None, {10, 20, 30, 40, 50, 60}),
        (60, 2, None, {50, 60}),
        (60, 1, None, {60}),
        (60, None, 20, {20, 40, 60}),
        (50, None, 20, {20, 40, 50, 60}),
        (60, 2, 30, {30, 50, 60}),
        (30, 2, None, {20, 30, 40, 50, 60}),  # a run that went back
        (60, 9, None, {10, 20, 30, 40, 50, 60}),
    ):
        found = kept_iterations(range(10, 61, 10), newest=newest, keep_last=keep_last, retain_interval=retain)
        assert found == kept, (newest, keep_last, retain)
