"""Models that are only used, built from a checkpoint: of frozen units, or with layers that stream.

| --weights-device | packed weights are in       | the device holds                                                 |
|--------------|-----------------------------|------------------------------------------------------------------|
| device       | the device's memory         | all of them                                                      |
| host         | pinned memory of the host   | the ends of the model and 1 + --prefetch-layers layers           |
| disk         | a store (store.py)          | the same                                                         |
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megazpp.base.files import cache_folder, locked
from megazpp.base.flags import check_not_negative, check_words, flag
from megazpp.base.program import GIGA
from megazpp.checkpoint.checksums import checkpoint_digest
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.weights import FrozenPlace, WeightReader
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.format import LoadRows, MessagePlan, at_rest, plan_rows
from megazpp.packed_weights.frozen import FrozenUnits, freeze
from megazpp.packed_weights.store import FetchRing, WeightStore, write_store
from megazpp.packed_weights.streamed import StreamedUnits, StreamPlan, plan_stream
from megazpp.parallel.comm_queue import ThreadQueue, Work
from megazpp.parallel.dims import raise_on_all_ranks
from megazpp.training.setup import ModelSpec, model_on_meta
from megazpp.zero.config import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Weight storage.

    Where the weights of a model that is only used are kept between uses, and in how many bits.
    """

    weights_device: Literal["device", "host", "disk"] = flag(
        "device",
        "where weights lie between uses; of host and disk the device holds the ends and a few layers",
        aliases=("--weights-on",),
    )
    weight_bits: Literal[32, 16, 8, 4] | None = flag(
        None,
        "bits of an element of the weights at rest (default: as the model computes, so none is rounded)",
    )
    weight_store: str | None = flag(
        None, "folder of packed weights for --weights-device disk, written once (default: in the user's cache)"
    )
    prefetch_layers: int = flag(1, "layers that are fetched ahead of their use; each costs its packed bytes")

    def __post_init__(self) -> None:
        check_words(self)
        check_not_negative(self, "prefetch_layers")
        if self.weight_store is not None and self.weights_device != "disk":
            raise ValueError(
                f"--weight-store {self.weight_store} needs --weights-device disk, not {self.weights_device}"
            )

    @property
    def packs(self) -> bool:
        """True if weights are kept packed; else they are shards, as in a training."""
        return self.weights_device != "device" or self.weight_bits is not None

    def at_rest(self, precision: PrecisionConfig) -> tuple[int, torch.dtype]:
        """Bits of an element at rest, and the dtype of 32 and 16 bits, for a model that computes in `precision`."""
        return at_rest(self.weight_bits, precision.param_dtype)


def check_base_bits(config: GPTConfig, bits: int | None, dtype: torch.dtype, *, tp: int) -> None:
    """Refuse a base whose rounding would depend on tensor parallelism, because blocks would be cut.

    Raises:
        ValueError: columns that --tensor-model-parallel-size splits are no multiple of a block of --base-weight-bits.
    """
    attention = "--num-attention-heads x --kv-channels"
    for name, columns in (("--ffn-hidden-size", config.ffn_size), (attention, config.heads * config.head_size)):
        fmt = plan_rows(columns, *at_rest(bits, dtype)).fmt
        if tp > 1 and fmt is not None and columns % (tp * fmt.block_size):
            raise ValueError(
                f"--base-weight-bits {bits}: {name} {columns} / --tensor-model-parallel-size {tp} is no multiple of "
                f"{fmt.block_size}, the elements that share a scale"
            )


def load_used_model(
    config: WeightsConfig, spec: ModelSpec, place: FrozenPlace, source: LoadSource, record: CheckpointMetadata
) -> tuple[GPTModel, FrozenUnits | StreamedUnits]:
    """Build a model that is only used, packed or frozen as `config` says, and the handle on its weights."""
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
    """Build a model unit by unit from a checkpoint, on all ranks; each reads only what it keeps.

    Also returns the handle, and a checksum of the weights, whatever layout wrote or reads them.

    Args:
        spec: its shape and the dtype it computes in.
        source, record: the checkpoint, see `find_weights`.
        bits: of an element of a matrix at rest; None: as the model computes.
        trained: parameters of such names stay on the meta device, and are not read.
    Raises:
        ValueError: the checkpoint is damaged, or another model's or tokenizer's.
    """
    model, dtype = model_on_meta(spec, place.dims, place.device), spec.precision.param_dtype
    load = _open_reader(model, spec, place, source, record, trained)
    parts = (model, model.sharding_units(), place.axis, load)
    units = freeze(*parts, device=place.device, dtype=dtype, bits=bits, trained=trained)
    with place.dims.counter.paused():
        return model, units, load.checksum(place.axis)


def _open_reader(
    model: GPTModel,
    spec: ModelSpec,
    place: FrozenPlace,
    source: LoadSource,
    record: CheckpointMetadata,
    trained: Callable[[str], bool] = lambda name: False,
) -> WeightReader:
    known = (model, source.checkpoint, record, place)
    return WeightReader(*known, lora_base=source.lora_base, vocab_size=spec.vocab_size, trained=trained)


def load_streamed_model(
    config: WeightsConfig, spec: ModelSpec, place: FrozenPlace, source: LoadSource, record: CheckpointMetadata
) -> tuple[GPTModel, StreamedUnits]:
    """Build a model whose layers come from where `config` says; nothing is compiled, no sequence split over tp.

    Arguments as for `load_frozen_model`. On every rank it raises ValueError if checkpoint or store is damaged or
    another model's, or the disk is full.
    """
    (device, axis, files), dtype = (place.device, place.axis, place.files), spec.precision.param_dtype
    # packed weights are no tensors that a compiler or the gradients of a split sequence could take
    plain = dataclasses.replace(spec.config, compile=False)
    model = model_on_meta(dataclasses.replace(spec, config=plain, sequence_parallel=False), place.dims, device)
    layers, (bits, exact) = list(model.layers), config.at_rest(spec.precision)
    plan = plan_stream(model, layers, axis.size, bits, exact)

    open_reader = functools.partial(_open_reader, model, spec, place, source, record)
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

    def read(index: int, buffer: torch.Tensor) -> torch.Tensor:
        return store.read(index + 1, buffer) if on_disk else held[index]

    def take(index: int) -> Work[torch.Tensor]:
        return Work(held[index])

    fetch = take
    if on_disk or pin:
        sizes, ring = [message.num_bytes for message in plan.streamed], min(1 + config.prefetch_layers, len(layers))
        queue = ThreadQueue("fetch", place.dims.timeline)
        fetch = FetchRing(read, sizes, ring=ring, queue=queue, device=device, fills=on_disk).fetch
    handle = StreamedUnits(model, layers, plan, kept, fetch, axis, dtype=dtype, prefetch=config.prefetch_layers)
    rounded = "" if bits >= 8 * dtype.itemsize else " (rounded: tokens may differ)"
    most = plan.device_bytes(config.prefetch_layers, fetched=on_disk or pin)
    where = f"disk ({store.path})" if on_disk else config.weights_device
    place.say(
        f" weights: {bits} bits{rounded} from {where}; at most {most / GIGA:.3f} GB of them are in memory "
        f"at a time ({plan.kept.num_bytes / GIGA:.3f} GB stay), {plan.pass_bytes} bytes are fetched per pass"
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
    """This rank's store; written if it is not there. Every rank calls this."""
    tp, axis, files = model.tp, place.axis, place.files
    digest = checkpoint_digest(source.checkpoint)
    identity = {  # all that the content follows from
        "checkpoint": digest,
        "bits": bits,
        "tensor-parallel rank": [tp.rank, tp.size],
        "part of a node": [axis.rank, axis.size],
        "layout": hashlib.sha256(repr(plan).encode()).hexdigest()[:16],
    }
    folder = cache_folder() / "weights" / f"{digest}-{bits}bits"
    if config.weight_store is not None:
        folder = Path(config.weight_store).expanduser()
    path = folder / f"tp{tp.rank}of{tp.size}-part{axis.rank}of{axis.size}.weights"

    def find() -> WeightStore | None:
        try:
            return WeightStore(path, identity)
        except FileNotFoundError:
            return None

    found = raise_on_all_ranks(files, find)
    missing = files.share_object(files.gather_objects(found is None))
    if found is not None and not any(missing):
        return found
    load, started = open_reader(), time.perf_counter()

    def write() -> WeightStore:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(path.name + ".lock")):  # ranks of emulated nodes share their files
            if (there := find()) is not None:
                return there
            messages = (plan.kept, *plan.streamed)
            write_store(path, identity, [(m.name, m.num_bytes, m.pieces(load, axis.rank)) for m in messages])
            return WeightStore(path, identity)

    store = raise_on_all_ranks(files, lambda: found or write())
    size = sum(section.size for section in store.sections)
    place.say(f" wrote {path} ({size / GIGA:.3f} GB) in {time.perf_counter() - started:.1f} s")
    return store


def pack_where_they_stay(
    plan: StreamPlan, load: LoadRows, part: int, device: torch.device, *, pin: bool
) -> list[torch.Tensor]:
    """[M] uint8 each: what stays, on `device`; the messages of all units, there or (`pin`) in page-locked memory.

    One at a time is anywhere else.
    """

    def filled(message: MessagePlan, *, pin: bool) -> torch.Tensor:
        packed = message.fill(torch.empty(message.num_bytes, dtype=torch.uint8, pin_memory=pin), load, part)
        return packed if pin else packed.to(device)

    return [filled(plan.kept, pin=False), *(filled(message, pin=pin) for message in plan.streamed)]


def bf16_note(device: torch.device, dtype: torch.dtype) -> str | None:
    """Advice where a model computes in bf16 on a CPU that has no instructions for it; else None."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    return "this CPU has no bf16 instructions: --no-bf16 --weight-bits 16 is much faster, with the same bits at rest"
