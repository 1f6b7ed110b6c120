"""Test the MLP with each activation function against formulas in fp64, on one rank and split over tp ranks."""

import functools
import itertools
import math

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import REGION, compare_slices, draw, layer_on

from megazpp.model.config import GPTConfig
from megazpp.model.layer_parts import MLP

KINDS = {
    "gelu": ({}, lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "openai-gelu": (
        {"openai_gelu": True},
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "squared-relu": ({"squared_relu": True}, lambda x: torch.where(x > 0, x * x, 0.0)),
    "swiglu": ({"swiglu": True}, lambda x: x / (1 + torch.exp(-x))),
}


def by_formula(kind: str, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ weights[f"{name}.weight"].t() + weights.get(f"{name}.bias", 0.0)

    activation, up = KINDS[kind][1], linear("fc1", x)
    return linear("fc2", activation(linear("gate", x)) * up if "gate.weight" in weights else activation(up))


def compare_with_the_formula() -> None:
    sizes = {"hidden_size": 5, "num_attention_heads": 1, "ffn_hidden_size": 12}
    for kind, bias, split in itertools.product(KINDS, (False, True), (False, True)):
        config = GPTConfig(**sizes, disable_bias_linear=not bias, **KINDS[kind][0])
        make = layer_on(MLP, config, sequence_parallel=split)
        whole = functools.partial(by_formula, kind)
        compare_slices((kind, bias), make, whole, draw(0, 8, 3, 5), **REGION[split])


@pytest.mark.parametrize("size", [1, 2])
def test_mlp_equals_its_formula_in_any_layout(size):
    """Compare output and all gradients with the formula.

    There is one collective in forward and one in backward, also with SwiGLU's two matrices.
    """
    ranks(size).run(compare_with_the_formula)
