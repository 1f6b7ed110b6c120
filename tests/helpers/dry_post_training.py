"""Dry run of post-training: run an optimizer step of all its models on fake tensors, to compare with the planner.

The step is the program's own: the policy or its adapters on a frozen base, the objective, and the forwards of the
reference model and of the reward model. No completions are sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from helpers.dry_run import CPU, DryTask, count_step, language_model_task, plan_on_cpus
from torch._subclasses.fake_tensor import FakeTensorMode

from megazpp.lora.checks import adapter_settings
from megazpp.lora.policy import add_adapters
from megazpp.model.gpt import GPTModel
from megazpp.model.layer_parts import SharedGenerator
from megazpp.packed_weights.frozen import FrozenUnits, freeze
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.step import TrafficTable
from megazpp.post_training.config import PostConfigs, PostTrainingConfig
from megazpp.post_training.data import PairBatch, RolloutBatch
from megazpp.post_training.objectives import PolicyLoss, PreferenceLoss
from megazpp.post_training.plan import Phases, plan_models, rows_of
from megazpp.post_training.reference import FrozenModel
from megazpp.run.arguments import RunConfig
from megazpp.topology.cluster import Cluster
from megazpp.training.config import ModelSpec
from megazpp.training.setup import model_on_meta, shard_built


class PostDryRun(NamedTuple):
    """The bytes that one rank sends and holds in an optimizer step of post-training, as counted and as planned.

    Attributes:
        sent: counted calls and bytes of the step by (wire, axis, collective).
        live_bytes: bytes of all tensors at the memory peak.
        planned: planner's memory estimate of each phase. A dry run does not include the phase "drawing", which samples
            completions.
        base_bytes: bytes of the packed base weights under LoRA; 0 without LoRA.
        trained: number of trained parameters of a tensor-parallel rank.
    """

    sent: TrafficTable
    live_bytes: int
    planned: Phases
    base_bytes: int
    trained: int

    @property
    def planned_bytes(self) -> int:
        """The planner's estimate of the peak bytes, over the phases that a dry run includes."""
        return max(kinds.total() for name, kinds in self.planned.items() if name != "drawing")


def dry_run_models(config: RunConfig, configs: PostConfigs, cluster: Cluster, *, rank: int) -> PostDryRun:
    """Plan one optimizer step of post-training on `rank`, run it with fake tensors, and return both results.

    Args:
        config: flags of the run, with --vocab-size.
        configs: flags of the post-training; they may not ask for streamed weights.
        cluster: cluster of the run.
        rank: global rank whose part of the step this process runs.
    """
    plan = plan_on_cpus(config, cluster)
    post, lora, base_bytes, trained = configs.training, configs.lora, 0, 0

    def make_task(spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> DryTask:
        nonlocal base_bytes, trained
        frozen = functools.partial(_frozen, dims, dims.twin("local", "frozen"), fake)
        reference, reward = None, None
        if post.needs_reference and lora.lora_r is None and not post.precompute_ref_log_probs:
            reference = FrozenModel(frozen(spec)[0]).logps
        if post.reward_load is not None:
            reward = FrozenModel(frozen(dataclasses.replace(spec, scalar_head=True))[0])
        spec = dataclasses.replace(spec, scalar_head=post.objective in ("reward", "ppo"))
        if lora.lora_r is None:
            policy = model_on_meta(spec, dims, CPU)
        else:
            policy, base = frozen(spec, trained="scalar_head.", bits=lora.base_weight_bits)
            base_bytes = base.kept_bytes
            add_adapters(
                policy,
                adapter_settings(lora, spec.config),
                SharedGenerator(CPU, seed=spec.seed, data_rank=dims.dropout_rank),
            )
            if post.needs_reference and not post.precompute_ref_log_probs:
                reference = FrozenModel(policy, is_policy=True).logps
        trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
        built = shard_built(policy, spec, dims)
        with fake:
            built.model.to_empty(device=CPU)
            if post.objective == "sft":
                return language_model_task(config, plan, built)
            batch = _fake_batch(post, rows_of(post, plan.batches.micro_batch_size), config.data.seq_length or 0)
            if isinstance(batch, PairBatch):
                return DryTask(built, batch, PreferenceLoss(post, dims, reference))

            def ask() -> None:
                if reward is not None:
                    reward.scores(batch)
                if reference is not None:
                    reference(batch)

            return DryTask(built, batch, PolicyLoss(post, dims, temperature=1.0), ask)

    planned = plan_models(config, configs, plan, rank=rank, on_cpu=True)
    (sent, _), live_bytes = count_step(config, plan, rank, make_task)
    return PostDryRun(sent, live_bytes, planned, base_bytes, trained)


def _fake_batch(post: PostTrainingConfig, rows: int, seq_length: int) -> PairBatch | RolloutBatch:
    """Return a micro-batch of zeros and ones in the form that the objective needs.

    Args:
        post: flags of the post-training, which name the objective.
        rows: number of rows of the micro-batch.
        seq_length: tokens per row.

    Returns:
        Pairs for objectives that compare two answers, or completions for those that sample, such as GRPO and PPO.
    """
    tokens, numbers = torch.zeros(rows, seq_length, dtype=torch.int64), torch.ones(rows, seq_length)
    inputs = (tokens, tokens, numbers, tokens, None)
    if not post.draws:
        return PairBatch(*inputs, numbers[:, 0] if post.precompute_ref_log_probs else None)
    reference = numbers if post.needs_reference else None
    if post.objective == "grpo":
        return RolloutBatch(*inputs, numbers[:, 0], numbers, reference, numbers)
    return RolloutBatch(*inputs, numbers, numbers, reference, numbers, numbers, numbers, numbers)


def _frozen(
    dims: ParallelDims,
    axis: MeshAxis,
    fake: FakeTensorMode,
    spec: ModelSpec,
    *,
    trained: str | tuple[()] = (),
    bits: int | None = None,
) -> tuple[GPTModel, FrozenUnits]:
    """Build a model whose weights are frozen and packed, for a reference model, a reward model or the base of LoRA.

    Args:
        dims: mesh of the run.
        axis: axis over which the frozen weights are sharded.
        fake: mode in which tensors have shapes but no memory.
        spec: description of the model.
        trained: prefix of the names of parameters that stay trainable; () freezes all.
        bits: bits per value of the packed weights; None keeps the compute dtype.

    Returns:
        (the model, its frozen units).
    """
    model = model_on_meta(spec, dims, CPU, whole_experts=True)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def load(name: str, rows: slice) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, *shapes[name][1:])

    place: dict[str, Any] = {"device": CPU, "dtype": spec.precision.param_dtype, "bits": bits}
    with fake:
        return model, freeze(
            model, model.sharding_units(), axis, load, **place, trained=lambda name: name.startswith(trained)
        )
