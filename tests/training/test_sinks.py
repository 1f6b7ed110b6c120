"""Real offline wandb runs and TensorBoard events, written and read back."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from megazpp.training.sinks import TensorBoardSink, is_installed, wandb_mode

ROOT = Path(__file__).resolve().parents[2]

WRITE_A_RUN = """
import sys
from pathlib import Path
from megazpp.training.sinks import WandbSink

folder, first = Path(sys.argv[1]), int(sys.argv[2])
sink = WandbSink(project="p", entity="", name="n", folder=folder, run_id="abcd1234", config={"lr": 0.1})
for iteration in (first, first + 1):
    sink.write({"lm loss": 10.0 / iteration}, iteration=iteration, consumed_samples=8 * iteration)
sink.close(exit_code=0)
"""


def write_a_run(folder: Path, first: int, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with no wandb setting and no credentials but `env`, and no terminal."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    return subprocess.run(
        [sys.executable, "-c", WRITE_A_RUN, str(folder), str(first)],
        env={**clean, "HOME": str(folder), "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )


def read_records(file: Path) -> Iterator[wandb_internal_pb2.Record]:
    """A .wandb file is a LevelDB log: 32 KiB blocks of fragments (crc, length, type), after 7 bytes of identity."""
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
        if kind in (1, 4):  # a whole record, or its last fragment
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def read_runs(folder: Path) -> tuple[set[str], set[str], list[dict[str, float]]]:
    """(run ids, display names, history rows) of all offline runs, oldest first."""
    ids, names, rows = set(), set(), []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in read_records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                names.add(record.run.display_name)
            elif record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return ids, names, rows


def test_without_credentials_wandb_records_offline_and_a_restart_continues_the_same_run(tmp_path: Path):
    write_a_run(tmp_path, 1)
    write_a_run(tmp_path, 3)
    ids, names, rows = read_runs(tmp_path)
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert (ids, names) == ({"abcd1234"}, {"n"})
    kept = [(row["_step"], row["lm loss"], row["samples vs steps"]) for row in rows]
    assert kept == [(i, 10.0 / i, 8 * i) for i in (1, 2, 3, 4)]


def test_a_server_that_cannot_be_reached_does_not_stop_the_run(tmp_path: Path):
    done = write_a_run(tmp_path, 1, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_INIT_TIMEOUT="1")
    assert "wandb: recording offline, the server did not take the run" in done.stdout
    assert len(read_runs(tmp_path)[2]) == 2


@pytest.mark.parametrize(
    ("env", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_MODE": "online"}, "offline"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "disabled"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_IDENTITY_TOKEN_FILE": "f"}, "online"),
    ],
)
def test_wandb_is_online_only_with_credentials(env: dict[str, str], mode: str, tmp_path: Path):
    assert wandb_mode({"HOME": str(tmp_path), **env}) == mode


def test_a_login_for_the_right_server_in_the_netrc_file_is_found(tmp_path: Path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    home = {"HOME": str(tmp_path)}
    assert wandb_mode(home) == "online"
    assert wandb_mode({**home, "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"
    assert wandb_mode({"HOME": "/nowhere", "NETRC": str(tmp_path / ".netrc")}) == "online"
    (tmp_path / ".netrc").write_text("not a netrc file")
    assert wandb_mode(home) == "offline"


def test_tensorboard_has_every_scalar_by_iteration_and_by_samples(tmp_path: Path):
    for first in (1, 3):  # the second writer is a restart
        sink = TensorBoardSink(tmp_path, queue_size=10)
        for iteration in (first, first + 1):
            sink.write({"lm loss": 10.0 / iteration}, iteration=iteration, consumed_samples=8 * iteration)
        sink.write({"grad-norm": math.nan}, iteration=first + 1, consumed_samples=8 * first + 8)
        sink.close(exit_code=0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"lm loss", "lm loss vs samples", "grad-norm", "grad-norm vs samples"}
    assert [e.step for e in events.Scalars("lm loss")] == [1, 2, 3, 4]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [8, 16, 24, 32]
    assert [e.value for e in events.Scalars("lm loss")] == pytest.approx([10, 5, 10 / 3, 2.5])
    assert all(math.isnan(e.value) for e in events.Scalars("grad-norm"))


def test_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "explodes.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("explodes")
    assert not is_installed("no_such_package_at_all")
