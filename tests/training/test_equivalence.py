"""Every way of spreading the work gives the losses and gradient norms of one plain process.

Tolerance 1e-5 relative: fp32 sums in another order over 5 steps of AdamW at a high rate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import pairwise, slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, FixedBatches, build_step, train_on_ranks, train_plain

from megazpp.model.config import GPTConfig
from megazpp.training.objective import Evaluator
from megazpp.zero.config import PrecisionConfig

STYLES = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE}


@functools.cache
def plain(
    model: GPTConfig, *, documents: bool = False, learning_rate: float = 1e-2, steps: int = 5
) -> dict[str, list[float]]:
    return train_plain(Case(model=model, documents=documents, learning_rate=learning_rate, steps=steps))


def assert_equal_to_plain(case: Case, world_size: int, *, rtol: float = 1e-5) -> None:
    plain_model = dataclasses.replace(
        case.model, recompute_granularity=None, recompute_method=None, recompute_num_layers=None
    )
    expected = plain(plain_model, documents=case.documents, steps=case.steps)
    results: list[dict[str, Any]] = ranks(world_size).run(train_on_ranks, case)
    for result in results:
        assert result["skipped"] == 0
        assert result["loss"] == pytest.approx(expected["loss"], rel=rtol)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=rtol)
    assert expected["loss"][-1] < 0.9 * expected["loss"][0]  # it did learn, so equality says something


# every layout and number of micro-batches; the style alternates so that all pairs of two settings are there
GRID = [
    (tp, stage, sequence_parallel, micro_batches, [*STYLES][(stage + tp // 2 + sequence_parallel + micro_batches) % 2])
    for tp, stage, sequence_parallel, micro_batches in itertools.product((1, 2, 4), (0, 1, 2, 3), (False, True), (1, 4))
    if tp > 1 or not sequence_parallel
]


def test_the_grid_has_each_style_in_every_pair_of_settings():
    *settings, styles = zip(*GRID, strict=True)
    for first, second in itertools.combinations(settings, 2):
        assert all(
            (a, b, style) in zip(first, second, styles, strict=True)
            for a, b in set(zip(first, second, strict=True))
            for style in STYLES
        )


@pytest.mark.parametrize(("tp", "stage", "sequence_parallel", "micro_batches", "style"), pairwise(GRID))
def test_tp_zero_sequence_parallel_and_micro_batches_equal_one_process(
    tp: int, stage: int, sequence_parallel: bool, micro_batches: int, style: str
):
    spread = {"tp": tp, "stage": stage, "sequence_parallel": sequence_parallel, "micro_batches": micro_batches}
    assert_equal_to_plain(Case(model=STYLES[style], **spread), world_size=4)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_program_on_one_rank_equals_the_plain_process(style: str, stage: int):
    assert_equal_to_plain(Case(model=STYLES[style], stage=stage, micro_batches=2), world_size=1)


@pytest.mark.parametrize(("tp", "sequence_parallel", "stage"), [slow(2, False, 3), (2, True, 1), slow(4, True, 3)])
def test_norms_of_heads_that_ranks_share_out_equal_one_process(tp: int, sequence_parallel: bool, stage: int):
    model = dataclasses.replace(LLAMA_STYLE, qk_layernorm=True, add_qkv_bias=True, use_rope_scaling=True)
    case = Case(model=model, tp=tp, sequence_parallel=sequence_parallel, stage=stage, micro_batches=2)
    assert_equal_to_plain(case, world_size=4)


RECOMPUTE: dict[str, dict[str, Any]] = {
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full"},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


@pytest.mark.parametrize(("tp", "stage", "sequence_parallel", "kind", "style"), [
    slow(1, 3, False, "selective", "gpt2"),
    slow(1, 3, False, "full", "llama"),
    slow(1, 3, False, "block", "gpt2"),
    (2, 3, True, "selective", "llama"),
    slow(2, 3, True, "full", "gpt2"),
    slow(2, 3, True, "block", "llama"),
    slow(2, 1, False, "selective", "gpt2"),
    slow(2, 1, False, "full", "llama"),
    (2, 1, False, "block", "gpt2"),
])  # fmt: skip
def test_recomputation_changes_nothing(tp: int, stage: int, sequence_parallel: bool, kind: str, style: str):
    model = dataclasses.replace(STYLES[style], **RECOMPUTE[kind])
    case = Case(model=model, tp=tp, stage=stage, sequence_parallel=sequence_parallel, micro_batches=2)
    assert_equal_to_plain(case, world_size=4)


@pytest.mark.parametrize(("style", "tp", "stage", "sequence_parallel", "kind"), [
    ("gpt2", 1, 3, False, None),
    ("llama", 2, 2, True, None),
    slow("gpt2", 4, 3, True, "full"),
    slow("llama", 2, 0, False, "selective"),
    slow("llama", 1, 3, False, None),
    slow("gpt2", 2, 2, True, None),
    slow("llama", 4, 3, True, "full"),
    slow("gpt2", 2, 0, False, "selective"),
])  # fmt: skip
def test_document_masks_and_masked_losses_equal_one_process(
    style: str, tp: int, stage: int, sequence_parallel: bool, kind: str | None
):
    """The number of tokens that count differs between ranks and micro-batches, the mean does not."""
    model = dataclasses.replace(STYLES[style], **RECOMPUTE.get(kind or "", {}))
    case = Case(model=model, tp=tp, stage=stage, sequence_parallel=sequence_parallel, micro_batches=2, documents=True)
    assert_equal_to_plain(case, world_size=4)


@pytest.mark.parametrize(
    ("stage", "tp", "nodes", "replicas"), [slow(1, 1, 2, 2), slow(2, 2, 2, 2), (3, 1, 2, 2), slow(3, 2, 4, 2)]
)
def test_replication_over_nodes_equals_one_process(stage: int, tp: int, nodes: int, replicas: int):
    world = 8 if nodes == 4 else 4
    case = Case(stage=stage, tp=tp, nodes=nodes, replicas=replicas, micro_batches=2)
    assert_equal_to_plain(case, world_size=world)


@pytest.mark.parametrize(("world_size", "tp", "stage"), [(2, 1, 3), slow(2, 2, 1), slow(8, 4, 3), slow(8, 2, 2)])
def test_other_world_sizes_equal_one_process(world_size: int, tp: int, stage: int):
    assert_equal_to_plain(Case(model=LLAMA_STYLE, tp=tp, stage=stage), world_size=world_size)


@pytest.mark.parametrize(("tp", "stage", "sequence_parallel", "reduce_in_bf16", "style"), [
    (1, 3, False, False, "gpt2"),
    slow(1, 3, False, True, "llama"),
    slow(2, 3, True, False, "llama"),
    (2, 3, True, True, "gpt2"),
    slow(4, 1, False, False, "gpt2"),
    slow(4, 1, False, True, "llama"),
    slow(1, 0, False, False, "llama"),
    slow(1, 0, False, True, "gpt2"),
])  # fmt: skip
def test_bf16_stays_within_its_rounding_of_fp32(
    tp: int, stage: int, sequence_parallel: bool, reduce_in_bf16: bool, style: str
):
    """bf16 keeps 8 bits: losses within 0.2 %, norms within 5 % of the fp32 run.

    At a low learning rate: where a gradient is nearly zero, AdamW makes a full step of its rounding noise.
    """
    precision = PrecisionConfig(bf16=True, grad_reduce_in_bf16=reduce_in_bf16)
    spread = {"tp": tp, "stage": stage, "sequence_parallel": sequence_parallel, "micro_batches": 2}
    case = Case(model=STYLES[style], **spread, precision=precision, learning_rate=1e-3)
    expected = plain(case.model, learning_rate=1e-3)
    for result in ranks(4).run(train_on_ranks, case):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-3)
        assert result["loss"] != pytest.approx(expected["loss"], rel=1e-6)  # bf16 was in use
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2)


@pytest.mark.slow
def test_fp16_with_a_dynamic_loss_scale_stays_within_its_rounding_of_fp32():
    case = Case(stage=3, tp=2, micro_batches=2, precision=PrecisionConfig(fp16=True))
    expected = plain(case.model)
    for result in ranks(4).run(train_on_ranks, case):
        assert result["skipped"] == 0
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)


@pytest.mark.parametrize(("tp", "stage"), [(1, 0), slow(1, 1), slow(1, 3), (2, 3)])
def test_a_nan_on_one_rank_is_seen_by_all_and_changes_no_weight(tp: int, stage: int):
    for result in ranks(4).run(step_with_a_nan_on_the_last_rank, Case(tp=tp, stage=stage)):
        assert result == {"norm_is_finite": False, "skipped": True, "changed": [], "learned_afterwards": True}


def step_with_a_nan_on_the_last_rank(case: Case) -> dict[str, Any]:
    step, dims = build_step(case)
    batch = case.batch(0, dims.data_rank, 1)
    if dims.world.rank == dims.world.size - 1:
        poison = step.model.final_norm.register_forward_hook(lambda module, inputs, output: output * float("nan"))

    def weights() -> dict[str, torch.Tensor]:
        return {name: p.detach().to_local().clone() for name, p in step.model.named_parameters()}

    before = weights()
    result = step([batch], learning_rate=case.learning_rate, weight_decay=0.1)
    after = weights()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    if dims.world.rank == dims.world.size - 1:
        poison.remove()
    step([batch], learning_rate=case.learning_rate, weight_decay=0.1)
    learned = any(not torch.equal(after[name], p) for name, p in weights().items() if p.numel())
    return {
        "norm_is_finite": math.isfinite(result.grad_norm),
        "skipped": result.skipped,
        "changed": changed,
        "learned_afterwards": learned,
    }


@pytest.mark.parametrize(("tp", "stage"), [(1, 0), slow(1, 1), slow(1, 2), (2, 3)])
def test_an_evaluation_in_the_middle_of_training_changes_nothing(tp: int, stage: int):
    case = Case(tp=tp, stage=stage, micro_batches=2)
    expected = plain(case.model)
    for result in ranks(4).run(train_with_evaluations, case):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        # the evaluation after step i is on step i + 1's samples, so it sees the loss that step will report
        assert result["evaluated"][:-1] == pytest.approx(expected["loss"][1:], rel=1e-5)


def train_with_evaluations(case: Case) -> dict[str, Any]:
    step, dims = build_step(case)
    losses, evaluated = [], []
    for index in range(case.steps):
        losses.append(step(case.batches(index, dims), learning_rate=case.learning_rate, weight_decay=0.01).loss)
        ahead = FixedBatches(case.batches(index + 1, dims))
        evaluator = Evaluator(step.model, step.sharding, ahead, dims, iterations=1, batch_size=1)
        evaluated.append(evaluator())
    return {"loss": losses, "evaluated": evaluated}


def evaluate_twice(case: Case) -> tuple[float, float, bool, bool]:
    """Two evaluations of the same batch, then whether the model trains on and holds shards alone."""
    step, dims = build_step(case)
    loader = FixedBatches(case.batches(0, dims))
    evaluator = Evaluator(step.model, step.sharding, loader, dims, iterations=1, batch_size=1)
    losses = evaluator(), evaluator()
    return *losses, step.model.training, all(unit.is_sharded for unit in step.sharding.units)


def test_an_evaluation_drops_nothing_out_and_leaves_shards():
    """With stage 2, where gathered weights stay until they are freed."""
    model = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.2, attention_dropout=0.2)
    for first, second, trains, sharded in ranks(2).run(evaluate_twice, Case(model=model, stage=2)):
        assert first == second
        assert trains
        assert sharded


@pytest.mark.parametrize(("micro_batches", "stage", "gathers", "reduces"), [
    (1, 3, 2, 1),  # a gather for forward and one for backward
    slow(4, 3, 8, 4),
    (4, 2, 1, 4),
    slow(4, 1, 1, 1),
])  # fmt: skip
def test_each_stage_moves_the_bytes_that_its_table_says(micro_batches: int, stage: int, gathers: int, reduces: int):
    """2 nodes x 2 ranks, fp32: the two ranks at a node's edge send over the cross wire, a ring each."""
    case = Case(stage=stage, micro_batches=micro_batches, nodes=2, steps=1)
    results = ranks(4).run(train_on_ranks, case)
    sent = [result["sent"] for result in results]
    shard_elements = results[0]["shard_elements"]
    ring = 3 * shard_elements * 4  # each rank passes on 3 shards of 4 bytes per element
    norm = 2 * 8 * 3 // 4  # and 3 scalars in fp64 are summed over the ranks: tokens, loss, norm
    expected = ring * (gathers + reduces) + 3 * norm
    assert [s["cross"] for s in sent] == [0, expected, 0, expected]
    assert [s["local"] for s in sent] == [expected, 0, expected, 0]
    assert [s["tp"] for s in sent] == [0, 0, 0, 0]
