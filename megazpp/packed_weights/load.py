"""Build models for inference from a checkpoint: with frozen units, or with layers whose weights are streamed.

| --weights-device | location of packed weights  | weights in the device's memory                                   |
|--------------|-----------------------------|------------------------------------------------------------------|
| device       | device memory               | all packed weights                                               |
| host         | pinned host memory          | both ends of the model, and 1 + --prefetch-layers layers         |
| disk         | a store (store.py)          | the same                                                         |
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megazpp.base.files import cache_folder
from megazpp.base.program import GIGA
from megazpp.checkpoint.checksums import checkpoint_digest
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.checkpoint.read import LoadSource
from megazpp.data.cache import build_once, cache_key
from megazpp.model.gpt import GPTModel
from megazpp.model.moe import Experts
from megazpp.packed_weights.config import WeightsConfig
from megazpp.packed_weights.format import LoadRows, MessagePlan, at_rest
from megazpp.packed_weights.frozen import FrozenUnits, freeze
from megazpp.packed_weights.reader import FrozenPlace, WeightReader
from megazpp.packed_weights.store import FetchRing, WeightStore, write_store
from megazpp.packed_weights.streamed import StreamedUnits, StreamPlan, plan_stream
from megazpp.parallel.comm_queue import ThreadQueue, Work
from megazpp.parallel.dims import check_equal_on_all_ranks, raise_on_all_ranks
from megazpp.training.config import ModelSpec
from megazpp.training.setup import model_on_meta


def load_used_model(
    config: WeightsConfig, spec: ModelSpec, place: FrozenPlace, source: LoadSource, record: CheckpointMetadata
) -> tuple[GPTModel, FrozenUnits | StreamedUnits]:
    """Build a model for inference from a checkpoint, streamed or frozen as `config` says.

    Args:
        config: the flags for packed weights.
        spec: shape and compute dtype of the model.
        place: mesh axes and device of this rank.
        source: the checkpoint.
        record: the checkpoint's metadata.
    Returns:
        the model and the handle to its weights.
    Raises:
        ValueError: the checkpoint or the store is damaged or belongs to another model, or the disk is full.
    """
    if config.packs:
        return load_streamed_model(config, spec, place, source, record)
    return load_frozen_model(spec, place, source, record)[:2]


def load_frozen_model(
    spec: ModelSpec,
    place: FrozenPlace,
    source: LoadSource,
    record: CheckpointMetadata,
    *,
    bits: int | None = None,
    trained: Callable[[str], bool] = lambda name: False,
) -> tuple[GPTModel, FrozenUnits, str]:
    """Build a model of frozen units from a checkpoint, unit by unit, on all ranks; each rank reads only its own rows.

    Args:
        spec: shape and compute dtype of the model.
        place: mesh axes and device of this rank.
        source: the checkpoint, see `find_weights`.
        record: the checkpoint's metadata.
        bits: bits per element of packed matrices. None: the compute dtype.
        trained: returns True for names of parameters that stay on the meta device and are not read.
    Returns:
        the model, the handle to its weights, and a checksum of the weights. The checksum does not depend on the layouts
        that wrote or read the checkpoint.
    Raises:
        ValueError: the checkpoint is damaged, or belongs to another model or tokenizer.
    """
    model, dtype = model_on_meta(spec, place.dims, place.device, whole_experts=True), spec.precision.param_dtype
    load = WeightReader(
        model, source.checkpoint, record, place, opener=source.opener, vocab_size=spec.vocab_size, trained=trained
    )
    parts = (model, model.sharding_units(), place.axis, load)
    units = freeze(*parts, device=place.device, dtype=dtype, bits=bits, trained=trained)
    load.fill_buffers(model, place.device)
    with place.dims.counter.paused():
        return model, units, load.checksum()


def load_streamed_model(
    config: WeightsConfig, spec: ModelSpec, place: FrozenPlace, source: LoadSource, record: CheckpointMetadata
) -> tuple[GPTModel, StreamedUnits]:
    """Build a model whose layers are streamed from the place that `config` selects.

    Nothing is compiled, and sequences are not split over tensor-parallel ranks.

    Args:
        config: the flags for packed weights.
        spec: shape and compute dtype of the model.
        place: mesh axes and device of this rank.
        source: the checkpoint, see `find_weights`.
        record: the checkpoint's metadata.
    Returns:
        the model and the handle to its weights.
    Raises:
        ValueError: checkpoint or store is damaged or belongs to another model, or the disk is full; on every rank.
    """
    (device, axis, files), dtype = (place.device, place.axis, place.files), spec.precision.param_dtype
    # Build the model on the meta device. A compiler and sequence parallelism cannot use packed weights, because these
    # are not ordinary tensors.
    plain = dataclasses.replace(spec.config, compile=False)
    plain_spec = dataclasses.replace(spec, config=plain, sequence_parallel=False)
    model = model_on_meta(plain_spec, place.dims, device, whole_experts=True)
    for module in model.modules():
        if isinstance(module, Experts):
            module.grouped = False  # a grouped product needs ordinary tensors
    layers, (bits, exact) = list(model.layers), at_rest(config.weight_bits, spec.precision.param_dtype)
    plan = plan_stream(model, layers, axis.size, bits, exact)

    # Pack the weights, or open the store. `held` are the messages of layers in memory.
    known = (model, source.checkpoint, record, place)
    open_reader = functools.partial(WeightReader, *known, opener=source.opener, vocab_size=spec.vocab_size)
    on_disk, pin = config.weights_device == "disk", config.weights_device == "host" and device.type == "cuda"
    held: list[torch.Tensor] = []
    if on_disk:
        store = _open_store(config, source, plan, bits, model, place, open_reader)
        kept = raise_on_all_ranks(files, lambda: store.read(0, torch.empty(plan.kept.num_bytes, dtype=torch.uint8))).to(
            device
        )
    else:
        load = open_reader()
        kept, *held = raise_on_all_ranks(files, lambda: pack_where_they_stay(plan, load, axis.rank, device, pin=pin))

    if any(True for _ in model.buffers()):  # biases of experts are small and stay on the device
        raise_on_all_ranks(files, lambda: open_reader().fill_buffers(model, device))

    def read(index: int, buffer: torch.Tensor) -> torch.Tensor:
        return store.read(index + 1, buffer) if on_disk else held[index]

    def take(index: int) -> Work[torch.Tensor]:
        return Work(held[index])

    # fetch layers ahead of their use, if they are not on the device
    fetch = take
    if on_disk or pin:
        sizes, ring = [message.num_bytes for message in plan.streamed], min(1 + config.prefetch_layers, len(layers))
        queue = ThreadQueue("fetch", place.dims.timeline)
        fetch = FetchRing(read, sizes, ring=ring, queue=queue, device=device, fills=on_disk).fetch
    handle = StreamedUnits(model, layers, plan, kept, fetch, axis, dtype=dtype, prefetch=config.prefetch_layers)
    # report the memory and the bytes per pass
    rounded = "" if bits >= 8 * dtype.itemsize else " (rounded: tokens may differ)"
    most = plan.device_bytes(config.prefetch_layers, fetched=on_disk or pin)
    where = f"disk ({store.path})" if on_disk else config.weights_device
    place.say(
        f" weights: {bits} bits{rounded} from {where}; at most {most / GIGA:.3f} GB are in memory at a time, "
        f"{plan.kept.num_bytes / GIGA:.3f} GB of them permanently; {plan.pass_bytes} bytes are fetched per pass"
    )
    return model, handle


def _open_store(
    config: WeightsConfig,
    source: LoadSource,
    plan: StreamPlan,
    bits: int,
    model: GPTModel,
    place: FrozenPlace,
    open_reader: Callable[[], WeightReader],
) -> WeightStore:
    """Open this rank's store, and write it first if it does not exist; called on every rank.

    Args:
        config: the flags for packed weights.
        source: the checkpoint.
        plan: layout of the messages.
        bits: bits per element of packed matrices.
        model: the model on the meta device.
        place: mesh axes and device of this rank.
        open_reader: opens the reader of the checkpoint's weights.
    """
    tp, axis, files = model.tp, place.axis, place.files
    folder = cache_folder() / "weights" if config.weight_store is None else Path(config.weight_store).expanduser()
    # everything that determines the content of the store is part of its name
    part = f"tp{tp.rank}of{tp.size}-part{axis.rank}of{axis.size}"
    digest = checkpoint_digest(source.checkpoint)
    check_equal_on_all_ranks(files, f"the checkpoint {source.checkpoint}", digest)
    key = cache_key(kind="weights-1", checkpoint=digest, part=part, layout=repr(plan))
    path, messages = folder / f"{bits}bits-{part}-{key}.weights", (plan.kept, *plan.streamed)
    started = time.perf_counter()
    if any(files.share_object(files.gather_objects(not path.exists()))):
        load = open_reader()  # all ranks open it together

        def write(path: Path) -> None:
            write_store(path, (message.pieces(load, axis.rank) for message in messages))

        raise_on_all_ranks(files, lambda: build_once(path, write, flag="--weight-store"))
        place.say(f" wrote {path} ({path.stat().st_size / GIGA:.3f} GB) in {time.perf_counter() - started:.1f} s")
    return raise_on_all_ranks(files, lambda: WeightStore(path, [message.num_bytes for message in messages]))


def pack_where_they_stay(
    plan: StreamPlan, load: LoadRows, part: int, device: torch.device, *, pin: bool
) -> list[torch.Tensor]:
    """Load and pack all messages, and return them as [M] uint8 tensors in their final memory.

    The first message stays on `device`. The messages of units follow, on `device` or in page-locked host memory
    (`pin`). At most one message at a time is elsewhere.

    Args:
        plan: layout of the messages.
        load: function that reads rows of dim 0 of a weight.
        part: index of this rank among the ranks that share the units.
        device: device of the model.
        pin: whether the messages of units stay in page-locked host memory.
    """

    def filled(message: MessagePlan, *, pin: bool) -> torch.Tensor:
        packed = message.fill(torch.empty(message.num_bytes, dtype=torch.uint8, pin_memory=pin), load, part)
        return packed if pin else packed.to(device)

    return [filled(plan.kept, pin=False), *(filled(message, pin=pin) for message in plan.streamed)]


def bf16_note(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return advice for a model that computes in bf16 on a CPU without bf16 instructions; None in other cases."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    return (
        "this CPU has no bf16 instructions: --no-bf16 --weight-bits 16 is much faster and keeps the weights in 16 bits"
    )
