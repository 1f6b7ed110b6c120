"""Starts the local workers of a job as torchrun would, watches them together, ends them together, starts them again.

Our own rather than torch's elastic agent (which torchrun is), because that ends workers by SIGTERM and takes up to 30
seconds about it: a signal that means "finish your step and save" to ours, and that has to reach them when it is sent to
the launcher. The store is torch's, in this process, so that it outlives every worker: the ranks that are left can say
in it who failed first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Self

from megazpp.base.program import EXIT_ERROR, EXIT_HANG, EXIT_READER_GONE, EXIT_SECONDARY, EXIT_USER_ERROR, LAUNCHER_PID
from megazpp.parallel.launch import RESTART_COUNT, STOP_SIGNALS, agent_variables, loopback_store

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # for the rank that failed first, when all that is seen is that another rank's collective broke


def launch_workers(command: Sequence[str], nproc: int, *, max_restarts: int = 0) -> int:
    """Run `command` in `nproc` local worker processes.

    When one fails the others are ended, and all are started again up to `max_restarts` times; what the user has to fix
    is not tried again. SIGTERM, SIGUSR1 and the first Ctrl-C are passed on, and whatever the workers make of them,
    nothing is started any more. The second Ctrl-C ends all at once.

    Returns:
        The exit code for this process: 0, 2 for a user error, 128 + n after signal n or a closed pipe, else 1.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    workers = Workers(command, nproc)
    try:
        with _passing_signals_to(workers.processes) as passed:
            for attempt in range(max_restarts + 1):
                store = loopback_store()
                try:
                    workers.start({RESTART_COUNT: str(attempt), **agent_variables(store)})
                    while (failures := workers.failures()) is None:
                        time.sleep(POLL_SECONDS)
                finally:
                    workers.stop()
                if not failures:
                    return 0
                if passed:
                    return _ended_by(passed[0])
                for final in (EXIT_USER_ERROR, EXIT_READER_GONE):  # not tried again, and nothing to add
                    if final in failures.values():
                        return final
                what_next = f"restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else "the job is over"
                print(f"{describe_failure(failures)}; {what_next}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    return EXIT_ERROR


class Workers:
    """Runs one process per rank.

    Args:
        command: the program and its arguments.
        ranks_per_node, nodes: how many; a program has one node, tools/emulate_cluster.py several.
    Attributes:
        processes: by rank, as many as are started.
    """

    def __init__(self, command: Sequence[str], ranks_per_node: int, *, nodes: int = 1) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command, self._ranks_per_node, self._nodes = command, ranks_per_node, nodes
        self._deadline: float | None = None

    def start(self, env: Mapping[str, str]) -> Self:
        """Start all ranks; again, if they have run before.

        Args:
            env: variables of every rank; MASTER_ADDR and MASTER_PORT are among them.
        """
        self.processes.clear()
        self._deadline = None
        world_size = self._nodes * self._ranks_per_node
        try:
            for rank in range(world_size):
                node, local_rank = divmod(rank, self._ranks_per_node)
                place = {
                    "RANK": rank,
                    "LOCAL_RANK": local_rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": self._ranks_per_node,
                    "GROUP_RANK": node,
                    LAUNCHER_PID: os.getpid(),  # a worker ends when its launcher is gone
                }
                place_env = {name: str(value) for name, value in place.items()}
                self.processes.append(self.start_rank(rank, node, {**os.environ, **env, **place_env}))
        except BaseException:
            self.stop()
            raise
        return self

    def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start one rank in a session of its own: Ctrl-C reaches only the launcher, which then ends all."""
        return subprocess.Popen(self.command, env=env, start_new_session=True)

    def failures(self) -> dict[int, int] | None:
        """Look at the ranks once.

        Returns:
            None while the job runs; then the exit codes, by rank, of those that failed before the rest is ended; empty
            if all went well.
        """
        codes = {rank: code for rank, process in enumerate(self.processes) if (code := process.poll()) is not None}
        failures = {rank: code for rank, code in codes.items() if code != 0}
        if failures and self._deadline is None:
            self._deadline = time.monotonic() + GRACE_SECONDS
        late = self._deadline is not None and time.monotonic() > self._deadline
        over = len(codes) == len(self.processes) or late or any(code != EXIT_SECONDARY for code in failures.values())
        return failures if over else None

    def stop(self) -> None:
        """End every rank and what it has started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # the group is the rank and its children
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def _passing_signals_to(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[signal.Signals]]:
    """Send the signals that end a run in good order on to the workers; yields those that came."""
    passed: list[signal.Signals] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and signal.SIGINT in passed:
            raise KeyboardInterrupt
        passed.append(signal.Signals(signum))
        for worker in workers:
            worker.send_signal(signum)

    before = {signum: signal.signal(signum, pass_on) for signum in STOP_SIGNALS}
    try:
        yield passed
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _ended_by(signum: signal.Signals) -> int:
    print(f"\nended by {signum.name}", file=sys.stderr)  # on a line of its own after a progress bar or the ^C
    return 128 + signum


def describe_failure(failures: Mapping[int, int]) -> str:
    """Name the rank that ended the job and how it did, from exit codes by rank."""
    rank = first_failure(failures)
    code = failures[rank]
    if code == EXIT_HANG:
        return "the job hung, see above"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"


def first_failure(failures: Mapping[int, int]) -> int:
    """The rank that ended the job: one that was killed, else one that reported."""
    return min(failures, key=lambda rank: (failures[rank] == EXIT_SECONDARY, failures[rank] >= 0))
