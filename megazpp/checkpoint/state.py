"""The tensors of a run at one step: which there are, under which keys, and how they go back.

    model.{parameter}                                      sharded, any layout reads it
    optimizer.state.{parameter}.{moment}                   sharded like the parameter, or a scalar
    feedback.{replicas x cross x local x tp}.{place}.{..}  one rank's error feedback: only the same layout reads it
    rng.{data x tp}.{place}.{..}                           one rank's random generators: only the same layout reads it

Keys are those of `torch.distributed.checkpoint.state_dict`. Sharded tensors are DTensors: how tensor parallelism and
ZeRO spread them is known to torch, so that every layout reads what any layout has written. A rank's place is its
coordinates, not its number: the same layout on hosts in another order is the same. What a key of this layout is missing
for begins anew. A gather's secondary partition is not saved: it is made from the shards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import LossScaler
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.parameters import owned_parameters, seed_for
from megazpp.topology.layout import COORDINATES
from megazpp.zero.sharding import Sharding

Saved = Mapping[str, TensorStorageMetadata]
MODEL = "model."  # what the keys of the weights begin with


class Remembers(Protocol):
    """Something small with a state of its own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainState:
    """What a step changes, beside where it stands.

    Args:
        model, sharding: the model and its handle.
        optimizer: over the model's parameters.
        scaler: the loss scale.
        dims: this rank's place.
        seed: the run's.
        guard: remembers the losses that the next one is compared with; None if nothing does.
    """

    def __init__(
        self,
        model: GPTModel,
        sharding: Sharding,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        dims: ParallelDims,
        *,
        seed: int,
        guard: Remembers | None = None,
    ) -> None:
        self.model, self.dims, self.scaler, self.guard = model, dims, scaler, guard
        self._sharding, self._optimizer, self._seed = sharding, optimizer, seed

    def tensors(self, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """This rank's part of everything, by key; the tensors themselves, not copies."""
        self._sharding.free_gathered()  # parameters are shards from here on
        found = self.weights()
        if optimizer:
            for name, parameter in self.model.named_parameters():
                moments = self._optimizer.state.get(parameter, {})
                found |= {f"optimizer.state.{name}.{key}": value for key, value in moments.items()}
            found |= self._feedback()
        if rng:
            states = rng_states(self.model.shared_generator, self.device)
            found |= {f"{self._rng_prefix}.{key}": state for key, state in states.items()}
        return found

    def targets(self, saved: Saved, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """The tensors to read `saved` into: weights and feedback as they are, the rest new or where it was."""
        self._sharding.free_gathered()
        targets = self.weights()
        if optimizer:
            targets |= {key: value for moments in self._moments(saved).values() for key, value in moments.items()}
            targets |= {
                key: value for key, value in self._feedback().items() if key in saved and saved[key].size == value.shape
            }
        if rng:
            entries = {key: entry for key, entry in saved.items() if key.startswith(f"{self._rng_prefix}.")}
            targets |= {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
        return targets

    def accept(
        self, loaded: Mapping[str, torch.Tensor], saved: Saved, *, optimizer: bool, rng: bool, iteration: int
    ) -> list[str]:
        """Go on from `loaded`, the targets with their values.

        Returns:
            A line for each thing that begins anew instead.
        """
        notes = []
        self._sharding.weights_changed()
        if optimizer:
            self._load_optimizer(loaded, saved)
            missing = {key: value for key, value in self._feedback().items() if key not in loaded}
            for value in missing.values():
                value.zero_()
            if missing:
                notes.append("error feedback begins at zero: the checkpoint has none of this layout")
        if rng:
            prefix = f"{self._rng_prefix}."
            states = {key.removeprefix(prefix): state for key, state in loaded.items() if key.startswith(prefix)}
            dims, shared = self.dims, self.model.shared_generator
            if states:
                set_rng_states(states, shared, self.device)
            else:
                ranks = {"data_rank": dims.data_rank, "data_size": dims.data_size, "tp_rank": dims.tp.rank}
                reseed(shared, seed=self._seed, iteration=iteration, **ranks)
                notes.append("random generators are seeded anew: the checkpoint has no states of this layout")
        return notes

    def load_scaler(self, saved: Mapping[str, Any]) -> None:
        """Go on with the saved loss scale, unless the flags fix one; call after the feedback, which is in its units."""
        self.scaler.load_state_dict(dict(saved))
        scale = self.scaler.scale
        self._sharding.rescale_feedback(scale / float(saved.get("scale", scale)))

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters by key; shards of the whole tensor that their shape is of."""
        return {f"{MODEL}{name}": parameter.detach() for name, parameter in self.model.named_parameters()}

    def padded(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Keys of those of `tensors` that end in rows of padding."""
        names = [owned.name for owned in owned_parameters(self.model) if owned.spec.rows is not None]
        weights, moments = {f"model.{name}" for name in names}, tuple(f"optimizer.state.{name}." for name in names)
        return {key for key, x in tensors.items() if x.ndim > 0 and (key in weights or key.startswith(moments))}

    def estimate_bytes(self, *, optimizer: bool) -> int:
        """About how large a checkpoint is: fp32 weights and moments, and the feedback of all ranks."""
        copies = 3 if optimizer and "betas" in self._optimizer.defaults else 2 if optimizer else 1
        weights = sum(parameter.numel() for parameter in self.model.parameters()) * 4
        feedback = sum(buffer.nbytes for buffer in self._feedback().values()) * self.dims.world.size
        return copies * weights + (feedback if optimizer else 0)

    def group_values(self) -> list[dict[str, Any]]:
        """What an optimizer keeps per group and not per parameter: apex's step."""
        return [{key: group[key] for key in ("step",) if key in group} for group in self._optimizer.param_groups]

    def set_group_values(self, values: list[dict[str, Any]]) -> None:
        """The other way round."""
        for group, own in zip(self._optimizer.param_groups, values, strict=True):
            group.update(own)

    def _feedback(self) -> dict[str, torch.Tensor]:
        axes = [getattr(self.dims, name) for name in COORDINATES]
        layout, place = ("x".join(str(getattr(axis, part)) for axis in axes) for part in ("size", "rank"))
        return {f"feedback.{layout}.{place}.{key}": x for key, x in self._sharding.error_feedback().items()}

    def _moments(self, saved: Saved) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
        """The optimizer's state as it was saved: {parameter: {key: tensor to read into}}."""
        moments: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        by_name = _by_parameter(saved)
        for name, parameter in self.model.named_parameters():
            own = self._optimizer.state.get(parameter, {})
            for moment, entry in by_name.get(name, {}).items():
                key = f"optimizer.state.{name}.{moment}"
                moments.setdefault(parameter, {})[key] = own[moment] if moment in own else _like(entry, parameter)
        return moments

    def _load_optimizer(self, loaded: Mapping[str, torch.Tensor], saved: Saved) -> None:
        """Through the optimizer's own method, which puts each tensor on the device where it is used."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        by_name = _by_parameter(saved)
        state = self._optimizer.state_dict()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        state["state"] = {
            index: {moment: loaded[f"optimizer.state.{names[p]}.{moment}"] for moment in by_name[names[p]]}
            for index, p in enumerate(parameters)
            if names[p] in by_name
        }
        self._optimizer.load_state_dict(state)

    @property
    def _rng_prefix(self) -> str:
        dims = self.dims
        return f"rng.{dims.data_size}x{dims.tp.size}.{dims.data_rank}x{dims.tp.rank}"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def _by_parameter(saved: Saved) -> dict[str, dict[str, TensorStorageMetadata]]:
    """{parameter's name: {moment: entry}}"""
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, entry in saved.items():
        if key.startswith("optimizer.state."):
            name, moment = key.removeprefix("optimizer.state.").rsplit(".", 1)
            found.setdefault(name, {})[moment] = entry
    return found


def _like(entry: TensorStorageMetadata, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zeros for a saved scalar, or for a saved moment, placed like its parameter."""
    if len(entry.size) == 0:
        return torch.zeros((), dtype=entry.properties.dtype)
    return torch.zeros_like(parameter.detach(), dtype=entry.properties.dtype)


def rng_states(shared: SharedGenerator | None, device: torch.device) -> dict[str, torch.Tensor]:
    """Python's, numpy's and torch's default generators, the device's, and the one that tp ranks share; uint8."""
    kind, keys, *rest = np.random.get_state()
    assert isinstance(keys, np.ndarray)
    states = {
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor([kind, keys.tolist(), *rest]),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if shared is not None:
        states["shared"] = shared.generator.get_state()
    return states


def set_rng_states(states: Mapping[str, torch.Tensor], shared: SharedGenerator | None, device: torch.device) -> None:
    """Undo everything that was drawn since `rng_states`; generators without a state are left alone."""
    if "python" in states:
        version, internal, gauss_next = _from_tensor(states["python"])
        random.setstate((version, tuple(internal), gauss_next))
    if "numpy" in states:
        kind, keys, *rest = _from_tensor(states["numpy"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "shared" in states and shared is not None:
        shared.generator.set_state(states["shared"])


def reseed(
    shared: SharedGenerator | None, *, seed: int, iteration: int, data_rank: int, data_size: int, tp_rank: int
) -> None:
    """Seed all generators for a run that continues on other ranks: from what they are now, and from the iteration.

    So that the masks of the run's first steps do not come again.
    """
    seed = seed_for(f"iteration {iteration} on {data_size} data ranks", seed=seed)
    seed_everything(seed, data_rank=data_rank, tp_rank=tp_rank)
    if shared is not None:
        shared.generator.manual_seed(seed_for(f"dropout on data rank {data_rank}", seed=seed))


def _as_tensor(state: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _from_tensor(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
