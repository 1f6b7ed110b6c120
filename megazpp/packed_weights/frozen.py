"""Frozen units: weights that nobody trains, kept packed inside each node and unpacked around each use.

    checkpoint --this rank's rows--> pack --> message [M]        once; each node reads for itself, nothing crosses nodes
    message [M] --local all-gather--> [L, M] --unpack--> weights   before each use, forward and backward; freed after it

L ranks of a node share a tensor-parallel index. A frozen weight is a plain tensor in the place of the module's
parameter, which FSDP2, the optimizer, the norm and checkpoints do not see: no fp32 master, no moments. Unless fewer
bits are asked for, the message holds the compute dtype, so that a forward computes with the bits of trained weights.

Of P weights a rank keeps 2 P / L bytes in 16 bits, 1.0312 P / L in 8 and 0.5625 P / L in 4, and sends L - 1 times as
much inside the node per use.

A use in backward is one through which a gradient flows: of a unit below the first trained weight there is none. As
frozen weights never change, the next unit's gather runs ahead beside the compute, and what has arrived stays valid.
The axis has a process group and a queue of its own, so it never waits for the training's hops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from megazpp.packed_weights.format import (
    LoadRows,
    MessagePlan,
    at_rest,
    parameter_slots,
    plan_message,
    replace_parameter,
)
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.zero.schedule import in_backward


def freeze(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    axis: MeshAxis,
    load: LoadRows,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    bits: int | None = None,
    trained: Callable[[str], bool] = lambda name: False,
) -> FrozenUnits:
    """Make the parameters of `model` frozen units, one after the other; it computes as before.

    Args:
        model: on the meta device, with the shapes of this tensor-parallel rank's part.
        units: modules whose weights are used together, in the order of use; `model` takes what is left.
        axis: the ranks of a node that share units; one of size 1 is a whole copy on this rank.
        load: (name, rows) -> these rows of dim 0 of the part, in any dtype; each is asked for once, on one rank of the
            axis, a few megabytes at a time.
        device: where messages are kept and weights unpacked.
        dtype: in which the model computes.
        bits: of an element of a matrix at rest; None: as the model computes.
        trained: whether a parameter of this name is left alone.
    Raises:
        ValueError: `load` gave another shape, or units share a weight.
    """
    slots, names = parameter_slots(model), {parameter: name for name, parameter in model.named_parameters()}
    titles = {module: name for name, module in model.named_modules()}
    taken = {name for name in slots if trained(name)}
    groups = []
    for modules in (*units, [model]):
        shapes = {names[p]: tuple(p.shape) for module in modules for p in module.parameters() if names[p] not in taken}
        inside = {each for module in modules for each in module.modules()}
        for name in shapes:
            if any(module not in inside for module, _ in slots[name]):
                raise ValueError(f"{name} is used in several units: leave them to the model's own")
        taken.update(shapes)
        groups.append((modules, shapes))
    *of_units, rest = groups
    frozen = FrozenUnits(axis, outermost=bool(rest[1]))
    with torch.inference_mode(False), torch.no_grad():
        for modules, shapes in (rest, *of_units):  # the model's own are used around all others
            if shapes:
                title = ", ".join(titles[module] or "the rest" for module in modules)
                plan = _plan_unit(shapes, axis.size, dtype, bits, title)
                message = plan.fill(torch.empty(plan.num_bytes, dtype=torch.uint8, device=device), load, axis.rank)
                unit = FrozenUnit(frozen, plan, message, dtype)
                for placed, _, weight in unit.weights:
                    replace_parameter(slots[placed.name], weight)
                unit.attach(modules)
                frozen.units.append(unit)
    return frozen


class FrozenBytes(NamedTuple):
    """Bytes of a frozen unit on one rank: always; of all ranks' messages until they are unpacked; of weights in use."""

    kept: int
    received: int
    unpacked: int


def frozen_bytes(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, bits: int | None = None
) -> FrozenBytes:
    """The bytes of a unit of these weights on each of `num_ranks` ranks of a node; arguments as for `freeze`."""
    plan = _plan_unit(shapes, num_ranks, dtype, bits)
    if not _packs(plan, dtype):
        return FrozenBytes(plan.num_bytes, 0, 0)
    unpacked = sum(num_ranks * placed.part_rows * math.prod(placed.shape[1:]) for placed in plan.weights)
    return FrozenBytes(plan.num_bytes, num_ranks * plan.num_bytes if num_ranks > 1 else 0, unpacked * dtype.itemsize)


def _plan_unit(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, bits: int | None, name: str = ""
) -> MessagePlan:
    return plan_message(name, shapes, num_ranks, *at_rest(bits, dtype), vectors=dtype, align=16)


def _packs(plan: MessagePlan, dtype: torch.dtype) -> bool:
    """True if weights are unpacked for a use; else modules compute with views of the message."""
    return plan.num_parts > 1 or any(w.rows is not None and not w.rows.holds(dtype) for w in plan.weights)


class FrozenUnits:
    """The `WeightHandle` on frozen units, which unpack and free themselves around modules' forwards and backwards.

    With `outermost` the first is used around all others, as the root module's own weights are.
    """

    keeps_gathered = True

    def __init__(self, axis: MeshAxis, *, outermost: bool) -> None:
        self.axis, self._outermost, self.backward = axis, outermost, -1
        self.units: list[FrozenUnit] = []  # in the order of use
        self.keeps = False  # units stay unpacked after their use

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Keep each unit unpacked after its first use, for the forwards of a generation; afterwards free all."""
        before, self.keeps = self.keeps, True
        try:
            yield
        finally:
            self.keeps = before
            if not before:
                self.reshard()

    def reshard(self) -> None:
        for unit in self.units:
            unit.free()

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank holds all the time."""
        return sum(unit.message.nbytes for unit in self.units)

    def following(self, unit: FrozenUnit) -> FrozenUnit | None:
        """The unit that is used next, in this forward or backward."""
        index = self.units.index(unit)
        if not in_backward():
            return self.units[index + 1] if index + 1 < len(self.units) else None
        if index == 0 and not self._outermost:
            return None
        before = self.units[index - 1]  # of the outermost unit the last one
        return before if before.expects_backward else None

    def end_backward(self) -> None:
        """Free what no gradient of an input has freed: of a first unit nobody wants one."""
        self.backward = -1
        for unit in self.units:
            unit.expects_backward = False
            if unit.in_backward:
                unit.in_backward.clear()
                unit.free_unless_used()


class FrozenUnit:
    """Weights that are gathered together, and the hooks on the modules that use them.

    `message` [M] uint8 is this rank's part of all weights, `dtype` the one in which the model computes.

    Attributes:
        weights: of each its place in the message, all of it flat (no memory between uses), and the view of that which
            modules compute with.
    """

    def __init__(self, model: FrozenUnits, plan: MessagePlan, message: torch.Tensor, dtype: torch.dtype) -> None:
        self.name, self.message, self._model, self._packs = plan.name, message, model, _packs(plan, dtype)
        self.weights = []
        for placed in plan.weights:
            if self._packs:
                size = plan.num_parts * placed.part_rows * math.prod(placed.shape[1:])
                whole = torch.empty(size, dtype=dtype, device=message.device)
            else:
                whole = message[placed.start : placed.stop].view(dtype)
            self.weights.append((placed, whole, whole[: math.prod(placed.shape)].view(placed.shape)))
            if self._packs:
                whole.untyped_storage().resize_(0)
        self.is_unpacked = False  # has memory beside the message
        self.expects_backward = False  # a gradient may flow through it before its next forward
        self.in_backward: set[object] = set()  # forwards whose backward runs
        self._received: Work[torch.Tensor] | None = None  # a gather that was started ahead of its use
        self._modules: frozenset[nn.Module] = frozenset()
        self._to_run: set[nn.Module] = set()
        self._forward = object()  # names the forward that runs

    def unpack(self) -> None:
        """Have the weights in memory, and start to gather those of the unit that follows."""
        if self.is_unpacked:
            return
        received = self._received or self._start_gather()
        self._received, self.is_unpacked = None, True
        for _, whole, _ in self.weights:
            whole.untyped_storage().resize_(whole.nbytes)
        done = self._model.axis.queue.submit(functools.partial(self._unpack, received))
        following = self._model.following(self)
        if following is not None and following._packs and not following.is_unpacked and following._received is None:
            following._received = following._start_gather()
        done.wait()

    def free(self) -> None:
        if self.is_unpacked:
            self.is_unpacked = False
            for _, whole, _ in self.weights:
                whole.untyped_storage().resize_(0)

    def free_unless_used(self) -> None:
        """Free the unit, unless it is kept or a backward through it runs, in which the forward was recomputed."""
        if not self._model.keeps and not self.in_backward:
            self.free()

    def _start_gather(self) -> Work[torch.Tensor]:
        axis, message = self._model.axis, self.message.unsqueeze(0)
        if axis.size == 1:
            return Work(message)
        return axis.queue.submit(functools.partial(axis.all_gather, message, of=self.name))

    def _unpack(self, received: Work[torch.Tensor]) -> None:
        """[L, M] -> every weight, without autograd taking it for a change of what it has saved."""
        messages = received.join()
        with torch.autograd._unsafe_preserve_version_counter(tuple(whole for _, whole, _ in self.weights)):
            for placed, whole, _ in self.weights:
                assert placed.rows is not None
                out = whole.view(len(messages), placed.part_rows, placed.rows.columns)
                placed.rows.unpack(placed.rows_in(messages), out)

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Unpack before the forward of the first of `modules`, free after that of the last."""
        if not self._packs:
            return
        self._modules = frozenset(modules)
        for module in modules:
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # none has finished: the last forward was left by an exception, as a recomputation may be
        first = module not in self._to_run or len(self._to_run) == len(self._modules)
        if first:
            self._to_run, self._forward = set(self._modules), object()
        self.unpack()
        inputs = _differentiable((args, kwargs)) if first and torch.is_grad_enabled() else []
        if inputs:
            register_multi_grad_hook(inputs, functools.partial(self._finish_backward, self._forward))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._to_run.discard(module)
        if not self._to_run:
            self.free_unless_used()
        if torch.is_grad_enabled():
            for tensor in _differentiable(output):
                self.expects_backward = True
                tensor.register_hook(functools.partial(self._begin_backward, self._forward))

    def _begin_backward(self, forward: object, gradient: torch.Tensor) -> None:
        """A gradient has arrived at the output of `forward`."""
        backward, model = torch._C._current_graph_task_id(), self._model
        if backward != model.backward:
            model.backward = backward
            Variable._execution_engine.queue_callback(model.end_backward)
        self.in_backward.add(forward)
        self.unpack()

    def _finish_backward(self, forward: object, gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradients of the inputs of `forward` are complete."""
        self.in_backward.discard(forward)
        self.free_unless_used()


def _differentiable(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
