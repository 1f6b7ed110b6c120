"""A tiny policy on ranks, with the parts of a post-training around it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers.training import CLIP, CPU, GPT2_STYLE

from megazpp.data.tokenizer import ByteTokenizer
from megazpp.inference.sample import SampleConfig
from megazpp.model.config import GPTConfig
from megazpp.optim.loss_scale import LossScaleConfig, build_loss_scaler
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.post_training.batch import PairBatch, RolloutBatch, shortened
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.data import PromptDataset
from megazpp.post_training.examples import Prompt
from megazpp.post_training.objectives import PolicyLoss, PreferenceLoss
from megazpp.post_training.reference import FrozenModel
from megazpp.post_training.rewards import RewardFunction
from megazpp.post_training.rollouts import RolloutLoader
from megazpp.post_training.sampler import PolicySampler
from megazpp.topology.cluster import Cluster
from megazpp.training.setup import Built, ModelSpec, build_model
from megazpp.training.step import TrainStep
from megazpp.zero.config import ZeroConfig

STYLE = dataclasses.replace(GPT2_STYLE, init_method_std=0.3, max_position_embeddings=32)
SEQ = 24


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread; one process by default."""

    world: int = 1
    tp: int = 1
    cp: int = 1
    nodes: int = 1
    zeropp: bool = False
    sequence_parallel: bool = False
    micro_batch_size: int = 4


@dataclass(frozen=True, kw_only=True)
class PostCase:
    """A training of one objective."""

    post: PostTrainingConfig
    layout: Layout = field(default_factory=Layout)
    model: GPTConfig = STYLE
    steps: int = 2
    global_batch: int = 8
    learning_rate: float = 0.1
    shortens: bool = False
    temperature: float = 1.0


def build(case: PostCase, *, scalar_head: bool | None = None) -> tuple[Built, ParallelDims]:
    layout = case.layout
    cluster = Cluster(num_nodes=layout.nodes, ranks_per_node=layout.world // layout.nodes)
    parallel = ParallelConfig(tensor_model_parallel_size=layout.tp, context_parallel_size=layout.cp)
    dims = ParallelDims(plan_dims(parallel, cluster, zero_stage=3), device_type="cpu")
    spec = ModelSpec(
        config=case.model,
        vocab_size=257,
        sequence_parallel=layout.sequence_parallel,
        zero=ZeroConfig(zeropp=layout.zeropp),
        seed=5,
        scalar_head=case.post.objective in ("reward", "ppo") if scalar_head is None else scalar_head,
    )
    return build_model(spec, dims, CPU), dims


def make_step(built: Built, dims: ParallelDims, objective: Any) -> TrainStep:
    # not Adam, which makes a step of full size out of a gradient that is nothing but rounding
    optimizer = build_optimizer(list(built.model.named_parameters()), OptimizerConfig(optimizer="sgd"), CPU)
    scaler = build_loss_scaler(LossScaleConfig(), fp16=False)
    return TrainStep(*built, optimizer, scaler, dims, clip_grad=CLIP, objective=objective)


def synthetic_batch(case: PostCase, step: int, rows: list[int]) -> PairBatch | RolloutBatch:
    """Rows of a global batch that depends on nothing but the step."""
    generator = torch.Generator().manual_seed(100 + step)
    count = case.global_batch * (1 if case.post.draws else 2)
    tokens = torch.randint(0, 257, (count, SEQ + 1), generator=generator)
    starts, lengths = (torch.randint(1, 9, (count, 1), generator=generator) for _ in range(2))
    places = torch.arange(SEQ)
    mask, values_at = (((places >= starts) & (places < starts + n)).float() for n in (lengths, lengths + 1))
    numbers = [torch.randn(count, SEQ, generator=generator) for _ in range(5)]
    if not case.post.draws:
        rows = [*rows, *(row + case.global_batch for row in rows)]
    positions = places.expand(len(rows), SEQ).contiguous()
    inputs = tokens[rows, :-1].contiguous(), tokens[rows, 1:].contiguous(), mask[rows], positions
    if not case.post.draws:
        return PairBatch(*inputs, None, None)
    old, reference = (x[rows] * 0.1 - 5.5 for x in numbers[:2])
    if case.post.objective == "grpo":
        return RolloutBatch(*inputs, None, numbers[2][rows, 0], old, reference)
    return RolloutBatch(
        *inputs, None, numbers[2][rows], old, reference, None, numbers[3][rows], numbers[4][rows], values_at[rows]
    )


def train_on_synthetic(case: PostCase) -> list[dict[str, Any]]:
    """What each step of an objective says."""
    built, dims = build(case)
    if case.post.draws:
        objective: Any = PolicyLoss(case.post, dims, temperature=case.temperature)
    else:
        objective = PreferenceLoss(case.post, dims, FrozenModel(build(case, scalar_head=False)[0].model).logps)
    step, size = make_step(built, dims, objective), case.layout.micro_batch_size
    found = []
    for index in range(case.steps):
        firsts = range(dims.data_rank * size, case.global_batch, dims.data_size * size)
        batches = [synthetic_batch(case, index, list(range(first, first + size))) for first in firsts]
        if case.shortens:
            batches = [shortened(batch, dims.tp.size * dims.cp.size) for batch in batches]
            assert all(batch.tokens.shape[1] < SEQ for batch in batches)
        record = step(batches, learning_rate=case.learning_rate, weight_decay=0.0)
        found.append({"loss": record.loss, "grad_norm": record.grad_norm, **record.metrics})
    return found


def prompts(count: int = 6) -> list[Prompt]:
    """Of different lengths."""
    texts = ["ab", "Hello", "x", "12+34=", "zz zz", "??"]
    return [
        Prompt(list(text.encode()), text, {"number": i}, f"p.jsonl, line {i + 1}")
        for i, text in enumerate(texts[:count])
    ]


def evens(completions: list[str], number: list[int], **_: Any) -> list[float]:
    """How many of the characters have even codes, and a bit for the column, so that it is used."""
    return [sum(ord(c) % 2 == 0 for c in text) / 8 + n / 100 for text, n in zip(completions, number, strict=True)]


def make_loader(case: PostCase, built: Built, dims: ParallelDims, **options: Any) -> RolloutLoader:
    sampler = PolicySampler(
        *built,
        dims,
        ByteTokenizer(),
        config=SampleConfig(
            sample_tokens=case.post.max_completion_length, sample_temperature=case.temperature, sample_top_k=0
        ),
        functions=[RewardFunction("evens", evens)],
        seed=3,
        at_once=case.post.rollouts_at_once,
    )
    settings: dict[str, Any] = {
        "reward_weights": None,
        "reference": None,
        "reward_model": None,
        "max_length": SEQ,
        "global_batch_size": case.global_batch,
        "micro_batch_size": case.layout.micro_batch_size,
        "show": lambda iteration, completions: None,
    }
    return RolloutLoader(sampler, PromptDataset(prompts(), num_samples=999, seed=1), case.post, **settings | options)


def train_on_rollouts(case: PostCase) -> dict[str, Any]:
    """Draw and train: what each step says, and whether the first forward of a buffer repeats what was looked up."""
    built, dims = build(case)
    reference = None
    if case.post.needs_reference:
        reference = FrozenModel(build(case, scalar_head=False)[0].model, temperature=case.temperature).logps
    loader = make_loader(case, built, dims, reference=reference)
    objective = PolicyLoss(case.post, dims, temperature=case.temperature, rollout_metrics=loader.metrics)
    step, found, texts = make_step(built, dims, objective), [], []
    for index in range(case.steps):
        batches = loader.step(index * case.global_batch, case.global_batch)
        record = step(batches, learning_rate=case.learning_rate, weight_decay=0.0)
        metrics = {k: v for k, v in record.metrics.items() if not k.startswith("rollout/")}
        found.append({"loss": record.loss, "grad_norm": record.grad_norm, **metrics})
        texts.append(loader._buffer.table.tolist())
    return {"steps": found, "tables": texts, "cross": dims.counter.sent_bytes("cross")}
