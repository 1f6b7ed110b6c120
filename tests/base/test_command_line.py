"""A command line: flag files, Megatron's other flags, fields of config dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from megazpp.base.command_line import (
    COMMAND_LINE,
    MEGATRON_TABLE,
    FlagParser,
    Given,
    MegatronFlag,
    Word,
    expand_flag_files,
    read_megatron_flags,
    sift_flags,
    split_into_flags,
)
from megazpp.base.flags import flag


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
    given = split_into_flags([Word(text, COMMAND_LINE) for text in argv])
    return parser.parse(given).configs  # type: ignore[return-value]


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
        (["--depth", "9" * 500], "command line: --depth: 99999999999999999999..., of 500 digits, does not fit 64 bits"),
        (["--label", "a\udcff"], "command line: --label 'a\\udcff' is not text in UTF-8"),
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
    (pump,), origins, _ = parser.parse(split_into_flags(words))
    assert pump == PumpConfig(depth=1, speed=3.0)
    assert origins == {"depth": "a.args:1", "speed": "b.args:9"}


def test_a_flag_of_what_is_off_is_refused_unless_it_is_left_of_a_file_whose_feature_was_turned_off() -> None:
    @dataclass(frozen=True, kw_only=True)
    class HeaterConfig:
        """Heater."""

        heat: int | None = flag(None, "watts")
        fan: str = flag("slow", "which speed", needs="--heat")
        noise: float = flag(0.5, "how loud", needs="--mode pull")

    parser = FlagParser([PumpConfig, HeaterConfig], program="pump")

    def refused(text: str, origin: str = COMMAND_LINE, then: str = "") -> str | None:
        words = [*(Word(w, origin) for w in text.split()), *(Word(w, COMMAND_LINE) for w in then.split())]
        try:
            parser.parse(split_into_flags(words))
        except ValueError as error:
            return str(error)
        return None

    assert refused("--fan slow") == "command line: --fan slow needs --heat"
    assert refused("--noise 1 --fan fast") == (
        "command line: --fan fast needs --heat\ncommand line: --noise 1.0 needs --mode pull, not push"
    )
    assert refused("--fan fast", "a.args:1") == "a.args:1: --fan fast needs --heat"
    assert refused("--heat 3 --fan fast --mode pull --noise 1") is None
    assert refused("--heat none --fan slow", "args.txt:1") is None  # what a run has written down
    assert refused("--heat 3 --fan fast", "a.args:1", then="--heat none") is None


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


# ---- flag files ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def texts(words: list[Word]) -> list[str]:
    return [word.text for word in words]


def test_a_file_stands_for_its_words(folder: Path) -> None:
    (folder / "a.args").write_text(
        "# comment\n"
        "\n"
        "--name 'two words' --empty ''   # trailing comment\n"
        "--path a\\ b \\\n"
        "    c  # the end \\\n"
        "--lr 3e-4\n"
    )
    words = expand_flag_files(["--x", "@a.args", "--y"], folder)
    assert words == [
        Word("--x", "command line"),
        Word("--name", "a.args:3"),
        Word("two words", "a.args:3"),
        Word("--empty", "a.args:3"),
        Word("", "a.args:3"),
        Word("--path", "a.args:4"),
        Word("a b", "a.args:4"),
        Word("c", "a.args:5"),
        Word("--lr", "a.args:6"),
        Word("3e-4", "a.args:6"),
        Word("--y", "command line"),
    ]


def test_an_included_path_is_relative_to_the_including_file(folder: Path) -> None:
    (folder / "configs" / "common").mkdir(parents=True)
    (folder / "configs" / "model.args").write_text("@common/base.args\n--b 2\n")
    (folder / "configs" / "common" / "base.args").write_text("@../more.args\n--a 1\n")
    (folder / "configs" / "more.args").write_text("--c 3\n")
    words = expand_flag_files(["@configs/model.args"], folder)
    assert texts(words) == ["--c", "3", "--a", "1", "--b", "2"]
    assert [word.origin for word in words[::2]] == [
        "configs/more.args:1",
        "configs/common/base.args:2",
        "configs/model.args:2",
    ]


def test_a_path_on_the_command_line_is_looked_for_here_and_then_beside_the_script(folder: Path, tmp_path: Path) -> None:
    script_dir = tmp_path / "script"
    script_dir.mkdir()
    (script_dir / "a.args").write_text("--from script\n")
    (script_dir / "b.args").write_text("--from script\n")
    (folder / "b.args").write_text("--from here\n")
    assert texts(expand_flag_files(["@a.args"], script_dir)) == ["--from", "script"]
    assert texts(expand_flag_files(["@b.args"], script_dir)) == ["--from", "here"]
    with pytest.raises(ValueError, match=r"command line: there is no flag file c.args \(looked in \. and .*script\)"):
        expand_flag_files(["@c.args"], script_dir)


def test_the_same_file_may_be_included_twice_but_not_by_itself(folder: Path) -> None:
    (folder / "base.args").write_text("--a 1\n")
    (folder / "twice.args").write_text("@base.args\n@base.args\n")
    assert texts(expand_flag_files(["@twice.args"], folder)) == ["--a", "1"] * 2
    (folder / "x.args").write_text("@y.args\n")
    (folder / "y.args").write_text("\n@z.args\n")
    (folder / "z.args").write_text("@y.args\n")
    with pytest.raises(ValueError, match=":") as caught:
        expand_flag_files(["@x.args"], folder)
    assert str(caught.value) == ("z.args:1: flag files include each other in a circle: y.args -> z.args -> y.args")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"--a 1\n--b 'open\n", "bad.args:2: No closing quotation"),
        (b"--a \xff\n", "bad.args: cannot be read: "),
        (b"\n\n@missing.args\n", "bad.args:3: there is no flag file missing.args (looked in .)"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_line(folder: Path, content: bytes, message: str) -> None:
    (folder / "bad.args").write_bytes(content)
    with pytest.raises(ValueError, match=":") as caught:
        expand_flag_files(["@bad.args"], folder)
    assert str(caught.value).startswith(message)


def test_a_quoted_value_may_reach_over_lines_and_keeps_them_as_they_are(folder: Path) -> None:
    (folder / "a.args").write_bytes(b"--stop 'one  \n\r\n  # two\\\n' --lr 1\r\n# don't\n--seed 3\n")
    assert expand_flag_files(["@a.args"], folder) == [
        Word("--stop", "a.args:1"),
        Word("one  \n\r\n  # two\\\n", "a.args:1"),
        Word("--lr", "a.args:1"),
        Word("1", "a.args:1"),
        Word("--seed", "a.args:6"),
        Word("3", "a.args:6"),
    ]


# ---- Megatron's other flags ----


KNOWN = read_megatron_flags()
OURS = frozenset({"--num-layers", "--micro-batch-size", "--zero-stage", "--lr"})


def sift(name: str, *values: str) -> tuple[tuple[Given, ...], tuple[str, ...]]:
    return sift_flags([Given(name, values, "a.sh:3")], OURS, KNOWN)


def refusal(name: str, *values: str) -> str:
    with pytest.raises(ValueError, match=r"^a(\.sh:3)?: ") as caught:
        sift(name, *values)
    return str(caught.value)


def test_our_own_flags_pass() -> None:
    assert sift("--lr", "3e-4") == ((Given("--lr", ("3e-4",), "a.sh:3"),), ())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("--DDP-impl", ["local"]),
        ("--no-async-tensor-model-parallel-allreduce", []),
        ("--no-masked-softmax-fusion", []),
        ("--no-bias-gelu-fusion", []),
        ("--no-gradient-accumulation-fusion", []),
        ("--transformer-impl", ["transformer_engine"]),
        ("--mmap-warmup", []),
        ("--data-impl", ["mmap"]),
        ("--overlap-param-gather-with-optimizer-step", []),
        ("--no-query-key-layer-scaling", []),
        ("--use-pytorch-profiler", []),
    ],
)
def test_a_flag_without_effect_here_is_dropped_with_its_values_and_one_notice(name: str, values: list[str]) -> None:
    flags, notices = sift(name, *values)
    assert flags == ()
    assert len(notices) == 1
    assert notices[0].startswith(f"a.sh:3: {name} is ignored: ")


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("--pretrained-checkpoint", ["ckpt"], "use --load with --finetune"),
        ("--non-persistent-save-interval", ["10"], "use --save-interval and --keep-last"),
        ("--num-experts", ["8"], "no mixture-of-experts layers"),
        ("--fp4-format", ["e2m1"], "there is no fp4"),
        ("--num-layers-per-virtual-pipeline-stage", ["2"], "no pipeline parallelism"),
        ("--checkpoint-activations", [], "use --recompute-granularity"),
        ("--batch-size", ["4"], "use --micro-batch-size"),
        ("--record-shapes", [], "--profile records operators"),
    ],
)
def test_an_unsupported_flag_is_refused_in_one_line_with_the_reason(name: str, values: list[str], words: str) -> None:
    message = refusal(name, *values)
    assert message.startswith(f"a.sh:3: {name} is a Megatron flag that is not supported: ")
    assert words in message
    assert "\n" not in message


def test_a_flag_of_our_own_that_is_gone_is_refused_with_what_to_use() -> None:
    assert refusal("--nccl-cross-min-ctas", "2") == (
        "a.sh:3: --nccl-cross-min-ctas is gone: set NCCL's own variable NCCL_MIN_CTAS, which holds for all groups"
    )


def test_a_harmless_value_of_an_unsupported_flag_is_ignored() -> None:
    assert sift("--expert-model-parallel-size", "1")[0] == ()
    assert refusal("--expert-model-parallel-size", "2") == (
        "a.sh:3: --expert-model-parallel-size 2 is not supported, only 1: there are no mixture-of-experts layers"
    )


def test_an_ignored_flag_with_the_wrong_number_of_values_is_refused() -> None:
    assert refusal("--DDP-impl") == "a.sh:3: --DDP-impl takes one value, not 0"
    assert refusal("--mmap-warmup", "5") == "a.sh:3: --mmap-warmup takes no value, not 1"


def test_an_unknown_flag_is_refused_with_the_nearest_one() -> None:
    assert refusal("--micro-batchsize", "4") == (
        "a.sh:3: --micro-batchsize is not a flag; did you mean --micro-batch-size?"
    )
    assert refusal("--transformer-imp", "x").endswith("did you mean --transformer-impl?")
    assert refusal("--qqq") == "a.sh:3: --qqq is not a flag"


def test_all_refused_flags_are_reported_together() -> None:
    flags = [Given("--load-tag", ("x",), "a"), Given("--lr", ("1",), "b"), Given("--fp4-format", ("e2m1",), "c")]
    with pytest.raises(ValueError, match=r"^a(\.sh:3)?: ") as caught:
        sift_flags(flags, OURS, KNOWN)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["a", "c"]


def test_the_table_is_sorted_and_well_formed() -> None:
    assert list(KNOWN) == sorted(KNOWN, key=str.lower)
    for known in KNOWN.values():
        assert isinstance(known, MegatronFlag)
        assert known.name.startswith("--")
        assert known.arity in {"?", "*", "+"} or known.arity.isdigit()
        assert known.verdict in {"ignored", "unsupported", "removed"} or known.verdict.startswith("only=")
        assert known.reason


def test_each_flag_is_in_the_table_once() -> None:
    names = [line.split()[0] for line in MEGATRON_TABLE.read_text().splitlines() if line.startswith("-")]
    assert len(names) == len(set(names)) == len(KNOWN)
