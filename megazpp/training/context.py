"""The run context: process groups, device, console and run folder, made once and passed to nearly every part of a run.

The console prints log lines. On a terminal it prints shorter lines above a progress bar with the remaining time. The
full lines are always in the run folder's log.txt, and also on the output if it is not a terminal.

The run folder holds the records of a run, including its restarts. Rank 0 writes them, and tools/report.py reads them:

    args.json        every flag's value                        summary.json   results of the run
    args.txt         the same as a flag file                   metrics.jsonl  one object per log line
    topology.json    the cluster and the mesh axes on it       validation.jsonl  one object per validation
    timeline.json    spans of all ranks in one step (--timeline-step)
    cluster.yaml     the cluster with its measured links (--measure-links)
    hang-<time>.txt, not-finite-<iteration>.json: reason that ended a run
    log.txt          all printed lines in full        checkpoints/   the model (--save-to-run-dir)
    wandb_run_id     id of the wandb run that a restart continues
    records.lock     lock file of the job that writes to the folder, held until that job ends

Using a folder again loses nothing. The .jsonl files grow, and a file whose content would change is first copied to a
numbered name (args.1.json is the oldest). A loss or norm that is not finite is written as null, because strict readers
of JSON know neither NaN nor Infinity.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import sys
import textwrap
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

import torch
from tqdm import tqdm

from megazpp.base.files import first_free, lock_for_this_job, write_whole
from megazpp.parallel.dims import ParallelDims

FLAGS = "args.json"  # file with every flag's value, which every run folder has
WIDTH = 120  # characters of a line on a terminal
PROBE_BYTES = 1 << 20  # size of the file with which a folder is tested for free space


class Console:
    """Prints on the rank that is `enabled`; a progress bar and short lines appear only on a terminal."""

    def __init__(self, *, enabled: bool, out: TextIO | None = None) -> None:
        self._enabled, self._out = enabled, out or sys.stdout
        self._is_terminal = enabled and self._out.isatty()
        self._bar: tqdm | None = None
        self._file: Path | None = None
        self._before: list[str] = []  # full lines of the time before `keep`

    def keep(self, path: Path) -> None:
        """Also append all full lines to the file at `path`, from the first line on and until writing to it fails."""
        self._file = path
        for text in self._before:
            self._write(text)
        self._before.clear()

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines, above the progress bar if one is shown.

        Args:
            text: the full lines.
            short: replacement for a terminal. An empty string prints nothing there; None prints `text`, wrapped.
        """
        if not self._enabled:
            return
        self._write(text)
        if self._is_terminal:
            text = _wrapped(text) if short is None else short
            if not text:
                return
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def _write(self, text: str) -> None:
        """Append lines to the file; before `keep` names the file, remember them."""
        if self._file is None:
            self._before.append(text)
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                print(text, file=file)
        except OSError as error:
            print(
                f"warning: {self._file}: {error.strerror}; no more lines are written to it, and training continues",
                file=self._out,
            )
            self._file = Path(os.devnull)

    def start_bar(self, total_iterations: int, done: int) -> None:
        """Show a progress bar on a terminal, with `done` of `total_iterations` steps finished."""
        if self._is_terminal:
            self._bar = tqdm(total=total_iterations, initial=done, file=self._out, unit="step", dynamic_ncols=True)

    def advance(self, loss: float) -> None:
        """Move the progress bar by one step and show the step's loss."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def stop_bar(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _wrapped(text: str) -> str:
    """Return lines of at most WIDTH characters for a terminal; paths and flags do not break."""
    wrap = functools.partial(textwrap.wrap, width=WIDTH, break_on_hyphens=False, break_long_words=False)
    return "\n".join(part for line in text.splitlines() for part in wrap(line, subsequent_indent="    ") or [line])


def _strict(value: Any) -> Any:
    """Return a value for JSON in which None replaces each number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def default_run_dir(config_name: str, now: datetime.datetime) -> Path:
    """Create the folder runs/<time>-<config name>, with a number appended if it exists, and return its path.

    Creating it decides between jobs that start in the same second. If it cannot be created, the path is returned, and
    `make_writable` gives the reason.
    """
    first = Path("runs") / f"{now:%Y%m%d-%H%M%S}-{config_name}"
    while True:
        path = first_free(lambda number: first if number == 1 else first.with_name(f"{first.name}-{number}"))
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.is_dir():
                continue  # another job has created it since
        return path


def make_writable(path: str | Path, flag: str) -> Path:
    """Create the folder at `path`, and test it by writing and deleting a file of PROBE_BYTES.

    An empty file would not be a test, because a full disk may still accept new file names.

    Args:
        path: the folder; `~` is expanded.
        flag: the flag that gave the path, for the error.
    Returns:
        the path, with `~` expanded.
    Raises:
        ValueError: the folder is not writable. The message names the flag, the path and the reason.
    """
    path = Path(path).expanduser()
    probe = path / f".{uuid.uuid4().hex}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} {path} is not a folder that can be written to: {error.strerror}") from error
    return path


class RunFolder:
    """Reads and writes the files of one run; making it raises ValueError if the folder is not writable."""

    def __init__(self, path: str | Path) -> None:
        self.path = make_writable(path, "--run-dir")
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Lock the folder until `unlock` or the end of this process.

        Raises:
            ValueError: another job writes its records to this folder.
        """
        self._lock = lock_for_this_job(self.path / "records.lock", f"--run-dir {self.path}")

    def unlock(self) -> None:
        """Release the lock, so that another job can take it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one JSON line to the file `name`.

        If a crash or a full disk has cut the last line short, the new record still starts on its own line.
        """
        with (self.path / name).open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(_strict(record), default=str, allow_nan=False).encode() + b"\n")

    def write_json(self, name: str, value: Mapping[str, Any], *, indent: int | None = None) -> Path:
        """Write an object as JSON and return the file's path.

        A file of that name with other content is first copied to a numbered name.
        """
        return self.write(name, json.dumps(_strict(value), indent=indent, default=str, allow_nan=False) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a text and return the file's path.

        A file of that name with other content is first copied to a numbered name.
        """
        file = self.path / name
        if file.exists():
            if file.read_text() == text:
                return file
            kept = first_free(lambda number: file.with_name(f"{file.stem}.{number}{file.suffix}"))
            write_whole(kept, file.read_bytes())
        write_whole(file, text.encode())
        return file

    def wandb_run_id(self) -> str:
        """Return the id of this folder's wandb run: WANDB_RUN_ID if set, otherwise the stored id.

        The first call stores WANDB_RUN_ID, or a random id, in the folder.
        """
        file, given = self.path / "wandb_run_id", os.environ.get("WANDB_RUN_ID")
        if not file.exists():
            file.write_text((given or uuid.uuid4().hex[:8]) + "\n")
        return given or file.read_text().strip()

    def keep_wandb_run_id(self, run_id: str) -> None:
        """Store the id of another folder's wandb run, so that this run continues it; an id already stored stays."""
        file = self.path / "wandb_run_id"
        if not file.exists():
            file.write_text(run_id + "\n")


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The environment that parts of a run use in addition to their config: axes, device, console and run folder.

    Attributes:
        dims: the mesh axes of the job, with their timeline and traffic counter.
        device: device on which this rank computes.
        console: prints on rank 0 and is silent on other ranks.
        folder: folder for the run's records on rank 0; None on other ranks.
    """

    dims: ParallelDims
    device: torch.device
    console: Console
    folder: RunFolder | None = None

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines on rank 0; `short` replaces them on a terminal (see `Console.log`)."""
        self.console.log(text, short=short)
