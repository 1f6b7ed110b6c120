"""The flags of post-training: numbers that no run can use, and what an objective does not have."""

import dataclasses
import typing
from pathlib import Path

from helpers.refusals import not_refused, table

from megazpp.base.command_line import FlagParser
from megazpp.base.flags import flag_name
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
    "--reward-weights": "--reward-funcs a:b",
    "--label-smoothing": "--loss-type robust",
    "--sync-ref-model": "--beta 0.1",
}
NEEDS = {flag_name(f): f.metadata["flag"].needs for each in EXTRA for f in dataclasses.fields(each)}
DEFAULTS = {flag_name(f): f.default for each in EXTRA for f in dataclasses.fields(each)}
VALUES = {"--lora-target-modules": "q_proj", "--reward-funcs": "a:b", "--scale-rewards": "batch", "--reward-load": "x"}
VALUES |= {"--advantage-estimator": "rloo", "--ref-load": "x", "--reward-weights": "1", "--loss-weights": "1"}
VALUES |= {"--base-weight-bits": "8", "--importance-sampling-level": "sequence"}
VALUES |= {"--loss-type": "dapo", "--label-smoothing": "0.1"}


def numbers() -> list[str]:
    """The flags that take a number."""
    found = []
    for config in EXTRA:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            kinds = {hints[field.name], *typing.get_args(hints[field.name])}
            kinds |= {kind for each in kinds for kind in typing.get_args(each)}
            found += [flag_name(field)] if {int, float} & kinds else []
    return found


def read(flags: str) -> None:
    PARSER.read(flags.split(), Path(), {})


def beside(name: str) -> str:
    """Flags that turn on what `name` needs, and what that needs itself."""
    needs, own = NEEDS[name], BESIDE.get(name, "")
    if needs is None:
        return own
    feature = needs.split()[0]
    on = feature if DEFAULTS[feature] is False else " ".join([*needs.split(), "1"][:2])
    return f"{beside(feature)} {on} {own}"


def test_a_flag_of_what_is_off_is_refused_by_its_name():
    given = {name: VALUES.get(name, "0.9" if isinstance(DEFAULTS[name], float) else "3") for name in NEEDS}
    given = {name: name if isinstance(DEFAULTS[name], bool) else f"{name} {value}" for name, value in given.items()}
    off = {name: "sft" if "reward" in str(needs) else "reward" for name, needs in NEEDS.items() if needs is not None}
    rows = [
        (f"--objective {other} {BESIDE.get(name, '')} {given[name]}", f"line: {name}") for name, other in off.items()
    ]
    rows += [(flags, f" needs {NEEDS[name]}") for (flags, _), name in zip(rows, off, strict=True)]
    assert len(off) > 30
    assert not_refused(rows, read) == []
    for name in off:
        read(f"{beside(name)} {given[name]}")


def test_a_negative_number_and_a_zero_that_means_nothing_are_refused_by_the_flag_s_name():
    every = [(name, value) for name in numbers() for value in ("-1", "0")]
    allowed = {*((name, "-1") for name in NEGATIVE_MEANS), *((name, "0") for name in ZERO_MEANS)}
    refused = [
        (f"{beside(name)} {name} {value}", f"{name} {value}") for name, value in every if (name, value) not in allowed
    ]
    assert not_refused(refused, read) == []
    assert allowed <= {*every}
    for name, value in allowed:
        read(f"{beside(name)} {name} {value}")


REFUSED = """
    --objective dpo --loss-type ipo dapo | --loss-type dapo is not one of sigmoid, hinge, ipo,
    --objective grpo --loss-type ipo | --loss-type ipo is not one of grpo, bnpo, dr_grpo, dapo, cispo
    --objective grpo --loss-type grpo dapo | --loss-type grpo dapo: --objective grpo has one
    --objective dpo --loss-type hinge --label-smoothing 0.1 | --label-smoothing 0.1 needs --loss-type robust
    --objective dpo --loss-weights 1 2 | --loss-weights 1.0 2.0 has 2 weights for the 1 of --loss
    --objective grpo --no-use-bias-correction-kl | --no-use-bias-correction-kl needs --beta above 0
    --objective grpo --loss-type cispo --delta 2 | --delta 2.0 is for a loss that clips, not
    --objective grpo --loss-type cispo --epsilon 0.1 --epsilon-high 5 | --epsilon 0.1 is not
    --objective dpo --beta 0 | --beta 0.0
    --objective dpo --beta 0.1 --sync-ref-model --precompute-ref-log-probs | --precompute-ref-log-probs
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


def test_what_an_objective_does_not_have_is_refused():
    assert not_refused(table(REFUSED), read) == []
