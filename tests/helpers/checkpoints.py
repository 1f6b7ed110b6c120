"""Train a tiny GPT with checkpoints, with the product's own parts but without its loop."""

import dataclasses
import functools
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from helpers.training import CPU, Case, build_diloco, build_step
from torch.distributed.tensor import DTensor

from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.parts import training_parts
from megazpp.checkpoint.read import choose_source
from megazpp.checkpoint.record import RunRecord, TrainingProgress
from megazpp.checkpoint.state import RunValues, TrainState
from megazpp.checkpoint.weights import FrozenPlace
from megazpp.data.loader import MicroBatch
from megazpp.islands.state import island_parts
from megazpp.optim.schedule import Schedule, ScheduleConfig, build_schedule
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, open_axis
from megazpp.training.anomalies import LossHistory


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt at a run.

    Attributes:
        steps: iterations in all; an earlier checkpoint's are not repeated.
        flags: of CheckpointConfig.
        evaluates: whether each step's weights are used before a checkpoint is saved.
    """

    case: Case
    steps: int
    flags: dict[str, Any]
    evaluates: bool = False

    @property
    def config(self) -> CheckpointConfig:
        return CheckpointConfig(**self.flags)


class Attempt:
    """The parts of a job on this rank."""

    def __init__(self, job: Job) -> None:
        self.job, case = job, job.case
        self.step, self.dims = build_step(case)
        self.lines: list[str] = []
        self.diloco = build_diloco(case, self.step, self.dims)
        self.losses = LossHistory()
        model, sharding, optimizer = self.step.model, self.step.sharding, self.step.optimizer
        values = RunValues(optimizer, self.step.scaler, self.losses)
        self.parts = training_parts(model, sharding, optimizer, self.dims, values, seed=case.seed)
        if self.diloco is not None:
            self.parts = island_parts(self.parts, self.diloco, model, values)
        self.state = TrainState(model, sharding, values, self.parts)
        self.checkpoints = Checkpoints(job.config, self.state, template(job), shared_axis(self.dims), self.lines.append)

    def load(self, *, restarted: bool = False) -> TrainingProgress:
        source = choose_source(self.job.config, restarted=restarted)
        self.checkpoints.open()
        resumed = self.checkpoints.load(source, schedule()) if source else None
        return resumed.progress if resumed else TrainingProgress()

    def train(self, progress: TrainingProgress) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each step from `progress` on; dropout draws, and so do others."""
        case, results = self.job.case, []
        size = case.global_batch // self.dims.data_size // case.micro_batches
        while progress.iteration < self.job.steps:
            index = progress.iteration
            firsts = [(m * self.dims.data_size + self.dims.data_rank) * size for m in range(case.micro_batches)]
            batches = [case.batch(index, first, size) for first in firsts]
            result = self.step(batches, learning_rate=case.learning_rate, weight_decay=0.01, iteration=index + 1)
            results.append((result.loss, result.grad_norm))
            self.losses.losses.append(result.loss)
            if self.diloco is not None:
                self.diloco.count(sum(batch.loss_mask.sum() for batch in batches) * self.dims.shard.size)
                self.diloco.after_step(index + 1)
            random.random(), np.random.rand()
            done = case.global_batch * (index + 1)
            progress = progress._replace(iteration=index + 1, consumed_samples=done, scheduled_samples=done)
            if self.job.evaluates:
                self.evaluate(batches[0])
            self.checkpoints.after_step(progress, last=progress.iteration == self.job.steps)
        self.checkpoints.finish()
        return results

    def evaluate(self, batch: MicroBatch) -> None:
        model = self.step.model.eval()
        with torch.no_grad():
            model(batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts)
        self.step.sharding.free_gathered()
        model.train()

    def fingerprint(self) -> dict[str, str]:
        """What every bit of the state hashes to on this rank, and the next draw of every generator."""
        tensors = self.state.tensors(optimizer=True, rng=True)
        found = {key: digest(x.to_local() if isinstance(x, DTensor) else x) for key, x in tensors.items()}
        return found | {"scale": str(self.step.scaler.state_dict()), "losses": str(self.losses.state_dict())}

    def whole(self) -> dict[str, str]:
        """What weights and moments in full hash to, padding of the vocabulary left out."""
        tensors = self.state.tensors(optimizer=True, rng=False)
        padded, rows = self.state.padded(tensors), self.job.case.vocab_size
        full = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in tensors.items()}
        return {
            key: digest(x[:rows] if key in padded else x) for key, x in full.items() if not key.startswith("feedback.")
        }


def digest(x: torch.Tensor) -> str:
    return hashlib.sha1(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def run(job: Job, *, restarted: bool = False) -> dict[str, Any]:
    """Train; what came of it on this rank."""
    attempt = Attempt(job)
    progress = attempt.load(restarted=restarted)
    results = attempt.train(progress)
    return {"start": progress, "steps": results, "state": attempt.fingerprint(), "lines": attempt.lines}


def run_each(jobs: list[Job]) -> list[dict[str, Any]]:
    """Several jobs after each other."""
    return [run(job) for job in jobs]


def run_all(jobs: list[Job]) -> list[dict[str, Any]]:
    """Several jobs after each other: of each the whole state it began with and came to, losses, lines, its island."""
    results = []
    for job in jobs:
        attempt = Attempt(job)
        progress = attempt.load()
        loaded = attempt.whole()
        losses = [loss for loss, _ in attempt.train(progress)]
        end = attempt.whole() if losses else loaded
        island = attempt.dims.island.rank
        results.append({"loaded": loaded, "losses": losses, "end": end, "lines": attempt.lines, "island": island})
    return results


def template(job: Job) -> RunRecord:
    flags = dataclasses.asdict(job.case.model) | dataclasses.asdict(job.case.optimizer)
    return RunRecord(
        progress=TrainingProgress(),
        scaler={},
        groups=[],
        schedule=schedule().state_dict(),
        flags=flags | ({"objective": "reward"} if job.case.scalar_head else {}),
        vocab_size=job.case.vocab_size,
        tokenizer="ids",
        layout={"tp": job.case.tp},
    )


@functools.cache
def schedule() -> Schedule:
    config = ScheduleConfig(lr=1e-2)
    return build_schedule(config, weight_decay=0.01, train_iters=10, train_samples=None, global_batch_size=16)


@functools.cache
def _axis() -> list[MeshAxis]:
    return []


def frozen_place(dims: ParallelDims, say: Callable[[str], None] = lambda line: None) -> FrozenPlace:
    """Where frozen models live, with the axis of checkpoints."""
    return FrozenPlace(dims=dims, device=CPU, axis=dims.twin("local", "frozen"), files=shared_axis(dims), say=say)


def shared_axis(dims: ParallelDims) -> MeshAxis:
    """The axis of checkpoints, made once in this worker."""
    if not _axis():
        _axis().append(open_axis(dims))
    return _axis()[0]
