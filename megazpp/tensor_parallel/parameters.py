"""The attributes of a parameter beside its local tensor: its split over tensor parallelism, its initialisation.

A module that owns parameters lists them in `specs`, by attribute name. Modules hold plain local tensors; before
sharding, `distribute_parameters` turns each into a DTensor on the tp mesh (split, or replicated), which is what
FSDP2, gradient clipping and resharding checkpoints compose with. Forward code reads them through `local`.

Each parameter is drawn in full from a generator of (seed, name) and then sliced, so weights do not change with the
number of ranks or how they are arranged. GPUs of different models draw different numbers from one seed (CUDA cuts a
tensor by its multiprocessors), so what several ranks hold alike, `share_parameters_` takes from one of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megazpp.parallel.axis import MeshAxis


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """The split of one parameter over tp, and its initialisation."""

    split: int | None = None  # the dim that tp ranks share out, None for a parameter every rank holds whole
    std: float = 0.0  # standard deviation of the normal distribution it is drawn from; 0 for a constant
    value: float = 0.0  # the constant when `std` is 0
    rows: int | None = None  # rows that are drawn; the rest is padding and stays zero. None for all
    matrices: tuple[int, ...] = ()  # rows of the matrices of a layer that take turns in it; () if it is none
    transposed: bool = False  # stored as [inputs, outputs]
    expert: bool = False  # on the experts' mesh, where ep takes tp's place; else on the tp mesh
    exact: bool = False  # never quantized between ranks
    partial: bool = False  # each tp rank computes a part of the gradient; see `sum_partial_gradients_`


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter inside forward: the local tensor of a DTensor.

    Differentiable like `DTensor.to_local`, for half of the host's time: a gradient is placed as its parameter is.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()  # which torch.compile knows
    if parameter.requires_grad and torch.is_grad_enabled():
        return _Local.apply(parameter)
    return parameter._local_tensor


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> DTensor:
        # not the constructor: its __init__ does nothing, but through two wrappers
        return DTensor.__new__(DTensor, grads[0].contiguous(), ctx.spec, requires_grad=False)


@contextmanager
def local_parameters(places: Sequence[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Have modules hold their local tensors inside, as `local` returns them, for code that torch.compile has compiled.

    A compiled graph takes DTensors too, and has their gradients, but unwraps and wraps each in a dozen Python calls.

    Args:
        places: dicts of modules' parameters and names in them, see `places_of`.
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
    """Return where the parameters of a module and of those inside it are registered."""
    return [(each._parameters, name) for each in module.modules() for name in each._parameters]


class _Locals(torch.autograd.Function):
    """`_Local` of several parameters."""

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
        return tuple([
            None if grad is None else DTensor.__new__(DTensor, grad.contiguous(), spec, requires_grad=False)
            for grad, spec in zip(grads, ctx.specs, strict=True)
        ])  # fmt: skip


def owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, ParameterSpec]]:
    """Name, module, attribute and spec of all parameters of `model`; one without a spec is an error."""
    for prefix, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            specs: dict[str, ParameterSpec] = getattr(module, "specs", {})
            if attribute not in specs:
                raise TypeError(f"{type(module).__name__} has no ParameterSpec for {name}")
            yield name, module, attribute, specs[attribute]


def distribute_parameters(model: nn.Module, tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None = None) -> None:
    """Replace every parameter by a DTensor that wraps the same local tensor.

    Args:
        tp_mesh: of the parameters; None leaves them as they are.
        ep_mesh: of experts' parameters; None leaves these as they are.
    """
    for _, module, attribute, spec in list(owned_parameters(model)):
        mesh = ep_mesh if spec.expert else tp_mesh
        if mesh is None:
            continue
        tensor = getattr(module, attribute)
        placement = Replicate() if spec.split is None else Shard(spec.split)
        wrapped = DTensor.from_local(tensor.detach(), mesh, [placement], run_check=False)
        setattr(module, attribute, nn.Parameter(wrapped, requires_grad=tensor.requires_grad))


@torch.no_grad()
def initialize_parameters_(model: nn.Module, *, seed: int, draw_device: torch.device) -> None:
    """Fill every parameter, local tensors or DTensors of any placement, from (seed, name).

    Full tensors are drawn on `draw_device` one at a time; CPU and CUDA draw other numbers.
    """
    for name, module, attribute, spec in owned_parameters(model):
        parameter = getattr(module, attribute)
        full = draw_parameter(name, tuple(parameter.shape), spec, seed=seed, device=draw_device)
        if isinstance(parameter, DTensor):
            full, mesh = full.to(parameter.device), parameter.device_mesh
            placed = distribute_tensor(full, mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(placed.to_local())
        else:
            parameter.copy_(full)


def existing_rows(model: nn.Module) -> dict[str, int]:
    """Return the number of rows that exist, by name, of the parameters that may end in rows of padding."""
    return {name: spec.rows for name, _, _, spec in owned_parameters(model) if spec.rows is not None}


def count_elements(model: nn.Module, tp_size: int) -> int:
    """Return the number of elements of all whole parameters over tp, without the rows that pad a vocabulary."""
    total = 0
    for _, module, attribute, spec in owned_parameters(model):
        shape = list(getattr(module, attribute).shape)
        if spec.split is not None and not isinstance(getattr(module, attribute), DTensor):
            shape[spec.split] *= tp_size
        total += math.prod(shape if spec.rows is None else (min(spec.rows, shape[0]), *shape[1:]))
    return total


def partial_parameters(model: nn.Module) -> frozenset[str]:
    """The names of the parameters of whose gradient each tp rank computes a part."""
    return frozenset(name for name, _, _, spec in owned_parameters(model) if spec.partial)


@torch.no_grad()
def sum_partial_gradients_(parameters: Iterable[torch.Tensor], tp: MeshAxis) -> None:
    """Add up over tp, in one all-reduce per optimizer step, what its ranks have of these gradients, of one dtype."""
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    if tp.size > 1 and parts:
        flat = tp.all_reduce_(torch.cat([part.reshape(-1) for part in parts]))
        totals = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(totals, parts, strict=True)])


@torch.no_grad()
def share_parameters_(model: nn.Module, *copies: MeshAxis, tp: MeshAxis) -> None:
    """Give every copy of a drawn parameter, over `copies` and what `tp` does not split, its first rank's values."""
    for _, module, attribute, spec in owned_parameters(model):
        if spec.std > 0.0:
            values = local(getattr(module, attribute).detach())
            if spec.split is None:
                tp.broadcast_(values)
            for axis in copies:
                axis.broadcast_(values)


def draw_parameter(
    name: str, shape: tuple[int, ...], spec: ParameterSpec, *, seed: int, device: torch.device
) -> torch.Tensor:
    """The full initial value of one parameter, [shape] fp32, from (seed, name)."""
    full = torch.full(shape, spec.value, dtype=torch.float32, device=device)
    if spec.std > 0.0:
        generator = torch.Generator(device).manual_seed(seed_for(name, seed=seed))
        full[: spec.rows].normal_(0.0, spec.std, generator=generator)
        if spec.rows is not None:
            full[spec.rows :] = 0.0
    return full


def seed_for(name: str, *, seed: int) -> int:
    """A generator seed that depends on (seed, name) alone and is unrelated to that of any other pair."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
