"""Checkpoint state of elastic DiLoCo: outer weights in place of the parameters, R, the momentum, and the version.

The keys are those of diloco/state.py, with one group, so every run and every tool can read the outer weights.

    model.{parameter}            outer weights
    diloco.momentum.{parameter}  outer momentum
    diloco.common.{parameter}    R
    elastic.version              version, id, and merged steps of cells
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazpp.base.files import DamagedError
from megazpp.checkpoint.parts import Weights, as_tensor, from_tensor
from megazpp.checkpoint.state import MODEL, Saved, StatePart, Tensors, under
from megazpp.diloco.state import COMMON, MOMENTUM
from megazpp.elastic.loop import ElasticLoop
from megazpp.elastic.outer import WholeOuter
from megazpp.model.gpt import GPTModel

VERSION = "elastic.version"


def elastic_parts(parts: Sequence[StatePart], outer: WholeOuter, loop: ElasticLoop, model: GPTModel) -> list[StatePart]:
    """Return the checkpoint parts of an elastic run, made from the parts of a run without DiLoCo."""
    found = [WholeOuterWeights(model, outer) if part.prefix == MODEL else part for part in parts]
    return [*found, WholeOuterState(outer, loop)]  # the last one replaces R, which the weights set


class WholeOuterState(StatePart):
    """R, the outer momentum, and the version of a checkpoint."""

    prefix = ""

    def __init__(self, outer: WholeOuter, loop: ElasticLoop) -> None:
        self._outer, self._loop = outer, loop

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save, by key."""
        found = {f"{COMMON}{name}": value for name, value in self._outer.values("rows").items()}
        found |= {f"{MOMENTUM}{name}": value for name, value in self._outer.values("momentum").items()}
        return found | {VERSION: as_tensor([self._loop.version, self._loop.id, self._loop.merged])}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Return the tensors to load into; none if the checkpoint is of a run that was not elastic."""
        if VERSION not in saved:
            return {}
        version = torch.empty(saved[VERSION].size, dtype=torch.uint8)
        return {key: value for key, value in self.tensors().items() if key in saved} | {VERSION: version}

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Restore the state.

        Raises:
            DamagedError: the checkpoint lacks a key.
        """
        if VERSION not in loaded:
            return ["the elastic run starts at version 0, because the checkpoint is of another kind of run"]
        for name, prefix in (("rows", COMMON), ("momentum", MOMENTUM)):
            if missing := self._outer.values(name).keys() - under(prefix, loaded).keys():
                raise DamagedError(f"the checkpoint of an elastic run has no {prefix}{min(missing)}")
            self._outer.set_values(name, under(prefix, loaded))
        self._loop.version, self._loop.id, self._loop.merged = from_tensor(loaded[VERSION])
        return []


class WholeOuterWeights(Weights):
    """The outer weights of DiLoCo, which a checkpoint has in place of the replica group's own parameters."""

    def __init__(self, model: GPTModel, outer: WholeOuter) -> None:
        super().__init__(model, outer.sharding)
        self._outer = outer

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the outer weights, by parameter."""
        return self._outer.values("outer")

    def accept(self, loaded: Tensors, iteration: int) -> list[str]:
        """Set the outer weights and R to the loaded ones."""
        self._outer.set_values("outer", loaded)
        self._outer.set_values("rows", loaded)
        return super().accept(loaded, iteration)
