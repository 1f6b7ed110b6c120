"""Checkpoint state of DiLoCo's replica groups, in addition to the keys of checkpoint/state.py:

    model.{parameter}                    holds the outer weight, sharded over all ranks of all groups
    diloco.momentum.{parameter}          its outer momentum, sharded alike
    diloco.common.{parameter}            R, the outer weights as all groups received them, sharded in a group
    replica_group.{i}.inner.{parameter}  group i's own weights, sharded like R
    replica_group.{i}.counts             synchronization counts of group i
    replica_group.{i}.values             its loss scale and losses
    replica_group.{i}.optimizer..        moments of every group but the first
    replica_group.{i}.secondary..        secondary partition of every group but the first


A run without DiLoCo can therefore read the outer weights and the first group's moments. If the number of groups
changes, outer weights and momentum are kept, inner weights start at the outer weights, and group j takes the moments of
group j modulo the earlier number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazpp.base.files import DamagedError
from megazpp.checkpoint.parts import ErrorFeedback, Weights, as_tensor, from_tensor
from megazpp.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    REPLICA_GROUP,
    SECONDARY,
    RunValues,
    Saved,
    StatePart,
    Tensors,
    under,
)
from megazpp.diloco.outer import ReplicaGroups
from megazpp.model.gpt import GPTModel

COUNTS, VALUES = "counts", "values"
COMMON, MOMENTUM = "diloco.common.", "diloco.momentum."


def replica_group_parts(
    parts: Sequence[StatePart], replica_groups: ReplicaGroups, model: GPTModel, values: RunValues
) -> list[StatePart]:
    """Return the checkpoint parts of a DiLoCo run, made from the parts of a run without DiLoCo (`training_parts`).

    Args:
        parts: the parts of a run without DiLoCo.
        replica_groups: outer weights of the replica groups.
        model: the model.
        values: loss scale and losses of the run.
    """
    own, found = ReplicaGroupState(replica_groups, model, values), list[StatePart]()
    for part in parts:
        if isinstance(part, ErrorFeedback):
            part.sources.append(replica_groups.error_feedback)
        found.append(OfReplicaGroup(part, own) if part.prefix in (OPTIMIZER, SECONDARY) else part)
    (index,) = (index for index, part in enumerate(found) if part.prefix == MODEL)
    found[index] = OuterWeights(own)
    return [own, *found]


class ReplicaGroupState(StatePart):
    """Inner weights, outer momentum, R (the groups' common copy of the outer weights) and counts.

    It is restored before the parts that depend on the inner weights.
    """

    prefix = ""

    def __init__(self, replica_groups: ReplicaGroups, model: GPTModel, values: RunValues) -> None:
        self.replica_groups, self.model, self._values, self.axis = replica_groups, model, values, replica_groups.axis
        self._own = f"{REPLICA_GROUP}{self.axis.rank}."
        self.source = 0  # the replica group of the checkpoint from which this group's own state is read
        self.same = True  # whether the checkpoint has as many replica groups
        self.restored = False  # whether inner weights and R were loaded from the checkpoint

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save, by key."""
        found = self._inner() | {f"{COMMON}{name}": weight for name, weight in self.replica_groups.common().items()}
        found |= {f"{MOMENTUM}{name}": moment.clone() for name, moment in self.replica_groups.momentum().items()}
        values = as_tensor(self._values.state_dict())
        return found | {f"{self._own}{COUNTS}": self.replica_groups.counts(), f"{self._own}{VALUES}": values}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the tensors to load into, for the keys that the checkpoint has."""
        count = sum(key.startswith(REPLICA_GROUP) and key.endswith(f".{COUNTS}") for key in saved)
        self.source, self.same = self.axis.rank % max(count, 1), count == self.axis.size
        targets = {f"{MOMENTUM}{name}": moment.zero_() for name, moment in self.replica_groups.momentum().items()}
        if self.same:
            targets |= self._inner() | {
                f"{COMMON}{name}": weight for name, weight in self.replica_groups.common().items()
            }
            own = (f"{self._own}{COUNTS}", f"{self._own}{VALUES}")
            targets |= super().targets({key: saved[key] for key in own if key in saved})
        return {key: value for key, value in targets.items() if key in saved}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Restore the loaded state, and return notes for the log.

        Args:
            loaded: the loaded tensors by key.
            iteration: iteration of the checkpoint.
        Raises:
            DamagedError: the checkpoint lacks a key, or a value is damaged.
        """
        if not self.same:
            return ["replica groups start at the outer weights, because the checkpoint has another number of groups"]
        needed = {f"{key}{name}" for key in (COMMON, f"{self._own}inner.") for name, _ in self.model.named_parameters()}
        if missing := sorted((needed | {f"{self._own}{COUNTS}", f"{self._own}{VALUES}"}) - loaded.keys()):
            raise DamagedError(f"the DiLoCo checkpoint has no {missing[0]}")
        try:
            self._values.load_state_dict(from_tensor(loaded[f"{self._own}{VALUES}"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{self._own}{VALUES}: loss scale, losses or groups are damaged: {error!r}") from error
        counts = loaded[f"{self._own}{COUNTS}"]
        if counts.shape != self.replica_groups.counts().shape:
            return ["replica groups start at the outer weights, because the checkpoint has other --diloco-fragments"]
        self.replica_groups.restore(under(COMMON, loaded), counts)
        self.restored = True
        return []

    def _inner(self) -> dict[str, torch.Tensor]:
        """Return this group's inner weights, by key."""
        return {f"{self._own}inner.{name}": p.detach() for name, p in self.model.named_parameters()}


class OuterWeights(Weights):
    """The outer weights of DiLoCo, which a checkpoint has in place of the replica group's own parameters."""

    def __init__(self, own: ReplicaGroupState) -> None:
        super().__init__(own.model, own.replica_groups.sharding)
        self._own = own

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the outer weights, because --async-save does not accept views."""
        return {name: x.clone() for name, x in self._own.replica_groups.weights().items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the outer weights as the tensors to load into."""
        return self._own.replica_groups.weights()

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Start the inner weights at the outer weights, unless `ReplicaGroupState` has restored them."""
        if not self._own.restored:
            self._own.replica_groups.begin_at_outer_weights()
        self._own.restored = False
        return super().accept(loaded, iteration)


class OfReplicaGroup(StatePart):
    """A checkpoint part that each replica group has for itself.

    The first group uses the same keys as a run without DiLoCo.
    """

    prefix = ""

    def __init__(self, part: StatePart, own: ReplicaGroupState) -> None:
        self._part, self._own = part, own

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save, with this group's prefix."""
        prefix = self._prefix(self._own.axis.rank)
        return {prefix + name: x for name, x in self._part.tensors().items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the tensors to load into, with the prefix of the source group."""
        if self._part.prefix == SECONDARY and not self._own.same:
            return {}  # the secondary partition is a copy of inner weights, which were not loaded
        prefix = self._prefix(self._own.source)
        own = {self._part.prefix + name: entry for name, entry in under(prefix, saved).items()}
        return {prefix + name: x for name, x in self._part.targets(own).items()}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Restore the loaded state of the source group."""
        return self._part.accept(under(self._prefix(self._own.source), loaded), iteration)

    def _prefix(self, index: int) -> str:
        """Return the key prefix of a group's state. The first group has the prefix of a run without DiLoCo."""
        return (f"{REPLICA_GROUP}{index}." if index else "") + self._part.prefix
