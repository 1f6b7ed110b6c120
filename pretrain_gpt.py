"""Pretrain a GPT model.

    python pretrain_gpt.py                                      a small model on the included text, with local workers
    python pretrain_gpt.py @configs/gpt_125m.args --lr 3e-4     flags from a file; later flags override earlier ones
    torchrun --nproc-per-node 8 pretrain_gpt.py @configs/...    workers that torchrun (or srun) starts

`main` is the program from top to bottom. The process that a user starts checks flags and files, and starts the workers.
Each worker runs the same `main`, checks the flags again for the nodes that it discovers, and then trains.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from megazpp.base.program import begin

begin(__name__)  # before the imports below, in which Ctrl-C would print a traceback

from megazpp.base.files import HOME
from megazpp.base.program import LAUNCHER_PID, Problems, announce, answer_flags
from megazpp.features import FEATURES
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.flag_checks import check_flags, check_paths


def parse(argv: list[str]) -> ParsedRun:
    """Parse the command line, without the program name, into the configs of a pretraining run."""
    return parse_run_config(argv, HOME, features=FEATURES)


def answers(parsed: ParsedRun) -> bool:
    """Print all flags and return True if --print-config is set; otherwise check the flags and return False.

    Raises:
        ValueError: flags are missing or contradict each other, and no checkpoint can complete them; or files that flags
            name do not exist.
    """
    if parsed.answers():
        return True
    config, problems = parsed.config, Problems()
    replaced = any(section.replaces_training for section in config.sections)
    with problems:
        if not (replaced or config.checkpoint.use_checkpoint_args):
            check_flags(config)
    with problems:
        check_paths(parsed)
    problems.raise_all()
    return False


# Most wrong flags end the program here, before the imports below, which take seconds.
answer_flags(__name__, parse, answers)
announce(__name__)  # says on a terminal that the program imports torch, which takes seconds

from megazpp.parallel.failure import report_tracebacks

report_tracebacks()  # tells the other hosts if one of the imports below fails on this host

from megazpp.base.flags import COMMAND_LINE
from megazpp.base.program import leave, user_errors
from megazpp.checkpoint.metadata import CheckpointMetadata, check_same_model
from megazpp.checkpoint.read import LoadSource, choose_source, peek, start_of
from megazpp.data.config import Splits
from megazpp.data.dataset import Samples, build_datasets, build_tokenizer, check_inputs, unigram_entropy
from megazpp.data.identity import describe_samples
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.backends import check_device
from megazpp.parallel.launch import detect_rank_info, device_type
from megazpp.parallel.store import RESTART_COUNT
from megazpp.parallel.worker import worker_process
from megazpp.run.checkpoint_flags import (
    with_checkpoint_args,
    with_checkpoint_tokenizer,
    with_resumed_features,
    with_resumed_weight_delta,
)
from megazpp.run.checks import check_uses, plan_run
from megazpp.run.feature import weight_opener
from megazpp.run.start import (
    announced_cluster,
    distributed_program,
    facts_of,
    hold_run_dir,
    own_checkpoints,
    start_workers,
)
from megazpp.run.trainer import OpenRun, Trainer, TrainingParts, open_run
from megazpp.training.objective import Evaluator, LanguageModelLoss
from megazpp.training.setup import build_model, open_loader


@distributed_program
def main(argv: list[str]) -> int:
    """Pretrain a model, and return the exit code.

    A worker process trains. Any other process checks flags and files, and starts the workers. With a flag like --plan,
    the process prints the answer instead.
    """
    # ---- parse the flags, and run commands that replace training, such as --plan
    parsed = parse(argv)
    if parsed.answers():
        return 0
    check_paths(parsed)  # again, because ranks that torchrun or srun has started skip `answer_flags`
    for feature in FEATURES:
        status = feature.command(parsed)
        if status is not None:
            return status

    # ---- choose the checkpoint to load, and complete the command line by its flags
    problems, source, earlier = Problems(), None, None
    with problems:
        parsed, source, earlier = find_checkpoint(parsed)
    config, place = parsed.config, detect_rank_info(parsed.config.launch)
    # False if the sizes of the model are unknown, because they should come from a checkpoint that cannot be read.
    has_shape = not problems or not config.checkpoint.use_checkpoint_args

    # ---- check the flags before anything is allocated or written. Workers check them again later, for the nodes that
    # they discover, which may differ from the announced nodes.
    with problems:
        announced = announced_cluster(config, place)
        if has_shape:
            plan_run(config, announced, device_type=device_type(), start=start_of(source, earlier))
    with problems:
        parsed = parsed._replace(notices=(*parsed.notices, *check_uses(config, parsed.origins)))
        check_device(config.model, device_type())
    with problems:
        # Workers that MegaZ++ itself starts skip this check, because their launching process has checked the files.
        if LAUNCHER_PID not in os.environ and config.data.sources:
            parsed = parsed._replace(tokenizer=check_inputs(config.data, config.tokenizer, loaded=parsed.tokenizer))
    problems.raise_all()
    hold_run_dir(parsed)

    # ---- start the workers, or become one
    if not place.started:
        return start_workers(place, config.launch, main)
    facts = facts_of(parsed, earlier)  # flags, versions and environment variables that must be equal on all ranks
    with worker_process(place, config.launch, facts) as worker, open_run(worker, parsed, announced, source) as run:
        # ---- build the data, the model and the trainer
        with user_errors():
            tokenizer, data = open_data(run)
            parts = pretraining(run, tokenizer, data)
        trainer = Trainer(run, parts)
        # ---- train, and evaluate held-out data
        progress = trainer.train(trainer.load())
        entropy = None if data.valid is None else unigram_entropy(data.valid, tokenizer.vocab_size)
        trainer.finish(progress, unigram_entropy=entropy)
    return leave(0)


def find_checkpoint(parsed: ParsedRun) -> tuple[ParsedRun, LoadSource | None, CheckpointMetadata | None]:
    """Choose the checkpoint from which the run resumes or takes its weights, and complete the flags from it.

    Args:
        parsed: command line of the run.

    Returns:
        the completed command line, the checkpoint, and the checkpoint's metadata. Checkpoint and metadata are None for
        a run that starts from random weights.

    Raises:
        ValueError: the flags name a checkpoint that does not exist or that belongs to a different model.
    """
    restarted, given = int(os.environ.get(RESTART_COUNT, "0")) > 0, parsed.config.checkpoint
    flags = own_checkpoints(given, parsed.config.tracking, restarted=restarted)
    source = choose_source(flags, restarted=restarted, opener=weight_opener(FEATURES, parsed.config.sections))
    earlier = peek(source)
    if source is not None and earlier is not None and source.continues:
        earlier.check_same_objective(None, source.folder.name)
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
    return parsed, source, earlier


def open_data(run: OpenRun) -> tuple[Tokenizer, Splits[Samples | None]]:
    """Open the tokenizer of a run, and its samples for training, validation and test.

    Returns:
        the tokenizer; and the samples for training, validation and test, each None if there is no such data.

    Raises:
        ValueError: the data or the tokenizer cannot be used.
    """
    config, log, wanted = run.config, run.context.log, count_samples(run)
    # A small text may get a smaller vocabulary or another split, unless the user has typed --vocab-size or --split.
    sized, split = (run.parsed.origins.get(name) == COMMAND_LINE for name in ("vocab_size", "split"))
    tokenizer = run.parsed.tokenizer or build_tokenizer(config.tokenizer, config.data, exact=sized, log=log)
    options: dict[str, Any] = {"num_samples": wanted, "seed": config.launch.seed, "exact": split, "log": log}
    return tokenizer, build_datasets(config.data, tokenizer, **options)


def count_samples(run: OpenRun) -> Splits[int]:
    """Return three numbers of samples: for the complete training, for one validation, and for the test."""
    batches = run.plan.batches
    held_out = run.config.evaluation.eval_iters * batches.global_batch_size
    return Splits(train=batches.dataset_samples, valid=held_out, test=held_out)


def pretraining(run: OpenRun, tokenizer: Tokenizer, data: Splits[Samples | None]) -> TrainingParts:
    """Build the parts of a run that are specific to pretraining: model, next-token loss, loaders and evaluations.

    Args:
        run: flags, plan, process groups and checkpoint of the run on this rank.
        tokenizer: tokenizer of the data.
        data: samples for training, validation and test, each None if there is no such data.
    """
    # ---- check that all ranks have the same data
    samples = describe_samples(data, count_samples(run)) if run.needs_samples else {}
    run.compare_data(tokenizer, samples)

    # ---- build the sharded model
    config, batches, dims, device = run.config, run.plan.batches, run.context.dims, run.context.device
    built = build_model(config.model_spec(tokenizer.vocab_size, run.plan.wire), dims, device)

    # ---- open the loaders for training and evaluation
    loader = functools.partial(
        open_loader, config=config.data, tokenizer=tokenizer, plan=batches, dims=dims, device=device
    )
    iterations, batch_size = config.evaluation.eval_iters, batches.global_batch_size
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
        samples=samples,
    )


if __name__ == "__main__":
    raise SystemExit(main())
