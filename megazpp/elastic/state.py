"""Checkpoint state of elastic DiLoCo, which one group of the run saves for all groups.

The checkpoint has the keys of a DiLoCo run with one group (diloco/state.py), so every run and every tool can read the
outer weights from it:

    model.{parameter}            outer weights, in place of the group's own parameters
    diloco.momentum.{parameter}  outer momentum
    diloco.common.{parameter}    R, the common copy of the outer weights
    elastic.version              version of the outer weights, its id, and the number of merged steps
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazpp.base.files import DamagedError
from megazpp.checkpoint.state import MODEL, Saved, StatePart, Tensors, Weights, as_tensor, from_tensor, under
from megazpp.diloco.state import COMMON, MOMENTUM
from megazpp.elastic.loop import ElasticLoop
from megazpp.elastic.outer import WholeOuter
from megazpp.model.gpt import GPTModel

VERSION = "elastic.version"


def elastic_parts(parts: Sequence[StatePart], outer: WholeOuter, loop: ElasticLoop, model: GPTModel) -> list[StatePart]:
    """Return the checkpoint parts of an elastic run, made from the parts of a run without DiLoCo.

    Args:
        parts: the parts of a run without DiLoCo.
        outer: outer state of this rank.
        loop: elastic training loop, which knows the version of the outer state.
        model: the model.
    """
    found = [WholeOuterWeights(model, outer) if part.prefix == MODEL else part for part in parts]
    return [*found, WholeOuterState(outer, loop)]  # last, because it restores R, which `WholeOuterWeights` sets too


class WholeOuterState(StatePart):
    """R (the common copy of the outer weights), the outer momentum, and their version, as part of a checkpoint."""

    prefix = ""

    def __init__(self, outer: WholeOuter, loop: ElasticLoop) -> None:
        self._outer, self._loop = outer, loop

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of R, outer momentum and version as the tensors to save, by key of the checkpoint."""
        found = {f"{COMMON}{name}": value for name, value in self._outer.values("rows").items()}
        found |= {f"{MOMENTUM}{name}": value for name, value in self._outer.values("momentum").items()}
        return found | {VERSION: as_tensor([self._loop.version, self._loop.id, self._loop.merged])}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return tensors to load R, outer momentum and version into; {} if the checkpoint is not of an elastic run."""
        if VERSION not in saved:
            return {}
        version = torch.empty(saved[VERSION].size, dtype=torch.uint8)
        return {key: value for key, value in self.tensors().items() if key in saved} | {VERSION: version}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Restore R (the common copy of the outer weights), outer momentum and version from the loaded tensors.

        Return lines for the log. If the checkpoint is not of an elastic run, nothing changes.

        Raises:
            DamagedError: a parameter's R or momentum is missing in the checkpoint.
        """
        if VERSION not in loaded:
            return []
        for name, prefix in (("rows", COMMON), ("momentum", MOMENTUM)):
            if missing := self._outer.values(name).keys() - under(prefix, loaded).keys():
                raise DamagedError(
                    f"the checkpoint of an elastic run is damaged: {prefix}{min(missing)} is missing; "
                    "load an earlier checkpoint"
                )
            self._outer.set_values(name, under(prefix, loaded))
        self._loop.version, self._loop.id, self._loop.merged = from_tensor(loaded[VERSION])
        return []


class WholeOuterWeights(Weights):
    """The outer weights of DiLoCo, which a checkpoint has in place of the replica group's own parameters."""

    def __init__(self, model: GPTModel, outer: WholeOuter) -> None:
        super().__init__(model, outer.sharding)
        self._outer = outer

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the outer weights by parameter name, as DTensors sharded like the parameters."""
        return self._outer.values("outer")

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Set this group's outer weights and R to the loaded weights.

        R is the copy of the outer weights from which inner weights start. R differs from the outer weights by the last
        rounding errors of quantization. If the checkpoint also contains R, `WholeOuterState` later loads R from it.

        Returns:
            notes for the log about values that the checkpoint does not have.
        """
        self._outer.set_values("outer", loaded)
        self._outer.set_values("rows", loaded)
        return super().accept(loaded, iteration)
