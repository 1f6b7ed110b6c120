"""`--dry-run`: an optimizer step of one rank of a cluster that is not there, with all models beside the policy.

The program itself on tensors without memory (planner/dry_run.py): the policy or its adapters on a frozen base, the
objective, and the forwards of reference and reward model. Completions are not drawn. With --lora-r a step of all
weights is taken too, to compare.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megazpp.base.arguments import RunConfig
from megazpp.base.program import MEGA, aligned
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.dry_run import CPU, DryTask, count_step, language_model_task, plan_dry_run
from megazpp.planner.step import TrafficTable, sent_on
from megazpp.post_training.batch import PairBatch, RolloutBatch
from megazpp.post_training.lora import LoraConfig, add_adapters
from megazpp.post_training.memory import ModelsMemory, plan_models, rows_of
from megazpp.post_training.objectives import PolicyLoss, PreferenceLoss, Scorer
from megazpp.post_training.reference import BaseModel, FrozenModel
from megazpp.post_training.start import PostConfigs
from megazpp.stored.freeze import freeze, frozen_axis
from megazpp.stored.frozen import FrozenUnits
from megazpp.stored.packed import Bits
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import WIRES
from megazpp.training.setup import Built, ModelSpec, model_on_meta, shard_built, shard_on_meta
from megazpp.zero.config import ZeroConfig


class PostDryRun(NamedTuple):
    """The bytes that one rank sends and holds in a step.

    Attributes:
        sent: calls and bytes by (wire, axis, collective).
        live_bytes: of tensors at the fullest moment.
        planned: what was expected of that; drawing is no part of a dry run.
        all_weights: with --lora-r what a step of all weights sends, and holds.
        base_bytes: of the frozen base.
        trained: parameters.
        base_bits: of --base-weight-bits.
    """

    sent: TrafficTable
    live_bytes: int
    planned: ModelsMemory
    all_weights: tuple[TrafficTable, int] | None
    base_bytes: int
    trained: int
    base_bits: Bits | None = None

    @property
    def planned_bytes(self) -> int:
        """The planned bytes of what was run."""
        return self.planned.total("asking", "training")

    def describe(self) -> str:
        """Tables of what is planned and what was counted."""
        rows: list[tuple[str, ...]] = [("MB of one rank, one optimizer step", "counted")]
        rows += [(f"sent, {wire}", f"{sent_on(self.sent, wire) / MEGA:.3f}") for wire in WIRES]
        rows.append(("live at the fullest moment", f"{self.live_bytes / MEGA:.3f}"))
        if self.all_weights is not None:
            table, live_bytes = self.all_weights
            others = [*(sent_on(table, wire) for wire in WIRES), live_bytes]
            mine = [*(sent_on(self.sent, wire) for wire in WIRES), self.live_bytes]
            shares = [f"{100 * one / all_:.2f} %" if all_ else "" for one, all_ in zip(mine, others, strict=True)]
            more = [("all weights", ""), *((f"{n / MEGA:.3f}", s) for n, s in zip(others, shares, strict=True))]
            rows = [(*row, *beside) for row, beside in zip(rows, more, strict=True)]
        note = f"{self.trained:,} trained parameters" + (" in adapters" if self.all_weights is not None else "")
        if self.base_bytes:
            bits = "" if self.base_bits is None else f" in {self.base_bits} bits"
            note += f"; {self.base_bytes / MEGA:.3f} MB of frozen weights{bits}"
        off = 100 * (self.planned_bytes / self.live_bytes - 1)
        return "\n".join(
            [
                *self.planned.describe(),
                "",
                *aligned(rows),
                note,
                f"planned: {self.planned_bytes / MEGA:.3f} MB at the fullest moment ({off:+.1f} %)",
            ]
        )


def dry_run_models(config: RunConfig, configs: PostConfigs, cluster: Cluster, *, rank: int) -> PostDryRun:
    """Plan the step of `rank`, and take it.

    Raises:
        ValueError: flags that do not fit each other or the cluster, no --vocab-size, or weights that would be read.
    """
    if configs.weights.packs:
        raise ValueError("--dry-run reads no weights: --weights-on and --weight-bits are for --plan")
    config, plan = plan_dry_run(config, cluster, rank)
    planned = plan_models(config, configs, plan, rank=rank, on_cpu=True)
    bases, trained = list[FrozenUnits](), list[int]()

    def run(configs: PostConfigs) -> tuple[TrafficTable, int]:
        def make_task(spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> DryTask:
            models = _make_models(configs, spec, dims, fake)
            bases.extend([] if models.base is None else [models.base])
            trained.append(sum(parameter.numel() for parameter in models.policy.parameters()))
            built = shard_built(models.policy, spec, dims)
            with fake:
                built.model.to_empty(device=CPU)
                if configs.training.objective == "sft":
                    return language_model_task(config, plan, built)
                rows = rows_of(configs.training, plan.batches.micro_batch_size)
                return _task(configs, models, built, dims, (rows, config.data.seq_length or 0))

        sent, live_bytes = count_step(config, plan, rank, make_task)
        return sent[0], live_bytes

    counted, all_weights = run(configs), None
    if configs.lora.lora_r is not None:
        all_weights = run(configs._replace(lora=LoraConfig()))
    base_bytes = sum(base.kept_bytes for base in bases)
    return PostDryRun(*counted, planned, all_weights, base_bytes, trained[0], configs.lora.base_weight_bits)


class _Models(NamedTuple):
    """All models of a run, on fake tensors; `base` is the frozen weights below the policy's adapters."""

    policy: GPTModel
    base: FrozenUnits | None
    reference: FrozenModel | None
    reward: FrozenModel | None


def _make_models(configs: PostConfigs, spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> _Models:
    post, lora, axis = configs.training, configs.lora, frozen_axis(dims)
    headed, base, reference, reward = dataclasses.replace(spec, scalar_head=True), None, None, None
    if post.needs_reference and lora.lora_r is None and not post.precompute_ref_log_probs:
        if post.sync_ref_model:
            exact = dataclasses.replace(spec, zero=ZeroConfig(), wire=None)
            model = shard_on_meta(exact, dims, CPU).model
            with fake:
                model.to_empty(device=CPU)
        else:
            model = _frozen(spec, dims, axis, fake)[0]
        reference = FrozenModel(model)
    if post.reward_load is not None:
        reward = FrozenModel(_frozen(headed, dims, axis, fake)[0])
    spec = headed if post.objective in ("reward", "ppo") else spec
    if lora.lora_r is None:
        policy = model_on_meta(spec, dims, CPU)
    else:
        policy, base = _frozen(spec, dims, axis, fake, trained="scalar_head.", bits=lora.base_weight_bits)
        shared = SharedGenerator(CPU, seed=spec.seed, data_rank=dims.data_rank)
        add_adapters(policy, lora.settings(spec.config), shared)
    return _Models(policy, base, reference, reward)


def _task(configs: PostConfigs, models: _Models, built: Built, dims: ParallelDims, shape: tuple[int, int]) -> DryTask:
    """A batch [rows, tokens] of preferences or rollouts, its objective, and what other models are asked before."""
    post, reference = configs.training, models.reference
    tokens, numbers = torch.zeros(shape, dtype=torch.int64), torch.ones(shape)
    inputs = (tokens, tokens, numbers, tokens, None)
    known = numbers[:, 0] if post.precompute_ref_log_probs else None
    scorer: Scorer | None = reference
    if models.base is not None and post.needs_reference and known is None:
        scorer = BaseModel(built.model)
    if not post.draws:
        return DryTask(built, PairBatch(*inputs, known), PreferenceLoss(post, dims, scorer))
    ppo = post.objective == "ppo"
    advantages = numbers if ppo else numbers[:, 0]
    values = (numbers, numbers, numbers) if ppo else (None, None, None)
    batch = RolloutBatch(*inputs, advantages, numbers, numbers if post.needs_reference else None, numbers, *values)

    def ask() -> None:
        if models.reward is not None:
            models.reward.scores(batch)
        if scorer is not None:
            scorer.logps(batch)

    return DryTask(built, batch, PolicyLoss(post, dims, temperature=1.0), ask)


def _frozen(
    spec: ModelSpec,
    dims: ParallelDims,
    axis: MeshAxis,
    fake: FakeTensorMode,
    *,
    trained: str | None = None,
    bits: Bits | None = None,
) -> tuple[GPTModel, FrozenUnits]:
    """A model of frozen units, but for parameters whose names begin with `trained`."""
    model = model_on_meta(spec, dims, CPU)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def load(name: str, rows: slice) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, *shapes[name][1:])

    def is_trained(name: str) -> bool:
        return trained is not None and name.startswith(trained)

    place: dict[str, Any] = {"device": CPU, "dtype": spec.precision.param_dtype}
    with fake:
        return model, freeze(model, model.sharding_units(), axis, load, **place, bits=bits, trained=is_trained)
