"""Objectives on ranks: every layout gives the numbers of one process, and those of the formulas on plain logits."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import LLAMA_STYLE
from post_training.policies import Layout, PostCase, build, synthetic_batch, train_on_synthetic

from megazpp.model.gpt import TokenOutputs
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.objectives import scores_of

LLAMA = dataclasses.replace(LLAMA_STYLE, init_method_std=0.3, max_position_embeddings=32)
OBJECTIVES = {
    "reward": PostCase(post=PostTrainingConfig(objective="reward", center_rewards_coefficient=0.1)),
    "reward untied": PostCase(post=PostTrainingConfig(objective="reward"), model=LLAMA),
    "dpo": PostCase(post=PostTrainingConfig(objective="dpo", beta=0.3, loss_type=("sigmoid", "sft"))),
    "grpo": PostCase(post=PostTrainingConfig(objective="grpo", loss_type=("grpo",), beta=0.1, num_generations=4)),
    "dapo": PostCase(
        post=PostTrainingConfig(objective="grpo", num_generations=4, importance_sampling_level="sequence", beta=0.1),
        temperature=0.7,
        model=LLAMA,
    ),
    "cispo": PostCase(post=PostTrainingConfig(objective="grpo", loss_type=("cispo",), num_generations=4)),
    "dr_grpo": PostCase(post=PostTrainingConfig(objective="grpo", loss_type=("dr_grpo",), num_generations=4)),
    "ppo": PostCase(post=PostTrainingConfig(objective="ppo"), temperature=0.7),
    "ppo untied": PostCase(post=PostTrainingConfig(objective="ppo"), model=LLAMA),
}
LAYOUTS = {
    "tp 2": Layout(world=2, tp=2),
    "data 2": Layout(world=2, micro_batch_size=2),
    "cp 2": Layout(world=2, cp=2),
    "cp 2 x tp 2 x data 2": Layout(world=8, cp=2, tp=2, micro_batch_size=2),
    "tp 2 x data 2, sequence parallel": Layout(world=4, tp=2, sequence_parallel=True),
    "tp 2 x 2 nodes": Layout(world=4, tp=2, nodes=2, micro_batch_size=2),
}
IN_DEFAULT = {"tp 2": ("reward untied", "ppo", "grpo"), "data 2": ("dpo", "ppo")}
IN_DEFAULT["cp 2"] = ("reward", "dapo", "dpo", "ppo untied")


def assert_near(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 2e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


def train_all(names: Iterable[str], **changed: Any) -> list[list[dict[str, Any]]]:
    return [train_on_synthetic(dataclasses.replace(OBJECTIVES[name], **changed)) for name in names]


@functools.cache
def in_one_process(objective: str) -> list[dict[str, Any]]:
    return ranks(1).run(train_all, [objective], layout=Layout(micro_batch_size=8))[0][0]


@pytest.mark.parametrize(
    ("layout", "objectives"), [(x, IN_DEFAULT[x]) if x in IN_DEFAULT else slow(x, tuple(OBJECTIVES)) for x in LAYOUTS]
)
def test_every_layout_gives_the_losses_norms_and_metrics_of_one_process(layout, objectives):
    spread = LAYOUTS[layout]
    expected = [in_one_process(objective) for objective in objectives]
    for objective, (first, *_) in zip(objectives, expected, strict=True):
        assert first["grad_norm"] > 1e-4
        if objective.startswith("ppo"):
            assert first["loss"] == pytest.approx(first["loss/policy_avg"] + 0.1 * first["loss/value_avg"], rel=1e-5)
    for found in ranks(spread.world).run(train_all, objectives, layout=spread):
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)


def test_dpo_begins_as_its_reference():
    first = in_one_process("dpo")[0]
    assert first["logps/chosen"] < -1.0
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert first[name] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("layout", ["data 2", slow("tp 2 x data 2, sequence parallel"), slow("cp 2")])
def test_rows_of_each_rank_s_own_length_change_no_loss(layout):
    objectives, spread = ("reward untied", "dpo", "grpo", "dr_grpo", "ppo"), LAYOUTS[layout]
    whole, short = (
        ranks(spread.world).run(train_all, objectives, layout=spread, shortens=shortens) for shortens in (False, True)
    )
    for of_rank, shortened in zip(whole, short, strict=True):
        for one, other in zip(of_rank, shortened, strict=True):
            assert_near(one, other, tolerance=2e-6)


def plain_forward(case: PostCase) -> dict[str, torch.Tensor]:
    """What the model says of tokens, and the same from its logits."""
    (model, _), _ = build(case, scalar_head=True)
    batch = synthetic_batch(case, 0, [0, 1, 2])
    model.eval()
    with torch.no_grad():
        logits = model.tp.all_gather(model(batch.tokens).flatten(0, 1).t().contiguous()).t()[:, :257]
        logits = logits.reshape(*batch.tokens.shape, 257).float() / 0.7
        own = model(batch.tokens, batch.labels, temperature=0.7, with_entropy=True, with_values=True)
        assert isinstance(own, TokenOutputs)
        alone = model(batch.tokens, with_values=True)
    log = logits.log_softmax(dim=-1)
    return {
        "losses": own.losses + log.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1),
        "entropy": own.entropy + (log.exp() * log).sum(dim=-1),
        "values": own.values - alone.values,
        "own values": own.values,
    }


def test_losses_and_entropy_at_a_temperature_are_those_of_the_logits_and_values_are_the_same_alone():
    case = OBJECTIVES["ppo untied"]
    (one,) = ranks(1).run(plain_forward, case)
    spread = dataclasses.replace(case, layout=Layout(world=2, tp=2, sequence_parallel=True))
    for found in (one, *ranks(2).run(plain_forward, spread)):
        for name in ("losses", "entropy", "values"):
            assert found[name].abs().max() < 1e-5, name
        torch.testing.assert_close(found["own values"], one["own values"], atol=1e-5, rtol=0)


def test_a_row_s_score_is_the_value_at_its_answer_s_last_token():
    """By hand: the mask has the places before the tokens of the answer, so the last token is one further."""
    values = torch.arange(12.0).view(2, 6)
    mask = torch.tensor([[0.0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    assert scores_of(values, mask).tolist() == [3.0, 11.0]  # the second answer fills its row
