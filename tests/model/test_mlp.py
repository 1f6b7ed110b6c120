"""The MLP's activations, whole and split, against their formulas in fp64."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import compare_slices, draw, tp_axis

from megazpp.model.config import GPTConfig
from megazpp.model.mlp import MLP

HIDDEN, WIDE = 5, 12


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


SPLITS = {"fc1.weight": 0, "fc1.bias": 0, "gate.weight": 0, "gate.bias": 0, "fc2.weight": 1}


def compare_with_the_formula() -> None:
    tp = tp_axis()
    for kind, bias, sequence_parallel in itertools.product(KINDS, (False, True), (False, True)):
        mlp = MLP(config_of(kind, bias), tp=tp, sequence_parallel=sequence_parallel, output_std=1.0).double()
        x, weights, whole = draw(0, 8, 3, HIDDEN), whole_weights(kind, bias), functools.partial(by_formula, kind)
        compare_slices(mlp, whole, x, weights, SPLITS, tp=tp, sequence_parallel=sequence_parallel, row=(kind, bias))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_mlp_is_its_formula_however_it_is_split(size):
    """Output and all gradients; one region entered and one left, for SwiGLU's two matrices too."""
    ranks(size).run(compare_with_the_formula)
