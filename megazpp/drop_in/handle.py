"""The handle to a program's model that `megazpp.zeropp` returns, and the files that it adds to a checkpoint.

ZeRO++ adds nothing to the model's modules or to its `state_dict`. So the program can load checkpoints of plain FSDP2,
and programs without ZeRO++ can load its checkpoints. `Handle.save` saves ZeRO++'s own state, one file per rank: error
feedback, and the weights to which lossless deltas are added.
"""

from __future__ import annotations

import functools
import os
import pickle
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megazpp.base.files import errors_as
from megazpp.drop_in.accumulate import Accumulation
from megazpp.drop_in.gather import ProgramGather, ProgramRingGather
from megazpp.drop_in.reduce import ProgramRingReduce, RestoringReduce
from megazpp.drop_in.units import ProgramUnit
from megazpp.drop_in.wrap import ReplacedParameters
from megazpp.drop_in.writes import WatchedGather
from megazpp.parallel.axis import TrafficCounter
from megazpp.topology.layout import Layout
from megazpp.zero.config import ZeroConfig
from megazpp.zero.sharding import Sharding

# Exceptions that torch.load raises for a damaged file. `Handle.load` adds the path and the remedy to their messages.
_UNREADABLE = (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError)
Comms = tuple[ProgramGather | ProgramRingGather, RestoringReduce | ProgramRingReduce]


class Handle(Sharding):
    """The handle to a model that `megazpp.zeropp` returns: it accumulates gradients and saves ZeRO++'s state.

    Global hooks detect the steps of torch's optimizers, so a program need not report them.

    Args:
        model: model that FSDP2 has wrapped.
        units: sharding units of the model.
        zero: settings of ZeRO++.
        comms: all-gather and reduce-scatter of each unit.
        counter: counter of the bytes that this rank sends.
        accumulation: partial sums of gradients that wait inside `accumulate`.
        layout: sizes of the mesh axes.
        replaced: parameters of the model before `zeropp` wrapped it; None if the program has wrapped it.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ProgramUnit],
        zero: ZeroConfig,
        comms: Sequence[Comms],
        counter: TrafficCounter,
        accumulation: Accumulation,
        layout: Layout,
        replaced: ReplacedParameters | None,
    ) -> None:
        super().__init__(model, units, zero, comms, counter)
        self._accumulation, self._layout, self.replaced = accumulation, layout, replaced
        self._watched = [gather for gather, _ in comms if isinstance(gather, WatchedGather)]
        self._differing = [gather for gather in self._watched if gather.secondary.sends_differences]
        self._restoring = [reduce for _, reduce in comms if isinstance(reduce, RestoringReduce)]
        _live_handles().add(self)

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which gradients do not cross nodes, for all micro-batches of a step but the last one.

        A backward inside the context leaves `.grad` as it was: the partial sums of gradients wait in the node. The
        first backward after the context adds its own gradients, sends the sums across nodes, and completes `.grad`.
        Enter the context on all ranks, around forward and backward. If an exception leaves the context, the waiting
        sums are discarded.

        If gradients are reduced in one hop, for instance on a single node, or with `zero_cross_every_microbatch=True`,
        each backward completes `.grad` as in FSDP2.

        Raises:
            RuntimeError: the context was entered inside another `accumulate` or inside a backward. If only some ranks
                run a forward inside the context, all ranks raise this error at the end of that forward.
        """
        return self._accumulation.open()

    def discard(self) -> None:
        """Drop the partial sums of gradients that wait since `accumulate`, for a step that the program gives up.

        A call on one rank is enough: the next forward, which must come before the next backward, drops the waiting sums
        of all ranks. Gradients in `.grad` do not change. `zero_grad` does not drop the waiting sums.

        Raises:
            RuntimeError: a backward is running.
        """
        self._accumulation.discard()

    def invalidate_weights(self) -> None:
        """Make each unit send its whole weights between nodes at its next use; a call on one rank is enough.

        Call this method after a write to weights between two forwards of one training step on CUDA. ZeRO++ detects all
        other writes itself.
        """
        super().invalidate_weights()

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Check before an optimizer step that no gradients wait, and detect writes to weights since they were sent.

        Call this method only before steps of an optimizer whose class does not derive from torch's `Optimizer`. For all
        other optimizers, hooks call this method.

        Args:
            optimizer: optimizer that is about to step; None means an optimizer that holds all parameters.
        Raises:
            RuntimeError: gradients of the optimizer's parameters still wait since `accumulate`.
        """
        held = _ids_of(optimizer)
        if (name := self._accumulation.waits_for(held)) is not None:
            raise RuntimeError(
                f"the optimizer steps, but the gradients of {name} and others are incomplete since accumulate(): run "
                "the last backward of a step outside of accumulate(), or call discard()"
            )
        for gather in self._differing:
            gather.before_step(held)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Record that an optimizer has stepped: the next use of the changed weights sends them to the other nodes.

        Call this method only after steps of an optimizer whose class does not derive from torch's `Optimizer`. For all
        other optimizers, hooks call this method.

        Args:
            optimizer: optimizer that has stepped; None means an optimizer that holds all parameters.
        """
        held = _ids_of(optimizer)
        for gather in self._watched:
            gather.after_step(held=held)
        # If the program clears gradients that an optimizer step has used, their error feedback stays valid. If it
        # clears gradients that no step has used, `RestoringReduce` drops their error feedback.
        for reduce in self._restoring:
            indices = range(len(reduce.unit.parameters)) if reduce.kept_errors is not None else ()
            if any(held is None or reduce.unit.shard_id(index) in held for index in indices):
                reduce.settle_errors()

    def rescale_feedback(self, factor: torch.Tensor | float) -> None:
        """Multiply the error feedback of all units by `factor`; see `Sharding.rescale_feedback`.

        The error feedback then stays valid even if the program clears gradients that no optimizer step has used.
        """
        super().rescale_feedback(factor)
        for reduce in self._restoring:
            reduce.settle_errors()

    # ---- checkpoints: save and load ZeRO++'s own state -------------------------------------------------------------

    @property
    def keeps_state(self) -> bool:
        """True if `save` writes a file: if weights cross nodes as weight deltas, or if error feedback is on."""
        return bool(self._differing) or any(reduce.feeds_back for reduce in self._restoring)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save ZeRO++'s own state of this rank next to a program's checkpoint, so that a resumed run is bit-identical.

        The state consists of the weights to which lossless deltas are added, and of the error feedback. Call this
        method on all ranks between steps, when the program saves the model. Each rank writes one file, whose name has
        the sizes of the mesh axes and the rank. If there is no such state (`keeps_state`), no rank writes a file.

        Args:
            folder: folder of the program's checkpoint; it is created if it does not exist. Use a new folder for each
                checkpoint. Otherwise files that an earlier run with another layout of ranks has saved stay in the
                folder. If a later run returns to that layout, `load` reads these files, and cannot see that their error
                feedback is older than the model's weights.
        """
        if not self.keeps_state:
            return
        kept = self.feedback_state()
        for gather in self._differing:
            kept |= {f"{gather.unit.key}.{name}": part for name, part in gather.kept().items()}
        # Copy each tensor, because torch.save writes the whole memory of which a tensor is a view.
        kept = {name: part.to("cpu", copy=True) for name, part in kept.items()}
        path = self._path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        torch.save({"of": self._kept_by(), "kept": kept}, beside)
        beside.replace(path)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load the state of ZeRO++ that `save` has written next to a program's checkpoint.

        Call this method on all ranks, before or after the program loads the model's weights. The state takes effect in
        the next forward. A unit whose weights differ from the weights at the time of `save` then sends whole weights.
        If this rank's file is missing, or was saved with another layout of ranks, other units or other formats, error
        feedback starts at zero and all units send whole weights. A line in the log says so.

        Args:
            folder: folder that was passed to `save`.
        """
        if not self.keeps_state:
            return
        path, kept = self._path(folder), dict[str, torch.Tensor]()
        if path.exists():
            with errors_as(f"{path} cannot be read, delete it to start anew", _UNREADABLE):
                saved = torch.load(path, map_location="cpu", weights_only=True)
            kept = saved["kept"] if saved["of"] == self._kept_by() else {}
        for name, part in self.feedback_state().items():
            part.copy_(kept[name]) if kept else part.zero_()
        for gather in self._differing:
            key = f"{gather.unit.key}."
            gather.load_kept({name.removeprefix(key): part for name, part in kept.items() if name.startswith(key)})
        if not kept and dist.get_rank() == 0:
            print(
                f"megazpp: {folder} has no state of ZeRO++ for this layout of ranks, units and formats: error feedback "
                "starts at zero, and the next forward sends whole weights",
                flush=True,
            )

    def _path(self, folder: str | os.PathLike[str]) -> Path:
        """Return the path of this rank's file with ZeRO++'s state in the folder of a program's checkpoint."""
        sizes = "x".join(str(getattr(self._layout, axis)) for axis in ("cross", "local", "tp", "ep"))
        return Path(folder, f"zeropp_{sizes}_rank{dist.get_rank()}.pt")

    def _kept_by(self) -> list[Any]:
        """Return a description, in nested lists, of the run to which a saved state of ZeRO++ belongs.

        The lists hold the layout of ranks, and names, shapes and dtypes of the parameters and of ZeRO++'s tensors.
        `save` stores the description in its file. `load` uses a file only if its description equals this one.
        """
        axes = [getattr(self._layout, axis) for axis in ("cross", "local", "tp", "ep")]
        ranks = [self.device.type, *axes, list(self._layout.mesh_ranks())]
        units = [[[p.name, list(p.shape)] for p in unit.parameters] for unit in self.units]
        errors = [[name, str(part.dtype), list(part.shape)] for name, part in self.feedback_state().items()]
        trained = [list(reduce.unit.trained) for reduce in self._restoring if errors]
        rows = [[gather.unit.key, str(gather.secondary.codec.dtype)] for gather in self._differing]
        return [ranks, units, errors, trained, rows]


@functools.cache
def _live_handles() -> weakref.WeakSet[Handle]:
    """Return the set of all handles in use; the first call registers hooks for the steps of all torch optimizers.

    Hooks are necessary because fused and foreach optimizer steps on DTensors move no version counter. The hooks stay
    registered after all models are deleted, and do nothing then. They cannot be removed when a model is deleted,
    because torch may be iterating over its hooks at that time.
    """
    live = weakref.WeakSet[Handle]()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Call `before_optimizer_step` of all live handles; torch calls this hook before each optimizer step.

        Raises:
            RuntimeError: the optimizer holds a parameter that `zeropp` has replaced.
        """
        for handle in list(live):
            if handle.replaced is not None:
                handle.replaced.refuse(optimizer)
            handle.before_optimizer_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Call `after_optimizer_step` of all live handles; torch calls this hook after each optimizer step."""
        for handle in list(live):
            handle.after_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    return live


def _ids_of(optimizer: torch.optim.Optimizer | None) -> set[int] | None:
    """Return the `id`s of the tensors in an optimizer's parameter groups.

    Returns None, which means the parameters of all models, if `optimizer` is None.
    """
    if optimizer is None:
        return None
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
