"""Programs that use a checkpoint's model: read its flags, load it on all ranks, and work with it."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.base.program import LAUNCHER_PID, user_errors
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.checkpoint.read import LoadSource, find_weights, first_sound, load_weights
from megazpp.checkpoint.weights import open_frozen_place
from megazpp.data.dataset import build_tokenizer
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.load import WeightsConfig, bf16_note, load_used_model
from megazpp.packed_weights.streamed import StreamedUnits
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.host_discovery import resolve_cluster
from megazpp.parallel.launch import detect_rank_info, device_type
from megazpp.parallel.worker import Worker, seed_everything
from megazpp.run.arguments import ParsedRun, RunConfig, parse_run_config
from megazpp.run.checkpoint_flags import with_checkpoint_flags
from megazpp.run.checks import check_model_config
from megazpp.run.feature import Feature
from megazpp.run.ranks import Job, announced_cluster, run_on_ranks
from megazpp.topology.cluster import Cluster
from megazpp.training.context import Console
from megazpp.training.setup import build_model
from megazpp.zero.sharding import WeightHandle


class Loaded(NamedTuple):
    """The loaded checkpoint of `iteration` on every rank, with the program's own config.

    `built` is the model and the handle on its weights, and `streamed` that handle again where weights stream. `say`
    prints a line of progress on rank 0, to stderr.
    """

    config: RunConfig
    extra: Any
    built: tuple[GPTModel, WeightHandle]
    streamed: StreamedUnits | None
    dims: ParallelDims
    tokenizer: Tokenizer
    iteration: int
    device: torch.device
    say: Callable[[str], None]


def run_on_checkpoint(
    script: str,
    description: str | None,
    extra: type,
    work: Callable[[Loaded], None],
    argv: list[str],
    *,
    check: Callable[[RunConfig, Any], None],
    features: Sequence[Feature],
    spread: bool = True,
) -> int:
    """Read the command line and the checkpoint's flags, load the model on all ranks, and work; returns the exit status.

    A model that is not spread lies whole on each rank, but for tensor parallelism, in the dtype that it computes in.

    Args:
        script, description: the program's file, in a folder of the repository, and its docstring.
        extra: config class of the program's own flags, which `check` may refuse by a ValueError.
        features: the optional features, whose flags the program reads.
        spread: use more GPUs than tensor parallelism needs, where --nproc does not say. On a CPU one process per
            tensor-parallel rank has all cores.
    """

    def prepare() -> Job | int:
        path, about = Path(script).resolve(), (description or "").partition("\n")[0]
        kinds = [extra, WeightsConfig]
        parsed = parse_run_config(
            argv,
            path.parents[1],
            program=path.name,
            description=about,
            features=features,
            extra=kinds,
            default_file=None,
        )
        given = parsed.config.checkpoint
        if given.load is None:
            raise ValueError("--load is missing: the folder of checkpoints")
        folder = CheckpointFolder(given.load, "--load")
        source, record = find_weights(folder, given.ckpt_step, fallback=given.load_fallback, lora_base=given.lora_base)
        parsed = with_checkpoint_flags(parsed, record, folder)
        if parsed.show.print_config:
            print(parsed.report())
            return 0
        config = parsed.config
        if LAUNCHER_PID not in os.environ:  # our launcher has checked the files for the workers that it starts
            check(config, parsed.extra[0])
        place, launch = detect_rank_info(config.launch), config.launch
        if not (place.started or launch.nproc is not None or (spread and device_type() == "cuda")):
            place = detect_rank_info(dataclasses.replace(launch, nproc=config.parallel.tensor_model_parallel_size))
        cluster = announced_cluster(config, place)
        check_model_config(config, cluster, device_type=device_type())

        def load_and_work(worker: Worker) -> None:
            with user_errors():
                work(_load(parsed, cluster, source, record, spread, worker))

        return Job(place, launch, load_and_work)

    return run_on_ranks(prepare)


def _load(
    parsed: ParsedRun, cluster: Cluster, source: LoadSource, record: CheckpointMetadata, spread: bool, worker: Worker
) -> Loaded:
    config, device, seed = parsed.config, worker.device, parsed.config.launch.seed
    say = Console(enabled=worker.rank == 0, out=sys.stderr).log
    on_one_machine = functools.partial(config.detect_cluster, worker.world_size, {})
    cluster = resolve_cluster(worker, config.cluster, cluster, on_one_machine=on_one_machine)
    layout, wire, notices = check_model_config(config, cluster, device_type=device.type)
    dims = ParallelDims(layout, device_type=device.type, nccl=config.nccl, timeout=worker.timeout)
    seed_everything(seed, data_rank=dims.dropout_rank, tp_rank=dims.tp.rank)
    tokenizer = parsed.tokenizer or build_tokenizer(config.tokenizer, config.data, log=say)
    for notice in (*parsed.notices, *notices):
        say(f"note: {notice}")
    spec, (extra, weights) = config.model_spec(tokenizer.vocab_size, wire), parsed.extra
    built: tuple[GPTModel, WeightHandle]
    if weights.packs or not spread:
        if weights.packs and (note := bf16_note(device, spec.precision.param_dtype)):
            say(f"note: {note}")
        place = open_frozen_place(dims, device, say=say, whole=not weights.packs)

        def load(iteration: int) -> tuple[GPTModel, WeightHandle]:
            found, record = find_weights(source.folder, iteration, lora_base=source.lora_base)
            if None not in (tokenizer.identity, record.tokenizer) and tokenizer.identity != record.tokenizer:
                say(f"WARNING: the tokenizer gives other ids than that of {source.folder.path}")
            return load_used_model(weights, spec, place, found, record)

        iteration, built = first_sound(source, source.candidates(), load, say)
    else:
        sharded = built = build_model(spec, dims, device)
        size, identity = tokenizer.vocab_size, tokenizer.identity
        iteration = load_weights(*sharded, dims, source, record, vocab_size=size, tokenizer=identity, say=say)
    streamed = built[1] if isinstance(built[1], StreamedUnits) else None
    return Loaded(config, extra, built, streamed, dims, tokenizer, iteration, device, say)
