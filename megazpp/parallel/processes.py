"""Starts the ranks of a job on one machine as torchrun would, watches them together and ends them together.

The program starts its local workers with `launch_workers`, which also starts them again when one has failed; the
benchmarks and checks use `RankProcesses`.

Our own rather than torch's elastic agent (which torchrun is), because that ends workers by SIGTERM and takes up to 30
seconds about it: a signal that means "finish your step and save" to ours, and that has to reach them when it is sent to
the launcher. What is torch's here is the store, in this process, so that it outlives every worker: the ranks that are
left can say in it who failed first.
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
from types import FrameType
from typing import IO, Self

from megazpp.errors import EXIT_ERROR, EXIT_HANG, EXIT_READER_GONE, EXIT_SECONDARY, EXIT_USER_ERROR
from megazpp.parallel.launch import LAUNCHER_PID, RESTART_COUNT, STOP_SIGNALS, agent_variables, loopback_store

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # for the rank that failed first, when all that is seen is that another rank's collective broke
LAST_CHARACTERS = 4000


def launch_workers(command: Sequence[str], nproc: int, *, max_restarts: int = 0) -> int:
    """Run `command` in `nproc` local worker processes.

    When one fails the others are ended, and all are started again up to `max_restarts` times; what the user has to fix
    is not tried again. Ctrl-C ends all at once. SIGTERM and SIGUSR1 are passed on, and whatever the workers make of
    them, nothing is started any more.

    Returns:
        The exit code for this process: 0, 2 for a user error, 128 + n after signal n or a closed pipe, else 1.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    workers = RankProcesses(command, nproc)
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
                print(f"{_describe_failure(failures)}; {what_next}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    return EXIT_ERROR


@dataclass(frozen=True, kw_only=True)
class RankSite:
    """Where the ranks of one node run: a command to put in front, and variables to set."""

    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class RankProcesses:
    """Runs `command` once per rank.

    Args:
        command: the program and its arguments.
        ranks_per_node: ranks of each node.
        sites: one per node.
        quiet: only rank 0's output is shown; what the others write to stderr is kept, and shown when the job fails.
        pass_fds: file descriptors that rank 0 inherits.
    Attributes:
        processes: by rank, as many as are started.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks_per_node: int,
        *,
        sites: Sequence[RankSite] = (RankSite(),),
        quiet: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._command, self._ranks_per_node, self._sites = command, ranks_per_node, sites
        self._quiet, self._pass_fds = quiet, pass_fds
        self._errors: list[IO[bytes]] = []
        self._deadline: float | None = None
        self._exit_code: int | None = None

    def start(self, env: Mapping[str, str]) -> Self:
        """Start all ranks; again, if they have run before.

        Args:
            env: variables of every rank; MASTER_ADDR and MASTER_PORT are among them.
        """
        self.processes.clear()
        self._errors, self._deadline, self._exit_code = [], None, None
        world_size = len(self._sites) * self._ranks_per_node
        try:
            for rank in range(world_size):
                node, local_rank = divmod(rank, self._ranks_per_node)
                site, hidden = self._sites[node], self._quiet and rank > 0
                place = {
                    "RANK": rank,
                    "LOCAL_RANK": local_rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": self._ranks_per_node,
                    "GROUP_RANK": node,
                    LAUNCHER_PID: os.getpid(),  # a worker ends when its launcher is gone
                }
                if hidden:
                    self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115  (lives as long as the rank)
                process = subprocess.Popen(
                    [*site.prefix, *self._command],
                    env={**os.environ, **env, **{name: str(value) for name, value in place.items()}, **site.env},
                    stdin=subprocess.DEVNULL if self._quiet else None,
                    stdout=subprocess.DEVNULL if hidden else None,
                    stderr=self._errors[-1] if hidden else None,
                    pass_fds=() if rank else self._pass_fds,
                    start_new_session=True,  # Ctrl-C reaches only the launcher, which then ends all
                )
                self.processes.append(process)
        except BaseException:
            self.stop()
            raise
        return self

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

    def poll(self) -> int | None:
        """Look at the ranks once; when one has failed, end the others and print why.

        Returns:
            None while the job runs; then its exit code: that of the rank that failed first, 128 + n after signal n.
        """
        if self._exit_code is None:
            failures = self.failures()
            if failures is not None:
                self.stop()
                self._exit_code = self._report(failures) if failures else 0
        return self._exit_code

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

    def _report(self, failures: Mapping[int, int]) -> int:
        if EXIT_USER_ERROR in failures.values():  # rank 0 has said what is wrong
            return EXIT_USER_ERROR
        for rank, errors in enumerate(self._errors, start=1):
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            if text:
                print(f"--- rank {rank} wrote:\n{text[-LAST_CHARACTERS:]}", file=sys.stderr)
        print(f"{_describe_failure(failures)}; the job is over", file=sys.stderr)
        code = failures[_first(failures)]
        return code if code > 0 else 128 - code


def start_on_this_machine(
    command: Sequence[str], *, nodes: int, ranks_per_node: int, pass_fds: Sequence[int] = ()
) -> RankProcesses:
    """Start ranks that all talk through the loopback, as many as `nodes` would have."""
    sites = [RankSite(env={"GLOO_SOCKET_IFNAME": "lo"})] * nodes
    ranks = RankProcesses(command, ranks_per_node, sites=sites, quiet=True, pass_fds=pass_fds)
    return ranks.start(master_variables("127.0.0.1", free_port()))


def master_variables(address: str, port: int) -> dict[str, str]:
    """The environment of ranks that rank 0 has the store of; one thread for each."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _passing_signals_to(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[signal.Signals]]:
    """Send the signals that end a run in good order on to the workers; yields those that came."""
    passed: list[signal.Signals] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
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


def _describe_failure(failures: Mapping[int, int]) -> str:
    """Which rank ended the job and how, from exit codes by rank."""
    rank = _first(failures)
    code = failures[rank]
    if code == EXIT_HANG:
        return "the job hung, see above"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"


def _first(failures: Mapping[int, int]) -> int:
    """The rank that ended the job: one that was killed, else one that reported."""
    return min(failures, key=lambda rank: (failures[rank] == EXIT_SECONDARY, failures[rank] >= 0))
