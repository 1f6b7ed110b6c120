"""Local steps in the training loop: what islands tell each other, and when.

Between two synchronizations nothing travels between islands, so what all ranks decide together elsewhere (to stop, to
end the job because of a NaN, to go back to a checkpoint) is decided where islands wait for each other anyway: after the
steps at which a synchronization's result is merged. Until then an island whose step is not finite leaves its weights
alone, and one that caught a signal goes on.
"""

from __future__ import annotations

import torch

from megazpp.base.program import GIGA
from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import Islands
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE
from megazpp.training.anomalies import Guard
from megazpp.training.metrics import INNER_LOSS
from megazpp.training.objective import LanguageModelLoss, Objective
from megazpp.training.step import LaunchedStep


class LocalSteps:
    """Synchronizes islands after steps; every rank calls it after every step, whose tokens `objective` knows."""

    def __init__(self, islands: Islands, objective: Objective, guard: Guard, dims: ParallelDims) -> None:
        assert isinstance(objective, LanguageModelLoss), "others are refused by check_post_training"
        self.islands, self._objective, self._guard, self._dims = islands, objective, guard, dims
        self._losses, self._steps = torch.zeros(()), 0  # since islands met

    def after_step(self, launched: LaunchedStep, iteration: int, last: bool) -> bool:
        """Merge and send what is due after `iteration`, after the last one all; True if all islands have waited.

        Raises:
            NotFiniteError: on all ranks, because of a step of some island since they last met.
        """
        islands = self.islands
        islands.count(self._objective.tokens)
        self._losses, self._steps = launched.loss + self._losses.to(launched.loss.device), self._steps + 1
        meets = last or islands.meets_at(iteration)
        if meets and self._meet(launched):
            return True
        with self._dims.timeline.span(COMPUTE, "synchronize"):
            if last:
                islands.finish()
            else:
                islands.after_step(iteration)
        return meets

    def _meet(self, launched: LaunchedStep) -> bool:
        """Agree with the other islands; whether all have gone back to a checkpoint."""
        launched.check()
        world = self._dims.world
        known = torch.tensor([*self._guard.found, 0.0], dtype=torch.float64)
        known[-1] = float(self._losses) / self._steps
        failed, back, losses = world.all_reduce_(known.to(self._losses.device)).tolist()
        launched.record.metrics = {**launched.record.metrics, INNER_LOSS: losses / world.size}
        self._losses, self._steps = torch.zeros(()), 0
        return self._guard.resolve(failed=failed > 0, back=back > 0)


def check_island_holds(shard_elements: int, dims: ParallelDims, device: torch.device, plan: DilocoPlan) -> None:
    """Raise ValueError if the states of an island's model need more than a GPU's memory; a CPU's is not checked.

    Args:
        shard_elements: elements of the model's weights on this rank.
    """
    available = device_bytes(device)
    if available is None:
        return
    # fp32 weights, gradients and two moments, R, error feedback, and an island's part of the outer states
    feedback = 1 if plan.feedback and plan.gradients is not None else 0
    each = 16 + 4 + feedback + (8 if plan.outer_momentum else 4) / dims.island.size
    needed = round(shard_elements * each)
    if needed > available:
        ranks = dims.shard.size * dims.tp.size
        raise ValueError(
            f"--diloco-steps {plan.steps}: each of the {dims.island.size} islands has a whole model on its {ranks} "
            f"ranks, whose states take {needed / GIGA:.1f} GB of a rank's {available / GIGA:.1f} GB; fewer "
            "--diloco-islands are larger ones"
        )


def device_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None of a CPU, which ranks share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
