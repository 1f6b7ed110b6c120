"""The feed-forward half of a layer: GeLU (exact or tanh), squared ReLU, or SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.config import GPTConfig
from megazpp.model.norms import Norm, normed, recomputed
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.layers import ColumnParallelLinear, Product, RowParallelLinear, column_parallel


class MLP(nn.Module):
    """[S, B, H] -> [S, B, H] through F channels ([S/T, B, H] at both ends with sequence parallelism).

    SwiGLU's gate and up matrices are two parameters rather than one fused [2F, H]: a slice of each is then a slice
    for any tp size. Collectives on tp: one region entered and one left.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        tp: MeshAxis,
        sequence_parallel: bool,
        output_std: float,
        product: Product | None = None,
        inner: int | None = None,
    ) -> None:
        super().__init__()
        self.recompute_norm, self.recompute_activation = config.recomputes("layernorm"), config.recomputes("mlp_act")
        self.squared_relu = config.squared_relu
        self.gelu_approximation = "tanh" if config.openai_gelu else "none"

        hidden, inner, std = config.hidden, inner or config.ffn_size, config.init_method_std
        split: dict[str, Any] = {"tp": tp, "sequence_parallel": sequence_parallel, "product": product}
        split["bias"] = config.linear_bias
        self.gate = ColumnParallelLinear(hidden, inner, std=std, **split) if config.swiglu else None
        self.fc1 = ColumnParallelLinear(hidden, inner, std=std, **split)
        self.fc2 = RowParallelLinear(inner, hidden, std=output_std, **split)

    def forward(self, x: torch.Tensor, *, norm: Norm | None = None) -> torch.Tensor:
        """MLP of `norm(x)`, of x without a norm."""
        layers = [self.fc1] if self.gate is None else [self.fc1, self.gate]
        # [S, B, H] ([S/T, B, H]) -> 1 or 2 x [S, B, F/T]
        parts = normed(norm, x, then=lambda x: column_parallel(x, layers), recompute=self.recompute_norm)
        down: torch.Tensor = recomputed(self._inside, *parts, then=self.fc2, when=self.recompute_activation)
        return down

    def _inside(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """2 x [S, B, F/T] -> [S, B, F/T], the activation."""
        if gate is not None:
            return F.silu(gate) * up
        if self.squared_relu:
            return F.relu(up).square()
        return F.gelu(up, approximate=self.gelu_approximation)
