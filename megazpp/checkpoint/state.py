"""The tensors of a run at one step: which there are, under which keys, and how they go back.

One file of more than 300 lines: every key is written and read back side by side.

    model.{parameter}                                      sharded, any layout reads it
    optimizer.state.{parameter}.{moment}                   sharded like the parameter, or a scalar
    secondary.{parameter}                                  what nodes keep of it (4-bit differences), sharded alike
    secondary.{parameter}.crossing                         what the next use of its unit sends to other nodes, a scalar
    feedback.{replicas x cross x local x tp}.{place}.{..}  one rank's error feedback: only the same layout reads it
    rng.{data x tp}.{place}.{..}                           one rank's random generators: only the same layout reads it
    extra.{..}                                             what the objective keeps between steps: every rank reads all
    reference.{parameter}                                  of a reference that training changes, sharded alike

Islands that take local steps (zero/diloco.py) add:

    model.{parameter}                                      is then the outer weight, spread over all ranks
    diloco.momentum.{parameter}                            its momentum, spread alike
    diloco.common.{parameter}                              R, sharded over an island's ranks, the same on all islands
    island.{i}.inner.{parameter}                           island i's own weights, sharded like R
    island.{i}.counts, island.{i}.values                   what its synchronizations count; its loss scale and losses
    island.{i}.optimizer.., island.{i}.secondary..         as above, of every island but the first

So any layout without islands reads the outer weights and the first island's moments. Other numbers of islands keep the
outer weights and momentum: inner weights begin at the outer ones, and island j takes the moments of island j modulo the
number there was.

Keys are those of `torch.distributed.checkpoint.state_dict`. Sharded tensors are DTensors: how tensor parallelism and
ZeRO spread them is known to torch, so that every layout reads what any layout has written. A rank's place is its
coordinates, not its number: the same layout on hosts in another order is the same. What a key of this layout is missing
for begins anew. A secondary partition is saved only where differences are added to it: others are made from the shards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from megazpp.checkpoint.checksums import DamagedError
from megazpp.checkpoint.record import RunRecord
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import LossScaler
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.parameters import owned_parameters, seed_for
from megazpp.zero.diloco import DiLoCo
from megazpp.zero.sharding import Sharding

Saved = Mapping[str, TensorStorageMetadata]
MODEL, OPTIMIZER, SECONDARY, EXTRA = "model.", "optimizer.state.", "secondary.", "extra."  # what keys begin with
REFERENCE = "reference."
ISLAND, INNER, COUNTS, VALUES = "island.", "inner.", "counts", "values"
COMMON, MOMENTUM = "diloco.common.", "diloco.momentum."
SCALAR_HEAD = f"{MODEL}scalar_head."


class ExtraState(Protocol):
    """The state of an objective between steps: small tensors that no layout splits."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's, by key; tp ranks give the same ones. They are not written to later."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what all ranks of a run, of any layout, gave together; {} begins anew."""


class TrainState:
    """All that a step changes, but the progress.

    `guard` remembers the losses that the next one is compared with, `extra` is the objective's, `reference` a model
    and its handle that change beside the policy.
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
        guard: Stateful | None = None,
        extra: ExtraState | None = None,
        reference: tuple[GPTModel, Sharding] | None = None,
        diloco: DiLoCo | None = None,
    ) -> None:
        self._reference = reference
        self.model, self.dims, self.scaler, self.guard, self.extra = model, dims, scaler, guard, extra
        self._sharding, self._optimizer, self._seed, self._diloco = sharding, optimizer, seed, diloco
        self._source = 0  # the island of the checkpoint that this one's own state is read from
        self._same_islands = True  # as the checkpoint's
        self._saved_scale = scaler.scale  # in whose units the error feedback of the checkpoint is

    def tensors(self, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """This rank's part of everything, by key; the tensors themselves, not copies."""
        self._sharding.free_gathered()  # parameters are shards from here on
        found = self.weights()
        if self._diloco is not None:
            found = {key: weight.clone() for key, weight in found.items()}  # --async-save takes no views
        if optimizer:
            mine, own = island_prefix(self.dims.island.rank), dict[str, torch.Tensor]()
            for name, parameter in self.model.named_parameters():
                moments = self._optimizer.state.get(parameter, {})
                own |= {f"{OPTIMIZER}{name}.{moment}": value for moment, value in moments.items()}
            own |= {f"{SECONDARY}{name}": x for name, x in self._sharding.secondary_state().items()}
            found |= {mine + key: value for key, value in own.items()}
            found |= self._rank_tensors()
            if self._diloco is not None:
                found |= self._island_tensors(self._diloco)
            found |= self._of_reference()
            if self.extra is not None:
                found |= {EXTRA + key: value for key, value in self.extra.tensors().items()}
        if rng:
            states = rng_states(self.model.shared_generator, self.device)
            found |= {self._rng_prefix + key: state for key, state in states.items()}
        return found

    def targets(self, saved: Saved, *, optimizer: bool, rng: bool) -> dict[str, torch.Tensor]:
        """The tensors to read `saved` into: weights and a rank's own as they are, the rest new or where it was."""
        self._sharding.free_gathered()
        targets = {
            key: weight for key, weight in self.weights().items() if key in saved or not key.startswith(SCALAR_HEAD)
        }
        if optimizer:
            islands = sum(key.startswith(ISLAND) and key.endswith(f".{COUNTS}") for key in saved)
            self._source = self.dims.island.rank % max(islands, 1)
            self._same_islands = islands == (0 if self._diloco is None else self.dims.island.size)
            prefix, parameters = island_prefix(self._source), dict(self.model.named_parameters())
            for key, entry in saved.items():
                name, moment = _split_moment(key.removeprefix(prefix)) if key.startswith(prefix) else ("", "")
                if name in parameters:
                    own = self._optimizer.state.get(parameters[name], {})
                    targets[key] = own[moment] if moment in own else _like(entry, parameters[name])
            for key, value in self._rank_tensors().items():
                if key in saved and saved[key].size == value.shape:
                    targets[key] = value
            for name, value in self._sharding.secondary_targets().items():
                key = f"{prefix}{SECONDARY}{name}"
                if self._same_islands and key in saved and saved[key].properties.dtype == value.dtype:
                    targets[key] = value
            if self._diloco is not None:
                targets |= self._island_targets(self._diloco, saved)
            targets |= self._of_reference()
            if self.extra is not None:
                targets |= _empty(saved, EXTRA)
        if rng:
            targets |= _empty(saved, self._rng_prefix)
        return targets

    def accept(self, loaded: Mapping[str, torch.Tensor], *, optimizer: bool, rng: bool, iteration: int) -> list[str]:
        """Go on from `loaded`, the targets with their values; returns a line for each thing that begins anew."""
        notes = []
        if self._diloco is not None:
            notes += self._accept_islands(self._diloco, loaded, optimizer=optimizer)
        self._sharding.weights_changed()
        if any(key.startswith(SCALAR_HEAD) and key not in loaded for key in self.weights()):
            notes.append("the scalar head begins with random weights: the checkpoint has none")
        if optimizer:
            if self.extra is not None:
                self.extra.load({key.removeprefix(EXTRA): x for key, x in loaded.items() if key.startswith(EXTRA)})
            self._load_optimizer(loaded)
            missing = [value for key, value in self._rank_tensors().items() if key not in loaded]
            for value in missing:
                value.zero_()
            self._sharding.rescale_feedback(self.scaler.scale / self._saved_scale)
            if missing:
                notes.append("error feedback begins at zero: the checkpoint has none of this layout")
            prefix = f"{island_prefix(self._source)}{SECONDARY}"
            kept = {key.removeprefix(prefix): x for key, x in loaded.items() if key.startswith(prefix)}
            if not self._sharding.load_secondary_state(kept):
                notes.append("weights cross nodes whole at first: the checkpoint has no weights that nodes keep")
        if rng:
            prefix, dims, shared = self._rng_prefix, self.dims, self.model.shared_generator
            states = {key.removeprefix(prefix): state for key, state in loaded.items() if key.startswith(prefix)}
            if states:
                set_rng_states(states, shared, self.device)
            else:
                # by the iteration, too: the masks of the run's first steps must not come again
                seed = seed_for(f"iteration {iteration} on {dims.data_size} data ranks", seed=self._seed)
                seed_everything(seed, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
                if shared is not None:
                    shared.generator.manual_seed(seed_for(f"dropout on data rank {dims.data_rank}", seed=seed))
                notes.append("random generators are seeded anew: the checkpoint has no states of this layout")
        return notes

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters by key; shards of the whole tensor that their shape is of. Of islands the outer weights."""
        if self._diloco is not None:
            return {f"{MODEL}{name}": weight for name, weight in self._diloco.weights().items()}
        return {f"{MODEL}{name}": parameter.detach() for name, parameter in self.model.named_parameters()}

    def padded(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Keys of those of `tensors` that end in rows of padding."""
        names = {owned.name for owned in owned_parameters(self.model) if owned.spec.rows is not None}
        whole = {
            f"{prefix}{name}" for name in names for prefix in (MODEL, SECONDARY, REFERENCE, COMMON, MOMENTUM, INNER)
        }
        plain = {key: _without_island(key) for key, x in tensors.items() if x.ndim > 0}
        return {key for key, name in plain.items() if name in whole or _split_moment(name)[0] in names}

    def estimate_bytes(self, *, optimizer: bool) -> int:
        """About how large a checkpoint is: fp32 weights and moments, kept weights, and what ranks have of their own."""
        copies = 3 if optimizer and "betas" in self._optimizer.defaults else 2 if optimizer else 1
        copies += optimizer and self._reference is not None
        weights = sum(parameter.numel() for parameter in self.model.parameters()) * 4
        if optimizer and self._diloco is not None:  # outer weights, momentum and R, and each island's own
            copies = 3 + copies * self.dims.island.size
        of_ranks = sum(x.nbytes for x in self._rank_tensors().values()) * self.dims.world.size
        of_ranks += self._sharding.secondary_state_bytes * self.dims.world.size // self.dims.replicate.size
        return copies * weights + (of_ranks if optimizer else 0)

    def values(self) -> dict[str, Any]:
        """The fields of the record, which are no tensors; apex's optimizer keeps the step in its groups."""
        groups = [{key: group[key] for key in ("step",) if key in group} for group in self._optimizer.param_groups]
        guard = self.guard.state_dict() if self.guard is not None else {}
        return {"scaler": self.scaler.state_dict(), "guard": guard, "groups": groups}

    def set_values(self, record: RunRecord) -> None:
        """Go on from `values` of an earlier run; raises KeyError, TypeError or ValueError if they are damaged."""
        self._set_values(record.scaler, record.guard, record.groups)

    def _set_values(self, scaler: dict[str, Any], guard: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        self.scaler.load_state_dict(scaler)
        self._saved_scale = float(scaler.get("scale", self.scaler.scale))
        if self.guard is not None and guard:
            self.guard.load_state_dict(guard)
        for group, own in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(own)

    def _of_reference(self) -> dict[str, torch.Tensor]:
        if self._reference is None:
            return {}
        model, sharding = self._reference
        sharding.free_gathered()
        return {f"{REFERENCE}{name}": parameter.detach() for name, parameter in model.named_parameters()}

    def _rank_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a rank of one layout has for itself, by key; a run on another layout begins with zeros."""
        axes = [getattr(self.dims, name) for name in self.dims.layout.coordinates]
        layout, place = ("x".join(str(getattr(axis, part)) for axis in axes) for part in ("size", "rank"))
        feedback = self._sharding.error_feedback()
        if self._diloco is not None:
            feedback |= self._diloco.error_feedback()
        return {f"feedback.{layout}.{place}.{key}": x for key, x in feedback.items()}

    # ---- islands --------------------------------------------------------------------------------------------------

    def _island_tensors(self, diloco: DiLoCo) -> dict[str, torch.Tensor]:
        island = f"{ISLAND}{self.dims.island.rank}."
        found = {f"{island}{INNER}{name}": p.detach() for name, p in self.model.named_parameters()}
        found |= {f"{COMMON}{name}": weight for name, weight in diloco.common().items()}
        found |= {f"{MOMENTUM}{name}": moment.clone() for name, moment in diloco.momentum().items()}
        return found | {f"{island}{COUNTS}": diloco.counts(), f"{island}{VALUES}": _as_tensor(self.values())}

    def _island_targets(self, diloco: DiLoCo, saved: Saved) -> dict[str, torch.Tensor]:
        targets = {f"{MOMENTUM}{name}": moment.zero_() for name, moment in diloco.momentum().items()}
        if self._same_islands:
            island = f"{ISLAND}{self.dims.island.rank}."
            targets |= {f"{island}{INNER}{name}": p.detach() for name, p in self.model.named_parameters()}
            targets |= {f"{COMMON}{name}": weight for name, weight in diloco.common().items()}
            targets |= _empty(saved, f"{island}{COUNTS}") | _empty(saved, f"{island}{VALUES}")
        return {key: value for key, value in targets.items() if key in saved}

    def _accept_islands(self, diloco: DiLoCo, loaded: Mapping[str, torch.Tensor], *, optimizer: bool) -> list[str]:
        """Before anything that depends on the inner weights."""
        island = f"{ISLAND}{self.dims.island.rank}."
        if not optimizer or not self._same_islands:
            diloco.begin_at_outer_weights()
            return ["islands begin at the outer weights: the checkpoint has other islands' own, or none"] * optimizer
        needed = {f"{key}{name}" for key in (COMMON, f"{island}{INNER}") for name, _ in self.model.named_parameters()}
        if missing := sorted((needed | {f"{island}{COUNTS}", f"{island}{VALUES}"}) - loaded.keys()):
            raise DamagedError(f"the checkpoint of islands has no {missing[0]}")
        try:
            values = _from_tensor(loaded[f"{island}{VALUES}"])
            self._set_values(values["scaler"], values["guard"], values["groups"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{island}{VALUES}: loss scale, losses or groups are damaged: {error!r}") from error
        counts = loaded[f"{island}{COUNTS}"]
        if counts.shape == diloco.counts().shape:
            diloco.restore({key.removeprefix(COMMON): x for key, x in loaded.items() if key.startswith(COMMON)}, counts)
            return []
        diloco.begin_at_outer_weights()
        return ["islands begin at the outer weights: the checkpoint is of another --diloco-fragments"]

    def _load_optimizer(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Through the optimizer's own method, which puts each tensor on the device where it is used."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        indices = {names[parameter]: index for index, parameter in enumerate(parameters)}
        moments: dict[int, dict[str, torch.Tensor]] = {}
        prefix = island_prefix(self._source)
        for key, value in loaded.items():
            name, moment = _split_moment(key.removeprefix(prefix)) if key.startswith(prefix) else ("", "")
            if name in indices:
                moments.setdefault(indices[name], {})[moment] = value
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": moments})

    @property
    def _rng_prefix(self) -> str:
        dims = self.dims
        return f"rng.{dims.data_size}x{dims.tp.size}.{dims.data_rank}x{dims.tp.rank}."

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def island_prefix(island: int) -> str:
    """The prefix of keys of an island's own optimizer."""
    return f"{ISLAND}{island}." if island else ""


def _without_island(key: str) -> str:
    return key.split(".", 2)[2] if key.startswith(ISLAND) else key


def _split_moment(key: str) -> tuple[str, str]:
    """The parameter and the moment of a key of the optimizer's state; empty names of any other."""
    if not key.startswith(OPTIMIZER):
        return "", ""
    name, _, moment = key.removeprefix(OPTIMIZER).rpartition(".")
    return name, moment


def _empty(saved: Saved, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors for all that is saved under keys with `prefix`, as it was."""
    entries = {key: entry for key, entry in saved.items() if key.startswith(prefix)}
    return {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}


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


def _as_tensor(state: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _from_tensor(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
