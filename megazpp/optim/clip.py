"""Global norms that count every element once, and clipping by them.

A parameter's elements are spread over the tensor-parallel and the shard axis, or repeated along them (a
norm's gain is the same on every tensor-parallel rank). So each rank adds up the squares of its local shards,
each divided by the number of ranks that hold the same elements, and the sum goes over both axes: two
all-reduces of one number. The replicate axis is left out: its ranks hold the same shards.

NaN and Inf are never replaced on the way: a gradient that is not finite gives a norm that is not finite, on
every rank, and the caller skips the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import local

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def global_grad_norm(
    named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis, *, divisor: float = 1.0
) -> torch.Tensor:
    """L2 norm of all gradients, the same on every rank; parameters without a gradient count as 0.

    Args:
        named_parameters: the same on every rank; DTensors whose mesh dims carry the axes' names, or plain tensors,
            which are taken as repeated on every rank of both axes.
        tp, shard: the axes along which parameters may be split. One all-reduce of one number on each.
        divisor: the norm is divided by this (the loss scale).
    Returns:
        fp32 scalar on the parameters' device.
    """
    return (_global_norm(_grad_parts(named_parameters, tp, shard), tp, shard) / divisor).float()


def grad_norms(
    named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis, *, divisor: float = 1.0
) -> dict[str, float]:
    """L2 norm of each parameter's gradient, counted like `global_grad_norm`; for a look at what went wrong."""
    named = [(name, parameter) for name, parameter in named_parameters if parameter.grad is not None]
    parts = _grad_parts(named, tp, shard)
    squares = [part.local.double().square().sum() / part.copies for part in parts]
    norms = shard.all_reduce_(tp.all_reduce_(torch.stack(squares))).sqrt() / divisor
    return dict(zip((name for name, _ in named), norms.tolist(), strict=True))


def global_parameter_norm(named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis) -> torch.Tensor:
    """L2 norm of all parameters, fp32; counted and communicated like `global_grad_norm`."""
    parts = [_Part(local(p.detach()), _copies(name, p, tp, shard)) for name, p in named_parameters]
    return _global_norm(parts, tp, shard).float()


def count_zero_grads(named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis) -> torch.Tensor:
    """Number of gradient elements that are exactly zero, fp64; counted like `global_grad_norm`."""
    parts = _grad_parts(named_parameters, tp, shard)
    total = _zero(parts)
    for part in parts:
        total += (part.local.numel() - torch.count_nonzero(part.local)).double() / part.copies
    return shard.all_reduce_(tp.all_reduce_(total))


def clip_grads_(
    parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float, *, divisor: float = 1.0
) -> torch.Tensor:
    """Divide the gradients by `divisor`, then scale them so that their global norm is at most `max_norm`.

    Local work in one pass over memory, and no wait for the device. Megatron's factor: max_norm / (norm + 1e-6)
    where that is below 1. A norm that is not finite leaves gradients that are not; the caller skips the step.

    Args:
        parameters: those whose `.grad` is changed in place.
        norm: global norm of the divided gradients, as `global_grad_norm(..., divisor=divisor)` gives it.
        max_norm: largest norm allowed; 0 turns clipping off.
        divisor: the loss scale.
    Returns:
        The clip factor, a scalar on the device of `norm`: 1 where nothing is clipped. `divisor` is not in it.
    """
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    clipped = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0.0 else torch.ones_like(norm)
    if grads and (max_norm > 0.0 or divisor != 1.0):
        torch._foreach_mul_(grads, clipped * (1.0 / divisor))
    return clipped


class _Part(NamedTuple):
    """A local shard, and how many ranks of the two axes hold the same elements."""

    local: torch.Tensor
    copies: int


def _grad_parts(named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis) -> list[_Part]:
    return [
        _Part(local(parameter.grad), _copies(name, parameter, tp, shard))
        for name, parameter in named_parameters
        if parameter.grad is not None
    ]


def _global_norm(parts: list[_Part], tp: MeshAxis, shard: MeshAxis) -> torch.Tensor:
    # summed in fp64: the square of a norm above 2e19 would overflow fp32, and many small parts lose nothing
    total = _zero(parts)
    if parts:
        norms = torch.stack(torch._foreach_norm([part.local for part in parts], 2, dtype=torch.float32))
        copies = torch.tensor([part.copies for part in parts], dtype=torch.float64)
        if norms.is_cuda:  # out of ordinary memory the host would wait for the whole backward
            copies = copies.pin_memory().to(norms.device, non_blocking=True)
        total += (norms.double().square() / copies).sum()
    return shard.all_reduce_(tp.all_reduce_(total)).sqrt()


def _zero(parts: list[_Part]) -> torch.Tensor:
    device = parts[0].local.device if parts else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64, device=device)


def _copies(name: str, parameter: nn.Parameter, tp: MeshAxis, shard: MeshAxis) -> int:
    split: set[str] = set()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dims = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        split = {dim for dim, size, placement in dims if size > 1 and not placement.is_replicate()}
    assert split <= {tp.name, shard.name}, f"{name} is split over {split}, the norm sums over {tp.name}, {shard.name}"
    return math.prod(axis.size for axis in (tp, shard) if axis.name not in split)
