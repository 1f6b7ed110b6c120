"""The tensors of a run at one step: a list of parts, each with keys of its own.

    model.{parameter}                                      sharded, any layout reads it
    optimizer.state.{parameter}.{moment}                   sharded like the parameter, or a scalar
    secondary.{parameter}                                  what nodes keep of it (4-bit differences), sharded alike
    secondary.{parameter}.crossing                         what the next use of its unit sends to other nodes, a scalar
    feedback.{replicas x cross x local x tp}.{place}.{..}  one rank's error feedback: only the same layout reads it
    rng.{data x tp}.{place}.{..}                           one rank's random generators: only the same layout reads it
    extra.{..}                                             what a training keeps between steps: every rank reads all

Those are in parts.py; features bring more: diloco/state.py, post_training/reference.py. Keys are those of
`torch.distributed.checkpoint.state_dict`. Sharded tensors are DTensors: how tensor parallelism and ZeRO spread them is
known to torch, so that every layout reads what any layout has written. A rank's place is its coordinates, not its
number: the same layout on hosts in another order is the same. What a key of this layout is missing for begins anew. A
secondary partition is saved only where differences are added to it: others are made from the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import LossScaler
from megazpp.tensor_parallel.parameters import owned_parameters
from megazpp.zero.sharding import Sharding

Tensors = Mapping[str, torch.Tensor]
Saved = Mapping[str, TensorStorageMetadata]
Group = Literal["weights", "optimizer", "rng"]
MODEL, OPTIMIZER, SECONDARY = "model.", "optimizer.state.", "secondary."  # what keys begin with
SCALAR_HEAD = f"{MODEL}scalar_head."


class StatePart:
    """A part of a run's state. Every rank calls every method; names are keys without `prefix`.

    Attributes:
        prefix: of its keys.
        group: "weights" are always saved and loaded; --no-save-optim and the like leave the others out.
    """

    prefix: str
    group: Group = "optimizer"

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of it by name, the tensors themselves; nothing writes to them before the next step."""
        raise NotImplementedError

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """The tensors, by name, to read a checkpoint into; `saved` is all of it, by key. By default new ones."""
        there = under(self.prefix, saved)
        return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in there.items()}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Go on from the targets with their values; returns a line for each thing that begins anew."""
        return []


class RunValues:
    """The state of a run that is no tensor: loss scale, the optimizer's groups, losses to compare later ones with."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: LossScaler, guard: Stateful | None = None) -> None:
        self.scaler, self._optimizer, self._guard = scaler, optimizer, guard
        self.saved_scale = scaler.scale  # in whose units the error feedback of the checkpoint is

    def state_dict(self) -> dict[str, Any]:
        """Fields of the record; apex's optimizer keeps the step in its groups."""
        groups = [{key: group[key] for key in ("step",) if key in group} for group in self._optimizer.param_groups]
        guard = self._guard.state_dict() if self._guard is not None else {}
        return {"scaler": self.scaler.state_dict(), "guard": guard, "groups": groups}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from an earlier run's; raises KeyError, TypeError or ValueError if they are damaged."""
        scaler, guard = values["scaler"], values["guard"]
        self.scaler.load_state_dict(scaler)
        self.saved_scale = float(scaler.get("scale", self.scaler.scale))
        if self._guard is not None and guard:
            self._guard.load_state_dict(guard)
        if any(values["groups"]):  # another optimizer may have other groups
            for group, own in zip(self._optimizer.param_groups, values["groups"], strict=True):
                group.update(own)


class TrainState:
    """All that a step changes, but the progress.

    Args:
        parts: go on from a checkpoint in this order; one has the prefix "model.".
    """

    def __init__(self, model: GPTModel, sharding: Sharding, values: RunValues, parts: Sequence[StatePart]) -> None:
        self.model, self.values, self._sharding, self._parts = model, values, sharding, tuple(parts)

    def tensors(self, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """This rank's part of everything, by key."""
        self._sharding.reshard()  # parameters are shards from here on
        return {part.prefix + name: x for part in self._parts_of(optimizer, rng) for name, x in part.tensors().items()}

    def targets(self, saved: Saved, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """The tensors to read `saved` into, by key."""
        self._sharding.reshard()
        parts = self._parts_of(optimizer, rng)
        return {part.prefix + name: x for part in parts for name, x in part.targets(saved).items()}

    def accept(self, loaded: Tensors, *, optimizer: bool, rng: bool, iteration: int) -> list[str]:
        """Go on from `loaded`, the targets with their values; returns a line for each thing that begins anew."""
        parts = self._parts_of(optimizer, rng)
        return [note for part in parts for note in part.accept(under(part.prefix, loaded), iteration)]

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters by key; shards of the whole tensor that their shape is of."""
        (weights,) = (part for part in self._parts if part.prefix == MODEL)
        return {MODEL + name: x for name, x in weights.tensors().items()}

    def padded(self, tensors: Tensors) -> set[str]:
        """Keys of those of `tensors` that end in rows of padding: sharded like a parameter that has some."""
        names = tuple(f".{name}" for name, _, _, spec in owned_parameters(self.model) if spec.rows is not None)
        sharded = (key for key, x in tensors.items() if isinstance(x, DTensor) and x.ndim > 0)
        return {key for key in sharded if key.endswith(names) or key.rpartition(".")[0].endswith(names)}  # its moment

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _parts_of(self, optimizer: bool, rng: bool) -> Iterator[StatePart]:
        wanted = {"weights": True, "optimizer": optimizer, "rng": rng}
        return (part for part in self._parts if wanted[part.group])


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose keys begin with `prefix`, by the rest of the key."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
