"""Fields of config dataclasses as command-line flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from megazpp.flag_files import COMMAND_LINE, Word
from megazpp.flags import FlagParser, flag, split_into_flags


@dataclass(frozen=True, kw_only=True)
class PumpConfig:
    """Pump: how water moves.

    More about it.
    """

    speed: float = flag(0.5, "revolutions per second, 100% is full speed", aliases=("--velocity",))
    depth: int | None = flag(None, "metres")
    valves: int | Literal["auto"] | None = flag(None, "how many")
    mode: Literal["push", "pull"] = flag("push", "which way")
    level: Literal[0, 1, 2] | None = flag(None, "how much")
    loud: bool = flag(False, "make noise")
    lights: bool = flag(True, "show lights", name="--show_lights")


@dataclass(frozen=True, kw_only=True)
class PipeConfig:
    """Pipes."""

    label: str = flag("", "name on the pipe")
    bends: tuple[int, ...] = flag((), "angles in degrees", nargs="*")
    ramp: tuple[int, ...] | None = flag(None, "start, step, end", nargs=3)


def parse(*argv: str) -> tuple[PumpConfig, PipeConfig]:
    parser = FlagParser([PumpConfig, PipeConfig], program="pump")
    given = list(split_into_flags([Word(text, COMMAND_LINE) for text in argv]))
    return parser.build(parser.parse(given)[0])  # type: ignore[return-value]


def test_no_flags_give_the_defaults() -> None:
    assert parse() == (PumpConfig(), PipeConfig())


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--speed", "2"], "speed", 2.0),
        (["--speed=-1e-3"], "speed", -1e-3),
        (["--speed", "-1e-3"], "speed", -1e-3),
        (["--depth", str(2**63 - 1)], "depth", 2**63 - 1),
        (["--velocity", "3"], "speed", 3.0),
        (["--depth", "7"], "depth", 7),
        (["--depth", "7", "--depth", "none"], "depth", None),
        (["--valves", "7"], "valves", 7),
        (["--valves", "7", "--valves", "auto"], "valves", "auto"),
        (["--valves", "auto", "--valves", "none"], "valves", None),
        (["--mode", "pull"], "mode", "pull"),
        (["--level", "2"], "level", 2),
        (["--level", "2", "--level", "none"], "level", None),
        (["--loud"], "loud", True),
        (["--loud", "--no-loud"], "loud", False),
        (["--no-show_lights"], "lights", False),
        (["--label", "a = b"], "label", "a = b"),
        (["--label=a=b"], "label", "a=b"),
        (["--label", ""], "label", ""),
        (["--label", "-x y"], "label", "-x y"),
        (["--label=--x"], "label", "--x"),
        (["--label", "none"], "label", "none"),
        (["--bends", "10", "-20", "30"], "bends", (10, -20, 30)),
        (["--bends", "10", "--bends"], "bends", ()),
        (["--ramp", "1", "2", "3"], "ramp", (1, 2, 3)),
        (["--ramp", "1", "2", "3", "--ramp", "none"], "ramp", None),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_field_and_the_last_one_wins(argv: list[str], field: str, value: Any) -> None:
    pump, pipe = parse(*argv)
    read = getattr(pump if hasattr(pump, field) else pipe, field)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--depth", "deep"], "command line: --depth: invalid int value: 'deep'"),
        (["--depth", "1.5"], "command line: --depth: invalid int value: '1.5'"),
        (["--depth", str(2**63)], "command line: --depth: '9223372036854775808' does not fit 64 bits"),
        (["--bends", "1", str(-(2**63) - 1)], "command line: --bends: '-9223372036854775809' does not fit 64 bits"),
        (["--speed", "inf"], "command line: --speed/--velocity: 'inf' is not a finite number"),
        (["--speed", "nan"], "command line: --speed/--velocity: 'nan' is not a finite number"),
        (["--valves", "many"], "command line: --valves: invalid int or auto value: 'many'"),
        (["--depth"], "command line: --depth takes one value, not 0"),
        (["--depth", "1", "2"], "command line: --depth takes one value, not 2"),
        (["--speed", "none"], "command line: --speed/--velocity: invalid float value: 'none'"),
        (["--mode", "twist"], "command line: --mode: 'twist' is not one of push, pull"),
        (["--level", "3"], "command line: --level: '3' is not one of 0, 1, 2, none"),
        (["--loud", "yes"], "command line: --loud takes no value, not yes"),
        (["--loud=1"], "command line: --loud takes no value, not 1"),
        (["--ramp", "1", "2"], "command line: --ramp: expected 3 arguments"),
        (["7", "--depth"], "command line: '7' is not a flag (flags begin with --, flag files with @)"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_origin(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="command line: ") as caught:
        parse(*argv)
    assert str(caught.value) == message


def test_every_wrong_flag_is_reported_at_once() -> None:
    with pytest.raises(ValueError, match=":") as caught:
        parse("--depth", "deep", "--speed", "2", "--mode", "twist")
    assert len(str(caught.value).splitlines()) == 2


def test_abbreviations_are_not_accepted() -> None:
    parser = FlagParser([PumpConfig, PipeConfig], program="pump")
    assert "--dep" not in parser.spellings
    assert {"--depth", "--velocity", "--no-loud", "--no-show_lights", "--help"} <= parser.spellings


def test_origins_name_the_place_of_the_flag_that_won() -> None:
    parser = FlagParser([PumpConfig], program="pump")
    words = [
        Word("--depth", "a.args:1"),
        Word("1", "a.args:2"),
        Word("--speed", "a.args:3"),
        Word("2", "a.args:3"),
        Word("--velocity", "b.args:9"),
        Word("3", "b.args:9"),
    ]
    values, origins = parser.parse(list(split_into_flags(words)))
    assert values == {"depth": 1, "speed": 3.0}
    assert origins == {"depth": "a.args:1", "speed": "b.args:9"}


def test_help_is_grouped_by_dataclass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "Pump: how water moves:\n" in text
    assert "More about it" not in text
    assert text.index("Pump: how water moves:") < text.index("--depth INT") < text.index("Pipes:")
    assert text.index("Pipes:") < text.index("--label STR")
    assert "100% is full speed (default 0.5)" in " ".join(text.split())
    assert "--level {0,1,2,none}" in text
    assert "--valves {INT,auto}" in text


def test_two_configs_cannot_share_a_field() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other:
        depth: int = flag(1, "again", name="--other-depth")

    with pytest.raises(AssertionError, match="depth"):
        FlagParser([PumpConfig, Other], program="pump")
