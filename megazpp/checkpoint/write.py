"""Writes one checkpoint: every rank its part under the partial name; then rank 0 makes it complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from megazpp.checkpoint.checksums import FileSum, write_checksums, write_durably
from megazpp.checkpoint.folder import RECORD, CheckpointFolder, kept_iterations
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.storage import SummingWriter
from megazpp.checkpoint.together import together
from megazpp.checkpoint.tokenizer import write_tokenizer
from megazpp.formatting import GIGA
from megazpp.parallel.axis import MeshAxis


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Writes into one folder.

    Attributes:
        folder: locked by rank 0.
        axis: all ranks.
        keep_last, retain_interval: what stays, see `kept_iterations`.
        read: see `SummingWriter`.
        tokenizer: its files by name; see `write_tokenizer`.
    """

    folder: CheckpointFolder
    axis: MeshAxis
    keep_last: int | None
    retain_interval: int | None
    read: Callable[[str], torch.Tensor] | None = None
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, record: RunRecord, tensors: Mapping[str, torch.Tensor]) -> str:
        """Have all of it on disk, and the tracker name it; rank 0 gets the line that says so.

        Raises:
            ValueError: some rank could not write; the checkpoints there were are untouched.
        """
        started, axis, folder, iteration = time.perf_counter(), self.axis, self.folder, record.progress.iteration
        writer = SummingWriter(folder.partial(iteration), self.read)
        try:
            together(axis, lambda: folder.begin(iteration) if axis.rank == 0 else None)
            together(axis, lambda: writer.save(tensors, axis.group))
            parts = axis.gather_objects(writer.sums)
            note = together(axis, lambda: self._complete(record, parts) if axis.rank == 0 else "")
        except ValueError as error:
            if axis.rank == 0:
                folder.abandon(iteration)
            raise ValueError(f"{folder.name}: iteration {iteration} could not be saved: {error}") from error
        size, seconds = sum(part.size for sums in parts for part in sums.values()), time.perf_counter() - started
        return (
            f"  successfully saved checkpoint at iteration {iteration:7d} to {folder.path}"
            f" | {size / GIGA:.3f} GB in {seconds:.2f} s{note}"
        )

    def _complete(self, record: RunRecord, parts: list[dict[str, FileSum]]) -> str:
        """Rank 0's part, when the tensors are on disk: the last files, the name, the tracker, and what is deleted."""
        folder, iteration = self.folder, record.progress.iteration
        partial = folder.partial(iteration)
        sums = {name: part for of_rank in parts for name, part in of_rank.items()}
        record = replace(record, tokenizer_folder=write_tokenizer(folder.path, self.tokenizer))
        sums[RECORD] = write_durably(partial / RECORD, record.as_json())
        write_checksums(partial, sums)
        aside = folder.complete(iteration)
        kept = kept_iterations(
            folder.iterations(), newest=iteration, keep_last=self.keep_last, retain_interval=self.retain_interval
        )
        folder.keep_only(kept)
        return "" if aside is None else f" | the older one is now {aside}"
