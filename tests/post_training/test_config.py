"""The flags of post-training: numbers that no run can use, and what an objective does not have."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from megazpp.command_line import FlagParser
from megazpp.flags import FlagSpec, flag_name
from megazpp.post_training.config import _ONLY, PostTrainingConfig
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
BESIDE = {"--reward-weights": ["--reward-funcs", "a:b"]}


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


@pytest.mark.parametrize("name", numbers())
def test_a_negative_number_and_a_zero_that_means_nothing_are_refused_by_the_flag_s_name(name: str):
    beside = BESIDE.get(name, [])
    for value, means in (("-1", NEGATIVE_MEANS), ("0", ZERO_MEANS)):
        if name in means:
            read(*beside, name, value)
        else:
            with pytest.raises(ValueError, match=f"{name} {value}"):
                read(*beside, name, value)


def test_every_number_is_tried():
    assert {"--epsilon-high", "--gamma", "--num-generations", "--lora-r", "--max-length"} <= {*numbers()}
    assert {*ZERO_MEANS, *NEGATIVE_MEANS} <= {*numbers()}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"objective": "dpo", "loss_type": ("ipo", "dapo")}, "--loss-type dapo is not one of sigmoid, hinge, ipo,"),
        (
            {"objective": "grpo", "loss_type": ("ipo",)},
            "--loss-type ipo is not one of grpo, bnpo, dr_grpo, dapo, cispo",
        ),
        ({"objective": "grpo", "loss_type": ("grpo", "dapo")}, "--loss-type grpo dapo: --objective grpo has one"),
        ({"objective": "sft", "loss_type": ("grpo",)}, "--loss-type grpo is for --objective dpo or grpo, not sft"),
        ({"objective": "dpo", "loss_type": ("hinge",), "label_smoothing": 0.1}, "--label-smoothing 0.1 needs --loss"),
        ({"objective": "dpo", "loss_weights": (1.0, 2.0)}, "--loss-weights 1.0 2.0 has 2 weights for the 1 of --loss"),
        ({"objective": "grpo", "use_bias_correction_kl": False}, "--no-use-bias-correction-kl needs --beta above 0"),
        ({"objective": "grpo", "loss_type": ("cispo",), "delta": 2.0}, "--delta 2.0 is for a loss that clips, not"),
        ({"objective": "grpo", "loss_type": ("cispo",), "epsilon": 0.1, "epsilon_high": 5.0}, "--epsilon 0.1 is not"),
        ({"objective": "dpo", "center_rewards_coefficient": 0.1}, "--center-rewards-coefficient 0.1 is for --obj"),
        ({"objective": "grpo", "gamma": 0.9}, "--gamma 0.9 is for --objective ppo, not grpo"),
        ({"objective": "dpo", "beta": 0.0}, "--beta 0.0"),
        ({"objective": "grpo", "num_generations": 1}, "--num-generations 1"),
        ({"objective": "ppo", "precompute_ref_log_probs": True}, "--precompute-ref-log-probs is for --objective dpo"),
        ({"gamma": 1.5}, "--gamma 1.5 is not in"),
        ({"label_smoothing": 0.5}, "--label-smoothing 0.5 is not in"),
    ],
)
def test_what_an_objective_does_not_have_is_refused(given: dict[str, typing.Any], said: str):
    with pytest.raises(ValueError, match=said):
        PostTrainingConfig(**given)


def test_every_flag_of_some_objectives_is_refused_by_the_others():
    for objectives, names in _ONLY.items():
        for name in names.split():
            field = next(field for field in dataclasses.fields(PostTrainingConfig) if field.name == name)
            some: typing.Any = field.default + 1 if type(field.default) in (int, float) else 0.5
            share = dict.fromkeys(("gamma", "lam", "ref_model_mixup_alpha", "label_smoothing"), 0.1)
            value = {"loss_type": ("sft",), "loss_weights": (1.0,), **share}.get(name, some)
            for objective in {"sft", "reward", "dpo", "grpo", "ppo"} - {*objectives.split(" or ")}:
                with pytest.raises(ValueError, match=f"{flag_name(field)}.* is for --objective {objectives}, not"):
                    PostTrainingConfig(objective=objective, **{name: value})


def test_what_follows_from_the_objective():
    ppo = PostTrainingConfig(objective="ppo", num_mini_batches=3)
    assert (ppo.slices, ppo.passes, ppo.group_size, ppo.needs_reference, ppo.draws) == (3, 4, 1, True, True)
    grpo = PostTrainingConfig(objective="grpo", steps_per_generation=2, num_iterations=3, beta=0.1)
    assert (grpo.slices, grpo.passes, grpo.group_size, grpo.needs_reference) == (2, 3, 8, True)
    dpo = PostTrainingConfig(objective="dpo")
    assert (PostTrainingConfig(objective="grpo", advantage_estimator="rloo").reward_scale, grpo.reward_scale) == (
        "none",
        "group",
    )
    assert (dpo.beta_or_default, dpo.loss, dpo.needs_reference, dpo.draws) == (0.1, "sigmoid", True, False)
