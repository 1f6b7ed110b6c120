"""Megatron's flags that are ignored or refused."""

from __future__ import annotations

import pytest

from megazpp.flags import Given
from megazpp.megatron_flags import MegatronFlag, read_megatron_flags, sift_flags

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
        ("--fp8-format", ["hybrid"], "use --bf16"),
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
    flags = [Given("--load-tag", ("x",), "a"), Given("--lr", ("1",), "b"), Given("--fp8-format", ("e4m3",), "c")]
    with pytest.raises(ValueError, match=r"^a(\.sh:3)?: ") as caught:
        sift_flags(flags, OURS, KNOWN)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["a", "c"]


def test_the_table_is_sorted_and_well_formed() -> None:
    assert list(KNOWN) == sorted(KNOWN, key=str.lower)
    for flag in KNOWN.values():
        assert isinstance(flag, MegatronFlag)
        assert flag.name.startswith("--")
        assert flag.arity in {"?", "*", "+"} or flag.arity.isdigit()
        assert flag.verdict in {"ignored", "unsupported"} or flag.verdict.startswith("only=")
        assert flag.reason


def test_each_flag_is_in_the_table_once() -> None:
    import megazpp.megatron_flags as module

    path = module.__file__.replace(".py", ".txt")
    with open(path, encoding="utf-8") as table:
        names = [line.split()[0] for line in table if line.startswith("-")]
    assert len(names) == len(set(names)) == len(KNOWN)
