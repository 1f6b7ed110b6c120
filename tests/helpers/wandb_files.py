"""Read the files that wandb writes in its offline mode."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2


def read_records(file: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Yield the records of a .wandb file in order.

    The file is a LevelDB log: 7 bytes of identification, then 32 KiB blocks of fragments (crc, length, type).
    """
    data, at, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left_in_block = 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if left_in_block < 7 or kind == 0:
            at += left_in_block
            continue
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the fragment is a complete record, or the last one of a record
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


class OfflineRun:
    """The contents of one of wandb's folders offline-run-...: run, config, summary, and a row per logged step."""

    def __init__(self, folder: Path) -> None:
        (file,) = folder.glob("*.wandb")
        found: defaultdict[str, list[Any]] = defaultdict(list)
        for record in read_records(file):
            kind = record.WhichOneof("record_type")
            found[kind].append(getattr(record, kind))
        self.run = found["run"][-1]
        self.config = values(item for run in found["run"] for item in run.config.update)
        self.history = [values(row.item) for row in found["history"]]
        self.summary = values(item for summary in found["summary"] for item in summary.update)


def values(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline_runs(folder: Path) -> list[OfflineRun]:
    """Return the runs that wandb recorded offline below `folder`, in the order of their start."""
    return [OfflineRun(run) for run in sorted(folder.glob("wandb/offline-run-*"))]
