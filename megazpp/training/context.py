"""The run context: process groups, device, console and run folder, made once and passed to nearly every part of a run.

The console prints log lines. If the output is a terminal, it shows shorter lines above a progress bar with the
remaining time. The run folder's log.txt always has the full lines, and so has an output that is not a terminal.

The run folder holds the records of a run, including its restarts. Rank 0 writes them, and tools/report.py reads them:

    args.json        every flag's value                        summary.json   results of the run
    args.txt         the same as a flag file                   metrics.jsonl  one object per log line
    topology.txt     the placement of ranks, and mesh axes     validation.jsonl  one object per validation
    timeline.json    spans of all ranks in one step (--timeline-step)
    cluster.yaml     the cluster with its measured links (--measure-links)
    hang-<time>.txt, not-finite-<iteration>.json: reason that ended a run
    log.txt          all printed lines in full        checkpoints/   the model (--save-to-run-dir)
    wandb_run_id     id of the wandb run that a restart continues
    records.lock     lock file of the job that writes to the folder, held until that job ends

If a run uses an existing folder again, no record is lost. Lines are appended to the .jsonl files. A file whose content
would change is first copied to a numbered name (args.1.json is the oldest). A loss or norm that is not finite is
written as null, because strict readers of JSON accept neither NaN nor Infinity.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

import torch
from tqdm import tqdm

from megazpp.base.files import append_line, first_free, lock_for_this_job, make_writable, write_whole
from megazpp.parallel.dims import ParallelDims

FLAGS = "args.json"  # file with every flag's value; each run folder has this file
WIDTH = 120  # number of characters at which lines are wrapped on a terminal


class Console:
    """The output of log lines and, on a terminal, of a progress bar.

    Args:
        enabled: True on the rank that prints; False makes all methods silent.
        out: stream to which lines are printed; None for stdout.
    """

    def __init__(self, *, enabled: bool, out: TextIO | None = None) -> None:
        self._enabled, self._given = enabled, out
        self._is_terminal = enabled and self._out.isatty()
        self._bar: tqdm | None = None
        self._file: Path | None = None
        self._before: list[str] = []  # full lines printed before `keep`, which writes them to the log file

    @property
    def _out(self) -> TextIO:
        """The stream to which lines are printed.

        `sys.stdout` is read at each use, because `catching_signals` (loop.py) replaces it during the training.
        """
        return self._given or sys.stdout

    def keep(self, path: Path) -> None:
        """Make the file at `path` the log file, and append all full lines to it, also lines printed before this call.

        A terminal may show shorter lines (see `log`), but the file gets the full ones. If writing to the file fails,
        the console warns and continues without the file.
        """
        self._file = path
        for text in self._before:
            self._write(text)
        self._before.clear()

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines, above the progress bar if one is shown.

        Args:
            text: the full lines.
            short: shorter text that a terminal shows instead. For "" a terminal shows nothing, for None it shows
                `text`, wrapped.
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
        """Append lines to the log file. Before `keep` has set this file, store the lines in memory.

        If the file cannot be written, print a warning once, and drop these and all later lines.
        """
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
    """Wrap the lines of `text` at WIDTH characters for a terminal, without a break inside paths or flags."""
    wrap = functools.partial(textwrap.wrap, width=WIDTH, break_on_hyphens=False, break_long_words=False)
    return "\n".join(part for line in text.splitlines() for part in wrap(line, subsequent_indent="    ") or [line])


def _strict(value: Any) -> Any:
    """Return a copy of a JSON value in which None (null) replaces each number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunFolder:
    """The folder with the records of one run; the constructor creates it if it does not exist.

    Args:
        path: path of the folder. If it is not writable, the constructor raises a ValueError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = make_writable(path, "--run-dir")
        self._lock: IO[str] | None = None
        self._failed = set[str]()  # names of files whose failure `surviving` has reported

    def lock(self) -> None:
        """Lock the run folder for this job, until `unlock` or the end of this process.

        Raises:
            ValueError: another job has locked the folder, because that job writes its records there.
        """
        self._lock = lock_for_this_job(self.path / "records.lock", f"--run-dir {self.path}")

    def unlock(self) -> None:
        """Release this job's lock on the run folder, so that another job can use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextlib.contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """Return a context for writing the file `name` of the run folder; an OSError there does not end the training.

        The error, for example a full disk, ends the context and prints a warning. Later errors with the same file print
        nothing. Each call of this method tries to write again, because the disk may have space by then.
        """
        try:
            yield
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                print(f"warning: {name}: {error}; this record is left out", flush=True)

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append `record` as one line of JSON to the file `name` in the run folder; if this fails, print a warning."""
        with self.surviving(name):
            append_line(self.path / name, json.dumps(_strict(record), default=str, allow_nan=False))

    def write_json(self, name: str, value: Mapping[str, Any], *, indent: int | None = None) -> Path:
        """Write `value` as JSON to the file `name` in the run folder, and return the file's path.

        If the file exists with other content, that content is first copied to a numbered name.
        """
        return self.write(name, json.dumps(_strict(value), indent=indent, default=str, allow_nan=False) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write `text` to the file `name` in the run folder, and return the file's path.

        If the file exists with other content, that content is first copied to a numbered name.
        """
        file = self.path / name
        if file.exists():
            if file.read_bytes() == text.encode():
                return file
            kept = first_free(lambda number: file.with_name(f"{file.stem}.{number}{file.suffix}"))
            write_whole(kept, file.read_bytes())
        write_whole(file, text.encode())
        return file

    def wandb_run_id(self) -> str:
        """Return the ID of the wandb run to which this folder's records go, so that a restart continues the wandb run.

        The ID is the environment variable WANDB_RUN_ID if it is set, or else the ID that is stored in the folder. The
        first call stores WANDB_RUN_ID, or a random ID.
        """
        given = os.environ.get("WANDB_RUN_ID")
        self.keep_wandb_run_id(given or uuid.uuid4().hex[:8])
        return given or (self.path / "wandb_run_id").read_text().strip()

    def keep_wandb_run_id(self, run_id: str) -> None:
        """Store the ID of another folder's wandb run in this folder, so that this run continues that wandb run.

        If the folder already has an ID, nothing is changed. An empty file, which a crash or a full disk may have left,
        is no ID.
        """
        file = self.path / "wandb_run_id"
        if not file.exists() or not file.read_text().strip():
            write_whole(file, f"{run_id}\n".encode())

    def forget_wandb_run_id(self) -> None:
        """Remove the ID of the wandb run from its file, so that this run starts a new wandb run.

        The ID is first copied to a file with a numbered name. A copied run folder needs this method, because the
        original run may continue with the stored ID.
        """
        if (self.path / "wandb_run_id").exists():
            self.write("wandb_run_id", "")


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The mesh axes, device, console and run folder, which nearly every part of a run needs in addition to its config.

    Attributes:
        dims: mesh axes of the job, with their timeline and traffic counter.
        device: device on which this rank computes.
        console: output of log lines, silent on all ranks except rank 0.
        folder: folder with the run's records on rank 0; None on other ranks.
    """

    dims: ParallelDims
    device: torch.device
    console: Console
    folder: RunFolder | None = None

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines on rank 0. A terminal shows `short` instead, unless `short` is None (see `Console.log`)."""
        self.console.log(text, short=short)
