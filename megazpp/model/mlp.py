"""MLP (feed-forward network) of a layer, with GeLU (exact or tanh approximation), squared ReLU or SwiGLU."""

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
    """MLP of a layer: [S, B, H] -> [S, B, F] -> [S, B, H].

    S is the sequence length, B the batch size, H the hidden size, F the feed-forward size and T the number of
    tensor-parallel (tp) ranks. With sequence parallelism input and output are [S/T, B, H].

    The gate and up matrices of SwiGLU are two parameters, not one fused matrix [2F, H]: only then does a contiguous
    slice of the rows contain matching gate and up channels for every tp size.

    Collectives on tp: the collectives of one ColumnParallelLinear and one RowParallelLinear.

    Args:
        config: config of the model.
        tp: tensor-parallel axis.
        sequence_parallel: True if the residual stream is split along the sequence over tp.
        output_std: standard deviation of the initial weights of the second matrix.
        product: matrix product of the linear layers; None for 16-bit products that overlap with collectives on tp.
        inner: feed-forward size, F; None for the config's.
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
        """Return the MLP's output for norm(x), or for x if `norm` is None; backward may recompute the norm."""
        layers = [self.fc1] if self.gate is None else [self.fc1, self.gate]
        # [S, B, H] ([S/T, B, H] with sequence parallelism) -> [S, B, F/T], twice for SwiGLU
        parts = normed(norm, x, then=lambda x: column_parallel(x, layers), recompute=self.recompute_norm)
        return recomputed(self._inside, *parts, then=self.fc2, when=self.recompute_activation)

    def _inside(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the activation function to `up` [S, B, F/T]; SwiGLU multiplies by `gate`, of the same shape."""
        if gate is not None:
            return F.silu(gate) * up
        if self.squared_relu:
            return F.relu(up).square()
        return F.gelu(up, approximate=self.gelu_approximation)
