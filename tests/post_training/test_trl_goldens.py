"""Losses and gradients with respect to the logits equal TRL's to 1e-6, from what write_trl_goldens.py wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megazpp.post_training.losses import (
    cispo_losses,
    clipped_value_losses,
    dpo_losses,
    gae,
    group_advantages,
    importance_ratio,
    kl_to_reference,
    policy_losses,
    ppo_rewards,
    reward_losses,
    token_weights,
    value_mask,
    whiten,
)
from megazpp.post_training.reference import mix_
from megazpp.post_training.rewards import total_rewards

HERE = Path(__file__).parent
VERSIONS = {"1.16.0": {"sft": 1, "reward": 2, "dpo": 12, "grpo": 18, "rloo": 2, "sync": 1}, "1.12.0": {"ppo": 4}}
FILES = {version: json.loads((HERE / f"trl_{version}.json").read_text()) for version in VERSIONS}


def cases(kind: str) -> Any:
    found = [case for file in FILES.values() for case in file["cases"] if case["kind"] == kind]
    names = [" ".join(map(str, case.get("settings", {}).values())) or kind for case in found]
    return pytest.mark.parametrize("case", found, ids=names)


def tensor(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(numbers: Any) -> torch.Tensor:
    return tensor(numbers).requires_grad_()


def logps(case: dict[str, Any], logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[B, S] of the labels, as the model gives them."""
    labels = torch.tensor(case["tokens"])[:, 1:]
    return (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def labels_mask(case: dict[str, Any]) -> torch.Tensor:
    return tensor(case["mask"])[:, 1:]


def check(found: torch.Tensor, expected: Any) -> None:
    """To 1e-6, of numbers above 1 relatively: TRL's log-probabilities are of fp32."""
    torch.testing.assert_close(found, tensor(expected), rtol=1e-6, atol=1e-6)


def test_all_kinds_are_there_from_the_versions_that_wrote_them() -> None:
    for version, file in FILES.items():
        kinds = [case["kind"] for case in file["cases"]]
        assert file["trl"] == version
        assert {kind: kinds.count(kind) for kind in kinds} == VERSIONS[version]


@cases("sft")
def test_sft(case: dict[str, Any]) -> None:
    logits, mask = leaf(case["logits"]), labels_mask(case)
    loss = -(logps(case, logits) * mask).sum() / mask.sum()
    loss.backward()
    check(loss, case["loss"])
    check(logits.grad, case["grad"])  # type: ignore[arg-type]


@cases("reward")
def test_reward(case: dict[str, Any]) -> None:
    scores = leaf(case["scores"])
    loss = reward_losses(*scores.chunk(2), **case["settings"]).mean()
    loss.backward()
    check(loss, case["loss"])
    check(scores.grad, case["grad"])  # type: ignore[arg-type]


@cases("dpo")
def test_dpo(case: dict[str, Any]) -> None:
    logits, mask = leaf(case["logits"]), labels_mask(case)
    policy, ref = ((logps(case, each) * mask).sum(1).chunk(2) for each in (logits, tensor(case["ref_logits"])))
    chosen_lengths, rejected_lengths = mask.sum(1).chunk(2)
    found = dpo_losses(
        *policy,
        *ref,
        **case["settings"],
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        mean_chosen_length=chosen_lengths.mean(),
    )
    loss = found.losses.mean()
    loss.backward()
    check(loss, case["loss"])
    check(logits.grad, case["grad"])  # type: ignore[arg-type]
    metrics = case["metrics"]
    check(found.chosen_rewards.mean(), metrics["rewards/chosen"])
    check(found.rejected_rewards.mean(), metrics["rewards/rejected"])
    check((found.chosen_rewards - found.rejected_rewards).mean(), metrics["rewards/margins"])
    check((found.chosen_rewards > found.rejected_rewards).double().mean(), metrics["rewards/accuracies"])


@cases("sync")
def test_a_reference_takes_a_share_of_the_policy(case: dict[str, Any]) -> None:
    reference = [tensor(each) for each in case["reference"]]
    mix_(reference, [tensor(each) for each in case["policy"]], case["alpha"])
    for own, old, new, expected in zip(reference, case["reference"], case["policy"], case["mixed"], strict=True):
        check(own, expected)
        check(own, (0.4 * tensor(old) + 0.6 * tensor(new)).tolist())


def case_advantages(case: dict[str, Any]) -> torch.Tensor:
    rewards = tensor([[float("nan") if each is None else each for each in row] for row in case["rewards"]])
    settings = case["settings"]
    totals = total_rewards(rewards, case["weights"])
    return group_advantages(totals, 2, scale=settings["scale"], estimator=settings["estimator"])


@cases("rloo")
def test_rloo_advantages(case: dict[str, Any]) -> None:
    check(case_advantages(case), case["advantages"])


@cases("grpo")
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_grpo(case: dict[str, Any], micro_batches: int) -> None:
    logits, mask, settings = leaf(case["logits"]), labels_mask(case), case["settings"]
    advantages = case_advantages(case)
    check(advantages, case["advantages"])
    own, ref = (logps(case, each, settings["temperature"]) for each in (logits, tensor(case["ref_logits"])))
    old = None
    if case["old_logits"] is not None:
        old = logps(case, tensor(case["old_logits"]), settings["temperature"])
    loss, clipped, kl = torch.zeros((), dtype=torch.float64), torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(len(mask)).chunk(micro_batches):
        weights = token_weights(
            mask[rows],
            settings["loss_type"],
            num_completions=len(mask),
            num_tokens=mask.sum(),
            max_completion_length=settings["max_completion_length"],
        )
        before = None if old is None else old[rows]
        ratio = importance_ratio(own[rows], before, mask[rows], level=settings["level"])
        if settings["loss_type"] == "cispo":
            policy = cispo_losses(own[rows], ratio, advantages[rows], mask[rows], highest=settings["epsilon_high"])
        else:
            bounds = {name: settings[name] for name in ("epsilon", "epsilon_high", "delta")}
            policy = policy_losses(ratio, advantages[rows], mask[rows], **bounds)
        divergence = kl_to_reference(own[rows], ref[rows], mask[rows], ratio if settings["bias_correction"] else None)
        loss = loss + ((policy.losses + settings["beta"] * divergence) * weights).sum()
        counts = mask[rows] if settings["level"] == "token" else mask[rows] / mask[rows].sum(1, keepdim=True)
        clipped, kl = clipped + (policy.clipped * counts).sum(), kl + (divergence * mask[rows]).sum()
    loss.backward()
    check(loss, case["loss"])
    check(logits.grad, case["grad"])  # type: ignore[arg-type]
    count = mask.sum() if settings["level"] == "token" else len(mask)
    check((clipped / count).double(), case["clip_ratio"])
    if settings["beta"]:
        check(kl / mask.sum(), case["kl"])


@cases("ppo")
def test_ppo(case: dict[str, Any]) -> None:
    """TRL gives a completion that ended early a value after its end, and the score there."""
    settings = case["settings"]
    logits, all_values = leaf(case["logits"]), leaf(case["values"])
    mask = labels_mask(case)
    places = value_mask(mask, max_completion_length=settings["max_completion_length"])
    values, old_values = all_values[:, :-1], tensor(case["old_values"])[:, :-1]
    own, old, ref = (logps(case, each) for each in (logits, tensor(case["old_logits"]), tensor(case["ref_logits"])))

    rewards = ppo_rewards(old, ref, tensor(case["scores"]), mask, places, kl_coef=settings["kl_coef"])
    if settings["whiten_rewards"]:
        rewards = whiten(rewards, places, shift_mean=False)
    estimates, returns = gae(rewards, old_values, places, gamma=settings["gamma"], lam=settings["lam"])
    advantages = whiten(estimates, mask)
    longest = settings["max_completion_length"]
    check((estimates * mask)[:, -longest:], (tensor(case["advantages"]) * mask[:, -longest:]).tolist())
    check(advantages[:, -longest:], (tensor(case["whitened"]) * mask[:, -longest:]).tolist())

    policy = policy_losses(importance_ratio(own, old, mask), advantages, mask, epsilon=settings["cliprange"])
    value = clipped_value_losses(values, old_values, returns, places, cliprange_value=settings["cliprange_value"])
    policy_loss, value_loss = policy.losses.sum() / mask.sum(), value.losses.sum() / places.sum()
    loss = policy_loss + settings["vf_coef"] * value_loss
    loss.backward()
    check(policy_loss, case["policy_loss"])
    check(value_loss, case["value_loss"])
    check(loss, case["loss"])
    check(logits.grad, case["grad"])  # type: ignore[arg-type]
    check(all_values.grad, case["value_grad"])  # type: ignore[arg-type]
    check((policy.clipped.sum() / mask.sum()).double(), case["clip_ratio"])
    check((value.clipped.sum() / places.sum()).double(), case["value_clip_ratio"])
