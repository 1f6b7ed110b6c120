"""Parser that reads a command line into config dataclasses (flags.py) in four steps.

    expand    replaces each `@path` by the words of that flag file
    split     groups each flag with the words up to the next flag
    sift      drops flags that only Megatron-LM has, with a notice for each, or rejects them with a reason
    parse     converts values to the types of their fields, and resolves flags that exclude each other

Each word carries its origin through all steps, so that messages can name the origin, such as
`configs/gpt_125m.args:7`. If a flag is given several times, the last value counts.

A flag file has shell-style lines with quotes and `#` comments, and may include other files with `@path`. A backslash at
the end of a line is accepted but not necessary.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import shlex
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from megazpp.base.files import cause, encoding_problem, read_small_file
from megazpp.base.flag_tables import MegatronFlag, hint_for
from megazpp.base.flags import (
    COMMAND_LINE,
    PATH_ENDS,
    PATHS,
    FlagSpec,
    as_words,
    asks,
    check_needs,
    checked_path,
    config_title,
    flag_name,
    flag_texts,
    is_union,
    type_hints,
)

HELP, HELP_ALL = frozenset({"-h", "--help"}), "--help-all"


Word = tuple[str, str]  # (text, origin); the origin is `COMMAND_LINE` or "file:line"


class Given(NamedTuple):
    """One flag of the command line or of a flag file: name, values (the words up to the next flag), and origin."""

    name: str
    values: tuple[str, ...]
    origin: str


class Parsed(NamedTuple):
    """Parsed command line."""

    configs: tuple[Any, ...]  # one config of each of the parser's classes, in the order of the classes
    origins: dict[str, str]  # origin of each flag that is set, by field name
    notices: tuple[str, ...] = ()  # one line for the user per ignored or overridden flag


class FlagParser:
    """Parser for the flags of several config dataclasses.

    --help groups the flags by config class. With `shown`, --help lists only a selection, and --help-all lists all
    flags.

    Args:
        configs: config classes. Field names and flags must be unique among all classes.
        program: program name in --help.
        description: first lines of --help.
        epilog: last lines of --help.
        shown: config classes whose flags --help lists completely, while it lists only common flags of other classes.
            None: --help lists all flags of all classes.
        common: names of the fields whose flags count as common; None for the fields with `FlagSpec.common`.
        mutually_exclusive: pairs of field names (a, b). Flag `a`, on the command line or in a later flag file,
            overrides flag `b` of an earlier flag file.
        defaults: defaults of this program, by field name, where they differ from the defaults of the fields.
        from_checkpoint: names of the fields that take a checkpoint's value by default. The parser only shows this in
            --help. The program that uses the parser copies the values later.
    """

    def __init__(
        self,
        configs: Sequence[type],
        *,
        program: str,
        description: str = "",
        epilog: str = "",
        shown: Sequence[type] | None = None,
        common: Collection[str] | None = None,
        mutually_exclusive: Sequence[tuple[str, str]] = (),
        defaults: Mapping[str, Any] = types.MappingProxyType({}),
        from_checkpoint: Collection[str] = (),
    ) -> None:
        # ---- create argparse's parser, which converts the values of single flags and writes the text of --help
        self.configs, self._shown, self._common = tuple(configs), shown, common
        self._mutually_exclusive, self._defaults = mutually_exclusive, defaults
        self._argparse = _RaisingParser(
            prog=program,
            usage="%(prog)s [@file ...] [--flag value ...]",
            description=description,
            epilog=epilog,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )

        # ---- add an argparse group per config, and an action per field
        self._actions: dict[str, argparse.Action] = {}
        self._may_be_none: set[str] = set()
        names = [field.name for config in self.configs for field in dataclasses.fields(config)]
        assert len(set(names)) == len(names), f"{names} has a name twice"
        for config in self.configs:
            group = self._argparse.add_argument_group(config_title(config))
            hints, texts = type_hints(config), flag_texts(config)
            for field in dataclasses.fields(config):
                text = texts.get(field.name, "")
                known = field.name in from_checkpoint and "(default" not in text
                default = defaults.get(field.name, "the checkpoint's" if known else field.default)
                action, optional = _add_flag(group, field, hints[field.name], default, text)
                self._may_be_none |= {field.name} if optional else set()
                self._actions |= dict.fromkeys(action.option_strings, action)

    @property
    def spellings(self) -> frozenset[str]:
        """All flags that the parser accepts, including aliases, `--no-` flags, --help and --help-all."""
        return frozenset(self._actions) | HELP | {HELP_ALL}

    def help_text(self, *, everything: bool) -> str:
        """Return the text of --help-all if `everything` is True, otherwise the text of --help.

        A call for the text of --help hides flags in argparse permanently. A later call with `everything` would
        therefore return a text without these flags.
        """
        fields = [(config, field) for config in self.configs for field in dataclasses.fields(config)]
        if everything or self._shown is None:
            return self._argparse.format_help()
        for config, field in fields:
            is_common = field.metadata["flag"].common if self._common is None else field.name in self._common
            if not (config in self._shown or is_common):
                self._actions[flag_name(field)].help = argparse.SUPPRESS
        return f"{self._argparse.format_help()}{HELP_ALL} shows all {len(fields)} flags.\n"

    def read(
        self,
        argv: Sequence[str],
        script_dir: Path,
        megatron_flags: Mapping[str, MegatronFlag],
        *,
        complete: bool = True,
    ) -> Parsed:
        """Parse a command line: expand flag files, split into flags, sift Megatron-LM's flags, and convert values.

        Args:
            argv: command line without the program name.
            script_dir: folder in which flag files are searched if the working directory does not contain them.
            megatron_flags: Megatron-LM's flags that this program ignores or rejects, by name.
            complete: False if a checkpoint may set further flags. This method then does not call `check_needs`. Instead
                the program calls `ParsedRun.check_needs` after the checkpoint has set these flags.

        Raises:
            ValueError: flags are wrong. The message has one line per problem, with the origin of the flag.
            SystemExit: the command line has --help or --help-all.
        """
        # ---- expand flag files, split into flags, answer --help
        flags = split_into_flags(expand_flag_files(argv, script_dir))
        asked = {given.name for given in flags} & {*HELP, HELP_ALL}
        if asked:
            print(self.help_text(everything=HELP_ALL in asked), end="")
            raise SystemExit(0)
        # ---- sift flags that only Megatron-LM has
        kept, notices, problems = sift_flags(flags, self.spellings, megatron_flags)
        # ---- reject characters that files in the locale's encoding, such as the records of a run, cannot contain
        texts = [(f"{given.origin}: {given.name}", value) for given in flags for value in given.values]
        texts = [*texts, ("the working directory", str(Path.cwd()))]
        problems += [f"{what} {problem}" for what, text in texts if (problem := encoding_problem(text))]

        # ---- convert values; the last occurrence of a flag counts
        values: dict[str, Any] = {}
        words: dict[str, Given] = {}
        for given in kept:
            try:
                for name, value in self._read(given).items():
                    words.pop(name, None)  # a flag that is given again counts at its last position
                    values[name], words[name] = value, given
            except ValueError as error:
                problems.append(f"{given.origin}: {error}")

        # ---- drop flags that another flag excludes: the command line overrides files, a later file an earlier one
        rank = {name: (given.origin == COMMAND_LINE, at) for at, (name, given) in enumerate(words.items())}
        file = {name: given.origin.rpartition(":")[0] for name, given in words.items()}
        for one, other in self._mutually_exclusive:
            both = asks(values.get(one)) and asks(values.get(other))
            if both and file[one] != file[other] and rank[one] > rank[other]:
                del values[other]
                stays, goes = (" ".join([words[name].name, *words[name].values]) for name in (one, other))
                notices.append(f"{words[other].origin}: {goes} gives way to {stays} ({words[one].origin})")

        # ---- find missing flags, and build the configs, which check their own fields
        configs, chosen = [], {**self._defaults, **values}
        fields = [(config, field) for config in self.configs for field in dataclasses.fields(config)]
        if not problems:  # a mistyped flag is not also reported as missing
            for config, field in fields:
                if field.metadata["flag"].required and field.name not in chosen:
                    problems.append(f"{flag_name(field)} is missing: add it ({flag_texts(config).get(field.name)})")
        for config in self.configs:
            own = {field.name: chosen[field.name] for field in dataclasses.fields(config) if field.name in chosen}
            try:
                configs.append(config(**own))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
        parsed = Parsed(tuple(configs), {name: words[name].origin for name in values}, tuple(notices))
        if complete:
            check_needs(parsed.configs, parsed.origins)
        return parsed

    def _read(self, given: Given) -> dict[str, Any]:
        """Convert the words of one flag to the type of its field, and return {field name: value}.

        Raises:
            ValueError: the flag has too many or too few values, or a value of the wrong type.
        """
        action = self._actions[given.name]
        if given.values == ("none",) and action.dest in self._may_be_none:
            return {action.dest: None}
        if action.nargs == 0 and given.values:
            raise ValueError(f"{given.name} takes no value, not {' '.join(given.values)}")
        if action.nargs is None and len(given.values) != 1:
            raise ValueError(f"{given.name} takes one value, not {len(given.values)}")
        # Join a flag and its single value by =, because argparse would read a separate -1e-3 as a flag
        argv = [f"{given.name}={given.values[0]}"] if len(given.values) == 1 else [given.name, *given.values]
        read = vars(self._argparse.parse_args(argv, argparse.Namespace()))
        return {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}


# ---- read flag files, and split words into flags ------------------------------------------------------------------


def expand_flag_files(argv: Sequence[str], script_dir: Path) -> list[Word]:
    """Return the words of a command line, with every `@path` replaced by the words of that flag file.

    A path on the command line is relative to the working directory, or to `script_dir` if the working directory lacks
    the file. A path inside a flag file is relative to the folder of that file.

    Args:
        argv: command line without the program name.
        script_dir: folder of the program.

    Raises:
        ValueError: a flag file cannot be read, or flag files include each other in a circle.
    """
    folders = (Path.cwd(), script_dir)
    return [word for text in argv for word in _expand((text, COMMAND_LINE), folders, ())]


def _expand(word: Word, folders: Sequence[Path], chain: tuple[Path, ...]) -> Iterator[Word]:
    """Yield a word of the command line or, if it is `@path`, the words of that flag file.

    Args:
        word: the word with its origin.
        folders: folders in which a relative path is searched, in this order.
        chain: flag files that include this word, the outermost first, to detect a circle.

    Raises:
        ValueError: a flag file is missing, cannot be read, has an unclosed quote, includes itself, or has a path with
            characters that the locale's encoding lacks.
    """
    text, origin = word
    if not text.startswith("@") or text == "@":
        yield word
        return
    candidates = list(dict.fromkeys((folder / os.path.expanduser(text[1:])).resolve() for folder in folders))
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        places = " and ".join(_shown(candidate.parent) for candidate in candidates)
        raise ValueError(f"{origin}: there is no flag file {text[1:]} (looked in {places})")
    if problem := encoding_problem(str(path)):
        raise ValueError(f"{origin}: flag file {problem}")
    if path in chain:
        circle = " -> ".join(_shown(p) for p in (*chain[chain.index(path) :], path))
        raise ValueError(f"{origin}: flag files include each other in a circle: {circle}")
    for inner in _read_words(path):
        yield from _expand(inner, (path.parent,), (*chain, path))


def _read_words(path: Path) -> Iterator[Word]:
    """Yield the words of a flag file, each with its origin "file:line".

    Raises:
        ValueError: the file cannot be read, or a quote is not closed. The message names the file and the line.
    """
    try:
        # str.splitlines would also split at other line breaks, such as form feeds, which a quoted value may contain.
        lines = read_small_file(path).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{_shown(path)}: cannot be read: {cause(error)}") from None
    first = 0  # first line of a group of lines that is split as one text, because a quoted word may span lines
    for last in range(len(lines)):
        origin, text = f"{_shown(path)}:{first + 1}", "\n".join(lines[first : last + 1])
        try:
            # A backslash at the end of a line is dropped, because the values of a flag may span lines without it.
            words = shlex.split(text.rstrip().removesuffix("\\"), comments=True)
        except ValueError as error:
            if last + 1 < len(lines):
                continue
            raise ValueError(f"{origin}: {error}") from None
        yield from ((text, origin) for text in words)
        first = last + 1


def _shown(path: Path) -> str:
    """Return a path as text for a message, relative to the working directory if that contains the path."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def split_into_flags(words: Sequence[Word]) -> list[Given]:
    """Group the words of a command line into flags with their values, and split `--name=value`.

    Raises:
        ValueError: a word is neither a flag nor the value of a flag. A flag in a flag file can have only values from
            the same file.
    """
    flags: list[Given] = []
    for text, origin in words:
        if text == "-h" or re.match(r"--[A-Za-z]", text):
            name, equals, value = text.partition("=")
            flags.append(Given(name, (value,) if equals else (), origin))
        # A flag in a file takes only words of the same file as values. A flag on the command line, whose origin has no
        # line number, also takes the words of a flag file.
        elif flags and flags[-1].origin.rpartition(":")[0] in ("", origin.rpartition(":")[0]):
            flags[-1] = flags[-1]._replace(values=(*flags[-1].values, text))
        else:
            raise ValueError(f"{origin}: {text!r} is not a flag (flags begin with --, flag files with @)")
    return flags


# ---- flags that only Megatron-LM has ------------------------------------------------------------------------------


def sift_flags(
    flags: Sequence[Given], supported: Collection[str], known: Mapping[str, MegatronFlag]
) -> tuple[list[Given], list[str], list[str]]:
    """Separate this program's flags from flags that only Megatron-LM has, and from unknown flags.

    Args:
        flags: all flags of the command line.
        supported: names of this program's flags.
        known: flags that only Megatron-LM has, by name.

    Returns:
        this program's flags; one notice per ignored flag; one problem per rejected or unknown flag. If several of
        Megatron-LM's flags are rejected, the problems end with a summary of all flags by verdict.
    """
    kept, notices, problems, refused, ignored = list[Given](), list[str](), list[str](), list[str](), list[str]()
    for given in flags:
        flag = known.get(given.name)
        # `--no-NAME` turns off the switch `--NAME` of Megatron-LM. `--no-NAME` is ignored if `--NAME` is ignored and
        # takes no value.
        if flag is None and given.name.startswith("--no-"):
            switch = known.get("--" + given.name.removeprefix("--no-"))
            flag = switch if switch is not None and (switch.verdict, switch.arity) == ("ignored", "0") else None
        if given.name in supported:
            kept.append(given)
        elif flag is None:
            problems.append(f"{given.origin}: {given.name} is not a flag{hint_for(given.name, supported, known)}")
        elif (problem := _refusal(given, flag)) is not None:
            problems.append(f"{given.origin}: {problem}")
            refused.append(given.name)
        else:
            notices.append(f"{given.origin}: {given.name} is ignored: {flag.reason}")
            ignored.append(given.name)
    if len(refused) > 1:  # the user probably tries a complete command line of Megatron-LM, so a summary helps
        table = {"taken": [given.name for given in kept], "ignored": ignored, "not supported, see above": refused}
        problems += [f"{verdict}: {' '.join(dict.fromkeys(names))}" for verdict, names in table.items() if names]
    return kept, notices, problems


def _refusal(given: Given, flag: MegatronFlag) -> str | None:
    """Return the reason why a flag that only Megatron-LM has is an error; None if the flag can be ignored.

    Args:
        given: the flag with its values on the command line.
        flag: the line of `megatron_flags.txt` about it.
    """
    if flag.verdict == "unsupported":
        return f"{given.name} is a Megatron flag that is not supported: {flag.reason}"
    count, arity = len(given.values), flag.arity
    if not (count == int(arity) if arity.isdigit() else {"?": count <= 1, "*": True, "+": count >= 1}[arity]):
        words = {"0": "no value", "1": "one value", "?": "at most one value", "+": "at least one value"}
        return f"{given.name} takes {words.get(arity, f'{arity} values')}, not {count}"
    wanted = flag.verdict.removeprefix("only=")
    if flag.verdict != wanted and given.values != (wanted,):
        return f"{given.name} {' '.join(given.values)} is not supported, only {wanted}: {flag.reason}"
    return None


# ---- fields as arguments of argparse ------------------------------------------------------------------------------


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of --help: lines have at most 110 characters, and are not broken at the hyphens inside a flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=110, max_help_position=40)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not isinstance(action, _OffSwitch) or name[:5] != "--no-"]
        value = "" if action.nargs == 0 else f" {self._format_args(action, str(action.metavar or action.dest.upper()))}"
        return ", ".join(names) + value


class _OffSwitch(argparse.BooleanOptionalAction):
    """argparse action of a switch that is off by default. --help does not list the switch's `--no-` flag."""


class _RaisingParser(argparse.ArgumentParser):
    """argparse's parser with one change: an error raises a ValueError instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any, default: Any, text: str
) -> tuple[argparse.Action, bool]:
    """Add the flag of a config's field to an argparse group.

    Args:
        group: argparse group of the config class.
        field: dataclass field with its `FlagSpec`.
        hint: type annotation of the field.
        default: default that --help shows.
        text: description of the flag for --help.

    Returns:
        argparse's action of the flag; and True if the field may be None, so that the flag accepts the word "none".
    """
    spec: FlagSpec = field.metadata["flag"]
    help_text = text + (f"; needs {spec.needs}" if spec.needs else "")
    if default is not None and default is not False and default not in ("", ()):
        help_text += f" (default: {as_words(default)})"
    settings: dict[str, Any] = {"dest": field.name, "help": help_text.replace("%", "%%")}
    parts = _parts(hint)
    optional = types.NoneType in parts
    if kinds := next((typing.get_args(part) for part in parts if typing.get_origin(part) is tuple), None):
        parts = _parts(kinds[0])
        settings["nargs"] = spec.nargs or ("+" if kinds[-1] is ... else len(kinds))
    if bool in parts:
        settings["action"] = _OffSwitch if default is False else argparse.BooleanOptionalAction
    else:
        metavar = spec.metavar or ("PATH" if field.name.endswith(PATH_ENDS) else None)
        # `checked_path` rejects the empty text, so a path field whose default is the empty text is not checked.
        settings |= _one_value(parts, optional, metavar, is_path=default != "" and field.name.endswith(PATHS))
    return group.add_argument(flag_name(field), *spec.aliases, **settings), optional


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the member types of a union annotation, or a tuple with the annotation itself if it is no union."""
    return typing.get_args(hint) if is_union(hint) else (hint,)


def _one_value(parts: Sequence[Any], optional: bool, metavar: str | None, *, is_path: bool) -> dict[str, Any]:
    """Return argparse's settings `type` and `metavar` for one value of a flag.

    Args:
        parts: member types of the field's annotation: at most one class, any number of `Literal` types, and NoneType.
        optional: True if the value may be None.
        metavar: name of the value in --help; None selects a name by type.
        is_path: True if the value must be a path (`checked_path`).

    Raises:
        TypeError: `parts` has several classes.
    """
    words = {str(word): word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)}
    types_ = [part for part in parts if typing.get_origin(part) is not Literal and part is not types.NoneType]
    if len(types_) > 1:
        raise TypeError(f"the annotation of a flag has several types, {types_}: use one type, Literal and None only")
    convert: Callable[[str], Any] = types_[0] if types_ else type(next(iter(words.values())))
    allowed = list(dict.fromkeys([*words, *(["none"] if optional else [])]))

    def read(text: str) -> Any:
        if text in words:
            return words[text]
        if not types_:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}")
        if is_path:
            checked_path(text)
        value = convert(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} does not fit 64 bits")
        return value

    read.__name__ = " or ".join([convert.__name__, *words])  # argparse's errors show this name as the type
    kind = (metavar or {"int": "N", "float": "X", "str": "TEXT"}[convert.__name__]) if types_ else ""
    shown = [kind, *words] if types_ else allowed
    return {"type": read, "metavar": f"{{{','.join(shown)}}}" if words else kind}
