"""What the tools that use a checkpoint have in common: its flags, its model on as many ranks as there are."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.arguments import ParsedRun, RunConfig, parse_run_config
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.source import LoadSource
from megazpp.checkpoint_flags import with_checkpoint_flags
from megazpp.checks import ModelPlan, check_model_config
from megazpp.data.dataset import build_tokenizer
from megazpp.data.tokenizer import Tokenizer
from megazpp.errors import user_errors
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import Place, device_type, find_place
from megazpp.parallel.worker import Worker, seed_everything
from megazpp.run import Job, announced_cluster, found_cluster, run_on_ranks
from megazpp.training.context import Console
from megazpp.training.setup import Built, build_model

ROOT = Path(__file__).resolve().parent.parent


class Loaded(NamedTuple):
    """What a tool works with, on every rank.

    Attributes:
        extra: the tool's own config.
        iteration: of the checkpoint.
        say: prints a line of progress on rank 0, to stderr.
    """

    config: RunConfig
    extra: Any
    built: Built
    dims: ParallelDims
    tokenizer: Tokenizer
    iteration: int
    device: torch.device
    say: Callable[[str], None]


def run_on_checkpoint(
    program: str,
    description: str,
    extra: type,
    work: Callable[[Loaded], None],
    argv: Sequence[str],
    *,
    check: Callable[[RunConfig, Any], None] = lambda config, extra: None,
    spread: bool = True,
) -> int:
    """Read the command line and the checkpoint's flags, load the model on all ranks, and work; returns the exit status.

    Args:
        extra: config class of the tool's own flags.
        check: raises ValueError where the flags ask for what cannot be.
        spread: whether more GPUs than tensor parallelism needs are of use, where --nproc does not say. On a CPU one
            process per tensor-parallel rank has all cores.
    """

    def prepare() -> Job | int:
        parsed = parse_run_config(
            argv, ROOT, program=program, description=description.partition("\n")[0], extra=[extra], default_file=None
        )
        given = parsed.config.checkpoint
        if given.load is None:
            raise ValueError("--load is missing: the folder of checkpoints")
        folder = CheckpointFolder(given.load, "--load")
        source, record = find_weights(folder, given.ckpt_step, fallback=given.load_fallback)
        parsed = with_checkpoint_flags(parsed, record, folder)
        if parsed.show.print_config:
            print(parsed.report())
            return 0
        config = parsed.config
        check(config, parsed.extra[0])
        place = _find_place(config, spread=spread)
        plan = check_model_config(config, announced_cluster(config, place), device_type=device_type())
        return Job(place, config.launch, functools.partial(_load_and_work, parsed, plan, source, record, work))

    return run_on_ranks(prepare)


def _find_place(config: RunConfig, *, spread: bool) -> Place:
    place = find_place(config.launch)
    if place.started or config.launch.nproc is not None or (spread and device_type() == "cuda"):
        return place
    nproc = config.parallel.tensor_model_parallel_size
    return find_place(dataclasses.replace(config.launch, nproc=nproc))


def _load_and_work(
    parsed: ParsedRun,
    plan: ModelPlan,
    source: LoadSource,
    record: RunRecord,
    work: Callable[[Loaded], None],
    worker: Worker,
) -> None:
    config, device, seed = parsed.config, worker.device, parsed.config.launch.seed
    say = Console(enabled=worker.rank == 0, out=sys.stderr).log
    with user_errors():
        cluster = found_cluster(config, plan.layout.cluster, worker)
        plan = check_model_config(config, cluster, device_type=device.type)
        dims = ParallelDims(plan.layout, device_type=device.type, nccl=config.nccl, timeout=worker.timeout)
        seed_everything(seed, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
        tokenizer = build_tokenizer(config.tokenizer, config.data, announce=say)
        for notice in (*parsed.notices, *plan.notices):
            say(f"note: {notice}")
        built = build_model(config.model_spec(tokenizer.vocab_size, plan.wire), dims, device)
        size, identity = tokenizer.vocab_size, tokenizer.identity
        iteration = load_weights(*built, dims, source, record, vocab_size=size, tokenizer=identity, say=say)
        work(Loaded(config, parsed.extra[0], built, dims, tokenizer, iteration, device, say))
