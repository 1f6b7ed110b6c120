"""LayerNorm and RMSNorm as torch computes them, with weights every tp rank holds whole."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import sum_gradients


class Norm(nn.Module):
    """Normalise the last dim: [..., H] -> [..., H].

    Collectives on tp: none; with `split` backward sums the gradients of weight and bias in one all-reduce.

    Args:
        split: each tp rank normalises other vectors: a slice of the sequence (sequence parallelism), or its own heads.
        one_plus: the weight is stored as w - 1 (Megatron's layernorm-1p).
    """

    def __init__(
        self,
        size: int,
        *,
        kind: Literal["LayerNorm", "RMSNorm"],
        epsilon: float,
        one_plus: bool,
        tp: MeshAxis,
        split: bool,
    ) -> None:
        super().__init__()
        self.kind, self.epsilon, self.one_plus = kind, epsilon, one_plus
        self.tp, self.sum_gradients = tp, split and tp.size > 1
        self.weight = nn.Parameter(torch.empty(size))
        self.specs = {"weight": ParameterSpec(value=0.0 if one_plus else 1.0)}
        if kind == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(size))
            self.specs["bias"] = ParameterSpec()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = tuple(local(p) for p in self.parameters())
        if self.sum_gradients:
            parameters = sum_gradients(self.tp, *parameters)
        weight = parameters[0] + 1.0 if self.one_plus else parameters[0]
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, parameters[1], self.epsilon)


def make_norm(config: GPTConfig, size: int, *, tp: MeshAxis, split: bool) -> Norm:
    """The model's kind of norm over `size` channels; `split` as in `Norm`."""
    return Norm(
        size,
        kind=config.normalization,
        epsilon=config.norm_epsilon,
        one_plus=config.apply_layernorm_1p,
        tp=tp,
        split=split,
    )
