"""Write weight patches: files with the 16-bit weights that each training step changes, for external inference engines.

    DIR/0001/weights-000001-00000-of-00004.safetensors    all weights, after the first step and at regular intervals
    DIR/0001/patch-000002-00000-of-00004.safetensors      the changes by one step, as lossless weight deltas

Each rank writes the shards that it holds, so nothing is communicated. If several ranks hold equal copies of a shard,
only the first of them writes it. Each file appears atomically, and a step is complete when the files of all ranks
exist. A run begins a new chain of files, in a new numbered folder, when it starts and when it resumes. Only one job at
a time may write to DIR, because engines follow the newest chain there. weight_patches/reader.py reads the files.

A file contains tensors by their names in `GPTModel`. A `weights` file has shards in the dtype of compute. A `patch`
file has for each shard a message of kernels/weight_delta, [M] uint8, of the shortest possible length. The files with
index 00000 also have the model's buffers, unsharded and in fp32. The metadata in a file's header has:

    step        number of the training step
    chain       checksum of this rank's first `weights` file in the chain and of its patches up to this step, as 8
                hexadecimal digits
    base        in a `patch` file: `chain` of the weights to which the patch applies
    checksum    in a `weights` file: checksum of `model` and of the tensors
    model       in a `weights` file: JSON with the architecture, the size of the vocabulary, the ids of special tokens,
                and for each shard the unsharded shape of its tensor and the index of the shard's first element in
                that tensor

The weights are the fp32 master weights rounded to 16 bits, as in a checkpoint that was converted to 16 bits. Training
with `--zero-weight-delta lossless` computes with the same weights. The exceptions are changes that do not fit into a
message between nodes (`weights_left_out` in the log). Training uses these changes one step later.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from torch.distributed.tensor import DTensor

from megazpp.base.files import errors_as, first_free, lock_for_this_job, make_writable, renamed_when_done
from megazpp.base.program import user_errors
from megazpp.convert.huggingface import choose_architecture
from megazpp.convert.model import HEAD, held
from megazpp.convert.safetensors_file import write_tensors
from megazpp.convert.tokenizer_files import token_ids
from megazpp.data.tokenizer import Tokenizer
from megazpp.kernels.weight_delta import encode, message_bytes, numbers
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.agreement import raise_on_all_ranks, ranks_that_share
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.config import CommPlan, PrecisionConfig
from megazpp.zero.sharding import Sharding


class WeightPatches:
    """The writer of a rank's weight patch after each training step, and of all its weights at regular intervals.

    A copy of the rank's weights after the last step stays in host memory, with two bytes per weight of its shards.

    Args:
        folder: folder of --save-weight-patches, which `take_patches_folder` has created.
        interval: number of training steps between files with all weights.
        model: model whose weights are written.
        sharding: sharding of the model, with its sharding units.
        dims: mesh axes.
        dtype: 16-bit dtype in which training computes, which the files contain.
        tokenizer: tokenizer of the model, whose special tokens the files name; None if it is not known.
        lock: open lock file from `take_patches_folder`, which this object keeps open so that the folder stays locked;
            None on ranks that hold no lock.
    """

    def __init__(
        self,
        folder: Path,
        interval: int,
        model: GPTModel,
        sharding: Sharding,
        dims: ParallelDims,
        *,
        dtype: torch.dtype,
        tokenizer: Tokenizer | None = None,
        lock: IO[str] | None = None,
    ) -> None:
        self._folder, self._interval, self._dtype = folder, interval, dtype
        self._model, self._sharding, self._dims = model, sharding, dims
        # Index of this rank's file in each step. Ranks that differ only on the axis `replicate` have the same index and
        # equal shards, and `write` lets only the first of them write the file.
        self._file = dims.shard.rank * dims.tp.size + dims.tp.rank
        self._num_files = dims.shard.size * dims.tp.size
        # This rank's shards at the last `write`, in host memory. The next patch has their changes.
        self._last: dict[str, torch.Tensor] = {}
        # For each shard, the unsharded shape of its parameter and the index of the shard's first element.
        self._places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._step: int | None = None  # training step of the last call of `write`; None before the first call
        self._chain = 0  # checksum `chain` of this rank's files so far, see the top of this file
        self._token_ids = token_ids(tokenizer)
        self._lock = lock

    def write(self, progress: TrainingProgress) -> None:
        """Write a file with the changes of this rank's shards in the last training step.

        At the start of a chain, write a file with the complete shards instead. Write such a file in addition if the
        number of the step is a multiple of the interval. A new chain starts at the first call, and if the step of
        `progress` does not follow the step of the last call. All ranks call this after each step.
        """
        step, first = progress.iteration, self._step is None or progress.iteration != self._step + 1
        if first:
            self._begin_chain()
        self._step = step
        if self._dims.replicate.rank > 0:
            return
        # ---- compute the changes since the last step, and copy the buffers to host memory
        changes: dict[str, torch.Tensor] = {}
        for name, shard in self._shards():
            new = shard.detach().to(self._dtype, copy=True)
            if not first:
                changes[name] = encode_change(new, self._last[name])
            self._last[name] = new.cpu()
        buffers = {name: buffer.cpu() for name, buffer in self._model.named_buffers() if self._file == 0}
        # ---- write this rank's `patch` file, and its `weights` file at the start and after each interval
        weights, base = self._last | buffers, self._chain
        if first:
            self._chain = checksum(weights)
        else:
            changes |= buffers
            self._chain = checksum(changes, base)
            self._write("patch", changes, {"base": f"{base:08x}"})
        if first or step % self._interval == 0:
            places = self._places | {name: (tuple(x.shape), (0,) * x.dim()) for name, x in buffers.items()}
            about = {"config": asdict(self._model.config), "vocab_size": self._model.vocab_size, "places": places}
            model = json.dumps(about | {"token_ids": self._token_ids})
            found = checksum(weights, zlib.crc32(model.encode()))
            self._write("weights", weights, {"checksum": f"{found:08x}", "model": model})

    def _begin_chain(self) -> None:
        """Create the numbered folder for a new chain of weight patches, and store its path. All ranks call this."""
        with self._dims.counter.paused(), user_errors():
            found = raise_on_all_ranks(self._dims.world, self._make_chain_folder)
            self._chain_folder: Path = self._dims.world.share_object(found)

    def _make_chain_folder(self) -> Path | None:
        """Create the numbered folder for a new chain of weight patches on rank 0, and return it; None on other ranks.

        Raises:
            ValueError: the folder cannot be created.
        """
        if self._dims.world.rank > 0:
            return None
        chain = first_free(lambda number: self._folder / f"{number:04d}")
        with errors_as(f"--save-weight-patches: {chain} cannot be created", OSError):
            chain.mkdir(parents=True)
        return chain

    def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the local tensor of each shard that this rank writes, and store its place in `_places`.

        The scalar head of a reward model is not written.
        """
        for unit in self._sharding.units:
            for name, weight in unit.as_dtensors(unit.shards()).items():
                local = weight.to_local()
                if name != HEAD and local.numel() and _is_first_copy(weight):
                    (chunk,) = weight.__create_chunk_list__()
                    self._places[name] = tuple(weight.shape), tuple(chunk.offsets)
                    yield name, local

    def _write(self, kind: str, tensors: Mapping[str, torch.Tensor], about: dict[str, str]) -> None:
        """Write this rank's file of the current step into the folder of the chain, atomically.

        Args:
            kind: "weights" or "patch", the beginning of the file's name.
            tensors: tensors to write, by name.
            about: entries of the file's metadata, in addition to `step` and `chain`.
        """
        name = f"{kind}-{self._step:06d}-{self._file:05d}-of-{self._num_files:05d}.safetensors"
        path = self._chain_folder / name
        about = {"step": str(self._step), "chain": f"{self._chain:08x}", **about}
        failure = errors_as(f"--save-weight-patches: {path} cannot be written", OSError)
        with user_errors(), failure, renamed_when_done(path.with_suffix(".unfinished"), path) as unfinished:
            write_tensors(unfinished, {name: held(tensor) for name, tensor in tensors.items()}, about)


def take_patches_folder(path: str, rank: int) -> tuple[Path, IO[str] | None]:
    """Create the folder of --save-weight-patches, and lock it for this job.

    Args:
        path: value of --save-weight-patches.
        rank: rank of this process in the job.
    Returns:
        the folder and the open lock file, which locks the folder until it is closed. On ranks other than 0, None takes
        the place of the lock file.
    Raises:
        ValueError: the folder is not writable, or another job writes weight patches there.
    """
    folder = make_writable(path, "--save-weight-patches")
    if rank > 0:
        return folder, None
    name = f"--save-weight-patches {folder}"
    with errors_as(name, OSError):
        return folder, lock_for_this_job(folder / "patches.lock", name)


def check_shared(folder: Path, world: MeshAxis) -> None:
    """Raise a ValueError on all ranks if the hosts do not share the folder of --save-weight-patches.

    Each rank writes a part of every weight patch, and an inference engine needs all parts in one folder.

    Args:
        folder: path of the folder, which exists on this rank's host.
        world: axis over all ranks of the job.
    """
    shares = ranks_that_share(world, folder)

    def check() -> None:
        """Raise a ValueError if this rank does not see rank 0's folder."""
        if not shares[world.rank]:
            raise ValueError(
                f"--save-weight-patches {folder} is a separate folder on each host: choose a folder of a file system "
                "that all hosts of the job share"
            )

    raise_on_all_ranks(world, check)


def _is_first_copy(weight: DTensor) -> bool:
    """Return True if no rank with a lower index on a replicated mesh axis holds an equal copy of this rank's shard."""
    coordinate = weight.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(index for index, place in zip(coordinate, weight.placements, strict=True) if place.is_replicate())


def encode_change(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the lossless weight delta from `old` to `new`: 1-D uint8 in host memory, of the shortest possible length.

    Args:
        new: weights in a 16-bit dtype, contiguous.
        old: earlier weights of the same shape and dtype, on any device.
    """
    message = torch.empty(message_bytes(new.numel()), dtype=torch.uint8, device=new.device)
    encode(new.view(-1), old.to(new.device).view(-1), message)
    needed = int(numbers(message.unsqueeze(0))[0, 0])
    return message[: message_bytes(new.numel(), needed)].cpu()


def checksum(tensors: Mapping[str, torch.Tensor], start: int = 0) -> int:
    """Return the CRC-32 of the names and contents of tensors, in the order of their names.

    Args:
        tensors: tensors in host memory, by name.
        start: CRC-32 of preceding data, which the result continues.
    """
    for name in sorted(tensors):
        start = zlib.crc32(name.encode(), start)
        start = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, start)
    return start


def check_patches(config: GPTConfig, precision: PrecisionConfig, wire: CommPlan) -> None:
    """Raise ValueError if a run's weights cannot be written as weight patches. The message names the flags.

    Args:
        config: architecture of the model, which a Hugging Face family must be able to represent.
        precision: dtype in which training computes, which must have 16 bits.
        wire: formats in which weights are communicated, which must have 16 bits.
    """
    if precision.param_dtype.itemsize != 2:
        raise ValueError(
            "--save-weight-patches needs --bf16 or --fp16: with fp32, each step changes all weights, so patches would "
            "be as large as the model"
        )
    if wire.gather is not None and wire.gather.fmt is not None:
        raise ValueError(
            f"--save-weight-patches needs 16-bit weights, but training computes with weights in {wire.gather.fmt.bits} "
            "bits; use --zero-weight-delta lossless, which gathers 16 bits"
        )
    choose_architecture(config)
