"""Test objectives on several ranks.

Every layout gives the numbers of one process, which equal formulas on plain logits.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import nightly, slow
from helpers.training import LLAMA_STYLE
from post_training.policies import BATCH, MIXTURE, SEQ, PostCase, build, near, train

from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.data import PairBatch, RolloutBatch, shortened
from megazpp.post_training.objectives import (
    ObjectiveEvaluator,
    PolicyLoss,
    PreferenceLoss,
    StepSums,
    TokenHead,
    scores_of,
)
from megazpp.post_training.reference import FrozenModel

LLAMA = dataclasses.replace(LLAMA_STYLE, init_method_std=0.3, max_position_embeddings=32)


def grpo(**flags: Any) -> PostTrainingConfig:
    return PostTrainingConfig(objective="grpo", num_generations=4, **flags)


OBJECTIVES = {
    "reward": PostCase(post=PostTrainingConfig(objective="reward", center_rewards_coefficient=0.1)),
    "reward untied": PostCase(post=PostTrainingConfig(objective="reward"), model=LLAMA),
    "dpo": PostCase(post=PostTrainingConfig(objective="dpo", beta=0.3, loss_type=("sigmoid", "sft"))),
    "grpo": PostCase(post=grpo(loss_type=("grpo",), beta=0.1)),
    "dapo": PostCase(post=grpo(importance_sampling_level="sequence", beta=0.1), temperature=0.7, model=LLAMA),
    "cispo": PostCase(post=grpo(loss_type=("cispo",))),
    "dr_grpo": PostCase(post=grpo(loss_type=("dr_grpo",))),
    "ppo": PostCase(post=PostTrainingConfig(objective="ppo"), temperature=0.7),
    "reward of experts": PostCase(post=PostTrainingConfig(objective="reward"), model=MIXTURE),
    "dpo of experts": PostCase(post=PostTrainingConfig(objective="dpo"), model=MIXTURE),
    "grpo of experts": PostCase(post=grpo(), model=MIXTURE),
    "ppo of experts": PostCase(post=PostTrainingConfig(objective="ppo"), model=MIXTURE),
    "ppo untied": PostCase(post=PostTrainingConfig(objective="ppo"), model=LLAMA),
}


def synthetic_batch(case: PostCase, step: int, rows: list[int]) -> PairBatch | RolloutBatch:
    """Return the given rows of a random global batch, which depends only on the case and the step."""
    generator, count = torch.Generator().manual_seed(100 + step), BATCH if case.post.draws else 2 * BATCH
    tokens = torch.randint(0, 257, (count, SEQ + 1), generator=generator)
    starts, lengths = (torch.randint(1, 9, (count, 1), generator=generator) for _ in range(2))
    places = torch.arange(SEQ)
    mask, values_at = (((places >= starts) & (places < starts + n)).float() for n in (lengths, lengths + 1))
    if not case.post.draws:
        rows = [*rows, *(row + BATCH for row in rows)]
    positions = places.expand(len(rows), SEQ).contiguous()
    inputs = tokens[rows, :-1].contiguous(), tokens[rows, 1:].contiguous(), mask[rows], positions
    if not case.post.draws:
        return PairBatch(*inputs)
    old, reference, advantages, values, returns = torch.randn(5, count, SEQ, generator=generator)[:, rows]
    known = {"old_logps": old * 0.1 - 5.5, "ref_logps": reference * 0.1 - 5.5}
    if case.post.objective == "grpo":
        return RolloutBatch(*inputs, advantages=advantages[:, 0], **known)
    known |= {"values": values, "returns": returns, "value_mask": values_at[rows]}
    return RolloutBatch(*inputs, advantages=advantages, **known)


def train_all(names: list[str], **changed: Any) -> list[list[dict[str, float]]]:
    return [train_on_synthetic(dataclasses.replace(OBJECTIVES[name], **changed)) for name in names]


def train_on_synthetic(case: PostCase) -> list[dict[str, float]]:
    built, dims = build(case)
    if case.post.draws:
        objective: Any = PolicyLoss(case.post, dims, temperature=case.temperature)
    else:
        objective = PreferenceLoss(case.post, dims, FrozenModel(build(case, scalar_head=False)[0].model).logps)
    size, steps = case.micro_batch_size, []
    for index in range(case.steps):
        firsts = range(dims.data_rank * size, BATCH, dims.data_size * size)
        steps.append([synthetic_batch(case, index, [*range(first, first + size)]) for first in firsts])
    if case.shortens:
        steps = [[shortened(batch, dims.tp.size * dims.cp.size) for batch in batches] for batches in steps]
        assert all(batch.tokens.shape[1] < SEQ for batches in steps for batch in batches)
    return train(built, dims, objective, steps)


IN_NO_OTHER_LAYOUT = ["reward untied", "cispo", "dr_grpo", "ppo", "grpo of experts", "ppo of experts"]


@functools.cache
def in_one_process(objective: str) -> list[dict[str, float]]:
    return ranks(1).run(train_all, [objective], micro_batch_size=BATCH)[0][0]


@pytest.mark.parametrize(
    ("world", "layout", "objectives"),
    [
        (2, {"tp": 2}, ["grpo"]),
        nightly(2, {"tp": 2}, ["reward untied", "ppo"]),
        slow(2, {"micro_batch_size": 2}, ["dpo", "ppo"]),
        slow(2, {"cp": 2}, ["reward", "dapo", "dpo", "ppo untied"]),
        nightly(2, {"ep": 2, "micro_batch_size": 2}, ["reward of experts", "dpo of experts"]),
        nightly(2, {"tp": 2}, ["grpo of experts", "ppo of experts"]),
        slow(4, {"ep": 4, "tp": 2, "sequence_parallel": True}, ["reward of experts", "dpo of experts"]),
        slow(4, {"ep": 2, "cp": 2, "nodes": 2}, ["reward of experts", "dpo of experts"]),
        nightly(8, {"cp": 2, "tp": 2, "micro_batch_size": 2}, [*OBJECTIVES]),
        slow(2, {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2}, IN_NO_OTHER_LAYOUT),
    ],
)
def test_every_layout_gives_the_numbers_of_one_process(world, layout, objectives):
    spread = ranks(world).run(train_all, objectives, **layout)
    for objective, *found in zip(objectives, *spread, strict=True):
        expected = in_one_process(objective)
        first = expected[0]
        assert first["grad_norm"] > 1e-4
        if objective.startswith("ppo"):
            assert first["loss"] == pytest.approx(first["loss/policy_avg"] + 0.1 * first["loss/value_avg"], rel=1e-5)
        assert found == [near(expected, rel=2e-4, abs=2e-4)] * world


def test_dpo_begins_with_the_rewards_of_its_reference():
    """DPO's rewards measure the distance from the reference, so they are zero while the policy still equals it."""
    first = in_one_process("dpo")[0]
    assert first["logps/chosen"] < -1.0
    assert [first[f"rewards/{x}"] for x in ("chosen", "rejected", "margins")] == pytest.approx([0.0] * 3, abs=1e-5)


# one objective for each form of a batch: pairs, completions without values, and completions with values
SHORTENED = ["dpo of experts", "dr_grpo", "ppo"]


@pytest.mark.parametrize(
    ("layout", "objectives"),
    [
        slow({"micro_batch_size": 2}, SHORTENED),
        slow({"tp": 2, "sequence_parallel": True}, SHORTENED),
        slow({"cp": 2}, SHORTENED),
    ],
)
def test_shortened_rows_on_each_rank_change_no_loss(layout, objectives):
    whole, short = (ranks(2).run(train_all, objectives, shortens=each, **layout) for each in (False, True))
    assert whole == [[near(steps, rel=2e-6, abs=2e-6) for steps in of_rank] for of_rank in short]


@pytest.mark.slow
def test_router_losses_change_gradients_and_no_logged_loss():
    for name in ("reward of experts", "dpo of experts", "grpo of experts", "ppo of experts"):
        model = dataclasses.replace(MIXTURE, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0)
        (plain,) = ranks(1).run(train_all, [name], micro_batch_size=BATCH, model=model)
        first, without = in_one_process(name)[0], plain[0][0]
        assert first["loss"] == pytest.approx(without["loss"], rel=1e-6, abs=1e-6), name
        assert abs(first["grad_norm"] - without["grad_norm"]) > 1e-4 * without["grad_norm"], name


def compare_with_logits(case: PostCase) -> torch.Tensor:
    """Compare the losses, entropy and values of a token head with the same numbers from logits. Return the values."""
    (model, _), _ = build(case)
    batch = synthetic_batch(case, 0, [0, 1, 2])
    with torch.no_grad():
        own = model.eval()(batch.tokens, head=TokenHead(batch.labels, 0.7, with_entropy=True, with_values=True))
        logits = model.tp.all_gather(model(batch.tokens).flatten(0, 1).t().contiguous()).t()[:, :257]
        values = model(batch.tokens, head=TokenHead(None, with_values=True)).values
    choice = torch.distributions.Categorical(logits=logits.unflatten(0, batch.tokens.shape) / 0.7)
    expected = (-choice.log_prob(batch.labels), choice.entropy(), values)
    torch.testing.assert_close((own.losses, own.entropy, own.values), expected, atol=1e-5, rtol=0)
    return values


def test_losses_entropy_and_values_match_plain_logits():
    case = OBJECTIVES["ppo untied"]
    (expected,) = ranks(1).run(compare_with_logits, case)
    for values in ranks(2).run(compare_with_logits, dataclasses.replace(case, tp=2, sequence_parallel=True)):
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def mean_with_nothing() -> tuple[dict[str, float], float, list[str]]:
    """Compute means without any counted token, and evaluate two batches, of which only the second one has a metric.

    Returns:
        (metrics of a step with an empty mask, mean loss of the evaluation, lines that the evaluation logs).
    """
    _, dims = build(OBJECTIVES["dpo"])
    sums = StepSums(dims)
    sums.add("nothing", torch.ones(2, 3), torch.zeros(2, 3))
    sums.add("half", torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
    steps, lines = iter([{}, {"clip_ratio": 0.5}]), list[str]()
    objective: Any = SimpleNamespace(begin_step=lambda batches: None, metrics=lambda: next(steps))
    objective.loss = lambda model, batch: torch.tensor(batch)
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    none: Any = None
    evaluator = ObjectiveEvaluator(model, none, none, dims, objective, lines.append, iterations=2, batch_size=1)
    return sums.means(), evaluator.mean_loss([[1.0, 2.0], [5.0]]), lines


def test_mean_over_an_empty_mask_is_left_out():
    assert ranks(1).run(mean_with_nothing) == [({"half": 2.0}, 4.0, [" validation | clip_ratio: 0.5 |"])]


def test_score_is_the_value_at_the_answers_last_token():
    """The score of a text is the value at its answer's last token.

    The mask marks the answer's labels. A label is one position before its token, so the answer's last token is one
    position after the last marked label.
    """
    values = torch.arange(12.0).view(2, 6)
    mask = torch.tensor([[0.0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    # the second answer reaches the row's end, so the last position's value is the score
    assert scores_of(values, mask).tolist() == [3.0, 11.0]
