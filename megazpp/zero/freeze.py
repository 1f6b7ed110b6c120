"""Makes the parameters of a model frozen units (frozen.py), unit by unit, so that memory never holds more than one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from kernels.formats import BlockFormat
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.frozen import FrozenUnit, FrozenUnits, FrozenWeight
from megazpp.zero.layout import MessageLayout, plan_message, plan_segments
from megazpp.zero.wire import Codec

LoadRows = Callable[[str, slice], torch.Tensor]
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
    fmt: BlockFormat | None = None,
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
        fmt: how weights are packed, but for those of one dim; None: as they are, in `dtype`.
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
        shapes = {names[parameter]: tuple(parameter.shape) for parameter in own}
        weights, message = _pack(shapes, axis, load, device, dtype, fmt)
        for parameter, weight in zip(own, weights, strict=True):
            for module, attribute in places[parameter]:
                delattr(module, attribute)
                setattr(module, attribute, weight.weight)
        return FrozenUnit(", ".join(titles[module] or "the rest" for module in modules), weights, axis, message)

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
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, fmt: BlockFormat | None = None
) -> FrozenBytes:
    """What a unit of these weights takes on each of `num_ranks` ranks of a node; arguments as for `freeze`."""
    layouts = _layouts(shapes, num_ranks, dtype, fmt)
    whole = num_ranks * sum(layout.size for layout in layouts) * dtype.itemsize
    if not _packs(num_ranks, fmt):
        return FrozenBytes(whole, 0, 0)
    message = sum(layout.message_bytes for layout in layouts)
    return FrozenBytes(message, num_ranks * message if num_ranks > 1 else 0, whole)


def _packs(num_ranks: int, fmt: BlockFormat | None) -> bool:
    """Whether weights are kept as a message; else they are whole, as modules use them."""
    return num_ranks > 1 or fmt is not None


def _layouts(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, fmt: BlockFormat | None
) -> list[MessageLayout]:
    """Of each weight's part of a message."""
    segments = [plan_segments([item], num_ranks) for item in shapes.items()]
    return [plan_message(each, fmt, exact_itemsize=dtype.itemsize) for each in segments]


def _pack(
    shapes: dict[str, tuple[int, ...]],
    axis: MeshAxis,
    load: LoadRows,
    device: torch.device,
    dtype: torch.dtype,
    fmt: BlockFormat | None,
) -> tuple[list[FrozenWeight], torch.Tensor | None]:
    """The weights of a unit, without memory, and this rank's message of them; with memory where nothing is packed."""
    weights: list[FrozenWeight] = []
    start, packs = 0, _packs(axis.size, fmt)
    for (name, shape), layout in zip(shapes.items(), _layouts(shapes, axis.size, dtype, fmt), strict=True):
        codec, rows = Codec(layout, dtype), -(-shape[0] // axis.size)
        own = slice(min(axis.rank * rows, shape[0]), min((axis.rank + 1) * rows, shape[0]))
        whole = torch.empty(axis.size * layout.size, dtype=dtype, device=device)
        weight = whole[: torch.Size(shape).numel()].view(shape)
        if packs:
            whole.untyped_storage().resize_(0)
        weights.append(FrozenWeight(name=name, rows=own, codec=codec, start=start, whole=whole, weight=weight))
        start += layout.message_bytes
    message = torch.zeros(start if packs else 0, dtype=torch.uint8, device=device)
    for each in weights:
        flat = torch.zeros(each.codec.layout.size, dtype=dtype, device=device) if packs else each.whole
        width, done = math.prod(each.weight.shape[1:]), 0
        at_once = max(_LOADED_AT_ONCE // max(width, 1), 1)
        for start in range(each.rows.start, each.rows.stop, at_once):
            some = slice(start, min(start + at_once, each.rows.stop))
            loaded, expected = load(each.name, some), (some.stop - start, *each.weight.shape[1:])
            if tuple(loaded.shape) != expected:
                raise ValueError(f"{each.name}: rows of shape {tuple(loaded.shape)} were loaded, not {expected}")
            flat[done : done + loaded.numel()].copy_(loaded.flatten())
            done += loaded.numel()
        if packs:
            each.codec.pack(flat, each.part_of(message))
    return weights, message if packs else None
