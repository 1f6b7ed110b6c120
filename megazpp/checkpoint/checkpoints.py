"""Save the checkpoints of a training run, and load the checkpoint that the run starts from.

Every rank writes its tensors into the folder `iter_N.partial` in the format of torch.distributed.checkpoint. Then rank
0 adds the metadata and renames the folder to `iter_N`, so a folder with this name is always complete.

With --async-save, training waits only until the tensors are copied to host memory. A thread with a separate gloo
process group writes the copies while training continues. The next save and the end of the run wait for this thread.
The host memory is pinned if the tensors are on a GPU. With torch 2.13 or later, the next save reuses this memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.torch_version import TorchVersion

from megazpp.base.files import LOCK_SECONDS
from megazpp.base.program import GIGA, user_errors
from megazpp.checkpoint.checksums import INDEX, SummingWriter, write_checksums, write_durably
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, CheckpointFolder, kept_iterations, write_tokenizer
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.checkpoint.read import CheckpointReader, Resumed, Verified
from megazpp.checkpoint.state import TrainState
from megazpp.optim.schedule import Schedule, TrainingProgress
from megazpp.parallel.agreement import raise_on_all_ranks, ranks_that_share
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import threads_on

SHARED_LOCK_SECONDS = 600.0  # longest wait for the lock of --save while another job writes a checkpoint to this folder
# torch 2.11 and 2.12 close a `DefaultStager` after its first copy, so each save needs a new stager with new memory.
STAGER_IS_REUSABLE = TorchVersion(torch.__version__) >= TorchVersion("2.13")


def take_folder(folder: CheckpointFolder, axis: MeshAxis, say: Callable[[str], None], *, shared: bool = False) -> None:
    """Create and lock the folder of --save, and clean up after an earlier crash. All ranks call this.

    Hosts without a shared file system have separate folders at this path. Exactly one rank locks each separate folder.
    Rank 0 locks the first one. The next one is locked by the first rank that does not see the folders locked so far.

    Args:
        folder: the folder of --save. It stays locked until `Checkpoints.finish` or the end of the process, unless it is
            shared. Its `num_separate` and `shared_id` are set.
        axis: axis over all ranks with a process group for file operations; see `open_axis`.
        say: function that prints a line on rank 0.
        shared: True if other jobs may save to the folder too. This job then waits longer for the lock, and releases it
            at the end of this call, because `Checkpoints` locks a shared folder for each save.
    Raises:
        ValueError: another job uses the folder, the folder is not writable, or `shared` is True although each host has
            a separate folder.
    """
    seen, hosts = [False] * axis.size, []
    while not all(seen):
        owner = seen.index(False)

        def lock(owner: int = owner) -> tuple[str, list[str]]:
            if axis.rank != owner:
                return "", []
            folder.lock(patience_seconds=SHARED_LOCK_SECONDS if shared else LOCK_SECONDS, say=say)
            folder.shared_id = folder.identify() if shared else ""
            return socket.gethostname(), folder.recover()

        found = axis.gather_objects(raise_on_all_ranks(axis, lock))
        host, lines = axis.share_object(found[owner] if found else None)
        hosts.append(host)
        seen = [before or now for before, now in zip(seen, ranks_that_share(axis, folder.path, owner), strict=True)]
        for line in lines:
            say(line)
    folder.num_separate, folder.shared_id = len(hosts), axis.share_object(folder.shared_id)
    if shared:
        folder.unlock()
        if folder.num_separate > 1:
            raise ValueError(
                f"{folder.name} is a separate folder on each host, and --diloco-coordinator needs one folder that all "
                "hosts of the job share: choose a folder of a shared file system"
            )
    if folder.num_separate > 1:
        say(
            f"WARNING: {folder.name} is a separate folder on {' and '.join(hosts)}: each host keeps the files that its "
            "ranks write. To resume, use the same hosts with the same ranks, or copy the checkpoint's files of all "
            "hosts into one folder"
        )


class Checkpoints:
    """The checkpoints of a training run, with methods to save and load them. All ranks call all methods.

    Args:
        config: checkpoint flags.
        state: the run's training state, which checkpoints contain.
        record: metadata of the run, the content of run.json. Each save replaces its progress, loss scale, and other
            values that training changes.
        axis: axis over all ranks with a process group for file operations; see `open_axis`.
        say: function that prints a line on rank 0.
        folder: folder of --save, prepared by `take_folder`; None without --save.
        tokenizer: contents of the tokenizer's files by file name; None or empty for a tokenizer without files.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        state: TrainState,
        record: CheckpointMetadata,
        axis: MeshAxis,
        say: Callable[[str], None],
        *,
        folder: CheckpointFolder | None,
        tokenizer: Mapping[str, bytes] | None = None,
    ) -> None:
        self._config, self._state, self._record, self._axis, self._say = config, state, record, axis, say
        self._folder, self._tokenizer = folder, tokenizer
        self._thread = threads_on(state.device, 1, "checkpoint") if config.async_save else None
        on_gpu = state.device.type == "cuda"
        self._staging = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self._stager: DefaultStager | None = None
        self._writing: Future[None] | None = None

    def check_space(self) -> None:
        """Log the free disk space of --save. Raise ValueError on all ranks if it is too small for a checkpoint.

        If hosts have separate folders at the path of --save, each disk needs space for its fraction of a checkpoint.
        """
        folder, axis = self._folder, self._axis
        if folder is None:
            return
        num_weights = sum(parameter.numel() for parameter in self._state.model.parameters())
        # A checkpoint has fp32 weights, and with --save-optim two fp32 moments per weight. If hosts have separate
        # folders, each of their disks gets an equal fraction.
        needed = 4 * num_weights * (3 if self._config.save_optim else 1) / folder.num_separate

        def compare() -> None:
            free = shutil.disk_usage(folder.path).free
            space = f"{folder.name} has {free / GIGA:.3g} GB free, a checkpoint takes about {needed / GIGA:.3g} GB"
            if free < needed:
                raise ValueError(f"{space}; free disk space, or save to another disk")
            self._say(space if free > 2 * needed else f"WARNING: {space}")

        checks = folder.is_locked or (folder.shared_id and axis.rank == 0)
        raise_on_all_ranks(axis, lambda: compare() if checks else None)

    def load(self, verified: Verified, schedule: Schedule) -> Resumed:
        """Load a checkpoint into the run's training state, and return the position to resume from.

        If --ckpt-step has selected a checkpoint in the --save folder, the tracker file is set to this checkpoint.

        Args:
            verified: the checkpoint, whose files are verified, and the choice of its parts to load.
            schedule: learning-rate schedule of this run's flags.
        Raises:
            ValueError: the checkpoint does not fit this run's flags or is damaged; see `CheckpointReader.read`.
        """
        reader = CheckpointReader(self._config, self._state, self._record, self._axis, self._say)
        resumed = reader.read(verified, schedule)
        self._record = dataclasses.replace(self._record, schedule=resumed.schedule.state_dict())
        folder, iteration = self._folder, resumed.progress.iteration
        own = folder is not None and folder.of(iteration).resolve() == verified.path.resolve()
        if folder is not None and own and verified.source.iteration is not None:
            # A later restart of the job must resume from this iteration, not from a later checkpoint in the folder.
            # Only the rank that has locked the folder changes its tracker file.
            raise_on_all_ranks(self._axis, lambda: folder.track(iteration) if folder.is_locked else None)
        return resumed

    def save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint of the current training state to the folder of --save.

        With --async-save, a thread writes the checkpoint while training continues.

        Args:
            progress: training progress, whose iteration names the checkpoint.
        Raises:
            UserError: this checkpoint could not be written. With --async-save: the previous one could not be written.
        """
        # ---- wait for the previous save, because only one save is written at a time
        started, folder = time.perf_counter(), self._folder
        assert folder is not None, "a save needs --save"
        self._finish_writing()
        # ---- collect the tensors and the metadata to save
        config, iteration = self._config, progress.iteration
        self._say(f"saving checkpoint at iteration {iteration:7d} to {folder.path}")
        tensors = self._state.tensors(optimizer=config.save_optim, rng=config.save_rng)
        saved = {"has_optimizer": config.save_optim, "has_rng": config.save_rng} | self._state.values.state_dict()
        record = dataclasses.replace(self._record, progress=progress, **saved)

        def write(tensors: Mapping[str, torch.Tensor]) -> None:
            self._say(
                write_checkpoint(
                    record,
                    tensors,
                    folder,
                    self._axis,
                    keep_last=config.keep_last,
                    retain_interval=config.save_retain_interval,
                    tokenizer=self._tokenizer,
                )
            )

        # ---- write now, or copy the tensors and write the copies in the thread
        if self._thread is None:
            with user_errors(), self._locked(folder):
                write(tensors)
            return
        self._writing = self._thread.submit(write, self._stage(tensors))
        self._say(
            f"  scheduled an async checkpoint save at iteration {iteration:7d} to {folder.path}"
            f" | training waited {time.perf_counter() - started:.3f} s"
        )

    @contextlib.contextmanager
    def _locked(self, folder: CheckpointFolder) -> Iterator[None]:
        """Return a context in which rank 0 holds the lock of `folder`, if other jobs also save to this folder.

        If only this job saves to the folder, `take_folder` has locked it for the whole run, and nothing happens here.
        """
        if folder.shared_id:
            lock = functools.partial(folder.lock, patience_seconds=SHARED_LOCK_SECONDS, say=self._say)
            raise_on_all_ranks(self._axis, lambda: lock() if self._axis.rank == 0 else None)
        try:
            yield
        finally:
            if folder.shared_id:
                folder.unlock()

    @contextlib.contextmanager
    def watch(self, iteration: int) -> Iterator[None]:
        """Return a context for the training step of `iteration`. Entering it raises the error of a failed --async-save.

        A run whose save has failed thus ends at the next training step. Without this check, it would end only at the
        next save.
        """
        if self._writing is not None and self._writing.done():
            self._finish_writing()
        yield

    def finish(self) -> None:
        """Wait for an asynchronous save in progress, stop its thread, and unlock the --save folder."""
        self._finish_writing()
        if self._thread is not None:
            self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()
        if self._folder is not None:
            self._folder.unlock()

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy the tensors of a checkpoint to host memory, and return the copies when all of them are complete."""
        if self._stager is None or not STAGER_IS_REUSABLE:
            self._stager = DefaultStager(self._staging)
        copies = self._stager.stage(dict(tensors))
        assert isinstance(copies, dict), "stage() must return a dict, not a Future: use_async_staging is False"
        return copies

    def _finish_writing(self) -> None:
        """Wait for the asynchronous save in progress, if there is one, and raise its error if it has failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with user_errors():
                writing.result()


def write_checkpoint(
    record: CheckpointMetadata,
    tensors: Mapping[str, torch.Tensor],
    folder: CheckpointFolder,
    axis: MeshAxis,
    *,
    keep_last: int | None = None,
    retain_interval: int | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
    tokenizer: Mapping[str, bytes] | None = None,
) -> str:
    """Write one complete checkpoint, set the tracker file to it, and delete older checkpoints that are not kept.

    All ranks call this. When it returns, the checkpoint is on disk. `keep_last` and `retain_interval` determine which
    older checkpoints are kept. If both are None, all older checkpoints are kept.

    Args:
        record: metadata of the checkpoint, the content of run.json. Its progress contains the iteration.
        tensors: this rank's tensors by key, as DTensors or plain tensors.
        folder: folder of --save, locked by rank 0. If hosts have separate folders at this path, one rank of each host
            has locked its host's folder.
        axis: axis over all ranks with a process group for file operations; see `open_axis`.
        keep_last: number of newest checkpoints to keep; see `kept_iterations`.
        retain_interval: number whose multiples are iterations with checkpoints to keep; see `kept_iterations`.
        read: function that returns a tensor by key, if `tensors` are on the meta device; see `SummingWriter`.
        tokenizer: contents of the tokenizer's files by file name; see `write_tokenizer`.
    Returns:
        Line for the log with the path, the size and the duration.
    Raises:
        ValueError: a rank could not write. The unfinished checkpoint is deleted, and earlier ones are unchanged.
    """
    started, iteration = time.perf_counter(), record.progress.iteration
    partial, owns = folder.partial(iteration), folder.is_locked or axis.rank == 0
    writer = SummingWriter(partial, axis.timeline, read)

    def complete() -> str:
        """Complete a checkpoint whose tensors are written: write metadata and checksums, rename it, set the tracker.

        Returns:
            The end of the log line, if checkpoints of another branch of the run were renamed; otherwise "".
        """
        sums = {name: part for of_rank in parts for name, part in of_rank.items()}
        named = dataclasses.replace(written, tokenizer_folder=write_tokenizer(folder.path, tokenizer or {}))
        sums[RECORD] = write_durably(partial / RECORD, named.as_json())
        if axis.rank != 0:  # a separate folder of another host, where torch.distributed.checkpoint writes no index
            write_durably(partial / INDEX, index)
        write_checksums(partial, sums)
        aside = folder.complete(iteration)
        return f" | renamed checkpoints of the abandoned branch: {', '.join(map(str, aside))}" if aside else ""

    def delete_old() -> None:
        if keep_last is not None or retain_interval is not None:
            kept = kept_iterations(folder.iterations(), keep_last=keep_last, retain_interval=retain_interval)
            folder.keep_only(kept)

    # ---- write the tensors on all ranks
    try:
        raise_on_all_ranks(axis, lambda: folder.begin(iteration) if owns else None)
        with axis.timeline.span(axis.name, "save"):
            raise_on_all_ranks(axis, lambda: writer.save(tensors, axis.group))
        parts, written, index = axis.gather_objects(writer.sums), record, b""
        if folder.num_separate > 1:
            index = (partial / INDEX).read_bytes() if axis.rank == 0 else b""
            parts, written, index = axis.share_object((parts, record, index))
        # ---- complete the checkpoint, rank 0 last: its tracker file then names a checkpoint that all hosts have
        raise_on_all_ranks(axis, lambda: complete() if owns and axis.rank != 0 else "")
        note = raise_on_all_ranks(axis, lambda: complete() if axis.rank == 0 else "")
        raise_on_all_ranks(axis, lambda: delete_old() if owns else None)
    except ValueError as error:
        if owns:
            folder.abandon(iteration)
        raise ValueError(
            f"{folder.name}: iteration {iteration} could not be saved, earlier checkpoints are unchanged: {error}"
        ) from error
    # ---- return a line for the log with the size and the duration
    size, seconds = sum(part.size for sums in parts for part in sums.values()), time.perf_counter() - started
    return (
        f"  successfully saved checkpoint at iteration {iteration:7d} to {folder.path}"
        f" | {size / GIGA:.3f} GB in {seconds:.2f} s{note}"
    )
