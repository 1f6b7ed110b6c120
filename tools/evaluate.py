"""Compute the perplexity and the bits per byte of the model of a checkpoint.

python tools/evaluate.py --load checkpoints/                             on the validation and test data of its training
python tools/evaluate.py --load checkpoints/ --input my_text_document    on every token of a .bin/.idx pair
python tools/evaluate.py --load checkpoints/ --input my_text.jsonl       on a text

Without --input the validation loss equals the one that training has reported. The checkpoint determines the model, the
tokenizer, the precision, the sequence length and the data, unless flags override them. The samples are divided among
all GPUs. On a CPU a single process is used by default (--nproc).
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.flags import COMMAND_LINE, Config, flag
from megazpp.base.program import answer_flags, user_errors
from megazpp.data.text import check_input
from megazpp.features import FEATURES
from megazpp.inference.config import parse_checkpoint_flags
from megazpp.run.arguments import ParsedRun
from megazpp.run.flag_checks import check_paths

PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")  # flags that name the training's data
COMMON = ("data_path", "text_path", "split", "eval_iters", "micro_batch_size", "seq_length")  # flags that --help lists


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Config):
    """Scoring.

    The text to score.

    Attributes:
        input: prefix of a .bin/.idx pair, or text file (default: the validation and test data of the training).
    """

    input: str | None = flag(None)


def parse(argv: list[str]) -> ParsedRun:
    """Return the flags of the command line. Flags that the user leaves out are read from the checkpoint later.

    Raises:
        ValueError: a flag is wrong, --input is given together with a flag about the data of the training, or --input
            names no text.
    """
    parsed = parse_checkpoint_flags(
        argv, EvaluateConfig, file=__file__, description=__doc__, features=FEATURES, common=COMMON
    )
    text = next(config.input for config in parsed.extra if isinstance(config, EvaluateConfig))
    for name in ("eval_iters", "split", "text_path", *PATHS) if text is not None else ():
        if parsed.origins.get(name) == COMMAND_LINE:
            flag_name = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag_name} chooses from the data of the training, but all of --input {text} is scored: leave out "
                "one of the two"
            )
    if text is not None:
        check_input(text)
    return parsed


# answers --help and rejects most wrong flags before the imports below, which take seconds
answer_flags(__name__, parse, functools.partial(check_paths, needs_load=True))

from megazpp.parallel.failure import report_tracebacks

report_tracebacks()  # tells the other hosts if one of the imports below fails on this host

from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.data.config import Splits
from megazpp.data.dataset import build_datasets, check_inputs
from megazpp.inference.on_checkpoint import Loaded, run_on_checkpoint
from megazpp.inference.scoring import Score, count_labels, score_whole
from megazpp.parallel.agreement import check_equal_on_all_ranks
from megazpp.run.arguments import RunConfig
from megazpp.run.start import distributed_program
from megazpp.training.batches import plan_batches
from megazpp.training.objective import Evaluator
from megazpp.training.setup import open_loader

SAMPLES = 8  # samples per forward pass if neither the flags nor the checkpoint give a --micro-batch-size


@distributed_program
def main(argv: list[str]) -> int:
    """Load the checkpoint on all ranks, compute the model's loss on the data, and return the exit code."""
    return run_on_checkpoint(parse(argv), run, main=main, check=check)


def check(config: RunConfig, extra: EvaluateConfig, record: CheckpointMetadata) -> None:
    """Raise a ValueError if the data cannot be scored, before the checkpoint is loaded.

    Args:
        config: the checkpoint's flags, overridden by the command line.
        extra: flags of this program.
        record: metadata of the checkpoint.
    """
    if extra.input is not None:
        return
    objective = record.flags.get("objective")
    if objective is not None and all(getattr(config.data, name) == tuple(record.flags[name] or ()) for name in PATHS):
        raise ValueError(
            f"--load {config.checkpoint.load} was trained with --objective {objective}, whose data this program does "
            "not score: give a text or a .bin/.idx pair by --input"
        )
    if config.evaluation.eval_iters == 0:
        raise ValueError("--eval-iters 0 evaluates nothing; give a positive number, or --input")
    check_inputs(config.data, config.tokenizer)


@user_errors()  # most errors are about the data that the user names
def run(loaded: Loaded) -> None:
    """Compute the loaded model's loss, and print it with perplexity and bits per byte on rank 0.

    The data are the text of --input, or without it the validation and test samples of the training.
    """
    config, path = loaded.config, loaded.extra.input
    if path is None:
        scores = score_held_out(loaded)
    else:
        size, say = config.batches.micro_batch_size or SAMPLES, loaded.say
        parts = (loaded.built, loaded.dims, loaded.tokenizer)
        whole = score_whole(*parts, path, config.data, micro_batch_size=size, device=loaded.device, say=say)
        scores = {"": whole}
    if loaded.streamed is not None:
        passes, num_bytes = loaded.streamed.passes, loaded.streamed.plan.pass_bytes
        loaded.say(f" {passes} passes over the weights fetched {passes * num_bytes} bytes on each rank")
    for where, score in scores.items():
        if loaded.dims.world.rank == 0:
            print("\n".join(score.lines(f"iteration {loaded.iteration}{where}")))


def score_held_out(loaded: Loaded) -> dict[str, Score]:
    """Score the validation and test samples of the training.

    Returns:
        The scores, by the suffix for their output: "" for validation, " on test set" for test. A split without data
        has no score.

    Raises:
        ValueError: neither split has data.
    """
    config, dims, tokenizer = loaded.config, loaded.dims, loaded.tokenizer
    plan = plan_batches(config.batches, data_parallel_size=dims.data_size)
    count = config.evaluation.eval_iters * plan.global_batch_size
    wanted = Splits(train=0, valid=count, test=count)
    options: dict[str, Any] = {"num_samples": wanted, "seed": config.launch.seed, "exact": False, "log": loaded.say}
    datasets = build_datasets(config.data, tokenizer, **options)
    orders = [None if dataset is None else dataset.order() for dataset in (datasets.valid, datasets.test)]
    check_equal_on_all_ranks(dims.world, "the validation and test data", str(orders))
    scores = {}
    for where, dataset in (("", datasets.valid), (" on test set", datasets.test)):
        if dataset is None:
            continue
        loader = open_loader(dataset, config.data, tokenizer, plan, dims, loaded.device, ramp_up=False)
        iterations, size = config.evaluation.eval_iters, plan.global_batch_size
        loss = Evaluator(*loaded.built, loader, dims, iterations=iterations, batch_size=size)()
        loader.close()
        counts = count_labels(dataset, count, tokenizer, config.data, dims)
        scores[where] = Score(loss, counts.tokens, counts.text_bytes)
    if not scores:
        raise ValueError(f"--split {config.data.split} leaves no data for validation and test; give --input")
    return scores


if __name__ == "__main__":
    raise SystemExit(main())
