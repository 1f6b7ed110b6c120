"""Loading of checkpoints: choose the checkpoint that a run starts from, check it, and fill the run's state.

Other programs use it to load only the weights. A load has three steps. It verifies the files, then compares the
checkpoint with the run's flags, and only then changes the run's state. This file has more than 300 lines so that these
steps can be read in one place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from megazpp.base.files import DamagedError
from megazpp.base.program import GIGA
from megazpp.checkpoint.checksums import checkpoint_digest, verify_files
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, TRACKER, CheckpointFolder
from megazpp.checkpoint.metadata import (
    CheckpointMetadata,
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
from megazpp.checkpoint.weights import WHOLE_WEIGHTS, WeightOpener, check_weights
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import LossScaler
from megazpp.optim.schedule import Schedule, TrainingProgress
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, open_axis, raise_on_all_ranks
from megazpp.zero.sharding import Sharding

T = TypeVar("T")


class LoadSource(NamedTuple):
    """The choice of a checkpoint in a folder, and of the parts to load from it.

    Attributes:
        folder: folder of checkpoints.
        iteration: iteration to load (--ckpt-step); None for the iteration in the tracker file.
        continues: True to resume the checkpoint's run; False (--finetune) to start a new run with its weights.
        optimizer: True to load the optimizer states.
        rng: True to load the states of the random generators.
        fallback: True to load the newest undamaged checkpoint before the requested one if that is damaged
            (--load-fallback).
        opener: opener of the weights.
    """

    folder: CheckpointFolder
    iteration: int | None = None
    continues: bool = True
    optimizer: bool = True
    rng: bool = True
    fallback: bool = False
    opener: WeightOpener = WHOLE_WEIGHTS

    def candidates(self) -> list[int]:
        """Return the iterations to try, with the requested one first.

        Without --load-fallback, only the requested iteration is returned. If the folder has no checkpoint, the list is
        empty.

        Raises:
            DamagedError: the checkpoint that the tracker file names is missing, and --load-fallback is not set.
            ValueError: the folder has no checkpoint of --ckpt-step, or it is a single checkpoint instead of a folder
                of checkpoints.
        """
        # find the requested iteration
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
        # add the earlier ones, the newest first
        return [] if wanted is None else [wanted, *(i for i in reversed(found) if i < wanted and self.fallback)]

    def continues_records_of(self, record: CheckpointMetadata, config: CheckpointConfig) -> bool:
        """Return whether a run with these flags also continues the run folder and the wandb run of the checkpoint.

        It does so only if it saves to the folder that it loads from. A run that resumes and saves elsewhere, or not at
        all, is a fork: its rows and flags must not mix with those of the original.
        """
        save = config.save
        if save is None and config.save_to_run_dir and record.run_dir is not None:
            save = str(Path(record.run_dir) / "checkpoints")
        return self.continues and save is not None and same_folder(save, self.folder.path)

    @property
    def checkpoint(self) -> Path:
        """The path of the requested checkpoint. The source must have one."""
        return self.folder.of(self.candidates()[0])


def same_folder(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths are the same folder, which need not exist; `~` is expanded."""
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def saves_where_it_loads(config: CheckpointConfig) -> bool:
    """Return whether --save and --load are the same folder."""
    return config.save is not None and config.load is not None and same_folder(config.save, config.load)


def choose_source(
    config: CheckpointConfig, *, restarted: bool, opener: WeightOpener = WHOLE_WEIGHTS
) -> LoadSource | None:
    """Choose by the flags which checkpoint a run starts from; None to start from scratch.

    Args:
        config: checkpoint flags.
        restarted: True if the launcher restarted this job after a fault. The job then resumes from its own checkpoints
            in --save, if there are any. A job that is queued again with the same command does so too.
        opener: opener of the weights.
    Raises:
        ValueError: --save has checkpoints of another run, --finetune has the same folder for --save and --load, or
            --load has no checkpoint and --exit-on-missing-checkpoint is set.
    """
    # check --save
    choices: dict[str, Any] = {"fallback": config.load_fallback, "opener": opener}
    if config.save is not None:
        own = CheckpointFolder(config.save, "--save")
        own.check_not_inside()
        if config.finetune and saves_where_it_loads(config):
            raise ValueError(
                f"--finetune starts a new run: --save {config.save} cannot be the folder of --load {config.load}, "
                "because a restart would resume from its checkpoints; choose another folder for --save"
            )
        there = own.iterations()
        if there and (restarted or _is_requeued(config, own)):
            return LoadSource(own, optimizer=config.save_optim, rng=config.save_rng, **choices)
        if there and not saves_where_it_loads(config):
            raise ValueError(
                f"--save {config.save} holds checkpoints already (up to iteration {there[-1]}): "
                f"pass --load {config.save} to resume from them, or choose another folder"
            )
    # apply the flags of --load
    if config.load is None:
        return None
    source = LoadSource(
        CheckpointFolder(config.load, "--load"),
        iteration=config.ckpt_step,
        continues=not config.finetune,
        optimizer=config.load_optim and not config.finetune,
        rng=config.load_rng and not config.finetune,
        **choices,
    )
    if config.exit_on_missing_checkpoint and not source.candidates():
        raise ValueError(f"--load {config.load} has no checkpoint ({source.folder.path / TRACKER} is missing)")
    return source


def _is_requeued(config: CheckpointConfig, own: CheckpointFolder) -> bool:
    """Return whether the checkpoints in --save come from a run that began with the same checkpoint in --load."""
    if config.load is None or saves_where_it_loads(config):
        return False
    flags: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # a damaged checkpoint shows nothing
        if (record := peek(LoadSource(own, fallback=True))) is not None:
            flags = record.flags
    same_start = all(flags.get(name) == getattr(config, name) for name in ("finetune", "ckpt_step"))
    return same_start and flags.get("load") is not None and same_folder(flags["load"], config.load)


def peek(source: LoadSource | None) -> CheckpointMetadata | None:
    """Return the metadata of the checkpoint that will probably be loaded, before its tensor files are verified.

    With --load-fallback, a later `verify` may find damaged tensors and choose another checkpoint.

    Args:
        source: folder and iteration; None for a run that starts from scratch.
    Returns:
        The metadata; None if there is no source or it has no checkpoint.
    Raises:
        ValueError: the requested checkpoint does not exist (see `LoadSource.candidates`), run.json cannot be read, or
            its base is missing (see `WeightOpener`).
    """
    candidates = [] if source is None else source.candidates()
    if source is None or not candidates:
        return None

    def read(iteration: int) -> CheckpointMetadata:
        verify_files(source.folder.of(iteration), names=[RECORD])
        return read_record(source.folder.of(iteration))

    iteration, record = first_sound(source, candidates, read, lambda line: None)
    source.opener.find_bases(source.folder.of(iteration), record)
    return record


def start_of(source: LoadSource | None, record: CheckpointMetadata | None) -> TrainingProgress:
    """Return the progress that a run starts with. `record` is the result of `peek` for `source`."""
    return record.progress if source is not None and record is not None and source.continues else TrainingProgress()


class Verified(NamedTuple):
    """A checkpoint whose files are undamaged.

    Attributes:
        source: source of the checkpoint.
        iteration: iteration of the checkpoint.
        record: metadata of the checkpoint.
        size_bytes: size of all files.
        seconds: time that their verification took.
    """

    source: LoadSource
    iteration: int
    record: CheckpointMetadata
    size_bytes: int
    seconds: float

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.source.folder.of(self.iteration)

    @property
    def start(self) -> TrainingProgress:
        """The progress with which a run starts that loads this checkpoint."""
        return start_of(self.source, self.record)


def verify(source: LoadSource | None, axis: MeshAxis, say: Callable[[str], None]) -> Verified | None:
    """Verify the files of the checkpoint to load, and of older ones with --load-fallback. All ranks call this.

    Args:
        source: choice of the checkpoint; None for a run that loads nothing.
        axis: axis over all ranks with a group for files, see `open_axis`.
        say: function that prints a line on rank 0.
    Returns:
        The first undamaged checkpoint; None if there is no source or it has no checkpoint.
    Raises:
        DamagedError: files are missing or have changed since the save. Every rank raises it.
    """
    if source is None:
        return None
    started, folder = time.perf_counter(), source.folder
    candidates = axis.share_object(raise_on_all_ranks(axis, source.candidates if axis.rank == 0 else list))
    if not candidates:
        say(f"WARNING: could not find the metadata file {folder.path / TRACKER}")
        say("    will not load any checkpoints and will start from random")
        return None

    def check(iteration: int) -> tuple[int, CheckpointMetadata]:
        """Verify a checkpoint's files on all ranks together, and return their size in bytes and the metadata."""
        path = folder.of(iteration)
        size = raise_on_all_ranks(axis, lambda: verify_files(path, rank=axis.rank, num_ranks=axis.size))
        digests = axis.share_object(axis.gather_objects((socket.gethostname(), checkpoint_digest(path))))
        if other := next((host for host, digest in digests if digest != digests[0][1]), None):
            raise DamagedError(f"{path} on {other} is not part of the same checkpoint as on {digests[0][0]}")
        record = raise_on_all_ranks(axis, lambda: read_record(path) if axis.rank == 0 else None)
        return size, axis.share_object(record)

    iteration, (size, record) = first_sound(source, candidates, check, say)
    return Verified(source, iteration, record, size, time.perf_counter() - started)


class Resumed(NamedTuple):
    """The position from which a run starts or resumes.

    Attributes:
        progress: progress of the run.
        schedule: schedule of learning rate and weight decay.
        checkpoint: folder of the loaded checkpoint; None if nothing was loaded.
    """

    progress: TrainingProgress
    schedule: Schedule
    checkpoint: Path | None


class CheckpointReader:
    """Reader that loads a verified checkpoint into the state of a run. Every rank calls `read`.

    Args:
        config: checkpoint flags.
        state: state of the run, which `read` fills.
        own: metadata of the run, which the checkpoint's metadata is compared with.
        axis: axis over all ranks with a group for files, see `open_axis`.
        say: function that prints a line on rank 0.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        state: TrainState,
        own: CheckpointMetadata,
        axis: MeshAxis,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._state, self._own, self._axis, self._say = config, state, own, axis, say

    def read(self, verified: Verified, schedule: Schedule) -> Resumed:
        """Load a checkpoint into the state.

        Args:
            verified: the checkpoint, and the parts to load.
            schedule: learning-rate schedule of this run's flags.
        Returns:
            Progress, schedule and folder to resume from.
        Raises:
            DamagedError: the tensors are not those of the checkpoint's model.
            ValueError: the checkpoint's model, tokenizer, optimizer or schedule does not fit this run's flags.
        """
        # compare the checkpoint with this run, then load its tensors
        started, source, record, path = time.perf_counter(), verified.source, verified.record, verified.path
        where = f"checkpoint from {source.folder.path} at iteration {verified.iteration}"
        self._say(f" loading {where}")
        schedule = self._check(source, record, schedule, path)
        for note in self._fill(source, record, path):
            self._say(f"note: {note}")
        seconds = verified.seconds + time.perf_counter() - started
        self._say(f"  successfully loaded {where} | {verified.size_bytes / GIGA:.3f} GB in {seconds:.2f} s")
        # find the position to resume from
        progress = verified.start._replace(stop_reason=None)
        position = progress.scheduled_samples * schedule_ratio(record, self._own)
        if not source.optimizer:  # as in Megatron-LM, new moments start a new schedule
            position = Fraction(0)
        progress = progress._replace(scheduled_samples=math.floor(position))
        return Resumed(progress, schedule, path)

    def _check(self, source: LoadSource, record: CheckpointMetadata, schedule: Schedule, checkpoint: Path) -> Schedule:
        """Compare a checkpoint's metadata with this run, print notes about other data, and return the schedule.

        Raises:
            ValueError: the checkpoint does not fit this run; the message names the flags.
        """
        # compare model and tokenizer
        own, is_whole = self._own, source.opener.is_whole
        if source.continues and is_whole(own) and not is_whole(record):
            raise ValueError(
                f"{checkpoint} contains only adapters. Pass --finetune to merge them into their base and start a new "
                "run"
            )
        check_same_model(record.flags, self._state.model.config, checkpoint)
        check_same_vocabulary(record, own.vocab_size, checkpoint)
        if None not in (own.tokenizer, record.tokenizer) and own.tokenizer != record.tokenizer:
            another = f"the tokenizer gives other ids than the tokenizer of {checkpoint}"
            if source.continues:
                raise ValueError(
                    f"{another}. Remove the tokenizer's flags to resume, or pass --finetune to start a new run"
                )
            self._say(f"WARNING: {another}")
        # refuse to load parts that the checkpoint lacks
        for part, what, name in (("optimizer", "optimizer", "optim"), ("rng", "rng state", "rng")):
            if getattr(source, part) and not getattr(record, f"has_{part}"):
                raise ValueError(
                    f"Unable to load {what} from checkpoint {checkpoint}: it was written with --no-save-{name}. "
                    f"Specify --no-load-{name} or --finetune"
                )
        # compare data, optimizer and schedule
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
        """Load the tensors into the state, and return a note for each part that the checkpoint cannot provide."""
        # open the checkpoint, and check names and shapes
        parts, weights = {"optimizer": source.optimizer, "rng": source.rng}, self._state.weights()
        reader = SafeReader(checkpoint)
        if not source.continues:
            reader = source.opener.open(checkpoint, record, self._axis)
        saved = raise_on_all_ranks(self._axis, reader.tensors)
        shapes, padded = {key: tuple(x.shape) for key, x in weights.items()}, self._state.padded(weights)
        check_weights(saved, shapes, padded, record, checkpoint, any_head=not source.continues)
        # read the tensors, and let each part of the state take over its own
        targets = self._state.targets(saved, **parts)
        reader.fill(targets, self._state.padded(targets), self._axis)
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
    """Return the first undamaged candidate, and the result of `work` for it.

    Args:
        source: source of the candidates.
        candidates: iterations to try, in this order; see `LoadSource.candidates`.
        work: function of an iteration, which raises DamagedError if the checkpoint is damaged. If ranks share the work,
            it must return or raise on all of them alike.
        say: function that prints a warning about each damaged candidate, if --load-fallback is set.
    Raises:
        DamagedError: all candidates are damaged, or there are none.
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
    folder: CheckpointFolder, iteration: int | None, *, fallback: bool = False, opener: WeightOpener = WHOLE_WEIGHTS
) -> tuple[LoadSource, CheckpointMetadata]:
    """Find a checkpoint to load only weights from, and read its metadata. Tensor files are not verified here.

    Args:
        folder: folder of checkpoints.
        iteration: iteration to load; None for the latest.
        fallback: True to use the newest undamaged checkpoint if the requested one is damaged.
        opener: opener of the weights.
    Returns:
        (source, metadata), as `load_weights` takes them.
    Raises:
        ValueError: there is no checkpoint, or its metadata cannot be read.
    """
    source = LoadSource(folder, iteration, False, optimizer=False, rng=False, fallback=fallback, opener=opener)
    record = peek(source)
    if record is None:
        raise ValueError(folder.without_checkpoint())
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
    """Load the weights of a checkpoint into a sharded model. All ranks call this.

    Args:
        model: sharded model to fill.
        sharding: sharding of the model.
        dims: mesh axes.
        source: source of the checkpoint, from `find_weights`.
        record: metadata of the checkpoint, from `find_weights`.
        vocab_size: number of tokens of the tokenizer in use.
        tokenizer: identity of the tokenizer in use; None to skip its comparison.
        say: function that prints a line on rank 0.
    Returns:
        Iteration of the loaded checkpoint.
    Raises:
        ValueError: the checkpoint is damaged, or its model or tokenizer differs.
    """
    # TrainState needs an optimizer and a loss scaler; nothing is loaded into these
    values = RunValues(torch.optim.SGD(model.parameters()), LossScaler(1.0))
    state = TrainState(model, sharding, values, [Weights(model, sharding)])
    own = dataclasses.replace(record, vocab_size=vocab_size, tokenizer=tokenizer or record.tokenizer)
    axis = open_axis(dims)
    reader = CheckpointReader(CheckpointConfig(), state, own, axis, say)
    verified = verify(source, axis, say)
    if verified is None:
        raise ValueError(f"{source.folder.name} has no checkpoint")
    reader.read(verified, Schedule(**record.schedule))
    return verified.iteration
