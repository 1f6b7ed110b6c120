"""The specification of each parameter: its split over tensor parallelism and its initialization.

A module that owns parameters describes them in its attribute `specs`, a dict by attribute name. Modules are built with
plain local tensors. Before sharding, `distribute_parameters` (initialize.py) converts each parameter to a DTensor on
the tp mesh (split or replicated), the form that FSDP2, gradient clipping and resharded checkpoints need. Forward code
reads parameters through `local`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.parallel.axis import MeshAxis


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """The split of one parameter over tp, and its initialization.

    Attributes:
        split: dimension that is split over tp; None if every tp rank holds the whole parameter.
        std: standard deviation of the normal distribution of the initial values; 0 for a constant.
        value: initial value if `std` is 0.
        rows: number of rows that are initialized. Later rows are padding and stay zero. None means all rows.
        matrices: numbers of rows of the matrices that the parameter consists of, in a repeating pattern (for instance
            query, key and value), for Muon; () if the parameter is not a matrix of a layer.
        transposed: True if the parameter is stored as [inputs, outputs].
        expert: True if the parameter is on the experts' mesh, where ep replaces tp.
        exact: True if the parameter is never quantized, neither between ranks nor in packed weights.
        partial: True if each tp rank computes only a part of the gradient, see `sum_partial_gradients_`.
    """

    split: int | None = None
    std: float = 0.0
    value: float = 0.0
    rows: int | None = None
    matrices: tuple[int, ...] = ()
    transposed: bool = False
    expert: bool = False
    exact: bool = False
    partial: bool = False


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, for use in forward: the local tensor of a DTensor.

    The result is differentiable as with `DTensor.to_local`, but takes half of its host time. It assumes that the
    gradient has the same placement as the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()  # torch.compile supports this method
    if parameter.requires_grad and torch.is_grad_enabled():
        return _Locals.apply(parameter)[0]
    return parameter._local_tensor


@contextmanager
def local_parameters(places: Sequence[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Return a context in which modules hold local tensors, as `local` returns them, instead of DTensor parameters.

    Used around calls of compiled graphs. A graph could take the DTensors itself, but it would unwrap each one, and wrap
    each gradient, in a dozen Python calls.

    Args:
        places: the parameters to replace, each a module's parameter dict and a name in it, see `places_of`.
    """
    places = [(parameters, name) for parameters, name in places if isinstance(parameters.get(name), DTensor)]
    whole = [parameters[name] for parameters, name in places]
    if whole and torch.is_grad_enabled():
        parts = _Locals.apply(*whole)
    else:
        parts = [parameter._local_tensor for parameter in whole]
    for (parameters, name), part in zip(places, parts, strict=True):
        parameters[name] = part
    try:
        yield
    finally:
        for (parameters, name), parameter in zip(places, whole, strict=True):
            parameters[name] = parameter


def places_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the parameter dict and the name of each parameter of a module and its submodules."""
    return [(each._parameters, name) for each in module.modules() for name in each._parameters]


class _Locals(torch.autograd.Function):
    """The conversion of DTensors to their local tensors, and of local gradients to DTensors."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.specs = [parameter._spec for parameter in parameters]
        ctx.set_materialize_grads(False)
        parts = tuple([parameter._local_tensor.detach() for parameter in parameters])
        ctx.mark_non_differentiable(
            *[part for part, parameter in zip(parts, parameters, strict=True) if not parameter.requires_grad]
        )
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        # `__new__` skips `__init__`, which does nothing but is called through two wrappers.
        return tuple([
            None if grad is None else DTensor.__new__(DTensor, grad.contiguous(), spec, requires_grad=False)
            for grad, spec in zip(grads, ctx.specs, strict=True)
        ])  # fmt: skip


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that belong to a model, by name: its parameters, then its buffers.

    This is the only list of a model's state. Whatever copies, fills, saves, loads, mixes, sums or converts a model uses
    it, so that buffers, such as the biases of experts, are nowhere left out.
    """
    return dict((*model.named_parameters(), *model.named_buffers()))


def owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, ParameterSpec]]:
    """Yield the name, the owning module, the attribute name and the specification of each parameter of `model`.

    Raises:
        TypeError: a parameter has no entry in its module's `specs`.
    """
    for prefix, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            specs: dict[str, ParameterSpec] = getattr(module, "specs", {})
            if attribute not in specs:
                raise TypeError(f"{type(module).__name__} has no ParameterSpec for {name}")
            yield name, module, attribute, specs[attribute]


def exact_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are never quantized; modules without `specs` have none."""
    return frozenset(
        f"{prefix}.{attribute}" if prefix else attribute
        for prefix, module in model.named_modules()
        for attribute, spec in getattr(module, "specs", {}).items()
        if spec.exact
    )


def existing_rows(model: nn.Module) -> dict[str, int]:
    """Return, by name, the rows without padding of each parameter whose rows are the padded vocabulary."""
    return {name: spec.rows for name, _, _, spec in owned_parameters(model) if spec.rows is not None}


def partial_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters whose gradient is the sum of parts that the tp ranks compute."""
    return frozenset(name for name, _, _, spec in owned_parameters(model) if spec.partial)


@torch.no_grad()
def sum_partial_gradients_(parameters: Iterable[torch.Tensor], tp: MeshAxis) -> None:
    """Sum gradients in place over tp with a single all-reduce. Call this once per optimizer step.

    Args:
        parameters: parameters for which each tp rank has computed a part of the gradient. All gradients have one dtype.
        tp: tensor-parallel axis.
    """
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    if tp.size > 1 and parts:
        flat = tp.all_reduce_(torch.cat([part.reshape(-1) for part in parts]))
        totals = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(totals, parts, strict=True)])
