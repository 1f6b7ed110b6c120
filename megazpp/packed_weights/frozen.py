"""Frozen units: weights that are not trained, kept packed and sharded inside each node, and unpacked around each use.

    checkpoint --this rank's rows--> pack --> message [M]        once; each node reads its own copy, none crosses nodes
    message [M] --local all-gather--> [L, M] --unpack--> weights   before each use in forward and backward; then freed

The L ranks of a node with the same tensor-parallel index share a unit. A frozen weight is a plain tensor that replaces
the module's parameter. FSDP2, the optimizer, the gradient norm and checkpoints therefore do not include it, and it has
neither an fp32 master copy nor moments. By default the message holds the compute dtype, so a forward is bit-identical
to a forward with trained weights.

For P weights, a rank keeps 2 P / L bytes in 16 bits, 1.0312 P / L in 8 bits and 0.5625 P / L in 4 bits. Per use it
sends L - 1 times as many bytes inside the node.

The backward uses a unit only if a gradient flows through it, so units below the first trained weight are not gathered
again. Frozen weights never change. The gather of the next unit therefore runs ahead during the compute, and its result
stays valid. The axis has its own process group and queue, so it never waits for the collectives of the training.
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
    """Turn the parameters of `model` into frozen units, one after the other.

    Args:
        model: model on the meta device, with this tensor-parallel rank's shapes.
        units: lists of modules whose weights are used together, in the order of use. Weights outside of them form a
            unit of the whole model.
        axis: the ranks of a node that share the units. With one rank, this rank keeps whole copies.
        load: function (name, rows) that returns rows of dim 0 of this rank's part of a weight, in any dtype. Each row
            is loaded once, on one rank of the axis, a few megabytes at a time.
        device: device on which messages are kept and weights unpacked.
        dtype: dtype in which the model computes.
        bits: bits per element of packed matrices. None: the compute dtype.
        trained: returns True for the name of a parameter that stays a parameter.
    Returns:
        the handle to the units.
    Raises:
        ValueError: `load` returned another shape, or two units share a weight.
    """
    # assign each weight to a unit
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
                    f"{name} is used in several units: leave its modules out of `units`, so that the unit of the whole "
                    "model takes it"
                )
        taken.update(shapes)
        groups.append((modules, shapes))
    # load and pack each unit
    *of_units, rest = groups
    frozen = FrozenUnits(axis, outermost=bool(rest[1]))
    with torch.inference_mode(False), torch.no_grad():
        for modules, shapes in (rest, *of_units):  # the unit of the whole model first: its use surrounds the others
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
    """Bytes of a frozen unit on one rank.

    Attributes:
        kept: bytes that the rank always keeps.
        received: bytes of all ranks' messages, from the gather until they are unpacked.
        unpacked: bytes of the unpacked weights during a use.
    """

    kept: int
    received: int
    unpacked: int


def frozen_bytes(
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype, bits: int | None = None
) -> FrozenBytes:
    """Calculate the bytes of a frozen unit on each of `num_ranks` ranks of a node.

    Args:
        shapes: shapes of this tensor-parallel rank's parts of the weights, by name.
        num_ranks: ranks of a node that share the unit.
        dtype: dtype in which the model computes.
        bits: bits per element of packed matrices. None: the compute dtype.
    """
    plan = plan_message("", shapes, num_ranks, *at_rest(bits, dtype), vectors=dtype, align=16)
    if not _packs(plan, dtype):
        return FrozenBytes(plan.num_bytes, 0, 0)
    unpacked = sum(num_ranks * placed.part_rows * math.prod(placed.shape[1:]) for placed in plan.weights)
    return FrozenBytes(plan.num_bytes, num_ranks * plan.num_bytes if num_ranks > 1 else 0, unpacked * dtype.itemsize)


def _packs(plan: MessagePlan, dtype: torch.dtype) -> bool:
    """Return True if weights must be unpacked for a use; otherwise modules compute with views of the message."""
    return plan.num_parts > 1 or any(w.rows is not None and not w.rows.holds(dtype) for w in plan.weights)


class FrozenUnits:
    """The `WeightHandle` to frozen units.

    The units unpack before the forward and backward of their modules, and free their memory afterwards.

    Args:
        axis: the ranks of a node that share the units.
        outermost: True if the first unit belongs to the whole model, so that its use surrounds the other units.
    """

    keeps_gathered = True

    def __init__(self, axis: MeshAxis, *, outermost: bool) -> None:
        self.axis, self._outermost, self.backward = axis, outermost, -1
        self.units: list[FrozenUnit] = []  # in the order of use
        self.keeps = False  # whether units stay unpacked after a use

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Keep each unit unpacked after its first use, for the forwards of a generation; free all units afterwards."""
        before, self.keeps = self.keeps, True
        try:
            yield
        finally:
            self.keeps = before
            if not before:
                self.reshard()

    def reshard(self) -> None:
        """Free the unpacked weights of all units."""
        for unit in self.units:
            unit.free()

    @property
    def kept_bytes(self) -> int:
        """Bytes of packed weights that this rank always keeps."""
        return sum(unit.message.nbytes for unit in self.units)

    def following(self, unit: FrozenUnit) -> FrozenUnit | None:
        """Return the unit that is used after `unit` in the current forward or backward; None without one."""
        index = self.units.index(unit)
        if not in_backward():
            return self.units[index + 1] if index + 1 < len(self.units) else None
        if index == 0 and not self._outermost:
            return None
        before = self.units[index - 1]  # index 0, the outermost unit, precedes the last unit in a backward
        return before if before.expects_backward else None

    def end_backward(self) -> None:
        """Free the units that are still unpacked at the end of a backward.

        The first unit is one of them if no input of it requires a gradient.
        """
        self.backward = -1
        for unit in self.units:
            unit.expects_backward = False
            if unit.in_backward:
                unit.in_backward.clear()
                unit.free_unless_used()


class FrozenUnit:
    """Weights that are gathered together, and the hooks on the modules that use them.

    Args:
        model: handle to all frozen units of the model.
        plan: layout of the message.
        message: [M] uint8, this rank's part of the weights.
        dtype: dtype in which the model computes.
    Attributes:
        weights: for each weight its place in the message, its flat storage (without memory between uses), and the view
            of that storage with which modules compute.
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
        self.is_unpacked = False  # whether the weights have memory in addition to the message
        self.expects_backward = False  # whether a gradient may flow through the unit before its next forward
        self.in_backward: set[object] = set()  # values of `_forward` of the forwards whose backward runs
        self._received: Work[torch.Tensor] | None = None  # a gather that was started ahead of its use
        self._modules: frozenset[nn.Module] = frozenset()
        self._to_run: set[nn.Module] = set()  # modules that still have to run in the current forward
        self._forward = object()  # identity of the current forward

    def unpack(self) -> None:
        """Gather and unpack the weights if they are not unpacked, and start the gather of the next unit."""
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
        """Free the memory of the unpacked weights."""
        if self.is_unpacked:
            self.is_unpacked = False
            for _, whole, _ in self.weights:
                whole.untyped_storage().resize_(0)

    def free_unless_used(self) -> None:
        """Free the unpacked weights, unless the handle keeps them or a backward through the unit is running.

        Recomputation runs a forward inside such a backward, which still needs the weights after that forward.
        """
        if not self._model.keeps and not self.in_backward:
            self.free()

    def _start_gather(self) -> Work[torch.Tensor]:
        """Start the all-gather of the unit's messages inside the node."""
        axis, message = self._model.axis, self.message.unsqueeze(0)
        if axis.size == 1:
            return Work(message)
        return axis.queue.submit(functools.partial(axis.all_gather, message, of=self.name))

    def _unpack(self, received: Work[torch.Tensor]) -> None:
        """Unpack the gathered messages [L, M] into all weights.

        The version counters are preserved, because autograd must not report the unpacked weights as changed in place.
        """
        messages = received.join()
        with torch.autograd._unsafe_preserve_version_counter(tuple(whole for _, whole, _ in self.weights)):
            for placed, whole, _ in self.weights:
                assert placed.rows is not None
                out = whole.view(len(messages), placed.part_rows, placed.rows.columns)
                placed.rows.unpack(placed.rows_in(messages), out)

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Register hooks that unpack before the first of `modules` runs, and free after the last of them."""
        if not self._packs:
            return
        self._modules = frozenset(modules)
        for module in modules:
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Unpack the unit's weights before a forward, and register a hook for the end of its backward."""
        # This module starts a new forward if it has already run in the current one. It also does if no module of the
        # current one has finished, because then an exception has interrupted that forward, as a recomputation may.
        first = module not in self._to_run or len(self._to_run) == len(self._modules)
        if first:
            self._to_run, self._forward = set(self._modules), object()
        self.unpack()
        inputs = _differentiable((args, kwargs)) if first and torch.is_grad_enabled() else []
        if inputs:
            register_multi_grad_hook(inputs, functools.partial(self._finish_backward, self._forward))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the unit's weights after its last module, and register a hook for the beginning of its backward."""
        self._to_run.discard(module)
        if not self._to_run:
            self.free_unless_used()
        if torch.is_grad_enabled():
            for tensor in _differentiable(output):
                self.expects_backward = True
                tensor.register_hook(functools.partial(self._begin_backward, self._forward))

    def _begin_backward(self, forward: object, gradient: torch.Tensor) -> None:
        """Unpack the unit, because a gradient has arrived at an output of `forward`."""
        backward, model = torch._C._current_graph_task_id(), self._model
        if backward != model.backward:
            model.backward = backward
            Variable._execution_engine.queue_callback(model.end_backward)
        self.in_backward.add(forward)
        self.unpack()

    def _finish_backward(self, forward: object, gradients: Sequence[torch.Tensor | None]) -> None:
        """Free the unit's gathered weights: the gradients of its inputs are complete, so its backward has ended."""
        self.in_backward.discard(forward)
        self.free_unless_used()


def _differentiable(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested structure that require a gradient."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
