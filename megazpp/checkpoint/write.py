"""Writing one checkpoint: every rank writes its part under the partial name; then rank 0 makes it complete.

The tensors' files are torch.distributed.checkpoint's; what passes through its writer is summed on the way.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils import serialization

from megazpp.base.program import GIGA
from megazpp.checkpoint.checksums import FileSum, write_checksums, write_durably
from megazpp.checkpoint.folder import RECORD, CheckpointFolder, kept_iterations
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.together import together
from megazpp.checkpoint.tokenizer import write_tokenizer
from megazpp.parallel.axis import MeshAxis


def write_checkpoint(
    record: RunRecord,
    tensors: Mapping[str, torch.Tensor],
    folder: CheckpointFolder,
    axis: MeshAxis,
    *,
    keep_last: int | None = None,
    retain_interval: int | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
    tokenizer: Mapping[str, bytes] | None = None,
) -> str:
    """Have all of it on disk, and the tracker name it; rank 0 gets the line that says so.

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
        named = replace(record, tokenizer_folder=write_tokenizer(folder.path, tokenizer or {}))
        sums[RECORD] = write_durably(partial / RECORD, named.as_json())
        write_checksums(partial, sums)
        aside = folder.complete(iteration)
        there = folder.iterations()
        folder.keep_only(kept_iterations(there, newest=iteration, keep_last=keep_last, retain_interval=retain_interval))
        return "" if aside is None else f" | the older one is now {aside}"

    try:
        together(axis, lambda: folder.begin(iteration) if axis.rank == 0 else None)
        together(axis, lambda: writer.save(tensors, axis.group))
        parts = axis.gather_objects(writer.sums)
        note = together(axis, lambda: complete() if axis.rank == 0 else "")
    except ValueError as error:
        if axis.rank == 0:
            folder.abandon(iteration)
        raise ValueError(f"{folder.name}: iteration {iteration} could not be saved: {error}") from error
    size, seconds = sum(part.size for sums in parts for part in sums.values()), time.perf_counter() - started
    return (
        f"  successfully saved checkpoint at iteration {iteration:7d} to {folder.path}"
        f" | {size / GIGA:.3f} GB in {seconds:.2f} s{note}"
    )


class SummingWriter(FileSystemWriter):
    """Writes this rank's file, and the index on rank 0; each is on disk afterwards.

    Args:
        read: gives a tensor by its key when its turn has come, where `save` has only meta tensors; each then has a
            file of its own, because the library keeps in memory what goes into one file.
    Attributes:
        sums: of the files written, by name.
    """

    def __init__(self, path: Path, read: Callable[[str], torch.Tensor] | None = None) -> None:
        super().__init__(path, sync_files=True, single_file_per_rank=read is None)
        self.fs = _SummingFiles()
        self.sums = self.fs.sums
        self._read = read

    def save(self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Write on all ranks of `group`; torch's own checksums, one per tensor and read by nobody, are left out."""
        planner = None if self._read is None else _ReadingPlanner(self._read)
        with serialization.config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            dcp.save(dict(tensors), storage_writer=self, planner=planner, process_group=group)


class _ReadingPlanner(DefaultSavePlanner):
    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._read(index.fqn)


class _SummingFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", f"a writer opens {path} in mode {mode}"
        with _SummingFile(path) as stream:
            try:
                yield stream
            except Exception as error:
                raise (stream.failure or error) from None
        self.sums[Path(path).name] = FileSum(stream.size, stream.crc)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummingFile(io.BufferedWriter):
    """A file that knows its size, its checksum, and why it could not be written: torch.save says where instead."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.size = self.crc = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.size += count
        return count

    def fileno(self) -> int:
        self.flush()  # who asks for it means to fsync; torch 2.13 does not flush the index before it does
        return super().fileno()
