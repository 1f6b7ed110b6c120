"""LayerNorm and RMSNorm as torch computes them, with weights every tp rank holds whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.config import GPTConfig
from megazpp.model.recompute import recomputed
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

    def forward(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...] | None = None) -> torch.Tensor:
        """`weights`: what `read_weights` gave; None reads them here."""
        weight, *bias = self.read_weights() if weights is None else weights
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, bias[0], self.epsilon)

    def read_weights(self) -> tuple[torch.Tensor, ...]:
        """Gain, and bias if there is one, as local tensors: a checkpoint in a compiled graph can hold no DTensor."""
        weight = local(self.weight) + 1.0 if self.one_plus else local(self.weight)
        return (weight,) if self.kind == "RMSNorm" else (weight, local(self.bias))


def normed(norm: Norm | None, x: torch.Tensor, *, then: Callable[[torch.Tensor], Any], recompute: bool) -> Any:
    """Apply the product `then` to norm(x), or to x; with `recompute`, backward computes the norm again."""
    if norm is None:
        return then(x)
    return recomputed(norm, x, norm.read_weights() if recompute else None, then=then, when=recompute)
