"""A run's checkpoints: when they are saved, how one is written, and going back to one.

Every rank writes its part under the partial name; then rank 0 makes the checkpoint complete. The tensors' files are
torch.distributed.checkpoint's. With --async-save everything after a copy of the tensors happens in a thread, in a
process group of its own, while training goes on; the next save and the end of the run wait for it. From torch 2.13 on
the copies' memory is reused by later saves. The memory is pinned if the tensors are on a GPU.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.torch_version import TorchVersion

from megazpp.base.program import GIGA, user_errors
from megazpp.checkpoint.checksums import SummingWriter, write_checksums, write_durably
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, CheckpointFolder, kept_iterations, write_tokenizer
from megazpp.checkpoint.metadata import CheckpointMetadata, TrainingProgress
from megazpp.checkpoint.read import CheckpointReader, LoadSource, Resumed
from megazpp.checkpoint.state import TrainState
from megazpp.optim.schedule import Schedule
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import raise_on_all_ranks
from megazpp.parallel.worker import threads_on

# torch 2.11 and 2.12 close a stager at the end of its first use, and it cannot be used again
STAGER_IS_REUSABLE = TorchVersion(torch.__version__) >= TorchVersion("2.13")


class Checkpoints:
    """Saves and loads for the training loop. Every rank calls every method.

    Args:
        record: of run.json: what does not change from one save to the next.
        axis: all ranks, see `open_axis`.
        say: prints a line on rank 0.
        tokenizer: files of the run's, by name.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        state: TrainState,
        record: CheckpointMetadata,
        axis: MeshAxis,
        say: Callable[[str], None],
        *,
        tokenizer: Mapping[str, bytes] | None = None,
    ) -> None:
        self._config, self._state, self._record, self._axis, self._say = config, state, record, axis, say
        self._tokenizer = tokenizer
        self._folder = None if config.save is None else CheckpointFolder(config.save, "--save")
        self._saved: int | None = None
        self._thread = threads_on(state.device, 1, "checkpoint") if config.async_save else None
        on_gpu = state.device.type == "cuda"
        self._staging = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self._stager: DefaultStager | None = None
        self._writing: Future[str] | None = None

    def open(self) -> None:
        """Take the folder of --save for this job; without the flag there is nothing to do.

        Raises:
            ValueError: it is another job's, cannot be written to, is not the same on all nodes, or is full.
        """
        folder, axis = self._folder, self._axis
        if folder is not None:
            num_weights = sum(parameter.numel() for parameter in self._state.model.parameters())
            needed = 4 * num_weights * (3 if self._config.save_optim else 1)  # fp32, with two moments of each
            raise_on_all_ranks(axis, lambda: self._take(folder, needed) if axis.rank == 0 else None)
            if not all(axis.share_object(axis.gather_objects((folder.path / "lock").exists()))):
                raise ValueError(
                    f"{folder.name} is not the same folder on every node: it has to be on a shared file system"
                )

    def _take(self, folder: CheckpointFolder, needed: int) -> None:
        folder.lock()
        for line in folder.recover():
            self._say(line)
        free = shutil.disk_usage(folder.path).free
        space = f"{folder.name} has {free / GIGA:.3g} GB free, a checkpoint takes about {needed / GIGA:.3g} GB"
        if free < needed:
            raise ValueError(space)
        self._say(space if free > 2 * needed else f"WARNING: {space}")

    def load(self, source: LoadSource, schedule: Schedule) -> Resumed | None:
        """Go on from a checkpoint; see `CheckpointReader.read`."""
        reader = CheckpointReader(self._config, self._state, self._record, self._axis, self._say)
        resumed = reader.read(source, schedule)
        if resumed is not None:
            self._record = dataclasses.replace(self._record, schedule=resumed.schedule.state_dict())
            folder, iteration = self._folder, resumed.progress.iteration
            if folder is not None and folder.of(iteration).resolve() == resumed.checkpoint.resolve():
                self._saved = iteration
                if source.iteration is not None:  # a restart goes on from here, too
                    raise_on_all_ranks(self._axis, lambda: folder.track(iteration) if self._axis.rank == 0 else None)
        return resumed

    def after_step(self, progress: TrainingProgress, *, last: bool) -> None:
        """Save if it is time, or if the run is over; never the same iteration twice."""
        if self._writing is not None and self._writing.done():
            self._finish_writing()
        if self._folder is not None and self.due(progress.iteration, last=last):
            self._save(self._folder, progress)

    def due(self, iteration: int, *, last: bool) -> bool:
        """Return whether `after_step` of the iteration saves."""
        interval = self._config.save_interval
        due = last or (interval is not None and iteration % interval == 0)
        return due and self._folder is not None and iteration != self._saved

    def rewind(self) -> TrainingProgress:
        """Go back to the newest checkpoint of --save; raises ValueError if there is none, or it is damaged."""
        assert self._folder is not None, "a rewind needs --save"
        self._finish_writing()
        source = LoadSource(self._folder, optimizer=self._config.save_optim, rng=self._config.save_rng)
        resumed = self.load(source, Schedule(**self._record.schedule))
        if resumed is None:
            raise ValueError(f"{self._folder.name} has no checkpoint to go back to")
        return resumed.progress

    def finish(self) -> None:
        """Wait for a save that is still being written, and give the folder back."""
        self._finish_writing()
        if self._thread is not None:
            self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()
        if self._folder is not None:
            self._folder.unlock()

    def _save(self, folder: CheckpointFolder, progress: TrainingProgress) -> None:
        started = time.perf_counter()
        self._finish_writing()  # one at a time
        config, iteration = self._config, progress.iteration
        self._say(f"saving checkpoint at iteration {iteration:7d} to {folder.path}")
        tensors = self._state.tensors(optimizer=config.save_optim, rng=config.save_rng)
        saved = {"has_optimizer": config.save_optim, "has_rng": config.save_rng} | self._state.values.state_dict()
        record = dataclasses.replace(self._record, progress=progress, **saved)

        def write(tensors: Mapping[str, torch.Tensor]) -> str:
            return write_checkpoint(
                record,
                tensors,
                folder,
                self._axis,
                keep_last=config.keep_last,
                retain_interval=config.save_retain_interval,
                tokenizer=self._tokenizer,
            )

        self._saved = iteration
        if self._thread is None:
            with user_errors():
                self._say(write(tensors))
            return
        self._writing = self._thread.submit(write, self._stage(tensors))
        self._say(
            f"  scheduled an async checkpoint save at iteration {iteration:7d} to {folder.path}"
            f" | training waited {time.perf_counter() - started:.3f} s"
        )

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy tensors to host memory, and wait until the copies are complete."""
        if self._stager is None or not STAGER_IS_REUSABLE:
            self._stager = DefaultStager(self._staging)
        copies = self._stager.stage(dict(tensors))
        assert isinstance(copies, dict), "use_async_staging is off, so it is no Future"
        return copies

    def _finish_writing(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with user_errors():
                self._say(writing.result())


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
    """Have all of it on disk, and the tracker name it; returns the line that says so.

    Args:
        folder: locked by rank 0.
        axis: all ranks.
        keep_last, retain_interval: what stays, see `kept_iterations`.
        read: see `SummingWriter`.
        tokenizer: its files by name; see `write_tokenizer`.
    Raises:
        ValueError: some rank could not write; the checkpoints there were are untouched.
    """
    started, iteration = time.perf_counter(), record.progress.iteration
    partial = folder.partial(iteration)
    writer = SummingWriter(partial, read)

    def complete() -> str:
        """When the tensors are on disk: the last files, the name, the tracker, and what is deleted."""
        sums = {name: part for of_rank in parts for name, part in of_rank.items()}
        named = dataclasses.replace(record, tokenizer_folder=write_tokenizer(folder.path, tokenizer or {}))
        sums[RECORD] = write_durably(partial / RECORD, named.as_json())
        write_checksums(partial, sums)
        aside = folder.complete(iteration)
        there = folder.iterations()
        folder.keep_only(kept_iterations(there, newest=iteration, keep_last=keep_last, retain_interval=retain_interval))
        return "" if aside is None else f" | the older one is now {aside}"

    try:
        raise_on_all_ranks(axis, lambda: folder.begin(iteration) if axis.rank == 0 else None)
        raise_on_all_ranks(axis, lambda: writer.save(tensors, axis.group))
        parts = axis.gather_objects(writer.sums)
        note = raise_on_all_ranks(axis, lambda: complete() if axis.rank == 0 else "")
    except ValueError as error:
        if axis.rank == 0:
            folder.abandon(iteration)
        raise ValueError(f"{folder.name}: iteration {iteration} could not be saved: {error}") from error
    size, seconds = sum(part.size for sums in parts for part in sums.values()), time.perf_counter() - started
    return (
        f"  successfully saved checkpoint at iteration {iteration:7d} to {folder.path}"
        f" | {size / GIGA:.3f} GB in {seconds:.2f} s{note}"
    )
