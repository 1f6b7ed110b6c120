"""The run context: what nearly every part of a run needs, made once when the process groups stand.

The console is what a user sees while training: log lines, and on a terminal short ones over a progress bar with the
time left. What is short there is whole in the run folder's log.txt, and where the output is no terminal.

The run folder is where rank 0 keeps a run's records, also over restarts; tools/report.py reads them:

    args.json        every flag's value                        summary.json   what came out
    args.txt         the same as a flag file                   metrics.jsonl  one object per log line
    topology.json    the cluster and the axes on it            validation.jsonl  one object per validation
    timeline.json    what every rank did in one step (--timeline-step)
    cluster.yaml     the cluster with its measured links (--measure-links)
    hang-<time>.txt, not-finite-<iteration>.json: what ended a run
    log.txt          what was printed, whole          checkpoints/   the model (--save-to-run-dir)
    wandb_run_id     names the wandb run that a restart continues

Nothing is lost when a folder is used again: the .jsonl files grow, and a file that would be replaced by other
content keeps a numbered name (args.1.json is the oldest). A loss or norm that is not finite is written as NaN or
Infinity: not strict JSON, but what Python's json reads back.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from megazpp.base.files import first_free, write_whole
from megazpp.parallel.dims import ParallelDims

PROBE_BYTES = 1 << 20


class Console:
    """Prints on one rank, which is `enabled`; the bar is drawn, and lines are short, only on a terminal."""

    def __init__(self, *, enabled: bool, out: TextIO | None = None) -> None:
        self._enabled, self._out = enabled, out or sys.stdout
        self._is_terminal = enabled and self._out.isatty()
        self._bar: tqdm | None = None
        self._file: Path | None = None

    def keep(self, path: Path) -> None:
        """Write all lines, whole, to the end of a file, too, for as long as it can be written to."""
        self._file = path

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines, above the bar if there is one; a terminal gets `short` in their place, if it is not empty."""
        if not self._enabled:
            return
        if self._file is not None:
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    print(text, file=file)
            except OSError as error:
                warning = f"warning: {self._file}: {error}; it gets no more lines, and training goes on"
                print(warning, file=self._out)
                self._file = None
        if short is not None and self._is_terminal:
            text = short
            if not text:
                return
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def start_bar(self, total_iterations: int, done: int) -> None:
        if self._is_terminal:
            self._bar = tqdm(total=total_iterations, initial=done, file=self._out, unit="step", dynamic_ncols=True)

    def advance(self, loss: float) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def default_run_dir(config_name: str, now: datetime.datetime) -> Path:
    """runs/<time>-<config name>, with a number behind it if that is taken."""
    first = Path("runs") / f"{now:%Y%m%d-%H%M%S}-{config_name}"
    return first_free(lambda number: first if number == 1 else first.with_name(f"{first.name}-{number}"))


def make_writable(path: str | Path, flag: str) -> Path:
    """Create the folder, and try it by writing and deleting a file of PROBE_BYTES: a full disk may still hold names.

    Raises:
        ValueError: names the flag, the path and the reason.
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
    """Reads and writes the files of one run; raises ValueError if the folder cannot be written to."""

    def __init__(self, path: str | Path) -> None:
        self.path = make_writable(path, "--run-dir")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line; a line that a crash or a full disk has cut short is left as it is, on its own line."""
        with (self.path / name).open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(record, default=str).encode() + b"\n")

    def write_json(self, name: str, value: Mapping[str, Any], *, indent: int | None = None) -> Path:
        """Write an object, and keep another one of that name under a numbered name."""
        return self.write(name, json.dumps(value, indent=indent, default=str) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a text, and keep another one of that name under a numbered name."""
        file = self.path / name
        if file.exists():
            if file.read_text() == text:
                return file
            kept = first_free(lambda number: file.with_name(f"{file.stem}.{number}{file.suffix}"))
            write_whole(kept, file.read_bytes())
        write_whole(file, text.encode())
        return file

    def wandb_run_id(self) -> str:
        """The id of this folder's wandb run: WANDB_RUN_ID's, else drawn the first time it is asked for."""
        file, given = self.path / "wandb_run_id", os.environ.get("WANDB_RUN_ID")
        if not file.exists():
            file.write_text((given or uuid.uuid4().hex[:8]) + "\n")
        return given or file.read_text().strip()

    def keep_wandb_run_id(self, run_id: str) -> None:
        """Continue the wandb run of another folder, unless this one has its own."""
        file = self.path / "wandb_run_id"
        if not file.exists():
            file.write_text(run_id + "\n")


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """All that a part of a run may use on this rank, beside its own config.

    Attributes:
        dims: the axes of the cluster, and the timeline and the traffic counter that they feed.
        device: what this rank computes on.
        console: prints on rank 0 and is silent on the others.
        folder: where rank 0 keeps the run's records; None on the other ranks.
    """

    dims: ParallelDims
    device: torch.device
    console: Console
    folder: RunFolder | None = None

    def log(self, text: str, *, short: str | None = None) -> None:
        """Print lines on rank 0; `short` are those of a terminal."""
        self.console.log(text, short=short)
