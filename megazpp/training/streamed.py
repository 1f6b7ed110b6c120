"""A model whose layers stream (zero/streamed.py), out of a checkpoint: packed in memory, or from a store on disk."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megazpp.base.files import cache_folder, locked
from megazpp.base.formatting import GIGA
from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.together import together
from megazpp.checkpoint.weight_store import WeightStore, checkpoint_digest, write_store
from megazpp.checkpoint.weights import WeightReader
from megazpp.inference.weights import WeightsConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import ThreadQueue
from megazpp.training.frozen import FrozenPlace
from megazpp.training.setup import ModelSpec, model_on_meta
from megazpp.zero.packed import Bits
from megazpp.zero.streamed import (
    FetchedMessages,
    KeptMessages,
    LoadRows,
    MessagePlan,
    Messages,
    StreamedUnits,
    StreamPlan,
    pack_message,
    plan_stream,
)


class Streamed(NamedTuple):
    """A model whose weights stream, and the handle on them; in the place of a `Built`."""

    model: GPTModel
    sharding: StreamedUnits


def load_streamed_model(
    config: WeightsConfig, spec: ModelSpec, place: FrozenPlace, source: LoadSource, record: RunRecord
) -> Streamed:
    """Build a model whose layers come from where `config` says, on all ranks.

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
    make_reader = functools.partial(WeightReader, model, source, record, files, vocab_size=spec.vocab_size, say=say)
    queue = ThreadQueue("fetch", dims.timeline)
    sizes, ring = [message.num_bytes for message in plan.streamed], min(1 + config.prefetch_layers, len(units))
    fetched = functools.partial(FetchedMessages, sizes=sizes, ring=ring, queue=queue, device=device)
    messages: Messages
    if config.weights_on == "disk":
        checkpoint = source.folder.of(source.candidates()[0])
        identity = _identity(checkpoint, plan, bits, model.tp, axis)
        path = _path(config, identity, model.tp, axis)
        store = open_or_write(path, identity, plan, axis.rank, make_reader, files, say=say)
        kept = together(files, lambda: store.read(0, torch.empty(plan.kept.num_bytes, dtype=torch.uint8)))
        messages, where = fetched(lambda index, buffer: store.read(index + 1, buffer)), f"disk ({path})"
    else:
        load, pin = make_reader(), config.weights_on == "host" and device.type == "cuda"
        kept, *held = together(files, lambda: pack_where_they_stay(plan, load, axis.rank, device, pin=pin))
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
    return Streamed(model, handle)


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

    found = together(files, find)
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
            sections = [(m.name, m.num_bytes, pack_message(m, load, part)) for m in plan.messages]
            write_store(path, identity, sections)
            return WeightStore(path, identity)

    store = together(files, lambda: found or write())
    size = sum(section.size for section in store.sections)
    say(f" wrote {path} ({size / GIGA:.3f} GB) in {time.perf_counter() - started:.1f} s")
    return store


def _identity(checkpoint: Path, plan: StreamPlan, bits: Bits, tp: MeshAxis, axis: MeshAxis) -> dict[str, Any]:
    """What the content of a store follows from."""
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
    """What stays, and the messages of all units: [M] uint8 each, of which one at a time is anywhere else.

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
    packed, done = torch.empty(message.num_bytes, dtype=torch.uint8, pin_memory=pin), 0
    for piece in pack_message(message, load, part):
        packed[done : done + len(piece)] = piece
        done += len(piece)
    return packed
