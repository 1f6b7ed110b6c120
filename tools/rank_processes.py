"""Ranks of several pretended nodes on one machine, for emulate_cluster.py, benchmarks and checks; not a program."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Self

from megazpp.base.errors import EXIT_USER_ERROR
from megazpp.parallel.processes import POLL_SECONDS, Workers, describe_failure, first_failure

LAST_CHARACTERS = 4000  # shown of what a rank wrote


@dataclass(frozen=True, kw_only=True)
class RankSite:
    """The place of one node's ranks: a command to put in front, and variables to set."""

    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class RankProcesses(Workers):
    """Runs `command` once per rank of several nodes, all on this machine.

    Only rank 0's output is shown; what the others write to stderr is kept, and shown when the job fails.

    Args:
        command: the program and its arguments.
        ranks_per_node: ranks of each node.
        sites: one per node.
        pass_fds: file descriptors that rank 0 inherits.
    """

    def __init__(
        self, command: Sequence[str], ranks_per_node: int, *, sites: Sequence[RankSite], pass_fds: Sequence[int] = ()
    ) -> None:
        super().__init__(command, ranks_per_node, nodes=len(sites))
        self._sites, self._pass_fds = sites, pass_fds
        self._errors: list[IO[bytes]] = []
        self._exit_code: int | None = None

    def start(self, env: Mapping[str, str]) -> Self:
        self._errors, self._exit_code = [], None
        return super().start(env)

    def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if rank:
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115  (lives as long as the rank)
        return subprocess.Popen(
            [*self._sites[node].prefix, *self.command],
            env={**env, **self._sites[node].env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=self._errors[-1] if rank else None,
            pass_fds=() if rank else self._pass_fds,
            start_new_session=True,
        )

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

    def _report(self, failures: Mapping[int, int]) -> int:
        if EXIT_USER_ERROR in failures.values():  # rank 0 has said what is wrong
            return EXIT_USER_ERROR
        for rank, errors in enumerate(self._errors, start=1):
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            if text:
                print(f"--- rank {rank} wrote:\n{text[-LAST_CHARACTERS:]}", file=sys.stderr)
        print(f"{describe_failure(failures)}; the job is over", file=sys.stderr)
        code = failures[first_failure(failures)]
        return code if code > 0 else 128 - code


def start_on_this_machine(
    command: Sequence[str], *, nodes: int, ranks_per_node: int, pass_fds: Sequence[int] = ()
) -> RankProcesses:
    """Start ranks that all talk through the loopback, as many as `nodes` would have."""
    sites = [RankSite(env={"GLOO_SOCKET_IFNAME": "lo"})] * nodes
    ranks = RankProcesses(command, ranks_per_node, sites=sites, pass_fds=pass_fds)
    return ranks.start(master_variables("127.0.0.1", free_port()))


def master_variables(address: str, port: int) -> dict[str, str]:
    """The environment of ranks that rank 0 has the store of; one thread for each."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
