"""Start programs that use a checkpoint's model: read the checkpoint's flags, load the model, and run the program."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megazpp.base.program import Problems, leave, user_errors
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.checkpoint.read import LoadSource, find_weights, first_sound, load_weights
from megazpp.data.dataset import build_tokenizer
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.load import bf16_note, load_used_model
from megazpp.packed_weights.reader import open_frozen_place
from megazpp.packed_weights.streamed import StreamedUnits
from megazpp.parallel.agreement import check_equal_on_all_ranks
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.host_discovery import resolve_cluster
from megazpp.parallel.launch import detect_rank_info, device_type
from megazpp.parallel.worker import Worker, seed_everything, worker_process
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.run.checkpoint_flags import with_checkpoint_flags
from megazpp.run.checks import lay_out, plan_model
from megazpp.run.feature import weight_opener
from megazpp.run.flag_checks import check_paths
from megazpp.run.start import announced_cluster, facts_of, start_workers
from megazpp.topology.cluster import Cluster
from megazpp.training.context import Console
from megazpp.training.setup import build_model
from megazpp.zero.sharding import WeightHandle


class Loaded(NamedTuple):
    """A checkpoint's model on this rank, with everything that a program needs to use the model.

    Attributes:
        config: config of the run: the checkpoint's flags, overridden by the command line.
        extra: config of the program's own flags.
        built: the model and the handle to its weights.
        streamed: the handle to the weights if they are streamed from host memory or disk; otherwise None.
        dims: mesh axes of the job.
        tokenizer: tokenizer of the checkpoint.
        iteration: iteration of the checkpoint.
        device: device of this rank.
        say: function that prints a line of progress to stderr on rank 0, and does nothing on other ranks.
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
    parsed: ParsedRun,
    work: Callable[[Loaded], None],
    *,
    main: Callable[[], int],
    check: Callable[[RunConfig, Any, CheckpointMetadata], None],
    spread: bool = True,
) -> int:
    """Complete the flags from a checkpoint, load the checkpoint's model on all ranks, and run `work` on each rank.

    Args:
        parsed: the command line, from `parse_checkpoint_flags`.
        work: function that uses the loaded model; all ranks call it. For a mistake of the user, the function raises a
            UserError, whose message the program prints. Any other error ends the program with a traceback.
        main: entry point of the program, which each worker process runs.
        check: function (config, extra, record) that raises a ValueError if flags contradict each other or do not suit
            the checkpoint. `extra` is the config of the program's own flags, and `record` the checkpoint's metadata.
        spread: True to shard the model over all GPUs, unless --nproc gives their number. False to use one GPU for each
            tensor-parallel rank, which keeps its complete part of the weights in the compute dtype. On a CPU, both
            values start one process for each tensor-parallel rank.
    Returns:
        the exit status of the program.
    Raises:
        ValueError: there is no such checkpoint, the checkpoint is of a reward model, or flags cannot be used.
    """
    check_paths(parsed, needs_load=True)  # again, because ranks that torchrun or srun has started skip `answer_flags`
    # ---- find the checkpoint, and complete the flags from it
    features = parsed.config.features
    given = parsed.config.checkpoint
    assert given.load is not None  # see `parse_checkpoint_flags`
    folder, opener = CheckpointFolder(given.load, "--load"), weight_opener(features, parsed.config.sections)
    source, record = find_weights(folder, given.ckpt_step, fallback=given.load_fallback, opener=opener)
    record.check_predicts_tokens(folder.name)
    parsed = with_checkpoint_flags(parsed, record, folder)
    parsed.check_needs()
    if parsed.answers():
        return 0

    # ---- check the flags before anything is allocated
    # Optional features change only training runs, so drop them from the config
    config = dataclasses.replace(parsed.config, features=())
    parsed = parsed._replace(config=config)
    problems = Problems()
    with problems:
        check(config, parsed.extra[0], record)
    with problems:
        if config.model.num_experts is not None and (ep := config.parallel.expert_model_parallel_size) > 1:
            raise ValueError(
                f"--expert-model-parallel-size {ep} is for training: here data ranks work independently, and need all "
                "experts; leave it out"
            )
    place, launch = detect_rank_info(config.launch), config.launch
    # Start one process for each tensor-parallel rank, unless a launcher or --nproc has set the number of processes, or
    # the model is sharded over all GPUs
    if not (place.started or launch.nproc is not None or (spread and device_type() == "cuda")):
        place = detect_rank_info(dataclasses.replace(launch, nproc=config.parallel.tensor_model_parallel_size))
    with problems:
        announced = announced_cluster(config, place)
        plan_model(config, lay_out(config, announced), device_type=device_type())
    problems.raise_all()

    # ---- in the launching process, start the workers; in a worker, load the model and run `work`
    if not place.started:
        return start_workers(place, launch, main)
    checkpoint = {"the checkpoint": f"iteration {record.progress.iteration}"}
    with worker_process(place, launch, facts_of(parsed, record) | checkpoint) as worker:
        with user_errors():
            loaded = _load(parsed, announced, source, record, spread, worker)
        work(loaded)
    return leave(0)


def _load(
    parsed: ParsedRun, announced: Cluster, source: LoadSource, record: CheckpointMetadata, spread: bool, worker: Worker
) -> Loaded:
    """Build the mesh and the tokenizer on this rank, and load the checkpoint's model. All ranks call this.

    Args:
        parsed: the flags, completed from the checkpoint.
        announced: nodes and ranks that the flags and the launcher's environment describe, from `announced_cluster`.
        source: the checkpoint, and earlier checkpoints to load if this one is damaged.
        record: metadata of the checkpoint.
        spread: True to shard the model over all GPUs, see `run_on_checkpoint`.
        worker: this worker process.
    """
    # ---- build the mesh, and open the tokenizer
    config, device, seed = parsed.config, worker.device, parsed.config.launch.seed
    say = Console(enabled=worker.rank == 0, out=sys.stderr).log
    on_one_machine = functools.partial(config.detect_cluster, worker.world_size, {})
    layout = lay_out(config, resolve_cluster(worker, config.cluster, announced, on_one_machine=on_one_machine))
    wire, notices = plan_model(config, layout, device_type=device.type)
    dims = ParallelDims(layout, device_type=device.type, nccl=config.nccl)
    worker.watchdog.watch(dims)
    seed_everything(seed, data_rank=dims.dropout_rank, tp_rank=dims.tp.rank)
    tokenizer = parsed.tokenizer or build_tokenizer(config.tokenizer, config.data, log=say)
    check_equal_on_all_ranks(dims.world, "the tokenizer", str(tokenizer.identity))
    for notice in (*parsed.notices, *notices):
        say(f"note: {notice}")
    # ---- load the model with frozen weights (streamed, packed or complete), or with sharded weights
    spec, (extra, weights) = config.model_spec(tokenizer.vocab_size, wire), parsed.extra
    built: tuple[GPTModel, WeightHandle]
    if weights.packs or not spread:
        if weights.packs and (note := bf16_note(device, spec.precision.param_dtype)):
            say(f"note: {note}")
        place = open_frozen_place(dims, device, say=say, whole=not weights.packs)

        def load(iteration: int) -> tuple[GPTModel, WeightHandle]:
            """Load the model of an iteration. `first_sound` calls this until it finds a checkpoint without damage."""
            found, record = find_weights(source.folder, iteration, opener=source.opener)
            if None not in (tokenizer.identity, record.tokenizer) and tokenizer.identity != record.tokenizer:
                say(f"WARNING: the tokenizer gives other token ids than the tokenizer of {source.folder.path}")
            return load_used_model(weights, spec, place, found, record)

        iteration, built = first_sound(source, source.candidates(), load, say)
    else:
        sharded = built = build_model(spec, dims, device)
        size, identity = tokenizer.vocab_size, tokenizer.identity
        iteration = load_weights(*sharded, dims, source, record, vocab_size=size, tokenizer=identity, say=say)
    streamed = built[1] if isinstance(built[1], StreamedUnits) else None
    return Loaded(config, extra, built, streamed, dims, tokenizer, iteration, device, say)
