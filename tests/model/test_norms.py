"""LayerNorm and RMSNorm against their formulas in fp64, and their gradients when the sequence is split."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import counted, draw, local_gradients, part, tp_axis

from megazpp.model.config import GPTConfig
from megazpp.model.norms import Norm
from megazpp.parallel.axis import MeshAxis

HIDDEN = 7
EXACT = {"rtol": 1e-11, "atol": 1e-11}
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


def run(kind: Kind, one_plus: bool, sequence_parallel: bool) -> list[Any]:
    tp = tp_axis()
    norm = build(kind, one_plus, tp, sequence_parallel)
    x, y_grad = draw(0, 8, 3, HIDDEN), draw(9, 8, 3, HIDDEN)
    if sequence_parallel:
        x, y_grad = part(x, 0, tp), part(y_grad, 0, tp)
    x.requires_grad_()
    y, forward = counted(tp, lambda: norm(x))
    _, backward = counted(tp, lambda: y.backward(y_grad))
    return [y.detach(), x.grad, [*local_gradients(norm, tp).values()], forward, backward]


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (1, True), (2, False), (2, True), (4, True)])
def test_a_norm_is_its_formula_and_sums_its_gradients_over_slices(
    kind: Kind, one_plus: bool, size: int, sequence_parallel: bool
):
    x, weight, bias = (t.requires_grad_() for t in (draw(0, 8, 3, HIDDEN), draw(1, HIDDEN), draw(2, HIDDEN)))
    y = by_formula(kind, x, weight, bias, epsilon=0.1, one_plus=one_plus)
    y.backward(draw(9, 8, 3, HIDDEN))
    split = sequence_parallel and size > 1
    wanted = [weight.grad] if kind == "RMSNorm" else [weight.grad, bias.grad]
    for rank, (ours, x_grad, grads, forward, backward) in enumerate(
        ranks(size).run(run, kind, one_plus, sequence_parallel)
    ):
        torch.testing.assert_close(ours, y.detach().chunk(size)[rank] if split else y.detach(), **EXACT)
        torch.testing.assert_close(x_grad, x.grad.chunk(size)[rank] if split else x.grad, **EXACT)
        assert len(grads) == len(wanted)
        for grad, whole in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, whole, **EXACT)
        assert (forward, backward) == ({}, {})


@pytest.mark.parametrize(("one_plus", "value"), [(False, 1.0), (True, 0.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_norm_scales_by_one(kind: Kind, one_plus: bool, value: float):
    norm = build(kind, one_plus, MeshAxis("tp"))
    assert norm.specs["weight"].value == value
    assert all(spec.std == 0.0 and spec.split is None for spec in norm.specs.values())
    assert norm.specs.keys() == dict(norm.named_parameters()).keys()
