"""Rows of a checkpoint's weights, as frozen units ask for them: each rank reads what it keeps, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megazpp.checkpoint.adapters import open_weights, spell_checksum, sum_of_bits, wrapped
from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.record import RunRecord, check_same_model, rows_problem
from megazpp.checkpoint.state import MODEL
from megazpp.checkpoint.together import together
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, owned_parameters


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A tensor of a checkpoint, and this tensor-parallel rank's part of it."""

    key: str
    spec: ParameterSpec
    part: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype


class WeightReader:
    """Reads rows of this tensor-parallel rank's part of a checkpoint's weights; every rank makes one.

    Args:
        model: on the meta device, with tensor-parallel parts as plain parameters.
        source, record: the checkpoint, as `find_weights` has found it.
        files: all ranks, with a group for files (`open_axis`).
        vocab_size: of the tokenizer in use.
        trained: whether a parameter of this name is none of the checkpoint's.
        say: prints a line on rank 0.
    Raises:
        ValueError: it is damaged, or another model's or tokenizer's; on every rank.
    """

    def __init__(
        self,
        model: GPTModel,
        source: LoadSource,
        record: RunRecord,
        files: MeshAxis,
        *,
        vocab_size: int,
        trained: Callable[[str], bool] = lambda name: False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.checkpoint = source.folder.of(source.candidates()[0])
        check_same_model(record.flags, model.config, self.checkpoint)
        if record.vocab_size != vocab_size:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens, that of {self.checkpoint} had {record.vocab_size}"
            )
        say(f" loading weights from {self.checkpoint}")
        together(files, lambda: verify_files(self.checkpoint, rank=files.rank, num_ranks=files.size))
        self._reader, self._tp, self._sum = open_weights(self.checkpoint, record, files, source.lora_base), model.tp, 0
        self._saved = together(files, lambda: self._find(model, record, trained))

    def __call__(self, name: str, rows: slice) -> torch.Tensor:
        """These rows of dim 0, on the CPU in the dtype that was saved; rows of padding are zeros."""
        saved, split = self._saved[name], self._saved[name].spec.split
        offsets = [0] * len(saved.part)
        if split is not None:
            offsets[split] = self._tp.rank * saved.part[split]
        offsets[0] += rows.start
        shape = (rows.stop - rows.start, *saved.part[1:])
        found = torch.zeros(shape, dtype=saved.dtype)
        there = max(min(saved.whole[0] - offsets[0], shape[0]), 0)
        if found[:there].numel():
            self._reader.read_box(saved.key, tuple(offsets), found[:there])
            if split is not None or self._tp.rank == 0:
                self._sum += sum_of_bits(name, found[:there], offsets, saved.whole)
        return found

    def checksum(self, *axes: MeshAxis) -> str:
        """16 hexadecimal digits that name the weights, once all rows have been read over `axes` and tp."""
        total = torch.tensor([wrapped(self._sum)], dtype=torch.int64)
        for axis in (*axes, self._tp):
            on = torch.device("cuda" if axis.timeline.device_type == "cuda" and axis.size > 1 else "cpu")
            total = axis.all_reduce_(total.to(on)).cpu()
        return spell_checksum(int(total))

    def _find(self, model: GPTModel, record: RunRecord, trained: Callable[[str], bool]) -> dict[str, _Saved]:
        entries, found = self._reader.tensors(), {}
        for name, module, attribute, spec in owned_parameters(model):
            if trained(name):
                continue
            part = tuple(getattr(module, attribute).shape)
            wanted = [size * (self._tp.size if dim == spec.split else 1) for dim, size in enumerate(part)]
            key = MODEL + name
            there = tuple(entries[key].size) if key in entries else None
            if there is None or list(there[1:]) != wanted[1:] or (spec.rows is None and there[0] != wanted[0]):
                raise ValueError(f"{self.checkpoint}: {key} is {there or 'missing'}, the model's is {tuple(wanted)}")
            if spec.rows is not None and (problem := rows_problem(record, there[0])):
                raise ValueError(f"{self.checkpoint}: {key} {problem}")
            found[name] = _Saved(key, spec, part, there, entries[key].properties.dtype)
        return found
