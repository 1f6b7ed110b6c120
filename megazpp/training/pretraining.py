"""The parts of pretraining: text, the model and the loss of the next token."""

from __future__ import annotations

import functools

from megazpp.base.arguments import ParsedRun
from megazpp.base.checks import RunPlan
from megazpp.data.dataset import Splits, build_datasets, build_tokenizer, unigram_entropy
from megazpp.islands.loop import check_island_holds
from megazpp.training.context import RunContext
from megazpp.training.evaluate import Evaluator
from megazpp.training.objective import LanguageModelLoss
from megazpp.training.setup import TrainingParts, build_model, open_loader


def pretraining(parsed: ParsedRun, plan: RunPlan, run: RunContext) -> TrainingParts:
    """Build them on this rank; raises ValueError if data or tokenizer cannot be used."""
    config, batches, dims = parsed.config, plan.batches, run.dims
    tokenizer = build_tokenizer(config.tokenizer, config.data, log=run.log)
    iterations, batch_size = config.evaluation.eval_iters, batches.global_batch_size
    wanted = Splits(train=batches.total_samples, valid=iterations * batch_size, test=iterations * batch_size)
    data = build_datasets(config.data, tokenizer, num_samples=wanted, seed=config.launch.seed, log=run.log)
    spec = config.model_spec(tokenizer.vocab_size, plan.wire)
    if plan.islands is not None:
        check_island_holds(spec, dims, run.device, plan.islands)
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
        held_out_entropy=lambda: None if data.valid is None else unigram_entropy(data.valid, tokenizer.vocab_size),
    )
