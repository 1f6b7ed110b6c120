"""Reading of a checkpoint's weights: check them, read parts, compute their checksum, and merge LoRA adapters.

A checkpoint of a LoRA run has only adapters. Its run.json names the base checkpoint by the flags ref_load (folder),
ref_ckpt_step (iteration) and ref_checksum (checksum of the weights). The base may have adapters itself. `open_weights`
finds the base, and the reader that it returns merges the adapters into each part of the base's weights that it reads.

The checksum of weights does not depend on the layout that saved or reads them. It is a sum over all elements, modulo
2^64. Each term is the element's bits, as a signed integer, times an odd number that depends on the tensor's name and on
the element's index in the whole tensor. Padding rows of the vocabulary are zeros and add nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megazpp.base.files import DamagedError
from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.folder import RECORD, CheckpointFolder
from megazpp.checkpoint.metadata import (
    CheckpointMetadata,
    SavedAdapters,
    check_same_model,
    check_same_vocabulary,
    read_record,
    rows_problem,
)
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import MODEL, SCALAR_HEAD, Saved
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, open_axis, raise_on_all_ranks
from megazpp.tensor_parallel.lora import joined_factors, merged
from megazpp.tensor_parallel.parameters import ParameterSpec, owned_parameters, seed_for

_INTEGERS = {2: torch.int16, 4: torch.int32}  # integer dtype by bytes per element
_PIECE = 1 << 18  # largest number of elements per step of the checksum (but at least one row)


def open_weights(
    checkpoint: Path, record: CheckpointMetadata, files: MeshAxis, lora_base: Sequence[str] = ()
) -> SafeReader:
    """Open the weights of a checkpoint for reading. If it has LoRA adapters, they are merged into their base's weights.

    All ranks call this. They verify the base's files together, and compare the checksum of its weights with the one in
    the adapters' metadata.

    Args:
        checkpoint: folder of one checkpoint.
        record: metadata of the checkpoint.
        files: axis over all ranks with a group for files, see `open_axis`.
        lora_base: folders of checkpoints in which to look for the base first (--lora-base).
    Raises:
        ValueError: the base is missing, is damaged, or has other weights. Every rank raises it.
    """
    own, adapters = SafeReader(checkpoint), record.adapters
    if adapters is None:
        return own
    # try each possible base until the checksum of its weights is right
    others = []
    for base in find_bases(checkpoint, adapters, lora_base):
        raise_on_all_ranks(files, functools.partial(verify_files, base, rank=files.rank, num_ranks=files.size))
        rest = [place for place in lora_base if Path(place).expanduser() != base.parent]
        reader = open_weights(base, read_record(base), files, rest)

        def share_of_checksum(reader: SafeReader = reader) -> int:
            """Return the sum for every n-th weight, where n is the number of ranks."""
            weights = ((key, reader.read_whole(key)) for key in _weights(reader)[files.rank :: files.size])
            return sum(sum_of_bits(key.removeprefix(MODEL), whole, (0, 0), whole.shape) for key, whole in weights)

        found = raise_on_all_ranks(files, share_of_checksum)
        checksum = spell_checksum(sum(files.share_object(files.gather_objects(found))))
        if checksum == adapters.base_checksum:
            return AdaptedReader(own, reader, record.model, adapters.alpha / adapters.rank)
        others.append(f"{base} has {checksum}")
    raise ValueError(
        f"{checkpoint}: the base of its adapters has weights with checksum {adapters.base_checksum}, but "
        f"{', '.join(others)}; pass the folder of the right base with --lora-base"
    )


def find_bases(checkpoint: Path, adapters: SavedAdapters, lora_base: Sequence[str] = ()) -> list[Path]:
    """Return the checkpoints that may be the base of a checkpoint's LoRA adapters. Their weights are not compared here.

    Args:
        checkpoint: folder of the checkpoint with adapters, for the message.
        adapters: its adapters, which name the base.
        lora_base: folders of checkpoints to search before the one that the adapters name (--lora-base).
    Returns:
        At most one checkpoint of each folder: the base's iteration, or the latest if the folder has no such checkpoint.
    Raises:
        ValueError: none of the folders has a checkpoint.
    """
    found, places = [], (*lora_base, adapters.base)
    for place in places:
        folder, step = CheckpointFolder(place, "--lora-base"), adapters.base_iteration
        iteration = step if step in folder.iterations() else folder.latest()
        if iteration is not None:
            found.append(folder.of(iteration))
    if not found:
        raise ValueError(
            f"{checkpoint} contains only LoRA adapters, and their base is not in {' or '.join(places)}; pass its "
            "folder with --lora-base"
        )
    return found


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
        self.base, self._own, self._config, self._scale = base, own, config, scale
        self._factors = functools.lru_cache(maxsize=1)(self._read_factors)

    @functools.cached_property
    def _saved(self) -> dict[str, TensorStorageMetadata]:
        """The shape, dtype and chunks of the merged model's weights, by key."""
        weights = {key: entry for key, entry in self._own.tensors().items() if key.startswith(SCALAR_HEAD)}
        return weights | {key: self.base.tensors()[key] for key in _weights(self.base)}

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        """Read a rectangular part of a merged weight into `box`, see `SafeReader.read_box`."""
        if key.startswith(SCALAR_HEAD):
            self._own.read_box(key, offsets, box)
        elif (factors := self._factors(key)) is None:
            self.base.read_box(key, offsets, box)
        else:
            # round merged values to the saved dtype first, so that they do not depend on the dtype of `box`
            part = torch.empty(box.shape, dtype=self._saved[key].properties.dtype)
            self.base.read_box(key, offsets, part)
            rows, columns = (slice(start, start + size) for start, size in zip(offsets, box.shape, strict=True))
            box.copy_(merged(part, factors[0][columns], factors[1][rows], self._scale))

    def _read_factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return A [in, r] and B [out, r] of a weight's adapter; None if the weight has no adapter."""
        prefix, config = f"{key.removesuffix('weight')}adapter.", self._config
        names = [name for name in self._own.tensors() if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): self._own.read_whole(name) for name in names}
        return joined_factors(parts, config.query_groups, config.heads, config.head_size) if parts else None


def _weights(reader: SafeReader) -> list[str]:
    """Return the sorted keys of a checkpoint's weights, except a scalar head."""
    return sorted(key for key in reader.tensors() if key.startswith(MODEL) and not key.startswith(SCALAR_HEAD))


def sum_of_bits(name: str, box: torch.Tensor, offsets: Sequence[int], whole: Sequence[int]) -> int:
    """Return the contribution of a part of a tensor to the checksum of the weights, as a number in the range of int64.

    The contributions of all parts of all tensors add up to the checksum, see `spell_checksum`.

    Args:
        name: name of the parameter.
        box: part of the tensor, [rows] or [rows, columns] in fp32, bf16 or fp16, on the CPU.
        offsets: index of the part's first element in the whole tensor, one number per dimension.
        whole: shape of the whole tensor.
    """
    columns, first = (whole[1], offsets[1]) if box.dim() > 1 else (1, 0)
    rows = box if box.dim() > 1 else box.unsqueeze(1)
    place = torch.arange(first, first + rows.shape[1]) + seed_for(name, seed=0)
    total, begin = 0, offsets[0]
    for part in rows.split(max(_PIECE // rows.shape[1], 1)):
        bits = part.contiguous().view(_INTEGERS[box.element_size()]).long()
        row = torch.arange(begin, begin + len(bits)).unsqueeze(1)
        total, begin = total + int((bits * (2 * (row * columns + place) + 1)).sum()), begin + len(bits)
    return wrapped(total)


def spell_checksum(total: int) -> str:
    """Return a sum of `sum_of_bits` results as a checksum of 16 hexadecimal digits."""
    return f"{total % (1 << 64):016x}"


def wrapped(total: int) -> int:
    """Return the number in the range of int64 that equals `total` modulo 2^64."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


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


@dataclass(frozen=True, kw_only=True)
class FrozenPlace:
    """The devices and axes that all frozen models of a job use, such as reference and reward models.

    The models share one object, because each axis needs a process group.

    Attributes:
        dims: mesh axes of the job.
        device: device of the models.
        axis: axis over the ranks among which the weights of a frozen model are sharded.
        files: axis over all ranks with a group for files, see `open_axis`.
        say: function that prints a line on rank 0.
    """

    dims: ParallelDims
    device: torch.device
    axis: MeshAxis
    files: MeshAxis
    say: Callable[[str], None] = lambda line: None


def open_frozen_place(
    dims: ParallelDims, device: torch.device, *, say: Callable[[str], None], whole: bool = False
) -> FrozenPlace:
    """Create the axes for frozen models. Every rank calls this once.

    Args:
        dims: mesh axes of the job.
        device: device of the models.
        say: function that prints a line on rank 0.
        whole: True if every rank stores all weights of its tensor-parallel part. Otherwise they are sharded over the
            data-parallel ranks of a node.
    """
    axis = MeshAxis("whole", timeline=dims.timeline) if whole else dims.twin("local", "frozen")
    return FrozenPlace(dims=dims, device=device, axis=axis, files=open_axis(dims), say=say)


class WeightReader:
    """A reader of this tensor-parallel rank's part of a checkpoint's weights, a few rows at a time.

    Every rank creates one, because the constructor verifies the files on all ranks together.

    Args:
        model: model on the meta device, whose parameters are plain tensors with this tensor-parallel rank's shapes, and
            which has all experts.
        checkpoint: folder of the checkpoint.
        record: metadata of the checkpoint.
        place: axes of the frozen models.
        lora_base: folders in which to look for the base of LoRA adapters first (--lora-base).
        vocab_size: number of tokens of the tokenizer in use.
        trained: function that returns True for the names of parameters that are not in the checkpoint.
    Raises:
        ValueError: the checkpoint is damaged, or its model or tokenizer differs. Every rank raises it.
    """

    def __init__(
        self,
        model: GPTModel,
        checkpoint: Path,
        record: CheckpointMetadata,
        place: FrozenPlace,
        *,
        lora_base: Sequence[str] = (),
        vocab_size: int,
        trained: Callable[[str], bool] = lambda name: False,
    ) -> None:
        # compare the metadata, and verify the files
        files = place.files
        check_same_model(record.flags, model.config, checkpoint)
        check_same_vocabulary(record, vocab_size, checkpoint)
        place.say(f" loading weights from {checkpoint}")
        raise_on_all_ranks(files, lambda: verify_files(checkpoint, rank=files.rank, num_ranks=files.size))
        self._reader, self._tp, self._sum = open_weights(checkpoint, record, files, lora_base), model.tp, 0
        # compare names and shapes
        parts = {
            name: (tuple(getattr(module, attribute).shape), spec)
            for name, module, attribute, spec in owned_parameters(model)
            if not trained(name)
        }
        shapes = {
            MODEL + name: tuple(size * (self._tp.size if dim == _split(spec) else 1) for dim, size in enumerate(part))
            for name, (part, spec) in parts.items()
        }
        shapes |= {MODEL + name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
        padded = {MODEL + name for name, (_, spec) in parts.items() if spec.rows is not None}
        self._parts, saved = parts, raise_on_all_ranks(files, self._reader.tensors)
        check_weights(saved, shapes, padded, record, checkpoint, any_head=True)

    def __call__(self, name: str, rows: slice) -> torch.Tensor:
        """Read rows of this tensor-parallel rank's part of a parameter, and add them to the checksum.

        Args:
            name: name of the parameter.
            rows: range of rows (dim 0) in this rank's part.
        Returns:
            The rows on the CPU, in the dtype in which they were saved. Padding rows are zeros.
        """
        (part, spec), saved = self._parts[name], self._reader.tensors()[MODEL + name]
        offsets, split = [0] * len(part), _split(spec)
        if split is not None:
            offsets[split] = self._tp.rank * part[split]
        offsets[0] += rows.start
        shape = (rows.stop - rows.start, *part[1:])
        found = torch.zeros(shape, dtype=saved.properties.dtype)
        there = max(min(saved.size[0] - offsets[0], shape[0]), 0)
        if found[:there].numel():
            self._reader.read_box(MODEL + name, tuple(offsets), found[:there])
            if split is not None or self._tp.rank == 0:
                self._sum += sum_of_bits(name, found[:there], offsets, saved.size)
        return found

    def fill_buffers(self, model: GPTModel, device: torch.device) -> None:
        """Load the model's buffers from the checkpoint, on `device`. They are not part of the checksum."""
        for prefix, module in model.named_modules():
            for attribute, _ in module.named_buffers(recurse=False):
                setattr(module, attribute, self._reader.read_whole(f"{MODEL}{prefix}.{attribute}").to(device))

    def checksum(self, *axes: MeshAxis) -> str:
        """Return the checksum of the weights: 16 hexadecimal digits that do not depend on the layout.

        Call it on all ranks of `axes` and tp, after they have read every row of every parameter once.

        Args:
            *axes: axes over which the reading of rows was divided, other than tp.
        """
        total = torch.tensor([wrapped(self._sum)], dtype=torch.int64)
        for axis in (*axes, self._tp):
            on = torch.device("cuda" if axis.timeline.device_type == "cuda" and axis.size > 1 else "cpu")
            total = axis.all_reduce_(total.to(on)).cpu()
        return spell_checksum(int(total))


def _split(spec: ParameterSpec) -> int | None:
    """Return the dimension of a parameter that tp splits; None for experts, which are whole on each rank."""
    return None if spec.expert else spec.split
