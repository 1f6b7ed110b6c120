"""Command-line flags as fields of frozen dataclasses: definition, checks, and rendering as text.

A config is a frozen dataclass, derived from `Config`, whose fields are created by `flag()`. Each config is defined in
the file that uses it.

- One field is one flag. The field `micro_batch_size` is the flag `--micro-batch-size`.
- The annotation is the type: `int`, `float`, `str`, `bool`, `Literal[...]`, `int | Literal["auto"]` or
  `tuple[int, ...]`, each optionally with `| None`.
- A bool has the two flags `--name` and `--no-name`.
- The section "Attributes:" of the class's docstring has the text for --help: meaning, unit and cost of each field.
- A field that may be None accepts the word `none`, so that the command line can undo a flag file.
- Floats are finite, and ints fit in 64 bits.

A config checks its own fields when it is created, and raises a ValueError that names flag and value. `Config` checks
each field by its type and its `must_be`. The `__post_init__` of a config checks several fields together.
run/flag_checks.py and run/checks.py check combinations of configs and the cluster. command_line.py parses the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import math
import re
import reprlib
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

DEFAULT = "default"
COMMAND_LINE = "command line"  # origin of flags that the user has typed
# Endings of the names of fields whose values --help calls PATH
PATH_ENDS = ("path", "file", "dir", "folder", "model", "save", "load")
# Endings of the names of fields whose values are paths, which `checked_path` checks. Ranks do not compare these fields
# (`facts_of` in run/start.py), because paths may differ between hosts.
PATHS = (*PATH_ENDS, "store", "patches", "input", "output", "adapter", "prefix", "lora_base")
CHECKPOINT = "checkpoint"  # origin of flags that a checkpoint has set
# For `FlagSpec.most`: the largest number of processes that a flag may start on one machine, and the words with which an
# error message explains this limit. Each process loads this program and its libraries, which takes memory.
MOST_PROCESSES = 1024, "the limit for processes on one machine"
_WIDEST = 60  # the log pads a flag and its value to at most this many characters before the origin


class FlagSpec(NamedTuple):
    """Description of a command-line flag, which `flag()` stores in the metadata of a config's field.

    Attributes:
        name: name of the flag, with `--`; None for the field's name with dashes.
        aliases: further names of the flag.
        nargs: number of values of a tuple field: a fixed count, "*" or "+"; None for the number that the field's type
            allows.
        metavar: placeholder for the value in --help; None for a placeholder that follows from the field's type.
        needs: another flag without which this flag has no effect, such as `--plan`, optionally followed by the values
            that the other flag must have, such as `--optimizer sgd`. Setting this flag is an error if the other flag is
            off.
        required: True if a command line without this flag is an error. The field's default is then None.
        common: True if --help lists the flag; --help-all lists all flags.
        per_host: True if ranks on several hosts may have different values. The ranks compare all other flags.
        shape: for a field of `GPTConfig`: False if it affects neither the shapes nor the meaning of the weights; True
            if a run and its checkpoint must have equal values of the field. A string is the name of the property of
            `GPTConfig` to compare instead, for a field that may be None, or if several flags set the same property.
        must_be: range of a number, or of each number in a tuple, see `_RANGES`; None for any number.
        most: largest value of a number, and the words that say what limits it; None for no limit.
        must_exist: True if the value, or each of several, is the path of a file or folder without which the program
            cannot work.
    """

    name: str | None = None
    aliases: tuple[str, ...] = ()
    nargs: int | str | None = None
    metavar: str | None = None
    needs: str | None = None
    required: bool = False
    common: bool = False
    per_host: bool = False
    shape: bool | str = True
    must_be: Literal["positive", "not negative", "below one", "a share", "at least one"] | None = None
    most: tuple[float, str] | None = None
    must_exist: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A frozen dataclass whose fields are flags, and which checks the value of each field by itself."""

    def __post_init__(self) -> None:
        """Raise a ValueError if a field has none of the words of its `Literal` type, or is out of its range.

        The message has one line per such field. `FlagSpec.must_be` and `FlagSpec.most` give the range; None is in every
        range. Subclasses extend this method by checks of several fields.
        """
        config: type = type(self)
        problems, hints = list[str](), type_hints(config)
        for field in dataclasses.fields(self):
            value, hint, spec = getattr(self, field.name), hints[field.name], field.metadata["flag"]
            given = f"{flag_name(field)} {as_words(value)}"
            if (words := _words(hint)) and not _has_type(value, hint):
                problems.append(f"{given} is not one of {', '.join(map(str, dict.fromkeys(words)))}")
            elif isinstance(value, str | None):
                continue
            elif spec.most is not None and value > spec.most[0]:
                problems.append(f"{given} is more than {spec.most[0]}, {spec.most[1]}; give a smaller number")
            elif spec.must_be is not None:
                holds, problem, remedy = _RANGES[spec.must_be]
                wrong = [number for number in (value if isinstance(value, tuple) else (value,)) if not holds(number)]
                if wrong:
                    problems.append(f"{given} is {'not a number' if math.isnan(wrong[0]) else problem}; give {remedy}")
        if problems:
            raise ValueError("\n".join(problems))


# For each value of `FlagSpec.must_be`: the condition, which is False for NaN, and two texts for the error message. The
# first text describes a wrong number, the second one the numbers that are allowed.
_RANGES: dict[str, tuple[Callable[[float], bool], str, str]] = {
    "positive": (lambda value: 0 < value < math.inf, "not positive", "a finite number above 0"),
    "not negative": (lambda value: value >= 0, "negative", "0 or a larger number"),
    "below one": (lambda value: 0 <= value < 1, "not in [0, 1)", "at least 0 and less than 1"),
    "a share": (lambda value: 0 < value <= 1, "not in (0, 1]", "a number above 0, at most 1"),
    "at least one": (lambda value: 1 <= value < math.inf, "not a finite number of at least 1", "1 or a larger number"),
}


def flag(default: Any, **spec: Any) -> Any:
    """Return a field for a config dataclass that is also a command-line flag.

    Args:
        default: default value of the field.
        **spec: attributes of `FlagSpec`, such as `needs`.
    """
    return dataclasses.field(default=default, metadata={"flag": FlagSpec(**spec)})


def flag_name(field: dataclasses.Field[Any]) -> str:
    """Return the main name of a config field's flag, including `--`, such as `--micro-batch-size`."""
    spec: FlagSpec = field.metadata["flag"]
    return spec.name or "--" + field.name.replace("_", "-")


def config_title(config: type) -> str:
    """Return the first line of a config class's docstring, which is the title of its flags in --help."""
    return (config.__doc__ or config.__name__).strip().splitlines()[0].rstrip(".")


@functools.cache
def flag_texts(config: type) -> dict[str, str]:
    """Return the text for --help of each flag of a config class, by field name.

    The texts are the entries of the section "Attributes:" of the class's docstring, and of its base classes' docstrings
    for inherited fields. The result is empty if Python runs without docstrings (-OO).
    """
    sections = (inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2] for kind in reversed(config.__mro__))
    entries = (entry for section in sections for entry in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section, re.M))
    return {name: " ".join(text.split()).removesuffix(".") for name, text in entries}


def checked_path(text: str) -> Path:
    """Return `text` as a path: the type, for argparse, of flags whose values are paths. `~` is not expanded.

    Raises:
        argparse.ArgumentTypeError: the text is empty, which `Path` would read as the current folder; or it begins with
            `~NAME`, and there is no such home folder.
    """
    if not text:
        raise argparse.ArgumentTypeError(
            "the value is empty: give a path, or leave the flag out (is a variable of the shell not set?)"
        )
    try:
        Path(text).expanduser()
    except RuntimeError:  # "~NAME/..." of an unknown user, or "~/..." of a user without a home folder
        raise argparse.ArgumentTypeError(f"{text}: there is no such home folder; give a path without ~") from None
    return Path(text)


def spelling(config: Any, name: str) -> str:
    """Return the flag of the field `name` of a config or config class, such as `--micro-batch-size`."""
    return next(flag_name(field) for field in dataclasses.fields(config) if field.name == name)


def in_use(config: Any, name: str, value: Any) -> str:
    """Return the flag of a config's field with `value`, the value in use, for an error message.

    If the field has another value, because the program has derived `value` from other flags, the text ends with
    "(derived, not set)".
    """
    return f"{spelling(config, name)} {value}" + ("" if getattr(config, name) == value else " (derived, not set)")


def asks(value: Any) -> bool:
    """Return True if a flag's value enables something: every value, also the number 0, except None, False and ()."""
    return not (value is None or value is False or value == ())


type_hints = functools.cache(typing.get_type_hints)


def _words(hint: Any) -> list[Any]:
    """Return all words of the `Literal` types in a type annotation; [] without `Literal`."""
    parts = typing.get_args(hint)
    return [*parts] if typing.get_origin(hint) is Literal else [word for part in parts for word in _words(part)]


def shown(value: Any) -> str:
    """Return the first 80 characters of a value's `repr`, in bounded time and memory even if the value is large."""
    bounded = reprlib.Repr()
    bounded.maxstring = bounded.maxother = 80
    return f"{bounded.repr(value):.80}"


def wrong_types(config: type, values: dict[str, Any]) -> list[str]:
    """Return one line of an error message per stored value whose type does not match its dataclass field.

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
    """Return True if a value decoded from JSON has the type of the annotation `hint`.

    An int is accepted as a float, and a list is accepted as a tuple. A bool is not accepted as a number.
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
    """Return True if a type annotation is a union, written as `X | Y` or `Optional[X]`."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def render_flags(configs: Sequence[Any], origins: Mapping[str, str]) -> str:
    """Return the text of a flag file with all flags of several configs: a line `--name value  # origin` per flag.

    Args:
        configs: configs whose flags are written, each as a group of lines under its title.
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
    """Return the flags that differ from their defaults, as a block for the log between Megatron-LM's two dashed lines.

    Args:
        configs: configs whose flags are shown, one line `--name value  # origin` per flag.
        origins: origin of each flag that the user, a file or a checkpoint has set, by field name. Flags that the
            program itself has changed are marked as "default".
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
    """Raise a ValueError for set flags that have no effect, because the flag that they need is off (`FlagSpec.needs`).

    Only flags that the user has set are checked, not values from a checkpoint or from an objective's defaults. Flags in
    flag files are accepted in two cases. First, a flag with its default value is accepted, because the args.txt of a
    run has all flags. Second, a flag is accepted if the command line itself turns the needed flag off.

    Args:
        configs: configs in which every flag has its final value.
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


def check_existing(configs: Sequence[Any]) -> None:
    """Raise a ValueError with a line for each path that must exist (`FlagSpec.must_exist`), but does not."""
    given = [(f, getattr(config, f.name)) for config in configs for f in dataclasses.fields(config)]
    wanted = [(flag_name(f), value) for f, value in given if f.metadata["flag"].must_exist and value is not None]
    paths = [(name, path) for name, value in wanted for path in (value if isinstance(value, tuple) else (value,))]
    missing = [f"{name} {path} does not exist" for name, path in paths if not Path(path).expanduser().exists()]
    if missing:
        raise ValueError("\n".join(f"{text}: correct the path" for text in missing))


def as_written(config: Any, field: dataclasses.Field[Any]) -> str:
    """Return the flag of a config's field with its value, as a flag file has it: `--lr 0.0003` or `--no-bf16`."""
    name, value = flag_name(field), getattr(config, field.name)
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    if isinstance(value, tuple):
        return " ".join([name, *(shlex.quote(str(item)) for item in value)])
    word = as_words(value)
    return f"{name}{'=' if word.startswith(('-', '@')) else ' '}{shlex.quote(word)}"


def as_words(value: Any) -> str:
    """Return a flag's value as text, without shell quotes: `none` for None, words with spaces between for a tuple."""
    if value is None:
        return "none"
    return " ".join(map(as_words, value)) if isinstance(value, tuple) else str(value)
