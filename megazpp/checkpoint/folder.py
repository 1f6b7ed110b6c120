"""The folder of --save: Megatron's layout, in which a checkpoint is either complete or not there.

    iter_0000100/                        complete: it got this name when all of it was on disk
    iter_0000200.partial/                being written (or being deleted); a crash leaves it, the next run removes it
    latest_checkpointed_iteration.txt    the tracker: "100"; replaced by rename, after the checkpoint has its name
    ....txt.new                          the tracker to be, from before the checkpoint has its name: a crash in between
                                         leaves it, the next run finishes what it says
    tokenizer-0123456789abcdef/          files of the tokenizer, see tokenizer.py
    lock                                 held by the job that writes here, for as long as it lives

So a crash, a kill or a full disk at any moment leaves the tracker pointing at a complete checkpoint. Nothing that is
complete is overwritten: an older checkpoint of the same iteration is kept under a numbered name.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from megazpp.base.files import first_free, sync_directory, try_lock, write_synced
from megazpp.checkpoint.checksums import DamagedError

TRACKER, RECORD = "latest_checkpointed_iteration.txt", "run.json"
_COMPLETE = re.compile(r"iter_(\d{7,})")
_PARTIAL = re.compile(r"(iter_\d{7,}|tokenizer-[0-9a-f]{16})\.partial")


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
        """The iteration that the tracker names, or without one the tracker to be; None if there is neither.

        Raises:
            DamagedError: it names none, or one that has no checkpoint.
        """
        tracker = self.path / TRACKER
        text = read_tracker(tracker)
        if text is None:
            return self._pending()
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

    def _pending(self) -> int | None:
        """The iteration that the tracker to be names, if all of that checkpoint is there.

        A checkpoint has lost its partial name when it has the other one, so without a partial one only.
        """
        with contextlib.suppress(DamagedError):  # cut short
            text = read_tracker(self._new)
            if text is not None and self.of(int(text)).is_dir() and not self.partial(int(text)).exists():
                return int(text)
        return None

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
        lines, pending = [], self._pending()
        if pending is not None:
            self._advance()
            lines.append(f"{self.of(pending)} was complete when its job ended: it is the latest now")
        self._new.unlink(missing_ok=True)
        for name in sorted(entry.name for entry in self.path.iterdir() if _PARTIAL.fullmatch(entry.name)):
            shutil.rmtree(self.path / name)
            lines.append(f"removed {self.path / name}, which was not finished")
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
        if self.partial(iteration).exists():
            self._new.unlink(missing_ok=True)
            shutil.rmtree(self.partial(iteration), ignore_errors=True)

    def complete(self, iteration: int) -> Path | None:
        """Give a checkpoint, whose files are on disk, its name, and point the tracker at it.

        Returns where an older checkpoint of the same iteration has gone, if there was one.
        """
        sync_directory(self.partial(iteration))
        earlier = [other for other in self.iterations() if other < iteration]
        if earlier and self.of(iteration).exists():  # the tracker must not name what is missing for a moment
            self._prepare(earlier[-1])
            self._advance()
        self._prepare(iteration)
        aside = None
        if self.of(iteration).exists():
            aside = first_free(lambda number: self.path / f"{self.of(iteration).name}.replaced-{number}")
            self.of(iteration).rename(aside)
        self.partial(iteration).rename(self.of(iteration))
        sync_directory(self.path)
        self._advance()
        return aside

    def go_back(self, iteration: int) -> None:
        """Point the tracker at an earlier checkpoint, from which the run goes on; the later ones stay."""
        self._prepare(iteration)
        self._advance()

    def keep_only(self, kept: Iterable[int]) -> None:
        """Delete all other complete checkpoints; each loses its name first, so that none is ever half there."""
        for iteration in set(self.iterations()) - set(kept):
            with contextlib.suppress(FileNotFoundError):
                self.of(iteration).rename(self.partial(iteration))
            shutil.rmtree(self.partial(iteration), ignore_errors=True)

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
