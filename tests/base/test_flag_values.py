"""Numbers that no run can use, over all flags that take a number."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from megazpp.base.arguments import RunConfig, parse_run_config
from megazpp.base.checks import RunPlan, check_run_config
from megazpp.base.flags import FlagSpec, flag_name
from megazpp.parallel.launch import find_place
from megazpp.topology.cluster_file import detect_cluster

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)

# flags that are looked at only beside others
BESIDE = {
    "--rampup-batch-size": "--train-iters none --train-samples 100",
    "--train-samples": "--train-iters none",
    "--lr-decay-samples": "--train-iters none --train-samples 100",
    "--lr-warmup-samples": "--train-iters none --train-samples 100",
    "--lr-wsd-decay-samples": "--train-iters none --train-samples 100 --lr-decay-style WSD",
    "--sgd-momentum": "--optimizer sgd",
    "--lr-wsd-decay-iters": "--lr-decay-style WSD",
    "--start-weight-decay": "--weight-decay-incr-style linear --end-weight-decay 1",
    "--end-weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0",
    "--num-query-groups": "--group-query-attention",
    "--recompute-num-layers": "--recompute-granularity full --recompute-method block",
    "--save-interval": "--save x",
    "--keep-last": "--save x",
    "--save-retain-interval": "--save x",
    "--ckpt-step": "--load x",
    "--profile-step-start": "--profile",
    "--profile-step-end": "--profile --profile-step-start 0",
    "--profile-ranks": "--profile --profile-step-start 0 --profile-step-end 1",
}
IGNORED = {"--local-rank"}  # whatever its value
ZERO_MEANS = {
    "--hidden-dropout": "none",
    "--attention-dropout": "none",
    "--num-workers": "samples are prepared when asked for",
    "--weight-decay": "none",
    "--adam-beta1": "no average",
    "--adam-beta2": "no average",
    "--sgd-momentum": "none",
    "--zero-error-feedback-beta": "no average",
    "--diloco-outer-momentum": "none",
    "--diloco-delay": "merged at once",
    "--diloco-merge-alpha": "nothing of an island's own",
    "--clip-grad": "no clipping",
    "--lr": "weights that stay",
    "--min-lr": "decay to the end",
    "--lr-warmup-fraction": "none",
    "--lr-warmup-iters": "none",
    "--lr-warmup-samples": "none",
    "--lr-warmup-init": "from the beginning",
    "--start-weight-decay": "none at first",
    "--end-weight-decay": "none",
    "--max-restarts": "none",
    "--seed": "a seed",
    "--ckpt-step": "a checkpoint from before the first step",
    "--eval-iters": "no evaluation",
    "--profile-step-start": "from the first iteration",
    "--profile-ranks": "the first rank",
    "--sample-tokens": "no sample",
    "--sample-temperature": "the most likely token",
    "--sample-top-k": "all tokens",
    "--sample-min-p": "all tokens",
}


def numbers() -> Iterator[tuple[str, type, int]]:
    """Every flag that takes a number: its spelling, int or float, and how many."""
    for config in typing.get_type_hints(RunConfig).values():
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            kinds = {hints[field.name], *typing.get_args(hints[field.name])}
            kinds |= {kind for each in kinds for kind in typing.get_args(each)}
            spec: FlagSpec = field.metadata["flag"]
            for kind in {int, float} & kinds:
                yield flag_name(field), kind, spec.nargs if isinstance(spec.nargs, int) else 1


FLOATS = [(name, count) for name, kind, count in numbers() if kind is float]
INTS = [(name, count) for name, kind, count in numbers() if kind is int]
USED = [(name, count) for name, _, count in numbers() if name not in IGNORED]


def plan(flags: str) -> RunPlan:
    """All that happens before workers start."""
    config = parse_run_config(shlex.split(f"{SMALL} {flags}"), ROOT).config
    place = find_place(config.launch, {})
    cluster = detect_cluster(place.world_size, config.cluster, {}, tp=config.parallel.tensor_model_parallel_size)
    return check_run_config(config, cluster, device_type="cpu")


def refusals(flags: list[tuple[str, int]], value: str) -> list[str]:
    """One line for each flag, all of them on one command line."""
    with pytest.raises(ValueError, match="command line") as caught:
        plan(" ".join(f"{name} {' '.join([value] * count)}" for name, count in flags))
    return str(caught.value).splitlines()


def refusal(name: str, value: str, count: int) -> str:
    with pytest.raises(ValueError, match="--") as caught:
        plan(f"{BESIDE.get(name, '')} {name} {' '.join([value] * count)}")
    return str(caught.value)


def test_all_flags_that_take_a_number_are_tried_on_a_run_that_is_fine() -> None:
    assert plan("").layout.data == 4
    assert {("--lr", 1), ("--loss-spike-sigma", 1), ("--sample-top-p", 1)} <= set(FLOATS)
    assert {("--seed", 1), ("--rampup-batch-size", 3), ("--emulate-nodes", 1), ("--zero-gradient-bits", 2)} <= set(INTS)
    assert len(FLOATS) > 25
    assert len(INTS) > 50
    assert {*BESIDE, *ZERO_MEANS, *IGNORED} <= {name for name, _ in (*FLOATS, *INTS)}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_what_is_not_a_finite_number_is_refused_where_it_was_written(value: str) -> None:
    refused = refusals(FLOATS, value)
    assert len(refused) == len(FLOATS)
    for (name, _), line in zip(FLOATS, refused, strict=True):
        assert line.startswith(f"command line: {name}")
        assert line.endswith(f": {value!r} is not a finite number")


@pytest.mark.parametrize("value", ["99999999999999999999", "-99999999999999999999"])
def test_a_whole_number_beyond_64_bits_is_refused_where_it_was_written(value: str) -> None:
    for (name, _), line in zip(INTS, refusals(INTS, value), strict=True):
        assert line.startswith(f"command line: {name}")
        assert line.endswith(f": {value!r} does not fit 64 bits")


@pytest.mark.parametrize(("name", "count"), USED)
def test_a_negative_number_is_refused_by_the_flag_s_name(name: str, count: int) -> None:
    assert f"{name} -1" in refusal(name, "-1", count)


@pytest.mark.parametrize(("name", "count"), USED)
def test_zero_is_refused_by_the_flag_s_name_unless_it_means_something(name: str, count: int) -> None:
    if name in ZERO_MEANS:
        plan(f"{BESIDE.get(name, '')} {name} 0")
    else:
        assert f"{name} 0" in refusal(name, "0", count)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed 4294967296", "--seed 4294967296 is not a number from 0 to 4294967295"),
        ("--distributed-timeout-minutes 1e12", "--distributed-timeout-minutes 1000000000000.0 is more than a year"),
        ("--distributed-timeout-seconds-after-init 1e12", "1000000000000.0 is more than a year"),
        ("--sgd-momentum 1", "--sgd-momentum 1.0 is not in [0, 1)"),
        ("--lr -1 --min-lr 1e-4", "--lr -1.0 is negative"),
        ("--zero-block-size 33", "--zero-block-size 33 is not a power of two from 32 to 2048"),
        ("--zero-gradient-bits 3 4", "--zero-gradient-bits 3 4 is not two of 4, 8 and 16"),
    ],
)
def test_other_values_that_make_no_sense_are_refused_too(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match="--") as caught:
        plan(flags)
    assert message in str(caught.value)
