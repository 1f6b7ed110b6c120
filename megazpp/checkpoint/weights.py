"""A checkpoint's weights alone: checked, read in rows, summed, and of adapters (LoRA) merged into their bases.

    iter_N/  adapters, run.json --ref_load, ref_ckpt_step, ref_checksum--> the base, which may be such a one itself

Every reader of weights opens a checkpoint here: where it holds adapters, the base's weights are read, and each box of
them is merged on the way. The base is known by a checksum of its weights, whatever layout has written or reads them:
the sum over all elements of their bits times an odd number that the element's place in the whole tensor and the
tensor's name give, modulo 2^64. Padding of the vocabulary is zeros and adds nothing.
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
from megazpp.tensor_parallel.parameters import owned_parameters, seed_for

_INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes of an element
_PIECE = 1 << 18  # elements that are summed at once


def open_weights(
    checkpoint: Path, record: CheckpointMetadata, files: MeshAxis, lora_base: Sequence[str] = ()
) -> SafeReader:
    """Open a checkpoint's weights: of one of adapters, base and adapters as one model; every rank calls this.

    Args:
        record: of the checkpoint.
        files: all ranks, with a group for files (`open_axis`).
        lora_base: --lora-base.
    Raises:
        ValueError: the base is not where it was, is damaged, or has other weights; on every rank.
    """
    own, adapters = SafeReader(checkpoint), record.adapters
    if adapters is None:
        return own
    others = []
    for base in find_bases(checkpoint, adapters, lora_base):
        raise_on_all_ranks(files, functools.partial(verify_files, base, rank=files.rank, num_ranks=files.size))
        rest = [place for place in lora_base if Path(place).expanduser() != base.parent]
        reader = open_weights(base, read_record(base), files, rest)

        def share_of_checksum(reader: SafeReader = reader) -> int:
            weights = ((key, reader.read_whole(key)) for key in _weights(reader)[files.rank :: files.size])
            return sum(sum_of_bits(key.removeprefix(MODEL), whole, (0, 0), whole.shape) for key, whole in weights)

        found = raise_on_all_ranks(files, share_of_checksum)
        checksum = spell_checksum(sum(files.share_object(files.gather_objects(found))))
        if checksum == adapters.base_checksum:
            return AdaptedReader(own, reader, record.model, adapters.alpha / adapters.rank)
        others.append(f"{base} has {checksum}")
    raise ValueError(
        f"{checkpoint}: the base of its adapters has weights with checksum {adapters.base_checksum}, and "
        f"{', '.join(others)}: --lora-base says where the right ones are"
    )


def find_bases(checkpoint: Path, adapters: SavedAdapters, lora_base: Sequence[str] = ()) -> list[Path]:
    """Return the checkpoints that may be the base of a checkpoint's adapters, those of --lora-base first.

    Raises:
        ValueError: neither --lora-base nor the adapters' record names a folder with a checkpoint.
    """
    found, places = [], (*lora_base, adapters.base)
    for place in places:
        folder, step = CheckpointFolder(place, "--lora-base"), adapters.base_iteration
        iteration = step if step in folder.iterations() else folder.latest()
        if iteration is not None:
            found.append(folder.of(iteration))
    if not found:
        raise ValueError(
            f"{checkpoint} holds adapters alone, and their base is not in {' or '.join(places)}: --lora-base says "
            "where it is now"
        )
    return found


class AdaptedReader(SafeReader):
    """Reads base and adapters as one model: each box of a weight is merged when it is read.

    Args:
        own: reads the adapters, and the scalar head that was trained beside them.
        base: reads the weights that they were trained on.
        config: shape of the model.
        scale: alpha / r.
    """

    def __init__(self, own: SafeReader, base: SafeReader, config: GPTConfig, scale: float) -> None:
        super().__init__(own.path)
        self.base, self._own, self._config, self._scale = base, own, config, scale
        self._factors = functools.lru_cache(maxsize=1)(self._read_factors)

    @functools.cached_property
    def _saved(self) -> dict[str, TensorStorageMetadata]:
        weights = {key: entry for key, entry in self._own.tensors().items() if key.startswith(SCALAR_HEAD)}
        return weights | {key: self.base.tensors()[key] for key in _weights(self.base)}

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        if key.startswith(SCALAR_HEAD):
            self._own.read_box(key, offsets, box)
        elif (factors := self._factors(key)) is None:
            self.base.read_box(key, offsets, box)
        else:
            part = torch.empty(box.shape, dtype=self._saved[key].properties.dtype)  # rounded to it, whatever reads it
            self.base.read_box(key, offsets, part)
            rows, columns = (slice(start, start + size) for start, size in zip(offsets, box.shape, strict=True))
            box.copy_(merged(part, factors[0][columns], factors[1][rows], self._scale))

    def _read_factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B of the adapter beside a weight."""
        prefix, config = f"{key.removesuffix('weight')}adapter.", self._config
        names = [name for name in self._own.tensors() if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): self._own.read_whole(name) for name in names}
        return joined_factors(parts, config.query_groups, config.heads, config.head_size) if parts else None


def _weights(reader: SafeReader) -> list[str]:
    """Keys of a checkpoint's weights without its scalar head, in the same order on every rank."""
    return sorted(key for key in reader.tensors() if key.startswith(MODEL) and not key.startswith(SCALAR_HEAD))


def sum_of_bits(name: str, box: torch.Tensor, offsets: Sequence[int], whole: Sequence[int]) -> int:
    """Return the part of a box of the tensor `name` in the checksum of its weights.

    Args:
        box: [rows] or [rows, columns] fp32, bf16 or fp16.
        offsets: where it begins in the whole tensor.
        whole: the shape of that.
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
    """16 hexadecimal digits."""
    return f"{total % (1 << 64):016x}"


def wrapped(total: int) -> int:
    """Wrap a sum around to the range of int64."""
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
    """Raises DamagedError where the saved weights are not those of the model that run.json describes.

    Args:
        shapes: of the model's weights, by key; those of keys in `padded` may have other rows of padding.
        any_head: only one of the two may have a scalar head, because weights alone are taken.
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
    """The home of a job's frozen models; they share one, because its axes are process groups.

    Attributes:
        axis: the ranks of a node that share a frozen unit.
        files: all ranks, for what is read and written together (`open_axis`).
        say: prints a line on rank 0.
    """

    dims: ParallelDims
    device: torch.device
    axis: MeshAxis
    files: MeshAxis
    say: Callable[[str], None] = lambda line: None


def open_frozen_place(
    dims: ParallelDims, device: torch.device, *, say: Callable[[str], None], whole: bool = False
) -> FrozenPlace:
    """Make the axes of frozen models; every rank calls this once.

    Args:
        whole: every rank has all weights of its tensor-parallel part: nothing is gathered, or there twice.
    """
    axis = MeshAxis("whole", timeline=dims.timeline) if whole else dims.twin("local", "frozen")
    return FrozenPlace(dims=dims, device=device, axis=axis, files=open_axis(dims), say=say)


class WeightReader:
    """Reads rows of this tensor-parallel rank's part of a checkpoint's weights; every rank makes one.

    Args:
        model: on the meta device, with tensor-parallel parts as plain parameters.
        checkpoint, record: its folder and what it says.
        lora_base: --lora-base.
        vocab_size: of the tokenizer in use.
        trained: whether a parameter of this name is none of the checkpoint's.
    Raises:
        ValueError: it is damaged, or another model's or tokenizer's; on every rank.
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
        files = place.files
        check_same_model(record.flags, model.config, checkpoint)
        check_same_vocabulary(record, vocab_size, checkpoint)
        place.say(f" loading weights from {checkpoint}")
        raise_on_all_ranks(files, lambda: verify_files(checkpoint, rank=files.rank, num_ranks=files.size))
        self._reader, self._tp, self._sum = open_weights(checkpoint, record, files, lora_base), model.tp, 0
        parts = {
            name: (tuple(getattr(module, attribute).shape), spec)
            for name, module, attribute, spec in owned_parameters(model)
            if not trained(name)
        }
        shapes = {
            MODEL + name: tuple(size * (self._tp.size if dim == spec.split else 1) for dim, size in enumerate(part))
            for name, (part, spec) in parts.items()
        }
        padded = {MODEL + name for name, (_, spec) in parts.items() if spec.rows is not None}
        self._parts, saved = parts, raise_on_all_ranks(files, self._reader.tensors)
        check_weights(saved, shapes, padded, record, checkpoint, any_head=True)

    def __call__(self, name: str, rows: slice) -> torch.Tensor:
        """These rows of dim 0, on the CPU in the dtype that was saved; rows of padding are zeros."""
        (part, spec), saved = self._parts[name], self._reader.tensors()[MODEL + name]
        offsets = [0] * len(part)
        if spec.split is not None:
            offsets[spec.split] = self._tp.rank * part[spec.split]
        offsets[0] += rows.start
        shape = (rows.stop - rows.start, *part[1:])
        found = torch.zeros(shape, dtype=saved.properties.dtype)
        there = max(min(saved.size[0] - offsets[0], shape[0]), 0)
        if found[:there].numel():
            self._reader.read_box(MODEL + name, tuple(offsets), found[:there])
            if spec.split is not None or self._tp.rank == 0:
                self._sum += sum_of_bits(name, found[:there], offsets, saved.size)
        return found

    def checksum(self, *axes: MeshAxis) -> str:
        """16 hexadecimal digits that name the weights, once all rows have been read over `axes` and tp."""
        total = torch.tensor([wrapped(self._sum)], dtype=torch.int64)
        for axis in (*axes, self._tp):
            on = torch.device("cuda" if axis.timeline.device_type == "cuda" and axis.size > 1 else "cpu")
            total = axis.all_reduce_(total.to(on)).cpu()
        return spell_checksum(int(total))
