"""Command-line flags as fields of frozen dataclasses.

A config is a frozen dataclass whose fields are made by `flag()`; its owner is the file that uses it. One field
is one flag: the field name with dashes (`micro_batch_size` is `--micro-batch-size`), its annotation gives the
type (`int`, `float`, `str`, `bool`, `Literal[...]`, `int | Literal["auto"]`, `tuple[int, ...]`, each possibly
`| None`; `int | tuple[int, ...]` where in Python one value may stand for a tuple of one), its default the
default. A bool gets both spellings, `--name` and `--no-name`, and a field that may be None accepts the word
`none`, so that the command line can undo what a flag file set. A float is finite, an int fits 64 bits; which of
those make sense is checked by the config's owner.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

from megazpp.flag_files import Word


@dataclass(frozen=True, kw_only=True)
class FlagSpec:
    """What `flag()` leaves in a field's metadata.

    Attributes:
        help: one sentence: meaning, unit, cost.
        name: the flag's spelling if it is not the field name with dashes (`--override-opt_param-scheduler`).
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


def flag_name(field: dataclasses.Field[Any]) -> str:
    """The flag's main spelling, `--` included."""
    spec: FlagSpec = field.metadata["flag"]
    return spec.name or "--" + field.name.replace("_", "-")


def config_title(config: type) -> str:
    """The first line of a config's docstring."""
    return (config.__doc__ or config.__name__).strip().splitlines()[0]


class Given(NamedTuple):
    """One flag as it was written: its words up to the next flag, and where it stands."""

    name: str
    values: tuple[str, ...]
    origin: str


def split_into_flags(words: Sequence[Word]) -> Iterator[Given]:
    """Each flag of a command line together with its values; `--name=value` counts as one value.

    Raises:
        ValueError: a value comes before any flag.
    """
    if not words:
        return
    starts = [i for i, word in enumerate(words) if _is_flag(word.text)]
    if not starts or starts[0] > 0:
        raise ValueError(f"{words[0].origin}: {words[0].text!r} is not a flag (flags begin with --, flag files with @)")
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        name, equals, value = words[start].text.partition("=")
        values = ([value] if equals else []) + [word.text for word in words[start + 1 : end]]
        yield Given(name, tuple(values), words[start].origin)


def _is_flag(text: str) -> bool:
    return text == "-h" or re.match(r"--[A-Za-z]", text) is not None


class FlagParser:
    """Reads flags into config dataclasses; --help groups them by dataclass.

    Args:
        configs: config classes; no two may share a field name or a spelling.
        program: name shown in --help.
        description: first lines of --help.
    """

    def __init__(self, configs: Sequence[type], *, program: str, description: str = "") -> None:
        self.configs = tuple(configs)
        self._argparse = _RaisingParser(
            prog=program,
            usage="%(prog)s [@file ...] [--flag value ...]",
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self._actions: dict[str, argparse.Action] = {}
        self._may_be_none: set[str] = set()
        for config in self.configs:
            group = self._argparse.add_argument_group(config_title(config).rstrip("."))  # argparse adds a colon
            hints = typing.get_type_hints(config)
            for field in dataclasses.fields(config):
                kind, optional = _without_none(hints[field.name])
                action = _add_flag(group, field, kind, optional)
                if optional:
                    self._may_be_none.add(field.name)
                assert all(field.name != other.dest for other in self._actions.values()), field.name
                self._actions |= dict.fromkeys(action.option_strings, action)

    @property
    def spellings(self) -> frozenset[str]:
        """Every accepted flag, aliases and `--no-` forms included."""
        return frozenset(self._actions) | {"-h", "--help"}

    def parse(self, flags: Sequence[Given]) -> tuple[dict[str, Any], dict[str, str]]:
        """Values and origins by field name, of the fields that are given; later ones win.

        Args:
            flags: only flags whose name is in `spellings`.
        Raises:
            ValueError: one line per flag whose values do not fit, each beginning with its origin.
            SystemExit: after --help.
        """
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        problems = []
        for given in flags:
            try:
                read = self._read(given)
            except ValueError as error:
                problems.append(f"{given.origin}: {error}")
                continue
            values |= read
            origins |= dict.fromkeys(read, given.origin)
        if problems:
            raise ValueError("\n".join(problems))
        return values, origins

    def build(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """One config of each class from `values` by field name; fields without a value keep their default."""
        return tuple(
            config(**{f.name: values[f.name] for f in dataclasses.fields(config) if f.name in values})
            for config in self.configs
        )

    def _read(self, given: Given) -> dict[str, Any]:
        """{field name: value} of one flag."""
        action = self._actions.get(given.name)  # None: --help
        if action is not None:
            if given.values == ("none",) and action.dest in self._may_be_none:
                return {action.dest: None}
            if action.nargs == 0 and given.values:
                raise ValueError(f"{given.name} takes no value, not {' '.join(given.values)}")
            if action.nargs is None and len(given.values) != 1:
                raise ValueError(f"{given.name} takes one value, not {len(given.values)}")
        argv = [given.name, *given.values]
        if len(given.values) == 1:
            argv = [f"{given.name}={given.values[0]}"]  # the = keeps argparse from reading -1e-3 as a flag
        return vars(self._argparse.parse_args(argv, argparse.Namespace()))


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], kind: Any, optional: bool
) -> argparse.Action:
    spec: FlagSpec = field.metadata["flag"]
    help_text = spec.help
    if field.default is not None and field.default is not False and field.default not in ("", ()):
        help_text += f" (default {as_words(field.default)})"
    settings: dict[str, Any] = {"dest": field.name, "help": help_text.replace("%", "%%")}
    if kind is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is tuple:
        item, *rest = typing.get_args(kind)
        settings |= _one_value(item, optional, spec.metavar)
        settings |= {"action": _StoreTuple, "nargs": spec.nargs or ("+" if rest == [...] else 1 + len(rest))}
    else:
        settings |= _one_value(kind, optional, spec.metavar)
    return group.add_argument(flag_name(field), *spec.aliases, **settings)


def _one_value(kind: Any, optional: bool, metavar: str | None) -> dict[str, Any]:
    """How argparse reads and shows one value of type `kind`."""
    parts = typing.get_args(kind) if _is_union(kind) else (kind,)
    choices = tuple(word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part))
    types_ = [part for part in parts if typing.get_origin(part) is not Literal]
    convert: Callable[[str], Any] = types_[0] if types_ else type(choices[0])
    words = {str(choice): choice for choice in choices}
    allowed = [*words, *(["none"] if optional else [])]

    def read(text: str) -> Any:
        if text in words:
            return words[text]
        if not types_:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}")
        value = convert(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} does not fit 64 bits")
        return value

    read.__name__ = " or ".join([convert.__name__, *words])  # what argparse calls the type in its messages
    shown = [convert.__name__.upper(), *words] if types_ else allowed
    return {"type": read, "metavar": metavar or (f"{{{','.join(shown)}}}" if words else shown[0])}


class _StoreTuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); X -> (X, False). X is one type, possibly with words: `int | Literal["auto"]`."""
    if not _is_union(hint):
        return hint, False
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    tuples = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    if tuples:  # the command line always makes a tuple
        kinds = [kind for kind in kinds if kind is not typing.get_args(tuples[0])[0]]
    if len([kind for kind in kinds if typing.get_origin(kind) is not Literal]) > 1:
        raise TypeError(f"a flag has one type, possibly with words and | None, not {hint}")
    return typing.Union[tuple(kinds)], types.NoneType in typing.get_args(hint)  # noqa: UP007 - of a list


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def as_words(value: Any) -> str:
    """A value as it is written after its flag."""
    if value is None:
        return "none"
    return " ".join(map(as_words, value)) if isinstance(value, tuple) else str(value)
