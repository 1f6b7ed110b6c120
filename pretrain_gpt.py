"""Pretrain a GPT model.

    python pretrain_gpt.py                                      a small model on the included text, with local workers
    python pretrain_gpt.py @configs/gpt_125m.args --lr 3e-4     flags from a file; later flags override earlier ones
    torchrun --nproc-per-node 8 pretrain_gpt.py @configs/...    workers that torchrun (or srun) starts

`prepare` parses and checks all flags before workers start. Each worker then calls `run_training`
(megazpp/run/training.py), which does the following:

    1. discover the cluster, and create the mesh axes
    2. build the parts of the run: `pretraining` below, and the rest in megazpp/run/trainer.py
    3. train and evaluate, generate a sample of text, and print where the results are
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

from megazpp.base.program import LAUNCHER_PID, announce

announce("pretrain_gpt.py", "megazpp")  # before the imports below, because importing torch takes seconds

import megazpp
from megazpp.base.program import say_notices
from megazpp.checkpoint.metadata import CheckpointMetadata, check_same_model
from megazpp.checkpoint.read import LoadSource, choose_source, peek, start_of
from megazpp.data.dataset import Splits, build_datasets, build_tokenizer, check_inputs, unigram_entropy
from megazpp.data.identity import describe_samples
from megazpp.features import FEATURES
from megazpp.model.backends import check_device
from megazpp.parallel.launch import RESTART_COUNT, detect_rank_info, device_type
from megazpp.parallel.worker import leave
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.checkpoint_flags import (
    with_checkpoint_args,
    with_checkpoint_tokenizer,
    with_resumed_features,
    with_resumed_weight_delta,
)
from megazpp.run.checks import RunPlan, check_run_config, check_uses
from megazpp.run.feature import weight_opener
from megazpp.run.ranks import Job, announced_cluster, hold_run_dir, own_checkpoints, run_on_ranks
from megazpp.run.trainer import TrainingParts
from megazpp.run.training import run_training
from megazpp.training.context import RunContext
from megazpp.training.objective import Evaluator, LanguageModelLoss
from megazpp.training.setup import build_model, open_loader

HERE = Path(__file__).resolve().parent
HOME = HERE if (HERE / "configs").is_dir() else Path(megazpp.__file__).parent  # folder of configs/, also if installed


def main() -> int:
    """Check the flags, then run as a worker or launch the workers. Return the exit code."""
    return run_on_ranks(prepare)


def prepare() -> Job | int:
    """Parse and check the flags as far as possible before workers start.

    Returns:
        The work for each rank, or the exit code if a flag such as --print-config or --plan replaces training.
    Raises:
        ValueError: flags are wrong. The message names each flag and its value.
    """
    # Flags, and commands that replace training.
    parsed = parse_run_config(sys.argv[1:], HOME, features=FEATURES)
    if parsed.show.print_config:
        say_notices(parsed.notices)
        print(parsed.report())
        return 0
    for feature in FEATURES:
        status = feature.command(parsed)
        if status is not None:
            return status

    # The checkpoint to load, which may determine further flags.
    restarted = int(os.environ.get(RESTART_COUNT, "0")) > 0
    flags = own_checkpoints(parsed.config.checkpoint, parsed.config.tracking, restarted=restarted)
    source = choose_source(flags, restarted=restarted, opener=weight_opener(FEATURES, flags.lora_base))
    earlier = peek(source)
    parsed = with_checkpoint(parsed, source, earlier)
    config = parsed.config

    # Checks of all flags together, and of this machine.
    place = detect_rank_info(config.launch)
    start = start_of(source, earlier)
    plan = check_run_config(config, announced_cluster(config, place), device_type=device_type(), start=start)
    parsed = parsed._replace(notices=(*parsed.notices, *check_uses(config, parsed.origins)))
    check_device(config.model, device_type())
    if LAUNCHER_PID not in os.environ:  # our launcher has checked the files for the workers that it starts
        parsed = parsed._replace(tokenizer=check_inputs(config.data, config.tokenizer, loaded=parsed.tokenizer))
    hold_run_dir(parsed)
    return Job(place, config.launch, functools.partial(run_training, pretraining, parsed, plan, source, earlier))


def pretraining(parsed: ParsedRun, plan: RunPlan, run: RunContext) -> TrainingParts:
    """Build the parts of a run that are specific to pretraining: tokenizer, data, model and next-token loss.

    Args:
        parsed: the flags.
        plan: layout, batches and communication formats.
        run: this rank's axes, device and log.
    Raises:
        ValueError: the data or the tokenizer cannot be used.
    """
    # Tokenizer and data.
    config, batches, dims = parsed.config, plan.batches, run.dims
    tokenizer = parsed.tokenizer or build_tokenizer(config.tokenizer, config.data, log=run.log)
    iterations, batch_size = config.evaluation.eval_iters, batches.global_batch_size
    wanted = Splits(train=batches.dataset_samples, valid=iterations * batch_size, test=iterations * batch_size)
    data = build_datasets(config.data, tokenizer, num_samples=wanted, seed=config.launch.seed, log=run.log)

    # The model.
    spec = config.model_spec(tokenizer.vocab_size, plan.wire)
    built = build_model(spec, dims, run.device)

    # Loaders for training and evaluation.
    loader = functools.partial(
        open_loader, config=config.data, tokenizer=tokenizer, plan=batches, dims=dims, device=run.device
    )
    validation, test = (
        None
        if held_out is None
        else Evaluator(*built, loader(held_out, ramp_up=False), dims, iterations=iterations, batch_size=batch_size)
        for held_out in (data.valid, data.test)
    )
    return TrainingParts(
        tokenizer=tokenizer,
        built=built,
        objective=LanguageModelLoss(dims),
        batches=None if data.train is None else loader(data.train, ramp_up=True),
        validation=validation,
        test=test,
        describe_samples=lambda: describe_samples(data, wanted),
        held_out_entropy=lambda: None if data.valid is None else unigram_entropy(data.valid, tokenizer.vocab_size),
    )


def with_checkpoint(parsed: ParsedRun, source: LoadSource | None, earlier: CheckpointMetadata | None) -> ParsedRun:
    """Return the flags completed with those that the checkpoint has recorded.

    Args:
        parsed: the flags.
        source: checkpoint to load; None starts from random weights.
        earlier: record of that checkpoint.
    Raises:
        ValueError: the checkpoint belongs to a different model.
    """
    parsed = with_checkpoint_args(parsed, earlier)
    if source is not None and earlier is not None:
        check_same_model(earlier.flags, parsed.config.model, source.folder.path)
        parsed = with_checkpoint_tokenizer(parsed, earlier, source.folder)
        if source.continues:
            parsed = with_resumed_features(parsed, earlier, source.folder)
            parsed = with_resumed_weight_delta(parsed, earlier, source.folder)
    if source is not None and not source.candidates():
        anew = f"{source.folder.name} has no checkpoint; this run starts from random weights"
        parsed = parsed._replace(notices=(*parsed.notices, anew))
    return parsed


def program() -> NoReturn:
    """Run `main` and exit without the interpreter's shutdown, which would race with gloo's threads."""
    leave(main())


if __name__ == "__main__":
    program()
