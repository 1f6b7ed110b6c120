"""The folder in which one run keeps its records, also over restarts.

    args.json        every flag's value                        summary.json   what came out
    args.txt         the same as a flag file                   metrics.jsonl  one object per log line
    topology.json    the cluster and the axes on it            validation.jsonl  one object per validation
    timeline.json    what every rank did in one step (--timeline-step)
    cluster.yaml     the cluster with its measured links (--measure-links)
    hang-<time>.txt, not-finite-<iteration>.json: what ended a run
    log.txt          what was printed, whole          checkpoints/   the model (--save-to-run-dir)
    wandb_run_id     names the wandb run that a restart continues

Nothing is lost when a folder is used again: the .jsonl files grow, and a file that would be replaced by other
content keeps a numbered name (args.1.json is the oldest). Only rank 0 makes one. tools/report.py reads them.

A loss or norm that is not finite is written as NaN or Infinity: not strict JSON, but what Python's json reads back.
"""

from __future__ import annotations

import datetime
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazpp.base.files import first_free, write_whole

PROBE_BYTES = 1 << 20


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
    """Reads and writes the files of one run.

    Raises:
        ValueError: the folder cannot be made or written to.
    """

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
