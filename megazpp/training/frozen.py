"""A GPT of which nothing is trained, or nothing yet: its weights are frozen units out of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.formats import BlockFormat
from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.weights import WeightReader
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.training.setup import ModelSpec, model_on_meta
from megazpp.zero.freeze import freeze
from megazpp.zero.frozen import FrozenUnits


class FrozenBuilt(NamedTuple):
    """A model of frozen weights.

    Attributes:
        units: the handle on them.
        checksum: of the weights in the checkpoint, whatever layout wrote or reads them.
    """

    model: GPTModel
    units: FrozenUnits
    checksum: str


def load_frozen_model(
    spec: ModelSpec,
    dims: ParallelDims,
    axis: MeshAxis,
    device: torch.device,
    source: LoadSource,
    record: RunRecord,
    files: MeshAxis,
    *,
    fmt: BlockFormat | None = None,
    trained: Callable[[str], bool] = lambda name: False,
    say: Callable[[str], None] = lambda line: None,
) -> FrozenBuilt:
    """Build a model unit by unit from a checkpoint, on all ranks; each reads only what it keeps.

    Args:
        spec: its shape and the dtype it computes in.
        axis: `frozen_axis(dims)`, which all frozen models of a job share.
        source, record: see `find_weights`.
        files: `open_axis(dims)`.
        fmt: how weights are kept; None: in the dtype that the model computes in.
        trained: parameters of such names stay on the meta device, and are not read.
        say: prints a line on rank 0.
    Raises:
        ValueError: the checkpoint is damaged, or another model's or tokenizer's.
    """
    model = model_on_meta(spec, dims, device)
    load = WeightReader(model, source, record, files, vocab_size=spec.vocab_size, trained=trained, say=say)
    units = freeze(
        model,
        model.sharding_units(),
        axis,
        load,
        device=device,
        dtype=spec.precision.param_dtype,
        fmt=fmt,
        trained=trained,
    )
    with dims.counter.paused():
        return FrozenBuilt(model, units, load.checksum(axis))
