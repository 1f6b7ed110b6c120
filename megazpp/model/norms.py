"""LayerNorm and RMSNorm as torch computes them, with weights every tp rank holds whole."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import sum_gradients


class Norm(nn.Module):
    """Normalise the last dim: [..., H] -> [..., H].

    Collectives on tp: none; with sequence parallelism each rank sees a slice of the sequence, so backward sums the
    gradients of weight and bias in one all-reduce.

    Args:
        one_plus: the weight is stored as w - 1 (Megatron's layernorm-1p).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        kind: Literal["LayerNorm", "RMSNorm"],
        epsilon: float,
        one_plus: bool,
        tp: MeshAxis,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.kind, self.epsilon, self.one_plus = kind, epsilon, one_plus
        self.tp, self.sum_gradients = tp, sequence_parallel and tp.size > 1
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.specs = {"weight": ParameterSpec(value=0.0 if one_plus else 1.0)}
        if kind == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(hidden_size))
            self.specs["bias"] = ParameterSpec()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = tuple(local(p) for p in self.parameters())
        if self.sum_gradients:
            parameters = sum_gradients(self.tp, *parameters)
        weight = parameters[0] + 1.0 if self.one_plus else parameters[0]
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, parameters[1], self.epsilon)
