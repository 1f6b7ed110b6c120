"""Test the checks of values that several flags share, and the printed lists of all flags."""

import math
from dataclasses import dataclass

from helpers.refusals import not_refused

from megazpp.base.command_line import FlagParser
from megazpp.base.flags import check_not_negative, check_positive, flag, render_arguments_block, render_flags


@dataclass(frozen=True, kw_only=True)
class PumpConfig:
    """Pump: how water moves.

    Attributes:
        learning_rate: a number.
        bf16: a switch.
        name: a text.
    """

    learning_rate: float | None = flag(None)
    bf16: bool = flag(False, name="--b_f16")
    name: str = flag("")


@dataclass(frozen=True, kw_only=True)
class PipeConfig:
    """Pipes.

    Attributes:
        data_path: many texts.
    """

    data_path: tuple[str, ...] = flag((), nargs="*")


ORIGINS = {"learning_rate": "configs/a.args:3", "data_path": "command line", "name": "command line"}


def test_rendered_flags_show_origins_and_parse_back_as_a_flag_file(tmp_path):
    assert render_flags((PumpConfig(learning_rate=3e-4), PipeConfig(data_path=("a b", "c"))), ORIGINS) == (
        "# Pump: how water moves\n"
        "--learning-rate 0.0003  # configs/a.args:3\n"
        "--no-b_f16              # default\n"
        "--name ''               # command line\n"
        "\n"
        "# Pipes\n"
        "--data-path 'a b' c     # command line\n"
    )
    odd = PumpConfig(learning_rate=1e-05, bf16=True, name="--it's # @x"), PipeConfig(data_path=("x y#z", "a\n\nb\r\t'"))
    for wanted in (odd, (PumpConfig(), PipeConfig())):
        (tmp_path / "flags.args").write_text(render_flags(wanted, {}))
        parser = FlagParser([PumpConfig, PipeConfig], program="pump")
        assert parser.read([f"@{tmp_path}/flags.args"], tmp_path, {}).configs == wanted


def test_log_block_shows_non_default_flags_with_origins():
    long = PipeConfig(data_path=("a" * 70,))
    assert render_arguments_block((PumpConfig(learning_rate=3e-4), long), ORIGINS).splitlines()[1:-1] == [
        f"  {'--learning-rate 0.0003':60}  # configs/a.args:3",
        f"  --data-path {'a' * 70}  # command line",
        "  and 2 flags at their defaults: --print-config shows all",
    ]


def test_out_of_range_numbers_are_rejected_by_flag_name():
    rows = [(check_positive, value, f"--learning-rate {value} is not positive") for value in (0, math.nan, math.inf)]
    rows += [
        (check_not_negative, value, f"--learning-rate {text}; give 0 or a larger number")
        for value, text in ((-1, "-1 is negative"), (math.nan, "nan is not a number"))
    ]
    assert not not_refused(rows, lambda check, value: check(PumpConfig(learning_rate=value), "learning_rate"))
    check_positive(PumpConfig(learning_rate=0.5), "learning_rate")
    check_not_negative(PumpConfig(learning_rate=0), "learning_rate")
