"""Perplexity and bits per byte of a checkpoint's model.

python tools/evaluate.py --load checkpoints/                             the validation of its training, the same number
python tools/evaluate.py --load checkpoints/ --input my_text_document    every token of a .bin/.idx pair
python tools/evaluate.py --load checkpoints/ --input my_text.jsonl       or of a text

Model, tokenizer, precision, sequence length and data are the checkpoint's, unless flags say otherwise. All GPUs share
the work; on a CPU one process does it (--nproc).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from megazpp.base.flags import flag
from megazpp.base.program import program
from megazpp.data.dataset import Splits, build_datasets, check_inputs
from megazpp.features import FEATURES
from megazpp.inference.on_checkpoint import Loaded, run_on_checkpoint
from megazpp.run.arguments import RunConfig
from megazpp.training.batches import plan_batches
from megazpp.training.objective import Evaluator, Score, check_input, count_labels, score_whole
from megazpp.training.setup import open_loader

SAMPLES = 8  # of a forward, where the training said no --micro-batch-size


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Scoring.

    The text that the model predicts.
    """

    input: str | None = flag(None, "prefix of a .bin/.idx pair, or a text (default: the validation and test data)")


@program
def main(argv: list[str]) -> int:
    return run_on_checkpoint(__file__, __doc__, EvaluateConfig, run, argv, check=check, features=FEATURES)


def check(config: RunConfig, extra: EvaluateConfig) -> None:
    """Refuse what cannot be before anything is loaded."""
    if extra.input is not None:
        check_input(extra.input)
        return
    if config.evaluation.eval_iters == 0:
        raise ValueError("--eval-iters 0: nothing would be evaluated")
    check_inputs(config.data, config.tokenizer)


def run(loaded: Loaded) -> None:
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
    """Score the samples that the training was validated and tested with."""
    config, dims, tokenizer = loaded.config, loaded.dims, loaded.tokenizer
    plan = plan_batches(config.batches, data_parallel_size=dims.data_size)
    count = config.evaluation.eval_iters * plan.global_batch_size
    wanted = Splits(train=0, valid=count, test=count)
    datasets = build_datasets(config.data, tokenizer, num_samples=wanted, seed=config.launch.seed, log=loaded.say)
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
        raise ValueError(f"--split {config.data.split} leaves nothing for validation and test")
    return scores


if __name__ == "__main__":
    raise SystemExit(main())
