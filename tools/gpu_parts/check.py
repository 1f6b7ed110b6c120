"""A part of tools/gpu_check.py: the time and the device that it has, the programs that it runs, and its findings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rank_processes import RankProcesses, start_on_this_machine

from megazpp.base.errors import end_with

T = TypeVar("T")
Launch = Callable[[Sequence[str]], RankProcesses]
LOOPBACK: Launch = partial(start_on_this_machine, nodes=2, ranks_per_node=2)
# NCCL refuses two ranks of a host on one device: each is a host here. They take turns on it, with MPS they share it.
ON_ONE_GPU = ["NCCL_NET=Socket", "NCCL_DEBUG=WARN", "CUBLAS_WORKSPACE_CONFIG=:4096:8"]
ON_ONE_GPU += [f"NCCL_{name}_DISABLE=1" for name in ("IB", "P2P", "SHM")]
ON_ONE_GPU += [f"NCCL_{name}_ENABLE=0" for name in ("NVLS", "MNNVL", "RAS", "CUMEM", "CUMEM_HOST")]
TO_A_LOG = 'NCCL_HOSTID=rank$RANK NCCL_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME exec "$@" >>"$LOG" 2>&1 </dev/null'


class Check:
    """The folder, device and time of a part, and `found`: rows of a table (heading -> cell), notes below it, failures.

    On "cpu" it is a rehearsal at toy size; a `long` one measures all cases. `save` is called with each finding.
    """

    def __init__(self, folder: Path, title: str, device: str, seconds: float, long: bool, save: Callable[[], None]):
        self.folder, self.device, self.long, self._save = folder, device, long, save
        self.found: dict[str, Any] = {"name": folder.name, "title": title, "status": "running", "seconds": 0}
        self.found |= {"rows": [], "notes": [], "failures": []}
        self._began, self._seconds = time.monotonic(), seconds
        folder.mkdir(exist_ok=True)

    def left(self) -> float:
        """Seconds of time."""
        return self._began + self._seconds - time.monotonic()

    def size(self, on_gpu: T, toy: T) -> T:
        """One of the two, by the device."""
        return toy if self.device == "cpu" else on_gpu

    def row(self, **cells: str | int | float) -> None:
        """One more row; a heading's underscores are spaces."""
        self._add("rows", {name.replace("_", " "): cell for name, cell in cells.items()})

    def note(self, text: str) -> None:
        self._add("notes", text)

    def fail(self, text: str) -> None:
        """Note something that is not as it must be; a goal of speed that is missed belongs into a row."""
        self._add("failures", text)

    def _add(self, kind: str, item: object) -> None:
        self.found[kind].append(item)
        self.found["seconds"] = round(time.monotonic() - self._began)
        print(item, flush=True)
        self._save()

    def run(self, words: str, log: Path, seconds: float, launch: Launch | None = None) -> int | None:
        """The exit code of a Python program, with `launch` on ranks that share the GPU; None: ended after `seconds`."""
        launcher, until = os.getpid(), time.monotonic() + seconds
        command = ["env", f"LOG={log}", "sh", "-c", TO_A_LOG, "sh", sys.executable, *words.split()]
        log.touch()
        if launch is None:
            process = subprocess.Popen(command, preexec_fn=lambda: end_with(launcher), start_new_session=True)
            poll, stop = process.poll, partial(os.killpg, process.pid, signal.SIGKILL)
        else:
            command[1:1] = ON_ONE_GPU if self.device == "cuda" else ["CUDA_VISIBLE_DEVICES="]
            ranks = launch(command)
            poll, stop = ranks.poll, partial(ranks.stop)
        try:
            while (code := poll()) is None and time.monotonic() < until:
                time.sleep(0.2)
            return code
        finally:
            with contextlib.suppress(ProcessLookupError):
                stop()  # and what it has started


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
