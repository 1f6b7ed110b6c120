"""Command-line flags as fields of frozen dataclasses.

A config is a frozen dataclass whose fields are made by `flag()`; its owner is the file that uses it. One field is
one flag: the field name with dashes (`micro_batch_size` is `--micro-batch-size`), its annotation gives the type
(`int`, `float`, `str`, `bool`, `Literal[...]`, `tuple[int, ...]`, each possibly `| None`), its default the default.
A bool gets both spellings, `--name` and `--no-name`, so that the command line can undo what a flag file set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FlagSpec:
    """What `flag()` leaves in a field's metadata.

    Attributes:
        help: one sentence: meaning, unit, cost.
        name: the flag's spelling when it is not the field name with dashes (`--override-opt_param-scheduler`).
        aliases: further accepted spellings (newer Megatron names, old ones).
        nargs: for tuple fields: a fixed count, "*" or "+".
        metavar: how the value is shown in --help.
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    nargs: int | str | None = None
    metavar: str | None = None


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    aliases: Sequence[str] = (),
    nargs: int | str | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is a command-line flag; see `FlagSpec` for the arguments."""
    spec = FlagSpec(help=help, name=name, aliases=tuple(aliases), nargs=nargs, metavar=metavar)
    return dataclasses.field(default=default, metadata={"flag": spec})
