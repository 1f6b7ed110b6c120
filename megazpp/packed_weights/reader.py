"""A reader of a frozen model's weights from a checkpoint, a few rows at a time, and a checksum of the weights.

The checksum does not depend on the numbers of ranks that saved the weights or that read them. It is a sum over all
elements, modulo 2^64. Each term is the element's bits, as a signed integer, times an odd number that depends on the
tensor's name and on the element's index in the unsharded tensor. Padding rows of the vocabulary are zeros and add
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megazpp.checkpoint.checksums import checkpoint_digest, verify_files
from megazpp.checkpoint.metadata import CheckpointMetadata, check_same_model, check_same_vocabulary
from megazpp.checkpoint.safe_reader import WeightOpener, check_weights
from megazpp.checkpoint.state import MODEL
from megazpp.model.gpt import GPTModel
from megazpp.parallel.agreement import check_equal_on_all_ranks, raise_on_all_ranks
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, open_axis
from megazpp.tensor_parallel.initialize import seed_for
from megazpp.tensor_parallel.parameters import ParameterSpec, model_state, owned_parameters

# The checksum of weights reads each element's bits as an integer; the integer has the element's size in bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 18  # maximum elements that the checksum reads at once, in complete rows; a longer row is read alone


@dataclass(frozen=True, kw_only=True)
class FrozenPlace:
    """The device and the mesh axes that all frozen models of a job use, such as reference and reward models.

    The models share one such object, because each axis needs a process group.

    Attributes:
        dims: mesh axes of the job.
        device: device of this rank, on which the models compute.
        axis: axis over the ranks among which the weights of a frozen model are sharded.
        files: axis over all ranks of the job, for work on files; see `open_axis`.
        say: function that prints a line on rank 0 and does nothing on other ranks.
    """

    dims: ParallelDims
    device: torch.device
    axis: MeshAxis
    files: MeshAxis
    say: Callable[[str], None] = lambda line: None


def open_frozen_place(
    dims: ParallelDims, device: torch.device, *, say: Callable[[str], None], whole: bool = False
) -> FrozenPlace:
    """Create the axes, with their process groups, that the frozen models of a job share. All ranks call this once.

    Args:
        dims: mesh axes of the job.
        device: device of this rank, on which the models compute.
        say: function that prints a line on rank 0 and does nothing on other ranks.
        whole: True if every rank stores complete weights, apart from tensor parallelism; False if the weights are
            sharded over the data-parallel ranks of a node.
    """
    axis = MeshAxis("whole", timeline=dims.timeline) if whole else dims.twin("local", "frozen")
    return FrozenPlace(dims=dims, device=device, axis=axis, files=open_axis(dims), say=say)


class WeightReader:
    """A reader of this tensor-parallel rank's slices of the weights in a checkpoint, a few rows at a time.

    All ranks must create a reader together, because the constructor divides the verification of the files among them.

    Args:
        model: model on the meta device, whose parameters are plain tensors with this tensor-parallel rank's shapes, and
            which has all experts.
        checkpoint: folder of the checkpoint.
        record: metadata of the checkpoint.
        place: mesh axes and device that all frozen models of the job share.
        opener: opener of a checkpoint's weights. LoRA's opener also opens checkpoints that contain only adapters.
        vocab_size: number of tokens of the run's tokenizer.
        trained: function that returns True for the names of trained parameters, which this reader does not read.
    Raises:
        ValueError: the checkpoint is damaged, or its model or tokenizer differs. All ranks raise this error.
    """

    def __init__(
        self,
        model: GPTModel,
        checkpoint: Path,
        record: CheckpointMetadata,
        place: FrozenPlace,
        *,
        opener: WeightOpener,
        vocab_size: int,
        trained: Callable[[str], bool] = lambda name: False,
    ) -> None:
        # compare the checkpoint's metadata with the model, and verify the checkpoint's files
        files = place.files
        check_same_model(record.flags, model.config, checkpoint)
        check_same_vocabulary(record, vocab_size, checkpoint)
        place.say(f" loading weights from {checkpoint}")
        raise_on_all_ranks(files, lambda: verify_files(checkpoint, rank=files.rank, num_ranks=files.size))
        check_equal_on_all_ranks(files, f"the checkpoint {checkpoint}", checkpoint_digest(checkpoint))
        self._reader, self._tp, self._axis, self._sum = opener.open(checkpoint, record, files), model.tp, place.axis, 0
        # compare the names and shapes of the saved weights with the model's
        parts = {
            name: (tuple(getattr(module, attribute).shape), spec)
            for name, module, attribute, spec in owned_parameters(model)
            if not trained(name)
        }
        shapes = {
            MODEL + name: tuple(size * (self._tp.size if dim == _split(spec) else 1) for dim, size in enumerate(part))
            for name, (part, spec) in parts.items()
        }
        # expect the model's buffers, such as the expert biases of routers, in the checkpoint too
        whole = {name: x for name, x in model_state(model).items() if name not in parts and not trained(name)}
        shapes |= {MODEL + name: tuple(x.shape) for name, x in whole.items()}
        padded = {MODEL + name for name, (_, spec) in parts.items() if spec.rows is not None}
        self._parts, saved = parts, raise_on_all_ranks(files, self._reader.tensors)
        check_weights(saved, shapes, padded, record, checkpoint, any_head=True)

    def __call__(self, name: str, rows: slice) -> torch.Tensor:
        """Read rows of this tensor-parallel rank's slice of a parameter, and add them to the checksum of the weights.

        Args:
            name: name of the parameter.
            rows: range of rows (dim 0) of this rank's slice.
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
            # A weight that is not split is equal on all tensor-parallel ranks, so only the first of them counts it
            if split is not None or self._tp.rank == 0:
                self._sum += sum_of_bits(name, found[:there], offsets, saved.size)
        return found

    def fill_buffers(self, model: GPTModel, device: torch.device) -> None:
        """Load the model's buffers from the checkpoint onto `device`, and add them to the checksum of the weights.

        Like frozen weights, buffers become plain tensors instead of registered buffers. Training therefore neither
        fills, changes nor saves them.
        """
        for prefix, module in model.named_modules():
            for attribute, buffer in list(module.named_buffers(recurse=False)):
                name = f"{prefix}.{attribute}" if prefix else attribute
                whole = self._reader.read_whole(MODEL + name)
                delattr(module, attribute)
                setattr(module, attribute, whole.to(device, buffer.dtype))
                # All ranks read the same values, which must count only once in the checksum's sum over ranks.
                if self._tp.rank == self._axis.rank == 0:
                    self._sum += sum_of_bits(name, whole, (0, 0), whole.shape)

    def checksum(self) -> str:
        """Return the checksum of the model's weights: 16 hexadecimal digits that do not depend on the number of ranks.

        Call this on all ranks after all weights have been read. The ranks of the frozen models' axis together must have
        read every row of every parameter once, and each rank must have called `fill_buffers`.
        """
        total = torch.tensor([wrapped(self._sum)], dtype=torch.int64)
        for axis in (self._axis, self._tp):
            on = torch.device("cuda" if axis.timeline.device_type == "cuda" and axis.size > 1 else "cpu")
            total = axis.all_reduce_(total.to(on)).cpu()
        return spell_checksum(int(total))


def sum_of_bits(name: str, box: torch.Tensor, offsets: Sequence[int], whole: Sequence[int]) -> int:
    """Return the contribution of a slice of a tensor to the checksum of the weights, as a number in the range of int64.

    Modulo 2^64, the contributions of all slices of all tensors add up to the checksum, see `spell_checksum`.

    Args:
        name: name of the parameter.
        box: slice of the tensor, a scalar, [rows] or [rows, columns], on the CPU.
        offsets: index of the slice's first element in the unsharded tensor, one number per dimension.
        whole: shape of the unsharded tensor.
    """
    columns, first = (whole[1], offsets[1]) if box.dim() > 1 else (1, 0)
    rows = box if box.dim() > 1 else box.reshape(-1, 1)
    place = torch.arange(first, first + rows.shape[1]) + seed_for(name, seed=0)
    total, begin = 0, offsets[0]
    for part in rows.split(max(_PIECE // rows.shape[1], 1)):
        bits = part.contiguous().view(_INTEGERS[box.element_size()]).long()
        row = torch.arange(begin, begin + len(bits)).unsqueeze(1)
        total, begin = total + int((bits * (2 * (row * columns + place) + 1)).sum()), begin + len(bits)
    return wrapped(total)


def spell_checksum(total: int) -> str:
    """Return the checksum of weights, 16 hexadecimal digits, for the sum `total` of all results of `sum_of_bits`."""
    return f"{total % (1 << 64):016x}"


def wrapped(total: int) -> int:
    """Return the number in the range of int64 that equals `total` modulo 2^64.

    Sums for the checksum of weights are Python ints without limit; a tensor that is all-reduced holds an int64.
    """
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _split(spec: ParameterSpec) -> int | None:
    """Return the dimension of a parameter that is split over tensor-parallel ranks; None if no dimension is split.

    A frozen model holds all experts on every tensor-parallel rank, so the parameters of experts are not split.
    """
    return None if spec.expert else spec.split
