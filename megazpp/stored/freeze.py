"""Makes the parameters of a model frozen units (frozen.py), unit by unit, so that memory never holds more than one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.stored.frozen import FrozenUnit, FrozenUnits, FrozenWeight
from megazpp.stored.messages import LoadRows, MessagePlan, pack_message, plan_message, whole_message
from megazpp.stored.packed import Bits, at_rest

_LOADED_AT_ONCE = 1 << 18  # elements; larger pieces leave holes in the heap, between which the weights lie


def frozen_axis(dims: ParallelDims) -> MeshAxis:
    """The axis of frozen units, which any number of frozen models may share; every rank calls this once."""
    return dims.twin("local", "frozen")


def freeze(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    axis: MeshAxis,
    load: LoadRows,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    bits: Bits | None = None,
    trained: Callable[[str], bool] = lambda name: False,
) -> FrozenUnits:
    """Make the parameters of `model` frozen units; it computes as before.

    Args:
        model: on the meta device, each parameter with the shape of this tensor-parallel rank's part of it.
        units: modules whose weights are used together, in the order of use; `model` takes what is left.
        axis: see `frozen_axis`; one of size 1 is a whole copy on this rank.
        load: (name, rows) -> these rows of dim 0 of this tensor-parallel rank's part, of any dtype. Each is asked for
            once, on one rank of the axis, a few megabytes at a time.
        device: where messages are kept and weights unpacked.
        dtype: in which the model computes.
        bits: of an element of a matrix at rest; None: as the model computes.
        trained: whether a parameter of this name is left alone.
    Raises:
        ValueError: `load` gave another shape, or units share a weight.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, attribute))
    names = {parameter: name for name, parameter in model.named_parameters()}
    titles = {module: name for name, module in model.named_modules()}
    taken = {parameter for parameter, name in names.items() if trained(name)}

    def freeze_unit(modules: Sequence[nn.Module]) -> FrozenUnit | None:
        own = list(dict.fromkeys(p for module in modules for p in module.parameters() if p not in taken))
        taken.update(own)
        if not own:
            return None
        inside = {each for module in modules for each in module.modules()}
        for parameter in own:
            if not all(module in inside for module, _ in places[parameter]):
                raise ValueError(f"{names[parameter]} is used in several units: leave them to the model's own")
        title = ", ".join(titles[module] or "the rest" for module in modules)
        shapes = {names[parameter]: tuple(parameter.shape) for parameter in own}
        plan = _plan_unit(shapes, axis.size, dtype, bits, title)
        weights = [_weight(plan, index, load, axis.rank, device, dtype) for index in range(len(own))]
        message = None
        if _packs(plan, dtype):
            pieces = pack_message(plan, load, axis.rank, num_elements=_LOADED_AT_ONCE)
            message = whole_message(torch.empty(plan.num_bytes, dtype=torch.uint8, device=device), pieces)
        for parameter, weight in zip(own, weights, strict=True):
            for module, attribute in places[parameter]:
                delattr(module, attribute)
                setattr(module, attribute, weight.weight)
        return FrozenUnit(title, weights, axis, message)

    with torch.inference_mode(False), torch.no_grad():
        made = [(unit, modules) for modules in units if (unit := freeze_unit(modules)) is not None]
        rest = freeze_unit([model])
    if rest is not None:
        made.insert(0, (rest, [model]))
    frozen = FrozenUnits([unit for unit, _ in made], outermost=rest is not None)
    for unit, modules in made:
        frozen.attach(unit, modules)
    return frozen


class FrozenBytes(NamedTuple):
    """Bytes of a frozen unit on one rank.

    Attributes:
        kept: all the time.
        received: of the messages of all ranks, from the gather until they are unpacked.
        unpacked: of the weights around each use.
    """

    kept: int
    received: int
    unpacked: int


def frozen_bytes(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, bits: Bits | None = None
) -> FrozenBytes:
    """The bytes of a unit of these weights on each of `num_ranks` ranks of a node; arguments as for `freeze`."""
    plan = _plan_unit(shapes, num_ranks, dtype, bits)
    whole = sum(_padded_elements(plan, index) for index in range(len(shapes))) * dtype.itemsize
    if not _packs(plan, dtype):
        return FrozenBytes(whole, 0, 0)
    return FrozenBytes(plan.num_bytes, num_ranks * plan.num_bytes if num_ranks > 1 else 0, whole)


def _plan_unit(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, bits: Bits | None, name: str = ""
) -> MessagePlan:
    return plan_message(name, shapes, num_ranks, *at_rest(bits, dtype), vectors=dtype, align=16)


def _packs(plan: MessagePlan, dtype: torch.dtype) -> bool:
    """True if weights are kept as a message; else they are whole, as modules use them."""
    return plan.num_parts > 1 or any(w.rows is not None and not w.rows.holds(dtype) for w in plan.weights)


def _padded_elements(plan: MessagePlan, index: int) -> int:
    weight = plan.weights[index]
    assert weight.rows is not None
    return plan.num_parts * weight.part_rows * weight.rows.columns


def _weight(
    plan: MessagePlan, index: int, load: LoadRows, part: int, device: torch.device, dtype: torch.dtype
) -> FrozenWeight:
    """A weight of a unit, without memory; with memory, and loaded, where nothing is packed."""
    placed = plan.weights[index]
    whole = torch.empty(_padded_elements(plan, index), dtype=dtype, device=device)
    weight = whole[: torch.Size(placed.shape).numel()].view(placed.shape)
    if _packs(plan, dtype):
        whole.untyped_storage().resize_(0)
    else:
        done = 0
        for loaded in placed.loaded(load, part, _LOADED_AT_ONCE):
            weight[done : done + len(loaded)] = loaded
            done += len(loaded)
    return FrozenWeight(placed=placed, whole=whole, weight=weight)
