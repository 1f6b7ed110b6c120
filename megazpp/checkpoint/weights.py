"""Open the weights of a checkpoint for reading, and check their names and shapes against the model.

An optional feature, such as LoRA, can replace the opener (`WeightOpener`) to read checkpoints that contain only changes
of another checkpoint's weights.
"""

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
    """The opener of a checkpoint's weights. This class is for checkpoints that contain all weights of their model.

    An optional feature, such as LoRA, replaces it by a subclass for checkpoints that contain only changes of another
    checkpoint's weights. That other checkpoint is called their base.

    Attributes:
        bases: folders of checkpoints in which the subclass looks for a base first.
        flags: names of flags that only checkpoints with a base have in their metadata.
    """

    bases: tuple[str, ...] = ()
    flags: ClassVar[tuple[str, ...]] = ()

    def is_whole(self, record: CheckpointMetadata) -> bool:
        """Return True if a checkpoint with this metadata contains all weights of its model.

        False means that it contains only adapters, and that the base weights are in another checkpoint.
        """
        return all(record.flags.get(name) is None for name in self.flags)

    def find_bases(self, checkpoint: Path, record: CheckpointMetadata) -> list[Path]:
        """Return the paths of checkpoints that may be the base of a checkpoint. Their weights are not compared here.

        The list is empty if the checkpoint contains all weights of its model.

        Args:
            checkpoint: folder of the checkpoint, for the message.
            record: metadata of the checkpoint.
        Raises:
            ValueError: the checkpoint needs a base, and none of the searched folders has a checkpoint.
        """
        return []

    def open(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Open all weights of a checkpoint for reading, including those that come from its base. All ranks call this.

        Args:
            checkpoint: folder of one checkpoint.
            record: metadata of the checkpoint.
            files: axis over all ranks with a process group for file operations; see `open_axis`.
        Raises:
            ValueError: the base is missing or damaged, or has other weights than the checkpoint needs. All ranks raise
                this error.
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
    """Raise DamagedError if the weights in a checkpoint have other names or shapes than the weights of the model.

    Args:
        saved: shape and dtype of each tensor in the checkpoint, by key.
        shapes: global shape of each weight of the model, by key.
        padded: keys of the weights that may end in padding rows. Their numbers of rows may differ.
        record: metadata of the checkpoint.
        checkpoint: folder of the checkpoint, for the message.
        any_head: True to accept a scalar head (of a reward model) that only the model or only the checkpoint has, as
            when a run loads only weights.
    """
    found = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith(MODEL)}
    for key in sorted(shapes.keys() | found.keys()):
        wanted, there, problem = shapes.get(key), found.get(key), None
        if any_head and key.startswith(SCALAR_HEAD) and None in (wanted, there):
            continue
        if wanted is None or there is None:
            problem = "is not in that model" if wanted is None else "is missing"
        elif there[1:] != wanted[1:] or (there != wanted and key not in padded):
            problem = f"has shape {there}, not {wanted}"
        elif key in padded:
            problem = rows_problem(record, there[0])
        if problem:
            what = f"the tensors are not of the model that {RECORD} describes: {key} {problem}"
            raise DamagedError(f"{checkpoint} is damaged: {what}")
