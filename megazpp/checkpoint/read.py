"""Reading: chooses the checkpoint that a run begins with, and loads its state; or the weights alone, to use a model.

One file of more than 300 lines: choosing, checking and filling follow each other, so that nothing is changed too early.
Damage is looked for first, then contradictions, and only then anything is changed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from megazpp.base.files import DamagedError
from megazpp.base.program import GIGA
from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, TRACKER, CheckpointFolder, iteration_of
from megazpp.checkpoint.metadata import (
    CheckpointMetadata,
    TrainingProgress,
    agreed_schedule,
    batch_size_of,
    check_same_model,
    check_same_optimizer,
    check_same_vocabulary,
    data_notes,
    describe_sizes,
    read_record,
    schedule_ratio,
)
from megazpp.checkpoint.parts import Weights
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import RunValues, TrainState
from megazpp.checkpoint.weights import check_weights, find_bases, open_weights
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import LossScaler
from megazpp.optim.schedule import Schedule
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, open_axis, raise_on_all_ranks
from megazpp.zero.sharding import Sharding

T = TypeVar("T")


class LoadSource(NamedTuple):
    """A checkpoint in a folder, and how much of it is loaded.

    Attributes:
        folder: of checkpoints.
        iteration: --ckpt-step; None for what the tracker names.
        continues: the run goes on; otherwise (--finetune) only weights are taken.
        optimizer, rng: what of it is loaded.
        fallback: a damaged checkpoint is passed over for the newest that is not.
        lora_base: --lora-base, for weights of a checkpoint of adapters.
    """

    folder: CheckpointFolder
    iteration: int | None = None
    continues: bool = True
    optimizer: bool = True
    rng: bool = True
    fallback: bool = False
    lora_base: tuple[str, ...] = ()

    def candidates(self) -> list[int]:
        """Iterations to try, the wanted one first; [] if there is no checkpoint.

        Raises:
            DamagedError: the wanted one is not there, and there is no --load-fallback.
            ValueError: --ckpt-step has no checkpoint, or the folder is that of one checkpoint.
        """
        self.folder.check_not_inside()
        found, wanted = self.folder.iterations(), self.iteration
        if wanted is not None and wanted not in found:
            step = "--ref-ckpt-step" if self.folder.flag == "--ref-load" else "--ckpt-step"
            listed = f"{self.folder.name} has iterations {', '.join(map(str, found)) or 'none'}"
            raise ValueError(f"{step} {wanted}: {self.folder.of(wanted)} is missing; {listed}")
        if wanted is None:
            try:
                wanted = self.folder.latest()
            except DamagedError:
                if not self.fallback or not found:
                    raise
                wanted = found[-1]
        others = [iteration for iteration in reversed(found) if iteration != wanted and self.fallback]
        return [] if wanted is None else [wanted, *others]

    @property
    def checkpoint(self) -> Path:
        """The folder of the wanted checkpoint, of which there is one."""
        return self.folder.of(self.candidates()[0])


def saves_where_it_loads(config: CheckpointConfig) -> bool:
    """Return whether --save and --load are the same folder."""
    if config.save is None or config.load is None:
        return False
    return Path(config.save).expanduser().resolve() == Path(config.load).expanduser().resolve()


def choose_source(config: CheckpointConfig, *, restarted: bool) -> LoadSource | None:
    """Choose what to begin with by the flags; None begins anew.

    Args:
        restarted: a fault ended an earlier attempt of this job: what it has saved comes first.
    Raises:
        ValueError: --save holds another run's checkpoints, or --load has none and must.
    """
    source = None if config.load is None else LoadSource(CheckpointFolder(config.load, "--load"))
    if config.save is not None:
        own = CheckpointFolder(config.save, "--save")
        own.check_not_inside()
        if config.finetune and saves_where_it_loads(config):
            raise ValueError(
                f"--finetune begins a new training: --save {config.save} cannot be the folder of --load {config.load}, "
                "from which a restart would go on; give it a folder of its own"
            )
        there = own.iterations()
        if there and restarted:
            source = LoadSource(own, optimizer=config.save_optim, rng=config.save_rng)
            return source._replace(fallback=config.load_fallback, lora_base=config.lora_base)
        if there and not saves_where_it_loads(config):
            raise ValueError(
                f"--save {config.save} holds checkpoints already (up to iteration {there[-1]}): "
                f"--load {config.save} goes on from there, or take another folder"
            )
    if source is None:
        return None
    source = source._replace(
        iteration=config.ckpt_step,
        continues=not config.finetune,
        optimizer=config.load_optim and not config.finetune,
        rng=config.load_rng and not config.finetune,
        fallback=config.load_fallback,
        lora_base=config.lora_base,
    )
    if config.exit_on_missing_checkpoint and not source.candidates():
        raise ValueError(f"--load {config.load} has no checkpoint ({source.folder.path / TRACKER} is missing)")
    return source


def peek(source: LoadSource | None) -> CheckpointMetadata | None:
    """The record of the checkpoint that will most likely be loaded, before all of it is verified; None without one.

    Raises:
        ValueError: see `LoadSource.candidates`; no record can be read; it holds adapters whose base is not there.
    """
    candidates = [] if source is None else source.candidates()
    if source is None or not candidates:
        return None

    def read(iteration: int) -> CheckpointMetadata:
        verify_files(source.folder.of(iteration), names=[RECORD])
        return read_record(source.folder.of(iteration))

    iteration, record = first_sound(source, candidates, read, lambda line: None)
    if record.adapters is not None:
        find_bases(source.folder.of(iteration), record.adapters, source.lora_base)
    return record


def start_of(source: LoadSource | None, record: CheckpointMetadata | None) -> TrainingProgress:
    """Return the progress that a run begins at; `record` is what `peek` found, None without a checkpoint."""
    return record.progress if source is not None and record is not None and source.continues else TrainingProgress()


class Resumed(NamedTuple):
    """The state that a run goes on with; `checkpoint` is the folder it came from."""

    progress: TrainingProgress
    schedule: Schedule
    checkpoint: Path


class CheckpointReader:
    """Reads for one run, which `own` describes, into `state`. Every rank calls every method; `say` prints on rank 0."""

    def __init__(
        self,
        config: CheckpointConfig,
        state: TrainState,
        own: CheckpointMetadata,
        axis: MeshAxis,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._state, self._own, self._axis, self._say = config, state, own, axis, say

    def read(self, source: LoadSource, schedule: Schedule) -> Resumed | None:
        """Go on from a checkpoint of `source`; None if there is none; `schedule` is this run's.

        Raises:
            DamagedError: files are missing or not as they were written.
            ValueError: it is another model's, or this run's flags contradict it.
        """
        axis, started, folder = self._axis, time.perf_counter(), source.folder
        candidates = axis.share_object(raise_on_all_ranks(axis, source.candidates if axis.rank == 0 else list))
        if not candidates:
            self._say(f"WARNING: could not find the metadata file {folder.path / TRACKER}")
            self._say("    will not load any checkpoints and will start from random")
            return None
        iteration, (size, record) = first_sound(source, candidates, lambda i: self._verify(folder.of(i)), self._say)
        self._say(f" loading checkpoint from {folder.path} at iteration {iteration}")
        schedule = self._check(source, record, schedule, folder.of(iteration))
        for note in self._fill(source, record, folder.of(iteration)):
            self._say(f"note: {note}")
        self._say(
            f"  successfully loaded checkpoint from {folder.path} at iteration {iteration}"
            f" | {size / GIGA:.3f} GB in {time.perf_counter() - started:.2f} s"
        )
        progress = record.progress._replace(stop_reason=None) if source.continues else TrainingProgress()
        position = progress.scheduled_samples * schedule_ratio(record, self._own)
        if not source.optimizer:  # Megatron's rule: new moments, new schedule
            position = Fraction(0)
        progress = progress._replace(scheduled_samples=math.floor(position))
        return Resumed(progress, schedule, folder.of(iteration))

    def _verify(self, checkpoint: Path) -> tuple[int, CheckpointMetadata]:
        """Return its size in bytes and its record; raises DamagedError on all ranks if a file is not as written."""
        axis = self._axis
        size = raise_on_all_ranks(axis, lambda: verify_files(checkpoint, rank=axis.rank, num_ranks=axis.size))
        record = raise_on_all_ranks(axis, lambda: read_record(checkpoint) if axis.rank == 0 else None)
        return size, axis.share_object(record)

    def _check(self, source: LoadSource, record: CheckpointMetadata, schedule: Schedule, checkpoint: Path) -> Schedule:
        own = self._own
        if source.continues and own.adapters is None and record.adapters is not None:
            raise ValueError(
                f"{checkpoint} contains only LoRA adapters. Pass --finetune to merge them into their base and start a "
                "new run"
            )
        check_same_model(record.flags, self._state.model.config, checkpoint)
        check_same_vocabulary(record, own.vocab_size, checkpoint)
        if None not in (own.tokenizer, record.tokenizer) and own.tokenizer != record.tokenizer:
            another = f"the tokenizer gives other ids than that of {checkpoint}"
            if record.adds_special_tokens is None:
                another += " (made by a version that did not read all of its files)"
            if source.continues:
                raise ValueError(
                    f"{another}. Remove the tokenizer's flags to resume, or pass --finetune to start a new run"
                )
            self._say(f"WARNING: {another}")
        for part, what, name in (("optimizer", "optimizer", "optim"), ("rng", "rng state", "rng")):
            if getattr(source, part) and not getattr(record, f"has_{part}"):
                raise ValueError(
                    f"Unable to load {what} from checkpoint {checkpoint}: it was written with --no-save-{name}. "
                    f"Specify --no-load-{name} or --finetune"
                )
        if source.continues:
            sizes, consumed = (batch_size_of(own), batch_size_of(record)), record.progress.consumed_samples
            for note in data_notes(record.flags, own.flags, checkpoint, consumed=consumed, batch_sizes=sizes):
                self._say(f"note: {note}")
        if not source.optimizer:
            return schedule
        check_same_optimizer(record.flags, own.flags, checkpoint)
        ratio = schedule_ratio(record, own)
        now, before = describe_sizes(own), describe_sizes(record)
        described = "" if now == before else f"this run has {now}; {checkpoint} had {before}"
        return agreed_schedule(record.schedule, schedule, self._config, checkpoint, ratio=ratio, sizes=described)

    def _fill(self, source: LoadSource, record: CheckpointMetadata, checkpoint: Path) -> list[str]:
        """Read the tensors and go on from them; a line for each thing that begins anew instead."""
        parts, weights = {"optimizer": source.optimizer, "rng": source.rng}, self._state.weights()
        reader = SafeReader(checkpoint)
        if not source.continues:
            reader = open_weights(checkpoint, record, self._axis, source.lora_base)
        saved = raise_on_all_ranks(self._axis, reader.tensors)
        shapes, padded = {key: tuple(x.shape) for key, x in weights.items()}, self._state.padded(weights)
        check_weights(saved, shapes, padded, record, checkpoint, any_head=not source.continues)
        targets = self._state.targets(saved, **parts)
        raise_on_all_ranks(self._axis, lambda: reader.fill(targets, self._state.padded(targets)))
        if source.optimizer:
            try:
                self._state.values.load_state_dict(vars(record))
            except (KeyError, TypeError, ValueError) as error:
                problem = f"loss scale, losses or groups are damaged: {error!r}"
                raise DamagedError(f"{checkpoint / RECORD}: {problem}") from error
        return self._state.accept(targets, iteration=record.progress.iteration, **parts)


def first_sound(
    source: LoadSource, candidates: Sequence[int], work: Callable[[int], T], say: Callable[[str], None]
) -> tuple[int, T]:
    """Return the first candidate that is not damaged, and the result of `work` for it; on all ranks together.

    Raises:
        DamagedError: none is sound, or the wanted one is not and there is no --load-fallback.
    """
    problem = DamagedError(f"{source.folder.name} has no checkpoint")
    for iteration in candidates:
        try:
            return iteration, work(iteration)
        except DamagedError as error:
            if source.fallback:
                say(f"WARNING: {error}")
            problem = error
    raise problem


def find_weights(
    folder: CheckpointFolder, iteration: int | None, *, fallback: bool = False, lora_base: tuple[str, ...] = ()
) -> tuple[LoadSource, CheckpointMetadata]:
    """A checkpoint without its optimizer, and what it says; its files are not verified yet.

    Raises ValueError if there is none, or it cannot be read.
    """
    source = LoadSource(folder, iteration, False, optimizer=False, rng=False, fallback=fallback, lora_base=lora_base)
    record = peek(source)
    if record is None:
        raise ValueError(f"{folder.name} has no checkpoint")
    return source, record


def load_weights(
    model: GPTModel,
    sharding: Sharding,
    dims: ParallelDims,
    source: LoadSource,
    record: CheckpointMetadata,
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
    values = RunValues(torch.optim.SGD(model.parameters()), LossScaler(1.0))  # which have no state
    state = TrainState(model, sharding, values, [Weights(model, sharding)])
    own = dataclasses.replace(record, vocab_size=vocab_size, tokenizer=tokenizer or record.tokenizer)
    reader = CheckpointReader(CheckpointConfig(), state, own, open_axis(dims), say)
    resumed = reader.read(source, Schedule(**record.schedule))
    if resumed is None:
        raise ValueError(f"{source.folder.name} has no checkpoint")
    iteration = iteration_of(resumed.checkpoint)
    assert iteration is not None
    return iteration
