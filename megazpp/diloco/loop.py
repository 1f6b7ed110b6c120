"""DiLoCo in the training loop: when replica groups synchronize, and when they make decisions together.

Between two synchronizations, the replica groups of DiLoCo do not communicate. Two decisions concern all ranks: to stop,
and to end the job because of a NaN or Inf. The ranks make these decisions after steps at which groups merge new outer
weights into their inner weights, because a merge makes the groups wait for each other anyway. Until then, a group whose
loss or gradient norm is not finite skips its update. After a stop signal, the groups synchronize earlier (`EarlyStop`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from megazpp.diloco.outer import ReplicaGroups
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.store import wait_until
from megazpp.parallel.timeline import COMPUTE
from megazpp.parallel.worker import Worker
from megazpp.training.anomalies import Guard
from megazpp.training.loop import StopConditions
from megazpp.training.metrics import INNER_LOSS
from megazpp.training.objective import LanguageModelLoss, Objective
from megazpp.training.step import LaunchedStep

STOP_POLL_SECONDS = 1.0  # interval at which a rank reads in the store whether any rank has to stop


class EarlyStop:
    """The agreement of all ranks on a step at which groups synchronize early, because a rank has to stop.

    A thread of each rank checks the stop conditions of its rank, and reads in the job's store whether another rank has
    to stop. Once any rank has to stop, the thread of each rank writes to the store the number of the step that its rank
    has begun. The largest of these numbers is the step after which all groups synchronize and stop.

    A rank that has taken the step whose number its thread has written waits for the numbers of all ranks before it
    begins another step. This wait ends, because the threads write without waiting for a collective.

    Args:
        stops: stop signal and time limit of this rank.
        worker: this rank, with the store.
    """

    def __init__(self, stops: StopConditions, worker: Worker) -> None:
        self._stops = stops
        store: Any = worker.store
        # `clone` opens a second connection, because another thread may be blocked in a call on the first one
        self._store = dist.PrefixStore(f"megazpp/early_stop/{worker.restarts}", store.clone())
        self._mine, self._keys = str(worker.rank), [str(rank) for rank in range(worker.world_size)]
        # `_begun`: number of the step that this rank has begun. The thread sets `_written` to True just before it
        # writes this number to the store. From then on `_begun` stays the same. The lock protects both attributes.
        self._lock, self._begun, self._written = threading.Lock(), 0, False

    def begin(self, progress: TrainingProgress) -> TrainingProgress:
        """Start this rank's thread, before the first step of the run, and return `progress` unchanged."""
        self._begun = progress.iteration + 1
        threading.Thread(target=self._ask, args=(STOP_POLL_SECONDS,), name="megazpp-early-stop", daemon=True).start()
        return progress

    def is_at(self, iteration: int) -> bool:
        """Return True if all groups synchronize and stop after step `iteration`, which this rank has just taken.

        If this rank's thread has written `iteration` or an earlier step to the store, the method first waits until the
        threads of all ranks have written their steps.
        """
        with self._lock:
            if not self._written:
                self._begun = iteration + 1
                return False
        if iteration < self._begun:
            return False
        wait_until(lambda: self._store.check(self._keys))
        return iteration == max(int(self._store.get(key)) for key in self._keys)

    def _ask(self, poll_seconds: float) -> None:
        """Wait until this rank or another one has to stop, and write to the store the step that this rank has begun.

        This is the body of the thread. It reads the store every `poll_seconds`.
        """
        with contextlib.suppress(dist.DistError):  # the process that hosts the store has ended
            while not (self._stops.wants_to_stop or self._store.check(["stop"])):
                time.sleep(poll_seconds)
            self._store.set("stop", "")
            with self._lock:
                self._written = True
            self._store.set(self._mine, str(self._begun))


class LocalSteps:
    """The synchronization of DiLoCo's replica groups in the training loop.

    Args:
        replica_groups: outer weights of the model, and their synchronizations.
        objective: loss of language modeling, which counts the tokens of each step.
        guard: check of each step for a NaN, an Inf or a loss spike.
        dims: mesh axes of the job.
        early: agreement on an early synchronization after a stop signal.
    """

    def __init__(
        self, replica_groups: ReplicaGroups, objective: Objective, guard: Guard, dims: ParallelDims, early: EarlyStop
    ) -> None:
        assert isinstance(objective, LanguageModelLoss), (
            "DiLoCo supports only language modeling, and check_post_training refuses other objectives before"
        )
        self.replica_groups, self._objective, self._guard, self._dims = replica_groups, objective, guard, dims
        self._early = early
        # Sum of this group's losses, and number of its steps, since replica groups last waited for each other
        self._losses, self._steps = torch.zeros(()), 0

    def after_step(
        self, launched: LaunchedStep, progress: TrainingProgress, last: bool
    ) -> tuple[TrainingProgress, bool]:
        """Start the synchronizations and merge the outer weights that are due after a step. Every rank calls this.

        Args:
            launched: training step that was launched last.
            progress: iteration and samples after this step.
            last: True for the run's last step, after which all fragments synchronize.
        Returns:
            `progress`, and True if all replica groups have waited for each other. After such a step, the training loop
            (training/loop.py) may decide for all ranks whether the job stops.
        Raises:
            NotFiniteError: the loss or a gradient of some group was NaN or Inf since groups last waited for each other.
                All ranks raise this error.
        """
        replica_groups, iteration = self.replica_groups, progress.iteration
        replica_groups.count(self._objective.tokens)
        self._losses, self._steps = launched.loss + self._losses.to(launched.loss.device), self._steps + 1
        last = last or self._early.is_at(iteration)
        meets = last or replica_groups.meets_at(iteration)
        # If all groups wait for each other at this step, sum two numbers over all ranks: 1 for a rank whose guard has
        # seen a NaN or Inf, and the mean loss of the rank's group since the last such step.
        if meets:
            launched.check()  # wait for this step's results, so that the guard has checked this step too
            world = self._dims.world
            known = torch.tensor([self._guard.has_failed, float(self._losses) / self._steps], dtype=torch.float64)
            failed, losses = world.all_reduce_(known.to(self._losses.device)).tolist()
            launched.record.metrics = {**launched.record.metrics, INNER_LOSS: losses / world.size}
            self._losses, self._steps = torch.zeros(()), 0
            if failed:
                self._guard.end_job()
        with self._dims.timeline.span(COMPUTE, "synchronize"):
            if last:
                replica_groups.finish()
            else:
                replica_groups.after_step(iteration)
        return progress, meets
