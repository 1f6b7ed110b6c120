"""Reads one checkpoint, for a run that goes on or for a program that only uses the weights (generate, evaluate).

It looks for damage first, then for contradictions, and only then changes anything.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from megazpp.checkpoint.checksums import DamagedError, verify_files
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, TRACKER, CheckpointFolder
from megazpp.checkpoint.record import (
    RunRecord,
    TrainingProgress,
    agreed_schedule,
    check_same_model,
    check_same_optimizer,
    data_notes,
    read_record,
)
from megazpp.checkpoint.safe_reader import FittingPlanner, SafeReader
from megazpp.checkpoint.source import LoadSource, peek
from megazpp.checkpoint.state import MODEL, Saved, TrainState
from megazpp.checkpoint.together import open_axis, together
from megazpp.formatting import GIGA
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import ConstantLossScale
from megazpp.optim.schedule import Schedule
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import Sharding


class Resumed(NamedTuple):
    """What a run goes on with; `checkpoint` is where it came from."""

    progress: TrainingProgress
    schedule: Schedule
    checkpoint: Path


class CheckpointReader:
    """Reads for one run. Every rank calls every method.

    Args:
        config: the flags.
        state: the tensors to fill.
        own: what run.json would say of this run.
        axis: all ranks.
        say: prints a line on rank 0.
    """

    def __init__(
        self, config: CheckpointConfig, state: TrainState, own: RunRecord, axis: MeshAxis, say: Callable[[str], None]
    ) -> None:
        self._config, self._state, self._own, self._axis, self._say = config, state, own, axis, say

    def read(self, source: LoadSource, schedule: Schedule) -> Resumed | None:
        """Go on from a checkpoint of `source`; None if there is none.

        Args:
            schedule: this run's.
        Raises:
            DamagedError: files are missing or not as they were written.
            ValueError: it is another model's, or this run's flags contradict it.
        """
        axis, started, folder = self._axis, time.perf_counter(), source.folder.path
        candidates = axis.share_object(together(axis, source.candidates if axis.rank == 0 else list))
        if not candidates:
            self._say(f"WARNING: could not find the metadata file {folder / TRACKER}")
            self._say("    will not load any checkpoints and will start from random")
            return None
        iteration, size = self._first_sound(source, candidates)
        checkpoint = source.folder.of(iteration)
        self._say(f" loading checkpoint from {folder} at iteration {iteration}")
        record = axis.share_object(together(axis, lambda: read_record(checkpoint) if axis.rank == 0 else None))
        schedule = self._check(source, record, schedule, checkpoint)
        for note in self._fill(source, record, checkpoint):
            self._say(f"note: {note}")
        self._say(
            f"  successfully loaded checkpoint from {folder} at iteration {iteration}"
            f" | {size / GIGA:.3f} GB in {time.perf_counter() - started:.2f} s"
        )
        progress = record.progress._replace(stop_reason=None) if source.continues else TrainingProgress()
        if not source.optimizer:  # Megatron's rule: new moments, new schedule
            progress = progress._replace(scheduled_samples=0)
        return Resumed(progress, schedule, checkpoint)

    def _first_sound(self, source: LoadSource, candidates: list[int]) -> tuple[int, int]:
        """The first candidate whose files are all as they were written, and its size in bytes."""
        problem = DamagedError("no checkpoint")
        for iteration in candidates:
            try:
                verify = functools.partial(self._verify, source.folder.of(iteration))
                return iteration, together(self._axis, verify)
            except DamagedError as error:
                if source.fallback:
                    self._say(f"WARNING: {error}")
                problem = error
        raise problem

    def _verify(self, checkpoint: Path) -> int:
        size = verify_files(checkpoint, rank=self._axis.rank, num_ranks=self._axis.size)
        if self._axis.rank == 0:
            read_record(checkpoint)
        return size

    def _check(self, source: LoadSource, record: RunRecord, schedule: Schedule, checkpoint: Path) -> Schedule:
        own = self._own
        check_same_model(record.flags, self._state.model.config, checkpoint)
        if record.vocab_size != own.vocab_size:
            raise ValueError(f"the tokenizer has {own.vocab_size} tokens, that of {checkpoint} had {record.vocab_size}")
        if None not in (own.tokenizer, record.tokenizer) and own.tokenizer != record.tokenizer:
            another = f"the tokenizer gives other ids than that of {checkpoint}"
            if source.continues:
                raise ValueError(f"{another}: leave its flags away to go on with that one, or --finetune begins anew")
            self._say(f"WARNING: {another}")
        for wanted, there, what, name in (
            (source.optimizer, record.has_optimizer, "optimizer", "optim"),
            (source.rng, record.has_rng, "rng state", "rng"),
        ):
            if wanted and not there:
                raise ValueError(
                    f"Unable to load {what} from checkpoint {checkpoint}: it was written with --no-save-{name}. "
                    f"Specify --no-load-{name} or --finetune"
                )
        if source.continues:
            for note in data_notes(record.flags, own.flags, checkpoint):
                self._say(f"note: {note}")
        if not source.optimizer:
            return schedule
        check_same_optimizer(record.flags, own.flags, checkpoint)
        return agreed_schedule(record.schedule, schedule, self._config, checkpoint)

    def _fill(self, source: LoadSource, record: RunRecord, checkpoint: Path) -> list[str]:
        """Read the tensors and go on from them; a line for each thing that begins anew instead."""
        parts = {"optimizer": source.optimizer, "rng": source.rng}
        reader = SafeReader(checkpoint)
        saved = together(self._axis, reader.tensors)
        self._check_weights(saved, record, checkpoint)
        targets = self._state.targets(saved, **parts)
        planner, group = FittingPlanner(self._state.padded(targets)), self._axis.group
        together(self._axis, lambda: dcp.load(targets, storage_reader=reader, planner=planner, process_group=group))
        if source.optimizer:
            self._load_small(record, checkpoint)
        return self._state.accept(targets, saved, iteration=record.progress.iteration, **parts)

    def _check_weights(self, saved: Saved, record: RunRecord, checkpoint: Path) -> None:
        """Raises DamagedError where the saved weights are not those of the model that run.json describes."""
        own = self._state.weights()
        padded = self._state.padded(own)
        found = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith(MODEL)}
        for key in sorted(own.keys() | found.keys()):
            wanted, there = tuple(own[key].shape) if key in own else None, found.get(key)
            if wanted is None or there is None:
                problem = f"{key} has no place in it" if wanted is None else f"{key} is missing"
            elif there != wanted if key not in padded else there[1:] != wanted[1:]:
                problem = f"{key} has shape {there}, not {wanted}"
            elif key in padded and record.layout and there[0] < record.vocab_size:  # a converted one may have fewer
                problem = f"{key} has {there[0]} rows, the tokenizer has {record.vocab_size} tokens"
            else:
                continue
            raise DamagedError(f"{checkpoint}: the tensors are not of the model that {RECORD} describes: {problem}")

    def _load_small(self, record: RunRecord, checkpoint: Path) -> None:
        """What the optimizer remembers beside tensors."""
        try:
            self._state.load_scaler(record.scaler)
            if self._state.guard is not None and record.guard:
                self._state.guard.load_state_dict(record.guard)
            self._state.set_group_values(record.groups)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{checkpoint / RECORD}: loss scale, losses or groups are damaged: {error!r}") from error


def find_weights(
    folder: CheckpointFolder, iteration: int | None, *, fallback: bool = False
) -> tuple[LoadSource, RunRecord]:
    """A checkpoint without its optimizer, and what it says; its files are not verified yet.

    Args:
        iteration: None for what the tracker names.
        fallback: see `LoadSource`.
    Raises:
        ValueError: there is none, or it cannot be read.
    """
    source = LoadSource(folder, iteration, continues=False, optimizer=False, rng=False, fallback=fallback)
    record = peek(source)
    if record is None:
        raise ValueError(f"{folder.name} has no checkpoint")
    return source, record


def load_weights(
    model: GPTModel,
    sharding: Sharding,
    dims: ParallelDims,
    source: LoadSource,
    record: RunRecord,
    *,
    vocab_size: int,
    tokenizer: str | None = None,
    say: Callable[[str], None],
) -> int:
    """Fill the sharded model, on all ranks together; returns the iteration that the checkpoint is of.

    Args:
        record: as `find_weights` has read it.
        vocab_size, tokenizer: number of tokens and identity of the tokenizer in use.
        say: prints a line on rank 0.
    Raises:
        ValueError: the checkpoint is damaged, or another model's or tokenizer's.
    """
    nothing = torch.optim.SGD(model.parameters())  # has no state
    state = TrainState(model, sharding, nothing, ConstantLossScale(1.0), dims, seed=0)
    own = dataclasses.replace(record, vocab_size=vocab_size, tokenizer=tokenizer or record.tokenizer)
    reader = CheckpointReader(CheckpointConfig(), state, own, open_axis(dims), say)
    resumed = reader.read(source, Schedule(**record.schedule))
    if resumed is None:
        raise ValueError(f"{source.folder.name} has no checkpoint")
    return int(resumed.checkpoint.name.removeprefix("iter_"))
