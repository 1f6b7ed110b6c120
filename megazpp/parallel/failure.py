"""The first failure of a job: the ranks of all hosts learn through the job's store why the job ends.

`FirstFailure` is a record in the store. The first rank that fails claims it, writes its error there, and prints the
error. The first rank of each other host reads the record and prints it. All other ranks end silently.

| fault                                   | found by                   | claimed in                            |
|-----------------------------------------|----------------------------|---------------------------------------|
| wrong flags or files, a missing package | each rank, before it joins | `report_failure`, `report_tracebacks` |
| flags or versions differ between ranks  | rank 0                     | `call_roll` (agreement.py), worker.py |
| an exception, or a broken collective    | the rank                   | worker.py                             |
| a hang                                  | a rank's watchdog          | watchdog.py                           |

A rank that a signal kills can claim nothing. The process that has started it notices this: MegaZ++'s launcher, torchrun
or srun. With --nnodes the launchers of the hosts tell each other (hosts.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from megazpp.base.address import store_address
from megazpp.base.command_line import FlagParser, expand_flag_files, split_into_flags
from megazpp.base.files import HOME
from megazpp.base.launcher import find_launcher
from megazpp.base.program import EXIT_ERROR, EXIT_SECONDARY, LAUNCHER_PID, JobError, leave, say
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.hosts import Hosts, host_key, wait_until
from megazpp.parallel.launch import AGENT_STORE, RESTART_COUNT, RankInfo, hosts_of, open_store

ANSWER_SECONDS = 10.0  # longest time for which a process that may take the store with it waits for the other ranks
OPEN_SECONDS = 60.0  # longest time for which a rank that fails before it has joined waits until the job's store exists
CLAIM_SECONDS = 1.0  # time for the rank that has failed first to claim the record, before other ranks may claim it


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
        self.host, self._key = host or socket.gethostname(), host or host_key()

    @property
    def is_known(self) -> bool:
        """True if a rank has written the record."""
        return self._store.check(["text"])

    def claim(self) -> bool:
        """Return True if this rank is the first to fail. It then prints its error, and calls `write`."""
        return self._store.add("claims", 1) == 1

    def write(self, text: str) -> None:
        """Write the error of the first failure, which the other hosts print."""
        self._store.set("text", json.dumps([self._key, text]))

    def show_elsewhere(self) -> None:
        """On the first rank of each host where the failure did not occur, print the record as the reason to end."""
        key, text = "", f"the connection to rank 0's host ({store_address()}) was lost"
        # An error means that the process with the store has ended, or that the link to it is down.
        with contextlib.suppress(Exception):
            if wait_until(lambda: self.is_known, 2 * CLAIM_SECONDS):
                key, text = json.loads(self._store.get("text"))
        if self._place.local_rank == 0 and key != self._key:
            say(f"\nrank {self._place.rank} on {self.host} ends: {text}")

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
                        self.show_elsewhere()
                        self.let_others_read()
                        leave(EXIT_SECONDARY)

        threading.Thread(target=watch, name="megazpp-first-failure", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def let_others_read(self, *, before_start: bool = False) -> None:
        """Note that this rank has read the record. If the store may end with this process, wait for all other ranks.

        Without a launcher that hosts the store, rank 0's process hosts it. A rank that fails `before_start` waits too:
        a launcher such as torchrun ends with the store as soon as one of its ranks ends, and slower ranks have not
        connected. All ranks call this after a failure.
        """
        with contextlib.suppress(Exception):  # raised if the store's process has ended; then nobody waits for this rank
            self._store.add("read", 1)
            if before_start or (self._place.rank == 0 and os.environ.get(AGENT_STORE) != "True"):
                wait_until(lambda: self._store.add("read", 0) >= self._place.world_size, ANSWER_SECONDS)


def report_failure(error: JobError, argv: Sequence[str]) -> bool:
    """If this process is one of several hosts' processes, print an error that ends it, and tell it to the other hosts.

    Call this if a check fails before `worker_process`. One rank of each host where it fails prints the error. The
    function returns when the other hosts have been told, or after a time limit.

    Args:
        error: error that ends this process.
        argv: arguments of the program, which may be wrong.
    Returns:
        False if no launcher has started this process as one of several ranks, and `argv` has no --nnodes. Nothing is
        printed then.
    """
    place = launched_place()
    if place is None:
        if (hosts := hosts_in(argv)) is None:
            return False
        error.show()
        hosts.tell(str(error))
        return True
    if place.local_rank == 0:
        error.show()
    try:
        failure = FirstFailure(open_store(place, timedelta(seconds=OPEN_SECONDS)), place)
        tell(failure, place, error)
    except (dist.DistError, OSError, RuntimeError, ValueError):
        # The job's store cannot be used, so ranks of other hosts are not told. Do not exit at once: a launcher kills
        # all ranks of this host as soon as one of them exits, and local rank 0 may still be printing the error.
        time.sleep(CLAIM_SECONDS)
    return True


def tell(failure: FirstFailure, place: RankInfo, error: JobError) -> None:
    """Claim the first failure for a rank that has not joined the job, and wait until the other ranks have read it.

    Local rank 0 has printed the error before. Any other rank gives local rank 0 time to claim the failure, and prints
    the error only if no rank has claimed it.
    """
    if place.local_rank != 0:
        time.sleep(CLAIM_SECONDS)
    if failure.claim():
        failure.write(f"rank {place.rank} on {failure.host}: {error}")
        if place.local_rank != 0:
            error.show()
    failure.let_others_read(before_start=True)


def report_tracebacks() -> None:
    """Install an exception hook: if an exception ends this process during its start, tell the ranks of other hosts.

    Programs call this before most of their imports, because an import may fail on a host that lacks a package.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback of an uncaught exception as Python does, and tell the other hosts."""
        sys.__excepthook__(kind, error, trace)
        if LAUNCHER_PID in os.environ or not issubclass(kind, Exception):
            return  # MegaZ++'s launcher notices the end of this process itself; an interrupt by the user is no failure
        if report_failure(JobError(f"{kind.__name__}: {error}"), sys.argv[1:]):
            leave(EXIT_ERROR)  # an ordinary exit would abort, if the thread of `Hosts.tell` is in a call on the store

    sys.excepthook = report


def launched_place() -> RankInfo | None:
    """Return this process's rank in a job of several ranks, from the variables that its launcher has set.

    Returns None if no known launcher has started this process, or if the job has a single rank.
    """
    try:
        launched = find_launcher()
    except ValueError:  # a launcher's variables are incomplete; `detect_rank_info` reports the missing one
        return None
    if launched is None or launched.world_size == 1:
        return None
    return RankInfo(started=True, world_size=launched.world_size, rank=launched.rank, local_rank=launched.local_rank)


def hosts_in(argv: Sequence[str]) -> Hosts | None:
    """Read --nnodes and its related flags from a command line whose other flags may be wrong, and return the `Hosts`.

    Returns None if these flags describe a single host, or are wrong themselves.
    """
    parser = FlagParser([LaunchConfig], program="")
    names = {"--nnodes", "--node-rank", "--master-addr", "--master-port"}
    try:
        flags = [each for each in split_into_flags(expand_flag_files(argv, HOME)) if each.name in names]
        (config,) = parser.read([word for each in flags for word in (each.name, *each.values)], HOME, {}).configs
        return hosts_of(config)
    except ValueError:
        return None
