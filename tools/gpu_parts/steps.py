"""Steps as `pretrain_gpt.py` takes them, without its data and checkpoints: for parts that time or compare them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megazpp.arguments import RunConfig, parse_run_config
from megazpp.data.batch import MicroBatch, make_micro_batch
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.parallel.dims import ParallelDims
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep
from megazpp.zero.config import ZeroConfig

ROOT = Path(__file__).resolve().parents[2]


def read_config(*flags: str, **model: Any) -> RunConfig:
    """What `pretrain_gpt.py` makes of the flags; `model`: other values of the shape."""
    config = parse_run_config(flags, ROOT).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def build_step(
    config: RunConfig, dims: ParallelDims, *, vocab_size: int, device: torch.device, zero: ZeroConfig | None = None
) -> TrainStep:
    """The model in shards, its optimizer and its step; `zero` in place of the config's."""
    spec = dataclasses.replace(config, zero=zero or config.zero).model_spec(vocab_size)
    built = build_model(spec, dims, device)
    optimizer = build_optimizer(list(built.model.named_parameters()), config.optimizer, device)
    scaler = build_loss_scaler(config.loss_scale, fp16=config.precision.fp16)
    return TrainStep(*built, optimizer, scaler, dims, clip_grad=config.optimizer.clip_grad)


def make_batches(
    config: RunConfig, vocab_size: int, micro_batches: int, device: torch.device, *, seed: int = 1234
) -> list[MicroBatch]:
    """Random tokens in the config's shape."""
    samples, length = config.batches.micro_batch_size, config.data.seq_length
    assert samples is not None
    assert length is not None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocab_size, (micro_batches, samples, length + 1), generator=generator)
    return [make_micro_batch(each, eod=None).to(device) for each in drawn]
