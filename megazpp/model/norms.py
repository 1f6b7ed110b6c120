"""LayerNorm and RMSNorm as torch computes them, with weights every tp rank holds whole."""

from __future__ import annotations

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
        size: channels, H.
        split: each tp rank normalises other vectors: a slice of the sequence (sequence parallelism), or its own heads.
    """

    def __init__(self, config: GPTConfig, size: int, *, tp: MeshAxis, split: bool) -> None:
        super().__init__()
        self.kind, self.epsilon = config.normalization, config.norm_epsilon
        self.one_plus = config.apply_layernorm_1p
        self.tp, self.sum_gradients = tp, split and tp.size > 1
        self.weight = nn.Parameter(torch.empty(size))
        self.specs = {"weight": ParameterSpec(value=0.0 if self.one_plus else 1.0)}
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(size))
            self.specs["bias"] = ParameterSpec()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters: tuple[torch.Tensor, ...] = (local(self.weight),)
        if self.kind == "LayerNorm":
            parameters = (*parameters, local(self.bias))
        if self.sum_gradients:
            parameters = sum_gradients(self.tp, *parameters)
        weight = parameters[0] + 1.0 if self.one_plus else parameters[0]
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, parameters[1], self.epsilon)
