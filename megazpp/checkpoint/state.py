"""The training state that a checkpoint contains: the keys of its tensors, and the interface of its parts.

Every tensor in a checkpoint has a key, and each part of the state has a separate prefix:

    model.{parameter}                          weights, sharded
    model.{buffer}                             buffers, such as the biases of routers, read by every rank
    optimizer.state.{parameter}.{moment}       optimizer states, sharded like the parameter, or scalars
    secondary.{parameter}                      secondary partition of lossless weight deltas, sharded like the parameter
    secondary.{parameter}.crossing             kind of the next inter-node message of the sharding unit that starts with
                                               this parameter, a scalar
    feedback.{layout}.{coordinates}.{buffer}   error feedback of one rank
    rng.{layout}.{coordinates}.{generator}     states of the random generators of one rank
    extra.{name}                               values that a training method keeps between steps, read by every rank

checkpoint/parts.py implements these parts. Features add more parts, in diloco/state.py and post_training/reference.py.
Weights and optimizer states have the keys that `torch.distributed.checkpoint.state_dict` uses.

Sharded tensors are DTensors. The checkpoint therefore contains their placement, and a run with any layout can read
them. A key with a layout and coordinates belongs to one rank. Only a run with the same layout reads such tensors; any
other run starts with new values. A rank's coordinates do not depend on its rank number, so hosts may be in another
order. The secondary partition is saved only for lossless weight deltas, because otherwise the shards determine it.
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
# Prefixes of the keys of a checkpoint's tensors. diloco/state.py describes the keys of replica groups.
MODEL, OPTIMIZER, SECONDARY, REPLICA_GROUP = "model.", "optimizer.state.", "secondary.", "replica_group."
SCALAR_HEAD = f"{MODEL}scalar_head."


class StatePart:
    """The interface of one part of a run's training state, such as the weights or the optimizer states.

    Every rank calls every method. The methods name a tensor by its key in the checkpoint without `prefix`.

    Attributes:
        prefix: prefix of the keys of the part's tensors in a checkpoint.
        group: group by which flags leave out parts. "weights" are always saved and loaded. --no-save-optim and
            --no-load-optim leave out "optimizer", and --no-save-rng and --no-load-rng leave out "rng".
    """

    prefix: str
    group: Group = "optimizer"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors to save, by name. They are not copies: the next training step may change them."""
        raise NotImplementedError

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the tensors of this part that loading fills with a checkpoint's values, by name.

        By default, this is a new tensor for each tensor that the checkpoint has of this part.

        Args:
            saved: shape and dtype of each tensor in the checkpoint, by key.
        """
        there = under(self.prefix, saved)
        return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in there.items()}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Copy loaded values into the run's training state.

        Args:
            loaded: the tensors that `targets` returned, filled with the checkpoint's values, by name.
            iteration: iteration of the checkpoint.
        Returns:
            A list with a note for the log about each kind of values that the checkpoint does not have, and that the run
            therefore starts from scratch.
        """
        return []


class RunValues:
    """The training state outside of tensors: loss scale, values of optimizer groups, and losses of earlier steps.

    Args:
        optimizer: optimizer of the run.
        scaler: loss scaler of the run.
        guard: detector of loss spikes, which stores losses of earlier steps; None if the run has no detector.
    Attributes:
        saved_scale: loss scale in the loaded checkpoint, by which its error feedback is multiplied. Before a load, it
            is the current loss scale.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: LossScaler, guard: Stateful | None = None) -> None:
        self.scaler, self._optimizer, self._guard = scaler, optimizer, guard
        self.saved_scale = scaler.scale  # `load_state_dict` replaces this value by the checkpoint's

    def state_dict(self) -> dict[str, Any]:
        """Return the fields `scaler`, `guard` and `groups` of a checkpoint's metadata (`CheckpointMetadata`).

        `groups` contains the step count of each parameter group if the optimizer stores it there, as apex's do.
        """
        groups = [{key: group[key] for key in ("step",) if key in group} for group in self._optimizer.param_groups]
        guard = self._guard.state_dict() if self._guard is not None else {}
        return {"scaler": self.scaler.state_dict(), "guard": guard, "groups": groups}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore the values from the fields `scaler`, `guard` and `groups` of a checkpoint's metadata.

        Raises:
            KeyError, TypeError, ValueError: the values in the checkpoint are damaged.
        """
        scaler, guard = values["scaler"], values["guard"]
        self.scaler.load_state_dict(scaler)
        self.saved_scale = float(scaler.get("scale", self.scaler.scale))
        if self._guard is not None and guard:
            self._guard.load_state_dict(guard)
        # Only apex's optimizers store values in the groups. Others may have another number of groups than at the save.
        if any(values["groups"]):
            for group, own in zip(self._optimizer.param_groups, values["groups"], strict=True):
                group.update(own)


class TrainState:
    """The complete training state that training steps change, except the training progress.

    Args:
        model: sharded model.
        sharding: sharding of the model.
        values: loss scale and other values that are not tensors.
        parts: parts of the state, in the order in which a load restores them. One of them has the prefix "model.".
    """

    def __init__(self, model: GPTModel, sharding: Sharding, values: RunValues, parts: Sequence[StatePart]) -> None:
        self.model, self.values, self._sharding, self._parts = model, values, sharding, tuple(parts)

    def tensors(self, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """Return this rank's tensors to save in a checkpoint, by key.

        Args:
            optimizer: True to include the optimizer states.
            rng: True to include the states of the random generators.
        """
        self._sharding.reshard()  # frees gathered parameters, so that `parameters()` returns the shards
        return {part.prefix + name: x for part in self._parts_of(optimizer, rng) for name, x in part.tensors().items()}

    def targets(self, saved: Saved, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """Return this rank's tensors that loading fills with a checkpoint's values, by key.

        Args:
            saved: shape and dtype of each tensor in the checkpoint, by key.
            optimizer: True to include the optimizer states.
            rng: True to include the states of the random generators.
        """
        self._sharding.reshard()
        parts = self._parts_of(optimizer, rng)
        return {part.prefix + name: x for part in parts for name, x in part.targets(saved).items()}

    def accept(self, loaded: Tensors, *, optimizer: bool, rng: bool, iteration: int) -> list[str]:
        """Copy loaded values into the training state. Each part receives the tensors with its prefix.

        Args:
            loaded: the tensors that `targets` returned, filled with the checkpoint's values, by key.
            optimizer: True if they include the optimizer states, as in the call of `targets`.
            rng: True if they include the states of the random generators, as in the call of `targets`.
            iteration: iteration of the checkpoint.
        Returns:
            A list with a note for the log about each kind of values that the checkpoint does not have, and that the run
            therefore starts from scratch.
        """
        parts = self._parts_of(optimizer, rng)
        return [note for part in parts for note in part.accept(under(part.prefix, loaded), iteration)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers by their keys in a checkpoint.

        A parameter is a DTensor with a global shape and this rank's shard. A buffer is an unsharded tensor.
        """
        (weights,) = (part for part in self._parts if part.prefix == MODEL)
        return {MODEL + name: x for name, x in weights.tensors().items()}

    def padded(self, tensors: Tensors) -> set[str]:
        """Return the keys of those `tensors` that end in padding rows: padded parameters and their optimizer states."""
        names = tuple(f".{name}" for name, _, _, spec in owned_parameters(self.model) if spec.rows is not None)
        sharded = (key for key, x in tensors.items() if isinstance(x, DTensor) and x.ndim > 0)
        # A weight's key ends with the parameter's name. A moment's key ends with this name and the moment's name.
        return {key for key in sharded if key.endswith(names) or key.rpartition(".")[0].endswith(names)}

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._sharding.device

    def _parts_of(self, optimizer: bool, rng: bool) -> Iterator[StatePart]:
        """Return the parts of the state to save or load: always the weights, and the groups that are selected."""
        wanted = {"weights": True, "optimizer": optimizer, "rng": rng}
        return (part for part in self._parts if wanted[part.group])


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a dictionary whose keys start with `prefix`, and remove the prefix from these keys."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
