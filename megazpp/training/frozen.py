"""A GPT of which nothing is trained, or nothing yet: its weights are frozen units out of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.formats import BlockFormat
from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.together import open_axis
from megazpp.checkpoint.weights import WeightReader
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.training.setup import ModelSpec, model_on_meta
from megazpp.zero.freeze import freeze, frozen_axis
from megazpp.zero.frozen import FrozenUnits


@dataclass(frozen=True, kw_only=True)
class FrozenPlace:
    """Where the frozen models of a job live; they share one, because its axes are process groups.

    Attributes:
        axis: the ranks of a node that share a frozen unit (`frozen_axis`).
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
    axis = MeshAxis("whole", timeline=dims.timeline) if whole else frozen_axis(dims)
    return FrozenPlace(dims=dims, device=device, axis=axis, files=open_axis(dims), say=say)


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
    place: FrozenPlace,
    source: LoadSource,
    record: RunRecord,
    *,
    fmt: BlockFormat | None = None,
    trained: Callable[[str], bool] = lambda name: False,
) -> FrozenBuilt:
    """Build a model unit by unit from a checkpoint, on all ranks; each reads only what it keeps.

    Args:
        spec: its shape and the dtype it computes in.
        source, record: the checkpoint, see `find_weights`.
        fmt: how weights are kept; None: in the dtype that the model computes in.
        trained: parameters of such names stay on the meta device, and are not read.
    Raises:
        ValueError: the checkpoint is damaged, or another model's or tokenizer's.
    """
    model = model_on_meta(spec, place.dims, place.device)
    load = WeightReader(model, source, record, place.files, vocab_size=spec.vocab_size, trained=trained, say=place.say)
    units = freeze(
        model,
        model.sharding_units(),
        place.axis,
        load,
        device=place.device,
        dtype=spec.precision.param_dtype,
        fmt=fmt,
        trained=trained,
    )
    with place.dims.counter.paused():
        return FrozenBuilt(model, units, load.checksum(place.axis))
