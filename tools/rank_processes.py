"""The rank processes of one job on one machine: started as torchrun would, watched together, ended together.

Rank 0's output is shown. What the others write to stderr is kept, and shown when the job fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, NoReturn

from megazpp.errors import EXIT_SECONDARY, EXIT_USER_ERROR
from megazpp.parallel.launch import LAUNCHER_PID

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # a rank that failed first may still be writing its traceback when another one's collective breaks
LAST_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class RankSite:
    """Where the ranks of one node run: a command to put in front, and variables to set."""

    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class RankProcesses:
    """Starts `command` once per rank.

    Args:
        command: the program and its arguments.
        sites: one per node.
        ranks_per_node: ranks of each node.
        master: address and port of rank 0's store.
        pass_fds: file descriptors that rank 0 inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        sites: Sequence[RankSite],
        ranks_per_node: int,
        master: tuple[str, int],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes]] = []
        world_size = len(sites) * ranks_per_node
        try:
            for rank in range(world_size):
                node, local_rank = divmod(rank, ranks_per_node)
                env = {
                    "RANK": rank,
                    "LOCAL_RANK": local_rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": ranks_per_node,
                    "GROUP_RANK": node,
                    "MASTER_ADDR": master[0],
                    "MASTER_PORT": master[1],
                    "OMP_NUM_THREADS": 1,
                    LAUNCHER_PID: os.getpid(),  # a worker ends when its launcher is gone
                }
                self._start(
                    [*sites[node].prefix, *command],
                    os.environ | {name: str(value) for name, value in env.items()} | dict(sites[node].env),
                    shown=rank == 0,
                    pass_fds=pass_fds if rank == 0 else (),
                )
        except BaseException:
            self.stop()
            raise

    def poll(self) -> int | None:
        """Look at the ranks once; when one has failed, end the others.

        Returns:
            None while the job runs; then its exit code: that of the rank that failed first, 128 + n after signal n.
        """
        codes = [process.poll() for process in self.processes]
        failed = {rank for rank, code in enumerate(codes) if code}
        if failed:
            return self._fail(failed)
        return None if None in codes else 0

    def wait(self) -> int:
        """Wait for the end of the job and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def stop(self) -> None:
        """End every rank and what it has started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # the group is the rank and its children
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _start(self, command: list[str], env: Mapping[str, str], *, shown: bool, pass_fds: Sequence[int]) -> None:
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the rank)
        self._errors.append(errors)
        self.processes.append(
            subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=None if shown else subprocess.DEVNULL,
                stderr=None if shown else errors,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C comes to us, and we end them
            )
        )

    def _fail(self, first: set[int]) -> int:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(POLL_SECONDS)
        codes = {rank: code for rank, process in enumerate(self.processes) if (code := process.poll())}
        self.stop()
        rank, code = min(codes.items(), key=lambda item: (item[1] == EXIT_SECONDARY, item[0] not in first, item[0]))
        if code == EXIT_USER_ERROR:  # rank 0 has said what is wrong
            return code
        for other, errors in enumerate(self._errors):
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            if text:
                print(f"--- rank {other} wrote:\n{text[-LAST_CHARACTERS:]}", file=sys.stderr)
        reason = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        print(f"rank {rank} {reason}; the job is over", file=sys.stderr)
        return code if code > 0 else 128 - code


def start_on_this_machine(
    command: Sequence[str], *, nodes: int, ranks_per_node: int, pass_fds: Sequence[int] = ()
) -> RankProcesses:
    """The same job without a network between the nodes: all ranks talk through the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    return RankProcesses(
        command,
        sites=[RankSite(env=env)] * nodes,
        ranks_per_node=ranks_per_node,
        master=("127.0.0.1", port),
        pass_fds=pass_fds,
    )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Clean up without being interrupted; the commands it runs inherit that."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP leave through `finally` and `with`, as Ctrl-C does."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
