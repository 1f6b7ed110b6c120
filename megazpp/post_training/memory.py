"""Memory of all models of a post-training on one rank, on paper (planner/step.py): what each phase has at its fullest.

    drawing    (grpo, ppo) the policy gathered as a whole, and keys and values; without a prompt's own activations
    asking     a forward of the reference or reward model, without a backward
    training   forward, backward and update of the policy, or of its adapters on a frozen base

The policy's shards, moments and kept weights, and the frozen models, are there in all of them; of models that stream
(--weights-on host or disk) what the device has of them. Of a policy's scalar head (reward, ppo) its shards are counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from megazpp.base.arguments import RunConfig
from megazpp.base.checks import RunPlan
from megazpp.base.program import aligned
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import TrafficCounter
from megazpp.planner.estimate import paper_step
from megazpp.planner.paper import PaperAxis
from megazpp.planner.report import memory_rows
from megazpp.planner.simulation import Memory
from megazpp.planner.step import MASTER_BYTES, PaperStep, measure
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.lora import LoraConfig, add_adapters
from megazpp.post_training.start import PostConfigs
from megazpp.stored.load import WeightsConfig
from megazpp.stored.streamed import plan_stream

STANDING = (Memory.PARAMETERS, Memory.MOMENTS, Memory.SECONDARY, Memory.FEEDBACK, Memory.FROZEN)


class ModelsMemory(NamedTuple):
    """Bytes of one rank by kind, at the fullest moment of each phase that there is."""

    phases: dict[str, Counter[Memory]]

    def total(self, *phases: str) -> int:
        """The bytes of the fullest of these phases, or of all."""
        return max(kinds.total() for name, kinds in self.phases.items() if not phases or name in phases)

    def describe(self) -> Iterator[str]:
        """A table."""
        yield from aligned(memory_rows("GB of a rank at the fullest moment of", self.phases))


def plan_models(
    config: RunConfig, configs: PostConfigs, plan: RunPlan, *, rank: int = 0, on_cpu: bool = False
) -> ModelsMemory:
    """Plan what `rank` will need.

    Args:
        config: with sequence length and size of the vocabulary.
        on_cpu: whether the process itself computes.
    Raises:
        ValueError: --lora-target-modules names no layers of the model.
    """
    post, lora, weights = configs.training, configs.lora, configs.weights
    make = functools.partial(
        paper_step,
        config,
        plan,
        device_type="cpu",
        rank=rank,
        on_cpu=on_cpu,
        micro_batch_size=rows_of(post, plan.batches.micro_batch_size),
        documents=None,
        islands=None,
    )
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    values = config.model.hidden if post.objective in ("reward", "ppo") else 0
    prepare, bits = _prepared(config, lora), lora.base_weight_bits
    policy = make(with_entropy=post.draws, prepare=prepare, frozen_bits=bits)
    measure(policy, plan.batches.num_micro_batches_at(plan.batches.rampup_samples))
    training = policy.ledger.peak.copy()
    training += Counter({Memory.PARAMETERS: MASTER_BYTES * values, Memory.MOMENTS: moments * MASTER_BYTES * values})
    standing = Counter({kind: training[kind] for kind in STANDING})

    asked = make(prepare=_freeze)
    asked.run_forward()
    kept = asked.ledger.peak[Memory.FROZEN]
    if weights.packs:
        kept = _streamed_bytes(config, weights, plan, rank=rank, on_cpu=on_cpu)
    beside: Counter[Memory] = Counter()
    if post.reward_load is not None:
        beside[Memory.REWARD] = kept
    reference: Counter[Memory] = Counter()
    if post.needs_reference and lora.lora_r is None:
        reference[Memory.REFERENCE] = standing[Memory.PARAMETERS] if post.sync_ref_model else kept
    phases = {}
    if post.needs_reference or post.reward_load is not None:
        comes = asked.ledger.peak
        once = {Memory.ACTIVATIONS: comes[Memory.ACTIVATIONS]}
        if not weights.packs:
            once[Memory.UNPACKED] = comes[Memory.UNPACKED]
        if lora.lora_r is not None and post.needs_reference:  # the reference is the base
            base = make(prepare=_freeze, frozen_bits=bits)
            base.run_forward()
            once[Memory.UNPACKED] = max(once.get(Memory.UNPACKED, 0), base.ledger.peak[Memory.UNPACKED])
        if not post.draws:  # it is asked between micro-batches
            once |= {kind: training[kind] for kind in (Memory.GRADIENTS, Memory.PARTIAL_SUMS)}
        phases["asking"] = standing + beside + reference + Counter(once)
    if not post.precompute_ref_log_probs:  # else it is gone by now
        beside += reference
    if post.draws:
        phases["drawing"] = standing + beside + _drawing(config, configs, plan, policy)
    return ModelsMemory(phases | {"training": training + beside})


def rows_of(post: PostTrainingConfig, micro_batch_size: int) -> int:
    """Rows of a micro-batch: a pair has two."""
    return micro_batch_size * (2 if post.objective in ("dpo", "reward") else 1)


def _drawing(config: RunConfig, configs: PostConfigs, plan: RunPlan, policy: PaperStep) -> Counter[Memory]:
    """All of the policy gathered, and keys and values of what a data rank draws at once."""
    post, model, itemsize = configs.training, config.model, config.precision.param_dtype.itemsize
    ranks, size = plan.layout.data, plan.batches.global_batch_size
    count = post.rollouts_at_once or size * post.slices // ranks
    per_token = 2 * model.layers * (model.query_groups // plan.layout.tp) * model.head_size * itemsize
    shard = plan.layout.axis_size("shard")
    whole = [unit.size * shard * itemsize for unit in policy.units]
    copied = [2 * size + unit.gather_buffer for size, unit in zip(whole, policy.units, strict=True)]
    return Counter(
        {
            Memory.GATHERED: sum(whole),
            Memory.BUFFERS: max(copied) if shard > 1 else 0,  # of a gather, and of the one before it
            Memory.UNPACKED: policy.unpacked_bytes,
            Memory.KEYS_AND_VALUES: count * configs.form.max_length * per_token,
        }
    )


def _streamed_bytes(config: RunConfig, weights: WeightsConfig, plan: RunPlan, *, rank: int, on_cpu: bool) -> int:
    """The bytes that a model that streams has on the device; a CPU's memory is the host's."""
    tp = PaperAxis(plan.layout, "tp", rank=rank, counter=TrafficCounter(), cost=lambda collective, sent_bytes: None)
    assert config.tokenizer.vocab_size is not None
    with torch.device("meta"):
        model = GPTModel(config.model, vocab_size=config.tokenizer.vocab_size, tp=tp)
    stream = plan_stream(model, list(model.layers), plan.layout.axis_size("local"), *weights.at_rest(config.precision))
    fetched = weights.weights_on == "disk" or (weights.weights_on == "host" and not on_cpu)
    return stream.device_bytes(weights.prefetch_layers, fetched=fetched)


def _prepared(config: RunConfig, lora: LoraConfig) -> Callable[[GPTModel], None] | None:
    """Adapters on a frozen base, if there are some."""
    if lora.lora_r is None:
        return None
    settings = lora.settings(config.model)

    def prepare(model: GPTModel) -> None:
        _freeze(model)
        add_adapters(model, settings, None)

    return prepare


def _freeze(model: GPTModel) -> None:
    model.requires_grad_(False)
