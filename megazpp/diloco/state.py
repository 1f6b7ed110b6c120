"""Islands in checkpoints, where they add to the keys of checkpoint/state.py:

    model.{parameter}                                      is then the outer weight, spread over all ranks
    diloco.momentum.{parameter}                            its momentum, spread alike
    diloco.common.{parameter}                              R, sharded over an island's ranks, the same on all islands
    island.{i}.inner.{parameter}                           island i's own weights, sharded like R
    island.{i}.counts, island.{i}.values                   what its synchronizations count; its loss scale and losses
    island.{i}.optimizer.., island.{i}.secondary..         moments and kept weights of every island but the first

So any layout without islands reads the outer weights and the first island's moments. Other numbers of islands keep the
outer weights and momentum: inner weights begin at the outer ones, and island j takes the moments of island j modulo the
number there was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazpp.base.files import DamagedError
from megazpp.checkpoint.parts import ErrorFeedback, Weights, as_tensor, from_tensor
from megazpp.checkpoint.state import MODEL, OPTIMIZER, SECONDARY, RunValues, Saved, StatePart, Tensors, under
from megazpp.diloco.outer import Islands
from megazpp.model.gpt import GPTModel

COUNTS, VALUES = "counts", "values"
COMMON, MOMENTUM = "diloco.common.", "diloco.momentum."


def island_parts(parts: Sequence[StatePart], islands: Islands, model: GPTModel, values: RunValues) -> list[StatePart]:
    """The parts of a training on islands, of those of one without (`training_parts`)."""
    own, found = IslandState(islands, model, values), list[StatePart]()
    for part in parts:
        if isinstance(part, ErrorFeedback):
            part.sources.append(islands.error_feedback)
        found.append(OfIsland(part, own) if part.prefix in (OPTIMIZER, SECONDARY) else part)
    (index,) = (index for index, part in enumerate(found) if part.prefix == MODEL)
    found[index] = OuterWeights(own)
    return [own, *found]


class IslandState(StatePart):
    """Inner weights, outer momentum, R and counts; goes on before all that depends on the inner weights."""

    prefix = ""

    def __init__(self, islands: Islands, model: GPTModel, values: RunValues) -> None:
        self.islands, self.model, self._values, self.axis = islands, model, values, islands.axis
        self._own = f"island.{self.axis.rank}."
        self.source = 0  # the island of the checkpoint that this one's own state is read from
        self.same = True  # the checkpoint has as many islands
        self.restored = False  # inner weights and R are the checkpoint's

    def tensors(self) -> dict[str, torch.Tensor]:
        found = self._inner() | {f"{COMMON}{name}": weight for name, weight in self.islands.common().items()}
        found |= {f"{MOMENTUM}{name}": moment.clone() for name, moment in self.islands.momentum().items()}
        values = as_tensor(self._values.state_dict())
        return found | {f"{self._own}{COUNTS}": self.islands.counts(), f"{self._own}{VALUES}": values}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        count = sum(key.startswith("island.") and key.endswith(f".{COUNTS}") for key in saved)
        self.source, self.same = self.axis.rank % max(count, 1), count == self.axis.size
        targets = {f"{MOMENTUM}{name}": moment.zero_() for name, moment in self.islands.momentum().items()}
        if self.same:
            targets |= self._inner() | {f"{COMMON}{name}": weight for name, weight in self.islands.common().items()}
            own = (f"{self._own}{COUNTS}", f"{self._own}{VALUES}")
            targets |= super().targets({key: saved[key] for key in own if key in saved})
        return {key: value for key, value in targets.items() if key in saved}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        if not self.same:
            return ["islands begin at the outer weights: the checkpoint has other islands' own, or none"]
        needed = {f"{key}{name}" for key in (COMMON, f"{self._own}inner.") for name, _ in self.model.named_parameters()}
        if missing := sorted((needed | {f"{self._own}{COUNTS}", f"{self._own}{VALUES}"}) - loaded.keys()):
            raise DamagedError(f"the checkpoint of islands has no {missing[0]}")
        try:
            self._values.load_state_dict(from_tensor(loaded[f"{self._own}{VALUES}"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{self._own}{VALUES}: loss scale, losses or groups are damaged: {error!r}") from error
        counts = loaded[f"{self._own}{COUNTS}"]
        if counts.shape != self.islands.counts().shape:
            return ["islands begin at the outer weights: the checkpoint is of another --diloco-fragments"]
        self.islands.restore(under(COMMON, loaded), counts)
        self.restored = True
        return []

    def _inner(self) -> dict[str, torch.Tensor]:
        return {f"{self._own}inner.{name}": p.detach() for name, p in self.model.named_parameters()}


class OuterWeights(Weights):
    """The outer weights, in the place of the parameters."""

    def __init__(self, own: IslandState) -> None:
        super().__init__(own.model, own.islands.sharding)
        self._own = own

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: x.clone() for name, x in self._own.islands.weights().items()}  # --async-save takes no views

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        return self._own.islands.weights()

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        if not self._own.restored:
            self._own.islands.begin_at_outer_weights()
        self._own.restored = False
        return super().accept(loaded, iteration)


class OfIsland(StatePart):
    """A part that each island has for itself; the first one's keys are those of a training without islands."""

    prefix = ""

    def __init__(self, part: StatePart, own: IslandState) -> None:
        self._part, self._own = part, own

    def tensors(self) -> dict[str, torch.Tensor]:
        prefix = self._prefix(self._own.axis.rank)
        return {prefix + name: x for name, x in self._part.tensors().items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        if self._part.prefix == SECONDARY and not self._own.same:
            return {}  # they belong to inner weights
        prefix = self._prefix(self._own.source)
        own = {self._part.prefix + name: entry for name, entry in under(prefix, saved).items()}
        return {prefix + name: x for name, x in self._part.targets(own).items()}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        return self._part.accept(under(self._prefix(self._own.source), loaded), iteration)

    def _prefix(self, island: int) -> str:
        return (f"island.{island}." if island else "") + self._part.prefix
