"""`--dry-run`: an optimizer step of one rank of a cluster that is not there, with all models beside the policy.

The program itself on tensors without memory (planner/dry_run.py): the policy or its adapters on a frozen base, the
objective, and the forwards of reference and reward model. Completions are not drawn. With --lora-r a step of all
weights is taken too, to compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megazpp.base.arguments import RunConfig
from megazpp.base.checks import RunPlan, check_run_config
from megazpp.base.formatting import MEGA, aligned
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.dry_run import CPU, DryTask, count_step, fake_ranks, language_model_task
from megazpp.planner.step import TrafficTable
from megazpp.planner.variants import for_planning
from megazpp.post_training.batch import PairBatch, RolloutBatch
from megazpp.post_training.lora import LoraConfig, add_adapters
from megazpp.post_training.memory import ModelsMemory, plan_models, rows_of
from megazpp.post_training.objectives import PolicyLoss, PreferenceLoss
from megazpp.post_training.reference import BaseModel, FrozenModel
from megazpp.post_training.start import PostConfigs
from megazpp.stored.freeze import freeze, frozen_axis
from megazpp.stored.frozen import FrozenUnits
from megazpp.stored.packed import Bits
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import WIRES
from megazpp.training.setup import Built, ModelSpec, model_on_meta, shard_built
from megazpp.zero.config import ZeroConfig
from megazpp.zero.sharding import materialize


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


def sent_on(table: TrafficTable, wire: str) -> int:
    """Bytes."""
    return sum(traffic.sent_bytes for key, traffic in table.items() if key[0] == wire)


def dry_run_models(config: RunConfig, configs: PostConfigs, cluster: Cluster, *, rank: int) -> PostDryRun:
    """Plan the step of `rank`, and take it.

    Raises:
        ValueError: flags that do not fit each other or the cluster, no --vocab-size, or weights that would be read.
    """
    if configs.weights.packs:
        raise ValueError("--dry-run reads no weights: --weights-on and --weight-bits are for --plan")
    config = for_planning(config, "--dry-run")
    if not 0 <= rank < cluster.world_size:
        raise ValueError(f"--dry-run-rank {rank} is not a rank of the cluster: it has 0 to {cluster.world_size - 1}")
    plan = check_run_config(config, cluster, device_type=CPU.type)
    planned = plan_models(config, configs, plan, rank=rank, on_cpu=True)
    count = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)

    def run(models: _DryModels) -> tuple[TrafficTable, int]:
        with fake_ranks(rank, cluster.world_size):
            # a thread would not see the modes that make its tensors fake
            dims = ParallelDims(plan.layout, device_type=CPU.type, nccl=config.nccl, threads=False)
            sent, live_bytes = count_step(config, plan, dims, count, models.build, models.task)
            return sent[0], live_bytes

    models, all_weights = _DryModels(configs), None
    counted = run(models)
    if configs.lora.lora_r is not None:
        all_weights = run(_DryModels(configs._replace(lora=LoraConfig())))
    base_bytes = 0 if models.base is None else models.base.kept_bytes
    return PostDryRun(*counted, planned, all_weights, base_bytes, models.trained, configs.lora.base_weight_bits)


class _DryModels:
    """All models of a run, on fake tensors.

    Attributes:
        base: the frozen weights of a policy with adapters.
        trained: parameters of the policy.
    """

    def __init__(self, configs: PostConfigs) -> None:
        self.post, self.lora = configs.training, configs.lora
        self.base: FrozenUnits | None = None
        self.trained = 0

    def build(self, spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> Built:
        post, self._dims = self.post, dims
        axis = frozen_axis(dims)
        self._reference = self._reward = None
        if post.needs_reference and self.lora.lora_r is None and not post.precompute_ref_log_probs:
            if post.sync_ref_model:
                exact = dataclasses.replace(spec, zero=ZeroConfig(), wire=None)
                reference = shard_built(model_on_meta(exact, dims, CPU), exact, dims).model
                with fake:
                    materialize(reference, CPU)
            else:
                reference = _frozen(spec, dims, axis, fake)[0]
            self._reference = FrozenModel(reference)
        if post.reward_load is not None:
            self._reward = FrozenModel(_frozen(_with_head(spec, True), dims, axis, fake)[0])
        spec = _with_head(spec, post.objective in ("reward", "ppo"))
        if self.lora.lora_r is None:
            model = model_on_meta(spec, dims, CPU)
        else:
            bits = self.lora.base_weight_bits
            model, self.base = _frozen(spec, dims, axis, fake, trained="scalar_head.", bits=bits)
            shared = SharedGenerator(CPU, seed=spec.seed, data_rank=dims.data_rank)
            add_adapters(model, self.lora.settings(spec.config), shared)
        self.trained = sum(parameter.numel() for parameter in model.parameters())
        built = shard_built(model, spec, dims)
        with fake:
            materialize(built.model, CPU)
        return built

    def task(self, config: RunConfig, plan: RunPlan, built: Built) -> DryTask:
        post, seq_length = self.post, config.data.seq_length
        assert seq_length is not None
        if post.objective == "sft":
            return language_model_task(config, plan, built)
        rows = rows_of(post, plan.batches.micro_batch_size)
        tokens = torch.zeros(rows, seq_length, dtype=torch.int64)
        numbers = torch.ones(rows, seq_length)
        inputs = (tokens, tokens, numbers, tokens, None)
        if not post.draws:
            known = numbers[:, 0] if post.precompute_ref_log_probs else None
            asked = BaseModel(built.model) if self.base is not None and known is None else self._reference
            return DryTask(PairBatch(*inputs, known), _QuietPreferenceLoss(post, self._dims, asked))
        ppo = post.objective == "ppo"
        advantages = numbers if ppo else numbers[:, 0]
        values = (numbers, numbers, numbers) if ppo else (None, None, None)
        batch = RolloutBatch(*inputs, advantages, numbers, numbers if post.needs_reference else None, numbers, *values)
        reference = BaseModel(built.model) if self.base is not None and post.needs_reference else self._reference

        def ask() -> None:
            if self._reward is not None:
                self._reward.scores(batch)
            if reference is not None:
                reference.logps(batch)

        return DryTask(batch, _QuietPolicyLoss(post, self._dims, temperature=1.0), ask)


class _QuietPreferenceLoss(PreferenceLoss):
    """There are no values that the host could have."""

    def metrics(self) -> Mapping[str, float]:
        return {}


class _QuietPolicyLoss(PolicyLoss):
    """The same."""

    def metrics(self) -> Mapping[str, float]:
        return {}


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


def _with_head(spec: ModelSpec, scalar_head: bool) -> ModelSpec:
    return dataclasses.replace(spec, scalar_head=scalar_head)
