"""Reading a checkpoint of a LoRA run as complete weights, with the adapters merged into the base weights.

A checkpoint of a LoRA run contains only adapters. Its run.json names the checkpoint of the base weights by the flags
ref_load (folder), ref_ckpt_step (iteration) and ref_checksum (checksum of the weights). The base may itself be a
checkpoint with adapters. `AdapterOpener` finds the base. The reader that it returns merges the adapters into each part
of the base weights that is read.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import CheckpointMetadata, read_record
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import MODEL, SCALAR_HEAD, under
from megazpp.convert.model import Model
from megazpp.convert.native import AdapterConverter
from megazpp.lora.layers import joined_factors, merged
from megazpp.lora.peft import SETTINGS, AdapterSettings, default_targets, with_adapter, write_adapter
from megazpp.model.config import GPTConfig
from megazpp.packed_weights.reader import spell_checksum, sum_of_bits
from megazpp.parallel.agreement import raise_on_all_ranks
from megazpp.parallel.axis import MeshAxis


class AdapterOpener(AdapterConverter):
    """Opener of checkpoints that may contain only LoRA adapters. It merges such adapters into their base weights."""

    flags = ("lora_r",)

    def find_bases(self, checkpoint: Path, record: CheckpointMetadata) -> list[Path]:
        """Find the checkpoints that may have the base weights of a checkpoint's adapters.

        Look in the folders of --lora-base, and in the folder that the adapters' metadata names.

        Args:
            checkpoint: folder of the checkpoint, for the error message.
            record: metadata of the checkpoint.

        Returns:
            at most one checkpoint of each folder: the iteration on which the adapters were trained, or the latest if
            the folder does not have this iteration. [] if the checkpoint has complete weights.

        Raises:
            ValueError: no folder has a checkpoint.
        """
        if self.is_whole(record):
            return []
        found, places, step = [], (*self.bases, record.flags["ref_load"]), record.flags["ref_ckpt_step"]
        for folder in (CheckpointFolder(place, "--lora-base") for place in places):
            iteration = step if step in folder.iterations() else folder.latest()
            if iteration is not None:
                found.append(folder.of(iteration))
        if not found:
            raise ValueError(
                f"{checkpoint} contains only LoRA adapters, and their base is not in {' or '.join(places)}; pass its "
                "folder with --lora-base"
            )
        return found

    def open(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Return a reader of a checkpoint's complete weights. All ranks call this.

        If the checkpoint has only adapters, the reader merges them into the weights of their base.

        Args:
            checkpoint: folder of the checkpoint.
            record: metadata of the checkpoint.
            files: axis of the ranks that read and verify the files together.
        """
        own = SafeReader(checkpoint)
        if self.is_whole(record):
            return own
        scale = record.flags["lora_alpha"] / record.flags["lora_r"]
        return AdaptedReader(own, self.open_base(checkpoint, record, files), record.model, scale)

    def open_base(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Return a reader of the base weights of a checkpoint's adapters. All ranks call this.

        The ranks together verify the files of each possible base, and compute the checksum of its weights. The first
        base whose checksum is the one in the adapters' metadata is opened.

        Args:
            checkpoint: folder of the checkpoint with adapters.
            record: metadata of this checkpoint.
            files: axis of the ranks that verify the files together.

        Raises:
            ValueError: no base with this checksum was found.
        """
        wanted, others = record.flags["ref_checksum"], []
        for base in self.find_bases(checkpoint, record):
            raise_on_all_ranks(files, functools.partial(verify_files, base, rank=files.rank, num_ranks=files.size))
            # The base may itself be a checkpoint with adapters. Then `rest` finds the base of that checkpoint. The
            # folder of `base` is left out of `rest`: `rest` could find `base` there again, in an endless recursion.
            rest = AdapterOpener(tuple(x for x in self.bases if Path(x).expanduser() != base.parent))
            reader = rest.open(base, read_record(base), files)

            def share_of_checksum(reader: SafeReader = reader) -> int:
                """Return this rank's part of the base's checksum: the sum over every n-th weight, for n ranks.

                The checksum of the base is the sum of all ranks' parts.
                """
                weights = ((key, reader.read_whole(key)) for key in _weights(reader)[files.rank :: files.size])
                return sum(sum_of_bits(key.removeprefix(MODEL), whole, (0, 0), whole.shape) for key, whole in weights)

            found = raise_on_all_ranks(files, share_of_checksum)
            checksum = spell_checksum(sum(files.share_object(files.gather_objects(found))))
            if checksum == wanted:
                return reader
            others.append(f"{base} has {checksum}")
        raise ValueError(
            f"{checkpoint}: the base of its adapters has weights with checksum {wanted}, but {', '.join(others)}; pass "
            "the folder of the right base with --lora-base"
        )

    def merge(self, model: Model, folder: Path) -> Model:
        """Return a model in which PEFT's adapter in `folder` is merged into the weights, see `with_adapter`."""
        return with_adapter(model, folder)

    def export(self, checkpoint: Path, record: CheckpointMetadata, config: GPTConfig, base: Path, folder: Path) -> None:
        """Write the adapters of a checkpoint in PEFT's format, with its scalar head if it has one.

        Args:
            checkpoint: folder of the checkpoint with adapters.
            record: metadata of this checkpoint.
            config: architecture of the model.
            base: folder of the base weights, which PEFT's file names.
            folder: existing folder for PEFT's files.
        """
        rank, alpha, dropout, targets = (record.flags[name] for name in SETTINGS)
        targets, reader = tuple(targets or default_targets(config)), SafeReader(checkpoint)
        settings = AdapterSettings(rank, alpha, dropout, targets, str(base.resolve()), record.flags["ref_checksum"])
        tensors = {name: reader.read_whole(MODEL + name) for name in under(MODEL, reader.tensors())}
        write_adapter(folder, config, settings, tensors)


class AdaptedReader(SafeReader):
    """Reader of a checkpoint with LoRA adapters that returns merged weights, as if the model had no adapters.

    Adapters are merged into a part of a weight when this part is read, so no merged copy of the model is stored.

    Args:
        own: reader of the checkpoint with the adapters, which may also have a scalar head.
        base: reader of the base weights, on which the adapters were trained.
        config: architecture of the model.
        scale: factor of the adapters' output, alpha / r.
    """

    def __init__(self, own: SafeReader, base: SafeReader, config: GPTConfig, scale: float) -> None:
        super().__init__(own.path)
        self._base, self._own, self._config, self._scale = base, own, config, scale
        self._factors = functools.lru_cache(maxsize=1)(self._read_factors)

    @functools.cached_property
    def _saved(self) -> dict[str, TensorStorageMetadata]:
        """The shape, dtype and chunks of each merged weight, and of a scalar head if there is one, by their keys."""
        weights = {key: entry for key, entry in self._own.tensors().items() if key.startswith(SCALAR_HEAD)}
        return weights | {key: self._base.tensors()[key] for key in _weights(self._base)}

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Read a rectangular part of a merged weight.

        Args:
            key: key of the weight in the checkpoint.
            offsets: first row and first column of the part.
            box: tensor into which the part is written. It has the part's shape.
        """
        if key.startswith(SCALAR_HEAD):
            self._own.read_box(key, offsets, box)
        elif (factors := self._factors(key)) is None:
            self._base.read_box(key, offsets, box)
        else:
            # Round merged values to the dtype of the checkpoint, so that they do not depend on the dtype of `box`
            part = torch.empty(box.shape, dtype=self._saved[key].properties.dtype)
            self._base.read_box(key, offsets, part)
            # A weight of experts stacks the matrices of all experts, each with its own A and B, so merge each matrix
            # alone. factors[0] has `width` rows for each matrix. So len(factors[0]) // width is the number of matrices,
            # which is the number of experts, or 1 for another weight. Each matrix has `rows` rows.
            (first, left), (height, width) = offsets, self._saved[key].size
            rows = height // (len(factors[0]) // width)
            for block in range(first // rows, -(-(first + len(box)) // rows)):
                start, end = max(first, block * rows), min(first + len(box), (block + 1) * rows)
                inside, columns = slice(start - first, end - first), slice(block * width + left, None)
                a, b = factors[0][columns][: box.shape[1]], factors[1][start:end]
                box[inside] = merged(part[inside], a, b, self._scale)

    def _read_factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read the two matrices of a weight's adapter; None for a bias, and for a weight without an adapter.

        For a weight [out, in], return A [in, r] and B [out, r], where r is the rank of the adapter. The weight of E
        experts stacks one matrix [rows, columns] per expert. For such a weight, return the experts' stacked factors for
        the columns, [E * columns, r], and then their stacked factors for the rows, [E * rows, r].
        """
        stem, _, matrix = key.rpartition(".")
        is_experts, config = stem.endswith(".experts"), self._config
        if matrix == "bias":  # a bias has no adapter, but the prefix below would find the adapter of its layer's weight
            return None
        prefix = f"{stem}.adapter.{matrix}." if is_experts else f"{stem}.adapter."
        names = [name for name in self._own.tensors() if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): self._own.read_whole(name) for name in names}
        if parts and is_experts:
            # The experts' fc2 is stored transposed, as [inputs, outputs], so its columns belong to B
            return (parts["b"], parts["a"]) if matrix == "fc2" else (parts["a"], parts["b"])
        return joined_factors(parts, config.query_groups, config.heads, config.head_size) if parts else None


def _weights(reader: SafeReader) -> list[str]:
    """Return the sorted keys of a checkpoint's weights, without a scalar head's keys."""
    return sorted(key for key in reader.tensors() if key.startswith(MODEL) and not key.startswith(SCALAR_HEAD))
