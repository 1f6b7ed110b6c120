"""Test the checks of values that several flags share, and the printed lists of all flags."""

import math
from dataclasses import dataclass
from typing import Literal

from helpers.refusals import not_refused

from megazpp.base.command_line import FlagParser
from megazpp.base.flags import Config, flag, render_arguments_block, render_flags


@dataclass(frozen=True, kw_only=True)
class PumpConfig(Config):
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
class PipeConfig(Config):
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


@dataclass(frozen=True, kw_only=True)
class TankConfig(Config):
    """Tank.

    Attributes:
        size: a number above 0.
        level: a number of at least 0, or "full".
        leak: a number below 1.
        share: a number of at most 1.
        hoses: a number from 1 to 4.
    """

    size: float | None = flag(None, must_be="positive")
    level: float | Literal["full"] = flag("full", must_be="not negative")
    leak: float = flag(0.0, must_be="below one")
    share: float = flag(1.0, must_be="a share")
    hoses: int | None = flag(None, must_be="positive", most=(4, "the number of its taps"))


def test_out_of_range_numbers_are_rejected_by_flag_name():
    rows = [
        ({"size": value}, f"--size {value} is not positive; give a finite number above 0") for value in (0, math.inf)
    ]
    rows += [({"share": value}, f"--share {value} is not in (0, 1]; give a number above 0") for value in (0, 1.5)]
    rows += [
        ({"leak": value}, f"--leak {value} is not in [0, 1); give at least 0 and less than 1") for value in (-1, 1.0)
    ]
    rows += [({name: math.nan}, f"--{name} nan is not a number; give") for name in ("size", "level", "leak", "share")]
    rows += [
        ({"level": -1}, "--level -1 is negative; give 0 or a larger number"),
        ({"level": "half"}, "--level half is not one of full"),
        ({"hoses": 5}, "--hoses 5 is more than 4, the number of its taps; give a smaller number"),
        ({"hoses": 0}, "--hoses 0 is not positive"),
        ({"size": -1, "leak": 2}, "--size -1 is not positive; give a finite number above 0\n--leak 2 is not in [0, 1)"),
    ]
    assert not not_refused(rows, lambda values: TankConfig(**values))
    assert TankConfig(size=0.5, level=0, leak=0.5, share=0.5, hoses=4).level == 0
