"""Build the large parts of a run in the order they depend on each other: model, shards, data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from megazpp.data.batch import make_micro_batch
from megazpp.data.dataset import DataConfig, Dataset, Splits, build_datasets
from megazpp.data.loader import BatchLoader
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.config import GPTConfig
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.parameters import distribute_parameters, initialize_parameters_
from megazpp.training.batches import BatchPlan
from megazpp.training.evaluate import EvalConfig
from megazpp.zero.config import ZeroConfig
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.sharding import Sharding, materialize, shard_model


class Built(NamedTuple):
    """A model in shards and the handle on them."""

    model: GPTModel
    sharding: Sharding


def build_model(
    config: GPTConfig,
    *,
    vocab_size: int,
    dims: ParallelDims,
    sequence_parallel: bool,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    seed: int,
    device: torch.device,
) -> Built:
    """Build on the meta device, shard, then allocate and initialise this rank's shards only."""
    generator = SharedGenerator(device, seed=seed, data_rank=dims.data_rank)
    with torch.device("meta"):
        model = GPTModel(
            config, vocab_size=vocab_size, tp=dims.tp, sequence_parallel=sequence_parallel, shared_generator=generator
        )
    if dims.tp.size > 1:
        distribute_parameters(model, dims.mesh["tp"])
    sharding = shard_model(model, model.sharding_units(), dims, zero=zero, precision=precision)
    materialize(model, device)
    draw_device = torch.device("cpu") if config.use_cpu_initialization else device
    initialize_parameters_(model, seed=seed, draw_device=draw_device)
    return Built(model, sharding)


def open_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    plan: BatchPlan,
    evaluation: EvalConfig,
    *,
    seed: int,
    announce: Callable[[str], None],
) -> Splits[Dataset | None]:
    """Datasets with as many samples as the run will ask for."""
    held_out = evaluation.eval_iters * plan.global_batch_size
    wanted = Splits(train=plan.total_samples, valid=held_out, test=held_out)
    return build_datasets(config, tokenizer, num_samples=wanted, seed=seed, announce=announce)


def open_loader(
    dataset: Dataset,
    config: DataConfig,
    tokenizer: Tokenizer,
    plan: BatchPlan,
    dims: ParallelDims,
    device: torch.device,
    *,
    ramp_up: bool,
) -> BatchLoader:
    """This rank's batches of `dataset`; `ramp_up` where the batch size follows the plan rather than staying full."""
    make_batch = functools.partial(
        make_micro_batch,
        eod=tokenizer.eod,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
    )
    return BatchLoader(
        dataset,
        micro_batch_size=plan.micro_batch_size,
        data_rank=dims.data_rank,
        data_size=dims.data_size,
        make_batch=make_batch,
        device=device,
        num_workers=config.num_workers,
        batch_size_at=plan.batch_size_at if ramp_up else None,
    )
