"""The sharding units of an FSDP2 model, and their parameters in the order in which FSDP2 lays them out flat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megazpp.parallel.dims import ParallelDims
from megazpp.zero.layout import plan_segments


@dataclass(frozen=True, kw_only=True)
class UnitParameter:
    """One parameter of a unit.

    Attributes:
        name: in the model.
        module, attribute: where it is registered (the object there changes while it is gathered).
        shape: on this tensor-parallel rank, whole along the data axes.
        requires_grad: whether it is trained.
    """

    name: str
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that travel together.

    Attributes:
        modules: the FSDP modules that share the unit, usually one.
        parameters: in FSDP2's flat order.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[UnitParameter, ...]

    def shard_elements(self, num_ranks: int) -> int:
        """Elements of the unit's flat shard."""
        return plan_segments([(p.name, p.shape) for p in self.parameters], num_ranks)[-1].stop

    def fingerprint(self) -> tuple[object, ...]:
        """Changes when a shard is written to by an operation that autograd counts, replaced, or the mode changes."""
        marks: list[object] = [self.modules[0].training]
        for p in self.parameters:
            tensor = getattr(p.module, p.attribute)
            marks += (id(tensor), tensor._version, tensor._local_tensor._version)
        return tuple(marks)


def find_units(model: nn.Module, dims: ParallelDims) -> list[Unit]:
    """The units of a wrapped model, outermost last.

    Raises:
        TypeError: `model` has not been wrapped by `fully_shard`.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"{type(model).__name__} has not been wrapped by fully_shard")
    names = {module: name for name, module in model.named_modules()}
    states: dict[object, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            states.setdefault(module._get_fsdp_state(), []).append(module)
    units = []
    for modules in states.values():
        seen: set[object] = set()
        found = [p for module in modules for p in _parameters(module, names, seen, dims)]
        if found:
            units.append(Unit(modules=tuple(modules), parameters=tuple(found)))
    return units


def _parameters(
    root: nn.Module, names: dict[nn.Module, str], seen: set[object], dims: ParallelDims
) -> Iterator[UnitParameter]:
    """FSDP2's order: children before their parent, nested units left out, a shared parameter where it first appears."""
    for child in root.children():
        if not isinstance(child, FSDPModule) and child not in seen:
            yield from _parameters(child, names, seen, dims)
    seen.add(root)
    for attribute, tensor in root.named_parameters(recurse=False):
        if tensor in seen:
            continue
        seen.add(tensor)
        yield UnitParameter(
            name=f"{names[root]}.{attribute}".lstrip("."),
            module=root,
            attribute=attribute,
            shape=_local_shape(tensor, dims),
            requires_grad=tensor.requires_grad,
        )


def _local_shape(tensor: torch.Tensor, dims: ParallelDims) -> tuple[int, ...]:
    """The shape on this tensor-parallel rank."""
    assert isinstance(tensor, DTensor), "FSDP2 has made every parameter a DTensor"
    shape = list(tensor.shape)
    mesh_names = tensor.device_mesh.mesh_dim_names or ()
    for name, placement in zip(mesh_names, tensor.placements, strict=True):
        if name == dims.tp.name and isinstance(placement, Shard):
            shape[placement.dim] //= dims.tp.size
    return tuple(shape)
