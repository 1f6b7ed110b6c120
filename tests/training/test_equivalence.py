"""Test that every parallel layout gives the losses and gradient norms of one plain process.

The relative tolerance is 5e-6, because layouts add fp32 numbers in different orders. The differences grow over three
steps of AdamW at a high learning rate.
"""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from helpers.faults import launch, poison_output, state
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from helpers.training import (
    BIASED_STYLE,
    GPT2_STYLE,
    LLAMA_STYLE,
    Case,
    FixedBatches,
    build_on_ranks,
    build_step,
    dims_on_ranks,
    train_on_ranks,
    train_plain,
)

from megazpp.diloco.config import DilocoConfig
from megazpp.model.attention import heads_for_tokens, tokens_for_heads
from megazpp.model.config import GPTConfig
from megazpp.optim.config import LossScaleConfig, OptimizerConfig
from megazpp.optim.optimizer import LossScaler
from megazpp.training.metrics import StepRecord
from megazpp.training.objective import Evaluator
from megazpp.zero.config import PrecisionConfig, ZeroConfig

STEPS = 3


def llama(**fields: Any) -> GPTConfig:
    return dataclasses.replace(LLAMA_STYLE, **fields)


STYLES = (GPT2_STYLE, LLAMA_STYLE, llama(qk_layernorm=True, use_rope_scaling=True))
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full"},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
# layouts of four ranks: (tp size, cp size, whether sequence parallelism is on); the rest is data parallelism
SPREADS = [
    *((1, 1, False), (2, 1, False), (2, 1, True), (4, 1, False), (4, 1, True)),
    *((1, 2, False), (1, 4, False), (2, 2, False), (2, 2, True)),
]
GRID = {  # combines each layout of SPREADS with each way of recomputing activations
    f"tp {tp}, cp {cp}{', sequence' * sequence_parallel}, {recomputed} recomputed": Case(
        model=dataclasses.replace(STYLES[(i + 2 * j) % 3], **RECOMPUTED[recomputed]),
        tp=tp,
        cp=cp,
        sequence_parallel=sequence_parallel,
        stage=(i + j) % 4,
        micro_batches=1 + (i + j // 2) % 2,
        documents=(i // 2 + j) % 2 == 1,
    )
    for i, (tp, cp, sequence_parallel) in enumerate(SPREADS)
    for j, recomputed in enumerate(RECOMPUTED)
}
# One case for each layout of SPREADS, with the ways of recomputing activations in turn. The slow tier runs three of
# them: tensor parallelism over four ranks, context parallelism over four ranks, and both over two ranks each.
EVERY_SPREAD = [[*GRID][4 * i + (3 * i + i // 2) % 4] for i in range(len(SPREADS))]


@functools.cache
def plain(model: GPTConfig, *, documents: bool, learning_rate: float = 1e-2) -> dict[str, list[float]]:
    return train_plain(Case(model=model, documents=documents, learning_rate=learning_rate, steps=STEPS))


def assert_equal_to_plain(world_size: int, case: Case) -> None:
    recomputed = dict.fromkeys(field.name for field in dataclasses.fields(GPTConfig) if "recompute" in field.name)
    expected = plain(dataclasses.replace(case.model, **recomputed), documents=case.documents)
    for result in ranks(world_size).run(train_on_ranks, dataclasses.replace(case, steps=STEPS)):
        assert result["skipped"] == 0
        assert result["loss"] == pytest.approx(expected["loss"], rel=5e-6)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-6)
    # the loss falls by 3 % or more, so equal losses show equal training and not unchanged weights
    assert expected["loss"][-1] < 0.97 * expected["loss"][0]


@pytest.mark.parametrize("case", chosen(GRID, EVERY_SPREAD[2], slow=[EVERY_SPREAD[i] for i in (4, 6, 8)]))
def test_losses_and_norms_equal_one_process(case):
    """If attention stays inside documents, the number of tokens with a loss differs between ranks and micro-batches.

    The loss must still be the mean over all such tokens of the global batch.
    """
    assert_equal_to_plain(4, case)


ZEROPP_16 = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
BIASES = llama(qk_layernorm=True, add_qkv_bias=True)
CORE = llama(recompute_granularity="selective", recompute_modules=("core_attn",))
OLMO = llama(norm_after_block=True, qk_layernorm_all_heads=True, logits_scaling=0.5)
LAYERED = llama(window_size="4,0", window_attn_skip_freq="2", no_rope_freq="[0,1]", rope_type="yarn")
LAYERED = dataclasses.replace(LAYERED, rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=8)
FACTORS = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 1.5}
FACTORED = dataclasses.replace(GPT2_STYLE, **FACTORS)
BESIDE = {
    "one rank, whole copies": (1, Case(stage=0, micro_batches=2)),
    "2 ranks": (2, Case(model=LLAMA_STYLE)),
    "8 ranks, tp": (8, Case(model=LLAMA_STYLE, tp=4, stage=2)),
    "biases of heads that ranks share": (4, Case(model=BIASES, tp=4, sequence_parallel=True)),
    "a copy on every node": (4, Case(nodes=2, replicas=2, micro_batches=2)),
    "a copy on two nodes each, tp": (8, Case(nodes=4, replicas=2, micro_batches=2, tp=2)),
    "cp, zeropp in 16 bits": (4, Case(cp=2, nodes=2, zero=ZEROPP_16, micro_batches=2, documents=True)),
    "cp across nodes": (4, Case(model=LLAMA_STYLE, cp=4, nodes=2)),
    "cp across copies of a node": (4, Case(cp=4, replicas=2)),
    "cp, 2 groups for 4 ranks": (4, Case(model=llama(num_query_groups=2), cp=4, documents=True)),
    "cp, 3 groups for 2 ranks": (4, Case(model=llama(num_attention_heads=6, num_query_groups=3), cp=2, stage=2)),
    "cp, attention recomputed": (4, Case(model=CORE, cp=2, tp=2)),
    "norms after blocks and of all heads": (2, Case(model=OLMO, tp=2, sequence_parallel=True)),
    "windows and positions by layers": (2, Case(model=LAYERED, tp=2, documents=True)),
    "cp, windows and positions by layers": (2, Case(model=LAYERED, cp=2)),
    "factors": (2, Case(model=FACTORED, tp=2, sequence_parallel=True)),
    "cp, 8 ranks": (8, Case(model=LLAMA_STYLE, cp=4, tp=2, sequence_parallel=True)),
}


@pytest.mark.parametrize(
    "beside",
    chosen(
        BESIDE,
        "cp, zeropp in 16 bits",
        "norms after blocks and of all heads",
        "cp, windows and positions by layers",
        slow=("2 ranks", "a copy on every node", "cp, 2 groups for 4 ranks", "factors"),
    ),
)
def test_losses_and_gradients_equal_one_process_with_other_settings(beside):
    assert_equal_to_plain(*beside)


BF16, ALL_BF16 = PrecisionConfig(bf16=True), PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)
HALF = {
    "bf16, whole copies": Case(model=LLAMA_STYLE, stage=0, precision=ALL_BF16),
    "bf16, tp": Case(model=LLAMA_STYLE, stage=1, tp=4, precision=BF16),
    "bf16, tp and shards": Case(tp=2, sequence_parallel=True, precision=ALL_BF16),
    "fp16, dynamic loss scale": Case(tp=2, precision=PrecisionConfig(fp16=True)),
}


@pytest.mark.parametrize("case", chosen(HALF, slow=("bf16, tp and shards", "fp16, dynamic loss scale")))
def test_half_precision_stays_within_its_rounding_of_fp32(case):
    """With bf16's 8 significant bits, losses are within 0.2 % and norms within 5 % of the fp32 run.

    fp16 has 11 bits, so its tolerances are an eighth. The learning rate is low, because AdamW turns the rounding noise
    of gradients near zero into full-sized updates.
    """
    case = dataclasses.replace(case, micro_batches=2, learning_rate=1e-3, steps=STEPS)
    expected, times = plain(case.model, documents=False, learning_rate=1e-3), 1 / 8 if case.precision.fp16 else 1
    for result in ranks(4).run(train_on_ranks, case):
        assert result["skipped"] == 0
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-3 * times)
        # the losses differ from fp32's, which shows that the run computed in bf16 or fp16
        assert result["loss"] != pytest.approx(expected["loss"], rel=1e-6 * times)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2 * times)


def train_by_sgd(loss_scale: float) -> list[StepRecord]:
    """Train with SGD and a loss scale, and return the records of all steps.

    AdamW and Muon would hide a wrong scale, because their updates do not depend on a constant factor of the gradients.
    """
    case = Case(optimizer=OptimizerConfig(optimizer="sgd"))
    step, dims = build_step(case)
    step.scaler = LossScaler(LossScaleConfig(loss_scale=loss_scale), fp16=False)
    records = [step(case.batches(index, dims), learning_rate=0.1, weight_decay=0.01) for index in range(STEPS)]
    return [dataclasses.replace(record, loss_scale=1.0) for record in records]


def test_loss_scale_that_is_a_power_of_two_changes_no_bit():
    assert ranks(1).run(train_by_sgd, 4096.0) == ranks(1).run(train_by_sgd, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case(model=LLAMA_STYLE, nodes=2, precision=BF16, learning_rate=1e-3),
    Case(nodes=2, diloco=DilocoConfig(diloco_steps=2)),
    Case(model=LLAMA_STYLE, nodes=2, optimizer=OptimizerConfig(optimizer="muon"), learning_rate=1e-3),
], ids=["bf16", "replica groups", "muon"])  # fmt: skip
def test_context_parallelism_equals_the_same_ranks_without_it(case):
    """Test context parallelism with bf16, with DiLoCo and with Muon against four data-parallel ranks.

    bf16 losses agree up to rounding. DiLoCo's replica groups get the same samples as without context parallelism.
    """
    expected, found = (ranks(4).run(train_on_ranks, dataclasses.replace(case, cp=cp, steps=STEPS)) for cp in (1, 2))
    rounding = 2e-3 if case.precision.bf16 else 1e-6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=rounding)


def exchange(heads: int, groups: int) -> None:
    """Check context parallelism's exchange: all tokens of some heads for some tokens of all heads, and back.

    A cheap function of queries, keys and values stands for attention. It mixes tokens, so a token at a wrong position
    would change outputs and gradients.
    """
    dims, seq, batch, channels = dims_on_ranks(Case(cp=4)), 20, 3, 5
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    whole = [draw(seq, batch, count, channels).requires_grad_() for count in (heads, groups, groups)]
    mine = [x.detach().chunk(4)[dims.cp.rank].clone().requires_grad_() for x in whole]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return (q.cumsum(0) * k + v.cumsum(0)).flatten(2)

    expected, gradient = attend(*whole), draw(seq, batch, heads * channels)
    expected.backward(gradient)
    found = tokens_for_heads(attend(*heads_for_tokens(*mine, dims.cp)), dims.cp)
    # number of key-value groups that one rank of context parallelism needs per token; an all-gather would send all
    # groups to every rank
    keys = groups // math.gcd(groups, 4)
    sent = 3 * seq // 4 * 4 * batch * channels * (2 * heads // 4 + 2 * keys)
    assert dims.counter.sent_on_axis("cp") == sent
    found.backward(gradient.chunk(4)[dims.cp.rank])
    assert dims.counter.sent_on_axis("cp") == 2 * sent
    for ours, theirs in zip((found, *(x.grad for x in mine)), (expected, *(x.grad for x in whole)), strict=True):
        torch.testing.assert_close(ours, theirs.chunk(4)[dims.cp.rank], rtol=0, atol=1e-5)


def test_head_exchange_covers_all_tokens_and_sends_the_fewest_keys():
    for heads, groups in ((4, 4), (8, 4), (8, 2), (12, 6), (12, 3), (4, 1)):
        ranks(4).run(exchange, heads, groups)


def dropped(case: Case) -> tuple[bool, ...]:
    """Apply a dropout layer to 64 ones on this rank, and return True for each element that it keeps."""
    model, *_ = build_on_ranks(case)
    return tuple(model.layers[0].dropout(torch.ones(64)).bool().tolist())


def test_dropout_differs_between_data_ranks_and_matches_on_tp_ranks():
    for tp in (1, 2):
        case = Case(model=dataclasses.replace(GPT2_STYLE, hidden_dropout=0.5), cp=2, tp=tp)
        assert len({*ranks(4).run(dropped, case)}) == 4 // tp


def three_steps_with_a_nan_in_the_second(case: Case) -> None:
    """Train three steps without a guard, with a NaN on rank 3 in the second step.

    Check that all ranks skip the second update, and that the first and third steps change weights.
    """
    step, dims = build_step(case)
    if dims.world.rank == 3:
        poison_output(step.model.final_norm, when=2)
    for index, taken in enumerate((True, False, True)):
        before, record = state(step), launch(step, case, index).wait()
        assert (record.skipped, math.isfinite(record.grad_norm)) == (not taken, taken)
        assert (state(step) != before) == taken


@pytest.mark.parametrize("case", [slow(Case(stage=0)), Case(tp=2), slow(Case(model=BIASED_STYLE))])
def test_nan_on_one_rank_skips_the_update_on_all_ranks(case):
    ranks(4).run(three_steps_with_a_nan_in_the_second, case)


def train_with_evaluations(case: Case) -> dict[str, Any]:
    """Train, and evaluate the samples of the next step twice after each step.

    Return the training losses and the evaluated losses.
    Also check that both evaluations agree, and that all weights are sharded again after an evaluation.
    """
    step, dims = build_step(case)
    losses, evaluated = [], []
    for index in range(STEPS):
        losses.append(launch(step, case, index).wait().loss)
        ahead = FixedBatches(case.batches(index + 1, dims))
        evaluator = Evaluator(step.model, step.sharding, ahead, dims, iterations=1, batch_size=1)
        evaluated.append(evaluator())
        assert evaluator() == evaluated[-1]  # two evaluations agree, because evaluation turns dropout off
        assert step.model.training
        assert all(unit.is_sharded for unit in step.sharding.units)
    return {"loss": losses, "evaluated": evaluated}


@pytest.mark.slow
def test_evaluation_during_training_changes_nothing():
    expected = plain(GPT2_STYLE, documents=False)["loss"]
    for result in ranks(4).run(train_with_evaluations, Case(tp=2, micro_batches=2)):
        assert result["loss"] == pytest.approx(expected, rel=5e-6)
        assert result["evaluated"][:-1] == pytest.approx(expected[1:], rel=5e-6)


def test_evaluation_drops_nothing_out_and_leaves_only_shards():
    """ZeRO stage 2 keeps gathered weights until something frees them, so the evaluation itself has to free them."""
    model = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.2, attention_dropout=0.2)
    ranks(2).run(train_with_evaluations, Case(model=model, stage=2))


def test_each_zero_stage_sends_the_documented_bytes():
    """Count the bytes per rank on 2 nodes with 2 ranks each, in fp32.

    In a ring over all four ranks, the last rank of each node sends to the other node. The first rank sends to its
    neighbor in the same node.
    """
    for stage, micro_batches, gathers, reduces in (
        # ZeRO-3 gathers weights twice per micro-batch, for forward and backward, and reduces gradients once
        (3, 2, 4, 2),
        (2, 2, 1, 2),
        (1, 2, 1, 1),
    ):
        results = ranks(4).run(train_on_ranks, Case(stage=stage, micro_batches=micro_batches, nodes=2, steps=1))
        # bytes that a rank sends in one ring of 4 ranks: 3 shards with 4 bytes per element
        ring = 3 * results[0]["shard_elements"] * 4
        # bytes that a ring all-reduce of one fp64 scalar sends per rank; a step reduces three: tokens, loss, norm
        norm = 2 * 8 * 3 // 4
        expected = ring * (gathers + reduces) + 3 * norm
        row = (stage, micro_batches)
        assert [result["sent"]["cross"] for result in results] == [0, expected, 0, expected], row
        assert [result["sent"]["local"] for result in results] == [expected, 0, expected, 0], row
        assert [result["sent"]["tp"] for result in results] == [0, 0, 0, 0], row
