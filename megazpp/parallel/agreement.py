"""Checks that ranks make together: for an error on any of them, for unequal values, and for a folder that hosts share.

All ranks of an axis call a check together, and all of them get the same result or raise the same error.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from megazpp.base.files import DamagedError
from megazpp.base.program import in_words
from megazpp.parallel.axis import MeshAxis

T = TypeVar("T")


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
    except ValueError as error:
        failure = DamagedError if isinstance(error, DamagedError) else ValueError, in_words(error)
    except OSError as error:
        failure = ValueError, f"rank {axis.rank}: {in_words(error)}"
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


def find_difference(axis: MeshAxis, values: Mapping[str, str]) -> tuple[str, dict[str, tuple[str, str]]] | None:
    """Compare values that must be equal on all ranks of `axis`. All these ranks call this, with the same names.

    Args:
        axis: axis of the ranks to compare.
        values: this rank's values by name.
    Returns:
        None if all ranks have equal values. Otherwise a pair about the axis's first rank and the first rank that
        differs from it: the text "rank N on HOST and rank M on HOST", and for each name whose values differ the two
        values. All ranks return the same result.
    """
    found = axis.share_object(axis.gather_objects((socket.gethostname(), dict(values))))
    first, expected = found[0]
    for rank, (host, given) in enumerate(found):
        if differ := {name: (value, given[name]) for name, value in expected.items() if given[name] != value}:
            return f"rank {axis.ranks[0]} on {first} and rank {axis.ranks[rank]} on {host}", differ
    return None


def check_equal_on_all_ranks(axis: MeshAxis, name: str, digest: str) -> None:
    """Check that a file or another input has the same content on all ranks of `axis`. All these ranks call this.

    Args:
        axis: axis of the ranks to compare.
        name: name of the compared input, with its flag and path, for the error message.
        digest: digest of the content on this rank.
    Raises:
        ValueError: a rank has another digest than the first one. All ranks raise the error.
    """
    # The key is not `name`, because `name` may contain another path on another rank.
    if difference := find_difference(axis, {"content": digest}):
        raise ValueError(
            f"{name} must have the same content on all ranks, but differs between {difference[0]}: copy it from one "
            "host to the others"
        )
