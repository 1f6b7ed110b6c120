"""Losses and gradients with respect to the logits equal TRL's, as write_trl_goldens.py has written them, to 1e-6."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megazpp.post_training import losses as formulas
from megazpp.post_training.reference import mix_
from megazpp.post_training.rewards import total_rewards

HERE = Path(__file__).parent
VERSIONS = {"1.16.0": {"sft": 1, "reward": 2, "dpo": 12, "grpo": 18, "rloo": 2, "sync": 1}, "1.12.0": {"ppo": 4}}
FILES = {version: json.loads((HERE / f"trl_{version}.json").read_text()) for version in VERSIONS}


Compared = dict[str, tuple[torch.Tensor | None, Any]]  # what it is -> ours and TRL's


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


def sft(case: dict[str, Any]) -> Compared:
    logits, mask = leaf(case["logits"]), labels_mask(case)
    loss = -(logps(case, logits) * mask).sum() / mask.sum()
    loss.backward()
    return {"loss": (loss, case["loss"]), "gradient": (logits.grad, case["grad"])}


def reward(case: dict[str, Any]) -> Compared:
    scores = leaf(case["scores"])
    loss = formulas.reward_losses(*scores.chunk(2), **case["settings"]).mean()
    loss.backward()
    return {"loss": (loss, case["loss"]), "gradient": (scores.grad, case["grad"])}


def dpo(case: dict[str, Any]) -> Compared:
    logits, mask, metrics = leaf(case["logits"]), labels_mask(case), case["metrics"]
    policy, ref = ((logps(case, each) * mask).sum(1).chunk(2) for each in (logits, tensor(case["ref_logits"])))
    chosen_lengths, rejected_lengths = mask.sum(1).chunk(2)
    found = formulas.dpo_losses(
        *policy,
        *ref,
        **case["settings"],
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        mean_chosen_length=chosen_lengths.mean(),
    )
    loss = found.losses.mean()
    loss.backward()
    better = (found.chosen_rewards > found.rejected_rewards).double().mean()
    return {
        "loss": (loss, case["loss"]),
        "gradient": (logits.grad, case["grad"]),
        "chosen": (found.chosen_rewards.mean(), metrics["rewards/chosen"]),
        "rejected": (found.rejected_rewards.mean(), metrics["rewards/rejected"]),
        "margins": ((found.chosen_rewards - found.rejected_rewards).mean(), metrics["rewards/margins"]),
        "accuracies": (better, metrics["rewards/accuracies"]),
    }


def sync(case: dict[str, Any]) -> Compared:
    """A reference that takes a share of the policy."""
    reference = [tensor(each) for each in case["reference"]]
    mix_(reference, [tensor(each) for each in case["policy"]], case["alpha"])
    return {str(number): (own, case["mixed"][number]) for number, own in enumerate(reference)}


def advantages_of(case: dict[str, Any]) -> torch.Tensor:
    rewards = tensor([[float("nan") if each is None else each for each in row] for row in case["rewards"]])
    totals, settings = total_rewards(rewards, case["weights"]), case["settings"]
    return formulas.group_advantages(totals, 2, scale=settings["scale"], estimator=settings["estimator"])


def rloo(case: dict[str, Any]) -> Compared:
    return {"advantages": (advantages_of(case), case["advantages"])}


def grpo(case: dict[str, Any], micro_batches: int = 1) -> Compared:
    logits, mask, settings = leaf(case["logits"]), labels_mask(case), case["settings"]
    advantages, temperature, old = advantages_of(case), settings["temperature"], None
    own, ref = (logps(case, each, temperature) for each in (logits, tensor(case["ref_logits"])))
    if case["old_logits"] is not None:
        old = logps(case, tensor(case["old_logits"]), temperature)
    loss, clipped, kl = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    for rows in torch.arange(len(mask)).chunk(micro_batches):
        weights = formulas.token_weights(
            mask[rows],
            settings["loss_type"],
            num_completions=len(mask),
            num_tokens=mask.sum(),
            max_completion_length=settings["max_completion_length"],
        )
        before = None if old is None else old[rows]
        ratio = formulas.importance_ratio(own[rows], before, mask[rows], level=settings["level"])
        if settings["loss_type"] == "cispo":
            policy = formulas.cispo_losses(
                own[rows], ratio, advantages[rows], mask[rows], highest=settings["epsilon_high"]
            )
        else:
            bounds = {name: settings[name] for name in ("epsilon", "epsilon_high", "delta")}
            policy = formulas.policy_losses(ratio, advantages[rows], mask[rows], **bounds)
        divergence = formulas.kl_to_reference(
            own[rows], ref[rows], mask[rows], ratio if settings["bias_correction"] else None
        )
        loss = loss + ((policy.losses + settings["beta"] * divergence) * weights).sum()
        counts = mask[rows] if settings["level"] == "token" else mask[rows] / mask[rows].sum(1, keepdim=True)
        clipped, kl = clipped + (policy.clipped * counts).sum(), kl + (divergence * mask[rows]).sum()
    loss.backward()
    count = mask.sum() if settings["level"] == "token" else len(mask)
    return {
        "advantages": (advantages, case["advantages"]),
        "loss": (loss, case["loss"]),
        "gradient": (logits.grad, case["grad"]),
        "clip_ratio": (clipped / count, case["clip_ratio"]),
        **({"kl": (kl / mask.sum(), case["kl"])} if settings["beta"] else {}),
    }


def grpo_in_micro_batches(case: dict[str, Any]) -> Compared:
    return grpo(case, micro_batches=4)


def ppo(case: dict[str, Any]) -> Compared:
    """TRL gives a completion that ended early a value after its end, and the score there."""
    settings, longest = case["settings"], case["settings"]["max_completion_length"]
    logits, all_values, mask = leaf(case["logits"]), leaf(case["values"]), labels_mask(case)
    places = formulas.value_mask(mask, max_completion_length=longest)
    values, old_values = all_values[:, :-1], tensor(case["old_values"])[:, :-1]
    own, old, ref = (logps(case, each) for each in (logits, tensor(case["old_logits"]), tensor(case["ref_logits"])))

    rewards = formulas.ppo_rewards(old, ref, tensor(case["scores"]), mask, places, kl_coef=settings["kl_coef"])
    if settings["whiten_rewards"]:
        rewards = formulas.whiten(rewards, places, shift_mean=False)
    estimates, returns = formulas.gae(rewards, old_values, places, gamma=settings["gamma"], lam=settings["lam"])
    advantages, drawn = formulas.whiten(estimates, mask), mask[:, -longest:]

    policy = formulas.policy_losses(
        formulas.importance_ratio(own, old, mask), advantages, mask, epsilon=settings["cliprange"]
    )
    value = formulas.clipped_value_losses(
        values, old_values, returns, places, cliprange_value=settings["cliprange_value"]
    )
    policy_loss, value_loss = policy.losses.sum() / mask.sum(), value.losses.sum() / places.sum()
    loss = policy_loss + settings["vf_coef"] * value_loss
    loss.backward()
    return {
        "advantages": ((estimates * mask)[:, -longest:], (tensor(case["advantages"]) * drawn).tolist()),
        "whitened": (advantages[:, -longest:], (tensor(case["whitened"]) * drawn).tolist()),
        "policy_loss": (policy_loss, case["policy_loss"]),
        "value_loss": (value_loss, case["value_loss"]),
        "loss": (loss, case["loss"]),
        "gradient": (logits.grad, case["grad"]),
        "value_gradient": (all_values.grad, case["value_grad"]),
        "clip_ratio": (policy.clipped.sum() / mask.sum(), case["clip_ratio"]),
        "value_clip_ratio": (value.clipped.sum() / places.sum(), case["value_clip_ratio"]),
    }


def test_all_kinds_are_there_from_the_versions_that_wrote_them():
    for version, file in FILES.items():
        kinds = [case["kind"] for case in file["cases"]]
        assert file["trl"] == version
        assert {kind: kinds.count(kind) for kind in kinds} == VERSIONS[version]


@pytest.mark.parametrize("compare", [sft, reward, dpo, sync, rloo, grpo, grpo_in_micro_batches, ppo])
def test_losses_gradients_and_metrics_are_trls(compare):
    """To 1e-6, of numbers above 1 relatively: TRL's log-probabilities are of fp32."""
    kind, wrong = compare.__name__.partition("_")[0], []
    for case in [case for file in FILES.values() for case in file["cases"] if case["kind"] == kind]:
        for name, (found, expected) in compare(case).items():
            assert found is not None
            wanted = tensor(expected)
            if found.shape != wanted.shape or not torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-6):
                wrong.append(f"{name} of {case.get('settings')}: {found}, TRL's {expected}")
    assert wrong == []
