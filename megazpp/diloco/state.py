"""The tensors that differ between the checkpoints of a DiLoCo run and of a run without DiLoCo (checkpoint/state.py):

    model.{parameter}                    holds the outer weight, sharded over all ranks of all groups
    diloco.momentum.{parameter}          the parameter's outer momentum, sharded like the outer weight
    diloco.common.{parameter}            R, the outer weights as all groups received them, sharded in a group
    replica_group.{i}.inner.{parameter}  inner weights of group i, sharded like R
    replica_group.{i}.counts             `ReplicaGroups.counts` of group i
    replica_group.{i}.values             loss scale and recent losses of group i
    replica_group.{i}.optimizer.*        moments of group i, except for the first group, whose i is 0
    replica_group.{i}.secondary.*        secondary partition of group i, except for the first group

Moments and secondary partition of the first group have the keys of a run without DiLoCo, optimizer.* and secondary.*.
So a run without DiLoCo can read the outer weights and the first group's moments. If a resumed run has another number of
groups, it keeps outer weights and momentum, and inner weights start at the outer weights. Group j takes the moments of
group j modulo the earlier number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazpp.base.files import DamagedError
from megazpp.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    REPLICA_GROUP,
    SECONDARY,
    ErrorFeedback,
    RunValues,
    Saved,
    StatePart,
    Tensors,
    Weights,
    as_tensor,
    from_tensor,
    under,
)
from megazpp.diloco.outer import ReplicaGroups
from megazpp.model.gpt import GPTModel

COUNTS, VALUES = "counts", "values"
COMMON, MOMENTUM = "diloco.common.", "diloco.momentum."


def replica_group_parts(
    parts: Sequence[StatePart], replica_groups: ReplicaGroups, model: GPTModel, values: RunValues
) -> list[StatePart]:
    """Return the checkpoint parts of a DiLoCo run, made from the parts of a run without DiLoCo.

    Args:
        parts: checkpoint parts of a run without DiLoCo (`training_parts`).
        replica_groups: outer weights and momentum of the run.
        model: model of this replica group.
        values: loss scale and recent losses of this replica group.
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
    """The checkpoint part of a replica group's own state.

    The state has inner weights, outer momentum, R (the common copy of the outer weights), the counts of
    `ReplicaGroups.counts`, and the values, which are loss scale and recent losses. This part loads before the parts
    that depend on the inner weights.
    """

    prefix = ""

    def __init__(self, replica_groups: ReplicaGroups, model: GPTModel, values: RunValues) -> None:
        self.replica_groups, self.model, self._values, self.axis = replica_groups, model, values, replica_groups.axis
        self._own = f"{REPLICA_GROUP}{self.axis.rank}."
        # `targets` sets `source` and `same`, and `accept` sets `restored`, while a checkpoint loads.
        self.source = 0  # index of the replica group in the checkpoint whose moments this group loads
        self.same = True  # True if the checkpoint has as many replica groups as this run
        self.restored = False  # True if inner weights and R were loaded from the checkpoint

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this group's state to save in a checkpoint, by key; the class lists the entries."""
        found = self._inner() | {f"{COMMON}{name}": weight for name, weight in self.replica_groups.common().items()}
        found |= {f"{MOMENTUM}{name}": moment.clone() for name, moment in self.replica_groups.momentum().items()}
        values = as_tensor(self._values.state_dict())
        return found | {f"{self._own}{COUNTS}": self.replica_groups.counts(), f"{self._own}{VALUES}": values}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the tensors into which a checkpoint loads, by key.

        Keys that the checkpoint lacks are left out. If the checkpoint has another number of replica groups than this
        run, the result has only the outer momentum.

        Args:
            saved: entries of the checkpoint by key.
        """
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
        """Restore this replica group's state from the loaded tensors, and return lines for the log.

        If the checkpoint has another number of groups, nothing is restored. If it has other fragments, only the loss
        scale and losses are restored. In both cases the groups start at the outer weights, and a line says so.

        Args:
            loaded: loaded tensors by key.
            iteration: iteration of the checkpoint.
        Raises:
            DamagedError: the checkpoint lacks a tensor, or loss scale and losses cannot be read.
        """
        if not self.same:
            return ["replica groups start at the outer weights, because the checkpoint has another number of groups"]
        needed = {f"{key}{name}" for key in (COMMON, f"{self._own}inner.") for name, _ in self.model.named_parameters()}
        if missing := sorted((needed | {f"{self._own}{COUNTS}", f"{self._own}{VALUES}"}) - loaded.keys()):
            raise DamagedError(
                f"the DiLoCo checkpoint of iteration {iteration} has no tensor {missing[0]}, which a resumed run "
                "needs: load an earlier checkpoint with --ckpt-step"
            )
        try:
            self._values.load_state_dict(from_tensor(loaded[f"{self._own}{VALUES}"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(
                f"loss scale or losses of a replica group are damaged in the checkpoint of iteration {iteration} "
                f"({self._own}{VALUES}: {error!r}): load an earlier checkpoint with --ckpt-step"
            ) from error
        counts = loaded[f"{self._own}{COUNTS}"]
        if counts.shape != self.replica_groups.counts().shape:
            return ["replica groups start at the outer weights, because the checkpoint has other --diloco-fragments"]
        self.replica_groups.restore(under(COMMON, loaded), counts)
        self.restored = True
        return []

    def _inner(self) -> dict[str, torch.Tensor]:
        """Return the inner weights of this replica group by checkpoint key; they are not copies."""
        return {f"{self._own}inner.{name}": p.detach() for name, p in self.model.named_parameters()}


class OuterWeights(Weights):
    """The checkpoint part of DiLoCo's outer weights, which a checkpoint has instead of a replica group's parameters."""

    def __init__(self, own: ReplicaGroupState) -> None:
        super().__init__(own.model, own.replica_groups.sharding)
        self._own = own

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the outer weights to save, by checkpoint key, as copies: --async-save does not accept views."""
        return {name: x.clone() for name, x in self._own.replica_groups.weights().items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the outer weights by checkpoint key, not copied, so that a checkpoint is loaded into them in place."""
        return self._own.replica_groups.weights()

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Set the inner weights to the loaded outer weights, unless `ReplicaGroupState` has restored inner weights.

        Return lines for the log; see `StatePart.accept` for the arguments.
        """
        if not self._own.restored:
            self._own.replica_groups.begin_at_outer_weights()
        self._own.restored = False
        return super().accept(loaded, iteration)


class OfReplicaGroup(StatePart):
    """A checkpoint part that each replica group saves separately: the moments, or the secondary partition.

    The first group uses the same keys as a run without DiLoCo. Other groups add a prefix with their index.

    Args:
        part: checkpoint part of a run without DiLoCo.
        own: state of this replica group. Its attribute `source` is the group of a checkpoint from which `part` loads.
    """

    prefix = ""

    def __init__(self, part: StatePart, own: ReplicaGroupState) -> None:
        self._part, self._own = part, own

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the moments or the secondary partition to save, by key with the prefix of this replica group."""
        prefix = self._prefix(self._own.axis.rank)
        return {prefix + name: x for name, x in self._part.tensors().items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the tensors into which a checkpoint loads, by key, with the prefix of the group that is loaded.

        If the checkpoint has another number of replica groups than this run, the secondary partition is not loaded.
        """
        if self._part.prefix == SECONDARY and not self._own.same:
            return {}  # the secondary partition is a copy of inner weights, which were not loaded
        prefix = self._prefix(self._own.source)
        own = {self._part.prefix + name: entry for name, entry in under(prefix, saved).items()}
        return {prefix + name: x for name, x in self._part.targets(own).items()}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Restore the loaded moments or the loaded secondary partition of this group; return lines for the log.

        See `StatePart.accept` for the arguments.
        """
        return self._part.accept(under(self._prefix(self._own.source), loaded), iteration)

    def _prefix(self, index: int) -> str:
        """Return the prefix of the checkpoint keys of the moments, or of the secondary partition, of group `index`.

        The first group has the prefix of a run without DiLoCo.
        """
        return (f"{REPLICA_GROUP}{index}." if index else "") + self._part.prefix
