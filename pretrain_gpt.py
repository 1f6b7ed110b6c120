"""Pretrain a GPT: the table of contents, and the parts that are pretraining's own.

    python pretrain_gpt.py                                      a small model on the shipped text, local workers
    python pretrain_gpt.py @configs/gpt_125m.args --lr 3e-4     flags from a file; what comes later wins
    torchrun --nproc-per-node 8 pretrain_gpt.py @configs/...    workers that torchrun (or srun) has started

Parse and check everything, start the workers, then in each worker (`run_training` of megazpp/run/training.py):
the cluster as it is, the axes, the parts of the run (`pretraining` below, the rest in megazpp/run/trainer.py),
training, evaluation, a sample of text, and where everything went.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

from megazpp.base.program import LAUNCHER_PID, announce

announce("pretrain_gpt.py", "megazpp")  # torch takes seconds to import, on a cold disk many

import megazpp
from megazpp.checkpoint.metadata import CheckpointMetadata, check_same_model
from megazpp.checkpoint.read import LoadSource, choose_source, peek, start_of
from megazpp.data.dataset import Splits, build_datasets, build_tokenizer, check_inputs, unigram_entropy
from megazpp.data.identity import describe_samples
from megazpp.features import FEATURES
from megazpp.model.backends import check_device
from megazpp.parallel.launch import RESTART_COUNT, detect_rank_info, device_type
from megazpp.parallel.worker import leave
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.checkpoint_flags import with_checkpoint_args, with_checkpoint_tokenizer, with_resumed_features
from megazpp.run.checks import RunPlan, check_run_config
from megazpp.run.ranks import Job, announced_cluster, run_on_ranks
from megazpp.run.trainer import TrainingParts
from megazpp.run.training import run_training
from megazpp.training.context import RunContext
from megazpp.training.objective import Evaluator, LanguageModelLoss
from megazpp.training.setup import build_model, open_loader

HERE = Path(__file__).resolve().parent
HOME = HERE if (HERE / "configs").is_dir() else Path(megazpp.__file__).parent  # where configs/ is, installed or not


def main() -> int:
    """Parse, check, and become a worker or start the workers."""
    return run_on_ranks(prepare)


def prepare() -> Job | int:
    """Find out everything that can be known before workers start; raises ValueError by flag and value."""
    parsed = parse_run_config(sys.argv[1:], HOME, features=FEATURES)
    if parsed.show.print_config:
        print(parsed.report())
        return 0
    for feature in FEATURES:
        status = feature.command(parsed)
        if status is not None:
            return status
    restarted = int(os.environ.get(RESTART_COUNT, "0")) > 0
    source = choose_source(parsed.config.checkpoint, restarted=restarted)
    earlier = peek(source)
    parsed = with_checkpoint(parsed, source, earlier)
    config = parsed.config
    place = detect_rank_info(config.launch)
    start = start_of(source, earlier)
    plan = check_run_config(config, announced_cluster(config, place), device_type=device_type(), start=start)
    check_device(config.model, device_type())
    if LAUNCHER_PID not in os.environ:  # our launcher has checked the files for the workers that it starts
        parsed = parsed._replace(tokenizer=check_inputs(config.data, config.tokenizer, loaded=parsed.tokenizer))
    return Job(place, config.launch, functools.partial(run_training, pretraining, parsed, plan, source, earlier))


def pretraining(parsed: ParsedRun, plan: RunPlan, run: RunContext) -> TrainingParts:
    """Build text, model and the loss of the next token; raises ValueError if data or tokenizer cannot be used."""
    config, batches, dims = parsed.config, plan.batches, run.dims
    tokenizer = parsed.tokenizer or build_tokenizer(config.tokenizer, config.data, log=run.log)
    iterations, batch_size = config.evaluation.eval_iters, batches.global_batch_size
    wanted = Splits(train=batches.dataset_samples, valid=iterations * batch_size, test=iterations * batch_size)
    data = build_datasets(config.data, tokenizer, num_samples=wanted, seed=config.launch.seed, log=run.log)
    spec = config.model_spec(tokenizer.vocab_size, plan.wire)
    built = build_model(spec, dims, run.device)
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
    """Take the checkpoint's flags (`earlier` is its record); raises ValueError if it is of another model."""
    parsed = with_checkpoint_args(parsed, earlier)
    if source is not None and earlier is not None:
        check_same_model(earlier.flags, parsed.config.model, source.folder.path)
        parsed = with_checkpoint_tokenizer(parsed, earlier, source.folder)
        if source.continues:
            parsed = with_resumed_features(parsed, earlier, source.folder)
    if source is not None and not source.candidates():
        anew = f"{source.folder.name} has no checkpoint; this run starts from random weights"
        parsed = parsed._replace(notices=(*parsed.notices, anew))
    return parsed


def program() -> NoReturn:
    """Run, and end as every program of ranks does."""
    leave(main())


if __name__ == "__main__":
    program()
