"""Test command-line parsing: flag files, unsupported flags of Megatron-LM, and fields of config dataclasses."""

import contextlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from helpers.refusals import not_refused, table

from megazpp.base.command_line import (
    FlagParser,
    Given,
    HelpFormatter,
    expand_flag_files,
    sift_flags,
)
from megazpp.base.files import cache_folder
from megazpp.base.flag_tables import MEGATRON_TABLE, read_megatron_flags
from megazpp.base.flags import Config, flag
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.model.config import GPTConfig

KNOWN = read_megatron_flags()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- fields of config dataclasses ----


@dataclass(frozen=True, kw_only=True)
class PumpConfig(Config):
    """Pump: how water moves.

    More about it.

    Attributes:
        speed: revolutions per second, 100% is full speed.
        depth: metres.
        valves: how many.
        mode: which way.
        level: how much.
        loud: make noise.
        lights: show lights.
    """

    speed: float = flag(0.5, aliases=("--velocity",))
    depth: int | None = flag(None)
    valves: int | Literal["auto"] | None = flag(None)
    mode: Literal["push", "pull"] = flag("push")
    level: Literal[0, 1, 2] | None = flag(None)
    loud: bool = flag(False)
    lights: bool = flag(True, name="--show_lights")


@dataclass(frozen=True, kw_only=True)
class PipeConfig(Config):
    """Pipes.

    Attributes:
        label: name on the pipe.
        bends: angles in degrees.
        ramp: start, step, end.
        heat: watts.
        save: folder of the log.
        fan: which speed.
        noise: how loud.
    """

    label: str = flag("")
    bends: tuple[int, ...] = flag((), nargs="*")
    ramp: tuple[int, ...] | None = flag(None, nargs=3)
    heat: int | None = flag(None)
    save: str | None = flag(None)
    fan: str = flag("slow", needs="--heat")
    noise: float = flag(0.5, needs="--mode pull")


PARSER = FlagParser([PumpConfig, PipeConfig], program="pump")
READ = [
    ("--speed=-1e-3", "speed", -1e-3),
    ("--speed -1e-3", "speed", -1e-3),
    ("--velocity 3", "speed", 3.0),
    (f"--depth {2**63 - 1}", "depth", 2**63 - 1),
    ("--depth 7 --depth none", "depth", None),
    ("--valves auto --valves 7", "valves", 7),
    ("--valves 7 --valves auto", "valves", "auto"),
    ("--mode pull", "mode", "pull"),
    ("--level 2", "level", 2),
    ("--no-loud --loud", "loud", True),
    ("--no-show_lights", "lights", False),
    ("--label=a=b", "label", "a=b"),
    ("--label ''", "label", ""),
    ("--label '-x y'", "label", "-x y"),
    ("--label=--x", "label", "--x"),
    ("--label none", "label", "none"),
    ("--bends 10 -20 30", "bends", (10, -20, 30)),
    ("--bends 10 --bends", "bends", ()),
    ("--ramp 1 2 3", "ramp", (1, 2, 3)),
    ("--ramp 1 2 3 --ramp none", "ramp", None),
]
REFUSED = f"""
--depth deep | --depth: invalid int value: 'deep'
--depth {2**63} | --depth: '9223372036854775808' does not fit 64 bits
--bends 1 {-(2**63) - 1} | --bends: '-9223372036854775809' does not fit 64 bits
--speed inf | --speed/--velocity: 'inf' is not a finite number
--speed none | --speed/--velocity: invalid float value: 'none'
--valves many | --valves: invalid int or auto value: 'many'
--depth 1 2 | --depth takes one value, not 2
--mode twist | --mode: 'twist' is not one of push, pull
--save '' | --save: the value is empty: give a path, or leave the flag out
--save= | --save: the value is empty
--save ~no.such.user/a | --save: ~no.such.user/a: there is no such home folder; give a path without ~
--depth deep @~no.such.user/a | there is no flag file ~no.such.user/a
--level 3 | --level: '3' is not one of 0, 1, 2, none
--loud=1 | --loud takes no value, not 1
--ramp 1 2 | --ramp: expected 3 arguments
7 --depth | '7' is not a flag (flags begin with --, flag files with @)
"""


def parse(*argv: str) -> tuple[PumpConfig, PipeConfig]:
    return PARSER.read(argv, Path(), {}).configs  # type: ignore[return-value]


def test_word_after_the_last_flag_of_a_file_is_not_its_value(tmp_path):
    (tmp_path / "a.args").write_text("--bends 10\n20")
    assert parse(f"@{tmp_path}/a.args")[1].bends == (10, 20)
    with pytest.raises(ValueError, match="command line: '30' is not a flag"):
        parse(f"@{tmp_path}/a.args", "30")


def test_flag_value_has_its_fields_type_and_last_one_wins():
    for argv, field, value in READ:
        pump, pipe = parse(*shlex.split(argv))
        read = getattr(pump if hasattr(pump, field) else pipe, field)
        assert (read, type(read)) == (value, type(value)), argv


def test_value_of_wrong_type_or_range_is_rejected_with_its_origin():
    rows = [(argv, f"command line: {message}") for argv, message in table(REFUSED)]
    assert not not_refused(rows, lambda argv: parse(*shlex.split(argv)))


def test_flag_needs_its_feature_unless_a_file_gave_it_before_turning_off(folder):
    """Check that a flag of a feature is rejected if the feature is off.

    There are two exceptions: a file may give the flag at its default, or may turn the feature on if only the command
    line turns it off.
    """
    for file, hand, said in (
        ("", "--fan fast", "command line: --fan fast needs --heat"),
        ("", "--fan slow", "command line: --fan slow needs --heat"),
        ("", "--noise 1", "command line: --noise 1.0 needs --mode pull, not push"),
        ("--fan fast", "", "a.args:1: --fan fast needs --heat"),
        ("", "--heat 3 --fan fast --mode pull --noise 1", ""),
        # a run's args.txt also lists flags at their defaults, such as --fan slow, which must not require --heat
        ("--heat none --fan slow", "", ""),
        ("--heat 3 --fan fast", "--heat none", ""),
    ):
        (folder / "a.args").write_text(file)
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$") if said else contextlib.nullcontext():
            parse("@a.args", *hand.split())


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_text_that_records_cannot_contain_is_rejected_by_flag(folder, monkeypatch, encoding):
    """Reject text outside of the locale's encoding, because the run's records could not contain it.

    Python turns bytes of the command line that the encoding lacks into halves of surrogate pairs.
    """
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: encoding)
    text = "\udcff" if encoding == "utf-8" else "\xfc"
    remedy = "use others" if encoding == "utf-8" else "use others, or set PYTHONUTF8=1"
    lacks = re.escape(f"{text!a} has characters that the locale's encoding, {encoding}, lacks: {remedy}")
    with pytest.raises(ValueError, match=f"^command line: --label {lacks}$"):
        parse(f"--label={text}")
    if encoding == "ascii":
        (folder / "a.args").write_text(f"# comment\n--label {text}", encoding="utf-8")
        with pytest.raises(ValueError, match=f"^a.args:2: --label {lacks}$"):
            parse("@a.args")
    (folder / text).mkdir()
    (folder / text / "b.args").write_text("--speed 2")
    with pytest.raises(ValueError, match=r"^command line: flag file .*b.args' has characters that .*, lacks"):
        parse(f"@{text}/b.args")
    monkeypatch.chdir(folder / text)
    with pytest.raises(ValueError, match=r"^the working directory .* has characters that .*, lacks"):
        parse("--speed=2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / text))
    with pytest.raises(ValueError, match=r"^the folder for caches .* has characters that .*, lacks"):
        cache_folder()


def test_help_groups_flags_by_dataclass_and_shows_defaults(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Pump: how water moves: .*--depth N .*Pipes: .*--label TEXT ", text)
    assert "More about it" not in text
    for shown in (
        "100% is full speed (default: 0.5)",
        "--level {0,1,2,none}",
        "--valves {N,auto}",
        "--loud make noise",
        "--show_lights, --no-show_lights show lights (default: True)",
    ):
        assert shown in text
    assert "--dep" not in PARSER.spellings  # --dep is not accepted as an abbreviation of --depth
    assert {"--depth", "--velocity", "--no-loud", "--no-show_lights", "--help"} <= PARSER.spellings


def test_help_and_configs_have_the_defaults_of_the_program_and_of_checkpoints():
    defaults = {"speed": 2.5, "lights": False}
    parser = FlagParser([PumpConfig, PipeConfig], program="p", defaults=defaults, from_checkpoint=("mode", "loud"))
    text = " ".join(parser.help_text(everything=True).split())
    for shown in (
        "full speed (default: 2.5)",
        "--show_lights show",
        "way (default: the checkpoint's)",
        "--loud, --no-",
    ):
        assert shown in text
    for flags, values in (("", (2.5, False)), ("--speed 0 --show_lights", (0.0, True))):
        (pump, _), origins, _ = parser.read(flags.split(), Path(), {})
        assert (pump.speed, pump.lights, len(origins)) == (*values, len(flags.split()) // 3 * 2)


def test_help_breaks_no_flag():
    """Check that no line of a help text ends inside a flag. argparse's own formatter would break lines at hyphens."""
    widths = range(20, 60)
    lines = [
        line for width in widths for line in HelpFormatter("p")._split_lines("set --a-b-c --no-d-e too " * 4, width)
    ]
    assert not [line for line in lines if line.endswith("-")]


# ---- flag files ----


def expand(folder: Path, files: dict[str, str], *argv: str) -> list[tuple[str, str]]:
    """Write `files` into `folder`, expand `argv`, and return (text, origin) of each word.

    `folder`/script stands for the folder of the program.
    """
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("latin-1"))
    return expand_flag_files(argv, folder / "script")


def test_flag_file_expands_to_its_words(folder):
    """Expand a flag file with comments, a byte order mark and line continuations, which add no words.

    A quoted text over several lines is one word, with its line breaks.
    """
    content = (
        "\xef\xbb\xbf# comment\n\n--name 'two words' --empty ''   # trailing comment\n"
        "--path a\\ b \\\n    c  # the end \\\n--lr 3e-4\n"
        "--stop 'one  \n\r\n  # two\\\n' --a 1\r\n# don't\n--seed 3\n"
    )
    by_line = {
        3: ["--name", "two words", "--empty", ""],
        4: ["--path", "a b"],
        5: ["c"],
        6: ["--lr", "3e-4"],
        7: ["--stop", "one  \n\r\n  # two\\\n", "--a", "1"],
        12: ["--seed", "3"],
    }
    inside = [(word, f"a.args:{line}") for line, words in by_line.items() for word in words]
    outside = [("--x", "command line"), ("--y", "command line")]
    assert expand(folder, {"a.args": content}, "--x", "@a.args", "--y") == [outside[0], *inside, outside[1]]


def test_flag_file_is_found_next_to_includer_in_cwd_or_next_to_script(folder):
    files = {"configs/model.args": "@common/base.args\n--b 2\n", "configs/more.args": "--c 3\n"}
    files |= {"configs/common/base.args": "@../more.args\n--a\n", "script/d.args": "--d", "script/e.args": "--no"}
    assert expand(folder, {**files, "e.args": "--e"}, "@configs/model.args", "@d.args", "@e.args") == [
        ("--c", "configs/more.args:1"),
        ("3", "configs/more.args:1"),
        ("--a", "configs/common/base.args:2"),
        ("--b", "configs/model.args:2"),
        ("2", "configs/model.args:2"),
        ("--d", "script/d.args:1"),
        ("--e", "e.args:1"),
    ]


def test_unreadable_flag_file_is_rejected_with_file_and_line(folder):
    circle = {"x": "@y.args\n", "y.args": "\n@z.args\n", "z.args": "@y.args\n"}
    rows = [
        ({}, "command line: there is no flag file x (looked in . and script)"),
        ({"x": "--a 1\n--b 'open\n"}, "x:2: No closing quotation"),
        ({"x": "--a \xff\n"}, "x: cannot be read: "),
        ({"x": "\n\n@missing.args\n"}, "x:3: there is no flag file missing.args (looked in .)"),
        (circle, "z.args:1: flag files include each other in a circle: y.args -> z.args -> y.args"),
    ]
    assert not not_refused(rows, lambda files: expand(folder, files, "@x"))
    # including the same file twice is allowed, because it is no circle
    assert len(expand(folder, {"twice": "@base\n@base\n", "base": "--a"}, "@twice")) == 2


# ---- flags of Megatron-LM that are not supported ----


MEGATRON_REFUSED = """
--pretrained-checkpoint ckpt | is a Megatron flag that is not supported: use --load with --finetune
--num-layers-per-virtual-pipeline-stage 2 | is not supported: pipeline parallelism is not supported
--expert-tensor-parallel-size 2 | is not supported, only 1: tensor parallelism does not split experts
--DDP-impl | --DDP-impl takes one value, not 0
--mmap-warmup 5 | --mmap-warmup takes no value, not 1
--micro-batchsize 4 | --micro-batchsize is not a flag; did you mean --micro-batch-size?
--lerning_rate 1e-3 | --lerning_rate is not a flag; did you mean --lr?
--transformer-imp x | did you mean --transformer-impl or --split-transformers?
--qqq | --qqq is not a flag
--learning_rate 1 | --learning_rate is not a flag: use --lr
--no-lr | --no-lr is not a flag: --lr takes a value and cannot be switched off; give another value, or leave the flag
"""


def sift(text: str) -> tuple[list[Given], list[str]]:
    """Return the flags that this project has, and notices about flags of Megatron-LM that are ignored.

    Raise ValueError for a flag of Megatron-LM that is not supported.
    """
    name, *values = text.split()
    ours = {"--num-layers", "--micro-batch-size", "--zero-stage", "--lr"}
    kept, notices, refused = sift_flags([Given(name, tuple(values), "a.sh:3")], ours, KNOWN)
    if refused:
        raise ValueError(refused[0])
    return kept, notices


def test_own_flag_passes_and_effectless_flag_is_dropped_with_notice():
    assert sift("--lr 3e-4") == ([Given("--lr", ("3e-4",), "a.sh:3")], [])
    switches = ("--mmap-warmup", "--no-query-key-layer-scaling", "--no-async-tensor-model-parallel-allreduce")
    for words in (*switches, "--DDP-impl local", "--expert-tensor-parallel-size 1"):
        kept, (notice,) = sift(words)
        assert kept == []
        assert notice.startswith(f"a.sh:3: {words.split()[0]} is ignored: ")


def test_unsupported_megatron_flag_is_rejected_with_the_reason():
    assert not not_refused(table(MEGATRON_REFUSED), sift)


def test_all_mistakes_are_reported_at_once_with_summary_of_megatron_flags():
    """Give several wrong flags; one message must list all mistakes.

    These are unknown flags, invalid values and combinations that a config rejects, each with its origin.
    """
    parser = FlagParser([GPTConfig, CheckpointConfig], program="p")
    words = "--lr 1 --num-layers x --moe-min-capacity 8 --keep-last 3 --DDP-impl local --checkpoint-activations"
    with pytest.raises(ValueError, match="--lr is not a flag") as caught:
        parser.read(words.split(), Path(), KNOWN)
    assert [" ".join(line.split()[:5]) for line in str(caught.value).splitlines()] == [
        "command line: --lr is not",
        "command line: --moe-min-capacity is a",
        "command line: --checkpoint-activations is a",
        "taken: --num-layers --keep-last",
        "ignored: --DDP-impl",
        "not supported, see above: --moe-min-capacity",
        "command line: --num-layers: invalid int",
        "--keep-last needs --save: without it,",
    ]


def test_megatron_table_lists_every_flag_once_with_arity_and_reason():
    lines = [line for line in MEGATRON_TABLE.read_text().splitlines() if line.startswith("-")]
    row = re.compile(r"(--\S+) +(\d|[?*+]) +(ignored|unsupported|only=\S+) +\S.*")
    assert len({row.fullmatch(line)[1] for line in lines}) == len(lines) == len(KNOWN) > 500
