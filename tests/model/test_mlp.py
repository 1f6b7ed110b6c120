"""The MLP's activations, whole and split, against their formulas in fp64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import counted, draw, local_gradients, part, tp_axis

from megazpp.model.config import GPTConfig
from megazpp.model.mlp import MLP
from megazpp.parallel.axis import MeshAxis

HIDDEN, WIDE = 5, 12
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_of_gpt2(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x * x, 0.0)


KINDS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": ({}, gelu),
    "openai-gelu": ({"openai_gelu": True}, gelu_of_gpt2),
    "squared-relu": ({"squared_relu": True}, squared_relu),
    "swiglu": ({"swiglu": True}, lambda x: x / (1 + torch.exp(-x))),
}


def config_of(kind: str, bias: bool) -> GPTConfig:
    return GPTConfig(
        hidden_size=HIDDEN, num_attention_heads=1, ffn_hidden_size=WIDE, disable_bias_linear=not bias, **KINDS[kind][0]
    )


def whole_weights(kind: str, bias: bool) -> dict[str, torch.Tensor]:
    weights = {"fc1.weight": draw(1, WIDE, HIDDEN), "fc2.weight": draw(2, HIDDEN, WIDE)}
    if kind == "swiglu":
        weights["gate.weight"] = draw(3, WIDE, HIDDEN)
    if bias:
        weights |= {"fc1.bias": draw(4, WIDE), "fc2.bias": draw(5, HIDDEN)}
        if kind == "swiglu":
            weights["gate.bias"] = draw(6, WIDE)
    return weights


def by_formula(kind: str, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ weights[f"{name}.weight"].t() + weights.get(f"{name}.bias", 0.0)

    activation, up = KINDS[kind][1], linear("fc1", x)
    return linear("fc2", activation(linear("gate", x)) * up if kind == "swiglu" else activation(up))


def build(kind: str, bias: bool, tp: MeshAxis, sequence_parallel: bool = False) -> MLP:
    mlp = MLP(config_of(kind, bias), tp=tp, sequence_parallel=sequence_parallel, output_std=1.0).double()
    weights = whole_weights(kind, bias)
    assert weights.keys() == dict(mlp.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            dim = split_of(name)
            parameter.copy_(weights[name] if dim is None else part(weights[name], dim, tp))
    return mlp


def split_of(name: str) -> int | None:
    return None if name == "fc2.bias" else 1 if name == "fc2.weight" else 0


GRID = [*itertools.product(KINDS, (False, True), (False, True))]  # kind, bias, sequence_parallel


def run_all() -> list[tuple[Any, ...]]:
    found, tp = [], tp_axis()
    for kind, bias, sequence_parallel in GRID:
        mlp = build(kind, bias, tp, sequence_parallel)
        x, y_grad = draw(0, 8, 3, HIDDEN), draw(9, 8, 3, HIDDEN)
        if sequence_parallel:
            x, y_grad = part(x, 0, tp), part(y_grad, 0, tp)
        y, forward = counted(tp, functools.partial(mlp, x.requires_grad_()))
        _, backward = counted(tp, functools.partial(y.backward, y_grad))
        found.append((y.detach(), x.grad, local_gradients(mlp, tp), (forward, backward)))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_mlp_is_its_formula_however_it_is_split(size: int):
    """Output and all gradients; one region entered and one left, for SwiGLU's two matrices too."""
    calls: dict[bool, Any] = {False: ({"all_reduce": 1}, {"all_reduce": 1})}
    calls[True] = ({"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 2, "reduce_scatter": 1})
    for rank, results in enumerate(ranks(size).run(run_all)):
        for (kind, bias, sequence_parallel), (ours, x_grad, grads, ours_calls) in zip(GRID, results, strict=True):
            x = draw(0, 8, 3, HIDDEN).requires_grad_()
            weights = {name: weight.requires_grad_() for name, weight in whole_weights(kind, bias).items()}
            y = by_formula(kind, x, weights)
            y.backward(draw(9, 8, 3, HIDDEN))
            first, last = (rank, rank + 1) if sequence_parallel else (0, size)
            rows = slice(first * 8 // size, last * 8 // size)
            torch.testing.assert_close(ours, y.detach()[rows], **EXACT)
            torch.testing.assert_close(x_grad, x.grad[rows], **EXACT)
            for name, grad in grads.items():
                dim, whole = split_of(name), weights[name].grad
                torch.testing.assert_close(grad, whole if dim is None else whole.chunk(size, dim)[rank], **EXACT)
            assert ours_calls == (({}, {}) if size == 1 else calls[sequence_parallel])
