"""Megatron's flags that we do not have: ignored with a notice, or refused with a reason.

`megatron_flags.txt` is the data, one flag per line: name, number of values (as argparse writes it), verdict,
reason. The verdict is `ignored` (nothing here depends on it), `unsupported`, or `only=V`: ignored with the value V,
which asks for nothing, and unsupported with any other.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megazpp.flags import Given


class MegatronFlag(NamedTuple):
    """One line of the table; `arity` is a number, "?", "*" or "+"."""

    name: str
    arity: str
    verdict: str
    reason: str


def read_megatron_flags(path: Path | None = None) -> dict[str, MegatronFlag]:
    """The table by flag name.

    Args:
        path: another table than the one beside this file.
    """
    path = path or Path(__file__).with_suffix(".txt")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    flags = [MegatronFlag(*line.split(maxsplit=3)) for line in lines]
    return {flag.name: flag for flag in flags}


class Sifted(NamedTuple):
    """Flags that are ours, and a line for each one that was ignored."""

    flags: tuple[Given, ...]
    notices: tuple[str, ...]


def sift_flags(flags: Sequence[Given], supported: Collection[str], known: Mapping[str, MegatronFlag]) -> Sifted:
    """Take out the flags that have no effect here.

    Args:
        flags: as given, in order.
        supported: every spelling that the parser accepts.
        known: Megatron's other flags.
    Raises:
        ValueError: one line for each flag that is refused or that nobody knows.
    """
    kept, notices, problems = [], [], []
    for given in flags:
        if given.name in supported:
            kept.append(given)
        elif given.name not in known:
            problems.append(f"{given.origin}: {given.name} is not a flag{_nearest(given.name, supported, known)}")
        elif (problem := _refusal(given, known[given.name])) is not None:
            problems.append(f"{given.origin}: {problem}")
        else:
            notices.append(f"{given.origin}: {given.name} is ignored: {known[given.name].reason}")
    if problems:
        raise ValueError("\n".join(problems))
    return Sifted(tuple(kept), tuple(notices))


def _refusal(given: Given, flag: MegatronFlag) -> str | None:
    """Why `given` cannot be ignored; None if it can."""
    if flag.verdict == "unsupported":
        return f"{given.name} is a Megatron flag that is not supported: {flag.reason}"
    if not _takes(flag.arity, len(given.values)):
        return f"{given.name} takes {_count(flag.arity)}, not {len(given.values)}"
    wanted = flag.verdict.removeprefix("only=")
    if flag.verdict != wanted and given.values != (wanted,):
        return f"{given.name} {' '.join(given.values)} is not supported, only {wanted}: {flag.reason}"
    return None


def _takes(arity: str, count: int) -> bool:
    if arity.isdigit():
        return count == int(arity)
    return {"?": count <= 1, "*": True, "+": count >= 1}[arity]


def _count(arity: str) -> str:
    return {"0": "no value", "1": "one value", "?": "at most one value", "+": "at least one value"}.get(
        arity, f"{arity} values"
    )


def _nearest(name: str, supported: Collection[str], known: Mapping[str, MegatronFlag]) -> str:
    for names in (supported, known):
        if match := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
            return f"; did you mean {match[0]}?"
    return ""
