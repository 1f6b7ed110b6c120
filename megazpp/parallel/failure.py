"""Reports of failures before a rank has joined its job, to the other hosts, whose ranks would otherwise wait for it.

Such a failure may occur on one host only, for example because a file or a package is missing there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from megazpp.base.command_line import FlagParser, expand_flag_files, split_into_flags
from megazpp.base.files import HOME
from megazpp.base.launcher import find_launcher
from megazpp.base.program import EXIT_ERROR, LAUNCHER_PID, JobError, leave
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.hosts import Hosts
from megazpp.parallel.launch import hosts_of
from megazpp.parallel.store import CLAIM_SECONDS, FirstFailure, RankInfo, open_store

OPEN_SECONDS = 60.0  # longest time for which a rank that fails before it has joined waits until the job's store exists


def report_failure(error: JobError, argv: Sequence[str]) -> bool:
    """Print the error that ends this process, and tell the other hosts about it, if the job has several ranks or hosts.

    Call this if a check fails before `worker_process`. One rank of each host where the check fails prints the error.
    The function returns when the ranks or launchers of the other hosts know the error, or after a time limit.

    Args:
        error: error that ends this process.
        argv: arguments of the program, which may be wrong.
    Returns:
        False, without any output, if no launcher has started this process as one of several ranks, and `argv` does not
        request several hosts (--nnodes). Otherwise True.
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
        failure.write(f"rank {place.rank} on {failure.host}: {error}", error.exit_code)
        if place.local_rank != 0:
            error.show()
    failure.let_others_read(before_start=True)


def report_tracebacks() -> None:
    """Install an exception hook: if an exception ends this process during its start, tell the ranks of other hosts.

    Programs call this before most of their imports, because an import may fail on a host that lacks a package.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback of an uncaught exception as Python does, and tell the other hosts.

        A worker of MegaZ++'s launcher tells no other host, because the launcher notices its end. Nor does a process
        that the user has interrupted.
        """
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
