"""Checks that ranks make together: for an error on any of them, for unequal values, and for a folder that hosts share.

`call_roll` compares facts (flags, versions) through the job's store, before ranks create process groups. Ranks with
different facts would compute wrong results, or wait for each other for ever. The other functions use an axis: all of
its ranks call a check together, and all of them get the same result or raise the same error.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megazpp.base.files import DamagedError
from megazpp.base.program import JobError, UserError, in_words
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.store import FirstFailure, RankInfo, store_of, wait_until

T = TypeVar("T")
Facts = tuple[str, Mapping[str, str]]  # name of a rank's host, and the rank's values by name
MOST_LINES = 10  # largest number of facts that an error message about differences lists
# Keys of the roll call in the store: the number of ranks that have written facts, and a sign that all facts are equal
ARRIVED, EQUAL = "arrived", "equal"


def call_roll(store: dist.Store, place: RankInfo, facts: Mapping[str, str], failure: FirstFailure) -> None:
    """Compare the facts of all ranks: values such as flags and versions, which must be equal on all ranks.

    Each rank of the job calls this, unless it has failed before (`report_failure`). Rank 0 waits for all ranks or for
    the first failure, and compares the facts. The other ranks wait for the result or for the first failure.

    Args:
        store: rendezvous store of the job.
        place: this process's rank and the number of ranks.
        facts: values that must be equal on all ranks, as text by name.
        failure: record of the job's first failure.
    Raises:
        UserError: on rank 0, if facts differ. The message has a line for each of the first MOST_LINES differences.
        JobError: another rank has failed.
    """
    if place.world_size == 1:
        return
    root = store_of(store, "roll_call")
    root.set(f"rank/{place.rank}", json.dumps([failure.host, dict(facts)]))
    root.add(ARRIVED, 1)
    if place.rank == 0:
        wait_until(lambda: root.add(ARRIVED, 0) == place.world_size or failure.is_known)
        if not failure.is_known:
            lines = in_lines(differences([json.loads(root.get(f"rank/{rank}")) for rank in range(place.world_size)]))
            if left := lines[MOST_LINES:]:
                lines[MOST_LINES:] = [f"and {len(left)} more differences"]
            if lines:
                raise UserError("\n".join(lines))
            root.set(EQUAL, "")
    wait_until(lambda: root.check([EQUAL]) or failure.is_known)
    if failure.is_known:
        raise JobError("another rank has failed")


def ranks_that_share(axis: MeshAxis, folder: Path, owner: int = 0) -> list[bool]:
    """Return for each rank of `axis` True if its host has the same folder as the rank `owner`. All ranks call this.

    Hosts without a shared file system have separate folders at one path. The owner creates a temporary subfolder, and
    every rank looks for it.

    Args:
        axis: axis over the ranks to compare, along which small objects are exchanged.
        folder: path of the folder, which exists on the owner's host.
        owner: index of the rank in `axis` that creates the subfolder.
    Raises:
        ValueError: the subfolder cannot be created; raised on all ranks.
    """
    own = raise_on_all_ranks(axis, lambda: tempfile.mkdtemp(prefix=".", dir=folder) if axis.rank == owner else "")
    marks = axis.gather_objects(own)
    mark = axis.share_object(Path(marks[owner]).name if marks else None)
    shares = axis.share_object(axis.gather_objects((folder / mark).is_dir()))
    if axis.rank == owner:
        Path(own).rmdir()
    return shares


def raise_on_all_ranks(axis: MeshAxis, work: Callable[[], T]) -> T:
    """Run `work` on every rank of `axis` and return its result. If `work` fails on one rank, raise on all ranks.

    Otherwise the other ranks would wait for ever, in their next collective, for the rank that has failed.

    Raises:
        ValueError: on all ranks, if `work` raised a ValueError or an OSError on any rank. The error's text has each
            different message once, with the hosts where it occurred if it did not occur on all hosts. If `work` raised
            a DamagedError on each rank where it failed, the error is a DamagedError.
    """
    result: T | None = None
    failure: tuple[type[ValueError], str] | None = None
    try:
        result = work()
    except (ValueError, OSError) as error:
        failure = DamagedError if isinstance(error, DamagedError) else ValueError, in_words(error)
    found = axis.share_object(axis.gather_objects((socket.gethostname(), failure)))
    failures = [(host, *failed) for host, failed in found if failed is not None]
    if failures:
        kinds, lines = {kind for _, kind, _ in failures}, list[str]()
        for text in dict.fromkeys(text for *_, text in failures):
            hosts = dict.fromkeys(host for host, _, other in failures if other == text)
            lines.append(text if hosts.keys() == {host for host, _ in found} else f"{text} (on {', '.join(hosts)})")
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        raise kind("\n".join(lines))
    return result  # type: ignore[return-value]


def find_differences(axis: MeshAxis, values: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Compare values that must be equal on all ranks of `axis`. All these ranks call this, and get the same result.

    Args:
        axis: axis of the ranks to compare.
        values: this rank's values by name.
    Returns:
        The result of `differences` for the values of all ranks: {} if they are equal.
    """
    found = axis.gather_objects((socket.gethostname(), dict(values)))
    shared: dict[str, dict[str, str]] = axis.share_object(differences(found, axis.ranks) if found else None)
    return shared


def check_equal_on_all_ranks(axis: MeshAxis, name: str, digest: str) -> None:
    """Check that a file or another input has the same content on all ranks of `axis`. All these ranks call this.

    Args:
        axis: axis of the ranks to compare.
        name: name of the compared input, with its flag and path, for the error message.
        digest: digest of the content on this rank.
    Raises:
        ValueError: the digest differs between ranks. All ranks raise the error.
    """
    # The key is not `name`, because `name` may contain another path on another rank.
    for places in find_differences(axis, {"content": digest}).values():
        raise ValueError(
            f"{name} must have the same content on all ranks, but differs between {', '.join(places.values())}: copy "
            "it from one host to the others"
        )


def differences(found: Sequence[Facts], ranks: Sequence[int] | None = None) -> dict[str, dict[str, str]]:
    """Return, by name, the values that differ between ranks: for each value the hosts and ranks that have it, as text.

    Args:
        found: host and values of each rank.
        ranks: numbers of the ranks; None for 0, 1, and so on.
    """
    hosts, unequal = dict(zip(ranks or range(len(found)), (host for host, _ in found), strict=True)), {}
    for name in dict.fromkeys(name for _, values in found for name in values):
        where: dict[str, list[int]] = {}
        for rank, (_, values) in zip(hosts, found, strict=True):
            where.setdefault(values.get(name, "not known"), []).append(rank)
        if len(where) > 1:
            unequal[name] = {value: _places(of_value, hosts) for value, of_value in where.items()}
    return unequal


def in_lines(unequal: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line of an error message about each value in the result of `differences`."""
    values = {name: ", ".join(f"{value} on {place}" for value, place in each.items()) for name, each in unequal.items()}
    return [f"{name} must be equal on all ranks, but is {text}" for name, text in values.items()]


def _places(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return at most three hosts of `ranks` as text, for example "alpha (rank 0) and beta (ranks 4 to 7)"."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    shown = [
        f"{host} ({f'rank {of_host[0]}' if len(of_host) == 1 else f'ranks {of_host[0]} to {of_host[-1]}'})"
        for host, of_host in by_host.items()
    ]
    return " and ".join(shown[:3]) + (f" and {len(shown) - 3} more hosts" if len(shown) > 3 else "")
