"""LayerNorm and RMSNorm as torch computes them, and recomputing what stands before a matrix product.

A norm or an activation is checkpointed together with the product after it: autograd keeps the norm's input, and
backward computes again as far as the product's input, where non-reentrant checkpointing stops, because nothing after it
was kept. torch.compile computes again whatever a checkpoint holds, so there the product stands outside.
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


class HeadsNorm(nn.Module):
    """RMSNorm of all heads together, of which each tp rank has some: [..., heads, D] -> the same.

    Collectives on tp: forward 1 all-reduce of a number per token, backward 1.

    Args:
        size: channels of all heads of all ranks.
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
    """Apply the product `then` to norm(x), or to x; with `recompute`, backward computes the norm again."""
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
    """`then(cheap(*args))`; with `when`, backward computes again what it needs of that up to the input of `then`.

    Args:
        then: the product, which is not computed again; None for nothing more.
        draws: `cheap` draws random numbers from torch's default generator, which then has to be wound back.
        in_graph: torch.compile may take `cheap` into its graph. Attention may not where parameters are DTensors: to
            compute it again, torch 2.13 hands the generator's state on, and takes a DeviceMesh for it.
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
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)


_outside = torch.compiler.disable(_checkpointed)
