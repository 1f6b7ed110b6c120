"""Global norms of gradients and parameters under parallelism, and gradient clipping.

Along the tensor-parallel axis and the shard axis (the ranks over which FSDP2 shards) a parameter is either split or
replicated. For example, the weight of a norm is replicated over tensor-parallel ranks. To count every element once,
each rank divides the squares of its local shards by the number of ranks that hold the same elements. Two all-reduces of
one number, one over each axis, add up the result. The replicate axis is not included, because its ranks hold equal
shards.

A NaN or Inf in a gradient makes the norm NaN or Inf on every rank. The training step (training/step.py) then skips the
update or ends the job. Only `grad_norms` makes the host wait for the device.

The padding rows of the vocabulary do not count. The argument `rows` excludes them (`existing_rows` of
tensor_parallel/parameters.py). `global_grad_norm` has no such argument, because the gradients of padding rows are
exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import local
from megazpp.topology.layout import EXPERT_AXES

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class GradNorm(NamedTuple):
    """Global L2 norm of the gradients, with this rank's contribution for each parameter.

    Attributes:
        value: fp32 scalar, the norm of all gradients divided by `divisor`; equal on all ranks.
        names: names of the parameters that have a gradient.
        squares: [len(names)] fp64, for each gradient this rank's summand of the gradient's squared norm, before the
            division by `divisor`. The sum over tp and shard ranks is the squared norm of the whole gradient.
        divisor: loss scale, by which the gradients will be divided.
    """

    value: torch.Tensor
    names: list[str]
    squares: torch.Tensor
    divisor: float


def global_grad_norm(
    named_parameters: NamedParameters,
    tp: MeshAxis,
    shard: MeshAxis,
    *,
    divisor: float = 1.0,
    norms: Mapping[str, torch.Tensor] | None = None,
) -> GradNorm:
    """Compute the L2 norm of all gradients, with one all-reduce of one number on each axis.

    Args:
        named_parameters: names and parameters, in the same order on every rank. The mesh dimensions of a DTensor have
            the names of the axes `tp` and `shard`. A plain tensor counts as replicated over both axes.
        tp: tensor-parallel axis.
        shard: axis over which FSDP2 shards parameters.
        divisor: loss scale, by which the norm is divided.
        norms: L2 norm of this rank's shard of each gradient, fp32 scalars by parameter name; None computes the norms
            from `.grad`.
    """
    names, gradients, counts = list[str](), list[torch.Tensor](), list[int]()
    copies = dict[object, int]()  # number of ranks with equal elements, cached for each mesh and placement of DTensors
    for name, parameter in named_parameters:
        if norms is None and parameter.grad is not None:
            gradients.append(local(parameter.grad))
        elif norms is None or name not in norms:
            continue
        names.append(name)
        placed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        if placed not in copies:
            copies[placed] = _copies(_split(name, parameter, tp, shard), tp, shard)
        counts.append(copies[placed])
    squares = _squares(_norms(gradients) if norms is None else [norms[name] for name in names], counts)
    total = _summed_root(squares.sum(), tp, shard)
    return GradNorm((total / divisor).float(), names, squares, divisor)


def grad_norms(norm: GradNorm, tp: MeshAxis, shard: MeshAxis) -> dict[str, float]:
    """Return the L2 norm of each parameter's gradient by parameter name, for the log; equal on every rank.

    The function runs one all-reduce over each axis, and makes the host wait for the device.

    Args:
        norm: result of `global_grad_norm`.
        tp: tensor-parallel axis.
        shard: axis over which FSDP2 shards parameters.
    """
    norms = _summed_root(norm.squares, tp, shard) / norm.divisor
    return dict(zip(norm.names, norms.tolist(), strict=True))


def global_parameter_norm(
    named_parameters: NamedParameters,
    tp: MeshAxis,
    shard: MeshAxis,
    *,
    rows: Mapping[str, int],
    device: torch.device,
) -> torch.Tensor:
    """Compute the L2 norm of all parameters, an fp32 scalar that is equal on all ranks.

    Elements that several ranks hold count once, and padding rows of the vocabulary do not count.

    Args:
        named_parameters: names and parameters, as for `global_grad_norm`.
        tp: tensor-parallel axis.
        shard: axis over which FSDP2 shards parameters.
        rows: for each parameter with padding rows at its end, the number of its rows without padding.
        device: device of the collectives. The parameters may be in host memory.
    """
    parts, counts = list[torch.Tensor](), list[int]()
    for name, parameter in named_parameters:
        split = _split(name, parameter, tp, shard)
        parts.append(local(parameter.detach())[: _own_rows(name, parameter, split, rows, tp, shard)])
        counts.append(_copies(split, tp, shard))
    return _summed_root(_squares(_norms(parts), counts).sum().to(device), tp, shard).float()


def count_zero_grads(
    named_parameters: NamedParameters, tp: MeshAxis, shard: MeshAxis, *, rows: Mapping[str, int]
) -> torch.Tensor:
    """Count the gradient elements of all ranks that are exactly zero, for the log.

    Returns a scalar tensor in fp64 that holds an integer. Parameters without a gradient do not count.

    Args:
        named_parameters: names and parameters, as for `global_grad_norm`.
        tp: tensor-parallel axis.
        shard: axis over which FSDP2 shards parameters.
        rows: for each parameter with padding rows at its end, the number of its rows without padding.
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
    """Return the number by which gradients must be divided to remove the loss scale and clip them, an fp32 scalar.

    The result is the loss scale, times (norm + 1e-6) / max_norm if that ratio is above 1. A NaN norm gives NaN. Source:
    Megatron-LM's clip_grads.py.

    Args:
        norm: fp32 scalar, the global norm of the gradients after division by the loss scale.
        max_norm: largest norm of gradients that are not clipped; 0 disables clipping.
        divisor: loss scale.
    """
    excess = (norm + 1e-6) / max_norm if max_norm > 0.0 else torch.ones_like(norm)
    return divisor * excess.clamp(min=1.0)


def divide_grads_(parameters: Iterable[nn.Parameter], divisor: torch.Tensor) -> None:
    """Divide the gradients of all parameters by a scalar tensor in place, in one pass over memory.

    Fused optimizers do not need this function, because their update kernels divide gradients (argument `grad_scale`).
    """
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_div_(grads, divisor)


def _norms(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the L2 norm of each tensor as an fp32 scalar on its device; () if there are no tensors."""
    return torch._foreach_norm(tensors, 2, dtype=torch.float32) if tensors else ()


def _squares(norms: Sequence[torch.Tensor], copies: list[int]) -> torch.Tensor:
    """Return the square of each norm, divided by the number of ranks that hold the same elements, [len(norms)] fp64.

    The sum of the results over all ranks then counts each element once. In fp32 the square of a norm above 2e19 would
    overflow, and a sum of many small squares would lose digits.

    Args:
        norms: L2 norm of this rank's shard of each tensor, fp32 scalars.
        copies: for each tensor, the number of ranks that hold the same elements.
    """
    if not norms:
        return torch.zeros(0, dtype=torch.float64)
    found, divisors = torch.stack(tuple(norms)), torch.tensor(copies, dtype=torch.float64)
    if found.is_cuda:  # copying from memory that is not pinned would make the host wait until backward has finished
        divisors = divisors.pin_memory().to(found.device, non_blocking=True)
    return found.double().square() / divisors


def _summed_root(squares: torch.Tensor, tp: MeshAxis, shard: MeshAxis) -> torch.Tensor:
    """Sum squares of norms, fp64 of any shape, over tp and shard ranks, and return the square roots of the sums."""
    return shard.all_reduce_(tp.all_reduce_(squares.clone())).sqrt()


def _split(name: str, parameter: nn.Parameter, tp: MeshAxis, shard: MeshAxis) -> dict[str, int]:
    """Return the names and sizes of the axes over which a parameter is split; {} for a replicated parameter.

    Only `tp`, `shard` and the axes of experts (EXPERT_AXES) are allowed; another axis raises AssertionError. Experts
    are split over the ranks of tp x shard too, but along axes with other names.
    """
    split: dict[str, int] = {}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dims = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        split = {dim: size for dim, size, placement in dims if size > 1 and not placement.is_replicate()}
    known = {tp.name, shard.name, *EXPERT_AXES}
    assert split.keys() <= known, f"{name} is split over {split}, but norms sum over {tp.name} and {shard.name} only"
    return split


def _copies(split: Mapping[str, int], tp: MeshAxis, shard: MeshAxis) -> int:
    """Return how many ranks of tp x shard hold the same elements of a parameter that is split over the axes `split`."""
    return tp.size * shard.size // math.prod(split.values())


def _own_rows(
    name: str, parameter: nn.Parameter, split: Mapping[str, int], rows: Mapping[str, int], tp: MeshAxis, shard: MeshAxis
) -> int | None:
    """Return how many rows of this rank's local shard are not padding; None for a parameter without padding rows.

    Each axis of n ranks splits s rows into parts of ceil(s / n) rows; the last parts may be shorter or empty. So the
    first row of a rank's part is the rank's index along the axis times ceil(s / n).
    """
    if name not in rows:
        return None
    first, size = 0, len(parameter)
    for axis in (tp, shard):
        if axis.name in split:
            size = -(-size // axis.size)
            first += axis.rank * size
    return max(rows[name] - first, 0)
