"""Build a checkpoint's model with weights that are not trained: in frozen units, or in streamed layers.

The table shows where --weights-device puts the packed weights.

| --weights-device | location of packed weights | weights in the device's memory                                     |
|------------------|----------------------------|--------------------------------------------------------------------|
| device           | device memory              | all packed weights                                                 |
| host             | pinned host memory         | embedding and output layer, and 1 + --prefetch-layers layers       |
| disk             | a file (store.py)          | the same as with host                                              |
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
from megazpp.parallel.agreement import check_equal_on_all_ranks, raise_on_all_ranks
from megazpp.parallel.comm_queue import ThreadQueue, Work
from megazpp.training.config import ModelSpec
from megazpp.training.setup import model_on_meta


def load_used_model(
    config: WeightsConfig, spec: ModelSpec, place: FrozenPlace, source: LoadSource, record: CheckpointMetadata
) -> tuple[GPTModel, FrozenUnits | StreamedUnits]:
    """Build a model for inference from a checkpoint; the flags for weight storage select streamed or frozen weights.

    Args:
        config: flags for weight storage.
        spec: config and compute dtype of the model.
        place: mesh axes and device that all frozen models of the job share.
        source: the checkpoint to load.
        record: metadata of the checkpoint.
    Returns:
        The model and the handle to its weights.
    Raises:
        ValueError: the checkpoint or the file of packed weights is damaged or belongs to another model, or the disk is
            full.
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
    """Build a model of frozen units from a checkpoint, unit by unit; all ranks call this together.

    Each rank reads only the rows that it stores.

    Args:
        spec: config and compute dtype of the model.
        place: mesh axes and device that all frozen models of the job share.
        source: the checkpoint to load, see `find_weights`.
        record: metadata of the checkpoint.
        bits: bits per element of packed matrices; None for the bits of the compute dtype, without rounding.
        trained: function that returns True for the names of trained parameters, such as adapters. They stay on the meta
            device and are not read.
    Returns:
        The model, the handle to its weights, and a checksum of the weights. The checksum does not depend on the numbers
        of ranks that wrote or read the checkpoint.
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
    """Build a model whose layers are streamed from device memory, host memory or disk, as --weights-device selects.

    Layers are not compiled, and sequences are not split over tensor-parallel ranks. All ranks call this together.

    Args:
        config: flags for weight storage.
        spec: config and compute dtype of the model.
        place: mesh axes and device that all frozen models of the job share.
        source: the checkpoint to load, see `find_weights`.
        record: metadata of the checkpoint.
    Returns:
        The model and the handle to its weights.
    Raises:
        ValueError: the checkpoint or the file of packed weights is damaged or belongs to another model, or the disk is
            full. All ranks raise this error.
    """
    (device, axis, files), dtype = (place.device, place.axis, place.files), spec.precision.param_dtype
    # Build the model on the meta device. torch.compile and sequence parallelism cannot use packed weights, because
    # these are not ordinary tensors.
    plain = dataclasses.replace(spec.config, compile=False)
    plain_spec = dataclasses.replace(spec, config=plain, sequence_parallel=False)
    model = model_on_meta(plain_spec, place.dims, device, whole_experts=True)
    for module in model.modules():
        if isinstance(module, Experts):
            module.grouped = False  # torch's grouped matrix product cannot use packed weights, so experts run in a loop
    layers, (bits, exact) = list(model.layers), at_rest(config.weight_bits, spec.precision.param_dtype)
    plan = plan_stream(model, layers, axis.size, bits, exact)

    # Pack the weights, or open the file of packed weights. `kept` is the message with the weights that stay on the
    # device, and `held` are the messages of the layers if these are in device or host memory.
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

    # Buffers are the expert biases of routers. They are small, so they are not packed and stay on the device.
    if any(True for _ in model.buffers()):
        raise_on_all_ranks(files, lambda: open_reader().fill_buffers(model, device))

    def read(index: int, buffer: torch.Tensor) -> torch.Tensor:
        # Message 0 of the file is `kept`, so a layer's message has the layer's index plus 1.
        return store.read(index + 1, buffer) if on_disk else held[index]

    def take(index: int) -> Work[torch.Tensor]:
        return Work(held[index])

    # If the packed layers are on disk or in page-locked host memory, fetch each layer ahead of its use. Otherwise they
    # are in the memory of the device, where `take` returns them at once.
    fetch = take
    if on_disk or pin:
        sizes, ring = [message.num_bytes for message in plan.streamed], min(1 + config.prefetch_layers, len(layers))
        queue = ThreadQueue("fetch", place.dims.timeline)
        fetch = FetchRing(read, sizes, ring=ring, queue=queue, device=device, fills=on_disk).fetch
    handle = StreamedUnits(model, layers, plan, kept, fetch, axis, dtype=dtype, prefetch=config.prefetch_layers)
    # report the memory that weights take, and the bytes that one pass over the weights fetches
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
    """Open this rank's file of packed weights for --weights-device disk, and write it first if it does not exist.

    All ranks call this together.

    Args:
        config: flags for weight storage.
        source: the checkpoint to load.
        plan: layouts of the messages, which hold the packed weights of layers.
        bits: bits per element of packed matrices.
        model: model on the meta device.
        place: mesh axes and device that all frozen models of the job share.
        open_reader: function that creates a reader of the checkpoint's weights, on all ranks together.
    """
    tp, axis, files = model.tp, place.axis, place.files
    folder = cache_folder() / "weights" if config.weight_store is None else Path(config.weight_store).expanduser()
    # Everything that determines the content of the file is part of its name, so that no run opens a wrong file.
    part = f"tp{tp.rank}of{tp.size}-part{axis.rank}of{axis.size}"
    digest = checkpoint_digest(source.checkpoint)
    check_equal_on_all_ranks(files, f"the checkpoint {source.checkpoint}", digest)
    key = cache_key(kind="weights-1", checkpoint=digest, part=part, layout=repr(plan))
    path, messages = folder / f"{bits}bits-{part}-{key}.weights", (plan.kept, *plan.streamed)
    started = time.perf_counter()
    if any(files.share_object(files.gather_objects(not path.exists()))):
        # All ranks open a reader, even if only some of them lack their file of packed weights, because the constructor
        # of a reader verifies the checkpoint on all ranks together.
        load = open_reader()

        def write(path: Path) -> None:
            write_store(path, (message.pieces(load, axis.rank) for message in messages))

        raise_on_all_ranks(files, lambda: build_once(path, write, flag="--weight-store"))
        place.say(f" wrote {path} ({path.stat().st_size / GIGA:.3f} GB) in {time.perf_counter() - started:.1f} s")
    return raise_on_all_ranks(files, lambda: WeightStore(path, [message.num_bytes for message in messages]))


def pack_where_they_stay(
    plan: StreamPlan, load: LoadRows, part: int, device: torch.device, *, pin: bool
) -> list[torch.Tensor]:
    """Load and pack the weights of a streamed model, and return them in the memory in which they stay.

    The result is a list of messages, 1-D uint8 tensors. The first has the weights that always stay on the device. One
    message per streamed layer follows, on `device` or in page-locked host memory (`pin`). At most one message at a time
    is in other memory.

    Args:
        plan: layouts of the messages.
        load: function that reads a range of rows (dim 0) of the named weight.
        part: index of this rank among the ranks of a node that share the layers.
        device: device on which the model computes.
        pin: True to store the messages of layers in page-locked host memory; False to store them on `device`.
    """

    def filled(message: MessagePlan, *, pin: bool) -> torch.Tensor:
        packed = message.fill(torch.empty(message.num_bytes, dtype=torch.uint8, pin_memory=pin), load, part)
        return packed if pin else packed.to(device)

    return [filled(plan.kept, pin=False), *(filled(message, pin=pin) for message in plan.streamed)]


def bf16_note(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return advice for the log if a model computes in bf16 on a CPU without bf16 instructions; otherwise None."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    return (
        "this CPU has no bf16 instructions: --no-bf16 --weight-bits 16 is much faster and keeps the weights in 16 bits"
    )
