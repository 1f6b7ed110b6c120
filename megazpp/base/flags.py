"""Command-line flags as fields of frozen dataclasses: defined, checked, written down.

A config is a frozen dataclass whose fields are made by `flag()`; its owner is the file that uses it. One field
is one flag: the field name with dashes (`micro_batch_size` is `--micro-batch-size`), its annotation gives the
type (`int`, `float`, `str`, `bool`, `Literal[...]`, `int | Literal["auto"]`, `tuple[int, ...]`, each possibly
`| None`; `int | tuple[int, ...]` where in Python one value may stand for a tuple of one), its default the default. A
bool gets both spellings, `--name` and `--no-name`, and a field that may be None accepts the word `none`, so that the
command line can undo a flag file. A float is finite, an int fits 64 bits.

A config checks itself in its `__post_init__`, by a ValueError that names flag and value; checks.py checks several
together, and against the machine. command_line.py reads the flags.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

DEFAULT = "default"
_WIDEST = 60  # of a line in the log, up to the origin


class FlagSpec(NamedTuple):
    """The entry of `flag()` in a field's metadata.

    Attributes:
        help: one sentence: meaning, unit, cost.
        name, aliases: the flag's spelling if it is not the field name with dashes, and further ones.
        nargs: for tuple fields: a fixed count, "*" or "+".
        metavar: what --help shows for a value, if not its type.
        needs: the flag without which this one would change nothing, `--lora-r`, or with its values `--optimizer sgd`:
            given by hand where that is off, this one is refused.
        common: True if a first run may need the flag: `--help` shows common flags, `--help-all` shows all.
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    nargs: int | str | None = None
    metavar: str | None = None
    needs: str | None = None
    common: bool = False


def flag(default: Any, help: str, **spec: Any) -> Any:
    """Make a dataclass field that is a command-line flag; `spec` is the rest of a `FlagSpec`."""
    return dataclasses.field(default=default, metadata={"flag": FlagSpec(help, **spec)})


def flag_name(field: dataclasses.Field[Any]) -> str:
    """The flag's main spelling, `--` included."""
    spec: FlagSpec = field.metadata["flag"]
    return spec.name or "--" + field.name.replace("_", "-")


def config_title(config: type) -> str:
    """The first line of a config's docstring."""
    return (config.__doc__ or config.__name__).strip().splitlines()[0].rstrip(".")


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields whose value is given and not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{spelling(config, name)} {value} is not positive")


def check_not_negative(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields whose value is given and not at least 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{spelling(config, name)} {value} is negative")


def spelling(config: Any, name: str) -> str:
    """The flag of a config's field, as it is written."""
    return next(flag_name(field) for field in dataclasses.fields(config) if field.name == name)


def asks(value: Any) -> bool:
    """True if a flag's value asks for something: a number does, also 0."""
    return not (value is None or value is False or value == ())


def check_words(config: Any) -> None:
    """Raises ValueError for the first field of words (`Literal`) whose value has another than these."""
    for name, hint in type_hints(config.__class__).items():
        value, words = getattr(config, name), _words(hint)
        if words and not _has_type(value, hint):
            raise ValueError(f"{spelling(config, name)} {as_words(value)} is not one of {', '.join(map(str, words))}")


type_hints = functools.cache(typing.get_type_hints)


def _words(hint: Any) -> list[Any]:
    parts = typing.get_args(hint)
    return [*parts] if typing.get_origin(hint) is Literal else [word for part in parts for word in _words(part)]


def wrong_types(config: type, values: dict[str, Any]) -> list[str]:
    """A line for each of `values`, as JSON has them, that a field of this dataclass cannot hold; others are ignored."""
    hints = type_hints(config)
    return [
        f"{name} is {value!r:.80}, not {getattr(hints[name], '__name__', None) or hints[name]}"
        for name, value in values.items()
        if name in hints and not _has_type(value, hints[name])
    ]


def _has_type(value: Any, hint: Any) -> bool:
    """True if `value` is of the type `hint`; an int is a float, but no bool is a number, and a list is a tuple."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if is_union(hint):
        return any(_has_type(value, part) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind in (tuple, list, dict):
        if not isinstance(value, (tuple, list) if kind is tuple else kind):
            return False
        items = [*value.values()] if isinstance(value, dict) else value
        fixed = kind is tuple and parts[-1] is not ...
        hints = parts if fixed else [parts[1 if kind is dict else 0]] * len(items)
        return len(items) == len(hints) and all(map(_has_type, items, hints))
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def is_union(hint: Any) -> bool:
    """True for `X | Y` and `Optional[X]`."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def render_flags(configs: Sequence[Any], origins: Mapping[str, str]) -> str:
    """One line per flag, `--name value  # origin`, aligned and grouped by config; reads back as a flag file.

    `origins` has "command line" or "file:line" by field name; fields that are not in it have their default.
    """
    groups = [[(as_written(c, f), origins.get(f.name, DEFAULT)) for f in dataclasses.fields(c)] for c in configs]
    width = max((len(text) for lines in groups for text, _ in lines), default=0)
    return (
        "\n\n".join(
            "\n".join([f"# {config_title(type(config))}", *(f"{text:<{width}}  # {origin}" for text, origin in lines)])
            for config, lines in zip(configs, groups, strict=True)
        )
        + "\n"
    )


def render_arguments_block(configs: Sequence[Any], origins: Mapping[str, str]) -> str:
    """The flags that differ from their defaults, `--name value  # origin`, between Megatron's two dashed lines."""
    fields = [(config, field) for config in configs for field in dataclasses.fields(config)]
    changed = [(config, field) for config, field in fields if getattr(config, field.name) != field.default]
    lines = [(as_written(config, field), origins.get(field.name, DEFAULT)) for config, field in changed]
    width = min(max((len(text) for text, _ in lines), default=0), _WIDEST)
    shown = [f"  {text:<{width}}  # {origin}" for text, origin in lines]
    shown.append(f"  and {len(fields) - len(lines)} flags at their defaults: --print-config shows all")
    title = "------------------------ arguments ------------------------"
    return "\n".join([title, *shown, "-------------------- end of arguments ---------------------"])


def as_written(config: Any, field: dataclasses.Field[Any]) -> str:
    """The flag of a field with its value, as a flag file has it: `--lr 0.0003`, `--no-bf16`."""
    name, value = flag_name(field), getattr(config, field.name)
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    if isinstance(value, tuple):
        return " ".join([name, *(shlex.quote(str(item)) for item in value)])
    word = as_words(value)
    return f"{name}{'=' if word.startswith(('-', '@')) else ' '}{shlex.quote(word)}"


def as_words(value: Any) -> str:
    """A value as it is written after its flag."""
    if value is None:
        return "none"
    return " ".join(map(as_words, value)) if isinstance(value, tuple) else str(value)
