"""Rows of a checkpoint's weights, as frozen units ask for them: each rank reads what it keeps, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazpp.checkpoint.adapters import open_weights, spell_checksum, sum_of_bits, wrapped
from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.read import LoadSource, check_weights
from megazpp.checkpoint.record import RunRecord, check_same_model, check_same_vocabulary
from megazpp.checkpoint.state import MODEL
from megazpp.checkpoint.together import together
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import owned_parameters


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
        check_same_vocabulary(record, vocab_size, self.checkpoint)
        say(f" loading weights from {self.checkpoint}")
        together(files, lambda: verify_files(self.checkpoint, rank=files.rank, num_ranks=files.size))
        self._reader, self._tp, self._sum = open_weights(self.checkpoint, record, files, source.lora_base), model.tp, 0
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
        self._parts, saved = parts, together(files, self._reader.tensors)
        check_weights(saved, shapes, padded, record, self.checkpoint, any_head=True)

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
