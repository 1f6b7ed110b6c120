"""Run a program like a user, and find the processes and files that it leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
from helpers.fork_python import forked_python

from megazpp.base.files import cache_folder

ROOT = Path(__file__).resolve().parents[2]
MARKER = "MEGAZPP_TEST_MARKER"
SECONDS_PER_RUN = 300
# Longest time on loaded cores until all processes of a stopped program have ended. Without the stop, the programs of
# the tests would run for a minute or longer.
SECONDS_TO_END = 45
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WANDB_MODE")


class Program:
    """A program that runs without a terminal; stdout and stderr go to one file, which `output()` reads.

    Args:
        command: arguments after the Python interpreter.
        folder: folder for the output file and temporary files; also HOME, so that the program finds no user settings.
        cwd: working directory of the program.
        python: path of the Python interpreter.
    """

    def __init__(self, *command: str, folder: Path, cwd: Path = ROOT, python: str = sys.executable) -> None:
        # an environment variable with this value marks all descendants, because they inherit it
        self._marker = uuid.uuid4().hex
        self._scratch, self._file = folder / "tmp", folder / f"output-{self._marker}.txt"
        self._scratch.mkdir(exist_ok=True)
        share_compiled_kernels(folder)
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        env |= {"HOME": str(folder), "TMPDIR": str(self._scratch), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env[MARKER] = self._marker
        with self._file.open("w") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen([python, *command], cwd=cwd, env=env, start_new_session=True, **streams)

    def output(self) -> str:
        return self._file.read_text()

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.output())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS_PER_RUN
        while not condition():
            assert self.process.poll() is None, f"the program has ended while the test waited:\n{self.output()}"
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def finish(self) -> str:
        """Wait until the program has ended, kill its remaining processes, and return its output."""
        try:
            self.process.wait(timeout=SECONDS_PER_RUN)
        finally:
            self.kill()
        return self.output()

    def all_end(self) -> bool:
        """Wait until no process of the program is left; return False if one is left after SECONDS_TO_END."""
        deadline = time.monotonic() + SECONDS_TO_END
        while self.left_behind():
            if time.monotonic() > deadline:
                return False
            self.process.poll()  # reap the program's first process if it has ended
            time.sleep(0.05)
        return True

    def left_behind(self) -> list[int]:
        """Return the IDs of the program's running processes in all sessions.

        Such a process has the program's marker in its environment. A fork of `forked_python` instead has the program's
        output file as stdout.
        """
        return [process.pid for process in self._running()]

    def workers(self) -> list[int]:
        """Return the IDs of the ranks that the program's launcher has started, in the order of ranks."""
        found = {process.pid: process.info for process in self._running("ppid", "create_time")}
        # not in the order of their IDs, which begin again at 1 after the largest
        in_order = sorted(found, key=lambda pid: found[pid]["create_time"])
        return [pid for pid in in_order if found[pid]["ppid"] in found]

    def _running(self, *attributes: str) -> list[psutil.Process]:
        # reads the attributes at once, because a process may end at any time
        return [each for each in psutil.process_iter(["environ", *attributes]) if self._has_started(each)]

    def _has_started(self, process: psutil.Process) -> bool:
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(self._file):
                return True
        return (process.info["environ"] or {}).get(MARKER) == self._marker

    def scratch_files(self) -> list[Path]:
        """Return the files that the program has left in its temporary folder (TMPDIR)."""
        return list(self._scratch.iterdir())

    def kill(self) -> None:
        """Kill all processes that the program has started and that still run."""
        for pid in self.left_behind():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def share_compiled_kernels(home: Path) -> None:
    """Let programs with the home folder `home` use the user's compiled C kernels; each rank would compile them anew."""
    libraries, shared = home / ".cache/megazpp/libraries", cache_folder() / "libraries"
    for folder in (libraries.parent, shared):
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        libraries.symlink_to(shared)


def run_program(*command: str, folder: Path, cwd: Path = ROOT, python: str = sys.executable) -> tuple[int, str]:
    """Run a program to its end, and return (exit code, text of stdout and stderr)."""
    program = Program(*command, folder=folder, cwd=cwd, python=python)
    output = program.finish()
    return program.process.returncode, output


def run_forked(*command: str, folder: Path, cwd: Path = ROOT) -> tuple[int, str]:
    """Run a program like `run_program`, but in milliseconds, as a fork of a process that has imported torch.

    Use this in tests that do not test how the program starts.
    """
    return run_program(*command, folder=folder, cwd=cwd, python=str(forked_python()))
