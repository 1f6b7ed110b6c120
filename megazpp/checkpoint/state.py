"""Training state that a checkpoint holds: the keys of its tensors, and the interface of its parts.

Every tensor has a key, and each part of the state has a separate prefix:

    model.{parameter}                          weights, sharded
    model.{buffer}                             buffers, such as the biases of routers, read by every rank
    optimizer.state.{parameter}.{moment}       optimizer states, sharded like the parameter, or scalars
    secondary.{parameter}                      secondary partition of lossless weight deltas, sharded like the parameter
    secondary.{parameter}.crossing             kind of the next inter-node message of the sharding unit that starts with
                                               this parameter, a scalar
    feedback.{layout}.{coordinates}.{buffer}   error feedback of one rank
    rng.{layout}.{coordinates}.{generator}     states of the random generators of one rank
    extra.{name}                               values that a training method keeps between steps, read by every rank

The parts are implemented in parts.py. Features add others, in diloco/state.py and post_training/reference.py. Weights
and optimizer states have the keys that `torch.distributed.checkpoint.state_dict` uses.

Sharded tensors are DTensors, so torch has their placement, and a run with any layout can read them. Keys with a layout
and coordinates belong to one rank. Only a run with the same layout reads them; in any other run these parts are reset.
A rank's coordinates do not depend on its rank number, so hosts may be in another order. The secondary partition is
saved only for lossless weight deltas, because otherwise it is computed from the shards.
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
# prefixes of keys; diloco/state.py describes those of replica groups
MODEL, OPTIMIZER, SECONDARY, REPLICA_GROUP = "model.", "optimizer.state.", "secondary.", "replica_group."
SCALAR_HEAD = f"{MODEL}scalar_head."


class StatePart:
    """The interface of one part of a run's state. Every rank calls every method.

    The methods use names, which are keys without `prefix`.

    Attributes:
        prefix: prefix of the part's keys.
        group: group for the flags that omit parts. "weights" are always saved and loaded. --no-save-optim and
            --no-load-optim omit "optimizer", --no-save-rng and --no-load-rng omit "rng".
    """

    prefix: str
    group: Group = "optimizer"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors to save, by name. They are not copies, so the next step may change them."""
        raise NotImplementedError

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the tensors to load from a checkpoint into, by name. The default is a new tensor for each saved one.

        Args:
            saved: shapes and dtypes of all tensors in the checkpoint, by key.
        """
        there = under(self.prefix, saved)
        return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in there.items()}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Take over the loaded values, and return a note for each thing that the checkpoint cannot provide.

        Args:
            loaded: the tensors from `targets`, filled, by name.
            iteration: iteration of the checkpoint.
        """
        return []


class RunValues:
    """The state of a run that is not in tensors: loss scale, values of optimizer groups, and losses of earlier steps.

    Args:
        optimizer: optimizer of the run.
        scaler: loss scaler.
        guard: detector of loss spikes, which keeps losses of earlier steps; None without one.
    Attributes:
        saved_scale: loss scale at the save of the loaded checkpoint. Its error feedback is multiplied by this scale.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: LossScaler, guard: Stateful | None = None) -> None:
        self.scaler, self._optimizer, self._guard = scaler, optimizer, guard
        self.saved_scale = scaler.scale  # loading a checkpoint replaces it

    def state_dict(self) -> dict[str, Any]:
        """Return the fields `scaler`, `guard` and `groups` of `CheckpointMetadata`.

        `groups` has the step count of each parameter group if the optimizer keeps it there, as apex's optimizers do.
        """
        groups = [{key: group[key] for key in ("step",) if key in group} for group in self._optimizer.param_groups]
        guard = self._guard.state_dict() if self._guard is not None else {}
        return {"scaler": self.scaler.state_dict(), "guard": guard, "groups": groups}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore the values from the fields of a checkpoint's metadata.

        Raises:
            KeyError, TypeError, ValueError: the values are damaged.
        """
        scaler, guard = values["scaler"], values["guard"]
        self.scaler.load_state_dict(scaler)
        self.saved_scale = float(scaler.get("scale", self.scaler.scale))
        if self._guard is not None and guard:
            self._guard.load_state_dict(guard)
        if any(values["groups"]):  # torch optimizers save no values here; then the number of groups may differ
            for group, own in zip(self._optimizer.param_groups, values["groups"], strict=True):
                group.update(own)


class TrainState:
    """The whole training state that steps change, except the progress.

    Args:
        model: sharded model.
        sharding: sharding of the model.
        values: loss scale and other values that are not tensors.
        parts: parts of the state, in the order in which they are restored. One has the prefix "model.".
    """

    def __init__(self, model: GPTModel, sharding: Sharding, values: RunValues, parts: Sequence[StatePart]) -> None:
        self.model, self.values, self._sharding, self._parts = model, values, sharding, tuple(parts)

    def tensors(self, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """Return the tensors to save from this rank, by key.

        Args:
            optimizer: True to include the optimizer states.
            rng: True to include the states of the random generators.
        """
        self._sharding.reshard()  # free gathered parameters; `parameters()` then returns the shards
        return {part.prefix + name: x for part in self._parts_of(optimizer, rng) for name, x in part.tensors().items()}

    def targets(self, saved: Saved, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """Return the tensors to load the checkpoint's tensors into, by key.

        Args:
            saved: shapes and dtypes of all tensors in the checkpoint, by key.
            optimizer: True to include the optimizer states.
            rng: True to include the states of the random generators.
        """
        self._sharding.reshard()
        parts = self._parts_of(optimizer, rng)
        return {part.prefix + name: x for part in parts for name, x in part.targets(saved).items()}

    def accept(self, loaded: Tensors, *, optimizer: bool, rng: bool, iteration: int) -> list[str]:
        """Pass loaded tensors to the parts, and return a note for each thing that the checkpoint cannot provide.

        Args:
            loaded: the tensors from `targets`, filled, by key.
            optimizer: the value given to `targets`.
            rng: the value given to `targets`.
            iteration: iteration of the checkpoint.
        """
        parts = self._parts_of(optimizer, rng)
        return [note for part in parts for note in part.accept(under(part.prefix, loaded), iteration)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by key.

        A parameter is a DTensor: its shape is global, and it holds this rank's shard. A buffer is a whole tensor.
        """
        (weights,) = (part for part in self._parts if part.prefix == MODEL)
        return {MODEL + name: x for name, x in weights.tensors().items()}

    def padded(self, tensors: Tensors) -> set[str]:
        """Return the keys of the tensors that end in padding rows: padded parameters and their optimizer states."""
        names = tuple(f".{name}" for name, _, _, spec in owned_parameters(self.model) if spec.rows is not None)
        sharded = (key for key, x in tensors.items() if isinstance(x, DTensor) and x.ndim > 0)
        # keys end in the parameter's name, or for optimizer states in its name and the moment's
        return {key for key in sharded if key.endswith(names) or key.rpartition(".")[0].endswith(names)}

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._sharding.device

    def _parts_of(self, optimizer: bool, rng: bool) -> Iterator[StatePart]:
        """Iterate over the parts to save or load: the weights, and the groups that the arguments select."""
        wanted = {"weights": True, "optimizer": optimizer, "rng": rng}
        return (part for part in self._parts if wanted[part.group])


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose keys start with `prefix`, with the prefix removed from the keys."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
