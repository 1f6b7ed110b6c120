"""Global norms that count every element once, and clipping by them.

A parameter's elements are spread over the tensor-parallel and the shard axis, or repeated along them (a norm's gain is
the same on every tensor-parallel rank). So each rank adds up the squares of its local shards, each divided by the
number of ranks that hold the same elements, and the sum goes over both axes: two all-reduces of one number. The
replicate axis is left out: its ranks hold the same shards. NaN and Inf arrive on every rank, and the caller skips the
step. Nothing here waits for the device.

The rows that pad a vocabulary are no elements: `rows` (`existing_rows` of tensor_parallel/parameters.py) leaves them
out. Their gradients are exactly zero, so `global_grad_norm` need not know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import EXPERT_NAMES
from megazpp.tensor_parallel.parameters import local

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class GradNorm(NamedTuple):
    """The norm of all gradients, an fp32 scalar equal on all ranks; names and this rank's squares [P] fp64 of each."""

    value: torch.Tensor
    names: list[str]
    squares: torch.Tensor
    divisor: float


def global_grad_norm(
    named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis, *, divisor: float = 1.0
) -> GradNorm:
    """L2 norm of all gradients, divided by `divisor` (the loss scale); one all-reduce of one number on each axis.

    Args:
        named_parameters: the same on every rank; DTensors whose mesh dims carry the axes' names, or plain tensors,
            which are taken as repeated on every rank of both axes.
        tp, shard: the axes along which parameters may be split.
    """
    names, parts = list[str](), list[tuple[torch.Tensor, int]]()
    copies = dict[object, int]()  # by placement, of which there are few
    for name, parameter in named_parameters:
        if parameter.grad is not None:
            names.append(name)
            placed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            if placed not in copies:
                copies[placed] = _copies(_split(name, parameter, tp, shard), tp, shard)
            parts.append((local(parameter.grad), copies[placed]))
    squares = _squares(parts)
    total = _summed_root(squares.sum(), tp, shard)
    return GradNorm((total / divisor).float(), names, squares, divisor)


def grad_norms(norm: GradNorm, tp: MeshAxis, shard: MeshAxis) -> dict[str, float]:
    """L2 norm of each parameter's gradient, the same on every rank."""
    norms = _summed_root(norm.squares, tp, shard) / norm.divisor
    return dict(zip(norm.names, norms.tolist(), strict=True))


def global_parameter_norm(
    named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis, *, rows: Mapping[str, int]
) -> torch.Tensor:
    """L2 norm of all parameters, an fp32 scalar; counted and communicated like `global_grad_norm`.

    Args:
        rows: number of rows that exist of the parameters, by name, that end in padding.
    """
    parts = []
    for name, parameter in named_parameters:
        split = _split(name, parameter, tp, shard)
        kept = local(parameter.detach())[: _own_rows(name, parameter, split, rows, tp, shard)]
        parts.append((kept, _copies(split, tp, shard)))
    return _summed_root(_squares(parts).sum(), tp, shard).float()


def count_zero_grads(
    named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis, *, rows: Mapping[str, int]
) -> torch.Tensor:
    """Number of gradient elements that are exactly zero, a whole number in fp64; arguments as `global_parameter_norm`.

    Parameters without a gradient have no elements.
    """
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in named_parameters:
        if parameter.grad is not None:
            split = _split(name, parameter, tp, shard)
            grad = local(parameter.grad)[: _own_rows(name, parameter, split, rows, tp, shard)]
            zeros = (grad.numel() - torch.count_nonzero(grad)).double() / _copies(split, tp, shard)
            total = total.to(zeros.device) + zeros
    return shard.all_reduce_(tp.all_reduce_(total)).round_()


def clip_divisor(norm: torch.Tensor, max_norm: float, *, divisor: float = 1.0) -> torch.Tensor:
    """Divisor of gradients such that their global norm is at most `max_norm`, an fp32 scalar like `norm`.

    Megatron's rule: `divisor` (the loss scale), times (norm + 1e-6) / max_norm where that is above 1; `norm` is that of
    the divided gradients. NaN stays NaN, and max_norm 0 turns clipping off.
    """
    excess = (norm + 1e-6) / max_norm if max_norm > 0.0 else torch.ones_like(norm)
    return divisor * excess.clamp(min=1.0)


def divide_grads_(parameters: Iterable[nn.Parameter], divisor: torch.Tensor) -> None:
    """Divide the gradients by a scalar, in one pass over memory; a fused optimizer does it by itself (`grad_scale`)."""
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_div_(grads, divisor)


def _squares(parts: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """[parts] fp64 squared norms, each divided by the number of copies.

    In fp64: the square of a norm above 2e19 would overflow fp32, and a sum of many small parts loses nothing.
    """
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm([part for part, _ in parts], 2, dtype=torch.float32))
    copies = torch.tensor([copies for _, copies in parts], dtype=torch.float64)
    if norms.is_cuda:  # out of ordinary memory the host would wait for the whole backward
        copies = copies.pin_memory().to(norms.device, non_blocking=True)
    return norms.double().square() / copies


def _summed_root(squares: torch.Tensor, tp: MeshAxis, shard: MeshAxis) -> torch.Tensor:
    return shard.all_reduce_(tp.all_reduce_(squares.clone())).sqrt()


def _split(name: str, parameter: nn.Parameter, tp: MeshAxis, shard: MeshAxis) -> dict[str, int]:
    """Return the axes over which a parameter's elements are spread, and their sizes.

    Experts are spread over the ranks of tp x shard as well, along other axes.
    """
    split: dict[str, int] = {}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dims = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        split = {dim: size for dim, size, placement in dims if size > 1 and not placement.is_replicate()}
    known = {tp.name, shard.name, EXPERT_NAMES["tp"], EXPERT_NAMES["shard"]}
    assert split.keys() <= known, f"{name} is split over {split}, the norm sums over {tp.name}, {shard.name}"
    return split


def _copies(split: dict[str, int], tp: MeshAxis, shard: MeshAxis) -> int:
    """Number of ranks of the two axes that hold the same elements."""
    return tp.size * shard.size // math.prod(split.values())


def _own_rows(
    name: str, parameter: nn.Parameter, split: Mapping[str, int], rows: Mapping[str, int], tp: MeshAxis, shard: MeshAxis
) -> int | None:
    """Number of this rank's rows that exist, None for all; each axis spreads the rows of a padded parameter evenly."""
    if name not in rows:
        return None
    first, size = 0, len(parameter)
    for axis in (tp, shard):
        if axis.name in split:
            size = -(-size // axis.size)
            first += axis.rank * size
    return max(rows[name] - first, 0)
