"""The roll call: before ranks make process groups, they compare through the store what has to be equal on all of them.

Ranks that were started with different flags, data or versions would train wrong numbers, or wait for each other for
ever. A rank whose checks have failed answers too, so the other hosts learn of it within seconds.

    1. Each rank writes its host and a digest of its facts. The first rank with a digest also writes the facts.
    2. Rank 0 waits for all ranks, or for the first failure, and writes the verdict.
    3. Each rank reads the verdict. If it names a problem, one rank of each host prints it, and all ranks end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from megazpp.base.program import LAUNCHER_PID, JobError
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.hosts import Hosts
from megazpp.parallel.launch import RESTART_COUNT, RankInfo, hosts_of, open_store

POLL_SECONDS = 0.05
ANSWER_SECONDS = 10.0  # time in which a rank that has failed waits for the verdict, and rank 0 for readers of it
OPEN_SECONDS = 60.0  # time in which a rank that has failed waits for the store
CLAIM_SECONDS = 1.0  # time for the first rank of a host to print an error, before its other ranks may
MOST_LINES = 10  # largest number of different facts that a message lists
ARRIVED, FAILED, FAILURE, VERDICT, HEARD = "arrived", "failed", "failure", "verdict", "heard"  # keys in the store


def call_roll(
    store: dist.Store, place: RankInfo, facts: Mapping[str, str], *, name: str, host: str | None = None
) -> str | None:
    """Compare the facts of all ranks, which all call this; return the problem, or None if there is none.

    Args:
        store: store of the job.
        place: this process's place in the job.
        facts: values that must be equal on all ranks, as text by name.
        name: name of the roll call; each has its own.
        host: name of this host; None asks the system.
    """
    if place.world_size == 1:
        return None
    root, host = dist.PrefixStore(f"megazpp/roll_call/{name}", store), host or socket.gethostname()
    text = json.dumps(dict(facts))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    if root.add(f"have/{digest}", 1) == 1:
        root.set(f"facts/{digest}", text)
    root.set(f"rank/{place.rank}", json.dumps([host, digest]))
    root.add(ARRIVED, 1)
    if place.rank == 0:
        while root.add(ARRIVED, 0) < place.world_size and root.add(FAILED, 0) == 0:
            time.sleep(POLL_SECONDS)
        failed = root.add(FAILED, 0) > 0
        _answer(root, _read_failure(root) if failed else _differences(root, place.world_size))
    return _verdict(root, place, None)


def roll_call_at_start() -> str:
    """Return the name of the roll call before the process group exists, in this attempt of the job."""
    return f"start/{os.environ.get(RESTART_COUNT, '0')}"


def launched_place() -> RankInfo | None:
    """Return the place of this process in a job of several ranks; None if it is alone or the launcher is unknown."""
    try:
        launched = find_launcher()
    except ValueError:  # a launcher's variables are incomplete; the start of this rank reports which
        return None
    if launched is None or launched.world_size == 1:
        return None
    return RankInfo(started=True, world_size=launched.world_size, rank=launched.rank, local_rank=launched.local_rank)


def report_tracebacks() -> None:
    """Tell the ranks of other hosts from now on about an exception that ends this process before the group exists.

    Programs call it before most of their imports, because one host may lack a package.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        if LAUNCHER_PID in os.environ or not issubclass(kind, Exception):
            return  # our own launcher sees this process end
        place, hosts, text = launched_place(), hosts_in(sys.argv[1:]), f"{kind.__name__}: {error}"
        if place is not None:
            report_failure(place, JobError(text), name=roll_call_at_start())
        elif hosts is not None:
            hosts.tell(text)

    sys.excepthook = report


def hosts_in(argv: Sequence[str]) -> Hosts | None:
    """Return the hosts of --nnodes on a command line whose other flags may be wrong; None without several hosts."""
    parser = FlagParser([LaunchConfig], program="")
    names = {"--nnodes", "--node-rank", "--master-addr", "--master-port"}
    try:
        flags = [each for each in split_into_flags(expand_flag_files(argv, HOME)) if each.name in names]
        (config,) = parser.read([word for each in flags for word in (each.name, *each.values)], HOME, {}).configs
        return hosts_of(config)
    except ValueError:  # these flags are wrong themselves
        return None


def report_failure(place: RankInfo, error: JobError, *, name: str) -> None:
    """Print the error of this rank, unless another rank of this host does, and tell it to the ranks of other hosts.

    Call it where a check fails before `worker_process`. It returns when the other ranks know, or do not ask in time.

    Args:
        place: this process's place in the job.
        error: the error.
        name: name of the roll call in which the other ranks take part.
    """
    if place.local_rank == 0:
        error.show()
    try:
        store = open_store(place, timedelta(seconds=OPEN_SECONDS))
        tell(store, place, error, name=name)
    except (dist.DistError, OSError, RuntimeError, ValueError):  # nobody else is there, or can be reached
        time.sleep(CLAIM_SECONDS)  # a launcher kills the first rank, which prints, as soon as another rank exits


def tell(store: dist.Store, place: RankInfo, error: JobError, *, name: str, host: str | None = None) -> None:
    """Take part in a roll call with an error instead of facts; see `report_failure`."""
    root, host = dist.PrefixStore(f"megazpp/roll_call/{name}", store), host or socket.gethostname()
    if place.local_rank != 0:
        time.sleep(CLAIM_SECONDS)
    if root.add(f"said/{host}", 1) == 1 and place.local_rank != 0:
        error.show()
    if root.add(FAILED, 1) == 1:
        root.set(FAILURE, json.dumps(f"rank {place.rank} on {host}: {error}"))
    if place.rank == 0:
        _answer(root, _read_failure(root))
    _verdict(root, place, ANSWER_SECONDS)


def show_once(store: dist.Store, error: JobError, *, name: str, host: str | None = None) -> None:
    """Print the problem of a roll call, unless another rank of this host has printed it."""
    root, host = dist.PrefixStore(f"megazpp/roll_call/{name}", store), host or socket.gethostname()
    if root.add(f"said/{host}", 1) == 1:
        error.show()


def _answer(root: dist.Store, problem: str | None) -> None:
    root.set(VERDICT, json.dumps(problem))


def _verdict(root: dist.Store, place: RankInfo, seconds: float | None) -> str | None:
    """Return the verdict of rank 0. Rank 0 stays until the others have read a problem, because it may host the store.

    Args:
        root: store of the roll call.
        place: this process's place in the job.
        seconds: time to wait for the verdict; None waits as long as the watchdog lets this rank live.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while not root.check([VERDICT]):
        if deadline is not None and time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)
    problem = json.loads(root.get(VERDICT))
    root.add(HEARD, 1)
    end = time.monotonic() + ANSWER_SECONDS
    with contextlib.suppress(dist.DistError):
        while problem and place.rank == 0 and root.add(HEARD, 0) < place.world_size and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
    return None if problem is None else str(problem)


def _read_failure(root: dist.Store) -> str:
    """Return the first failure that a rank has told."""
    while not root.check([FAILURE]):  # the rank has counted itself, and writes its text next
        time.sleep(POLL_SECONDS)
    return str(json.loads(root.get(FAILURE)))


def _differences(root: dist.Store, world_size: int) -> str | None:
    """Return a line for each fact that differs between ranks, with all values, hosts and ranks; None without any."""
    ranks: dict[str, list[int]] = {}
    hosts: dict[int, str] = {}
    for rank in range(world_size):
        hosts[rank], digest = json.loads(root.get(f"rank/{rank}"))
        ranks.setdefault(digest, []).append(rank)
    if len(ranks) == 1:
        return None
    facts: dict[str, dict[str, Any]] = {digest: json.loads(root.get(f"facts/{digest}")) for digest in ranks}
    lines = []
    for name in dict.fromkeys(name for of_digest in facts.values() for name in of_digest):
        where: dict[str, list[int]] = {}
        for digest, members in ranks.items():
            where.setdefault(str(facts[digest].get(name, "not known")), []).extend(members)
        if len(where) > 1:
            values = [f"{value} on {_places(sorted(members), hosts)}" for value, members in where.items()]
            lines.append(f"{name} must be equal on all ranks, but is {', '.join(values)}")
    left = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], *([f"and {left} more differences"] if left > 0 else [])])


def _places(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return ranks with their hosts, for example "alpha (rank 0) and beta (ranks 4 to 7)"."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    shown = [
        f"{host} ({f'rank {of_host[0]}' if len(of_host) == 1 else f'ranks {of_host[0]} to {of_host[-1]}'})"
        for host, of_host in by_host.items()
    ]
    return " and ".join(shown[:3]) + (f" and {len(shown) - 3} more hosts" if len(shown) > 3 else "")
