"""A command line, read in four steps into configs (flags.py); one file, for words keep their origin through all four.

    expand    `@path` is replaced by the flags that the file holds; every word remembers where it was written
    split     a flag and the words up to the next flag belong together
    sift      Megatron's flags that we do not have are ignored with a notice, or refused with a reason
    parse     values get the types of their fields; what comes later wins, by hand also over what it excludes in files

A flag file has shell-style lines (quotes, `#` comments, a backslash at the end does no harm) and may itself include
files with `@path`. Because words remember their place, every later message can say `configs/gpt_125m.args:7`.

`megatron_flags.txt` holds one of Megatron's other flags per line: name, number of values (as argparse writes it),
verdict, reason. The verdict is `ignored` (nothing here depends on it), `unsupported`, or `only=V`: ignored with the
value V, which asks for nothing, and unsupported with any other. `removed` are flags of our own that are gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from megazpp.base.flags import FlagSpec, as_words, as_written, asks, config_title, flag_name, is_union, type_hints

COMMAND_LINE = "command line"
HELP, HELP_ALL = frozenset({"-h", "--help"}), "--help-all"
MEGATRON_TABLE = Path(__file__).with_name("megatron_flags.txt")


Word = tuple[str, str]  # with its origin, `COMMAND_LINE` or "file:line"


class Given(NamedTuple):
    """One flag as it was written: its words up to the next flag, and its origin."""

    name: str
    values: tuple[str, ...]
    origin: str


class MegatronFlag(NamedTuple):
    """One line of the table."""

    name: str
    arity: str  # a number, "?", "*" or "+"
    verdict: str
    reason: str


class Parsed(NamedTuple):
    """The configs of a command line, one of each class."""

    configs: tuple[Any, ...]
    origins: dict[str, str]  # of each field that is given, by its name
    notices: tuple[str, ...] = ()  # a line for each flag that was ignored


class FlagParser:
    """Reads flags into config dataclasses, by which --help groups them.

    With `shown`, --help leaves out what a first run does not need, and --help-all shows all flags.

    Args:
        configs: config classes; no two may share a field name or a spelling.
        program, description, epilog: name, first line and last lines of --help.
        shown: config classes whose flags --help shows beside the common flags of the others; None: all flags.
        mutually_exclusive: pairs of fields: the first, by hand or in a later file, takes the place of the second.
    """

    def __init__(
        self,
        configs: Sequence[type],
        *,
        program: str,
        description: str = "",
        epilog: str = "",
        shown: Sequence[type] | None = None,
        mutually_exclusive: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.configs, self._shown, self._mutually_exclusive = tuple(configs), shown, mutually_exclusive
        self._argparse = _RaisingParser(
            prog=program,
            usage="%(prog)s [@file ...] [--flag value ...]",
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        self._actions: dict[str, argparse.Action] = {}
        self._may_be_none: set[str] = set()
        names = [field.name for config in self.configs for field in dataclasses.fields(config)]
        assert len(set(names)) == len(names), f"{names} has a name twice"
        for config in self.configs:
            group = self._argparse.add_argument_group(config_title(config))
            hints = type_hints(config)
            for field in dataclasses.fields(config):
                action, optional = _add_flag(group, field, hints[field.name])
                self._may_be_none |= {field.name} if optional else set()
                self._actions |= dict.fromkeys(action.option_strings, action)

    @property
    def spellings(self) -> frozenset[str]:
        """Every accepted flag, aliases and `--no-` forms included."""
        return frozenset(self._actions) | HELP | {HELP_ALL}

    def help_text(self, *, everything: bool) -> str:
        """Return the text of --help, or that of --help-all if `everything`."""
        fields = [(config, field) for config in self.configs for field in dataclasses.fields(config)]
        if everything or self._shown is None:
            return self._argparse.format_help()
        uncommon = [f for config, f in fields if not (config in self._shown or f.metadata["flag"].common)]
        hidden = [self._actions[flag_name(field)] for field in uncommon]
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        text = self._argparse.format_help()
        for action, help_text in zip(hidden, texts, strict=True):
            action.help = help_text
        return f"{text}{HELP_ALL} shows all {len(fields)} flags.\n"

    def read(self, argv: Sequence[str], script_dir: Path, megatron_flags: Mapping[str, MegatronFlag]) -> Parsed:
        """Take all four steps; see the functions of each.

        Raises:
            ValueError: one line per problem, each with the place where the flag was written; or a config's own.
            SystemExit: after --help or --help-all.
        """
        flags = split_into_flags(expand_flag_files(argv, script_dir))
        asked = {given.name for given in flags} & {*HELP, HELP_ALL}
        if asked:
            print(self.help_text(everything=HELP_ALL in asked), end="")
            raise SystemExit(0)
        kept, notices, problems = sift_flags(flags, self.spellings, megatron_flags)
        values: dict[str, Any] = {}
        words: dict[str, Given] = {}
        for given in kept:
            try:
                for name, value in self._read(given).items():
                    words.pop(name, None)  # the order is that of the last place
                    values[name], words[name] = value, given
            except ValueError as error:
                problems.append(f"{given.origin}: {error}")
        rank = {name: (given.origin == COMMAND_LINE, at) for at, (name, given) in enumerate(words.items())}
        file = {name: given.origin.rpartition(":")[0] for name, given in words.items()}
        for one, other in self._mutually_exclusive:
            both = asks(values.get(one)) and asks(values.get(other))
            if both and file[one] != file[other] and rank[one] > rank[other]:
                del values[other]
                stays, goes = (" ".join([words[name].name, *words[name].values]) for name in (one, other))
                notices.append(f"{words[other].origin}: {goes} gives way to {stays} ({words[one].origin})")
        configs = []
        for config in self.configs:
            own = {field.name: values[field.name] for field in dataclasses.fields(config) if field.name in values}
            try:
                configs.append(config(**own))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
        parsed = Parsed(tuple(configs), {name: words[name].origin for name in values}, tuple(notices))
        _refuse_without_effect(parsed)
        return parsed

    def _read(self, given: Given) -> dict[str, Any]:
        """{field name: value} of one flag."""
        action = self._actions[given.name]
        if given.values == ("none",) and action.dest in self._may_be_none:
            return {action.dest: None}
        if action.nargs == 0 and given.values:
            raise ValueError(f"{given.name} takes no value, not {' '.join(given.values)}")
        if action.nargs is None and len(given.values) != 1:
            raise ValueError(f"{given.name} takes one value, not {len(given.values)}")
        argv = [given.name, *given.values]
        if len(given.values) == 1:
            argv = [f"{given.name}={given.values[0]}"]  # the = keeps argparse from reading -1e-3 as a flag
        read = vars(self._argparse.parse_args(argv, argparse.Namespace()))
        return {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}


def _refuse_without_effect(parsed: Parsed) -> None:
    """Raises ValueError for each flag given by hand whose feature, what it `needs`, is off.

    Where the command line turns off a feature of a flag file, the rest of the file's flags of it may stay; so may all
    flags at their defaults, which a run's args.txt has.
    """
    origins, problems = parsed.origins, []
    fields = {flag_name(field): (config, field) for config in parsed.configs for field in dataclasses.fields(config)}
    for config, field in fields.values():
        origin, spec, value = origins.get(field.name), field.metadata["flag"], getattr(config, field.name)
        feature, *allowed = (spec.needs or "none").split()
        is_off = value is None or (value is False and not field.default)
        if feature not in fields or origin is None or is_off:
            continue
        owner, other = fields[feature]
        state = getattr(owner, other.name)
        stays = value == field.default or origins.get(other.name) == COMMAND_LINE
        if not (state in allowed if allowed else state) and (origin == COMMAND_LINE or not stays):
            instead = f", not {as_words(state)}" if allowed and state is not None else ""
            problems.append(f"{origin}: {as_written(config, field)} needs {spec.needs}{instead}")
    if problems:
        raise ValueError("\n".join(problems))


# ---- flag files and words -----------------------------------------------------------------------------------------


def expand_flag_files(argv: Sequence[str], script_dir: Path) -> list[Word]:
    """Replace every `@path` of `argv` by the words of that file; raises ValueError if a file cannot be read.

    Paths are relative to the working directory or, failing that, to `script_dir`; inside a file, to that file.
    """
    folders = (Path.cwd(), script_dir)
    return [word for text in argv for word in _expand((text, COMMAND_LINE), folders, ())]


def _expand(word: Word, folders: Sequence[Path], chain: tuple[Path, ...]) -> Iterator[Word]:
    text, origin = word
    if not text.startswith("@") or text == "@":
        yield word
        return
    candidates = list(dict.fromkeys((folder / Path(text[1:]).expanduser()).resolve() for folder in folders))
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        places = " and ".join(_shown(candidate.parent) for candidate in candidates)
        raise ValueError(f"{origin}: there is no flag file {text[1:]} (looked in {places})")
    if path in chain:
        circle = " -> ".join(_shown(p) for p in (*chain[chain.index(path) :], path))
        raise ValueError(f"{origin}: flag files include each other in a circle: {circle}")
    for inner in _read_words(path):
        yield from _expand(inner, (path.parent,), (*chain, path))


def _read_words(path: Path) -> Iterator[Word]:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line breaks inside quotes as they are
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{_shown(path)}: cannot be read: {error}") from None
    first = 0  # of the lines that are read together, because quotes reach over several
    for last in range(len(lines)):
        origin, text = f"{_shown(path)}:{first + 1}", "\n".join(lines[first : last + 1])
        try:
            # words of neighbouring lines follow each other anyway, so a continuation needs no joining
            words = shlex.split(text.rstrip().removesuffix("\\"), comments=True)
        except ValueError as error:
            if last + 1 < len(lines):
                continue
            raise ValueError(f"{origin}: {error}") from None
        yield from ((text, origin) for text in words)
        first = last + 1


def _shown(path: Path) -> str:
    """`path` as a message shows it: relative to the working directory if it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def split_into_flags(words: Sequence[Word]) -> list[Given]:
    """Put each flag together with its values (`--name=value` is one); raises ValueError at a value before any flag."""
    flags: list[Given] = []
    for text, origin in words:
        if text == "-h" or re.match(r"--[A-Za-z]", text):
            name, equals, value = text.partition("=")
            flags.append(Given(name, (value,) if equals else (), origin))
        elif flags:
            flags[-1] = flags[-1]._replace(values=(*flags[-1].values, text))
        else:
            raise ValueError(f"{origin}: {text!r} is not a flag (flags begin with --, flag files with @)")
    return flags


# ---- Megatron's other flags ---------------------------------------------------------------------------------------


@functools.cache
def read_megatron_flags() -> Mapping[str, MegatronFlag]:
    """The table by flag name."""
    lines = [line for line in MEGATRON_TABLE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {flag.name: flag for flag in (MegatronFlag(*line.split(maxsplit=3)) for line in lines)}


def sift_flags(
    flags: Sequence[Given], supported: Collection[str], known: Mapping[str, MegatronFlag]
) -> tuple[list[Given], list[str], list[str]]:
    """Take out Megatron's flags that have no effect here.

    Returns:
        Our flags; a line for each one that is ignored; one for each that is refused or neither `supported` nor
        `known`, and where several of Megatron's are among them a table of all.
    """
    kept, notices, problems, refused, ignored = list[Given](), list[str](), list[str](), list[str](), list[str]()
    for given in flags:
        flag = known.get(given.name)
        if flag is None and given.name.startswith("--no-"):
            switch = known.get("--" + given.name.removeprefix("--no-"))
            flag = switch if switch is not None and (switch.verdict, switch.arity) == ("ignored", "0") else None
        if given.name in supported:
            kept.append(given)
        elif flag is None:
            near = [difflib.get_close_matches(given.name, names, n=1, cutoff=0.7) for names in (supported, known)]
            hint = next((f"; did you mean {match[0]}?" for match in near if match), "")
            problems.append(f"{given.origin}: {given.name} is not a flag{hint}")
        elif given.values == ("none",):
            continue  # of a run's args.txt, which has every flag that the program had then
        elif (problem := _refusal(given, flag)) is not None:
            problems.append(f"{given.origin}: {problem}")
            refused.append(given.name)
        else:
            notices.append(f"{given.origin}: {given.name} is ignored: {flag.reason}")
            ignored.append(given.name)
    if len(refused) > 1:  # a command line of Megatron's
        table = {"taken": [given.name for given in kept], "ignored": ignored, "not here, see above": refused}
        problems += [f"{verdict}: {' '.join(dict.fromkeys(names))}" for verdict, names in table.items() if names]
    return kept, notices, problems


def _refusal(given: Given, flag: MegatronFlag) -> str | None:
    """Give the reason that `given` cannot be ignored; None if it can."""
    if flag.verdict == "removed":
        return f"{given.name} is gone: {flag.reason}"
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


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Lines of up to 110 characters, and a switch without its `--no-` form."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=110, max_help_position=40)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if action.nargs != 0 or not name.startswith("--no-")]
        value = "" if action.nargs == 0 else f" {self._format_args(action, str(action.metavar))}"
        return ", ".join(names) + value


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any) -> tuple[argparse.Action, bool]:
    """Add the flag of a field whose annotation is `hint`; says also if it may be None."""
    spec: FlagSpec = field.metadata["flag"]
    help_text = spec.help + (f"; needs {spec.needs}" if spec.needs else "")
    if field.default is not None and field.default is not False and field.default not in ("", ()):
        help_text += f" (default: {as_words(field.default)})"
    settings: dict[str, Any] = {"dest": field.name, "help": help_text.replace("%", "%%")}
    parts = _parts(hint)
    optional = types.NoneType in parts
    if kinds := next((typing.get_args(part) for part in parts if typing.get_origin(part) is tuple), None):
        parts = _parts(kinds[0])  # the command line always makes a tuple
        settings["nargs"] = spec.nargs or ("+" if kinds[-1] is ... else len(kinds))
    if bool in parts:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        names_path = field.name.endswith(("path", "file", "dir", "folder", "model", "save", "load"))
        settings |= _one_value(parts, optional, spec.metavar or ("PATH" if names_path else None))
    return group.add_argument(flag_name(field), *spec.aliases, **settings), optional


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if is_union(hint) else (hint,)


def _one_value(parts: Sequence[Any], optional: bool, metavar: str | None) -> dict[str, Any]:
    """Settings with which argparse reads and shows one value, of the one type or the words in `parts`."""
    words = {str(word): word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)}
    types_ = [part for part in parts if typing.get_origin(part) is not Literal and part is not types.NoneType]
    if len(types_) > 1:
        raise TypeError(f"a flag has one type, possibly with words and | None, not {parts}")
    convert: Callable[[str], Any] = types_[0] if types_ else type(next(iter(words.values())))
    allowed = list(dict.fromkeys([*words, *(["none"] if optional else [])]))

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
    kind = (metavar or {"int": "N", "float": "X", "str": "TEXT"}[convert.__name__]) if types_ else ""
    shown = [kind, *words] if types_ else allowed
    return {"type": read, "metavar": f"{{{','.join(shown)}}}" if words else kind}
