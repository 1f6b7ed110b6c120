"""Tables of the flags of other projects, and the ends of messages about unknown flags.

Each line of `megatron_flags.txt` describes a flag of Megatron-LM that this program does not implement: name, number of
values as in argparse, verdict, reason. The verdicts are:

    ignored       the flag has no effect here
    unsupported   the flag is an error
    only=V        the flag is ignored with value V and an error with any other value

Each line of `other_flags.txt` has a flag of other projects, such as `--tp`, and the flags to use in its place.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

MEGATRON_TABLE = Path(__file__).with_name("megatron_flags.txt")
OTHERS_TABLE = Path(__file__).with_name("other_flags.txt")


class MegatronFlag(NamedTuple):
    """Flag of Megatron-LM that this program does not implement: one line of `megatron_flags.txt`."""

    name: str
    arity: str  # number of values as in argparse: a number, "?", "*" or "+"
    verdict: str  # "ignored", "unsupported" or "only=VALUE", which the module's docstring explains
    reason: str


@functools.cache
def read_megatron_flags() -> Mapping[str, MegatronFlag]:
    """Return the flags of Megatron-LM that this program does not implement, from `megatron_flags.txt`, by name."""
    return {flag.name: flag for flag in (MegatronFlag(*line.split(maxsplit=3)) for line in _lines(MEGATRON_TABLE))}


@functools.cache
def read_other_flags() -> Mapping[str, str]:
    """Return what to use in place of flags of other projects, from `other_flags.txt`, by flag."""
    return dict(line.split(maxsplit=1) for line in _lines(OTHERS_TABLE))


def _lines(table: Path) -> list[str]:
    """Return the lines of a table of flags, except comments and empty lines."""
    return [line for line in table.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]


def hint_for(name: str, supported: Collection[str], known: Collection[str]) -> str:
    """Return the end of the message about an unknown flag: what to use in its place, or similar flags; "" for neither.

    Args:
        name: the unknown flag.
        supported: names of this program's flags.
        known: names of the flags that only Megatron-LM has.
    """
    name = name.lower().replace("_", "-")
    remedies = {
        other: remedy
        for other, remedy in read_other_flags().items()
        if other not in supported and {*re.findall(r"--[\w-]+", remedy)} <= {*supported}
    }
    if name in remedies:
        return f": use {remedies[name]}"
    if (flag := "--" + name.removeprefix("--no-")) != name and flag in supported:
        return f": {flag} takes a value and cannot be switched off; give another value, or leave the flag out"
    near = (difflib.get_close_matches(name, names, n=2, cutoff=0.65) for names in (supported, remedies, known))
    meant = next(([remedies.get(flag, flag) for flag in names] for names in near if names), [])
    return f"; did you mean {' or '.join(dict.fromkeys(meant))}?" if meant else ""
