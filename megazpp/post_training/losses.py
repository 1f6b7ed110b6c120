"""The losses of post-training, as functions of tensors.

Nothing here communicates or averages: a function gives a number for each token or each pair, and whoever calls it
divides by denominators of the whole global batch (TRL's span a process, or a micro-batch). tests/post_training compares
values and gradients with those of TRL: DPO, reward, GRPO and RLOO of 1.16.0, PPO of 1.12.0.

Legend: B rows of a micro-batch, S tokens of a row, N completions of a whole rollout, G completions of one prompt. Masks
are fp32 of zeros and ones; without another word `mask` is [B, S] and has the completions' tokens, and log-probabilities
`logps`, `old_logps` and `ref_logps` are [B, S], of the labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

PairLoss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sft"
]
TokenLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
RewardScale = Literal["group", "batch", "none"]
AdvantageEstimator = Literal["grpo", "rloo"]
_ADVANTAGE_EPSILON, _WHITEN_EPSILON = 1e-4, 1e-8  # TRL's


class PairLosses(NamedTuple):
    """DPO's values, each [B] fp32: the loss, with a gradient, and without one the implicit rewards of both answers."""

    losses: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


def dpo_losses(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    loss_types: Sequence[PairLoss] = ("sigmoid",),
    loss_weights: Sequence[float] | None = None,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    mean_chosen_length: float | torch.Tensor = 1.0,
) -> PairLosses:
    """Direct preference optimization of pairs, by [B] sums of the log-probabilities of their answers.

    Args:
        beta: how strongly the policy is held to the reference.
        label_smoothing: the share of labels that robust takes to be wrong.
        loss_types: Rafailov et al. 2023 (sigmoid), SLiC (hinge), Azar et al. 2023 (ipo), Chowdhury et al. 2024
            (robust), Chen et al. 2024 (nca_pair), Jung et al. 2024 (bco_pair without its running mean), Wu et al. 2024
            (sppo_hard), D'Oosterlinck et al. 2024 (apo_zero, apo_down), the likelihood of the preferred answers (sft).
        loss_weights: of each of them in the sum; None for 1 each.
        chosen_lengths, rejected_lengths: [B] tokens of the answers, by which ipo divides.
        mean_chosen_length: tokens of a preferred answer, the mean of the whole step, by which sft divides.
    """
    chosen, rejected = policy_chosen - ref_chosen, policy_rejected - ref_rejected
    delta, total = beta * (chosen - rejected), torch.zeros_like(chosen)
    for loss_type, weight in zip(loss_types, loss_weights or [1.0] * len(loss_types), strict=True):
        match loss_type:
            case "sigmoid":
                losses = -F.logsigmoid(delta)
            case "hinge":
                losses = torch.relu(1 - delta)
            case "ipo":
                assert chosen_lengths is not None
                assert rejected_lengths is not None
                per_token = chosen / chosen_lengths.clamp(min=1) - rejected / rejected_lengths.clamp(min=1)
                losses = (per_token - 1 / (2 * beta)) ** 2
            case "robust":
                right, wrong = -F.logsigmoid(delta), -F.logsigmoid(-delta)
                losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
            case "nca_pair":
                down = F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected)
                losses = -F.logsigmoid(beta * chosen) - 0.5 * down
            case "bco_pair":
                losses = -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)
            case "sppo_hard":
                losses = (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
            case "apo_zero":
                losses = 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
            case "apo_down":
                losses = torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(delta)
            case "sft":
                losses = -policy_chosen / mean_chosen_length
        total = total + weight * losses
    return PairLosses(total, (beta * chosen).detach(), (beta * rejected).detach())


def reward_losses(chosen: torch.Tensor, rejected: torch.Tensor, *, center: float | None = None) -> torch.Tensor:
    """[B] losses of [B] scores of the answers of pairs (Bradley-Terry), `center` pulls their mean to 0."""
    return -F.logsigmoid(chosen - rejected) + (center or 0.0) * (chosen + rejected) ** 2


def group_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    *,
    scale: RewardScale = "group",
    estimator: AdvantageEstimator = "grpo",
) -> torch.Tensor:
    """The advantage of each completion over the others of its prompt.

    Args:
        rewards: [N] of the whole rollout, the G completions of a prompt beside each other; NaN where there is none.
        num_generations: G.
        scale: divide by the standard deviation of the group's rewards, of all N (rloo: of the differences), or by 1.
        estimator: subtract the group's mean (grpo), or the mean of its other members, of which there is one (rloo).
    Returns:
        [N]; 0 for a completion without a reward, or without others to compare it with.
    """
    groups = rewards.view(-1, num_generations)
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    if estimator == "rloo":
        count = (~groups.isnan()).sum(dim=1, keepdim=True)
        advantages = advantages * count / (count - 1)
    if scale == "group":
        advantages = advantages / (nanstd(groups) + _ADVANTAGE_EPSILON)
    elif scale == "batch":
        spread = nanstd((groups if estimator == "grpo" else advantages).reshape(1, -1))
        advantages = advantages / (spread + _ADVANTAGE_EPSILON)
    return advantages.nan_to_num(nan=0.0).reshape(-1)


def nanstd(x: torch.Tensor) -> torch.Tensor:
    """[rows, 1] standard deviations of [rows, n]; NaN of fewer than two numbers."""
    count = (~x.isnan()).sum(dim=1, keepdim=True)
    return ((x - x.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True) / (count - 1)).sqrt()


class TokenLosses(NamedTuple):
    """[B, S] losses of tokens, and 1 where clipping took the gradient away."""

    losses: torch.Tensor
    clipped: torch.Tensor


def importance_ratio(
    logps: torch.Tensor, old_logps: torch.Tensor | None, mask: torch.Tensor, *, level: str = "token"
) -> torch.Tensor:
    """[B, S] probability of each token over that of the policy which drew it, or [B, 1] their geometric means (GSPO).

    Without `old_logps` the same policy drew them, and the ratio is 1, as it is outside of `mask`.
    """
    # outside of the mask a log-probability may be anything: exp of it must not become an inf that 0 turns into NaN
    log_ratio = torch.where(mask > 0, logps - (logps.detach() if old_logps is None else old_logps), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def policy_losses(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> TokenLosses:
    """The clipped surrogate of PPO and GRPO, without an entropy or KL term; 0 outside of `mask`.

    Args:
        advantages: [B] of rows or [B, S] of tokens.
        epsilon, epsilon_high, delta: the ratio counts from 1 - epsilon to 1 + epsilon_high (None: epsilon), as delta
            at most, where advantages are negative either (INTELLECT-2).
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    high = epsilon if epsilon_high is None else epsilon_high
    bounded = ratio.clamp(max=delta or math.inf)
    losses = torch.maximum(-advantages * bounded, -advantages * ratio.clamp(1 - epsilon, 1 + high))
    clipped = ((bounded < 1 - epsilon) & (advantages < 0)) | ((bounded > 1 + high) & (advantages > 0))
    return TokenLosses(losses * mask, clipped.float() * mask)


def cispo_losses(
    logps: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, highest: float
) -> TokenLosses:
    """REINFORCE by a ratio of at most `highest`, without its gradient (CISPO); else as `policy_losses`, of rows."""
    advantages = advantages.unsqueeze(1)
    losses = -ratio.detach().clamp(max=highest) * advantages * torch.where(mask > 0, logps, 0.0)
    return TokenLosses(losses, ((ratio > highest) & (advantages > 0)).float() * mask)


def kl_to_reference(
    logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, S] estimates of the divergence from the reference (Schulman's k3); 0 outside of `mask`.

    Times `ratio` they have the gradient of the reverse divergence, without bias (DeepSeek-V3.2).
    """
    log_ratio = torch.where(mask > 0, ref_logps - logps, 0.0)
    divergence = log_ratio.exp() - log_ratio - 1
    return divergence if ratio is None else divergence * ratio


def token_weights(
    mask: torch.Tensor,
    loss_type: TokenLoss,
    *,
    num_completions: float | torch.Tensor,
    num_tokens: float | torch.Tensor,
    max_completion_length: int,
) -> torch.Tensor:
    """[B, S] weights so that the loss of an optimizer step is the sum of its tokens' losses times them.

    Args:
        loss_type: grpo gives each completion the same weight, dr_grpo each token, whatever the lengths; bnpo and dapo
            give each token its share of the step's (TRL's bnpo: of one process and micro-batch's); cispo as dapo.
        num_completions, num_tokens: of the whole step and all ranks.
    """
    match loss_type:
        case "grpo":
            return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_completions
        case "dr_grpo":
            return mask / (num_completions * max_completion_length)
        case "bnpo" | "dapo" | "cispo":
            return mask / (num_tokens.clamp(min=1) if isinstance(num_tokens, torch.Tensor) else max(num_tokens, 1))


def value_mask(mask: torch.Tensor, *, max_completion_length: int) -> torch.Tensor:
    """The places of PPO's values: completions' tokens, and the place after a completion that ended before the limit.

    A completion of `max_completion_length` tokens has no place after it. (TRL: the longest of a batch.)
    """
    after = torch.zeros_like(mask)
    after[:, 1:] = (mask[:, :-1] > 0) & (mask[:, 1:] == 0)
    return mask + after * (mask.sum(dim=1, keepdim=True) < max_completion_length)


def ppo_rewards(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    scores: torch.Tensor,
    mask: torch.Tensor,
    values_at: torch.Tensor,
    *,
    kl_coef: float,
) -> torch.Tensor:
    """[B, S] rewards of tokens: the penalty for leaving the reference, and the [B] score where the last value is.

    `values_at` is the `value_mask` of `mask`.
    """
    kl = torch.where(mask > 0, logps - ref_logps, 0.0)
    following = F.pad(values_at, (0, 1))[:, 1:]
    return -kl_coef * kl + scores.unsqueeze(1) * values_at * (1 - following)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation along rows: [B, S] advantages, and the returns that values are trained towards.

    `mask` is a `value_mask`; after its last place a row is worth nothing. PPO then whitens the tokens' advantages.
    """
    values = values * mask
    following, advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for place in reversed(range(values.shape[1])):
        delta = rewards[:, place] + gamma * following - values[:, place]
        advantage = (delta + gamma * lam * advantage) * mask[:, place]
        advantages[:, place], following = advantage, values[:, place]
    return advantages, advantages + values


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
    shift_mean: bool = True,
) -> torch.Tensor:
    """`x` with variance 1 (and mean 0) over the masked places of the whole rollout batch; 0 outside of `mask`.

    `sum_over_ranks` sums an fp64 tensor over the ranks that hold other rows (TRL whitens each process alone);
    `shift_mean` False keeps the mean.
    """
    x64, mask64 = x.double(), mask.double()
    sums = sum_over_ranks(torch.stack((mask64.sum(), (x64 * mask64).sum(), (x64.square() * mask64).sum())))
    count, mean = sums[0], sums[1] / sums[0].clamp(min=1)
    variance = (sums[2] - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    whitened = (x64 - mean) * torch.rsqrt(variance + _WHITEN_EPSILON)
    return ((whitened if shift_mean else whitened + mean) * mask64).to(x.dtype)


def clipped_value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, cliprange_value: float
) -> TokenLosses:
    """PPO's losses of [B, S] values that may move so far from the old ones; 0 outside of the `value_mask`."""
    near = torch.minimum(torch.maximum(values, old_values - cliprange_value), old_values + cliprange_value)
    free, clamped = (values - returns).square(), (near - returns).square()
    return TokenLosses(0.5 * torch.maximum(free, clamped) * mask, (clamped > free).float() * mask)
