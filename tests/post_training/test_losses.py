"""Each loss by hand; sums over any division into micro-batches are the same, and nothing outside of a mask counts.

TRL's numbers are in test_trl_goldens.py.
"""

import functools
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.post_training import losses as formulas
from megazpp.post_training.losses import AdvantageEstimator, PairLoss, RewardScale, TokenLoss

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


def test_a_steps_loss_does_not_depend_on_its_micro_batches():
    logps, old, ref, _, values, mask = completions()
    advantages, ratio = values[:, 0], (logps - old).exp()
    clipped = torch.minimum(ratio * values[:, :1], ratio.clamp(0.8, 1.2) * values[:, :1])
    divergence = 0.1 * ((ref - logps).exp() - (ref - logps) - 1)
    per_token, cispo = ((divergence - x) * mask for x in (clipped, ratio.clamp(max=1.2) * values[:, :1] * logps))
    expected = {
        "grpo": (per_token.sum(1) / mask.sum(1).clamp(min=1)).mean(),
        "bnpo": per_token.sum() / mask.sum(),
        "dapo": per_token.sum() / mask.sum(),
        "cispo": cispo.sum() / mask.sum(),
        "dr_grpo": per_token.sum() / (ROWS * 5),
    }
    sizes: dict[str, Any] = {"num_completions": ROWS, "num_tokens": mask.sum(), "max_completion_length": 5}
    for loss_type in get_args(TokenLoss):
        for parts in (1, 3, 8):
            total = torch.zeros((), dtype=torch.float64)
            for rows in torch.arange(ROWS).chunk(parts):
                own, drawn = formulas.importance_ratio(logps[rows], old[rows], mask[rows]), mask[rows]
                if loss_type == "cispo":
                    losses = formulas.cispo_losses(logps[rows], own, advantages[rows], drawn, highest=1.2).losses
                else:
                    losses = formulas.policy_losses(own, advantages[rows], drawn, epsilon=0.2).losses
                losses = losses + 0.1 * formulas.kl_to_reference(logps[rows], ref[rows], drawn)
                total += (losses * formulas.token_weights(drawn, loss_type, **sizes)).sum()
            torch.testing.assert_close(total, expected[loss_type], rtol=1e-12, atol=0)


def test_a_step_without_a_token_has_no_loss_rather_than_nan():
    for loss_type in get_args(TokenLoss):
        weights = formulas.token_weights(
            torch.zeros(2, 3), loss_type, num_completions=2, num_tokens=0, max_completion_length=5
        )
        assert weights.tolist() == [[0] * 3] * 2


def test_what_lies_outside_of_the_mask_is_neither_seen_nor_given_a_gradient():
    logps, old, ref, values, advantages, mask = completions()
    places = formulas.value_mask(mask, max_completion_length=5)
    found = []
    for rubbish in (0.0, 1e4, -math.inf):
        policy, head, before, reference = (torch.where(mask > 0, each, rubbish) for each in (logps, values, old, ref))
        head = torch.where(places > 0, values, 3.0 if math.isinf(rubbish) else rubbish)
        policy.requires_grad_()
        head.requires_grad_()
        loss = formulas.policy_losses(
            formulas.importance_ratio(policy, before, mask), advantages, mask, epsilon=0.2
        ).losses.sum()
        whole = formulas.importance_ratio(policy, before, mask, level="sequence")
        loss = loss + formulas.cispo_losses(policy, whole, advantages[:, 0], mask, highest=2.0).losses.sum()
        loss = loss + formulas.kl_to_reference(policy, reference, mask, whole).sum()
        loss = loss + formulas.clipped_value_losses(head, values, advantages, places, cliprange_value=0.2).losses.sum()
        loss.backward()
        rewards = formulas.ppo_rewards(policy.detach(), reference, advantages[:, 0], mask, places, kl_coef=0.1)
        estimates = formulas.gae(rewards, head.detach(), places, gamma=0.9, lam=0.8)
        assert policy.grad is not None
        assert head.grad is not None
        assert (policy.grad[mask == 0] == 0).all()
        found.append(torch.stack([policy.grad, head.grad, *estimates, rewards, loss.detach().expand_as(mask)]))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_others():
    rewards = torch.tensor([1.0, 0, 0, 1, 5, 5, 5, 5, 0, 2, 4, 6], dtype=torch.float64)
    for scale in get_args(RewardScale):
        for estimator in get_args(AdvantageEstimator):
            found = formulas.group_advantages(rewards, 4, scale=scale, estimator=estimator)
            assert found.view(3, 4).sum(1).abs().max() < 1e-12
            assert (found[4:8] == 0).all()
            if scale != "batch":
                alone = formulas.group_advantages(rewards[8:], 4, scale=scale, estimator=estimator)
                assert torch.equal(found[8:], alone), (scale, estimator)
    rloo = formulas.group_advantages(rewards, 4, scale="none", estimator="rloo")
    assert rloo[0].item() == pytest.approx(1 - 1 / 3)
    assert formulas.group_advantages(torch.tensor([1.0, 2.0]), 1).tolist() == [0, 0]


def test_values_end_one_place_after_a_completion_unless_it_is_as_long_as_it_can_be():
    mask = torch.tensor([[0.0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    expected = [[0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert formulas.value_mask(mask, max_completion_length=3).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(gamma=st.floats(0, 1), lam=st.floats(0, 1), seed=st.integers(0, 9))
def test_advantages_are_the_sums_of_temporal_differences(gamma, lam, seed):
    rewards, values, *_, mask = completions(seed)
    places = formulas.value_mask(mask, max_completion_length=5)
    advantages, returns = formulas.gae(rewards, values, places, gamma=gamma, lam=lam)
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


def test_whitening_spans_all_ranks():
    x, *_, mask = completions()
    x = 100 + x  # a mean that one rank alone would see otherwise
    halves = (slice(0, 3), slice(3, None))
    sums: list[torch.Tensor] = []

    def record(own: torch.Tensor) -> torch.Tensor:
        sums.append(own)
        return own

    for half in halves:
        formulas.whiten(x[half], mask[half], sum_over_ranks=record)
    total, chosen = sums[0] + sums[1], x[mask > 0]
    for shift_mean, mean in ((True, 0.0), (False, chosen.mean())):
        parts = [formulas.whiten(x[h], mask[h], sum_over_ranks=lambda _: total, shift_mean=shift_mean) for h in halves]
        expected = (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt() + mean
        torch.testing.assert_close(torch.cat(parts)[mask > 0], expected, rtol=1e-9, atol=1e-9)
        assert (torch.cat(parts)[mask == 0] == 0).all()


def test_scores_far_apart_do_not_overflow():
    assert formulas.reward_losses(torch.tensor([500.0, -500.0]), torch.zeros(2)).tolist() == [0, 500]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


PAIRS: dict[PairLoss, float] = {  # beta 1 / 4, rewards 1 / 4 and -1 / 4, answers of 2 and 4 tokens
    "sigmoid": softplus(-0.5),
    "hinge": 1 - 0.5,
    "ipo": (1 / 2 + 1 / 4 - 2) ** 2,
    "robust": (0.9 * softplus(-0.5) - 0.1 * softplus(0.5)) / 0.8,
    "nca_pair": softplus(-0.25) + (softplus(0.25) + softplus(-0.25)) / 2,
    "bco_pair": 2 * softplus(-0.25),
    "sppo_hard": (1 - 2) ** 2 + (-1 + 2) ** 2,
    "apo_zero": 2 * sigmoid(-0.25),
    "apo_down": sigmoid(0.25) + sigmoid(-0.5),
    "sft": 3 / 2,
}


def test_losses_of_pairs_by_hand_and_the_pair_that_is_preferred_has_the_smaller():
    chosen, rejected, ref = torch.tensor([-3.0, -5.0]), torch.tensor([-5.0, -3.0]), torch.full((2,), -4.0)
    options: dict[str, Any] = {"label_smoothing": 0.1, "mean_chosen_length": 2.0}
    lengths = {"chosen_lengths": torch.tensor([2.0, 2.0]), "rejected_lengths": torch.tensor([4.0, 4.0])}
    losses = functools.partial(formulas.dpo_losses, chosen, rejected, ref, ref, beta=0.25, **options, **lengths)
    for loss_type in get_args(PairLoss):
        found = losses(loss_types=(loss_type,))
        assert found.losses[0].item() == pytest.approx(PAIRS[loss_type]), loss_type
        assert found.losses[0] < found.losses[1], loss_type
        assert (found.chosen_rewards.tolist(), found.rejected_rewards.tolist()) == ([0.25, -0.25], [-0.25, 0.25])
        weighted = losses(loss_types=(loss_type, "hinge"), loss_weights=(2.0, 0.25))
        torch.testing.assert_close(weighted.losses, 2 * found.losses + 0.25 * torch.tensor([0.5, 1.5]))


def test_losses_of_completions_by_hand():
    """One completion of two tokens, ratios 2 and 1 / 8."""
    logps, mask = torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2)
    old = logps - torch.tensor([[2.0, 0.125]]).log()
    good, bad = torch.tensor([3.0]), torch.tensor([-3.0])
    tokens, whole = (formulas.importance_ratio(logps, old, mask, level=each) for each in ("token", "sequence"))
    divergence = 0.5 + math.log(2) - 1  # of a reference that is half as likely
    half, zeros = logps - math.log(2), torch.zeros(1, 2)
    for found, expected in (
        (tokens, [2, 0.125]),
        (whole, [0.5]),  # sqrt(2 / 8): GSPO, equation 7
        (formulas.policy_losses(tokens, good, mask, epsilon=0.2), ([-3 * 1.2, -3 * 0.125], [1, 0])),
        (formulas.policy_losses(tokens, good, mask, epsilon=0.2, epsilon_high=0.5), ([-3 * 1.5, -3 * 0.125], [1, 0])),
        (formulas.policy_losses(tokens, bad, mask, epsilon=0.2), ([3 * 2, 3 * 0.8], [0, 1])),
        (formulas.policy_losses(tokens, bad, mask, epsilon=0.2, delta=1.5), ([3 * 1.5, 3 * 0.8], [0, 1])),
        (formulas.policy_losses(whole, bad, mask, epsilon=0.2), ([3 * 0.8] * 2, [1, 1])),
        (formulas.cispo_losses(logps, tokens, good, mask, highest=1.5), ([1.5 * 3 * 1, 0.125 * 3 * 3], [1, 0])),
        (formulas.kl_to_reference(logps, half, mask), [divergence] * 2),
        (formulas.kl_to_reference(logps, half, mask, tokens), [2 * divergence, 0.125 * divergence]),
        (formulas.clipped_value_losses(logps, zeros, logps + 2, mask, cliprange_value=0.5), ([2, 2], [0, 0])),
        (formulas.clipped_value_losses(logps, zeros, logps - 1, mask, cliprange_value=0.5),
         ([0.5 * 1.5**2, 0.5 * 3.5**2], [1, 1])),
        (formulas.ppo_rewards(logps, half, good, mask, mask, kl_coef=0.1), [-0.1 * math.log(2), 3 - 0.1 * math.log(2)]),
    ):  # fmt: skip
        for part, row in zip(*((found, expected) if isinstance(found, tuple) else ([found], [expected])), strict=True):
            torch.testing.assert_close(part, torch.tensor([row], dtype=torch.float32))
    assert formulas.group_advantages(torch.tensor([1.0, 0, 0, 1]), 4).tolist() == pytest.approx(
        [s / 2 / (math.sqrt(1 / 3) + 1e-4) for s in (1, -1, -1, 1)]
    )
    scores = formulas.reward_losses(torch.tensor([2.0]), torch.tensor([1.0]), center=0.5)
    assert scores.item() == pytest.approx(softplus(-1) + 0.5 * 9)


def test_where_the_ratio_is_clipped_there_is_no_gradient_and_without_old_log_probabilities_it_is_one():
    logps, old, _, _, advantages, mask = completions()
    logps.requires_grad_()
    losses, clipped = formulas.policy_losses(
        formulas.importance_ratio(logps, old, mask), advantages, mask, epsilon=0.1, epsilon_high=0.3
    )
    (grad,) = torch.autograd.grad(losses.sum(), logps)
    ratio = (logps - old).exp()
    expected = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.9) & (advantages < 0))
    assert torch.equal(clipped, expected.float() * mask)
    assert 0 < clipped.sum() < mask.sum()
    assert torch.equal(grad == 0, (clipped > 0) | (mask == 0))

    losses, clipped = formulas.policy_losses(
        formulas.importance_ratio(logps, None, mask), advantages, mask, epsilon=0.1
    )
    (grad,) = torch.autograd.grad(losses.sum(), logps)
    assert clipped.sum() == 0
    assert torch.equal(losses, -advantages * mask)
    assert torch.equal(grad, -advantages * mask)
