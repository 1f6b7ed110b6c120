"""Memory estimates of all models of a post-training on one rank, and a dry run of a step on tensors without memory.

The plan (--plan, by planner/step.py) estimates the peak memory of each phase:

    drawing    (grpo, ppo) the gathered policy, and keys and values, without the activations of prompts
    asking     a forward of the reference or reward model
    training   forward, backward and update of the policy, or of its adapters on a frozen base

All phases include the policy's shards, moments and kept weights, and the frozen models. Of streamed models
(--weights-device host or disk), only the part on the device counts. Of a policy's scalar head (reward, ppo), only its
shards count.

The dry run (--dry-run, by planner/dry_run.py) runs the program's own step: the policy or its adapters on a frozen base,
the objective, and the forwards of reference and reward model. It samples no completions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megazpp.base.program import MEGA, aligned
from megazpp.lora.policy import add_adapters
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.frozen import FrozenUnits, freeze
from megazpp.packed_weights.streamed import plan_stream
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.dry_run import CPU, DryTask, count_step, language_model_task, plan_dry_run
from megazpp.planner.estimate import build_step_simulator
from megazpp.planner.report import memory_rows
from megazpp.planner.simulator import Memory, SimulatedAxis
from megazpp.planner.step import MASTER_BYTES, StepSimulator, TrafficTable, measure, sent_on
from megazpp.post_training.batch import PairBatch, RolloutBatch
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.objectives import PolicyLoss, PreferenceLoss
from megazpp.post_training.reference import FrozenModel
from megazpp.post_training.setup import PostConfigs
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan
from megazpp.tensor_parallel.parameters import count_elements
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import WIRES
from megazpp.training.setup import ModelSpec, model_on_meta, shard_built, shard_on_meta
from megazpp.zero.config import ZeroConfig

STANDING = (Memory.PARAMETERS, Memory.MOMENTS, Memory.SECONDARY, Memory.FEEDBACK, Memory.FROZEN)
Phases = dict[str, Counter[Memory]]  # peak bytes of one rank by kind, for each phase


def describe_phases(phases: Phases) -> list[str]:
    """Return the lines of a table of the phases."""
    return list(aligned(memory_rows("GB of a rank at the fullest moment of", phases)))


def plan_models(
    config: RunConfig, configs: PostConfigs, plan: RunPlan, *, rank: int = 0, on_cpu: bool = False
) -> Phases:
    """Estimate the memory of a rank.

    Args:
        config: configs of the run, with sequence length and vocabulary size.
        configs: configs of post-training.
        plan: plan of the run.
        rank: rank to estimate.
        on_cpu: True if the CPU computes.
    Raises:
        ValueError: --lora-target-modules names no layers of the model.
    """
    post, lora, streams = configs.training, configs.lora, configs.weights.packs
    make = functools.partial(
        build_step_simulator,
        config,
        plan=plan,
        device_type="cpu",
        rank=rank,
        on_cpu=on_cpu,
        micro_batch_size=_rows_of(post, plan.batches.micro_batch_size),
        documents=None,
        diloco=None,
    )
    settings = None if lora.lora_r is None else lora.settings(config.model)

    def adapt(model: GPTModel) -> None:
        assert settings is not None
        _freeze(model)
        add_adapters(model, settings, None)

    whole = plan._replace(layout=dataclasses.replace(plan.layout, ep=1))  # ranks have all experts of a frozen model

    def asked_in(bits: int | None) -> Counter[Memory]:
        step = make(prepare=_freeze, frozen_bits=bits, plan=whole)
        step.run_forward()
        return step.ledger.peak

    prepare = None if settings is None else adapt
    policy = make(with_entropy=post.draws, prepare=prepare, frozen_bits=lora.base_weight_bits)
    measure(policy, plan.batches.num_micro_batches_at(plan.batches.rampup_samples))
    training = policy.ledger.peak.copy()
    if post.objective in ("reward", "ppo"):
        head, moments = MASTER_BYTES * config.model.hidden, 1 if config.optimizer.optimizer == "sgd" else 2
        training += Counter({Memory.PARAMETERS: head, Memory.MOMENTS: moments * head})
    standing = Counter({kind: training[kind] for kind in STANDING})
    asked = asked_in(None)
    kept = _streamed_bytes(config, configs, plan, rank, on_cpu) if streams else asked[Memory.FROZEN]
    reference = Counter[Memory]()
    if post.needs_reference and settings is None:
        reference[Memory.REFERENCE] = standing[Memory.PARAMETERS] if post.sync_ref_model else kept
    reward = Counter({Memory.REWARD: kept} if post.reward_load is not None else {})
    phases: Phases = {}
    if post.needs_reference or post.reward_load is not None:
        once = {kind: asked[kind] for kind in (Memory.ACTIVATIONS, Memory.UNPACKED)}
        if streams:
            once[Memory.UNPACKED] = 0
        if settings is not None and post.needs_reference:  # the base is the reference
            base = asked_in(lora.base_weight_bits)
            once[Memory.UNPACKED] = max(once[Memory.UNPACKED], base[Memory.UNPACKED])
        if not post.draws:  # the reference computes between micro-batches, when gradients exist
            once |= {kind: training[kind] for kind in (Memory.GRADIENTS, Memory.PARTIAL_SUMS)}
        phases["asking"] = standing + reward + reference + Counter(once)
    beside = reward if post.precompute_ref_log_probs else reward + reference  # a precomputed reference is freed
    if post.draws:
        phases["drawing"] = standing + beside + _drawing(config, configs, plan, policy)
    return phases | {"training": training + beside}


class PostDryRun(NamedTuple):
    """The bytes that one rank sends and holds in a step.

    Attributes:
        sent: calls and bytes by (wire, axis, collective).
        live_bytes: peak bytes of tensors.
        planned: estimates of the phases; a dry run does not include the phase drawing.
        base_bytes: bytes of the frozen base.
        trained: number of trained parameters of the whole model.
    """

    sent: TrafficTable
    live_bytes: int
    planned: Phases
    base_bytes: int
    trained: int

    @property
    def planned_bytes(self) -> int:
        """The estimated peak bytes of the phases that a dry run includes."""
        return max(kinds.total() for name, kinds in self.planned.items() if name != "drawing")

    def describe(self) -> str:
        """Return tables of the estimates and of the counted bytes."""
        rows: list[tuple[str, ...]] = [("MB of one rank, one optimizer step", "counted")]
        rows += [(f"sent, {wire}", f"{sent_on(self.sent, wire) / MEGA:.3f}") for wire in WIRES]
        rows.append(("live at the fullest moment", f"{self.live_bytes / MEGA:.3f}"))
        note = f"{self.trained:,} trained parameters of the whole model"
        if self.base_bytes:
            note += f", and {self.base_bytes / MEGA:.3f} MB of frozen weights"
        off = 100 * (self.planned_bytes / self.live_bytes - 1)
        planned = f"planned: {self.planned_bytes / MEGA:.3f} MB at the fullest moment ({off:+.1f} %)"
        return "\n".join([*describe_phases(self.planned), "", *aligned(rows), note, planned])


def dry_run_models(config: RunConfig, configs: PostConfigs, cluster: Cluster, *, rank: int) -> PostDryRun:
    """Estimate an optimizer step of `rank`, and run it with fake tensors.

    Raises:
        ValueError: flags contradict each other or the cluster, --vocab-size is missing, or a flag needs the weights of
            a checkpoint, which a dry run does not read.
    """
    if configs.weights.packs:
        raise ValueError("--dry-run reads no weights: --weights-device and --weight-bits are for --plan")
    config, plan = plan_dry_run(config, cluster, rank)
    post, lora, base_bytes, trained = configs.training, configs.lora, 0, 0

    def make_task(spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> DryTask:
        nonlocal base_bytes, trained
        frozen = functools.partial(_frozen, dims, dims.twin("local", "frozen"), fake)
        reference, reward = None, None
        if post.needs_reference and lora.lora_r is None and not post.precompute_ref_log_probs:
            if post.sync_ref_model:
                exact = dataclasses.replace(spec, zero=ZeroConfig(), wire=None)
                model = shard_on_meta(exact, dims, CPU).model
                with fake:
                    model.to_empty(device=CPU)
            else:
                model, _ = frozen(spec)
            reference = FrozenModel(model).logps
        if post.reward_load is not None:
            reward = FrozenModel(frozen(dataclasses.replace(spec, scalar_head=True))[0])
        spec = dataclasses.replace(spec, scalar_head=post.objective in ("reward", "ppo"))
        if lora.lora_r is None:
            policy = model_on_meta(spec, dims, CPU)
        else:
            policy, base = frozen(spec, trained="scalar_head.", bits=lora.base_weight_bits)
            base_bytes = base.kept_bytes
            add_adapters(
                policy, lora.settings(spec.config), SharedGenerator(CPU, seed=spec.seed, data_rank=dims.dropout_rank)
            )
            if post.needs_reference and not post.precompute_ref_log_probs:
                reference = FrozenModel(policy, is_policy=True).logps
        trained = count_elements(policy, tp_size=dims.tp.size, ep_size=dims.layout.ep)
        built = shard_built(policy, spec, dims)
        with fake:
            built.model.to_empty(device=CPU)
            if post.objective == "sft":
                return language_model_task(config, plan, built)
            batch = _fake_batch(post, _rows_of(post, plan.batches.micro_batch_size), config.data.seq_length or 0)
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
    """Return a batch of pairs or completions for the objective."""
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
    """Build a model of frozen units, except parameters whose names begin with `trained`."""
    model = model_on_meta(spec, dims, CPU, whole_experts=True)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def load(name: str, rows: slice) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, *shapes[name][1:])

    place: dict[str, Any] = {"device": CPU, "dtype": spec.precision.param_dtype, "bits": bits}
    with fake:
        return model, freeze(
            model, model.sharding_units(), axis, load, **place, trained=lambda name: name.startswith(trained)
        )


def _freeze(model: GPTModel) -> None:
    model.requires_grad_(False)


def _rows_of(post: PostTrainingConfig, micro_batch_size: int) -> int:
    """Return the number of rows of a micro-batch; a pair has two."""
    return micro_batch_size * (2 if post.objective in ("dpo", "reward") else 1)


def _drawing(config: RunConfig, configs: PostConfigs, plan: RunPlan, policy: StepSimulator) -> Counter[Memory]:
    """Estimate the memory of sampling: the gathered policy, and keys and values of one batch of completions."""
    post, model, itemsize = configs.training, config.model, config.precision.param_dtype.itemsize
    count = post.rollouts_at_once or plan.batches.global_batch_size * post.slices // plan.layout.data
    per_token = 2 * model.layers * (model.query_groups // plan.layout.tp) * model.head_size * itemsize
    shards = plan.layout.axis_size("shard")
    whole = [unit.size * unit.axis.size * itemsize for unit in policy.units]
    copied = [2 * size + unit.gather_buffer for size, unit in zip(whole, policy.units, strict=True)]
    return Counter(
        {
            Memory.GATHERED: sum(whole),
            Memory.BUFFERS: max(copied) if shards > 1 else 0,  # buffers of a gather and of the previous one
            Memory.UNPACKED: policy.unpacked_bytes,
            Memory.KEYS_AND_VALUES: count * configs.form.max_length * per_token,
        }
    )


def _streamed_bytes(config: RunConfig, configs: PostConfigs, plan: RunPlan, rank: int, on_cpu: bool) -> int:
    """Return the bytes of a streamed model on the device. With a CPU as the device, host memory counts."""
    weights = configs.weights
    tp = SimulatedAxis(plan.layout, "tp", rank=rank, counter=TrafficCounter(), cost=lambda collective, sent_bytes: None)
    assert config.tokenizer.vocab_size is not None
    with torch.device("meta"):
        model = GPTModel(config.model, vocab_size=config.tokenizer.vocab_size, tp=tp)
    stream = plan_stream(model, list(model.layers), plan.layout.axis_size("local"), *weights.at_rest(config.precision))
    fetched = weights.weights_device == "disk" or (weights.weights_device == "host" and not on_cpu)
    return stream.device_bytes(weights.prefetch_layers, fetched=fetched)
