"""The job's store, through which the ranks find each other, and its record of the job's first failure.

| workers started by              | location of the store     | reachable from                                         |
|---------------------------------|---------------------------|--------------------------------------------------------|
| no launcher: a single process   | in the process            | nowhere                                                |
| this program                    | in the launching process  | this machine                                           |
| this program, with --nnodes     | in node 0's launcher      | the network, at --master-addr (hosts.py)               |
| torchrun                        | in torchrun               | the network: torch listens on every interface          |
| srun, mpirun, ..., or manually  | in rank 0, at MASTER_ADDR | the network, or this machine if MASTER_ADDR is loopback|

base/launcher.py lists the environment variables of each launcher. mpirun and similar launchers set no address. If they
start ranks on several nodes, the user must set MASTER_ADDR and MASTER_PORT.

Security: torch's store has no authentication. Any process that can connect to it can stop the job or join it, so on a
network it needs a firewall (SECURITY.md).

`FirstFailure` is a record in the store, by which the ranks and launchers of all hosts learn why the job ends. The first
process that fails claims it, writes its error there, and prints the error. The launcher of each other host (--nnodes),
or the first rank there, reads the record and prints it. All other ranks end silently.

| fault                                   | found by                   | claimed in                            |
|-----------------------------------------|----------------------------|---------------------------------------|
| wrong flags or files, a missing package | each rank, before it joins | failure.py                            |
| flags or versions differ between ranks  | rank 0                     | `call_roll` (agreement.py), worker.py |
| an exception, or a broken collective    | the rank                   | worker.py                             |
| a hang                                  | a rank's watchdog          | watchdog.py                           |

A rank that a signal kills can claim nothing. With --nnodes the launcher of its host claims the failure (hosts.py).
Otherwise the process that has started it ends the job: MegaZ++'s launcher, torchrun or srun.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megazpp.base.address import Address, is_loopback, listen, parse_host, parse_port, store_address
from megazpp.base.launcher import find_address, find_launcher
from megazpp.base.program import EXIT_ERROR, EXIT_SECONDARY, EXIT_USER_ERROR, LAUNCHER_PID, leave, say

# Environment variable with the number of restarts so far; torchrun and MegaZ++'s launcher both set it.
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Environment variable with the value "True" if the store is in the launching process, not in rank 0.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
POLL_SECONDS = 0.05  # time between two checks in `wait_until`
CONNECT_SECONDS = 2.0  # limit of one attempt to connect to the store
ANSWER_SECONDS = 10.0  # longest time for which a process waits for the other ranks if the store may end with it
# A rank whose collective breaks waits for this time before it claims the record of the first failure, so that the
# process that has failed first can claim the record. If a signal has killed that process, its launcher claims the
# record.
CLAIM_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The rank of a process in the job, or the number of workers that the process has to launch.

    Attributes:
        started: True if this process is a worker itself, False if it has to launch the workers.
        world_size: number of ranks in the job.
        rank: this process's rank, 0 if it is not a worker.
        local_rank: this process's index among the ranks of its node.
        launched_size: with --nnodes, the number of workers that this process has to launch on its host; otherwise None.
    """

    started: bool
    world_size: int
    rank: int = 0
    local_rank: int = 0
    launched_size: int | None = None


def loopback_store(listener: socket.socket, *, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """Return a new TCPStore whose server runs in this process and uses `listener`, a socket at a loopback address.

    Without `listener`, torch's TCPStore would listen on all network interfaces.
    """
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def open_store(place: RankInfo, timeout: timedelta, env: MutableMapping[str, str] = os.environ) -> dist.Store:
    """Create or connect to the store through which the ranks of the job find each other, and return the store.

    Args:
        place: this process's rank and the number of ranks. A single rank gets a store in its own memory.
        timeout: timeout of the rendezvous and of the store's operations.
        env: environment variables. If the launcher has not set MASTER_ADDR and MASTER_PORT, they are added to `env`.
    Raises:
        ValueError: MASTER_ADDR or MASTER_PORT is wrong, or the store cannot be reached within `timeout`.
    """
    if place.world_size == 1:
        return dist.HashStore()
    if (launched := find_launcher(env)) is not None:
        env.update(find_address(launched, env))
    host, port = parse_host(env["MASTER_ADDR"], "MASTER_ADDR"), parse_port(env["MASTER_PORT"], "MASTER_PORT")
    env["MASTER_ADDR"] = host  # torch does not understand the brackets of an IPv6 address
    if place.rank == 0 and is_loopback(host) and env.get(AGENT_STORE) != "True":
        return loopback_store(listen(Address(host, port)), timeout=timeout)
    if place.rank != 0 or env.get(AGENT_STORE) == "True":
        _wait_for_store(Address(host, port), timeout.total_seconds())
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    return store


def _wait_for_store(address: Address, seconds: float) -> None:
    """Wait until the job's store accepts connections.

    Without this wait, torch would print dozens of C++ frames if it cannot reach the store.

    Raises:
        ValueError: there was no connection within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{socket.gethostname()} has not reached the job's store at MASTER_ADDR {address.host} MASTER_PORT "
                    f"{address.port} within {seconds:.0f} s: {error.strerror or 'no answer'} (the address is wrong, "
                    "that machine or the link to it is down, or a firewall there drops the port)"
                ) from None
        time.sleep(POLL_SECONDS)


def is_on_one_machine(place: RankInfo, env: Mapping[str, str] = os.environ) -> bool:
    """Return True if environment variables show that all ranks of the job are on this machine.

    Call this after `open_store`, which sets MASTER_ADDR if the launcher has not set it.
    """
    local = env.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    return place.world_size == 1 or local or is_loopback(env.get("MASTER_ADDR", ""))


def store_of(store: dist.Store, use: str) -> dist.Store:
    """Return the part of the job's store for one use, such as "failure", which is empty after each restart."""
    return dist.PrefixStore(f"megazpp/{use}/{os.environ.get(RESTART_COUNT, '0')}", store)


class FirstFailure:
    """The record of the job's first failure, by which the ranks of all hosts learn why the job ends.

    Args:
        store: the job's store.
        place: this process's rank and the number of ranks.
        host: name of this host, which may not be unique; None uses the system's host name.
    """

    def __init__(self, store: dist.Store, place: RankInfo, *, host: str | None = None) -> None:
        self._store, self._place = store_of(store, "failure"), place
        self.host, self._key = host or socket.gethostname(), host_key(host)

    @property
    def is_known(self) -> bool:
        """True if the record has been written."""
        return self._store.check(["text"])

    @property
    def elsewhere(self) -> str | None:
        """The error of the first failure if it has occurred on another host.

        None if it has occurred on this host, or if no failure is recorded yet.
        """
        return self._read()[0] if self.is_known else None

    def _read(self) -> tuple[str | None, int]:
        """Return the recorded error, or None if it has occurred on this host, and the exit code of its process."""
        key, text, code = json.loads(self._store.get("text"))
        return None if key == self._key else text, code

    def claim(self) -> bool:
        """Return True if this process is the first to fail. It must then print its own error, and call `write`."""
        return self._store.add("claims", 1) == 1

    def write(self, text: str, exit_code: int = EXIT_ERROR) -> None:
        """Write the error of the first failure, which the other hosts print, and the exit code of its process."""
        self._store.set("text", json.dumps([self._key, text, exit_code]))

    def show_elsewhere(self) -> int:
        """On the first rank of each host where the failure did not occur, print the record as the reason to end.

        Workers of MegaZ++'s launcher print nothing, because the launchers of the other hosts print the record.

        Returns:
            The exit code with which this rank must end, EXIT_SECONDARY. If the failure is an error in the user's flags
            or files, the code is EXIT_USER_ERROR: srun returns the highest code of all ranks, and a script that calls
            it must not try again. MegaZ++'s launcher always gets EXIT_SECONDARY, by which it finds the failed rank.
        """
        text: str | None = f"the connection to rank 0's host ({store_address()}) was lost"
        code = EXIT_ERROR
        # An error means that the process with the store has ended, or that the link to it is down.
        with contextlib.suppress(Exception):
            if wait_until(lambda: self.is_known, 2 * CLAIM_SECONDS):
                text, code = self._read()
        if text is not None and self._place.local_rank == 0 and LAUNCHER_PID not in os.environ:
            say(f"\nrank {self._place.rank} on {self.host} ends: {text}")
        return EXIT_USER_ERROR if code == EXIT_USER_ERROR and LAUNCHER_PID not in os.environ else EXIT_SECONDARY

    @contextlib.contextmanager
    def ends_this_rank(self) -> Iterator[None]:
        """Return a context in which this process ends if another rank has failed.

        gloo waits in C++ code until all ranks have connected, and does not notice that one of them has ended. No other
        thread may use this object's connection to the store.
        """
        over = threading.Event()

        def watch() -> None:
            with contextlib.suppress(dist.DistError):  # the store's process has ended; the watchdog ends this rank
                while not over.wait(CLAIM_SECONDS / 2):
                    if self.is_known:
                        code = self.show_elsewhere()
                        self.let_others_read()
                        leave(code)

        threading.Thread(target=watch, name="megazpp-first-failure", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def let_others_read(self, *, before_start: bool = False) -> None:
        """Note that this rank has read the record. If the store may end with this process, wait for all other ranks.

        All ranks call this after a failure. The wait takes at most ANSWER_SECONDS. Without a launcher that hosts the
        store, rank 0's process hosts it. A rank that fails `before_start` waits too: a launcher such as torchrun, which
        hosts the store, ends as soon as one of its ranks ends, perhaps before slower ranks have connected to the store.
        """
        with contextlib.suppress(Exception):  # raised if the store's process has ended; then nobody waits for this rank
            self._store.add("read", 1)
            if before_start or (self._place.rank == 0 and os.environ.get(AGENT_STORE) != "True"):
                wait_until(lambda: self._store.add("read", 0) >= self._place.world_size, ANSWER_SECONDS)


def wait_until(condition: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Call `condition` every POLL_SECONDS until it is True or `seconds` have passed, and return its last result."""
    deadline = time.monotonic() + seconds
    while not (fulfilled := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return fulfilled


def kernel_of(root: Path = Path("/")) -> tuple[str, int]:
    """Return the boot ID of the running kernel, and the inode of this process's network namespace.

    They are "" and 0 if the system hides them. `root` is the parent folder of `proc`; tests pass a substitute.
    """
    boot_id, namespace = root / "proc/sys/kernel/random/boot_id", root / "proc/self/ns/net"
    return (
        boot_id.read_text(encoding="utf-8").strip() if boot_id.exists() else "",
        namespace.stat().st_ino if namespace.exists() else 0,
    )


def host_key(host: str | None = None) -> str:
    """Return a text that is equal in all processes of a host, and differs between hosts that have the same name.

    `host` is the name of this host; None uses the system's host name.
    """
    return f"{host or socket.gethostname()} {kernel_of()}"
