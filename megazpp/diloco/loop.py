"""Local steps in the training loop: the decisions that replica groups make together, and when.

Between two synchronizations, the replica groups of DiLoCo do not communicate. Decisions that concern all ranks (to
stop, to end the job because of a NaN, to reload a checkpoint) are therefore made after the steps whose synchronization
is merged, because the groups wait for each other there anyway. Until then, a group whose step is not finite skips its
update, and a group that caught a signal continues to train.
"""

from __future__ import annotations

import torch

from megazpp.base.program import GIGA
from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import ReplicaGroups
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.timeline import COMPUTE
from megazpp.training.anomalies import Guard
from megazpp.training.metrics import INNER_LOSS
from megazpp.training.objective import LanguageModelLoss, Objective
from megazpp.training.step import LaunchedStep


class LocalSteps:
    """Synchronizes the replica groups after steps; every rank calls `after_step` after every step.

    Args:
        replica_groups: the outer weights and their synchronization.
        objective: the language model's loss, which counts the tokens of each step.
        guard: decides whether steps are taken, and ends the job or reloads a checkpoint.
        dims: mesh axes of the job.
    """

    def __init__(self, replica_groups: ReplicaGroups, objective: Objective, guard: Guard, dims: ParallelDims) -> None:
        assert isinstance(objective, LanguageModelLoss), "others are refused by check_post_training"
        self.replica_groups, self._objective, self._guard, self._dims = replica_groups, objective, guard, dims
        self._losses, self._steps = torch.zeros(()), 0  # summed losses and steps since the last synchronization

    def after_step(
        self, launched: LaunchedStep, progress: TrainingProgress, last: bool
    ) -> tuple[TrainingProgress, bool]:
        """Merge and start the synchronizations that are due after a step.

        Args:
            launched: the step.
            progress: progress after the step.
            last: True for the run's last step, after which all fragments synchronize.
        Returns:
            the progress, and True if all replica groups have waited for each other.
        Raises:
            NotFiniteError: a step of some group since the last synchronization was not finite; raised on all ranks.
        """
        replica_groups, iteration = self.replica_groups, progress.iteration
        replica_groups.count(self._objective.tokens)
        self._losses, self._steps = launched.loss + self._losses.to(launched.loss.device), self._steps + 1
        meets = last or replica_groups.meets_at(iteration)
        if meets:  # combine the decisions and losses of all groups
            launched.check()
            world = self._dims.world
            known = torch.tensor([*self._guard.found, 0.0], dtype=torch.float64)
            known[-1] = float(self._losses) / self._steps
            failed, back, losses = world.all_reduce_(known.to(self._losses.device)).tolist()
            launched.record.metrics = {**launched.record.metrics, INNER_LOSS: losses / world.size}
            self._losses, self._steps = torch.zeros(()), 0
            if self._guard.resolve(failed=failed > 0, back=back > 0):
                return progress, True  # all groups have reloaded a checkpoint
        with self._dims.timeline.span(COMPUTE, "synchronize"):
            if last:
                replica_groups.finish()
            else:
                replica_groups.after_step(iteration)
        return progress, meets


def check_replica_group_memory(shard_elements: int, dims: ParallelDims, device: torch.device, plan: DilocoPlan) -> None:
    """Check that a GPU's memory can hold the state of a replica group's model; a CPU's memory is not checked.

    Args:
        shard_elements: elements of the model's weights on this rank.
        dims: mesh axes of the job.
        device: device of this rank.
        plan: the DiLoCo plan.
    Raises:
        ValueError: the state needs more memory than the GPU has.
    """
    available = device_bytes(device)
    if available is None:
        return
    # bytes per element: fp32 weights, gradients and two moments; R; error feedback; this group's part of outer states
    feedback = 1 if plan.feedback and plan.gradients is not None else 0
    each = 16 + 4 + feedback + (8 if plan.outer_momentum else 4) / dims.replica_group.size
    needed = round(shard_elements * each)
    if needed > available:
        ranks = dims.shard.size * dims.tp.size
        raise ValueError(
            f"--diloco-steps {plan.steps}: each of the {dims.replica_group.size} replica groups has a whole model on "
            f"its {ranks} ranks, whose states take {needed / GIGA:.1f} GB of a rank's {available / GIGA:.1f} GB; use "
            "fewer --diloco-replica-groups, so that each group has more ranks"
        )


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None for a CPU, whose memory is shared by several ranks."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
