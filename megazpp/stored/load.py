"""Models of stored weights, built from a checkpoint: of frozen units, or with layers that stream.

One file of more than 300 lines: both kinds of models are read from a checkpoint by the same steps.

| --weights-on | packed weights are in       | the device holds                                                 |
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
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from megazpp.base.files import cache_folder, locked
from megazpp.base.flags import check_not_negative, check_words, flag
from megazpp.base.program import GIGA
from megazpp.checkpoint.checksums import checkpoint_digest
from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.weights import WeightReader
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import ThreadQueue
from megazpp.parallel.dims import ParallelDims, open_axis, raise_on_all_ranks
from megazpp.stored.freeze import freeze, frozen_axis
from megazpp.stored.frozen import FrozenUnits
from megazpp.stored.messages import LoadRows, MessagePlan, pack_message, whole_message
from megazpp.stored.packed import Bits, at_rest, plan_rows
from megazpp.stored.store import WeightStore, write_store
from megazpp.stored.streamed import FetchedMessages, KeptMessages, Messages, StreamedUnits, StreamPlan, plan_stream
from megazpp.training.setup import ModelSpec, model_on_meta
from megazpp.zero.config import PrecisionConfig

_LOADED_AT_ONCE = 1 << 23  # elements of a checkpoint that are in memory while they are packed


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Weights: where those of a model that is only used are between uses, and in how many bits."""

    weights_on: Literal["device", "host", "disk"] = flag(
        "device", "where weights lie between uses; of host and disk the device holds the ends and a few layers"
    )
    weight_bits: Literal[32, 16, 8, 4] | None = flag(
        None,
        "bits of an element of the weights at rest (default: as the model computes, so none is rounded)",
    )
    weight_store: str | None = flag(
        None, "folder of packed weights for --weights-on disk, written once (default: in the user's cache)"
    )
    prefetch_layers: int = flag(1, "layers that are fetched ahead of their use; each costs its packed bytes")

    def __post_init__(self) -> None:
        check_words(self)
        check_not_negative(self, "prefetch_layers")
        if self.weight_store is not None and self.weights_on != "disk":
            raise ValueError(f"--weight-store {self.weight_store} needs --weights-on disk, not {self.weights_on}")

    @property
    def packs(self) -> bool:
        """True if weights are kept packed; else they are shards, as in a training."""
        return self.weights_on != "device" or self.weight_bits is not None

    def at_rest(self, precision: PrecisionConfig) -> tuple[Bits, torch.dtype]:
        """Bits of an element at rest, and the dtype of 32 and 16 bits, for a model that computes in `precision`."""
        return at_rest(self.weight_bits, precision.param_dtype)


def check_base_bits(config: GPTConfig, bits: Bits | None, dtype: torch.dtype, *, tp: int) -> None:
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


@dataclass(frozen=True, kw_only=True)
class FrozenPlace:
    """The home of a job's frozen models; they share one, because its axes are process groups.

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
    bits: Bits | None = None,
    trained: Callable[[str], bool] = lambda name: False,
) -> FrozenBuilt:
    """Build a model unit by unit from a checkpoint, on all ranks; each reads only what it keeps.

    Args:
        spec: its shape and the dtype it computes in.
        source, record: the checkpoint, see `find_weights`.
        bits: of an element of a matrix at rest; None: as the model computes.
        trained: parameters of such names stay on the meta device, and are not read.
    Raises:
        ValueError: the checkpoint is damaged, or another model's or tokenizer's.
    """
    model = model_on_meta(spec, place.dims, place.device)
    load = WeightReader(
        model,
        source.checkpoint,
        record,
        place.files,
        lora_base=source.lora_base,
        vocab_size=spec.vocab_size,
        trained=trained,
        say=place.say,
    )
    units = freeze(
        model,
        model.sharding_units(),
        place.axis,
        load,
        device=place.device,
        dtype=spec.precision.param_dtype,
        bits=bits,
        trained=trained,
    )
    with place.dims.counter.paused():
        return FrozenBuilt(model, units, load.checksum(place.axis))


def load_streamed_model(
    config: WeightsConfig, spec: ModelSpec, place: FrozenPlace, source: LoadSource, record: RunRecord
) -> tuple[GPTModel, StreamedUnits]:
    """Build a model whose layers come from where `config` says, and the handle on its weights; on all ranks.

    Args:
        spec: its shape and the dtype it computes in; nothing is compiled, and no sequence is split over tp.
        source, record: the checkpoint, see `find_weights`.
    Raises:
        ValueError: checkpoint or store is damaged or another model's, or the disk is full; on every rank.
    """
    (dims, device, axis, files), say = (place.dims, place.device, place.axis, place.files), place.say
    # packed weights are no tensors that a compiler or the gradients of a split sequence could take
    plain = dataclasses.replace(spec.config, compile=False)
    model = model_on_meta(dataclasses.replace(spec, config=plain, sequence_parallel=False), dims, device)
    units: list[nn.Module] = list(model.layers)
    bits, exact = config.at_rest(spec.precision)
    plan = plan_stream(model, units, axis.size, bits, exact)
    make_reader = functools.partial(
        WeightReader,
        model,
        source.checkpoint,
        record,
        files,
        lora_base=source.lora_base,
        vocab_size=spec.vocab_size,
        say=say,
    )
    queue = ThreadQueue("fetch", dims.timeline)
    sizes, ring = [message.num_bytes for message in plan.streamed], min(1 + config.prefetch_layers, len(units))
    fetched = functools.partial(FetchedMessages, sizes=sizes, ring=ring, queue=queue, device=device)
    messages: Messages
    if config.weights_on == "disk":
        checkpoint = source.checkpoint
        identity = _identity(checkpoint, plan, bits, model.tp, axis)
        path = _path(config, identity, model.tp, axis)
        store = open_or_write(path, identity, plan, axis.rank, make_reader, files, say=say)
        kept = raise_on_all_ranks(files, lambda: store.read(0, torch.empty(plan.kept.num_bytes, dtype=torch.uint8)))
        messages, where = fetched(lambda index, buffer: store.read(index + 1, buffer)), f"disk ({path})"
    else:
        load, pin = make_reader(), config.weights_on == "host" and device.type == "cuda"
        kept, *held = raise_on_all_ranks(files, lambda: pack_where_they_stay(plan, load, axis.rank, device, pin=pin))
        messages = fetched(lambda index, buffer: held[index], fills=False) if pin else KeptMessages(held)
        where = config.weights_on
    handle = StreamedUnits(
        model,
        units,
        plan,
        kept.to(device),
        messages,
        axis,
        dtype=spec.precision.param_dtype,
        prefetch=config.prefetch_layers,
    )
    rounded = "" if bits >= 8 * spec.precision.param_dtype.itemsize else " (rounded: tokens may differ)"
    where = f"{bits} bits{rounded} from {where}"
    say(
        f" weights: {where}; at most {handle.device_bytes / GIGA:.3f} GB of them are in memory "
        f"at a time ({plan.kept.num_bytes / GIGA:.3f} GB stay), {plan.pass_bytes} bytes are fetched per pass"
    )
    return model, handle


def open_or_write(
    path: Path,
    identity: dict[str, Any],
    plan: StreamPlan,
    part: int,
    make_reader: Callable[[], WeightReader],
    files: MeshAxis,
    *,
    say: Callable[[str], None],
) -> WeightStore:
    """This rank's store; written if it is not there. Every rank calls this.

    Raises:
        ValueError: on every rank, see `WeightStore` and `write_store`.
    """

    def find() -> WeightStore | None:
        try:
            return WeightStore(path, identity)
        except FileNotFoundError:
            return None

    found = raise_on_all_ranks(files, find)
    missing = sum(files.share_object(files.gather_objects(found is None)))
    if not missing:
        assert found is not None
        return found
    load, started = make_reader(), time.perf_counter()

    def write() -> WeightStore:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(path.name + ".lock")):  # ranks of emulated nodes share their files
            if (there := find()) is not None:
                return there
            pack = functools.partial(pack_message, load=load, part=part, num_elements=_LOADED_AT_ONCE)
            sections = [(message.name, message.num_bytes, pack(message)) for message in plan.messages]
            write_store(path, identity, sections)
            return WeightStore(path, identity)

    store = raise_on_all_ranks(files, lambda: found or write())
    size = sum(section.size for section in store.sections)
    say(f" wrote {path} ({size / GIGA:.3f} GB) in {time.perf_counter() - started:.1f} s")
    return store


def _identity(checkpoint: Path, plan: StreamPlan, bits: Bits, tp: MeshAxis, axis: MeshAxis) -> dict[str, Any]:
    """The identity of a store: what its content follows from."""
    return {
        "checkpoint": checkpoint_digest(checkpoint),
        "bits": bits,
        "tensor-parallel rank": [tp.rank, tp.size],
        "part of a node": [axis.rank, axis.size],
        "layout": hashlib.sha256(repr(plan).encode()).hexdigest()[:16],
    }


def _path(config: WeightsConfig, identity: dict[str, Any], tp: MeshAxis, axis: MeshAxis) -> Path:
    if config.weight_store is not None:
        folder = Path(config.weight_store).expanduser()
    else:
        folder = cache_folder() / "weights" / f"{identity['checkpoint']}-{identity['bits']}bits"
    return folder / f"tp{tp.rank}of{tp.size}-part{axis.rank}of{axis.size}.weights"


def pack_where_they_stay(
    plan: StreamPlan, load: LoadRows, part: int, device: torch.device, *, pin: bool
) -> list[torch.Tensor]:
    """Return what stays, and the messages of all units: [M] uint8 each, of which one at a time is anywhere else.

    Args:
        pin: they stay in page-locked memory of the host; else on `device`.
    """
    kept, *streamed = plan.messages
    return [
        _pack(kept, load, part).to(device),
        *(_pack(m, load, part, pin=True) if pin else _pack(m, load, part).to(device) for m in streamed),
    ]


def _pack(message: MessagePlan, load: LoadRows, part: int, *, pin: bool = False) -> torch.Tensor:
    """[M] uint8 on the CPU."""
    packed = torch.empty(message.num_bytes, dtype=torch.uint8, pin_memory=pin)
    return whole_message(packed, pack_message(message, load, part, num_elements=_LOADED_AT_ONCE))


def bf16_note(device: torch.device, dtype: torch.dtype) -> str | None:
    """Advice where a model computes in bf16 on a CPU that has no instructions for it; else None."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    return "this CPU has no bf16 instructions: --no-bf16 --weight-bits 16 is much faster, with the same bits at rest"
