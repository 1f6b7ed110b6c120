"""Test the flags of post-training: numbers that are rejected, and flags that an objective does not support."""

import dataclasses
import re
from pathlib import Path

from helpers.refusals import not_refused, table

from megazpp.base.command_line import FlagParser
from megazpp.base.flags import flag_name
from megazpp.post_training.config import EXTRA

PARSER = FlagParser(EXTRA, program="x")
FIELDS = {flag_name(field): field for each in EXTRA for field in dataclasses.fields(each)}
NEEDS = {name: field.metadata["flag"].needs for name, field in FIELDS.items()}
NUMBERS = [name for name, field in FIELDS.items() if re.search(r"\b(int|float)\b", str(field.type))]
# Flags for which 0 is a valid number. It mostly switches a feature off. A reward of weight 0 is only logged, and a
# negative weight is a penalty.
ZERO_MEANS_SOMETHING = (
    "--beta --label-smoothing --ref-ckpt-step --kl-coef --vf-coef --missing-eos-penalty --log-completions "
    "--lora-dropout --reward-weights --prefetch-layers"
)
ALLOWED = {*((name, "0") for name in ZERO_MEANS_SOMETHING.split()), ("--reward-weights", "-1")}
BESIDE = {
    "--reward-weights": "--reward-funcs a:b",
    "--label-smoothing": "--loss-type robust",
}
VALUES = {"--lora-target-modules": "q_proj", "--reward-funcs": "a:b", "--scale-rewards": "batch", "--reward-load": "x"}
VALUES |= {"--advantage-estimator": "rloo", "--ref-load": "x", "--reward-weights": "1", "--loss-weights": "1"}
VALUES |= {"--base-weight-bits": "8", "--importance-sampling-level": "sequence"}
VALUES |= {"--loss-type": "dapo", "--label-smoothing": "0.1"}


def read(flags: str) -> None:
    PARSER.read(flags.split(), Path(), {})


def given(name: str) -> str:
    """Return the flag `name` as on a command line, with a value that differs from its default."""
    default = FIELDS[name].default
    value = VALUES.get(name, "0.9" if isinstance(default, float) else "3")
    return name if isinstance(default, bool) else f"{name} {value}"


def beside(name: str) -> str:
    """Return the flags that turn on the feature to which the flag `name` belongs, and what that feature itself needs.

    For example, a flag of a reward function gets the flag that names the function.
    """
    needs, own = NEEDS[name], BESIDE.get(name, "")
    if needs is None:
        return own
    feature = needs.split()[0]
    on = feature if FIELDS[feature].default is False else " ".join([*needs.split(), "1"][:2])
    return f"{beside(feature)} {on} {own}"


def test_flag_of_a_feature_that_is_off_is_rejected_by_name():
    rows = []
    for name, needs in NEEDS.items():
        if needs is not None:
            other = "sft" if "reward" in needs else "reward"
            flags = f"--objective {other} {BESIDE.get(name, '')} {given(name)}"
            rows += [(flags, f"line: {name}"), (flags, f" needs {needs}")]
            read(f"{beside(name)} {given(name)}")
    assert len(rows) > 60
    assert not not_refused(rows, read)


def test_negative_and_meaningless_zero_values_are_rejected_by_flag():
    every = {(name, value) for name in NUMBERS for value in ("-1", "0")}
    refused = [(f"{beside(name)} {name} {value}", f"{name} {value}") for name, value in every - ALLOWED]
    assert not not_refused(refused, read)
    assert every > ALLOWED
    for name, value in ALLOWED:
        read(f"{beside(name)} {name} {value}")


REFUSED = """
    --objective dpo --loss-type ipo dapo | --loss-type dapo is not one of sigmoid, hinge, ipo,
    --objective grpo --loss-type ipo | --loss-type ipo is not one of grpo, bnpo, dr_grpo, dapo, cispo
    --objective grpo --loss-type grpo dapo | --loss-type grpo dapo: --objective grpo takes one loss
    --objective dpo --loss-type hinge --label-smoothing 0.1 | --label-smoothing 0.1 needs --loss-type robust
    --objective dpo --loss-weights 0 | --loss-weights 0.0 is not positive
    --objective dpo --loss-weights 1 2 | --loss-weights 1.0 2.0 has 2 weights for the 1 of --loss
    --objective grpo --no-use-bias-correction-kl | --no-use-bias-correction-kl needs --beta above 0
    --objective grpo --loss-type cispo --delta 2 | --delta 2.0 is for a loss that clips, not
    --objective grpo --loss-type cispo --epsilon 0.1 --epsilon-high 5 | --epsilon 0.1 is not
    --objective dpo --beta 0 | --beta 0.0
    --objective grpo --num-generations 1 | --num-generations 1
    --objective ppo --gamma 1.5 | --gamma 1.5 is not in
    --objective dpo --loss-type robust --label-smoothing 0.5 | --label-smoothing 0.5 is not in
    --max-length 1 | --max-length 1
    --lora-r 2 --lora-dropout 1 | --lora-dropout 1.0 is not in [0, 1)
    --objective grpo --reward-funcs right | --reward-funcs right is not module:function
    --objective grpo --reward-funcs a:b-c | --reward-funcs a:b-c is not module:function
    --objective grpo --reward-funcs a:b a:b | --reward-funcs a:b a:b names a function twice
    --objective grpo --reward-funcs a:b --reward-weights 1 2 | --reward-weights 1.0 2.0 has 2 weights for the 1
"""


def test_flags_that_the_objective_does_not_support_are_rejected():
    assert not_refused(table(REFUSED), read) == []
