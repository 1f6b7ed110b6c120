"""LayerNorm and RMSNorm against their formulas in fp64, and their gradients when the sequence is split."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import compare_slices, draw, tp_axis

from megazpp.model.config import GPTConfig
from megazpp.model.norms import Norm
from megazpp.parallel.axis import MeshAxis

HIDDEN = 7
Kind = Literal["LayerNorm", "RMSNorm"]
KINDS: tuple[Kind, ...] = ("LayerNorm", "RMSNorm")


def by_formula(
    kind: Kind, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, epsilon: float, one_plus: bool
) -> torch.Tensor:
    weight = 1.0 + weight if one_plus else weight
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + bias


def build(kind: Kind, one_plus: bool, tp: MeshAxis, sequence_parallel: bool = False) -> Norm:
    config = GPTConfig(normalization=kind, norm_epsilon=0.1, apply_layernorm_1p=one_plus)
    norm = Norm(config, HIDDEN, tp=tp, split=sequence_parallel).double()
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters(), start=1):
            parameter.copy_(draw(seed, HIDDEN))
    return norm


def compare_with_the_formula() -> None:
    tp = tp_axis()
    for kind, one_plus, sequence_parallel in itertools.product(KINDS, (False, True), (False, True)):
        x, weight, bias = (t.requires_grad_() for t in (draw(0, 8, 3, HIDDEN), draw(1, HIDDEN), draw(2, HIDDEN)))
        y, y_grad = by_formula(kind, x, weight, bias, epsilon=0.1, one_plus=one_plus), draw(9, 8, 3, HIDDEN)
        y.backward(y_grad)
        grads = {"weight": weight.grad} | ({} if kind == "RMSNorm" else {"bias": bias.grad})
        norm = build(kind, one_plus, tp, sequence_parallel)
        compare_slices(norm, x, y, y_grad, grads, {}, tp=tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_norm_is_its_formula_and_sums_its_gradients_over_slices(size: int):
    ranks(size).run(compare_with_the_formula)


def test_a_fresh_norm_scales_by_one():
    for kind, (one_plus, value) in itertools.product(KINDS, ((False, 1.0), (True, 0.0))):
        norm = build(kind, one_plus, MeshAxis("tp"))
        assert norm.specs["weight"].value == value
        assert all(spec.std == 0.0 and spec.split is None for spec in norm.specs.values())
        assert norm.specs.keys() == dict(norm.named_parameters()).keys()
