"""The folder of checkpoints that --save names, in the layout of Megatron-LM, with atomic saves.

    iter_0000100/                        complete checkpoint; it gets this name when all its files are on disk
    iter_0000200.partial/                checkpoint that is being written or deleted; after a crash, the next run
                                         deletes it
    latest_checkpointed_iteration.txt    tracker file with the iteration to resume from, for example "100"; a new
                                         tracker replaces it by a rename, after the checkpoint has its final name
    ....txt.new                          next tracker, written before the checkpoint gets its final name; after a crash
                                         between the two renames, the next run renames this tracker
    tokenizer-0123456789abcdef/          tokenizer files and their checksums; the name is a hash of the files
    iter_0000100.replaced-1/             checkpoint of an abandoned branch: a run went back to an earlier iteration
                                         with --ckpt-step, and then saved this iteration or an earlier one
    lock                                 lock file of the job that writes to the folder, locked until that job ends; the
                                         jobs of an elastic run lock it only during a save
    folder_id                            random identifier of the folder, if jobs of an elastic run save to it

After a crash, a kill or a full disk, the tracker therefore still names a complete checkpoint. Without a tracker, the
complete checkpoint with the highest iteration is the latest. Complete checkpoints are never overwritten. All
checkpoints with names like iter_0000100 belong to the same branch of the run. The file run.json in each checkpoint
names the folder of its tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

from megazpp.base.files import (
    LOCK_SECONDS,
    DamagedError,
    cause,
    lock_for_this_job,
    read_small_file,
    remove,
    renamed_when_done,
    sync_directory,
    write_synced,
    write_whole,
)
from megazpp.checkpoint.checksums import verify_files, write_checksums, write_durably
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.data.tokenizer_folder import find_tokenizer

TRACKER, RECORD = "latest_checkpointed_iteration.txt", "run.json"
_COMPLETE = re.compile(r"iter_(\d{7,})")
_TOKENIZER = re.compile("tokenizer-[0-9a-f]{16}")
_ASIDE = re.compile(rf"{_COMPLETE.pattern}\.replaced-(\d+)")
_PARTIAL = re.compile(rf"({_ASIDE.pattern}|{_COMPLETE.pattern}|{_TOKENIZER.pattern})\.partial")


class CheckpointFolder:
    """A folder of checkpoints, with methods that find, complete and delete checkpoints.

    The constructor creates nothing on disk. Methods that write require the lock of the folder (see `lock`), which only
    one process can hold at a time.

    Args:
        path: path of the folder; `~` is expanded.
        flag: flag that names the folder, such as "--save", for messages.
    Attributes:
        num_separate: number of separate folders that hosts without a shared file system have at this path; otherwise 1.
        shared_id: identifier of the folder if other jobs may save to it too, equal in all these jobs; "" if only this
            job saves to it. Set by `take_folder`.
    """

    def __init__(self, path: str | Path, flag: str) -> None:
        self.path, self.flag = Path(path).expanduser(), flag
        self._lock: IO[str] | None = None
        self.num_separate, self.shared_id = 1, ""

    @property
    def name(self) -> str:
        """The flag and the path of the folder for messages, such as "--save runs/a"."""
        return f"{self.flag} {self.path}"

    def without_checkpoint(self) -> str:
        """Return the error message for a folder without checkpoints.

        If the folder does not exist, or if its subfolder `checkpoints` has checkpoints, the message says so.
        """
        text, below = f"{self.name} has no checkpoint", self.path / "checkpoints"
        if not self.path.exists():
            return f"{text}: it does not exist"
        return f"{text}, but {below} has: give that folder" if (below / TRACKER).exists() else text

    def of(self, iteration: int) -> Path:
        """Return the path that the complete checkpoint of an iteration has or would have."""
        return self.path / f"iter_{iteration:07d}"

    def partial(self, iteration: int) -> Path:
        """Return the path of the folder into which the checkpoint of an iteration is written until it is complete."""
        return self.path / f"iter_{iteration:07d}.partial"

    def iterations(self) -> list[int]:
        """Return the iterations with a complete checkpoint, in ascending order; [] if the folder does not exist."""
        if not self.path.is_dir():
            return []
        found = (iteration_of(entry) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(iteration for iteration in found if iteration is not None)

    def latest(self) -> int | None:
        """Return the iteration of the latest checkpoint, from which a run resumes.

        Returns:
            The iteration in the tracker file. Without a tracker file, the highest iteration with a complete checkpoint.
            None if the folder has neither a tracker file nor a checkpoint.
        Raises:
            DamagedError: the tracker file has no iteration, or the checkpoint of its iteration is missing.
        """
        iteration = self.tracked()
        if iteration is None:
            return max(self.iterations(), default=None)
        named = self.of(iteration)
        if not named.is_dir():
            aside = "".join(f"; {path} may be it" for path in self.path.glob(f"{named.name}.replaced-*"))
            raise DamagedError(
                f"{self.path / TRACKER} names iteration {iteration}, but {named} is missing{aside}; restore this "
                "folder, or write another iteration into the tracker file"
            )
        return iteration

    def tracked(self) -> int | None:
        """Return the iteration in the tracker file, whether it has a checkpoint or not; None without a tracker file.

        Raises:
            DamagedError: the tracker file cannot be read, or has no iteration.
        """
        text = read_tracker(self.path / TRACKER)
        return None if text is None else int(text)

    def check_not_inside(self) -> None:
        """Raise ValueError if the path is a file, or a single checkpoint (`iter_...`) instead of its parent folder."""
        path = self.path.resolve()
        if path.is_file():
            raise ValueError(f"{self.name} is a file, not the folder of checkpoints: give that folder")
        match = _COMPLETE.fullmatch(path.name)
        if path.is_dir() and not self.iterations() and (match or (path / RECORD).is_file()):
            around = self.path.parent if self.path.name == path.name else path.parent
            raise ValueError(
                f"{self.name} is one checkpoint, not the folder of checkpoints: give {self.flag} {around}"
                + (f" (and --ckpt-step {int(match[1])})" if match and self.flag != "--save" else "")
            )

    # ---- methods that change the folder of checkpoints, and therefore need its lock ---------------------------------

    @property
    def is_locked(self) -> bool:
        """True if this process has locked the folder, so that it may complete and delete checkpoints there."""
        return self._lock is not None

    def lock(self, *, patience_seconds: float = LOCK_SECONDS, say: Callable[[str], None] | None = None) -> None:
        """Create the folder of checkpoints unless it exists, and lock it until `unlock` or the end of this process.

        Args:
            patience_seconds: seconds to wait for another job that holds the lock and may be about to end.
            say: function that prints a line about a long wait; None prints nothing.
        Raises:
            ValueError: another job holds the lock, or the folder is not writable.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_for_this_job(self.path / "lock", self.name, patience_seconds=patience_seconds, say=say)
            # A checkpoint is a folder. Creating one now shows a missing permission before the training, not at a save.
            Path(tempfile.mkdtemp(prefix=".", dir=self.path)).rmdir()
        except OSError as error:
            self.unlock()
            nowhere = self.path.is_symlink() and not self.path.exists()
            reason = f"it is a link to {self.path.readlink()}, which does not exist" if nowhere else cause(error)
            raise ValueError(f"{self.name} cannot be written to: {reason}") from error

    def unlock(self) -> None:
        """Release the lock, so that another job can take it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def recover(self) -> list[str]:
        """Complete or delete the saves that a crash interrupted, and return a log line for each of them.

        A save is completed if the crash came between the renames of the checkpoint and of the tracker file. Otherwise
        the next tracker of the save is deleted first and its partial checkpoint second. In the reverse order, a crash
        between the two deletions would leave only the next tracker. If the folder also has an older checkpoint of the
        same iteration, a later run would take this checkpoint for the result of the interrupted save.
        """
        # ---- complete a save whose checkpoint already has its final name
        lines = []
        with contextlib.suppress(DamagedError):  # the crash may have truncated the next tracker, which is then ignored
            text = read_tracker(self._new)
            if text is not None and self.of(int(text)).is_dir() and not self.partial(int(text)).exists():
                self._advance()
                lines.append(
                    f"{self.of(int(text))} is complete and was not recorded as the latest checkpoint; it is now"
                )
        self._new.unlink(missing_ok=True)
        for path in sorted(entry for entry in self.path.iterdir() if _PARTIAL.fullmatch(entry.name)):
            remove(path)
            lines.append(f"removed {path}, which was not finished")
        return lines

    def identify(self) -> str:
        """Return the identifier of this folder, a random text that is written into the folder by the first call."""
        path = self.path / "folder_id"
        if not path.exists():
            write_whole(path, uuid.uuid4().hex.encode())
        return path.read_text()

    def begin(self, iteration: int) -> None:
        """Create the empty folder into which the checkpoint of an iteration is written until it is complete.

        If a user has deleted the folder of checkpoints during the run, it is created and locked again.
        """
        if self._lock is not None and not (self.path / "lock").exists():
            self.unlock()
            self.lock()
        remove(self.partial(iteration))  # an earlier save that failed may have left it
        self.partial(iteration).mkdir()

    def abandon(self, iteration: int) -> None:
        """Delete the partial checkpoint of an iteration after a failed save, to free its disk space.

        An error of the deletion is ignored, so that the run reports the error of the save. A deletion fails, for
        instance, if a file has replaced the folder of checkpoints.
        """
        for path in (self._new, self.partial(iteration)):
            with contextlib.suppress(OSError):
                remove(path)

    def complete(self, iteration: int) -> list[Path]:
        """Rename the partial checkpoint of an iteration to its final name, and set the tracker file to it.

        All files of the checkpoint must be on disk. If complete checkpoints of this iteration or of later ones exist,
        they belong to a branch that the run has abandoned, and they get the ending `.replaced-1`, `.replaced-2`, ...

        Returns:
            New paths of the checkpoints of the abandoned branch.
        """
        sync_directory(self.partial(iteration))
        there = self.iterations()
        earlier, left = ([other for other in there if (other < iteration) == before] for before in (True, False))
        if earlier and left:  # a crash during the renames must not leave a tracker that names a renamed checkpoint
            self.track(earlier[-1])
        self._prepare(iteration)
        aside = [_set_aside(self.of(other)) for other in left]
        self.partial(iteration).rename(self.of(iteration))
        sync_directory(self.path)
        self._advance()
        return aside

    def track(self, iteration: int) -> None:
        """Set the tracker file to an earlier iteration, from which the next run resumes. No checkpoint is deleted."""
        self._prepare(iteration)
        self._advance()

    @property
    def _new(self) -> Path:
        """The path of the next tracker, a file that later replaces the tracker file by a rename."""
        return self.path / f"{TRACKER}.new"

    def _prepare(self, iteration: int) -> None:
        """Write the next tracker file with `iteration`, and sync it to disk. `_advance` then makes it the tracker."""
        write_synced(self._new, f"{iteration}\n".encode())
        sync_directory(self.path)

    def _advance(self) -> None:
        """Replace the tracker file by the next tracker, in one rename."""
        self._new.rename(self.path / TRACKER)
        sync_directory(self.path)

    def keep_only(self, kept: Iterable[int]) -> None:
        """Delete the complete checkpoints of all iterations that are not in `kept`.

        A checkpoint of an abandoned branch is deleted in two cases: `kept` has a later iteration, or a branch that was
        abandoned later has a checkpoint of the same iteration. Each checkpoint is renamed to its partial name before it
        is deleted, so that a crash cannot leave an incomplete checkpoint under a complete name. If a user has moved a
        checkpoint to another disk and left a link here, only the link is deleted.
        """
        kept, aside = set(kept), dict[int, dict[int, Path]]()
        for entry in self.path.iterdir():
            if match := _ASIDE.fullmatch(entry.name):
                aside.setdefault(int(match[1]), {})[int(match[2])] = entry
        passed = [
            path
            for iteration, branches in aside.items()
            for number, path in branches.items()
            if iteration < max(kept) or number < max(branches)
        ]
        for path in [*map(self.of, set(self.iterations()) - kept), *passed]:
            partial = path.with_name(f"{path.name}.partial")
            with contextlib.suppress(FileNotFoundError):
                path.rename(partial)
            with contextlib.suppress(OSError):
                remove(partial)


def _set_aside(folder: Path) -> Path:
    """Rename a folder NAME, so that a new one can have its name, and return the new path.

    The new name is NAME.replaced-1. If folders with such names exist, its number is one more than their highest number.
    """
    pattern = rf"{re.escape(folder.name)}\.replaced-(\d+)"
    taken = [int(match[1]) for path in folder.parent.iterdir() if (match := re.fullmatch(pattern, path.name))]
    return folder.rename(folder.with_name(f"{folder.name}.replaced-{1 + max(taken, default=0)}"))


def iteration_of(checkpoint: Path) -> int | None:
    """Return the iteration of a checkpoint from its path, such as `.../iter_0000100`; None for other names."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def read_tracker(tracker: Path, *, words: tuple[str, ...] = ()) -> str | None:
    """Return the text of a tracker file, the file that names the latest checkpoint of a folder.

    Args:
        tracker: path of the tracker file.
        words: accepted texts in addition to an iteration in decimal digits, such as Megatron-LM's "release".
    Returns:
        The text without surrounding white space; None if the file does not exist.
    Raises:
        DamagedError: the file cannot be read, or its text is neither an iteration nor one of `words`.
    """
    try:
        text = read_small_file(tracker).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"the tracker file {tracker} cannot be read: {error.strerror}") from error
    if text not in words and not re.fullmatch("[0-9]+", text):
        raise DamagedError(
            f"{tracker} is damaged: it says {text[:40]!r}, not an iteration; write a checkpoint's iteration into it"
        )
    return text


def kept_iterations(iterations: Iterable[int], *, keep_last: int | None, retain_interval: int | None) -> set[int]:
    """Return the iterations whose checkpoints are kept after a save with --keep-last or --save-retain-interval.

    Args:
        iterations: iterations with a complete checkpoint.
        keep_last: number of newest checkpoints to keep; None, with --save-retain-interval alone, keeps the newest one.
        retain_interval: checkpoints whose iteration is a multiple of this number are kept too; None keeps no further
            checkpoints.
    """
    found = sorted(iterations)
    retained = {iteration for iteration in found if retain_interval and iteration % retain_interval == 0}
    return retained | set(found[-(keep_last or 1) :])


def write_tokenizer(save: Path, files: Mapping[str, bytes]) -> str | None:
    """Write a tokenizer's files into a subfolder of a folder of checkpoints, atomically and synced to disk.

    The name of the subfolder contains a hash of the files. If it exists and is undamaged, nothing is written. If it is
    damaged, it is renamed to a name with the ending `.replaced-1`, `.replaced-2`, ... and written again.

    Args:
        save: folder of checkpoints.
        files: contents of the tokenizer's files by file name.
    Returns:
        Name of the subfolder; None if the tokenizer has no files.
    """
    if not files:
        return None
    # ---- name the subfolder after its content, and check whether it exists already
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    folder = save / f"tokenizer-{digest.hexdigest()[:16]}"
    with contextlib.suppress(DamagedError):
        verify_files(folder)
        return folder.name
    # ---- write the files and their checksums under the partial name, then rename the subfolder
    partial = folder.with_name(f"{folder.name}.partial")
    remove(partial)  # a save that was killed may have left it
    with renamed_when_done(partial, folder):
        partial.mkdir()
        for name in files:
            (partial / name).parent.mkdir(exist_ok=True)
        write_checksums(partial, {name: write_durably(partial / name, content) for name, content in files.items()})
        if folder.exists():
            _set_aside(folder)
    return folder.name


def read_tokenizer(save: Path, name: str) -> TokenizerConfig:
    """Verify the tokenizer that `write_tokenizer` has stored with checkpoints, and return flags that name its files.

    Args:
        save: folder of checkpoints.
        name: name of the tokenizer's subfolder.
    Raises:
        DamagedError: the subfolder or a file is missing, or a file has changed.
    """
    folder = save / name
    if not _TOKENIZER.fullmatch(name):
        raise DamagedError(
            f"{save}: {name!r} in {RECORD} is not the name of a tokenizer folder; name a tokenizer with "
            "--tokenizer-model"
        )
    if not folder.is_dir():
        raise DamagedError(
            f"{folder}, the tokenizer of these checkpoints, is missing: copy it too, or name a tokenizer with "
            "--tokenizer-model"
        )
    verify_files(folder)
    found = find_tokenizer(folder.absolute())
    if found == TokenizerConfig():
        raise DamagedError(
            f"{folder} contains no files of a tokenizer: name the tokenizer of these checkpoints with --tokenizer-model"
        )
    return found
