"""The folder in which one run keeps its records, also over restarts.

    args.json        every flag's value                        summary.json   what came out
    args.txt         the same as a flag file                   metrics.jsonl  one object per log line
    topology.json    the cluster and the axes on it            validation.jsonl  one object per validation
    timeline.json    what every rank did in one step (--timeline-step)
    cluster.yaml     the cluster with its measured links (--measure-links)
    hang-<time>.txt, not-finite-<iteration>.json: what ended a run
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

from megazpp.files import first_free, write_whole
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import cluster_text
from megazpp.topology.layout import Layout, layout_record

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

    def write_args(self, values: Mapping[str, Any], flag_file: str | None = None) -> None:
        """Keep the resolved flags: as JSON, and as the text of a flag file if there is one."""
        self._write("args.json", _json(values, indent=2) + "\n")
        if flag_file is not None:
            self._write("args.txt", flag_file)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        self._append("metrics.jsonl", record)

    def append_validation(self, record: Mapping[str, Any]) -> None:
        """Add one line to validation.jsonl."""
        self._append("validation.jsonl", record)

    def write_topology(self, layout: Layout) -> None:
        """Write topology.json: who is where, in integers (topology/layout.py)."""
        self._write("topology.json", _json(layout_record(layout)) + "\n")

    def write_cluster(self, cluster: Cluster) -> None:
        """Write cluster.yaml, for `--cluster-file` of later runs and plans."""
        self._write("cluster.yaml", cluster_text(cluster))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        self._write("summary.json", _json(summary, indent=2) + "\n")

    def write_timeline(self, trace: Mapping[str, Any]) -> None:
        """Write timeline.json."""
        self._write("timeline.json", _json(trace) + "\n")

    def write_not_finite(self, iteration: int, record: Mapping[str, Any]) -> Path:
        """Write not-finite-<iteration>.json."""
        return self._write(f"not-finite-{iteration}.json", _json(record, indent=2) + "\n")

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

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line; a line that a crash or a full disk has cut short is left as it is, on its own line."""
        with (self.path / name).open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(_json(record).encode() + b"\n")

    def _write(self, name: str, text: str) -> Path:
        file = self.path / name
        if file.exists():
            if file.read_text() == text:
                return file
            kept = first_free(lambda number: file.with_name(f"{file.stem}.{number}{file.suffix}"))
            write_whole(kept, file.read_bytes())
        write_whole(file, text.encode())
        return file


def _json(value: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=str)
