"""Local steps in the training loop: what islands tell each other, and when.

Between two synchronizations nothing travels between islands, so what all ranks decide together elsewhere (to stop, to
end the job because of a NaN, to go back to a checkpoint) is decided where islands wait for each other anyway: after the
steps at which a synchronization's result is merged. Until then an island whose step is not finite leaves its weights
alone, and one that caught a signal goes on.
"""

from __future__ import annotations

import torch

from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE
from megazpp.training.anomalies import Guard
from megazpp.training.metrics import INNER_LOSS
from megazpp.training.objective import LanguageModelLoss
from megazpp.training.step import LaunchedStep
from megazpp.zero.diloco import DiLoCo


class LocalSteps:
    """Synchronizes islands after steps; every rank calls it after every step.

    Args:
        diloco: the islands' weights.
        objective: knows the tokens of a step.
        guard: finds what must not get into the weights.
        dims: the axes.
    """

    def __init__(self, diloco: DiLoCo, objective: LanguageModelLoss, guard: Guard, dims: ParallelDims) -> None:
        self.diloco, self._objective, self._guard, self._dims = diloco, objective, guard, dims
        self._losses, self._steps = torch.zeros(()), 0  # since islands met

    def after_step(self, launched: LaunchedStep, iteration: int, *, last: bool) -> bool:
        """Merge and send what is due after `iteration`; whether all islands have waited for each other.

        Args:
            last: of the training, which ends with a synchronization of everything.
        Raises:
            NotFiniteError: on all ranks, because of a step of some island since they last met.
        """
        diloco = self.diloco
        diloco.count(self._objective.tokens)
        self._losses, self._steps = launched.loss + self._losses.to(launched.loss.device), self._steps + 1
        meets = last or diloco.meets_at(iteration)
        if meets and self._meet(launched):
            return True
        with self._dims.timeline.span(COMPUTE, "synchronize"):
            if last:
                diloco.finish()
            else:
                diloco.after_step(iteration)
        return meets

    def _meet(self, launched: LaunchedStep) -> bool:
        """Agree with the other islands; whether all have gone back to a checkpoint."""
        launched.check()
        world = self._dims.world
        known = torch.tensor([*self._guard.found, 0.0], dtype=torch.float64)
        known[-1] = float(self._losses) / self._steps
        failed, back, losses = world.all_reduce_(known.to(self._losses.device)).tolist()
        launched.metrics = {**launched.metrics, INNER_LOSS: losses / world.size}
        self._losses, self._steps = torch.zeros(()), 0
        return self._guard.settle(failed=failed > 0, back=back > 0)
