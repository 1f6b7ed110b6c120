"""Estimates of the memory that a post-training needs on one rank, with all of its models, for --plan.

The estimates use the simulated step of planner/step.py. They give the peak memory of each phase:

    drawing    sampling of completions (grpo, ppo): the gathered policy, and the keys and values of its cache; the
               activations of the forward that reads the prompts are not counted
    asking     a forward of the reference model or the reward model
    training   forward, backward and update of the policy, or of its adapters on a frozen base

All phases include the policy's shards, optimizer moments, secondary partition and error feedback, and the frozen
models. With --precompute-ref-log-probs, the reference model is freed before the phase `training`. Of streamed models
(--weights-device host or disk), only the bytes on the device count. Of a scalar head (reward, ppo), the fp32 weights
and the moments count, as if the head were not sharded. Its gradients and its 16-bit copy do not count.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import torch

from megazpp.base.program import aligned
from megazpp.lora.checks import adapter_settings
from megazpp.lora.policy import add_adapters
from megazpp.model.gpt import GPTModel
from megazpp.model.layer_parts import LayerSettings
from megazpp.packed_weights.format import at_rest
from megazpp.packed_weights.streamed import plan_stream
from megazpp.parallel.axis import TrafficCounter
from megazpp.planner.estimate import build_step_simulator
from megazpp.planner.report import memory_rows
from megazpp.planner.simulator import Memory, SimulatedAxis
from megazpp.planner.step import MASTER_BYTES, StepSimulator, measure
from megazpp.post_training.config import PostConfigs, PostTrainingConfig
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan

# Kinds of memory that exist in all phases of a post-training
STANDING = (Memory.PARAMETERS, Memory.MOMENTS, Memory.SECONDARY, Memory.FEEDBACK, Memory.FROZEN)
Phases = dict[str, Counter[Memory]]  # for each phase, the peak bytes of one rank by kind of memory


def describe_phases(phases: Phases) -> list[str]:
    """Return the lines of a table with a rank's peak memory in each phase of a post-training, in GB."""
    return list(aligned(memory_rows("GB of a rank at the fullest moment of", phases)))


def plan_models(
    config: RunConfig, configs: PostConfigs, plan: RunPlan, *, rank: int = 0, on_cpu: bool = False
) -> Phases:
    """Estimate the peak memory of one rank in each phase of a post-training.

    Args:
        config: configs of the run, with sequence length and vocabulary size.
        configs: configs of post-training.
        plan: plan of the run, with layout and batch sizes.
        rank: number of the rank whose memory is estimated.
        on_cpu: True for a run whose device is the CPU, so that host memory is the memory of the device.

    Returns:
        bytes by kind of memory, for each phase that the objective has.

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
        micro_batch_size=rows_of(post, plan.batches.micro_batch_size),
        documents=None,
        diloco=None,
    )
    settings = None if lora.lora_r is None else adapter_settings(lora, config.model)

    def adapt(model: GPTModel) -> None:
        assert settings is not None
        _freeze(model)
        add_adapters(model, settings, None)

    # Plan the frozen models without expert parallelism, because each rank computes with all of their experts
    whole = plan._replace(layout=dataclasses.replace(plan.layout, ep=1))

    def asked_in(bits: int | None) -> Counter[Memory]:
        """Return the peak bytes during a forward of a frozen model, by kind of memory.

        The model's matrices are packed in `bits` bits per value. With None, they are stored in the dtype in which the
        model computes.
        """
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
    reference = Counter({Memory.REFERENCE: kept} if post.needs_reference and settings is None else {})
    reward = Counter({Memory.REWARD: kept} if post.reward_load is not None else {})
    phases: Phases = {}
    if post.needs_reference or post.reward_load is not None:
        once = {kind: asked[kind] for kind in (Memory.ACTIVATIONS, Memory.UNPACKED)}
        if streams:  # a streamed matrix is unpacked in small pieces, which all use one small buffer
            once[Memory.UNPACKED] = 0
        # With adapters, the reference model is the policy's frozen base, and its forward unpacks packed weights
        if settings is not None and post.needs_reference:
            base = asked_in(lora.base_weight_bits)
            once[Memory.UNPACKED] = max(once[Memory.UNPACKED], base[Memory.UNPACKED])
        # Without --precompute-ref-log-probs, dpo runs the reference model in each micro-batch, while the gradients of
        # earlier micro-batches are in memory. With this flag, dpo runs the reference model before training, when there
        # are no gradients. The estimate includes gradients all the same, so it is then an upper bound.
        if not post.draws:
            once |= {kind: training[kind] for kind in (Memory.GRADIENTS, Memory.PARTIAL_SUMS)}
        phases["asking"] = standing + reward + reference + Counter(once)
    # With precomputed log-probabilities, the reference model is freed before training
    beside = reward if post.precompute_ref_log_probs else reward + reference
    if post.draws:
        phases["drawing"] = standing + beside + _drawing(config, configs, plan, policy)
    return phases | {"training": training + beside}


def _freeze(model: GPTModel) -> None:
    """Mark all parameters of a model as not trained."""
    model.requires_grad_(False)


def rows_of(post: PostTrainingConfig, micro_batch_size: int) -> int:
    """Return the number of rows of a micro-batch: one for each example or completion, two for each pair of answers."""
    return micro_batch_size * (2 if post.objective in ("dpo", "reward") else 1)


def _drawing(config: RunConfig, configs: PostConfigs, plan: RunPlan, policy: StepSimulator) -> Counter[Memory]:
    """Estimate the memory of sampling completions, in addition to the memory that exists in all phases.

    Returns:
        bytes by kind of memory: the gathered policy with its buffers, and the keys and values of one batch of
        completions.
    """
    post, model, itemsize = configs.training, config.model, config.precision.param_dtype.itemsize
    count = post.rollouts_at_once or plan.batches.global_batch_size * post.slices // plan.layout.data
    per_token = 2 * model.layers * (model.query_groups // plan.layout.tp) * model.head_size * itemsize
    shards = plan.layout.axis_size("shard")
    whole = [unit.size * unit.axis.size * itemsize for unit in policy.units]
    copied = [2 * size + unit.gather_buffer for size, unit in zip(whole, policy.units, strict=True)]
    return Counter(
        {
            Memory.GATHERED: sum(whole),
            # `copied` counts two buffers of a unit's size, because the gathers of two units overlap
            Memory.BUFFERS: max(copied) if shards > 1 else 0,
            Memory.UNPACKED: policy.unpacked_bytes,
            Memory.KEYS_AND_VALUES: count * configs.form.max_length * per_token,
        }
    )


def _streamed_bytes(config: RunConfig, configs: PostConfigs, plan: RunPlan, rank: int, on_cpu: bool) -> int:
    """Return the bytes of a streamed frozen model in the memory of the device, which for a CPU is host memory."""
    weights = configs.weights
    tp = SimulatedAxis(plan.layout, "tp", rank=rank, counter=TrafficCounter(), cost=lambda collective, sent_bytes: None)
    assert config.tokenizer.vocab_size is not None
    with torch.device("meta"):
        model = GPTModel(config.model, LayerSettings(tp=tp), vocab_size=config.tokenizer.vocab_size)
    stored = at_rest(weights.weight_bits, config.precision.param_dtype)
    stream = plan_stream(model, list(model.layers), plan.layout.axis_size("local"), *stored)
    fetched = weights.weights_device == "disk" or (weights.weights_device == "host" and not on_cpu)
    return stream.device_bytes(weights.prefetch_layers, fetched=fetched)
