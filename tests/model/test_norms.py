"""Test LayerNorm and RMSNorm against formulas in fp64, with gradients when tp ranks split the sequence."""

import functools
import itertools

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import compare_slices, draw

from megazpp.model.config import GPTConfig
from megazpp.model.layer_parts import Norm

EPSILON = 0.1


def by_formula(one_plus: bool, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True) if "bias" in weights else x
    normal = centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return normal * (weights["weight"] + one_plus) + weights.get("bias", 0.0)


def compare_with_the_formula() -> None:
    for kind, one_plus, split in itertools.product(("LayerNorm", "RMSNorm"), (False, True), (False, True)):
        config = GPTConfig(normalization=kind, norm_epsilon=EPSILON, apply_layernorm_1p=one_plus)
        make, whole = functools.partial(Norm, config, 7, split=split), functools.partial(by_formula, one_plus)
        sliced = {"x_dim": 0, "y_dim": 0} if split else {}
        norm = compare_slices((kind, one_plus, split), make, whole, draw(0, 8, 3, 7), **sliced)
        assert ("bias" in norm.specs) == (kind == "LayerNorm")
        # a new norm multiplies by 1: its weight is 1, or 0 if the norm multiplies by 1 + weight
        assert norm.specs["weight"].value == float(not one_plus)
        assert all(spec.std == 0.0 and spec.split is None for spec in norm.specs.values())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_norm_equals_its_formula_and_sums_gradients_over_slices(size):
    ranks(size).run(compare_with_the_formula)
