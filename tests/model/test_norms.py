"""LayerNorm and RMSNorm against their formulas in fp64, and their gradients when the sequence is split."""

import functools
import itertools
from typing import Literal

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import compare_slices, draw, tp_axis

from megazpp.model.config import GPTConfig
from megazpp.model.norms import Norm

HIDDEN, EPSILON = 7, 0.1
Kind = Literal["LayerNorm", "RMSNorm"]
KINDS: tuple[Kind, ...] = ("LayerNorm", "RMSNorm")


def by_formula(kind: Kind, one_plus: bool, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = 1.0 + weights["weight"] if one_plus else weights["weight"]
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight + weights["bias"]


def compare_with_the_formula() -> None:
    tp = tp_axis()
    for kind, one_plus, split in itertools.product(KINDS, (False, True), (False, True)):
        config = GPTConfig(normalization=kind, norm_epsilon=EPSILON, apply_layernorm_1p=one_plus)
        norm = Norm(config, HIDDEN, tp=tp, split=split).double()
        x, weights = draw(0, 8, 3, HIDDEN), {name: draw(seed, HIDDEN) for seed, name in enumerate(norm.specs)}
        whole, row = functools.partial(by_formula, kind, one_plus), (kind, one_plus)
        compare_slices(norm, whole, x, weights, {}, tp=tp, sequence_parallel=split, row=row)
        assert norm.specs["weight"].value == float(not one_plus)  # a fresh one scales by one
        assert all(spec.std == 0.0 and spec.split is None for spec in norm.specs.values())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_norm_is_its_formula_scales_by_one_at_first_and_sums_its_gradients_over_slices(size):
    ranks(size).run(compare_with_the_formula)
