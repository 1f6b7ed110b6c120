"""The specification of each parameter of a model: its split over tensor-parallel ranks, and its initialization.

A module that owns parameters describes them in its attribute `specs`, a dict by attribute name. Modules are built with
plain local tensors. Before sharding, `distribute_parameters` (initialize.py) converts each parameter to a DTensor on
the tp mesh, split or replicated. FSDP2, gradient clipping and resharded checkpoints need DTensors. Forward code reads
parameters through `local`.
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
    """The specification of one parameter: its split over tensor-parallel ranks, initial values and special treatment.

    Attributes:
        split: dim that is split over tensor-parallel ranks; None if every such rank holds the unsplit parameter.
        std: standard deviation of the normal distribution of the initial values; 0 for a constant.
        value: initial value of all elements if `std` is 0.
        rows: number of rows that are initialized. Later rows are padding and stay zero. None means all rows.
        matrices: numbers of rows of the matrices that the parameter consists of, in a repeating pattern (for instance
            query, key and value), for Muon; () if the parameter is not a matrix of a layer.
        transposed: True if the parameter is stored as [inputs, outputs].
        expert: True if the parameter belongs to experts, which are split over expert-parallel ranks (ep) instead of tp.
        exact: True if the parameter is never quantized, neither between ranks nor in packed weights.
        partial: True if each tensor-parallel rank computes only a summand of the gradient, so that the gradient is the
            sum over these ranks, see `sum_partial_gradients_`.
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
    """Return the local tensor of a DTensor parameter, for use in forward; return any other parameter unchanged.

    The result is differentiable as with `DTensor.to_local`, which takes twice the host time. The gradient is assumed to
    have the same placement as the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()  # torch.compile can trace `to_local`; the faster way below is for eager code
    if parameter.requires_grad and torch.is_grad_enabled():
        return _Locals.apply(parameter)[0]
    return parameter._local_tensor


@contextmanager
def local_parameters(places: Sequence[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Return a context in which modules hold local tensors, as `local` returns them, instead of DTensor parameters.

    `TransformerLayer` runs its graph of torch.compile in this context. A graph could take DTensors itself, but it would
    unwrap each parameter, and wrap each gradient, in a dozen Python calls.

    Args:
        places: for each parameter to replace, the dict `_parameters` of its module, and the parameter's name in this
            dict; see `places_of`.
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
    """Return the places of all parameters of a module and its submodules, which `local_parameters` needs.

    A place is a pair: the dict `_parameters` of the submodule that owns the parameter, and the parameter's name in this
    dict.
    """
    return [(each._parameters, name) for each in module.modules() for name in each._parameters]


class _Locals(torch.autograd.Function):
    """The autograd function that converts DTensor parameters to local tensors in forward.

    Backward converts the gradients of the local tensors to DTensors with the placements of the parameters.
    """

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
        # Create the DTensors by `DTensor.__new__` alone: `DTensor.__init__` does nothing, but its two Python wrappers
        # take host time.
        found = [
            None if grad is None else DTensor.__new__(DTensor, grad.contiguous(), spec, requires_grad=False)
            for grad, spec in zip(grads, ctx.specs, strict=True)
        ]
        return tuple(found)


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a model by name: its parameters, then its buffers.

    All code that copies, saves, loads, averages or converts a model uses this function, so that none of it omits
    buffers, such as the biases of experts.
    """
    return dict((*model.named_parameters(), *model.named_buffers()))


def owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, ParameterSpec]]:
    """Yield (name in the model, owning module, attribute name in it, specification) for each parameter of `model`.

    Raises:
        TypeError: a parameter has no entry in its module's `specs`.
    """
    for prefix, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            specs: dict[str, ParameterSpec] = getattr(module, "specs", {})
            if attribute not in specs:
                raise TypeError(
                    f"{type(module).__name__} has no ParameterSpec for the parameter {name}: add one to its `specs`"
                )
            yield name, module, attribute, specs[attribute]


def exact_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the model's parameters whose specification says that they are never quantized.

    Parameters of modules without the attribute `specs` may be quantized, so they are not in the result.
    """
    return frozenset(
        f"{prefix}.{attribute}" if prefix else attribute
        for prefix, module in model.named_modules()
        for attribute, spec in getattr(module, "specs", {}).items()
        if spec.exact
    )


def existing_rows(model: nn.Module) -> dict[str, int]:
    """Return the number of rows that are not padding, by name of the parameter.

    Only parameters that may have padding rows, such as the embedding's, have an entry (`ParameterSpec.rows`).
    """
    return {name: spec.rows for name, _, _, spec in owned_parameters(model) if spec.rows is not None}


def partial_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters whose gradient is partial on each tensor-parallel rank.

    The sum over these ranks completes such a gradient, see `sum_partial_gradients_`.
    """
    return frozenset(name for name, _, _, spec in owned_parameters(model) if spec.partial)


@torch.no_grad()
def sum_partial_gradients_(parameters: Iterable[torch.Tensor], tp: MeshAxis) -> None:
    """Sum partial gradients over tensor-parallel ranks in place, with a single all-reduce.

    Call this function once per optimizer step, after the last backward. Norms, for example, have partial gradients
    under sequence parallelism, because each rank computes them from its own slice of the sequence.

    Args:
        parameters: parameters whose `.grad` is partial on each tensor-parallel rank. All gradients have one dtype.
        tp: tensor-parallel axis.
    """
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    if tp.size > 1 and parts:
        flat = tp.all_reduce_(torch.cat([part.reshape(-1) for part in parts]))
        totals = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(totals, parts, strict=True)])
