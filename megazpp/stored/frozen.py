"""Frozen units: weights that nobody trains, kept packed inside each node and unpacked around each use.

    checkpoint --this rank's rows--> pack --> message [M]        once; each node reads for itself, nothing crosses nodes
    message [M] --local all-gather--> [L, M] --unpack--> weights   before each use, forward and backward; freed after it

L ranks of a node share a tensor-parallel index. A frozen weight is a plain tensor in the place of the module's
parameter: FSDP2, the optimizer, the norm and checkpoints do not see it. It has no fp32 master and no moments, and no
optimizer step drops it. Unless fewer bits are asked for, the message holds the compute dtype, so that a forward
computes with the same bits as that of trained weights; in 8 or 4 bits it holds the matrices rounded (packed.py).

| bytes of a rank, P weights of its tensor-parallel part | 16 bits | 8 bits       | 4 bits       |
|---------------------------------------------------------|---------|--------------|--------------|
| kept                                                    | 2 P / L | 1.0312 P / L | 0.5625 P / L |
| sent inside the node, per use: (L - 1) times            | 2 P / L | 1.0312 P / L | 0.5625 P / L |

A use in backward is one through which a gradient flows: of a unit below the first trained weight there is none. As
frozen weights never change, the next unit's gather runs ahead beside the compute, and what has arrived stays valid.
The axis has a process group and a queue of its own, so it never waits for the training's hops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.stored.messages import Placed
from megazpp.zero.schedule import in_backward


@dataclass(frozen=True, kw_only=True)
class FrozenWeight:
    """One weight of a unit.

    Attributes:
        placed: its name, its rows on each rank, and their place in the unit's message.
        whole: [L x rows of each rank x ...] flat, where it is unpacked; no memory between uses.
        weight: the view of `whole` that modules compute with.
    """

    placed: Placed
    whole: torch.Tensor
    weight: torch.Tensor

    def unpack(self, messages: torch.Tensor) -> None:
        """Read the whole of it from the messages [L, M] of all ranks."""
        rows = self.placed.rows
        assert rows is not None
        rows.unpack(self.placed.rows_in(messages), self.whole.view(len(messages), self.placed.part_rows, rows.columns))


class FrozenUnit:
    """Weights that are gathered together.

    Args:
        name: for messages and spans.
        weights: in any order.
        axis: the ranks of the node that share them.
        message: [M] uint8, this rank's part of all weights; None: they are whole on this rank, and never packed.
    Attributes:
        expects_backward: whether a gradient may flow through it before its next forward.
    """

    def __init__(
        self, name: str, weights: Sequence[FrozenWeight], axis: MeshAxis, message: torch.Tensor | None
    ) -> None:
        self.name, self.weights, self.message = name, tuple(weights), message
        self.expects_backward = False
        self._axis = axis
        self._received: Work[torch.Tensor] | None = None  # a gather that was started ahead of its use
        self.is_unpacked = message is None

    def unpack(self, following: FrozenUnit | None = None) -> None:
        """Have the weights in memory, and start to gather those of `following`."""
        if self.is_unpacked:
            return
        received = self._received or self._start_gather()
        self._received, self.is_unpacked = None, True
        for weight in self.weights:
            weight.whole.untyped_storage().resize_(weight.whole.nbytes)
        done = self._axis.queue.submit(functools.partial(self._unpack, received))
        if following is not None:
            following.prefetch()
        done.wait()

    def prefetch(self) -> None:
        """Start to gather ahead of the use."""
        if not self.is_unpacked and self._received is None:
            self._received = self._start_gather()

    def free(self) -> None:
        """Give the memory of the weights back."""
        if self.is_unpacked and self.message is not None:
            self.is_unpacked = False
            for weight in self.weights:
                weight.whole.untyped_storage().resize_(0)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are there all the time."""
        return sum(weight.whole.nbytes for weight in self.weights) if self.message is None else self.message.nbytes

    def _start_gather(self) -> Work[torch.Tensor]:
        assert self.message is not None
        gather = functools.partial(self._axis.all_gather, self.message.unsqueeze(0), of=self.name)
        return Work(self.message.unsqueeze(0)) if self._axis.size == 1 else self._axis.queue.submit(gather)

    def _unpack(self, received: Work[torch.Tensor]) -> None:
        """[L, M] -> every weight, without autograd taking it for a change of what it has saved."""
        messages = received.join()
        with torch.autograd._unsafe_preserve_version_counter(tuple(weight.whole for weight in self.weights)):
            for weight in self.weights:
                weight.unpack(messages)


class FrozenUnits:
    """The `WeightHandle` on frozen units, which unpacks and frees them around the modules' forwards and backwards.

    Args:
        units: in the order of use.
        outermost: whether the first unit is used around all others, as the root module's own weights are.
    """

    keeps_gathered = True

    def __init__(self, units: Sequence[FrozenUnit], *, outermost: bool) -> None:
        self.units = tuple(units)
        self._outermost, self._keep = outermost, False
        self._in_backward: dict[FrozenUnit, set[object]] = {unit: set() for unit in units}  # forwards whose turn it is
        self._backward = -1

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Keep each unit unpacked after its first use, for the forwards inside; afterwards free all.

        For a generation, where every token is a forward. It costs the memory of the whole model in compute precision.
        """
        before, self._keep = self._keep, True
        try:
            yield
        finally:
            self._keep = before
            if not before:
                self.free_gathered()

    def free_gathered(self) -> None:
        """Free what is unpacked."""
        for unit in self.units:
            unit.free()

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank holds all the time."""
        return sum(unit.kept_bytes for unit in self.units)

    def attach(self, unit: FrozenUnit, modules: Sequence[nn.Module]) -> None:
        """Unpack `unit` before the forward of the first of `modules`, free it after that of the last."""
        if unit.message is None:
            return
        use = _Use(self, unit, modules)
        for module in modules:
            module.register_forward_pre_hook(use.before_forward, with_kwargs=True)
            module.register_forward_hook(use.after_forward)

    def unpack(self, unit: FrozenUnit) -> None:
        """Have the unit's weights in memory, and start to gather what comes next."""
        unit.unpack(self._following(unit))

    def free_after_forward(self, unit: FrozenUnit) -> None:
        """Free the unit, unless it is kept or a backward through it runs, in which the forward was recomputed."""
        if not self._keep and not self._in_backward[unit]:
            unit.free()

    def begin_backward(self, unit: FrozenUnit, forward: object) -> None:
        """A gradient has arrived at the unit's output in `forward`."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._end_backward)
        self._in_backward[unit].add(forward)
        self.unpack(unit)

    def finish_backward(self, unit: FrozenUnit, forward: object) -> None:
        """The gradients of the unit's inputs in `forward` are complete."""
        self._in_backward[unit].discard(forward)
        if not self._keep and not self._in_backward[unit]:
            unit.free()

    def _end_backward(self) -> None:
        """Free what no gradient of an input has freed: of a first unit nobody wants one."""
        self._backward = -1
        for unit, forwards in self._in_backward.items():
            unit.expects_backward = False
            if forwards:
                forwards.clear()
                if not self._keep:
                    unit.free()

    def _following(self, unit: FrozenUnit) -> FrozenUnit | None:
        index = self.units.index(unit)
        if not in_backward():
            return self.units[index + 1] if index + 1 < len(self.units) else None
        if index == 0 and not self._outermost:
            return None
        before = self.units[index - 1]  # of the outermost unit the last one
        return before if before.expects_backward else None


class _Use:
    """The hooks of one unit on its modules."""

    def __init__(self, model: FrozenUnits, unit: FrozenUnit, modules: Sequence[nn.Module]) -> None:
        self._model, self._unit, self._modules = model, unit, frozenset(modules)
        self._to_run: set[nn.Module] = set()
        self._forward = object()  # names the forward that runs

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # none has finished: the last forward was left by an exception, as a recomputation may be
        first = module not in self._to_run or len(self._to_run) == len(self._modules)
        if first:
            self._to_run, self._forward = set(self._modules), object()
        self._model.unpack(self._unit)
        return self._notice_inputs(args, kwargs) if first and torch.is_grad_enabled() else None

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._to_run.discard(module)
        if not self._to_run:
            self._model.free_after_forward(self._unit)
        if torch.is_grad_enabled():
            begin = functools.partial(self._model.begin_backward, self._unit)
            forward = self._forward
            for tensor in _differentiable(tree_leaves(output)):
                self._unit.expects_backward = True
                tensor.register_hook(lambda gradient: begin(forward))

    def _notice_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The same arguments; once their gradients are there, the weights are not needed any more."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if _differentiable([leaf])]
        if not places:
            return None
        finish = functools.partial(self._model.finish_backward, self._unit, self._forward)
        for index, tensor in zip(places, _Inputs.apply(finish, *(leaves[i] for i in places)), strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, spec)


class _Inputs(torch.autograd.Function):
    """Identity; its backward tells that the gradients of all inputs are complete."""

    @staticmethod
    def forward(ctx: Any, finish: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.finish = finish
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.finish()
        return (None, *gradients)


def _differentiable(leaves: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
