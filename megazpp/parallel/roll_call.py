"""The roll call: before ranks create process groups, they compare flags and versions through the store.

Ranks with different flags or versions would compute wrong results, or wait for each other for ever. A rank whose
own checks have failed takes part as well, so the other hosts learn of the failure within seconds. The compared values
are called facts.

    1. Each rank writes its host and its facts.
    2. Rank 0 waits for all ranks, or for the first failure. It writes the verdict: the problem, or that there is none.
    3. Each rank reads the verdict. If there is a problem, one rank of each host prints it, and all ranks end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megazpp.base.command_line import FlagParser, expand_flag_files, split_into_flags
from megazpp.base.files import HOME
from megazpp.base.launcher import find_launcher
from megazpp.base.program import EXIT_ERROR, LAUNCHER_PID, JobError, leave
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.hosts import Hosts, host_key, wait_until
from megazpp.parallel.launch import RESTART_COUNT, RankInfo, hosts_of, open_store

# Limit of two waits: a rank that has failed waits for the verdict, and rank 0 waits until the other ranks have read a
# verdict that reports a problem.
ANSWER_SECONDS = 10.0
OPEN_SECONDS = 60.0  # longest time for which a rank that has failed waits until the job's store exists
CLAIM_SECONDS = 1.0  # time for local rank 0 of a host to print an error, before another rank of this host prints it
MOST_LINES = 10  # largest number of facts that an error message about differences lists
# Keys of the roll call in the store. ARRIVED counts ranks that have written facts, FAILED ranks that have failed, and
# HEARD ranks that have read the verdict. FAILURE has the first error, VERDICT the verdict of rank 0.
ARRIVED, FAILED, FAILURE, VERDICT, HEARD = "arrived", "failed", "failure", "verdict", "heard"


def call_roll(store: dist.Store, place: RankInfo, facts: Mapping[str, str], *, host: str | None = None) -> str | None:
    """Compare the facts of all ranks: values such as flags and versions, which must be equal on all ranks.

    Each rank of the job calls this, or `tell` if the rank has failed.

    Args:
        store: rendezvous store of the job.
        place: this process's rank and the number of ranks.
        facts: values that must be equal on all ranks, as text by name.
        host: name of this host; None uses the system's host name.
    Returns:
        A description of the differences, or the error of the first rank that has failed; None if no rank has failed and
        all facts are equal.
    """
    if place.world_size == 1:
        return None
    root, host = _root(store), host or socket.gethostname()
    root.set(f"rank/{place.rank}", json.dumps([host, dict(facts)]))
    root.add(ARRIVED, 1)
    if place.rank == 0:
        wait_until(lambda: root.add(ARRIVED, 0) == place.world_size or root.add(FAILED, 0) > 0)
        _write_verdict(root, place.world_size)
    return _read_verdict(root, place, math.inf)


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


def report_tracebacks() -> None:
    """Install an exception hook: if an exception ends this process during its start, tell the ranks of other hosts.

    Programs call this before most of their imports, because an import may fail on a host that lacks a package.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback of an uncaught exception as Python does, and tell the ranks of other hosts."""
        sys.__excepthook__(kind, error, trace)
        if LAUNCHER_PID in os.environ or not issubclass(kind, Exception):
            return  # MegaZ++'s launcher notices the end of this process itself; an interrupt by the user is no failure
        place, hosts, text = launched_place(), hosts_in(sys.argv[1:]), f"{kind.__name__}: {error}"
        if place is not None:
            report_failure(place, JobError(text))
        elif hosts is not None:
            hosts.tell(text)
            leave(EXIT_ERROR)  # an ordinary exit would abort, if the thread of `tell` is in a call on the store

    sys.excepthook = report


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


def report_failure(place: RankInfo, error: JobError) -> None:
    """Print the error that ends this rank during its start, and tell it to the ranks of other hosts.

    Call this if a check fails before `worker_process`. Only one rank of each host prints the error. The function
    returns when the other ranks have been told, or after a time limit.

    Args:
        place: this process's rank and the number of ranks.
        error: error that ends this rank.
    """
    if place.local_rank == 0:
        error.show()
    try:
        store = open_store(place, timedelta(seconds=OPEN_SECONDS))
        tell(store, place, error)
    except (dist.DistError, OSError, RuntimeError, ValueError):
        # The job's store cannot be used, so ranks of other hosts are not told. Do not exit at once: a launcher kills
        # all ranks of this host as soon as one of them exits, and local rank 0 may still be printing the error.
        time.sleep(CLAIM_SECONDS)


def tell(store: dist.Store, place: RankInfo, error: JobError, *, host: str | None = None) -> None:
    """Take part in a roll call for a rank that has failed: write its error instead of facts, and wait for the verdict.

    `report_failure` calls this function. On local rank 0 `report_failure` has printed the error before. Any other rank
    waits CLAIM_SECONDS here, and then prints the error if no rank of its host has called this function before.

    Args:
        store: rendezvous store of the job.
        place: this process's rank and the number of ranks.
        error: error that ends this rank.
        host: name of this host; None uses the system's host name.
    """
    root = _root(store)
    if place.local_rank != 0:
        time.sleep(CLAIM_SECONDS)
    if root.add(f"said/{host or host_key()}", 1) == 1 and place.local_rank != 0:
        error.show()
    if root.add(FAILED, 1) == 1:
        root.set(FAILURE, f"rank {place.rank} on {host or socket.gethostname()}: {error}")
    if place.rank == 0:
        _write_verdict(root, place.world_size)
    _read_verdict(root, place, ANSWER_SECONDS)


def show_once(store: dist.Store, error: JobError, *, host: str | None = None) -> None:
    """Print `error`, the problem that a roll call has found, unless another rank of this host has printed it."""
    if _root(store).add(f"said/{host or host_key()}", 1) == 1:
        error.show()


def _root(store: dist.Store) -> dist.Store:
    """Return the part of the job's store that the roll call uses, which is empty after each restart of the job."""
    return dist.PrefixStore(f"megazpp/roll_call/{os.environ.get(RESTART_COUNT, '0')}", store)


def _write_verdict(root: dist.Store, world_size: int) -> None:
    """Write the verdict of a roll call to its store `root`, for all `world_size` ranks. Only rank 0 calls this.

    The verdict is the error of the first rank that has failed, the differences between the facts of all ranks, or None.
    """
    # `get` waits for the error, because a failed rank increments FAILED before it writes its error.
    failed = root.add(FAILED, 0) > 0
    root.set(VERDICT, json.dumps(root.get(FAILURE).decode() if failed else _differences(root, world_size)))


def _read_verdict(root: dist.Store, place: RankInfo, seconds: float) -> str | None:
    """Wait for the verdict of a roll call, which rank 0 writes to the store, and return it.

    If the verdict is a problem, rank 0 waits until the other ranks have read it, because rank 0 may host the store.

    Args:
        root: store of the roll call.
        place: this process's rank and the number of ranks.
        seconds: longest time to wait for the verdict; infinite to wait until the watchdog ends the process.
    Returns:
        The problem; None if all is well or no verdict came within `seconds`.
    """
    if not wait_until(lambda: root.check([VERDICT]), seconds):
        return None
    problem: str | None = json.loads(root.get(VERDICT))
    root.add(HEARD, 1)
    if problem and place.rank == 0:
        with contextlib.suppress(dist.DistError):
            wait_until(lambda: root.add(HEARD, 0) == place.world_size, ANSWER_SECONDS)
    return problem


def _differences(root: dist.Store, world_size: int) -> str | None:
    """Compare the facts of all ranks in the store of the roll call.

    Returns:
        A line for each fact that differs between ranks, with all values and their hosts and ranks; None if all facts
        are equal.
    """
    found: list[tuple[str, dict[str, Any]]] = [json.loads(root.get(f"rank/{rank}")) for rank in range(world_size)]
    hosts, lines = [host for host, _ in found], []
    for name in dict.fromkeys(name for _, facts in found for name in facts):
        where: dict[str, list[int]] = {}
        for rank, (_, facts) in enumerate(found):
            where.setdefault(str(facts.get(name, "not known")), []).append(rank)
        if len(where) > 1:
            values = [f"{value} on {_places(ranks, hosts)}" for value, ranks in where.items()]
            lines.append(f"{name} must be equal on all ranks, but is {', '.join(values)}")
    left = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], *([f"and {left} more differences"] if left > 0 else [])]) or None


def _places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return at most three hosts of `ranks` as text, for example "alpha (rank 0) and beta (ranks 4 to 7)"."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    shown = [
        f"{host} ({f'rank {of_host[0]}' if len(of_host) == 1 else f'ranks {of_host[0]} to {of_host[-1]}'})"
        for host, of_host in by_host.items()
    ]
    return " and ".join(shown[:3]) + (f" and {len(shown) - 3} more hosts" if len(shown) > 3 else "")
