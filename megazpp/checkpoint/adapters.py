"""Checkpoints of adapters (LoRA), read as the whole models that they make of their bases.

    iter_N/  adapters, run.json --ref_load, ref_ckpt_step, ref_checksum--> the base, which may be such a one itself

Every reader of weights opens a checkpoint here: where it holds adapters, the base's weights are read, and each box of
them is merged on the way. The base is known by a checksum of its weights, whatever layout has written or reads them:
the sum over all elements of their bits times an odd number that the element's place in the whole tensor and the
tensor's name give, modulo 2^64. Padding of the vocabulary is zeros and adds nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.record import RunRecord, read_record, shape_of
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import MODEL, SCALAR_HEAD
from megazpp.checkpoint.together import together
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.lora import joined_factors, merged
from megazpp.tensor_parallel.parameters import seed_for

_INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes of an element
_PIECE = 1 << 18  # elements that are summed at once


def open_weights(checkpoint: Path, record: RunRecord, files: MeshAxis, lora_base: Sequence[str] = ()) -> SafeReader:
    """Open a checkpoint's weights: of one of adapters, base and adapters as one model; every rank calls this.

    Args:
        record: of the checkpoint.
        files: all ranks, with a group for files (`open_axis`).
        lora_base: --lora-base.
    Raises:
        ValueError: the base is not where it was, is damaged, or has other weights; on every rank.
    """
    own, flags = SafeReader(checkpoint), record.flags
    if flags.get("lora_r") is None:
        return own
    others = []
    for base in find_bases(checkpoint, record, lora_base):
        together(files, functools.partial(verify_files, base, rank=files.rank, num_ranks=files.size))
        rest = [place for place in lora_base if Path(place).expanduser() != base.parent]
        reader = open_weights(base, read_record(base), files, rest)

        def share_of_checksum(reader: SafeReader = reader) -> int:
            weights = ((key, read_whole(reader, key)) for key in _weights(reader)[files.rank :: files.size])
            return sum(sum_of_bits(key.removeprefix(MODEL), whole, (0, 0), whole.shape) for key, whole in weights)

        found = together(files, share_of_checksum)
        checksum = spell_checksum(sum(files.share_object(files.gather_objects(found))))
        if checksum == flags["ref_checksum"]:
            return AdaptedReader(own, reader, GPTConfig(**shape_of(flags)), flags["lora_alpha"] / flags["lora_r"])
        others.append(f"{base} has {checksum}")
    raise ValueError(
        f"{checkpoint}: the base of its adapters has weights with checksum {flags['ref_checksum']}, and "
        f"{', '.join(others)}: --lora-base says where the right ones are"
    )


def find_bases(checkpoint: Path, record: RunRecord, lora_base: Sequence[str] = ()) -> list[Path]:
    """The checkpoints that may be the base of one of adapters, by --lora-base and its record.

    Raises:
        ValueError: there is none.
    """
    found, flags = [], record.flags
    places = (*lora_base, flags["ref_load"])
    for place in places:
        folder, step = CheckpointFolder(place, "--lora-base"), flags["ref_ckpt_step"]
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
    def index(self) -> Metadata:
        """The merged model's index."""
        weights = {key: entry for key, entry in self._own.tensors().items() if key.startswith(SCALAR_HEAD)}
        weights |= {key: self.base.tensors()[key] for key in _weights(self.base)}
        return dataclasses.replace(self.base.index, state_dict_metadata=dict(weights))

    def read_box(self, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        if key.startswith(SCALAR_HEAD):
            self._own.read_box(key, offsets, box)
            return
        self.base.read_box(key, offsets, box)
        factors = self._factors(key)
        if factors is not None:
            rows, columns = (slice(start, start + size) for start, size in zip(offsets, box.shape, strict=True))
            box.copy_(merged(box, factors[0][columns], factors[1][rows], self._scale))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target, key, chunk = planner.resolve_tensor(item), item.storage_index.fqn, item.storage_index.offset
            assert chunk is not None, key
            box = torch.empty(item.lengths, dtype=self.tensors()[key].properties.dtype)
            self.read_box(key, tuple(map(operator.add, chunk, item.storage_offsets)), box)
            target.detach().copy_(box)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B of the adapter beside a weight."""
        prefix, config = f"{key.removesuffix('weight')}adapter.", self._config
        names = [name for name in self._own.tensors() if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): read_whole(self._own, name) for name in names}
        return joined_factors(parts, config.query_groups, config.heads, config.head_size) if parts else None


def _weights(reader: SafeReader) -> list[str]:
    """Keys of a checkpoint's weights without its scalar head, in the same order on every rank."""
    return sorted(key for key in reader.tensors() if key.startswith(MODEL) and not key.startswith(SCALAR_HEAD))


def read_whole(reader: SafeReader, key: str) -> torch.Tensor:
    """A tensor, whatever ranks have written its parts."""
    entry = reader.tensors()[key]
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    reader.read_box(key, (0,) * whole.dim(), whole)
    return whole


def sum_of_bits(name: str, box: torch.Tensor, offsets: Sequence[int], whole: Sequence[int]) -> int:
    """Return the part of a box of the tensor `name` in the checksum of its weights.

    Args:
        box: [rows] or [rows, columns] fp32, bf16 or fp16.
        offsets: where it begins in the whole tensor.
        whole: the shape of that.
    """
    rows = box if box.dim() > 1 else box.unsqueeze(1)
    columns, first = (whole[1], offsets[1]) if box.dim() > 1 else (1, 0)
    seed, total = seed_for(name, seed=0), 0
    place = torch.arange(first, first + rows.shape[1])
    at_once = max(_PIECE // rows.shape[1], 1)
    for start in range(0, rows.shape[0], at_once):
        bits = rows[start : start + at_once].contiguous().view(_INTEGERS[box.element_size()]).long()
        row = torch.arange(offsets[0] + start, offsets[0] + start + bits.shape[0]).unsqueeze(1)
        total += int((bits * (2 * (row * columns + place + seed) + 1)).sum())
    return wrapped(total)


def spell_checksum(total: int) -> str:
    """16 hexadecimal digits."""
    return f"{total % (1 << 64):016x}"


def wrapped(total: int) -> int:
    """Wrap a sum around to the range of int64."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
