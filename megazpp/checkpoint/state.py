"""The training state that a checkpoint contains: the keys of its tensors, and the parts that save and restore them.

Every tensor in a checkpoint has a key, and each part of the state has a separate prefix:

    model.{parameter}                          weights, sharded
    model.{buffer}                             buffers, such as the biases of routers, read by every rank
    optimizer.state.{parameter}.{moment}       optimizer states, sharded like the parameter, or scalars
    secondary.{parameter}                      secondary partition of lossless weight deltas, sharded like the parameter
    secondary.{parameter}.crossing             kind of the next inter-node message of the sharding unit that starts with
                                               this parameter, a scalar
    feedback.{layout}.{coordinates}.{buffer}   error feedback of one rank
    rng.{layout}.{coordinates}.{generator}     states of the random generators of one rank
    extra.{name}                               completions that GRPO or PPO trains on in later steps, read by every rank

Features add parts: the last one is in post_training/rollouts.py, and others are in diloco/state.py and
elastic/state.py. Weights and optimizer states have the keys that `torch.distributed.checkpoint.state_dict` uses.

Sharded tensors are DTensors. The checkpoint therefore contains their placement, and a run with any layout can read
them. In a key, {layout} has sizes of the parallel layout, such as 2x4, and {coordinates} has a rank's index for each of
these sizes, such as 1x3. A key with {layout} and {coordinates} belongs to one rank. Only a run with the same layout
reads such tensors; any other run starts with new values. A rank's coordinates do not depend on its rank number, so
hosts may be in another order. The secondary partition is saved only for lossless weight deltas, because otherwise the
shards determine it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megazpp.base.files import DamagedError
from megazpp.model.gpt import GPTModel
from megazpp.model.layer_parts import SharedGenerator
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.initialize import seed_for
from megazpp.tensor_parallel.parameters import model_state, owned_parameters
from megazpp.zero.gather import InterNodeMessage
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
        saved_scale: loss scale in the loaded checkpoint. The error feedback in the checkpoint contains this scale as a
            factor, as gradients do. Before a load, `saved_scale` is the current loss scale.
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
        # Only apex's optimizers store values in the groups. Other optimizers may have another number of groups than at
        # the save, which is no error, so they are not compared here.
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
        """Return the keys in `tensors` of tensors that end in padding rows: parameters and their optimizer states."""
        names = tuple(f".{name}" for name, _, _, spec in owned_parameters(self.model) if spec.rows is not None)
        sharded = (key for key, x in tensors.items() if isinstance(x, DTensor) and x.ndim > 0)
        # A weight's key ends with the parameter's name. A moment's key ends with this name and the moment's name.
        return {key for key in sharded if key.endswith(names) or key.rpartition(".")[0].endswith(names)}

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self._sharding.device

    def _parts_of(self, optimizer: bool, rng: bool) -> Iterator[StatePart]:
        """Return the parts to save or load.

        These are the parts of the group "weights", and the parts of each group whose argument is True.
        """
        wanted = {"weights": True, "optimizer": optimizer, "rng": rng}
        return (part for part in self._parts if wanted[part.group])


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dictionary with the entries whose keys start with `prefix`, without the prefix in these keys."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def training_parts(
    model: GPTModel,
    sharding: Sharding,
    optimizer: torch.optim.Optimizer,
    dims: ParallelDims,
    values: RunValues,
    *,
    seed: int,
) -> list[StatePart]:
    """Return the parts of the training state that every run has, in the order in which a load restores them.

    Args:
        model: sharded model.
        sharding: sharding of the model.
        optimizer: optimizer of the model's parameters.
        dims: mesh axes.
        values: loss scale and other values that are not tensors.
        seed: seed of the run, for random generators whose states a checkpoint does not have.
    """
    return [
        Weights(model, sharding),
        Moments(model, optimizer),
        ErrorFeedback(sharding, dims, values),
        SecondaryPartition(sharding),
        RandomGenerators(model.settings.generator, sharding.device, dims, seed=seed),
    ]


class Weights(StatePart):
    """The part of a checkpoint with the model's parameters (DTensors) and its buffers, which are equal on all ranks."""

    prefix = MODEL
    group: Group = "weights"

    def __init__(self, model: GPTModel, sharding: Sharding) -> None:
        self._model, self._sharding = model, sharding

    def tensors(self) -> dict[str, torch.Tensor]:
        self._sharding.settle()
        return {name: tensor.detach() for name, tensor in model_state(self._model).items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers, which a load overwrites, by name.

        A scalar head (of a reward model) is left out if the checkpoint has none.
        """
        own = {MODEL + name: x for name, x in self.tensors().items()}
        return under(MODEL, {key: x for key, x in own.items() if key in saved or not key.startswith(SCALAR_HEAD)})

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Invalidate the secondary partition, which still has the weights that the run had before the load.

        Returns:
            A list with a note if the checkpoint has no scalar head, so that the model's head begins with random
            weights; otherwise [].
        """
        self._sharding.invalidate_weights()
        if all(name in loaded for name, _ in self._model.named_parameters()):
            return []
        return ["the scalar head begins with random weights: the checkpoint has none"]


class Moments(StatePart):
    """The part of a checkpoint with the optimizer's state of each parameter, such as moments and step counts."""

    prefix = OPTIMIZER

    def __init__(self, model: GPTModel, optimizer: torch.optim.Optimizer) -> None:
        # `_anew` is the number of parameters whose moments begin at zero, because another optimizer wrote the saved
        # moments; `targets` sets it
        self._model, self._optimizer, self._anew = model, optimizer, 0
        averages = [group for group in optimizer.param_groups if group.get("matrices", "betas" not in group)]
        # These parameters have a momentum buffer instead of Adam's two moments: all parameters with SGD, and the
        # matrices with Muon.
        self._averaged = {parameter for group in averages for parameter in group["params"]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{moment}": value
            for name, parameter in self._model.named_parameters()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return a tensor to load into for each saved optimizer state that this run's optimizer can use, by name.

        A moment is sharded like its parameter. Adam's moments are not loaded for a parameter that Muon or SGD updates
        in this run. Momentum buffers are not loaded for a parameter that Adam updates. `accept` reports the number of
        these parameters.

        Raises:
            DamagedError: the checkpoint has some optimizer states of a parameter, such as exp_avg, but lacks another
                one, such as exp_avg_sq, that it has for other parameters with the same optimizer.
        """
        parameters, targets, others = dict(self._model.named_parameters()), {}, set()
        kinds: dict[str, set[str]] = {}
        for key, entry in under(OPTIMIZER, saved).items():
            name, _, moment = key.rpartition(".")
            kinds.setdefault(name, set()).add(moment)
            if name in parameters and (moment == "momentum_buffer") != (parameters[name] in self._averaged):
                others.add(name)
            elif name in parameters:
                weight, own = parameters[name].detach(), self._optimizer.state.get(parameters[name], {})
                # A moment has the parameter's shape. A scalar, whose saved size is (), is the parameter's step count.
                new = torch.zeros_like(weight) if entry.size else torch.zeros(())
                targets[key] = own[moment] if moment in own else new.to(entry.properties.dtype)
        for name, found in kinds.items():
            alike = [other for other in kinds.values() if ("momentum_buffer" in other) == ("momentum_buffer" in found)]
            if lacking := set[str]().union(*alike) - found:
                raise DamagedError(
                    f"the checkpoint's optimizer states of {name} lack {', '.join(sorted(lacking))}: pass "
                    "--no-load-optim to load only the weights, or load another checkpoint"
                )
        self._anew = len(others)
        return targets

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Pass the loaded states to `Optimizer.load_state_dict`, which moves each tensor to its parameter's device.

        Returns:
            A list with a note, which gives the number of parameters whose moments begin at zero because another
            optimizer has written the checkpoint; [] if there are none.
        """
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        indices = {names[parameter]: index for index, parameter in enumerate(parameters)}
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in loaded.items():
            name, _, moment = key.rpartition(".")
            moments.setdefault(indices[name], {})[moment] = value
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": moments})
        if not self._anew:
            return []
        return [f"moments of {self._anew} parameters begin at zero: the checkpoint has another optimizer's"]


class ErrorFeedback(StatePart):
    """The part of a checkpoint with a rank's own buffers: error feedback, and sizes of its last lossless weight deltas.

    Error feedback is the quantization error of gradients. The keys contain the layout and the rank's coordinates in
    this layout, so only a run with the same layout loads these buffers. Other runs start with zeros.

    Attributes:
        sources: functions that return this rank's buffers by name. An optional feature, such as DiLoCo, appends a
            function that returns the feature's buffers.
    """

    def __init__(self, sharding: Sharding, dims: ParallelDims, values: RunValues) -> None:
        axes = [getattr(dims, name) for name in dims.layout.coordinates]
        layout, place = ("x".join(str(getattr(axis, part)) for axis in axes) for part in ("size", "rank"))
        if (ep := dims.layout.ep) > 1:  # a run with another ep size has other experts, so its keys differ
            layout = f"{layout}.ep{ep}"
        self.prefix, self._sharding, self._values = f"feedback.{layout}.{place}.", sharding, values
        self.sources: list[Callable[[], dict[str, torch.Tensor]]] = [sharding.rank_state]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: x for source in self.sources for name, x in source().items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        there = under(self.prefix, saved)
        return {name: x for name, x in self.tensors().items() if name in there and there[name].size == x.shape}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Set to zero the buffers that the checkpoint lacks, and rescale error feedback to the current loss scale.

        Returns:
            A list with a note if error feedback begins at zero; otherwise [].
        """
        missing = [name for name, x in self.tensors().items() if name not in loaded]
        for name in missing:
            self.tensors()[name].zero_()
        # The buffers ".recent" have the sizes of recent weight deltas, from which the sizes of the next messages are
        # predicted. If a checkpoint lacks them, only the next messages are larger, so a note is not needed.
        missing = [name for name in missing if not name.endswith(".recent")]
        self._sharding.rescale_feedback(self._values.scaler.scale / self._values.saved_scale)
        return ["error feedback begins at zero: the checkpoint has none of this layout"] if missing else []


class SecondaryPartition(StatePart):
    """The part of a checkpoint with the secondary partition, in runs with lossless weight deltas.

    The secondary partition is the copy of the weights that every node stores. The next weight delta is added to it, so
    a run resumes bit for bit only if checkpoints contain it. Without lossless weight deltas, this part has no tensors.
    There are two kinds of entries:

        {parameter}                        the secondary partition's weights of a parameter, a DTensor sharded like the
                                           parameter; missing if the next gather sends complete weights
        {unit's first parameter}.crossing  the kind of inter-node message that the next gather of the sharding unit
                                           sends, as a scalar (`InterNodeMessage`)

    All ranks call the methods while the parameters are sharded. A load restores the weights before this part.
    """

    prefix = SECONDARY

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def tensors(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for gather in self._sharding.residents:
            crossing = gather.next_crossing()
            state[gather.crossing_key] = torch.tensor(crossing, dtype=torch.uint8, device="cpu")
            if crossing != InterNodeMessage.KEYFRAME:
                resident = gather.resident()
                own = gather.unit.as_parameters(resident.weights[resident.cross.rank])
                state |= {name: weight.clone() for name, weight in own.items()}  # --async-save cannot copy views
        return state

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return a tensor of zeros for each entry of the secondary partition that the checkpoint has, by name.

        A checkpoint of a run with another layout may lack entries. From a checkpoint of DiLoCo, no entry is loaded.
        """
        if any(key.startswith(REPLICA_GROUP) for key in saved):
            # In a DiLoCo checkpoint, the secondary partition belongs to the inner weights of one replica group. The run
            # loads the outer weights from `model.`, which weight deltas relative to these inner weights would not fit.
            return {}
        own: dict[str, torch.Tensor] = {}
        for gather in self._sharding.residents:
            own[gather.crossing_key] = torch.zeros((), dtype=torch.uint8, device="cpu")
            own |= gather.unit.as_parameters(gather.new_row(self._sharding.device))
        there = under(SECONDARY, saved)
        return {name: x for name, x in own.items() if name in there and there[name].properties.dtype == x.dtype}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Restore the secondary partition, the copy of the weights that every node stores.

        A sharding unit with a missing entry sends complete weights to other nodes at its next gather.

        Returns:
            A list with a note if the checkpoint lacks the secondary partition of a sharding unit; otherwise [].
        """
        complete = True
        for gather in self._sharding.residents:
            gather.drop()
            sent = loaded.get(gather.crossing_key)
            crossing = InterNodeMessage.KEYFRAME if sent is None else InterNodeMessage(int(sent))
            if crossing == InterNodeMessage.KEYFRAME or any(p.name not in loaded for p in gather.unit.parameters):
                # Nothing is missing if the run that saved the checkpoint would itself have sent complete weights next.
                complete = complete and crossing == InterNodeMessage.KEYFRAME and sent is not None
                continue
            row = gather.new_row(self._sharding.device)
            for name, part in gather.unit.as_parameters(row).items():
                part.copy_(loaded[name])
            with gather.secondary.cross.counter.paused():  # bytes of a load are not traffic of training steps
                gather.restore(row, crossing)
        if complete:
            return []
        return ["the next inter-node messages carry whole weights: the checkpoint has no secondary partition"]


class RandomGenerators(StatePart):
    """The part of a checkpoint with the states of this rank's random generators, as uint8 tensors.

    These are the default generators of torch and the GPU, and the dropout generator that has equal states on all tp
    ranks. Nothing in a run uses the default generators of Python and numpy. The keys contain the layout, so only a run
    with the same layout loads these states.

    Args:
        shared: dropout generator with equal states on all tp ranks; None if the model has none.
        device: device of the model.
        dims: mesh axes.
        seed: seed of the run. If the checkpoint has no states for this layout, the generators get new seeds that depend
            on this seed and on the checkpoint's iteration.
    """

    group: Group = "rng"

    def __init__(self, shared: SharedGenerator | None, device: torch.device, dims: ParallelDims, *, seed: int) -> None:
        self.prefix = f"rng.{dims.data_size * dims.cp.size}x{dims.tp.size}.{dims.dropout_rank}x{dims.tp.rank}."
        self._shared, self._dims, self._seed = shared, dims, seed

        # By name in the checkpoint: functions that return and that set the state of a generator
        self._generators: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]] = {
            "torch": (torch.get_rng_state, torch.set_rng_state)
        }
        if device.type == "cuda":
            own = functools.partial(torch.cuda.get_rng_state, device)
            self._generators["cuda"] = (own, functools.partial(torch.cuda.set_rng_state, device=device))
        if shared is not None:
            self._generators["shared"] = (shared.generator.get_state, shared.generator.set_state)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: state() for name, (state, _) in self._generators.items()}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Set the random generators to the loaded states, or seed them again if the checkpoint has no states.

        Returns:
            A list with a note if the generators are seeded again; otherwise [].
        """
        if not loaded:
            # The new seed depends on the iteration, so that the dropout masks of the run's first steps do not repeat.
            dims = self._dims
            seed = seed_for(f"iteration {iteration} on {dims.data_size * dims.cp.size} data ranks", seed=self._seed)
            seed_everything(seed, data_rank=dims.dropout_rank, tp_rank=dims.tp.rank)
            if self._shared is not None:
                self._shared.seed(seed, data_rank=dims.dropout_rank)
            return ["random generators are seeded again: the checkpoint has no states of this layout"]
        for name, (_, set_state) in self._generators.items():
            if name in loaded:
                set_state(loaded[name])
        return []


def as_tensor(value: Any) -> torch.Tensor:
    """Encode a JSON-compatible value, such as a version, as a uint8 tensor with the bytes of its JSON."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_tensor(state: torch.Tensor) -> Any:
    """Decode a uint8 tensor with the bytes of a JSON text, such as a version, and return the JSON value."""
    return json.loads(bytes(state.tolist()))
