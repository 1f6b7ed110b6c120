"""Frozen units: weights that are not trained, stored packed and sharded inside each node, and unpacked for each use.

    checkpoint --this rank's rows--> pack --> message [M]        once; each node reads all rows, nothing crosses nodes
    message [M] --local all-gather--> [L, M] --unpack--> weights   before each use in forward and backward; then freed

The L ranks of a node with the same tensor-parallel index share a unit, and each of them stores a message of M bytes. A
frozen weight is a plain tensor that replaces the module's parameter. FSDP2, the optimizer, the gradient norm and
checkpoints therefore do not include the weight, and it has neither an fp32 master copy nor moments. By default the
message holds the weights in the compute dtype, so a forward is bit-identical to a forward with trained weights.

For P weights, a rank stores 2 P / L bytes in 16 bits, 1.0312 P / L in 8 bits and 0.5625 P / L in 4 bits. For each use
the rank sends L - 1 times the bytes that it stores, all of them inside the node.

The backward uses a unit only if a gradient flows through the unit. So units that a forward uses before the first
trained weight are not gathered again. Frozen weights never change. So the next unit can be gathered ahead of its use,
while the current unit computes. The axis has its own process group and queue, so frozen units never wait for the
collectives of training.
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
from megazpp.tensor_parallel.parameters import exact_parameters
from megazpp.zero.comms import in_backward


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
    """Turn the parameters of `model` into frozen units: load, pack and shard their weights, one unit after the other.

    Args:
        model: model on the meta device, with this tensor-parallel rank's shapes.
        units: lists of modules whose weights are used together, in the order of use. All weights of other modules form
            a further unit, which belongs to the module `model`.
        axis: axis over the ranks of a node that share the units. With one rank, this rank stores complete weights.
        load: function (name, rows) that returns a range of rows (dim 0) of this tensor-parallel rank's slice of a
            weight, in any dtype. Each row is loaded once, on one rank of the axis, a few megabytes at a time.
        device: device on which packed weights are stored and unpacked.
        dtype: dtype in which the model computes.
        bits: bits per element of packed matrices; None for the bits of `dtype`, without rounding.
        trained: function that returns True for the name of a trained parameter, which is not frozen and stays as it is.
    Returns:
        The handle to the units.
    Raises:
        ValueError: `load` returned another shape than the model has, or two units share a weight.
    """
    # assign each weight to a unit; `groups` has for each unit its modules, and the shapes of its weights by name
    exact, stored = exact_parameters(model), at_rest(bits, dtype)
    slots, names = parameter_slots(model), {parameter: name for name, parameter in model.named_parameters()}
    titles = {module: name for name, module in model.named_modules()}
    taken = {name for name in slots if trained(name)}
    groups = []
    for modules in (*units, [model]):
        shapes = {names[p]: tuple(p.shape) for module in modules for p in module.parameters() if names[p] not in taken}
        inside = {each for module in modules for each in module.modules()}
        for name in shapes:
            if any(module not in inside for module, _ in slots[name]):
                raise ValueError(
                    f"{name} is used in several units: leave the modules that use this weight out of `units`, so that "
                    "it belongs to the unit of the whole model"
                )
        taken.update(shapes)
        groups.append((modules, shapes))
    # load and pack the weights of each unit
    *of_units, rest = groups
    frozen = FrozenUnits(axis, outermost=bool(rest[1]))
    with torch.inference_mode(False), torch.no_grad():
        # The unit of the whole model comes first, because its use surrounds the use of all other units.
        for modules, shapes in (rest, *of_units):
            if shapes:
                title = ", ".join(titles[module] or "the rest" for module in modules)
                plan = plan_message(title, shapes, axis.size, *stored, vectors=dtype, align=16, exact=exact)
                message = plan.fill(torch.empty(plan.num_bytes, dtype=torch.uint8, device=device), load, axis.rank)
                unit = FrozenUnit(frozen, plan, message, dtype)
                for placed, _, weight in unit.weights:
                    replace_parameter(slots[placed.name], weight)
                unit.attach(modules)
                frozen.units.append(unit)
    return frozen


class FrozenBytes(NamedTuple):
    """Bytes of a frozen unit in the memory of one rank.

    Attributes:
        kept: bytes of this rank's packed weights, which are always in memory.
        received: bytes of the packed weights of all ranks, from the all-gather until they are unpacked; 0 for one rank.
        unpacked: bytes of the unpacked weights during a use; 0 if modules compute with the packed weights themselves.
    """

    kept: int
    received: int
    unpacked: int


def frozen_bytes(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, bits: int | None = None
) -> FrozenBytes:
    """Calculate the bytes of a frozen unit in the memory of each of its ranks, for the planner.

    Args:
        shapes: shapes of the unit's weights on one tensor-parallel rank, by name.
        num_ranks: number of ranks of a node that share the unit.
        dtype: dtype in which the model computes.
        bits: bits per element of packed matrices; None for the bits of `dtype`, without rounding.
    """
    plan = plan_message("", shapes, num_ranks, *at_rest(bits, dtype), vectors=dtype, align=16)
    if not _packs(plan, dtype):
        return FrozenBytes(plan.num_bytes, 0, 0)
    unpacked = sum(num_ranks * placed.part_rows * math.prod(placed.shape[1:]) for placed in plan.weights)
    return FrozenBytes(plan.num_bytes, num_ranks * plan.num_bytes if num_ranks > 1 else 0, unpacked * dtype.itemsize)


def _packs(plan: MessagePlan, dtype: torch.dtype) -> bool:
    """Return True if a unit's weights must be gathered or unpacked before its modules can compute with them.

    False means that this rank stores the complete weights in the compute dtype. Modules then compute with views of the
    message.
    """
    return plan.num_parts > 1 or any(w.rows is not None and not w.rows.holds(dtype) for w in plan.weights)


class FrozenUnits:
    """The handle to a model of frozen units, by which evaluation and generation keep or free unpacked weights.

    This class implements `WeightHandle`, as the handle to a trained model does. Each unit unpacks its weights before
    the forward and the backward of its modules, and frees the memory of the unpacked weights afterwards.

    Args:
        axis: axis over the ranks of a node that share the units.
        outermost: True if the first unit belongs to the whole model, so that its use surrounds the other units.
    """

    keeps_gathered = True

    def __init__(self, axis: MeshAxis, *, outermost: bool) -> None:
        self.axis, self._outermost = axis, outermost
        # Autograd's id of the running backward, set when a gradient first reaches a unit; -1 before and afterwards.
        self.backward = -1
        self.units: list[FrozenUnit] = []  # the model's units in the order in which a forward uses them
        self.keeps = False  # True inside `keep_unsharded`, where the weights of units stay unpacked after a use

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Return a context in which each unit stays unpacked after its first use, for the forwards of a generation.

        The outermost such context frees the unpacked weights of all units at its end.
        """
        before, self.keeps = self.keeps, True
        try:
            yield
        finally:
            self.keeps = before
            if not before:
                self.reshard()

    def reshard(self) -> None:
        """Free the memory of the unpacked weights of all frozen units; the packed weights stay in memory."""
        for unit in self.units:
            unit.free()

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's packed weights of all units, which are always in its memory."""
        return sum(unit.message.nbytes for unit in self.units)

    def following(self, unit: FrozenUnit) -> FrozenUnit | None:
        """Return the unit that is used after `unit` in the current forward or backward, to gather it ahead of its use.

        Return None if `unit` is the last unit of the pass, or if the backward does not need the following unit.
        """
        index = self.units.index(unit)
        if not in_backward():
            return self.units[index + 1] if index + 1 < len(self.units) else None
        if index == 0 and not self._outermost:
            return None
        # In a backward, units are used in reverse. The outermost unit (index 0) comes first, and the last unit follows.
        before = self.units[index - 1]
        return before if before.expects_backward else None

    def end_backward(self) -> None:
        """Free the weights of units that are still unpacked when a backward has ended; autograd calls this method.

        Usually a hook on the gradients of a unit's inputs frees the unit earlier. If no input of a unit requires a
        gradient, as for the first unit, the unit has no such hook.
        """
        self.backward = -1
        for unit in self.units:
            unit.expects_backward = False
            if unit.in_backward:
                unit.in_backward.clear()
                unit.free_unless_used()


class FrozenUnit:
    """Frozen weights that are gathered and unpacked together, and the hooks on the modules that use these weights.

    Args:
        model: handle to all frozen units of the model.
        plan: layout of the messages that hold the packed weights.
        message: [M] uint8, the packed rows that this rank stores, M bytes.
        dtype: dtype in which the model computes.
    Attributes:
        weights: for each weight, a tuple of its position in the message (`Placed`), a flat tensor with its unpacked
            elements, and the view of this tensor with which modules compute. The flat tensor's memory is freed between
            uses. If the weight needs no unpacking, the flat tensor is a view of `message` instead.
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
        self.is_unpacked = False  # True between `unpack` and `free`, while the unpacked weights take memory
        # True from a forward of this unit whose output requires a gradient until the end of the next backward: that
        # backward will need the unit's weights, so they may be gathered ahead of their use.
        self.expects_backward = False
        # The forwards of this unit (values of `_forward`) whose backward is running; the weights must stay unpacked.
        self.in_backward: set[object] = set()
        # An all-gather of the packed weights that was started before `unpack` needs them; None if none is running.
        self._received: Work[torch.Tensor] | None = None
        self._modules: frozenset[nn.Module] = frozenset()  # the modules that use the unit's weights, set by `attach`
        self._to_run: set[nn.Module] = set()  # the modules of the unit that have not run yet in the current forward
        self._forward = object()  # an object that identifies the current forward; each forward gets a new one

    def unpack(self) -> None:
        """Gather and unpack the weights of this frozen unit, and start to gather the weights of the next unit.

        Nothing happens if the weights are unpacked already.
        """
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
        """Free the memory of this frozen unit's unpacked weights; the packed weights stay in memory."""
        if self.is_unpacked:
            self.is_unpacked = False
            for _, whole, _ in self.weights:
                whole.untyped_storage().resize_(0)

    def free_unless_used(self) -> None:
        """Free the unit's unpacked weights, unless `keep_unsharded` is active or a backward through the unit runs.

        Activation recomputation runs a forward inside a backward. The backward still needs the weights after the
        recomputed forward, so that forward must not free them.
        """
        if not self._model.keeps and not self.in_backward:
            self.free()

    def _start_gather(self) -> Work[torch.Tensor]:
        """Start the all-gather of the unit's packed weights inside the node.

        The work yields the messages [L, M] uint8 of the L ranks that share the unit, M bytes each.
        """
        axis, message = self._model.axis, self.message.unsqueeze(0)
        if axis.size == 1:
            return Work(message)
        return axis.queue.submit(functools.partial(axis.all_gather, message, of=self.name))

    def _unpack(self, received: Work[torch.Tensor]) -> None:
        """Wait for the messages [L, M] of all L ranks, M bytes each, and unpack all weights of the unit from them.

        The weights' version counters do not change, because autograd must not report the weights as changed in place.
        """
        messages = received.join()
        with torch.autograd._unsafe_preserve_version_counter(tuple(whole for _, whole, _ in self.weights)):
            for placed, whole, _ in self.weights:
                assert placed.rows is not None
                out = whole.view(len(messages), placed.part_rows, placed.rows.columns)
                placed.rows.unpack(placed.rows_in(messages), out)

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Register hooks that unpack this frozen unit's weights before a forward and a backward, and free them after.

        Nothing happens for weights that need no unpacking.

        Args:
            modules: all modules that use the weights. In a forward, the weights stay unpacked until the last of these
                modules has run.
        """
        if not self._packs:
            return
        self._modules = frozenset(modules)
        for module in modules:
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Unpack the frozen weights that a module uses before its forward; register a hook for the unit's backward.

        This is a forward pre-hook of each module of the unit. The registered hook frees the weights at the end of the
        unit's backward.
        """
        # The module starts a new forward of the unit in two cases. It has already run in the current forward; or no
        # module of the current forward has finished, because an exception has interrupted that forward. (Activation
        # recomputation may stop a forward by an exception.)
        first = module not in self._to_run or len(self._to_run) == len(self._modules)
        if first:
            self._to_run, self._forward = set(self._modules), object()
        self.unpack()
        inputs = _differentiable((args, kwargs)) if first and torch.is_grad_enabled() else []
        if inputs:
            register_multi_grad_hook(inputs, functools.partial(self._finish_backward, self._forward))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the unit's unpacked weights if its last module has run, and register hooks for the unit's backward.

        This is a forward hook of each module of the frozen unit. The registered hooks unpack the weights at the start
        of the unit's backward.
        """
        self._to_run.discard(module)
        if not self._to_run:
            self.free_unless_used()
        if torch.is_grad_enabled():
            for tensor in _differentiable(output):
                self.expects_backward = True
                tensor.register_hook(functools.partial(self._begin_backward, self._forward))

    def _begin_backward(self, forward: object, gradient: torch.Tensor) -> None:
        """Unpack the unit's weights, because a gradient has arrived at an output of the unit: its backward begins.

        Args:
            forward: object that identifies the forward whose output got the gradient.
            gradient: the gradient, which is not changed.
        """
        backward, model = torch._C._current_graph_task_id(), self._model
        if backward != model.backward:
            model.backward = backward
            Variable._execution_engine.queue_callback(model.end_backward)
        self.in_backward.add(forward)
        self.unpack()

    def _finish_backward(self, forward: object, gradients: Sequence[torch.Tensor | None]) -> None:
        """Free the unit's unpacked weights: the gradients of its inputs are complete, so its backward has ended.

        Args:
            forward: object that identifies the forward to which this backward belongs.
            gradients: gradients of the unit's inputs, which are not used.
        """
        self.in_backward.discard(forward)
        self.free_unless_used()


def _differentiable(tree: Any) -> list[torch.Tensor]:
    """Return all tensors that require a gradient in a nested structure, such as a module's arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
