"""Load checkpoints: choose the checkpoint that a run starts from, check it, and fill the run's training state.

Programs without training, such as generate.py, use this file to load only the weights. A load has three steps. It
verifies the files, then compares the checkpoint with the run's flags, and only then changes the run's training state.
This is one file of more than 300 lines, so that these steps can be read in one place.
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
from megazpp.checkpoint.safe_reader import WHOLE_WEIGHTS, SafeReader, WeightOpener, check_weights
from megazpp.checkpoint.state import RunValues, TrainState, Weights
from megazpp.model.gpt import GPTModel
from megazpp.optim.config import LossScaleConfig
from megazpp.optim.optimizer import LossScaler
from megazpp.optim.schedule import Schedule, TrainingProgress
from megazpp.parallel.agreement import raise_on_all_ranks
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, open_axis
from megazpp.zero.sharding import Sharding

T = TypeVar("T")


class LoadSource(NamedTuple):
    """The choice of a checkpoint in a folder of checkpoints, and of the parts to load from it.

    Attributes:
        folder: folder of checkpoints.
        iteration: iteration of the checkpoint to load (--ckpt-step); None for the iteration in the tracker file.
        continues: True to resume the checkpoint's run; False (--finetune) to start a new run with its weights.
        optimizer: True to load the optimizer states.
        rng: True to load the states of the random generators.
        fallback: True to load an older checkpoint if the requested one is damaged (--load-fallback): the newest
            undamaged checkpoint before the requested one.
        opener: opener of the weights, for checkpoints that need weights of another checkpoint; see `WeightOpener`.
        was_empty: True if `folder` had no checkpoint at the time of this choice; see `check_still_chosen`.
    """

    folder: CheckpointFolder
    iteration: int | None = None
    continues: bool = True
    optimizer: bool = True
    rng: bool = True
    fallback: bool = False
    opener: WeightOpener = WHOLE_WEIGHTS
    was_empty: bool = False

    def candidates(self) -> list[int]:
        """Return the iterations of the checkpoints to try, in this order; [] if the folder has no checkpoint.

        The first is `iteration`, or without it the latest checkpoint. With --load-fallback, all earlier ones follow,
        the newest first. They also replace a latest checkpoint that is missing.

        Raises:
            DamagedError: the tracker file is damaged or names a missing checkpoint, and --load-fallback is not set or
                finds no other checkpoint.
            ValueError: the folder has no checkpoint of `iteration`, or the path is a file or a single checkpoint
                instead of a folder of checkpoints.
        """
        # ---- find the requested iteration
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
                # The checkpoint that the tracker names is missing. Later checkpoints may belong to a branch that the
                # run has left by --ckpt-step, so only an earlier one is loaded instead.
                with contextlib.suppress(DamagedError):  # a damaged tracker file names no iteration
                    tracked = self.folder.tracked()
                    found = [iteration for iteration in found if tracked is None or iteration < tracked]
                if not self.fallback or not found:
                    raise
                wanted = found[-1]
        # ---- return the requested iteration and, with --load-fallback, all earlier ones, the newest first
        return [] if wanted is None else [wanted, *(i for i in reversed(found) if i < wanted and self.fallback)]

    @property
    def checkpoint(self) -> Path:
        """The path of the requested checkpoint. The folder must have a checkpoint."""
        return self.folder.of(self.candidates()[0])


def same_folder(one: str | Path, other: str | Path) -> bool:
    """Return True if two paths are the same folder, whether it exists or not. `~` is expanded."""
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def saves_where_it_loads(config: CheckpointConfig) -> bool:
    """Return True if --save and --load are given and name the same folder."""
    return config.save is not None and config.load is not None and same_folder(config.save, config.load)


def choose_source(
    config: CheckpointConfig, *, restarted: bool, opener: WeightOpener = WHOLE_WEIGHTS
) -> LoadSource | None:
    """Choose the checkpoint that a run starts from, by its checkpoint flags.

    Args:
        config: checkpoint flags.
        restarted: True if the launcher has restarted this job after a fault. The job then resumes from its own
            checkpoints in --save, if there are any. A job that is queued again with the same command also does so.
        opener: opener of the weights; see `WeightOpener`.
    Returns:
        The choice; None if the run starts from scratch because no --load is given. The folder of --load may have no
            checkpoint, so that a run with a choice may start from scratch too.
    Raises:
        ValueError: --save has checkpoints of another run, --finetune has the same folder for --save and --load, or
            --load has no checkpoint and --exit-on-missing-checkpoint is set.
    """
    # ---- if --save has checkpoints already, resume from them or raise an error
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
    # ---- apply --load and the flags that select parts of the checkpoint
    if config.load is None:
        return None
    folder = CheckpointFolder(config.load, "--load")
    source = LoadSource(
        folder,
        iteration=config.ckpt_step,
        continues=not config.finetune,
        optimizer=config.load_optim and not config.finetune,
        rng=config.load_rng and not config.finetune,
        was_empty=not folder.iterations(),
        **choices,
    )
    if config.exit_on_missing_checkpoint and not source.candidates():
        raise ValueError(
            f"--load {config.load} has no checkpoint ({source.folder.path / TRACKER} is missing): correct the path, or "
            "leave out --exit-on-missing-checkpoint"
        )
    return source


def check_still_chosen(source: LoadSource | None, config: CheckpointConfig, *, restarted: bool) -> None:
    """Raise ValueError if `choose_source` would now choose another source, because another job has used --save.

    A job makes its choice, and completes its flags from the chosen checkpoint, before it locks the folder of --save. It
    may then wait for the lock while another job saves its first checkpoints there.

    Args:
        source: earlier choice of `choose_source`.
        config: checkpoint flags of this run, whose --save is locked by this job now.
        restarted: True if the launcher has restarted this job after a fault.
    """
    again = choose_source(config, restarted=restarted)
    before, now = (each and (each.folder.path, each.was_empty) for each in (source, again))
    if before != now:
        raise ValueError(
            f"another job has saved checkpoints to --save {config.save} since this job started: start this job again"
        )


def _is_requeued(config: CheckpointConfig, own: CheckpointFolder) -> bool:
    """Return True if --save has checkpoints of an earlier run of the same command, which was queued again.

    The command counts as the same if the earlier run had the --load folder, --ckpt-step and --finetune of this run.
    The result is False without --load, or if --load is the folder of --save.

    Args:
        config: checkpoint flags of this run.
        own: the folder of --save.
    """
    if config.load is None or saves_where_it_loads(config):
        return False
    flags: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # a damaged checkpoint does not show with which flags its run started
        if (record := peek(LoadSource(own, fallback=True))) is not None:
            flags = record.flags
    same_start = all(flags.get(name) == getattr(config, name) for name in ("finetune", "ckpt_step"))
    return same_start and flags.get("load") is not None and same_folder(flags["load"], config.load)


def peek(source: LoadSource | None) -> CheckpointMetadata | None:
    """Return the metadata of the checkpoint that a run will probably load, before its tensor files are verified.

    With --load-fallback, `verify` may later find damaged tensor files and choose another checkpoint.

    Args:
        source: choice of the checkpoint; None for a run that starts from scratch.
    Returns:
        The metadata; None if `source` is None or its folder has no checkpoint.
    Raises:
        ValueError: the requested checkpoint does not exist (see `LoadSource.candidates`), its run.json cannot be read,
            or the checkpoint with its base weights is missing (see `WeightOpener`).
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
    """Return the training progress with which a run starts: the checkpoint's if the run resumes it, otherwise zeros.

    Args:
        source: choice of the checkpoint; None for a run that starts from scratch.
        record: metadata of this checkpoint, the result of `peek`.
    """
    return record.progress if source is not None and record is not None and source.continues else TrainingProgress()


class Verified(NamedTuple):
    """A checkpoint whose files are verified to be undamaged.

    Attributes:
        source: choice of the checkpoint, and of the parts to load from it.
        iteration: iteration of the checkpoint. With --load-fallback, it may be older than the requested one.
        record: metadata of the checkpoint.
        size_bytes: size of all files of the checkpoint, in bytes.
        seconds: time that the verification of the files took, in seconds.
    """

    source: LoadSource
    iteration: int
    record: CheckpointMetadata
    size_bytes: int
    seconds: float

    @property
    def path(self) -> Path:
        """The path of the checkpoint's folder, such as runs/a/iter_0000100."""
        return self.source.folder.of(self.iteration)

    @property
    def start(self) -> TrainingProgress:
        """The training progress with which a run that loads this checkpoint starts; zeros with --finetune."""
        return start_of(self.source, self.record)


def verify(source: LoadSource | None, axis: MeshAxis, say: Callable[[str], None]) -> Verified | None:
    """Verify the files of the checkpoint to load. With --load-fallback, try older ones while files are damaged.

    All ranks call this, and together verify every file.

    Args:
        source: choice of the checkpoint; None for a run that loads nothing.
        axis: axis over all ranks with a process group for file operations; see `open_axis`.
        say: function that prints a line on rank 0.
    Returns:
        The first undamaged checkpoint; None if `source` is None or its folder has no checkpoint.
    Raises:
        DamagedError: files are missing or have changed since the save. All ranks raise this error.
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
        """Verify the files of an iteration's checkpoint on all ranks; return their total bytes and its metadata.

        Raises:
            DamagedError: files are missing or have changed, or two hosts have files of different saves.
        """
        path = folder.of(iteration)
        size = raise_on_all_ranks(axis, lambda: verify_files(path, rank=axis.rank, num_ranks=axis.size))
        digests = axis.share_object(axis.gather_objects((socket.gethostname(), checkpoint_digest(path))))
        if other := next((host for host, digest in digests if digest != digests[0][1]), None):
            raise DamagedError(
                f"{path} on {other} is not part of the same checkpoint as on {digests[0][0]}: copy the checkpoint's "
                "files of the same save to both hosts"
            )
        record = raise_on_all_ranks(axis, lambda: read_record(path) if axis.rank == 0 else None)
        return size, axis.share_object(record)

    iteration, (size, record) = first_sound(source, candidates, check, say)
    return Verified(source, iteration, record, size, time.perf_counter() - started)


class Resumed(NamedTuple):
    """The position from which a run starts or resumes.

    Attributes:
        progress: training progress at the start.
        schedule: schedule of learning rate and weight decay for the rest of the run.
        checkpoint: folder of the loaded checkpoint; None if the run starts from scratch.
    """

    progress: TrainingProgress
    schedule: Schedule
    checkpoint: Path | None


class CheckpointReader:
    """Reader that compares a verified checkpoint with a run and loads it into the run's training state.

    Args:
        config: checkpoint flags of the run.
        state: training state of the run, which `read` fills.
        own: metadata of the run, with which the checkpoint's metadata is compared.
        axis: axis over all ranks with a process group for file operations; see `open_axis`.
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
        """Compare a checkpoint with the run, and load it into the run's training state. All ranks call this.

        Args:
            verified: the checkpoint, and the choice of its parts to load.
            schedule: learning-rate schedule of this run's flags.
        Returns:
            Training progress and schedule to resume from, and the checkpoint's folder.
        Raises:
            DamagedError: tensors in the checkpoint do not belong to the model that its metadata describes.
            ValueError: the checkpoint's model, tokenizer, optimizer or schedule does not fit this run's flags.
        """
        # ---- compare the checkpoint with this run, then load its tensors
        started, source, record, path = time.perf_counter(), verified.source, verified.record, verified.path
        where = f"checkpoint from {source.folder.path} at iteration {verified.iteration}"
        self._say(f" loading {where}")
        schedule = self._check(source, record, schedule, path)
        for note in self._fill(source, record, path):
            self._say(f"note: {note}")
        seconds = verified.seconds + time.perf_counter() - started
        self._say(f"  successfully loaded {where} | {verified.size_bytes / GIGA:.3f} GB in {seconds:.2f} s")
        # ---- find this run's position in its learning-rate schedule
        progress = verified.start._replace(stop_reason=None)
        position = progress.scheduled_samples * schedule_ratio(record, self._own)
        if not source.optimizer:  # as in Megatron-LM, a run with new moments starts its schedule from the beginning
            position = Fraction(0)
        # ---- if --seq-length has changed, correct `token_offset`. The number of consumed tokens, `consumed_samples` x
        # --seq-length + `token_offset`, must not change.
        length = self._own.flags.get("seq_length") or 0
        longer_by = (record.flags.get("seq_length") or length) - length
        offset = progress.token_offset + progress.consumed_samples * longer_by
        progress = progress._replace(scheduled_samples=math.floor(position), token_offset=offset)
        return Resumed(progress, schedule, path)

    def _check(self, source: LoadSource, record: CheckpointMetadata, schedule: Schedule, checkpoint: Path) -> Schedule:
        """Compare a checkpoint's metadata with this run, and print notes about changed data.

        Args:
            source: choice of the parts to load.
            record: metadata of the checkpoint.
            schedule: learning-rate schedule of this run's flags.
            checkpoint: folder of the checkpoint, for messages.
        Returns:
            The learning-rate schedule to use: `schedule` or the checkpoint's.
        Raises:
            ValueError: the checkpoint does not fit this run. The message names the flags.
        """
        # ---- compare the checkpoint's model and tokenizer with the run's
        own, is_whole = self._own, source.opener.is_whole
        if source.continues and is_whole(own) and not is_whole(record):
            raise ValueError(
                f"{checkpoint} contains only adapters, but this run trains all weights. Pass --finetune to merge the "
                "adapters into their base and start a new run"
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
        # ---- reject a load of parts that the checkpoint lacks
        for part, what, name in (("optimizer", "optimizer", "optim"), ("rng", "rng state", "rng")):
            if getattr(source, part) and not getattr(record, f"has_{part}"):
                raise ValueError(
                    f"Unable to load {what} from checkpoint {checkpoint}: it was written with --no-save-{name}. "
                    f"Specify --no-load-{name} or --finetune"
                )
        # ---- compare the checkpoint's data, optimizer and learning-rate schedule with the run's
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
        """Load the tensors of a checkpoint into the run's training state.

        Args:
            source: choice of the parts to load.
            record: metadata of the checkpoint.
            checkpoint: folder of the checkpoint.
        Returns:
            A list with a note for the log about each kind of values that the checkpoint does not have, and that the run
            therefore starts from scratch.
        Raises:
            DamagedError: the weights have other names or shapes than the model's, or the optimizer's values in the
                metadata are damaged.
        """
        # ---- open the checkpoint, and compare names and shapes of its weights with the model's
        parts, weights = {"optimizer": source.optimizer, "rng": source.rng}, self._state.weights()
        reader = SafeReader(checkpoint)
        if not source.continues:
            reader = source.opener.open(checkpoint, record, self._axis)
        saved = raise_on_all_ranks(self._axis, reader.tensors)
        shapes, padded = {key: tuple(x.shape) for key, x in weights.items()}, self._state.padded(weights)
        check_weights(saved, shapes, padded, record, checkpoint, any_head=not source.continues)
        # ---- read the tensors, and pass them to the parts of the training state
        targets = self._state.targets(saved, **parts)
        reader.fill(targets, self._state.padded(targets), self._axis)
        if source.optimizer:
            try:
                self._state.values.load_state_dict(vars(record))
            except (KeyError, TypeError, ValueError) as error:
                problem = f"loss scale, earlier losses or values of optimizer groups are damaged: {error!r}"
                raise DamagedError(f"{checkpoint / RECORD}: {problem}") from error
        return self._state.accept(targets, iteration=record.progress.iteration, **parts)


def first_sound(
    source: LoadSource, candidates: Sequence[int], work: Callable[[int], T], say: Callable[[str], None]
) -> tuple[int, T]:
    """Try checkpoints until one is undamaged; return its iteration and the result of `work` for it.

    Args:
        source: folder and iteration of the checkpoint to load, as --load and --ckpt-step choose them.
        candidates: iterations of the checkpoints to try, in this order; see `LoadSource.candidates`.
        work: function that checks or reads the checkpoint of an iteration. It raises DamagedError if the checkpoint is
            damaged. If several ranks call it together, either all of them return or all of them raise.
        say: function that prints a warning about each damaged checkpoint. It is called only with --load-fallback;
            without this flag, `candidates` has one iteration.
    Raises:
        DamagedError: all checkpoints are damaged, or `candidates` is empty.
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
    """Find a checkpoint for a program that loads only weights, and read its metadata. Tensor files are not verified.

    Args:
        folder: folder of checkpoints.
        iteration: iteration of the checkpoint to load; None for the latest.
        fallback: True to use an older checkpoint if the requested one is damaged: the newest undamaged checkpoint
            before the requested one.
        opener: opener of the weights; see `WeightOpener`.
    Returns:
        (source, record): choice and metadata of the checkpoint, two arguments of `load_weights`.
    Raises:
        ValueError: the folder has no such checkpoint, or the metadata cannot be read.
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
    """Verify a checkpoint, and load its weights into a sharded model. All ranks call this.

    Args:
        model: sharded model, whose weights are overwritten.
        sharding: sharding of the model.
        dims: mesh axes.
        source: choice of the checkpoint, from `find_weights`.
        record: metadata of the checkpoint, from `find_weights`.
        vocab_size: number of tokens of the tokenizer in use.
        tokenizer: identity of the tokenizer in use; None to skip the comparison with the checkpoint's tokenizer.
        say: function that prints a line on rank 0.
    Returns:
        Iteration of the loaded checkpoint.
    Raises:
        ValueError: the checkpoint is damaged, or has another model or tokenizer.
    """
    # `TrainState` requires an optimizer and a loss scaler, but loading only weights does not change them.
    values = RunValues(torch.optim.SGD(model.parameters()), LossScaler(LossScaleConfig(), fp16=False))
    state = TrainState(model, sharding, values, [Weights(model, sharding)])
    own = dataclasses.replace(record, vocab_size=vocab_size, tokenizer=tokenizer or record.tokenizer)
    axis = open_axis(dims)
    reader = CheckpointReader(CheckpointConfig(), state, own, axis, say)
    verified = verify(source, axis, say)
    if verified is None:
        raise ValueError(f"{source.folder.name} has no checkpoint whose weights could be loaded: name another folder")
    reader.read(verified, Schedule(**record.schedule))
    return verified.iteration
