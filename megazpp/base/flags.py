"""Command-line flags as fields of frozen dataclasses: definition, checks, and rendering as text.

A config is a frozen dataclass whose fields are created by `flag()`. It is defined in the file that uses it.

- One field is one flag. The field `micro_batch_size` is the flag `--micro-batch-size`.
- The annotation is the type: `int`, `float`, `str`, `bool`, `Literal[...]`, `int | Literal["auto"]` or
  `tuple[int, ...]`, each optionally with `| None`.
- A bool has the two flags `--name` and `--no-name`.
- A field that may be None accepts the word `none`, so that the command line can undo a flag file.
- Floats are finite, and ints fit in 64 bits.

A config checks its own fields in its `__post_init__` with a ValueError that names flag and value. run/checks.py checks
combinations of configs and the cluster. command_line.py parses the flags.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

DEFAULT = "default"
COMMAND_LINE = "command line"  # origin of flags that the user has typed
CHECKPOINT = "checkpoint"  # origin of flags that a checkpoint has set
_WIDEST = 60  # maximum width to which flags in the log are padded before their origin


class FlagSpec(NamedTuple):
    """Description of a flag, which `flag()` stores in the field's metadata.

    Attributes:
        help: help text: meaning, unit, cost.
        name: name of the flag; None for the field name with dashes.
        aliases: further names of the flag.
        nargs: number of values of a tuple field: a fixed count, "*" or "+".
        metavar: placeholder for the value in --help; None for a placeholder by type.
        needs: flag without which this flag has no effect, such as `--plan`, optionally with the values that it must
            have, such as `--optimizer sgd`. Setting this flag is an error if the needed flag is off.
        common: whether --help lists the flag; --help-all lists all flags.
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    nargs: int | str | None = None
    metavar: str | None = None
    needs: str | None = None
    common: bool = False


def flag(default: Any, help: str, **spec: Any) -> Any:
    """Return a dataclass field that is a command-line flag.

    Args:
        default: default value of the field.
        help: help text of the flag.
        **spec: further attributes of `FlagSpec`.
    """
    return dataclasses.field(default=default, metadata={"flag": FlagSpec(help, **spec)})


def flag_name(field: dataclasses.Field[Any]) -> str:
    """Return the main name of a field's flag, including `--`."""
    spec: FlagSpec = field.metadata["flag"]
    return spec.name or "--" + field.name.replace("_", "-")


def config_title(config: type) -> str:
    """Return the first line of a config class's docstring, which is the title of its flags in --help."""
    return (config.__doc__ or config.__name__).strip().splitlines()[0].rstrip(".")


def check_positive(config: Any, *names: str) -> None:
    """Raise a ValueError for those of the fields `names` that are neither None nor a finite number above 0."""
    _check(config, names, lambda value: 0 < value < math.inf, "is not positive")


def check_not_negative(config: Any, *names: str) -> None:
    """Raise a ValueError for those of the fields `names` that are neither None nor at least 0."""
    _check(config, names, lambda value: value >= 0, "is negative")


def check_below_one(config: Any, *names: str) -> None:
    """Raise a ValueError for those of the fields `names` that are neither None nor at least 0 and below 1."""
    _check(config, names, lambda value: 0 <= value < 1, "is not in [0, 1)")


def _check(config: Any, names: Sequence[str], holds: Callable[[Any], bool], problem: str) -> None:
    """Raise a ValueError with flag, value and `problem` for each field that is not None and does not hold."""
    values = {name: getattr(config, name) for name in names}
    wrong = [name for name, value in values.items() if value is not None and not holds(value)]
    if wrong:
        raise ValueError("\n".join(f"{spelling(config, name)} {values[name]} {problem}" for name in wrong))


def spelling(config: Any, name: str) -> str:
    """Return the flag, such as `--micro-batch-size`, of the field `name` of a config or config class."""
    return next(flag_name(field) for field in dataclasses.fields(config) if field.name == name)


def in_use(config: Any, name: str, value: Any) -> str:
    """Return a flag with the value in use, for a message; the text says so if the user has not set this value."""
    return f"{spelling(config, name)} {value}" + ("" if getattr(config, name) == value else " (derived, not set)")


def asks(value: Any) -> bool:
    """Return whether a flag's value enables something: every value except None, False and (), so also the number 0."""
    return not (value is None or value is False or value == ())


def check_words(config: Any) -> None:
    """Raise a ValueError for the first field with a `Literal` type whose value is not one of the literals."""
    for name, hint in type_hints(config.__class__).items():
        value, words = getattr(config, name), _words(hint)
        if words and not _has_type(value, hint):
            raise ValueError(f"{spelling(config, name)} {as_words(value)} is not one of {', '.join(map(str, words))}")


type_hints = functools.cache(typing.get_type_hints)


def _words(hint: Any) -> list[Any]:
    """Return all literals in a type annotation."""
    parts = typing.get_args(hint)
    return [*parts] if typing.get_origin(hint) is Literal else [word for part in parts for word in _words(part)]


def shown(value: Any) -> str:
    """Return the start of a value's `repr`, in time and memory that do not depend on the value's size."""
    bounded = reprlib.Repr()
    bounded.maxstring = bounded.maxother = 80
    return f"{bounded.repr(value):.80}"


def wrong_types(config: type, values: dict[str, Any]) -> list[str]:
    """Return one line per value whose type does not match the dataclass field of the same name.

    Args:
        config: dataclass with annotated fields.
        values: values decoded from JSON, by field name. Names without a field are ignored.
    """
    hints = type_hints(config)
    return [
        f"{name} is {shown(value)}, not {getattr(hints[name], '__name__', None) or hints[name]}"
        for name, value in values.items()
        if name in hints and not _has_type(value, hints[name])
    ]


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether `value`, decoded from JSON, has the type `hint`.

    An int is accepted as a float and a list as a tuple. A bool is not accepted as a number.
    """
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
    """Return whether an annotation is a union, written as `X | Y` or `Optional[X]`."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def render_flags(configs: Sequence[Any], origins: Mapping[str, str]) -> str:
    """Return the text of a flag file with all flags: one line `--name value  # origin` each, grouped by config.

    Args:
        configs: configs to render.
        origins: origin of each flag that is set, by field name: "command line", "file:line" or "checkpoint". Other
            flags are marked as "default".
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
    """Return the log's block of flags that differ from their defaults, framed by Megatron-LM's two dashed lines.

    Each line is `--name value  # origin`, with `origins` as in `render_flags`.
    """
    fields = [(config, field) for config in configs for field in dataclasses.fields(config)]
    changed = [(config, field) for config, field in fields if getattr(config, field.name) != field.default]
    lines = [(as_written(config, field), origins.get(field.name, DEFAULT)) for config, field in changed]
    width = min(max((len(text) for text, _ in lines), default=0), _WIDEST)
    shown = [f"  {text:<{width}}  # {origin}" for text, origin in lines]
    shown.append(f"  and {len(fields) - len(lines)} flags at their defaults: --print-config shows all")
    title = "------------------------ arguments ------------------------"
    return "\n".join([title, *shown, "-------------------- end of arguments ---------------------"])


def check_needs(configs: Sequence[Any], origins: Mapping[str, str]) -> None:
    """Raise a ValueError for flags that have no effect because the flag that they need is off (`FlagSpec.needs`).

    Only flags that the user has set are checked, not the values of a checkpoint or of an objective. Two kinds of such
    flags in flag files are accepted. If the command line itself sets the needed flag, a file's dependent flags may
    remain. Flags with their default values may remain too, because the args.txt of a run has them.

    Args:
        configs: the configs, in which every flag has its final value.
        origins: origin of each flag that is set, by field name.
    """
    problems = []
    fields = {flag_name(field): (config, field) for config in configs for field in dataclasses.fields(config)}
    for config, field in fields.values():
        origin, spec, value = origins.get(field.name), field.metadata["flag"], getattr(config, field.name)
        feature, *allowed = (spec.needs or "none").split()
        is_off = value is None or (value is False and not field.default)
        if feature not in fields or origin is None or origin.startswith((CHECKPOINT, DEFAULT)) or is_off:
            continue
        owner, other = fields[feature]
        state = getattr(owner, other.name)
        stays = value == field.default or origins.get(other.name) == COMMAND_LINE
        if not (state in allowed if allowed else state) and (origin == COMMAND_LINE or not stays):
            instead = f", not {as_words(state)}" if allowed and state is not None else ""
            problems.append(f"{origin}: {as_written(config, field)} needs {spec.needs}{instead}")
    if problems:
        raise ValueError("\n".join(problems))


def as_written(config: Any, field: dataclasses.Field[Any]) -> str:
    """Return the flag of a field with its value in flag-file syntax, such as `--lr 0.0003` or `--no-bf16`."""
    name, value = flag_name(field), getattr(config, field.name)
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    if isinstance(value, tuple):
        return " ".join([name, *(shlex.quote(str(item)) for item in value)])
    word = as_words(value)
    return f"{name}{'=' if word.startswith(('-', '@')) else ' '}{shlex.quote(word)}"


def as_words(value: Any) -> str:
    """Return a flag's value as text, without shell quotes; None becomes `none`."""
    if value is None:
        return "none"
    return " ".join(map(as_words, value)) if isinstance(value, tuple) else str(value)
