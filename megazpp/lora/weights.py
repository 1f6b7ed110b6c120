"""Checkpoints of LoRA runs, read as whole weights.

A checkpoint of a LoRA run has only adapters. Its run.json names the base checkpoint by the flags ref_load (folder),
ref_ckpt_step (iteration) and ref_checksum (checksum of the weights). The base may have adapters itself. `AdapterOpener`
finds the base, and the reader that it returns merges the adapters into each part of the base's weights that it reads.
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
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import raise_on_all_ranks


class AdapterOpener(AdapterConverter):
    """The opener of checkpoints that may have LoRA adapters, which it merges into the weights of their base."""

    flags = ("lora_r",)

    def find_bases(self, checkpoint: Path, record: CheckpointMetadata) -> list[Path]:
        """Return the checkpoints that may be the base of a checkpoint's adapters, see `WeightOpener.find_bases`.

        Returns:
            At most one checkpoint of each folder: the base's iteration, or the latest if the folder has no such
            checkpoint. [] if the checkpoint has no adapters.
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
        """Open a checkpoint's weights, with its adapters merged into them, see `WeightOpener.open`."""
        own = SafeReader(checkpoint)
        if self.is_whole(record):
            return own
        scale = record.flags["lora_alpha"] / record.flags["lora_r"]
        return AdaptedReader(own, self.open_base(checkpoint, record, files), record.model, scale)

    def open_base(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Open the weights of the base of a checkpoint's adapters. All ranks call this.

        They verify the base's files together, and compare the checksum of its weights with the one in the adapters'
        metadata. The first possible base with this checksum is opened.
        """
        wanted, others = record.flags["ref_checksum"], []
        for base in self.find_bases(checkpoint, record):
            raise_on_all_ranks(files, functools.partial(verify_files, base, rank=files.rank, num_ranks=files.size))
            rest = AdapterOpener(tuple(x for x in self.bases if Path(x).expanduser() != base.parent))
            reader = rest.open(base, read_record(base), files)

            def share_of_checksum(reader: SafeReader = reader) -> int:
                """Return the sum for every n-th weight, where n is the number of ranks."""
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
        """Return the model merged with PEFT's adapter in `folder`, see `with_adapter`."""
        return with_adapter(model, folder)

    def export(self, checkpoint: Path, record: CheckpointMetadata, config: GPTConfig, base: Path, folder: Path) -> None:
        """Write the unsharded adapters of a checkpoint, and its scalar head if it has one, in PEFT's format."""
        rank, alpha, dropout, targets = (record.flags[name] for name in SETTINGS)
        targets, reader = tuple(targets or default_targets(config)), SafeReader(checkpoint)
        settings = AdapterSettings(rank, alpha, dropout, targets, str(base.resolve()), record.flags["ref_checksum"])
        tensors = {name: reader.read_whole(MODEL + name) for name in under(MODEL, reader.tensors())}
        write_adapter(folder, config, settings, tensors)


class AdaptedReader(SafeReader):
    """A reader of a checkpoint with LoRA adapters that returns merged weights, as if the model had no adapters.

    Adapters are merged into a part of a weight when this part is read, so no merged copy of the model is stored.

    Args:
        own: reader of the checkpoint with the adapters. Its scalar head, if any, is read from there.
        base: reader of the base checkpoint, whose weights were frozen in the adapters' training.
        config: config of the model.
        scale: LoRA's alpha / r.
    """

    def __init__(self, own: SafeReader, base: SafeReader, config: GPTConfig, scale: float) -> None:
        super().__init__(own.path)
        self._base, self._own, self._config, self._scale = base, own, config, scale
        self._factors = functools.lru_cache(maxsize=1)(self._read_factors)

    @functools.cached_property
    def _saved(self) -> dict[str, TensorStorageMetadata]:
        """The shape, dtype and chunks of the merged model's weights, by key."""
        weights = {key: entry for key, entry in self._own.tensors().items() if key.startswith(SCALAR_HEAD)}
        return weights | {key: self._base.tensors()[key] for key in _weights(self._base)}

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Read a rectangular part of a merged weight into `box`, see `SafeReader.read_box`."""
        if key.startswith(SCALAR_HEAD):
            self._own.read_box(key, offsets, box)
        elif (factors := self._factors(key)) is None:
            self._base.read_box(key, offsets, box)
        else:
            # round merged values to the saved dtype first, so that they do not depend on the dtype of `box`
            part = torch.empty(box.shape, dtype=self._saved[key].properties.dtype)
            self._base.read_box(key, offsets, part)
            # the weights of experts are one matrix after another, each with its own A and B
            (first, left), (height, width) = offsets, self._saved[key].size
            rows = height // (len(factors[0]) // width)
            for block in range(first // rows, -(-(first + len(box)) // rows)):
                start, end = max(first, block * rows), min(first + len(box), (block + 1) * rows)
                inside, columns = slice(start - first, end - first), slice(block * width + left, None)
                a, b = factors[0][columns][: box.shape[1]], factors[1][start:end]
                box[inside] = merged(part[inside], a, b, self._scale)

    def _read_factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return A [in, r] and B [out, r] of a weight's adapter; None if the weight has no adapter.

        For the matrices of E experts these are the factors of the weight's columns [E columns, r] and rows [E rows, r].
        """
        stem, _, matrix = key.rpartition(".")
        is_experts, config = stem.endswith(".experts"), self._config
        prefix = f"{stem}.adapter.{matrix}." if is_experts else f"{stem}.adapter."
        names = [name for name in self._own.tensors() if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): self._own.read_whole(name) for name in names}
        if parts and is_experts:
            return (parts["b"], parts["a"]) if matrix == "fc2" else (parts["a"], parts["b"])  # fc2 is stored transposed
        return joined_factors(parts, config.query_groups, config.heads, config.head_size) if parts else None


def _weights(reader: SafeReader) -> list[str]:
    """Return the sorted keys of a checkpoint's weights, except a scalar head."""
    return sorted(key for key in reader.tensors() if key.startswith(MODEL) and not key.startswith(SCALAR_HEAD))
