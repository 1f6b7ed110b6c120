"""The feed-forward half of a layer: GeLU (exact or tanh), squared ReLU, or SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.config import GPTConfig
from megazpp.model.norms import Norm, normed
from megazpp.model.recompute import recomputed
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
    ) -> None:
        super().__init__()
        self.recompute_norm, self.recompute_activation = config.recomputes("layernorm"), config.recomputes("mlp_act")
        self.squared_relu = config.squared_relu
        self.gelu_approximation = "tanh" if config.openai_gelu else "none"

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden,
                config.ffn_size,
                tp=tp,
                std=config.init_method_std,
                bias=config.linear_bias,
                sequence_parallel=sequence_parallel,
                product=product,
            )

        self.gate = column() if config.swiglu else None
        self.fc1 = column()
        self.fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden,
            tp=tp,
            std=output_std,
            bias=config.linear_bias,
            sequence_parallel=sequence_parallel,
            product=product,
        )

    def forward(self, x: torch.Tensor, *, norm: Norm | None = None) -> torch.Tensor:
        """MLP of `norm(x)`, of x without a norm."""
        up, gate = normed(norm, x, then=self._up, recompute=self.recompute_norm)
        down: torch.Tensor = recomputed(self._inside, up, gate, then=self.fc2, when=self.recompute_activation)
        return down

    def _up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S, B, H] ([S/T, B, H]) -> 2 x [S, B, F/T]."""
        if self.gate is None:
            return self.fc1(x), None
        up, gate = column_parallel(x, [self.fc1, self.gate])
        return up, gate

    def _inside(self, up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """2 x [S, B, F/T] -> [S, B, F/T], the activation."""
        if gate is not None:
            return F.silu(gate) * up
        if self.squared_relu:
            return F.relu(up).square()
        return F.gelu(up, approximate=self.gelu_approximation)
