"""Weight patches: after every step the 16-bit weights that have changed, for engines that draw from the policy.

    anchor-000100.safetensors    {name: weights}                                   whole, every so many iterations
    patch-000101.safetensors     {name.indices: int32, name.values}                what to write where in {name}, flat

Names and shapes are Hugging Face's, values those that the training computes with; `base_step` and `step` are among a
file's metadata. An anchor and the patches that follow it give the weights after each step, bit for bit. Files appear
whole, and a run that goes on begins with an anchor. Nothing crosses nodes for it: weights are gathered from what a node
keeps. Rank 0 has the weights once more in memory. TRL and vLLM take tensors in this form (SparseWeightPatch).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from megazpp.base.files import renamed_when_done
from megazpp.checkpoint.record import TrainingProgress
from megazpp.convert.huggingface import choose_architecture
from megazpp.convert.model import OUTPUT, WORDS, held
from megazpp.convert.safetensors_file import write_tensors
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.config import PrecisionConfig, WirePlan
from megazpp.zero.sharding import Sharding


class WeightPatches:
    """Writes a file after every step.

    Args:
        folder: where to; it is made.
        interval: iterations between anchors.
    """

    def __init__(self, folder: Path, interval: int, model: GPTModel, sharding: Sharding, dims: ParallelDims) -> None:
        self._folder, self._interval, self._model, self._sharding, self._dims = folder, interval, model, sharding, dims
        self._pieces = choose_architecture(model.config).pieces(model.config)
        self._last: dict[str, torch.Tensor] = {}  # of rank 0
        self._step: int | None = None

    def due(self, iteration: int, *, last: bool) -> bool:
        """After every step, whose numbers are waited for: a file that is there is of a step that was taken."""
        return True

    def after_step(self, progress: TrainingProgress, *, last: bool) -> None:
        """Write what the step has changed, or an anchor; called on all ranks."""
        step, base = progress.iteration, self._step
        anchor = base is None or step != base + 1 or step % self._interval == 0
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad(), self._dims.counter.paused():
            for name, new in self._weights():
                if not anchor:
                    old = self._last[name]
                    indices = (new.view(torch.int16) != old.view(torch.int16)).flatten().nonzero()[:, 0].int()
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
        """On rank 0 each weight under its name there; other ranks take part, unit by unit."""
        for unit in self._sharding.units:
            for module in unit.modules:
                module.unshard()
            for entry in unit.parameters:
                weight = getattr(entry.module, entry.attribute)
                whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
                if self._dims.world.rank == 0 and entry.name in self._pieces:
                    piece = self._pieces[entry.name]
                    rows = whole[: self._model.vocab_size] if entry.name in (WORDS, OUTPUT) else whole
                    for name, part in zip(piece.theirs, piece.split(rows), strict=True):
                        yield name, part.detach().cpu().clone(memory_format=torch.contiguous_format)
            for module in unit.modules:
                module.reshard()


def check_patches(config: GPTConfig, precision: PrecisionConfig, wire: WirePlan) -> None:
    """Raises ValueError, naming flags, where the run's weights cannot be written as patches."""
    if precision.param_dtype.itemsize != 2:
        raise ValueError("--save-weight-patches needs --bf16 or --fp16: fp32 weights change all in every step")
    if wire.gather is not None and wire.gather.fmt is not None:
        raise ValueError(
            f"--save-weight-patches: the training computes with weights in {wire.gather.fmt.bits} bits; "
            "--zero-weight-delta lossless gathers 16"
        )
    if choose_architecture(config).fused:
        raise ValueError("--save-weight-patches: phi3's gate_up_proj is two matrices here, which patches do not join")
