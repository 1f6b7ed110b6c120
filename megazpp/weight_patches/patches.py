"""Weight patches: the 16-bit weights that each optimizer step has changed, for engines that generate with the policy.

    anchor-000100.safetensors    {name: weights}                        all weights, at regular intervals of steps
    patch-000101.safetensors     {name.indices: int32, name.values}     changed elements, by index in the flat weight

Names and shapes are Hugging Face's. Values are the 16-bit weights with which training computes. Each file's metadata
holds `step` and `base_step`, the step to which a patch applies. An anchor and all patches after it reproduce the
weights of each step bit for bit. Files appear atomically. A resumed run begins with an anchor.

Patches cause no inter-node traffic if the run keeps a secondary partition, because the weights are gathered inside the
node. Rank 0 needs memory on the host for one copy of all weights. TRL and vLLM accept this format (SparseWeightPatch).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from megazpp.base.files import renamed_when_done
from megazpp.convert.huggingface import choose_architecture
from megazpp.convert.model import HEAD, OUTPUT, WORDS, held
from megazpp.convert.safetensors_file import write_tensors
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.config import CommPlan, PrecisionConfig
from megazpp.zero.sharding import Sharding


class WeightPatches:
    """The writer of a patch or an anchor (all weights) after every step.

    Args:
        folder: folder for the files; it is created.
        interval: iterations between anchors.
        model: model whose weights are written.
        sharding: its sharding units, which are unsharded one after the other.
        dims: axes of the job.
    """

    def __init__(self, folder: Path, interval: int, model: GPTModel, sharding: Sharding, dims: ParallelDims) -> None:
        self._folder, self._interval, self._model, self._sharding, self._dims = folder, interval, model, sharding, dims
        self._pieces = choose_architecture(model.config).pieces(model.config)
        self._last: dict[str, torch.Tensor] = {}  # on rank 0, the weights of the last file
        self._step: int | None = None

    def write(self, progress: TrainingProgress) -> None:
        """Write the weights that the last step has changed, or an anchor. All ranks call this after every step."""
        step, base = progress.iteration, self._step
        anchor = base is None or step != base + 1 or step % self._interval == 0
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad(), self._dims.counter.paused():
            for name, new in self._weights():
                if not anchor:
                    old = self._last[name]
                    bits = torch.int16 if new.itemsize == 2 else torch.int32
                    indices = (new.view(bits) != old.view(bits)).flatten().nonzero()[:, 0].int()
                    found |= {f"{name}.indices": indices, f"{name}.values": new.flatten()[indices]}
                self._last[name] = new
        self._step = step
        if self._dims.world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            kind, tensors = ("anchor", self._last) if anchor else ("patch", found)
            path = self._folder / f"{kind}-{step:06d}.safetensors"
            about = {"step": str(step), "base_step": str(step if anchor else base)}
            with renamed_when_done(path.with_suffix(".unfinished"), path) as unfinished:
                write_tensors(unfinished, {name: held(tensor) for name, tensor in tensors.items()}, about)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the weights unit by unit on all ranks, and on rank 0 yield each with its Hugging Face name.

        Buffers, which every rank holds whole, follow the weights in their own dtype.
        """
        for unit in self._sharding.units:
            with unit.unsharded() as weights:
                for entry, weight in zip(unit.parameters, weights, strict=True):
                    yield from self._as_theirs(entry.name, weight)
        for name, buffer in self._model.named_buffers():
            yield from self._as_theirs(name, buffer)

    def _as_theirs(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one of our tensors as Hugging Face's tensors, on rank 0; a scalar head is left out.

        All ranks call this, because a DTensor is gathered.
        """
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if self._dims.world.rank == 0 and name != HEAD:
            rows = whole[: self._model.vocab_size] if name in (WORDS, OUTPUT) else whole
            piece = self._pieces[name]
            for theirs, part in zip(piece.theirs, piece.split(rows), strict=True):
                yield theirs, part.detach().cpu().clone(memory_format=torch.contiguous_format)


def check_patches(config: GPTConfig, precision: PrecisionConfig, wire: CommPlan) -> None:
    """Raise a ValueError that names the flags if the run's weights cannot be written as patches.

    Args:
        config: architecture of the model.
        precision: dtype in which training computes.
        wire: formats in which weights are communicated.
    """
    if precision.param_dtype.itemsize != 2:
        raise ValueError("--save-weight-patches needs --bf16 or --fp16, because every step changes all fp32 weights")
    if wire.gather is not None and wire.gather.fmt is not None:
        raise ValueError(
            f"--save-weight-patches needs 16-bit weights, but training computes with weights in {wire.gather.fmt.bits} "
            "bits; use --zero-weight-delta lossless, which gathers 16 bits"
        )
    if choose_architecture(config).fused:
        raise ValueError(
            "--save-weight-patches does not support phi3: its gate_up_proj is two matrices here, and patches cannot "
            "join them"
        )
