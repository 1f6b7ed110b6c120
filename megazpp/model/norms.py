"""LayerNorm and RMSNorm as torch computes them, with weights every tp rank holds whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, local


class Norm(nn.Module):
    """Normalise the last dim: [..., H] -> [..., H].

    Collectives on tp: none; with `split` each rank has a part of the gradients.

    Args:
        size: channels, H.
        split: each tp rank normalises other vectors: a slice of the sequence (sequence parallelism), or its own heads.
    """

    def __init__(self, config: GPTConfig, size: int, *, tp: MeshAxis, split: bool) -> None:
        super().__init__()
        self.kind, self.epsilon = config.normalization, config.norm_epsilon
        self.one_plus = config.apply_layernorm_1p
        partial = split and tp.size > 1
        self.weight = nn.Parameter(torch.empty(size))
        self.specs = {"weight": ParameterSpec(value=0.0 if self.one_plus else 1.0, partial=partial)}
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(size))
            self.specs["bias"] = ParameterSpec(partial=partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight) + 1.0 if self.one_plus else local(self.weight)
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, local(self.bias), self.epsilon)
