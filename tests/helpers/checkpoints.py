"""Train a tiny GPT on CPU ranks, and save and load its checkpoints, without the package's training loop."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from helpers.training import CPU, Case, build_diloco, build_step
from torch.distributed.tensor import DTensor

from megazpp.checkpoint.checkpoints import Checkpoints, take_folder
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.checkpoint.read import LoadSource, choose_source, verify
from megazpp.checkpoint.state import RunValues, TrainState, training_parts
from megazpp.data.loader import MicroBatch
from megazpp.diloco.state import replica_group_parts
from megazpp.optim.config import ScheduleConfig
from megazpp.optim.schedule import Schedule, TrainingProgress, build_schedule
from megazpp.packed_weights.reader import FrozenPlace, open_frozen_place
from megazpp.parallel.dims import ParallelDims, open_axis
from megazpp.training.anomalies import LossHistory
from megazpp.training.loop import AfterStep


class Attempt:
    """One start of a run on this rank, from its build to its last step.

    Args:
        case: model, batches and parallelism of the run.
        scale: initial loss scale; None keeps the scaler's default.
        flags: fields of CheckpointConfig.

    Attributes:
        lines: lines that the run has logged on this rank.
    """

    def __init__(self, case: Case, *, scale: float | None = None, **flags: Any) -> None:
        self.case, self.config, self.lines = case, CheckpointConfig(**flags), list[str]()
        self.progress, self.losses = TrainingProgress(), LossHistory()
        self.step, self.dims = build_step(case)
        self.diloco = build_diloco(case, self.step, self.dims)
        self.step.scaler.scale = scale or self.step.scaler.scale
        model, sharding, optimizer = self.step.model, self.step.sharding, self.step.optimizer
        values = RunValues(optimizer, self.step.scaler, self.losses)
        parts = training_parts(model, sharding, optimizer, self.dims, values, seed=case.seed)
        if self.diloco is not None:
            parts = replica_group_parts(parts, self.diloco, model, values)
        self.state = TrainState(model, sharding, values, parts)
        self.axis, save = open_axis(self.dims), self.config.save
        self.folder = None if save is None else CheckpointFolder(save, "--save")
        self.checkpoints = Checkpoints(
            self.config, self.state, record_of(case), self.axis, self.lines.append, folder=self.folder
        )
        self.saves = AfterStep(self.checkpoints.save, self.config.save_interval, at_end=True)

    def load(self, *, restarted: bool = False) -> TrainingProgress:
        """Open the folder of --save, resume from a checkpoint if the flags name one, and return the progress.

        Without a checkpoint, the progress is a new run's. `restarted` is True if the launcher has restarted the run
        after a failure.
        """
        source = choose_source(self.config, restarted=restarted)
        if self.folder is not None:
            take_folder(self.folder, self.axis, self.lines.append)
        self.checkpoints.check_space()
        if (verified := verify(source, self.axis, self.lines.append)) is not None:
            self.progress = self.checkpoints.load(verified, schedule()).progress
        return self.progress

    def reload(self) -> None:
        """Load the latest checkpoint of --save, and so undo the steps that were trained after its save."""
        self.checkpoints._finish_writing()
        assert self.folder is not None
        verified = verify(LoadSource(self.folder), self.axis, self.lines.append)
        assert verified is not None
        self.progress = self.checkpoints.load(verified, schedule()).progress

    def train(self, steps: int, *, saves: bool = True, evaluates: bool = False) -> list[tuple[float, float]]:
        """Train up to step `steps`, and return (loss, gradient norm) of each step that this call has trained.

        With `saves`, a checkpoint is written every --save-interval steps and after the last step. With `evaluates`, the
        model runs an evaluation after each step, before the checkpoint of the step.
        """
        case, results = self.case, []
        while self.progress.iteration < steps:
            now = self.progress.iteration + 1
            batches = case.batches(now - 1, self.dims)
            result = self.step(batches, learning_rate=case.learning_rate, weight_decay=0.01, iteration=now)
            results.append((result.loss, result.grad_norm))
            self.losses.losses.append(result.loss)
            if self.diloco is not None:
                self.diloco.count(sum(batch.loss_mask.sum() for batch in batches) * self.dims.shard.size)
                self.diloco.after_step(now)
            done = case.global_batch * now
            self.progress = self.progress._replace(iteration=now, consumed_samples=done, scheduled_samples=done)
            if evaluates:
                self.evaluate(batches[0])
            if saves and self.folder is not None and self.saves.due(now, last=now == steps):
                self.checkpoints.save(self.progress)
        return results

    def evaluate(self, batch: MicroBatch) -> None:
        model = self.step.model.eval()
        with torch.no_grad():
            model(batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts)
        self.step.sharding.reshard()
        model.train()

    def fingerprint(self) -> dict[str, str]:
        """Return a hash of each tensor of the training state on this rank, by the tensor's key.

        The tensors include the states of the random generators. The hashes also cover the loss scaler and the losses.
        """
        tensors = self.state.tensors(optimizer=True, rng=True)
        found = {key: digest(x) for key, x in tensors.items()}
        return found | {"scale": str(self.step.scaler.state_dict()), "losses": str(self.losses.state_dict())}

    def whole(self) -> dict[str, str]:
        """Return hashes of the unsharded weights and optimizer moments, by key, to compare runs with different layouts.

        Rows that pad the vocabulary and the error feedback depend on the layout, so they are left out.
        """
        tensors = self.state.tensors(optimizer=True, rng=False)
        padded, rows = self.state.padded(tensors), self.case.vocab_size
        full = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in tensors.items()}
        kept = {key: x[:rows] if key in padded else x for key, x in full.items() if not key.startswith("feedback.")}
        return {key: digest(x) for key, x in kept.items()}


class Outcome(NamedTuple):
    """The result of a training run on one rank, as `run` returns it.

    Attributes:
        start: progress after the checkpoint was loaded.
        loaded: hashes of the training state after the checkpoint was loaded, by key.
        steps: (loss, gradient norm) of each step.
        state: hashes of the training state after the last step, by key.
        lines: lines that the run has logged on this rank.
        replica_group: index of this rank's replica group under DiLoCo; 0 otherwise.
    """

    start: TrainingProgress
    loaded: dict[str, str]
    steps: list[tuple[float, float]]
    state: dict[str, str]
    lines: list[str]
    replica_group: int

    @property
    def notes(self) -> list[str]:
        return [line for line in self.lines if "note:" in line]


def run(
    case: Case, steps: int, *, restarted: bool = False, evaluates: bool = False, whole: bool = False, **flags: Any
) -> Outcome:
    """Train up to step `steps`, resuming from a checkpoint if the flags name one, and return the outcome.

    Args:
        case: model, batches and parallelism of the run.
        steps: iteration at which the run ends.
        restarted: True if the launcher has restarted the run after a failure.
        evaluates: True to evaluate the model after each step.
        whole: True to hash unsharded weights and moments; otherwise the tensors of this rank are hashed.
        flags: fields of CheckpointConfig.
    """
    attempt = Attempt(case, **flags)
    hashes = attempt.whole if whole else attempt.fingerprint
    start, loaded, results = attempt.load(restarted=restarted), hashes(), attempt.train(steps, evaluates=evaluates)
    attempt.checkpoints.finish()
    return Outcome(start, loaded, results, hashes(), attempt.lines, attempt.dims.replica_group.rank)


def local_part(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def digest(x: torch.Tensor) -> str:
    """Return the hash of the bytes of `x` on this rank: of its shard if `x` is a DTensor."""
    return hashlib.sha1(local_part(x).contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def record_of(case: Case, **values: Any) -> CheckpointMetadata:
    """Return the contents of a checkpoint's run.json for a run of `case` before its first step.

    `values` replaces fields of the contents.
    """
    flags = dataclasses.asdict(case.model) | dataclasses.asdict(case.optimizer)
    flags |= {"objective": "reward"} if case.scalar_head else {}
    known: dict[str, Any] = {"progress": TrainingProgress(), "schedule": schedule().state_dict(), "flags": flags}
    known |= {"scaler": {}, "groups": [], "vocab_size": case.vocab_size, "tokenizer": "ids", "layout": {"tp": case.tp}}
    return CheckpointMetadata(**known | values)


@functools.cache
def schedule() -> Schedule:
    config = ScheduleConfig(lr=1e-2)
    return build_schedule(config, weight_decay=0.01, train_iters=10, train_samples=None, global_batch_size=16)


def frozen_place(dims: ParallelDims, say: Callable[[str], None] = lambda line: None) -> FrozenPlace:
    return open_frozen_place(dims, CPU, say=say)
