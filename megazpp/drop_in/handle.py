"""The handle to a program's model that `megazpp.zeropp` returns, and the state that it saves beside a checkpoint.

Nothing is added to the model's modules or to its `state_dict`. So checkpoints of plain FSDP2 load, and programs without
ZeRO++ load the checkpoints. What ZeRO++ keeps besides the weights is saved by `Handle.save`, one file per rank.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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

Comms = tuple[ProgramGather | ProgramRingGather, RestoringReduce | ProgramRingReduce]


class Handle(Sharding):
    """The handle to a model of `megazpp.zeropp`.

    Steps of torch's optimizers are detected by hooks.

    Args:
        model: the model that FSDP2 has wrapped.
        units: the model's sharding units.
        zero: the configuration of ZeRO++.
        comms: the all-gather and the reduce-scatter of each unit.
        counter: counts the bytes that this rank sends.
        accumulation: the sums of gradients that wait.
        layout: sizes of the mesh axes.
        replaced: the parameters of the model before `zeropp` wrapped it; None if the program has wrapped it.
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
        stages = sorted(self._modules, key=lambda each: each[1])
        self._modules = list(dict(stages).items())  # the highest stage of the units of a module
        self._watched = [gather for gather, _ in comms if isinstance(gather, WatchedGather)]
        self._differing = [gather for gather in self._watched if gather.secondary.sends_differences]
        self._restoring = [reduce for _, reduce in comms if isinstance(reduce, RestoringReduce)]
        _live_handles().add(self)

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
        for gather in self._differing:
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

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def keeps_state(self) -> bool:
        """True if `save` saves anything: if weights cross nodes as differences, or there is error feedback."""
        return bool(self._differing) or any(reduce.feeds_back for reduce in self._restoring)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save what ZeRO++ keeps on this rank besides the weights, so that a resumed run is bit-identical.

        These are the weights to which lossless deltas are added, and the error feedback. Call it on all ranks
        between steps, when the program saves the model. It writes one file per rank, named by the layout of the ranks,
        and nothing if nothing is kept (`keeps_state`).

        Args:
            folder: the folder of the program's checkpoint; it is created if necessary.
        """
        if not self.keeps_state:
            return
        kept = self.feedback_state()
        for gather in self._differing:
            kept |= {f"{gather.unit.key}.{name}": part for name, part in gather.kept().items()}
        kept = {name: part.to("cpu", copy=True) for name, part in kept.items()}  # a file would hold more than a view
        path = self._path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        torch.save({"of": self._kept_by(), "kept": kept}, beside)
        beside.replace(path)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load what `save` has saved. Call it on all ranks, before or after the program loads the model's weights.

        If the file does not fit, all of this state starts anew, and a line in the log says so. The file fits if it was
        saved with the same layout of ranks, units and formats. The loaded state takes effect in the next forward. A
        unit whose weights then are not those of the save sends whole weights.

        Args:
            folder: the folder that was passed to `save`.
        """
        if not self.keeps_state:
            return
        path, kept = self._path(folder), dict[str, torch.Tensor]()
        if path.exists():
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
        """Return the path of this rank's file in the folder of a checkpoint."""
        sizes = "x".join(str(getattr(self._layout, axis)) for axis in ("cross", "local", "tp", "ep"))
        return Path(folder, f"zeropp_{sizes}_rank{dist.get_rank()}.pt")

    def _kept_by(self) -> list[Any]:
        """Return a description of the layout of the kept state; a file with another description does not fit."""
        axes = [getattr(self._layout, axis) for axis in ("cross", "local", "tp", "ep")]
        ranks = [self.device.type, *axes, list(self._layout.mesh_ranks())]
        units = [[[p.name, list(p.shape)] for p in unit.parameters] for unit in self.units]
        errors = [[name, str(part.dtype), list(part.shape)] for name, part in self.feedback_state().items()]
        trained = [list(reduce.unit.trained) for reduce in self._restoring if errors]
        rows = [[gather.unit.key, str(gather.secondary.codec.dtype)] for gather in self._differing]
        return [ranks, units, errors, trained, rows]


@functools.cache
def _live_handles() -> weakref.WeakSet[Handle]:
    """Return the set of all handles; the first call registers one pair of hooks for the steps of all torch optimizers.

    The hooks are global because fused and foreach optimizer steps on DTensors move no version counter. They stay
    registered and do nothing after all models are deleted. Torch may iterate over its hooks when a model is deleted, so
    they cannot be removed then.
    """
    live = weakref.WeakSet[Handle]()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Prepare all models for the step of an optimizer."""
        for handle in list(live):
            if handle.replaced is not None:
                handle.replaced.refuse(optimizer)
            handle.before_optimizer_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the step of an optimizer in all models."""
        for handle in list(live):
            handle.after_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    return live


def _ids_of(optimizer: torch.optim.Optimizer | None) -> set[int] | None:
    """Return the `id`s of the tensors in an optimizer's parameter groups; None for all tensors."""
    if optimizer is None:
        return None
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
