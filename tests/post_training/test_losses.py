"""Sums over any division into micro-batches and ranks are the same, and what lies outside of a mask changes nothing.

That the numbers are right is shown beside TRL's in test_trl_goldens.py.
"""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.post_training.losses import (
    TokenLoss,
    cispo_losses,
    clipped_value_losses,
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

LENGTHS = [3, 1, 5, 0, 2, 4, 5, 1]
ROWS, PLACES = len(LENGTHS), 7


def completions(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Log-probabilities (policy, old, reference), values, advantages [ROWS, PLACES], and a mask; NaN outside of it."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(ROWS, PLACES, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        mask[row, 1 : 1 + length] = 1
    tensors = [torch.randn(ROWS, PLACES, generator=generator, dtype=torch.float64) for _ in range(5)]
    return *tensors, mask


@pytest.mark.parametrize("loss_type", get_args(TokenLoss))
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_steps_loss_does_not_depend_on_its_micro_batches(loss_type: TokenLoss, parts: int) -> None:
    logps, old, ref, _, advantages, mask = completions()
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(ROWS).chunk(parts):
        weights = token_weights(
            mask[rows], loss_type, num_completions=ROWS, num_tokens=mask.sum(), max_completion_length=5
        )
        ratio = importance_ratio(logps[rows], old[rows], mask[rows])
        if loss_type == "cispo":
            per_token = cispo_losses(logps[rows], ratio, advantages[rows, 0], mask[rows], highest=1.2).losses
        else:
            per_token = policy_losses(ratio, advantages[rows, 0], mask[rows], epsilon=0.2).losses
        total += ((per_token + 0.1 * kl_to_reference(logps[rows], ref[rows], mask[rows])) * weights).sum()
    ratio = (logps - old).exp()
    free = torch.minimum(ratio * advantages[:, :1], ratio.clamp(0.8, 1.2) * advantages[:, :1])
    if loss_type == "cispo":
        free = ratio.clamp(max=1.2) * advantages[:, :1] * logps
    per_token = (0.1 * ((ref - logps).exp() - (ref - logps) - 1) - free) * mask
    expected = {
        "grpo": (per_token.sum(1) / mask.sum(1).clamp(min=1)).mean(),
        "bnpo": per_token.sum() / mask.sum(),
        "dapo": per_token.sum() / mask.sum(),
        "cispo": per_token.sum() / mask.sum(),
        "dr_grpo": per_token.sum() / (ROWS * 5),
    }
    torch.testing.assert_close(total, expected[loss_type], rtol=1e-12, atol=0)


def test_a_step_without_a_token_has_no_loss_rather_than_nan() -> None:
    for loss_type in get_args(TokenLoss):
        weights = token_weights(torch.zeros(2, 3), loss_type, num_completions=2, num_tokens=0, max_completion_length=5)
        assert weights.tolist() == [[0] * 3] * 2


def test_what_lies_outside_of_the_mask_is_neither_seen_nor_given_a_gradient() -> None:
    logps, old, ref, values, advantages, mask = completions()
    places = value_mask(mask, max_completion_length=5)
    found = []
    for rubbish in (0.0, 1e4, -math.inf):
        policy, head, before, reference = (torch.where(mask > 0, each, rubbish) for each in (logps, values, old, ref))
        head = torch.where(places > 0, values, 3.0 if math.isinf(rubbish) else rubbish)
        policy.requires_grad_()
        head.requires_grad_()
        loss = policy_losses(importance_ratio(policy, before, mask), advantages, mask, epsilon=0.2).losses.sum()
        whole = importance_ratio(policy, before, mask, level="sequence")
        loss = loss + cispo_losses(policy, whole, advantages[:, 0], mask, highest=2.0).losses.sum()
        loss = loss + kl_to_reference(policy, reference, mask, whole).sum()
        loss = loss + clipped_value_losses(head, values, advantages, places, cliprange_value=0.2).losses.sum()
        loss.backward()
        rewards = ppo_rewards(policy.detach(), reference, advantages[:, 0], mask, places, kl_coef=0.1)
        estimates = gae(rewards, head.detach(), places, gamma=0.9, lam=0.8)
        assert policy.grad is not None
        assert head.grad is not None
        assert (policy.grad[mask == 0] == 0).all()
        found.append(torch.stack([policy.grad, head.grad, *estimates, rewards, loss.detach().expand_as(mask)]))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_others(scale: str, estimator: str) -> None:
    rewards = torch.tensor([1.0, 0, 0, 1, 5, 5, 5, 5, 0, 2, 4, 6], dtype=torch.float64)
    found = group_advantages(rewards, 4, scale=scale, estimator=estimator)  # type: ignore[arg-type]
    assert found.view(3, 4).sum(1).abs().max() < 1e-12
    assert (found[4:8] == 0).all()
    if scale != "batch":
        alone = group_advantages(rewards[8:], 4, scale=scale, estimator=estimator)  # type: ignore[arg-type]
        assert torch.equal(found[8:], alone)
    if scale == "none" and estimator == "rloo":
        assert found[0].item() == pytest.approx(1 - 1 / 3)


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([1.0, 2.0]), 1).tolist() == [0, 0]


def test_values_end_one_place_after_a_completion_unless_it_is_as_long_as_it_can_be() -> None:
    mask = torch.tensor([[0.0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    expected = [[0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert value_mask(mask, max_completion_length=3).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(gamma=st.floats(0, 1), lam=st.floats(0, 1), seed=st.integers(0, 9))
def test_advantages_are_the_sums_of_temporal_differences(gamma: float, lam: float, seed: int) -> None:
    rewards, values, *_, mask = completions(seed)
    places = value_mask(mask, max_completion_length=5)
    advantages, returns = gae(rewards, values, places, gamma=gamma, lam=lam)
    for row in range(ROWS):
        own = places[row].nonzero().flatten().tolist()
        deltas = [
            float(rewards[row, t] - values[row, t]) + (gamma * float(values[row, t + 1]) if t + 1 in own else 0)
            for t in own
        ]
        for number, t in enumerate(own):
            wanted = sum((gamma * lam) ** (later - number) * deltas[later] for later in range(number, len(own)))
            assert float(advantages[row, t]) == pytest.approx(wanted, abs=1e-12)
            assert float(returns[row, t]) == pytest.approx(wanted + float(values[row, t]), abs=1e-12)
    assert (advantages[places == 0] == 0).all()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_spans_all_ranks(shift_mean: bool) -> None:
    x, *_, mask = completions()
    x = 100 + x  # a mean that one rank alone would see otherwise
    halves = (slice(0, 3), slice(3, None))
    sums: list[torch.Tensor] = []

    def record(own: torch.Tensor) -> torch.Tensor:
        sums.append(own)
        return own

    for half in halves:
        whiten(x[half], mask[half], sum_over_ranks=record)
    total = sums[0] + sums[1]
    parts = [whiten(x[h], mask[h], sum_over_ranks=lambda _: total, shift_mean=shift_mean) for h in halves]
    whole = torch.cat(parts)
    chosen = x[mask > 0]
    expected = (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt() + (0 if shift_mean else chosen.mean())
    torch.testing.assert_close(whole[mask > 0], expected, rtol=1e-9, atol=1e-9)
    assert (whole[mask == 0] == 0).all()


def test_scores_far_apart_do_not_overflow() -> None:
    assert reward_losses(torch.tensor([500.0, -500.0]), torch.zeros(2)).tolist() == [0, 500]
