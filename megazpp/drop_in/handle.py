"""The handle on a program's model that `megazpp.zeropp` returns, and ZeRO++'s part of the model's checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megazpp.drop_in.accumulate import Accumulation
from megazpp.drop_in.gather import ProgramGather, ProgramRingGather
from megazpp.drop_in.reduce import ProgramRingReduce, RestoringReduce
from megazpp.drop_in.units import ProgramUnit
from megazpp.drop_in.writes import WatchedGather
from megazpp.parallel.axis import TrafficCounter
from megazpp.zero.config import ZeroConfig
from megazpp.zero.sharding import Sharding

Comms = tuple[ProgramGather | ProgramRingGather, RestoringReduce | ProgramRingReduce]


class Handle(Sharding):
    """The handle on a model of `megazpp.zeropp`.

    Steps of torch's optimizers are detected by hooks.

    Args:
        model: the model that FSDP2 has wrapped.
        units: the model's sharding units.
        zero: the configuration of ZeRO++.
        comms: the all-gather and the reduce-scatter of each unit.
        counter: counts the bytes that this rank sends.
        accumulation: the sums of gradients that wait.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ProgramUnit],
        zero: ZeroConfig,
        comms: Sequence[Comms],
        counter: TrafficCounter,
        accumulation: Accumulation,
    ) -> None:
        super().__init__(model, units, zero, comms, counter)
        self._accumulation = accumulation
        self._watched = [gather for gather, _ in comms if isinstance(gather, WatchedGather)]
        self._restoring = [reduce for _, reduce in comms if isinstance(reduce, RestoringReduce)]
        _on_steps(self)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Return a context for the micro-batches of a step before its last one, in which gradients do not cross nodes.

        A backward inside it leaves `.grad` as it was: the sums of gradients wait in the node. The first backward after
        it adds its own gradients, sends the sums across nodes, and completes `.grad`. Enter the context on all ranks,
        around forward and backward. If an exception leaves it, the sums are discarded.

        Where gradients are reduced in one hop, for instance on a single node, and with
        `zero_cross_every_microbatch=True`, each backward completes `.grad` as in FSDP2.

        Raises:
            RuntimeError: the context was entered inside another one or inside a backward. In a later forward, on all
                ranks: only some ranks are inside this context.
        """
        with self._accumulation.open():
            yield

    def discard(self) -> None:
        """Drop the sums of gradients that wait since `accumulate`, for a step that the program gives up.

        A call on one rank is enough: the next forward, which must come before the next backward, drops the sums of all
        ranks. Gradients in `.grad` are not changed, and `zero_grad` does not drop the sums.

        Raises:
            RuntimeError: a backward is running.
        """
        self._accumulation.discard()

    def invalidate_weights(self) -> None:
        """Make the next use of each unit gather whole weights again; a call on one rank is enough.

        Writes to weights are detected without it, except on CUDA between two forwards of a step.
        """
        super().invalidate_weights()

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Prepare for an optimizer step; call it only for an optimizer that does not derive from torch's.

        Args:
            optimizer: the optimizer that is about to step; None means one that holds all parameters.
        Raises:
            RuntimeError: gradients of the optimizer's parameters wait since `accumulate`.
        """
        held = _ids_of(optimizer)
        if (name := self._accumulation.waits_for(held)) is not None:
            raise RuntimeError(
                f"the optimizer steps, but gradients of {name} and others wait since accumulate(): run the last "
                "backward of a step outside of accumulate(), or call discard()"
            )
        for gather in self._watched:
            if gather.secondary.sends_differences:
                gather.before_step(held)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Record that an optimizer has stepped: the next use of its weights sends the update to the other nodes.

        Call it only for an optimizer that does not derive from torch's.

        Args:
            optimizer: the optimizer that has stepped; None means one that holds all parameters.
        Raises:
            RuntimeError: zero_weight_keyframe_interval is set, but `begin_step` was never called.
        """
        keyframe, held = self._sends_keyframe(), _ids_of(optimizer)
        for gather in self._watched:
            gather.after_step(keyframe=keyframe, held=held)
        # The error feedback of gradients that a step has used is kept, also when the program clears them.
        for reduce in self._restoring:
            indices = range(len(reduce.unit.parameters)) if reduce.kept_errors is not None else ()
            if any(held is None or reduce.unit.shard_id(index) in held for index in indices):
                reduce.settle_errors()

    def rescale_feedback(self, factor: torch.Tensor | float) -> None:
        """Multiply the error feedback of all units by `factor`; see `Sharding.rescale_feedback`."""
        super().rescale_feedback(factor)
        for reduce in self._restoring:
            reduce.settle_errors()

    @property
    def keeps_state(self) -> bool:
        """True if there is ZeRO++ state to save, from `secondary_state` or `rank_state`."""
        return bool(self._residents) or any(reduce.feeds_back for reduce in self._restoring)


def _on_steps(handle: Handle) -> None:
    """Call the handle's methods before and after every step of any torch optimizer.

    The hooks are global because fused and foreach optimizer steps on DTensors move no version counter. They stay
    registered after the model is deleted and do nothing then: removing them could happen while torch iterates over its
    hooks.
    """
    reference = weakref.ref(handle)

    def hook(method: Callable[[Handle, torch.optim.Optimizer], None]) -> Callable[..., None]:
        """Return an optimizer hook that calls `method` while the handle exists."""

        def call(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            """Call the method with the optimizer that steps."""
            if (alive := reference()) is not None:
                method(alive, optimizer)

        return call

    register_optimizer_step_pre_hook(hook(Handle.before_optimizer_step))
    register_optimizer_step_post_hook(hook(Handle.after_optimizer_step))


def _ids_of(optimizer: torch.optim.Optimizer | None) -> set[int] | None:
    """Return the `id`s of the tensors in an optimizer's parameter groups; None for all tensors."""
    if optimizer is None:
        return None
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class KeptState(nn.Module):
    """A submodule without parameters that adds ZeRO++'s state to the model's `state_dict`.

    The state lets a resumed run continue bit for bit. It holds the secondary partitions of units whose weights cross
    nodes as differences, and the error feedback of this rank.
    """

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Return copies of ZeRO++'s state by name. State that does not exist yet is returned as zeros.

        A distributed checkpoint is loaded into the tensors of an existing `state_dict`, so every entry must be present.
        """
        handle = self._handle
        handle.reshard()
        feedback = {f"rank {dist.get_rank()} {name}": part.clone() for name, part in handle.rank_state().items()}
        return handle.secondary_targets() | handle.secondary_state() | feedback

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the state that `get_extra_state` returned; call it after the weights have been loaded.

        State that is missing or has another shape is reset. Its unit then sends whole weights at the next use.
        """
        handle = self._handle
        handle.reshard()
        complete = handle.load_secondary_state(state)
        for name, part in handle.rank_state().items():
            kept = state.get(f"rank {dist.get_rank()} {name}")
            complete = complete and kept is not None and kept.shape == part.shape
            part.zero_() if kept is None or kept.shape != part.shape else part.copy_(kept)
        if not complete:
            self._say_anew()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load the state if the checkpoint has it; `load_state_dict` calls this."""
        if f"{prefix}_extra_state" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:  # the checkpoint comes from a run without ZeRO++
            self._say_anew()

    def _say_anew(self) -> None:
        """Print on rank 0 that the checkpoint lacks ZeRO++'s state."""
        if dist.get_rank() == 0:
            print(
                "megazpp: the checkpoint lacks ZeRO++ state for these ranks; the next forward sends whole weights",
                flush=True,
            )
