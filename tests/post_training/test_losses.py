"""Compare losses and gradients with stored numbers of TRL, and test properties beyond these numbers.

write_trl_goldens.py has written the numbers.
"""

import collections
import itertools
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from megazpp.post_training import losses as formulas
from megazpp.post_training.config import RewardScale, TokenLoss
from megazpp.post_training.losses import AdvantageEstimator
from megazpp.post_training.rewards import total_rewards

VERSIONS = {"1.16.0": {"sft": 1, "reward": 2, "dpo": 12, "grpo": 18, "rloo": 2}, "1.12.0": {"ppo": 4}}
FILES = {version: json.loads((Path(__file__).parent / f"trl_{version}.json").read_text()) for version in VERSIONS}
CASES = [case for file in FILES.values() for case in file["cases"]]
Case = dict[str, Any]
Numbers = dict[str, torch.Tensor]  # tensors by their names in TRL


def test_stored_cases_cover_all_kinds_and_trl_versions():
    for version, file in FILES.items():
        assert file["trl"] == version
        assert collections.Counter(case["kind"] for case in file["cases"]) == VERSIONS[version]


def tensor(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(numbers: Any) -> torch.Tensor:
    return tensor(numbers).requires_grad_()


def logps(case: Case, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probabilities [B, S] of the S labels of each of B rows, from stored logits [B, S + 1, V].

    In training, the model's output layer computes log-probabilities, from hidden states.
    """
    labels = torch.tensor(case["tokens"])[:, 1:]
    return (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def labels_mask(case: Case) -> torch.Tensor:
    return tensor(case["mask"])[:, 1:]


def sft(case: Case) -> Numbers:
    logits, mask = leaf(case["logits"]), labels_mask(case)
    loss = -(logps(case, logits) * mask).sum() / mask.sum()
    loss.backward()
    return {"loss": loss, "grad": logits.grad}


def reward(case: Case) -> Numbers:
    scores = leaf(case["scores"])
    loss = formulas.reward_losses(*scores.chunk(2), **case["settings"]).mean()
    loss.backward()
    return {"loss": loss, "grad": scores.grad}


def dpo(case: Case) -> Numbers:
    logits, mask = leaf(case["logits"]), labels_mask(case)
    policy, ref = ((logps(case, each) * mask).sum(1).chunk(2) for each in (logits, tensor(case["ref_logits"])))
    chosen, rejected = mask.sum(1).chunk(2)
    lengths = {"chosen_lengths": chosen, "rejected_lengths": rejected, "mean_chosen_length": chosen.mean()}
    losses, better, worse = formulas.dpo_losses(*policy, *ref, **case["settings"], **lengths)
    loss = losses.mean()
    loss.backward()
    rewards = {"chosen": better, "rejected": worse, "margins": better - worse, "accuracies": (better > worse).double()}
    return {"loss": loss, "grad": logits.grad, **{f"rewards/{name}": each.mean() for name, each in rewards.items()}}


def rloo(case: Case) -> Numbers:
    rewards = tensor([[math.nan if each is None else each for each in row] for row in case["rewards"]])
    totals, settings = total_rewards(rewards, case["weights"]), case["settings"]
    options = {"scale": settings["scale"], "estimator": settings["estimator"]}
    return {"advantages": formulas.group_advantages(totals, 2, **options)}


def grpo(case: Case, micro_batches: int = 1) -> Numbers:
    logits, mask, settings = leaf(case["logits"]), labels_mask(case), case["settings"]
    advantages, temperature, old = rloo(case)["advantages"], settings["temperature"], None
    own, ref = (logps(case, each, temperature) for each in (logits, tensor(case["ref_logits"])))
    if case["old_logits"] is not None:
        old = logps(case, tensor(case["old_logits"]), temperature)
    by_token, cispo = settings["level"] == "token", settings["loss_type"] == "cispo"
    sizes = {"num_completions": len(mask), "num_tokens": mask.sum()}
    sizes["max_completion_length"] = settings["max_completion_length"]
    loss, clipped, kl = torch.zeros(3, dtype=torch.float64)
    for rows in torch.arange(len(mask)).chunk(micro_batches):
        mine, drawn, gains = own[rows], mask[rows], advantages[rows]
        before = None if old is None else old[rows]
        ratio = formulas.importance_ratio(mine, before, drawn, level=settings["level"])
        if cispo:
            policy = formulas.cispo_losses(mine, ratio, gains, drawn, highest=settings["epsilon_high"])
        else:
            bounds = {name: settings[name] for name in ("epsilon", "epsilon_high", "delta")}
            policy = formulas.policy_losses(ratio, gains, drawn, **bounds)
        divergence = formulas.kl_to_reference(mine, ref[rows], drawn, ratio if settings["bias_correction"] else None)
        weights = formulas.token_weights(drawn, settings["loss_type"], **sizes)
        loss = loss + ((policy.losses + settings["beta"] * divergence) * weights).sum()
        clipped += (policy.clipped * (drawn if by_token else drawn / drawn.sum(1, keepdim=True))).sum()
        kl += (divergence * drawn).sum().detach()
    loss.backward()
    clip_ratio = clipped / (mask.sum() if by_token else len(mask))
    found = {"advantages": advantages, "loss": loss, "grad": logits.grad, "clip_ratio": clip_ratio}
    return found | ({"kl": kl / mask.sum()} if settings["beta"] else {})


def grpo_in_micro_batches(case: Case) -> Numbers:
    return grpo(case, micro_batches=4)


def ppo(case: Case) -> Numbers:
    """Compute PPO's losses of a stored case.

    For a completion that ended early, TRL uses the value at one more position, after the completion's last token, and
    adds the score to the reward there. This function does the same; see `value_mask`.
    """
    settings, longest = case["settings"], case["settings"]["max_completion_length"]
    logits, all_values, mask = leaf(case["logits"]), leaf(case["values"]), labels_mask(case)
    places = formulas.value_mask(mask, max_completion_length=longest)
    values, old_values = all_values[:, :-1], tensor(case["old_values"])[:, :-1]
    own, old, ref = (logps(case, each) for each in (logits, tensor(case["old_logits"]), tensor(case["ref_logits"])))

    rewards = formulas.ppo_rewards(old, ref, tensor(case["scores"]), mask, places, kl_coef=settings["kl_coef"])
    if settings["whiten_rewards"]:
        rewards = formulas.whiten(rewards, places, shift_mean=False)
    estimates, returns = formulas.gae(rewards, old_values, places, gamma=settings["gamma"], lam=settings["lam"])
    advantages = formulas.whiten(estimates, mask)
    ratio = formulas.importance_ratio(own, old, mask)
    policy = formulas.policy_losses(ratio, advantages, mask, epsilon=settings["cliprange"])
    value = formulas.clipped_value_losses(
        values, old_values, returns, places, cliprange_value=settings["cliprange_value"]
    )
    policy_loss, value_loss = policy.losses.sum() / mask.sum(), value.losses.sum() / places.sum()
    loss = policy_loss + settings["vf_coef"] * value_loss
    loss.backward()

    def where_drawn(name: str, ours: torch.Tensor) -> torch.Tensor:
        return torch.where(mask[:, -longest:] > 0, ours[:, -longest:], tensor(case[name]))

    return {
        "advantages": where_drawn("advantages", estimates),
        "whitened": where_drawn("whitened", advantages),
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "loss": loss,
        "grad": logits.grad,
        "value_grad": all_values.grad,
        "clip_ratio": policy.clipped.sum() / mask.sum(),
        "value_clip_ratio": value.clipped.sum() / places.sum(),
    }


@pytest.mark.parametrize("compare", [sft, reward, dpo, rloo, grpo, grpo_in_micro_batches, ppo])
def test_losses_gradients_and_metrics_match_trl(compare):
    """Compare this project's losses, gradients and metrics with TRL's, for all cases that TRL's numbers are stored for.

    The tolerance is 1e-6, because TRL computes log-probabilities in fp32.
    """
    for case in CASES:
        if case["kind"] == compare.__name__.partition("_")[0]:
            theirs = case | case.get("metrics", {})
            for name, ours in compare(case).items():
                where, wanted = f"{name} of {case.get('settings')}", tensor(theirs[name])
                torch.testing.assert_close(ours.double(), wanted, rtol=1e-6, atol=1e-6, msg=where)


def completions() -> tuple[torch.Tensor, ...]:
    """Return five random tensors [8, 7], and the mask of the labels that belong to completions: 8 rows of 7 labels."""
    generator, places = torch.Generator().manual_seed(0), torch.arange(7)
    lengths = torch.tensor([3, 1, 5, 0, 2, 4, 5, 1]).unsqueeze(1)
    mask = ((places > 0) & (places <= lengths)).double()
    return *torch.randn(5, 8, 7, generator=generator, dtype=torch.float64), mask


def test_masked_values_change_no_loss_and_get_no_gradient():
    logps, old, ref, values, advantages, mask = completions()
    places, found = formulas.value_mask(mask, max_completion_length=5), []
    for rubbish in (0.0, 1e4, -math.inf):
        policy, before, reference = (torch.where(mask > 0, each, rubbish) for each in (logps, old, ref))
        head = torch.where(places > 0, values, 3.0 if math.isinf(rubbish) else rubbish)
        policy, head = policy.requires_grad_(), head.requires_grad_()
        ratio, whole = (formulas.importance_ratio(policy, before, mask, level=each) for each in ("token", "sequence"))
        loss = formulas.policy_losses(ratio, advantages, mask, epsilon=0.2).losses.sum()
        loss = loss + formulas.cispo_losses(policy, whole, advantages[:, 0], mask, highest=2.0).losses.sum()
        loss = loss + formulas.kl_to_reference(policy, reference, mask, whole).sum()
        loss = loss + formulas.clipped_value_losses(head, values, advantages, places, cliprange_value=0.2).losses.sum()
        loss.backward()
        rewards = formulas.ppo_rewards(policy.detach(), reference, advantages[:, 0], mask, places, kl_coef=0.1)
        estimates = formulas.gae(rewards, head.detach(), places, gamma=0.9, lam=0.8)
        assert (policy.grad[mask == 0] == 0).all()
        assert (estimates[0][places == 0] == 0).all()
        found.append(torch.stack([policy.grad, head.grad, *estimates, rewards, loss.detach().expand_as(mask)]))
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=0, atol=0)


def test_step_without_a_token_has_zero_loss_instead_of_nan():
    sizes = {"num_completions": 2, "num_tokens": 0, "max_completion_length": 5}
    for loss_type in get_args(TokenLoss):
        assert not formulas.token_weights(torch.zeros(2, 3), loss_type, **sizes).any()


def test_group_advantages_sum_to_zero_and_ignore_other_groups():
    rewards = tensor([1, 0, 0, 1, 5, 5, 5, 5, 0, 2, 4, 6])
    for scale, estimator in itertools.product(get_args(RewardScale), get_args(AdvantageEstimator)):
        found = formulas.group_advantages(rewards, 4, scale=scale, estimator=estimator)
        assert found.view(3, 4).sum(1).abs().max() < 1e-12
        assert (found[4:8] == 0).all()
        alone = formulas.group_advantages(rewards[8:], 4, scale=scale, estimator=estimator)
        assert torch.equal(found[8:], alone) == (scale != "batch"), (scale, estimator)
    assert formulas.group_advantages(tensor([1, 2]), 1).tolist() == [0, 0]


def test_values_end_one_place_after_a_completion_below_the_limit():
    mask = torch.tensor([[0.0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    expected = [[0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert formulas.value_mask(mask, max_completion_length=3).tolist() == expected


def test_whitening_uses_the_moments_of_all_ranks():
    x, *_, mask = completions()
    # Shift by 100, so that the moments of one rank alone would give clearly other results.
    x, own, rest = 100 + x, slice(0, 3), slice(3, None)
    chosen, sums = x[mask > 0], []
    formulas.whiten(x[rest], mask[rest], sum_over_ranks=lambda theirs: sums.append(theirs) or theirs)
    for shift_mean, mean in ((True, 0.0), (False, chosen.mean())):
        found = formulas.whiten(x[own], mask[own], sum_over_ranks=lambda mine: mine + sums[0], shift_mean=shift_mean)
        expected = (x[own] - chosen.mean()) / (chosen.var() + 1e-8).sqrt() + mean
        torch.testing.assert_close(found, expected * mask[own], rtol=1e-9, atol=1e-9)


def test_margin_is_subtracted_from_the_difference_of_scores_like_in_trl():
    chosen, rejected, margins = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]), torch.tensor([0.25, -3.0])
    expected = -torch.nn.functional.logsigmoid(chosen - rejected - margins) + 0.1 * (chosen + rejected) ** 2
    found = formulas.reward_losses(chosen, rejected, margins=margins, center=0.1)
    torch.testing.assert_close(found, expected)


def test_scores_far_apart_do_not_overflow():
    assert formulas.reward_losses(torch.tensor([500.0, -500.0]), torch.zeros(2)).tolist() == [0, 500]
