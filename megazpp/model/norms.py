"""LayerNorm and RMSNorm, and the recomputation of norms and activations in backward.

Selective recomputation puts a norm (or an activation) and the matrix product that follows it into one checkpoint.
Autograd then keeps only the norm's input. Backward recomputes the norm but not the product: non-reentrant checkpointing
stops once it has recomputed all saved tensors, and the last one is the product's input. A checkpoint inside
torch.compile recomputes everything that it contains, so there the product is left outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import copy_to_region, reduce_from_region_


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension: [..., size] -> [..., size].

    Collectives on tp: none. With `split` each tp rank computes a part of the gradients of weight and bias.

    Args:
        config: config of the model, which selects LayerNorm or RMSNorm.
        size: number of channels.
        tp: tensor-parallel axis.
        split: True if tp ranks normalize different vectors: slices of the sequence, or the heads of each rank.
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
        """Normalize x, with `weights` (a result of `read_weights`) or, if None, with the module's parameters."""
        weight, *bias = self.read_weights() if weights is None else weights
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, bias[0], self.epsilon)

    def read_weights(self) -> tuple[torch.Tensor, ...]:
        """Return the weight, and the bias of a LayerNorm, as local tensors.

        A checkpoint inside a compiled graph cannot take DTensors, so callers pass these tensors into it.
        """
        weight = local(self.weight) + 1.0 if self.one_plus else local(self.weight)
        return (weight,) if self.kind == "RMSNorm" else (weight, local(self.bias))


class HeadsNorm(nn.Module):
    """RMSNorm over the channels of all heads together, which are split over tp: [..., heads, D] -> [..., heads, D].

    Collectives on tp: 1 all-reduce of one fp32 number per token in forward, and 1 in backward.

    Args:
        config: config of the model.
        size: number of channels of all heads of all tp ranks.
        tp: tensor-parallel axis.
    """

    def __init__(self, config: GPTConfig, size: int, *, tp: MeshAxis) -> None:
        super().__init__()
        self.size, self.epsilon, self.tp = size, config.norm_epsilon, tp
        self.weight = nn.Parameter(torch.empty(size // tp.size))
        self.specs = {"weight": ParameterSpec(value=1.0, split=0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        if self.tp.size == 1:
            return F.rms_norm(x.flatten(-2), weight.shape, weight, self.epsilon).view_as(x)
        own = x.flatten(-2).float()
        squares = copy_to_region(reduce_from_region_(own.square().sum(dim=-1, keepdim=True), self.tp), self.tp)
        return (own * (squares / self.size + self.epsilon).rsqrt() * weight).to(x.dtype).view_as(x)


def normed(norm: Norm | None, x: torch.Tensor, *, then: Callable[[torch.Tensor], Any], recompute: bool) -> Any:
    """Return then(norm(x)), or then(x) if `norm` is None.

    Args:
        norm: norm to apply, or None.
        x: input of the norm.
        then: matrix product after the norm.
        recompute: True if backward recomputes the norm instead of keeping its output.
    """
    if norm is None:
        return then(x)
    return recomputed(norm, x, norm.read_weights() if recompute else None, then=then, when=recompute)


def recomputed(
    cheap: Callable[..., Any],
    *args: object,
    then: Callable[..., Any] | None = None,
    when: bool,
    draws: bool = False,
    in_graph: bool = True,
) -> Any:
    """Return then(cheap(*args)); backward may recompute `cheap` instead of keeping its intermediate results.

    Args:
        cheap: function to recompute, such as a norm or an activation.
        args: arguments of `cheap`.
        then: matrix product after it, which is not recomputed; None for none.
        when: True to recompute.
        draws: True if `cheap` samples from torch's default generator. The recomputation then restores its state.
        in_graph: True if torch.compile may put the checkpoint of `cheap` into its graph. Attention with DTensor
            parameters must stay outside: torch 2.13 passes the generator's state to the recomputation, and confuses it
            with a DeviceMesh.
    """

    def both(*args: object) -> Any:
        found = cheap(*args)
        return found if then is None else then(found)

    if not (when and torch.is_grad_enabled()):
        return both(*args)
    if torch.compiler.is_compiling():
        found = (_checkpointed if in_graph else _outside)(cheap, *args, draws=draws)
        return found if then is None else then(found)
    return _checkpointed(both, *args, draws=draws)


def _checkpointed(function: Callable[..., Any], *args: object, draws: bool) -> Any:
    """Call `function` in a non-reentrant checkpoint, which with `draws` restores the state of torch's generator."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)


_outside = torch.compiler.disable(_checkpointed)
