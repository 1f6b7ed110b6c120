"""A tiny policy model on several ranks, and its training steps, for the tests of objectives and rollouts."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.training import CLIP, GPT2_STYLE, MIXTURE_STYLE, Case, build_on_ranks

from megazpp.model.config import GPTConfig
from megazpp.optim.build import build_optimizer
from megazpp.optim.config import LossScaleConfig, OptimizerConfig
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.dims import ParallelDims
from megazpp.post_training.config import PostTrainingConfig
from megazpp.training.setup import ShardedModel
from megazpp.training.step import TrainStep

STYLE = dataclasses.replace(GPT2_STYLE, init_method_std=0.3, max_position_embeddings=32)
MIXTURE = dataclasses.replace(
    MIXTURE_STYLE,
    num_layers=2,
    init_method_std=0.3,
    max_position_embeddings=32,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.01,
)
SEQ, BATCH = 24, 8  # number of tokens per row, and of rows (completions or pairs) per step


@dataclass(frozen=True, kw_only=True)
class PostCase(Case):
    """The configuration of a training run of a tiny policy with one post-training objective."""

    post: PostTrainingConfig
    model: GPTConfig = STYLE
    vocab_size: int = 257
    micro_batch_size: int = 4
    steps: int = 2
    shortens: bool = False
    temperature: float = 1.0


def build(case: PostCase, *, scalar_head: bool | None = None) -> tuple[ShardedModel, ParallelDims]:
    headed = case.post.objective in ("reward", "ppo") if scalar_head is None else scalar_head
    model, sharding, dims = build_on_ranks(dataclasses.replace(case, scalar_head=headed))
    return ShardedModel(model, sharding), dims


def train(
    built: ShardedModel, dims: ParallelDims, objective: Any, steps: Iterable[list[Any]]
) -> list[dict[str, float]]:
    """Train on the micro-batches of each step; return one dict per step with loss, gradient norm and metrics."""
    # SGD, because Adam turns gradients that consist of rounding errors into full-size updates
    optimizer = build_optimizer(built.model, OptimizerConfig(optimizer="sgd"))
    scaler = LossScaler(LossScaleConfig(), fp16=False)
    step = TrainStep(*built, optimizer, scaler, dims, clip_grad=CLIP, objective=objective)
    results = [step(batches, learning_rate=0.1, weight_decay=0.0) for batches in steps]
    return [{"loss": each.loss, "grad_norm": each.grad_norm, **each.metrics} for each in results]


def near(steps: list[dict[str, float]], *, rel: float, abs: float) -> list[Any]:
    """Return one `pytest.approx` per step, which compares equal to the step's numbers within the tolerances."""
    return [pytest.approx(each, rel=rel, abs=abs) for each in steps]
