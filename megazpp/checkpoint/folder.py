"""The folder of --save: Megatron's layout, in which a checkpoint is either complete or not there.

    iter_0000100/                        complete: it got this name when all of it was on disk
    iter_0000200.partial/                being written (or being deleted); a crash leaves it, the next run removes it
    latest_checkpointed_iteration.txt    the tracker: "100"; replaced by rename, after the checkpoint has its name
    ....txt.new                          the tracker to be, from before the checkpoint has its name: a crash in between
                                         leaves it, the next run finishes what it says
    tokenizer-0123456789abcdef/          files of the tokenizer and their checksums; the name is a hash of the files
    lock                                 held by the job that writes here, for as long as it lives

So a crash, a kill or a full disk at any moment leaves the tracker pointing at a complete checkpoint; without a tracker
the newest counts. Nothing that is complete is overwritten: an older checkpoint of the same iteration is kept under a
numbered name. run.json of each checkpoint names the folder of its tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from megazpp.base.files import (
    DamagedError,
    first_free,
    remove,
    renamed_when_done,
    sync_directory,
    try_lock,
    write_synced,
)
from megazpp.checkpoint.checksums import verify_files, write_checksums, write_durably
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.data.tokenizer_folder import find_tokenizer

TRACKER, RECORD = "latest_checkpointed_iteration.txt", "run.json"
_COMPLETE = re.compile(r"iter_(\d{7,})")
_TOKENIZER = re.compile("tokenizer-[0-9a-f]{16}")
_PARTIAL = re.compile(rf"(iter_\d{{7,}}|{_TOKENIZER.pattern})\.partial")


class CheckpointFolder:
    """Names and renames in `path`, which `flag` names; nothing is made yet. One process at a time writes (`lock`)."""

    def __init__(self, path: str | Path, flag: str) -> None:
        self.path, self.flag = Path(path).expanduser(), flag
        self._lock: IO[str] | None = None

    @property
    def name(self) -> str:
        """The folder in messages: flag and path."""
        return f"{self.flag} {self.path}"

    def of(self, iteration: int) -> Path:
        """The folder of an iteration's checkpoint."""
        return self.path / f"iter_{iteration:07d}"

    def partial(self, iteration: int) -> Path:
        """The folder that it is written in."""
        return self.path / f"iter_{iteration:07d}.partial"

    def iterations(self) -> list[int]:
        """Iterations with a complete checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        found = (iteration_of(entry) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(iteration for iteration in found if iteration is not None)

    def latest(self) -> int | None:
        """The iteration that the tracker names, or without one the newest complete one; None if there is neither.

        Raises:
            DamagedError: it names none, or one that has no checkpoint.
        """
        tracker = self.path / TRACKER
        text = read_tracker(tracker)
        if text is None:
            return max(self.iterations(), default=None)
        named = self.of(int(text))
        if not named.is_dir():
            aside = "".join(f"; {path} may be it" for path in self.path.glob(f"{named.name}.replaced-*"))
            raise DamagedError(f"{tracker} names iteration {int(text)}, but {named} is missing{aside}")
        return int(text)

    def check_not_inside(self) -> None:
        """Raises ValueError if this is the folder of one checkpoint, not the folder of checkpoints around it."""
        path = self.path.resolve()
        match = _COMPLETE.fullmatch(path.name)
        if path.is_dir() and not self.iterations() and (match or (path / RECORD).is_file()):
            around = self.path.parent if self.path.name == path.name else path.parent
            raise ValueError(
                f"{self.name} is one checkpoint, not the folder of checkpoints: give {self.flag} {around}"
                + (f" (and --ckpt-step {int(match[1])})" if match and self.flag != "--save" else "")
            )

    # ---- what only the holder of the lock does ------------------------------------------------------------------

    def lock(self, *, patience_seconds: float = 5.0) -> None:
        """Make the folder, and take it for this process until that ends (the kernel frees the lock).

        Args:
            patience_seconds: how long a job that is just ending is waited for.
        Raises:
            ValueError: another job has it, or it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("a+")
        except OSError as error:
            nowhere = self.path.is_symlink() and not self.path.exists()
            reason = f"it is a link to {self.path.readlink()}, which is not there" if nowhere else error.strerror
            raise ValueError(f"{self.name} cannot be written to: {reason}") from error
        deadline = time.monotonic() + patience_seconds
        while not try_lock(file):
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.seek(0)
            holder = file.read().strip() or "another job"
            file.close()
            raise ValueError(f"{self.name} is in use by {holder}: give each job its own")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        self._lock = file

    def unlock(self) -> None:
        """Release the lock, so that another job can take it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def recover(self) -> list[str]:
        """Finish the save that a crash has cut short if all of it is there, delete it otherwise; a line for each.

        The tracker to be goes first: what is left of it must not count when the partial checkpoint has gone.
        """
        lines = []
        with contextlib.suppress(DamagedError):  # the tracker to be was cut short
            text = read_tracker(self._new)
            if text is not None and self.of(int(text)).is_dir() and not self.partial(int(text)).exists():
                self._advance()
                lines.append(f"{self.of(int(text))} was complete when its job ended: it is the latest now")
        self._new.unlink(missing_ok=True)
        for path in sorted(entry for entry in self.path.iterdir() if _PARTIAL.fullmatch(entry.name)):
            shutil.rmtree(path)
            lines.append(f"removed {path}, which was not finished")
        return lines

    def begin(self, iteration: int) -> None:
        """Make the folder that a checkpoint is written in, and what is around it if somebody has removed that."""
        if self._lock is not None and not (self.path / "lock").exists():
            self.unlock()
            self.lock()
        shutil.rmtree(self.partial(iteration), ignore_errors=True)  # an attempt of this run that failed
        self.partial(iteration).mkdir()

    def abandon(self, iteration: int) -> None:
        """Give back the space of a checkpoint that could not be written."""
        self._new.unlink(missing_ok=True)
        shutil.rmtree(self.partial(iteration), ignore_errors=True)

    def complete(self, iteration: int) -> Path | None:
        """Give a checkpoint, whose files are on disk, its name, and point the tracker at it.

        Returns where an older checkpoint of the same iteration has gone, if there was one.
        """
        sync_directory(self.partial(iteration))
        earlier, aside = [other for other in self.iterations() if other < iteration], None
        if earlier and self.of(iteration).exists():  # the tracker must not name what is missing for a moment
            self.track(earlier[-1])
        self._prepare(iteration)
        if self.of(iteration).exists():
            aside = first_free(lambda number: self.path / f"{self.of(iteration).name}.replaced-{number}")
            self.of(iteration).rename(aside)
        self.partial(iteration).rename(self.of(iteration))
        sync_directory(self.path)
        self._advance()
        return aside

    def track(self, iteration: int) -> None:
        """Point the tracker at a checkpoint, from which a run goes on; later ones stay."""
        self._prepare(iteration)
        self._advance()

    @property
    def _new(self) -> Path:
        return self.path / f"{TRACKER}.new"

    def _prepare(self, iteration: int) -> None:
        """Write the tracker to be."""
        write_synced(self._new, f"{iteration}\n".encode())
        sync_directory(self.path)

    def _advance(self) -> None:
        """Put it in the tracker's place."""
        self._new.rename(self.path / TRACKER)
        sync_directory(self.path)

    def keep_only(self, kept: Iterable[int]) -> None:
        """Delete all other complete checkpoints; each loses its name first, so that none is ever half there."""
        for iteration in set(self.iterations()) - set(kept):
            with contextlib.suppress(FileNotFoundError):
                self.of(iteration).rename(self.partial(iteration))
            shutil.rmtree(self.partial(iteration), ignore_errors=True)


def iteration_of(checkpoint: Path) -> int | None:
    """The iteration that a complete checkpoint's name says; None if it is no such name."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def read_tracker(tracker: Path, *, words: tuple[str, ...] = ()) -> str | None:
    """The digits that a tracker holds, or one of `words`; None if there is none; raises DamagedError at all else."""
    try:
        text = tracker.read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{tracker} cannot be read: {error.strerror}") from error
    if text not in words and not re.fullmatch("[0-9]+", text):
        raise DamagedError(f"{tracker} is damaged: it says {text[:40]!r}, not an iteration")
    return text


def kept_iterations(
    iterations: Iterable[int], *, newest: int, keep_last: int | None, retain_interval: int | None
) -> set[int]:
    """The iterations whose checkpoints stay when that of `newest` has just been written.

    Later ones, which a run that went back with --ckpt-step finds, stay too.
    """
    found = sorted({*iterations, newest})
    if keep_last is None and retain_interval is None:
        return set(found)
    past = [iteration for iteration in found if iteration <= newest]
    kept = set(past[-(keep_last or 1) :]) | {iteration for iteration in found if iteration > newest}
    return kept | {iteration for iteration in past if retain_interval and iteration % retain_interval == 0}


def write_tokenizer(save: Path, files: Mapping[str, bytes]) -> str | None:
    """Have a tokenizer's files on disk below `save`, whole or not at all; the name of their folder, None without files.

    Nothing is written where they are already. What has that name and is damaged keeps its files under another one.
    """
    if not files:
        return None
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    folder = save / f"tokenizer-{digest.hexdigest()[:16]}"
    with contextlib.suppress(DamagedError):
        verify_files(folder)
        return folder.name
    partial = folder.with_name(f"{folder.name}.partial")
    remove(partial)  # of a save that was killed here
    with renamed_when_done(partial, folder):
        partial.mkdir()
        for name in files:
            (partial / name).parent.mkdir(exist_ok=True)
        write_checksums(partial, {name: write_durably(partial / name, content) for name, content in files.items()})
        if folder.exists():
            folder.rename(first_free(lambda number: folder.with_name(f"{folder.name}.replaced-{number}")))
    return folder.name


def read_tokenizer(save: Path, name: str) -> TokenizerConfig:
    """The flags of the tokenizer in `save`/`name`; raises DamagedError if a file is missing or was changed."""
    folder = save / name
    if not _TOKENIZER.fullmatch(name):
        raise DamagedError(f"{save}: {name!r} is no folder of a tokenizer")
    if not folder.is_dir():
        raise DamagedError(
            f"{folder} is missing, the tokenizer of these checkpoints: copy it too, or name one with --tokenizer-model"
        )
    verify_files(folder)
    found = find_tokenizer(folder.absolute())
    if found == TokenizerConfig():
        raise DamagedError(f"{folder} holds no tokenizer")
    return found
