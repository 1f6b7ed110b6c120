"""The flags of post-training: numbers that no run can use, and what an objective does not have."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from megazpp.base.command_line import FlagParser
from megazpp.base.flags import FlagSpec, flag_name
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.start import EXTRA

PARSER = FlagParser(EXTRA, program="x")
ZERO_MEANS = {
    "--beta": "no reference",
    "--label-smoothing": "none",
    "--ref-ckpt-step": "a checkpoint from before the first step",
    "--kl-coef": "no reference",
    "--vf-coef": "values are not trained",
    "--missing-eos-penalty": "none",
    "--log-completions": "none",
    "--lora-dropout": "none",
    "--reward-weights": "a reward that is only logged",
    "--prefetch-layers": "each layer is fetched when it is used",
}
NEGATIVE_MEANS = {"--reward-weights": "a penalty"}
BESIDE = {
    "--reward-weights": ["--reward-funcs", "a:b"],
    "--label-smoothing": ["--loss-type", "robust"],
    "--sync-ref-model": ["--beta", "0.1"],
}
NEEDS = {flag_name(f): f.metadata["flag"].needs for each in EXTRA for f in dataclasses.fields(each)}
DEFAULTS = {flag_name(f): f.default for each in EXTRA for f in dataclasses.fields(each)}
VALUES = {"--lora-target-modules": "q_proj", "--reward-funcs": "a:b", "--scale-rewards": "batch", "--reward-load": "x"}
VALUES |= {"--advantage-estimator": "rloo", "--ref-load": "x", "--reward-weights": "1", "--loss-weights": "1"}
VALUES |= {"--base-weight-bits": "8", "--importance-sampling-level": "sequence"}
VALUES |= {"--loss-type": "dapo", "--label-smoothing": "0.1"}


def numbers() -> list[str]:
    found = []
    for config in EXTRA:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            kinds = {hints[field.name], *typing.get_args(hints[field.name])}
            kinds |= {kind for each in kinds for kind in typing.get_args(each)}
            assert isinstance(field.metadata["flag"], FlagSpec)
            if {int, float} & kinds:
                found.append(flag_name(field))
    return found


def read(*flags: str) -> None:
    PARSER.read(list(flags), Path(), {})


def with_feature(needs: str | None) -> list[str]:
    """Flags that turn a feature on, and what that needs itself."""
    if needs is None:
        return []
    feature = needs.split()[0]
    on = [feature] if DEFAULTS[feature] is False else [*needs.split(), "1"][:2]
    return [*with_feature(NEEDS[feature]), *on, *(["--beta", "0.1"] if feature == "--sync-ref-model" else [])]


@pytest.mark.parametrize("name", [name for name, needs in NEEDS.items() if needs is not None])
def test_a_flag_of_what_is_off_is_refused_by_its_name(name: str):
    value = VALUES.get(name, "0.9" if isinstance(DEFAULTS[name], float) else "3")
    given = [name] if isinstance(DEFAULTS[name], bool) else [name, value]
    with pytest.raises(ValueError, match=f"line: {name}.* needs {NEEDS[name]}"):
        read("--objective", "sft" if "reward" in str(NEEDS[name]) else "reward", *BESIDE.get(name, []), *given)
    read(*with_feature(NEEDS[name]), *BESIDE.get(name, []), *given)


@pytest.mark.parametrize("name", numbers())
def test_a_negative_number_and_a_zero_that_means_nothing_are_refused_by_the_flag_s_name(name: str):
    beside = [*BESIDE.get(name, []), *with_feature(NEEDS[name])]
    for value, means in (("-1", NEGATIVE_MEANS), ("0", ZERO_MEANS)):
        if name in means:
            read(*beside, name, value)
        else:
            with pytest.raises(ValueError, match=f"{name} {value}"):
                read(*beside, name, value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"objective": "dpo", "loss_type": ("ipo", "dapo")}, "--loss-type dapo is not one of sigmoid, hinge, ipo,"),
        (
            {"objective": "grpo", "loss_type": ("ipo",)},
            "--loss-type ipo is not one of grpo, bnpo, dr_grpo, dapo, cispo",
        ),
        ({"objective": "grpo", "loss_type": ("grpo", "dapo")}, "--loss-type grpo dapo: --objective grpo has one"),
        ({"objective": "dpo", "loss_type": ("hinge",), "label_smoothing": 0.1}, "--label-smoothing 0.1 needs --loss"),
        ({"objective": "dpo", "loss_weights": (1.0, 2.0)}, "--loss-weights 1.0 2.0 has 2 weights for the 1 of --loss"),
        ({"objective": "grpo", "use_bias_correction_kl": False}, "--no-use-bias-correction-kl needs --beta above 0"),
        ({"objective": "grpo", "loss_type": ("cispo",), "delta": 2.0}, "--delta 2.0 is for a loss that clips, not"),
        ({"objective": "grpo", "loss_type": ("cispo",), "epsilon": 0.1, "epsilon_high": 5.0}, "--epsilon 0.1 is not"),
        ({"objective": "dpo", "beta": 0.0}, "--beta 0.0"),
        ({"objective": "grpo", "num_generations": 1}, "--num-generations 1"),
        ({"gamma": 1.5}, "--gamma 1.5 is not in"),
        ({"label_smoothing": 0.5}, "--label-smoothing 0.5 is not in"),
    ],
)
def test_what_an_objective_does_not_have_is_refused(given: dict[str, typing.Any], said: str):
    with pytest.raises(ValueError, match=said):
        PostTrainingConfig(**given)
