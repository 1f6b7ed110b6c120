"""Reading of a checkpoint's weights: the opener that a feature can replace, and the check of names and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megazpp.base.files import DamagedError
from megazpp.checkpoint.folder import RECORD
from megazpp.checkpoint.metadata import CheckpointMetadata, rows_problem
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import MODEL, SCALAR_HEAD, Saved
from megazpp.parallel.axis import MeshAxis


@dataclass(frozen=True)
class WeightOpener:
    """The opener of checkpoints that contain all weights of their model.

    An optional feature can replace it by a subclass for checkpoints that only change the weights of another checkpoint,
    their base (run/feature.py).

    Attributes:
        bases: folders of checkpoints in which to look for a base first.
        flags: names of flags that are set in the metadata of a checkpoint with a base.
    """

    bases: tuple[str, ...] = ()
    flags: ClassVar[tuple[str, ...]] = ()

    def is_whole(self, record: CheckpointMetadata) -> bool:
        """Return True if a checkpoint contains all weights, so that it has no base."""
        return all(record.flags.get(name) is None for name in self.flags)

    def find_bases(self, checkpoint: Path, record: CheckpointMetadata) -> list[Path]:
        """Return the checkpoints that may be the base of a checkpoint, without comparing weights.

        The list is empty if the checkpoint contains all weights.

        Args:
            checkpoint: folder of the checkpoint, for the message.
            record: metadata of the checkpoint.
        Raises:
            ValueError: none of the folders has a checkpoint.
        """
        return []

    def open(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Open all weights of a checkpoint for reading, including those that come from its base. All ranks call this.

        Args:
            checkpoint: folder of one checkpoint.
            record: metadata of the checkpoint.
            files: axis over all ranks with a group for files, see `open_axis`.
        Raises:
            ValueError: the base is missing, is damaged, or has other weights. Every rank raises it.
        """
        return SafeReader(checkpoint)


WHOLE_WEIGHTS = WeightOpener()


def check_weights(
    saved: Saved,
    shapes: Mapping[str, tuple[int, ...]],
    padded: Collection[str],
    record: CheckpointMetadata,
    checkpoint: Path,
    *,
    any_head: bool,
) -> None:
    """Raise DamagedError if names or shapes of the saved weights differ from the model's.

    Args:
        saved: shapes and dtypes of all tensors in the checkpoint, by key.
        shapes: global shapes of the model's weights, by key.
        padded: keys of weights that may have padding rows, so that the number of rows may differ.
        record: metadata of the checkpoint.
        checkpoint: folder of the checkpoint, for the message.
        any_head: True to accept a scalar head in only one of model and checkpoint, as when only weights are loaded.
    """
    found = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith(MODEL)}
    for key in sorted(shapes.keys() | found.keys()):
        wanted, there, problem = shapes.get(key), found.get(key), None
        if any_head and key.startswith(SCALAR_HEAD) and None in (wanted, there):
            continue
        if wanted is None or there is None:
            problem = "has no place in it" if wanted is None else "is missing"
        elif there[1:] != wanted[1:] or (there != wanted and key not in padded):
            problem = f"has shape {there}, not {wanted}"
        elif key in padded:
            problem = rows_problem(record, there[0])
        if problem:
            what = f"the tensors are not of the model that {RECORD} describes: {key} {problem}"
            raise DamagedError(f"{checkpoint}: {what}")
