"""The losses of post-training, as functions of tensors.

The functions do not communicate or average. They return a number per token or per pair, and the caller divides by
denominators of the whole global batch. (In TRL denominators span a process or a micro-batch.) tests/post_training
compares values and gradients with TRL: DPO, reward, GRPO and RLOO with 1.16.0, PPO with 1.12.0.

Legend: B rows of a micro-batch, S tokens of a row, N completions of a whole rollout, G completions of one prompt. Masks
are fp32 zeros and ones. Unless stated otherwise, `mask` is [B, S] and marks the completions' tokens, and `logps`,
`old_logps` and `ref_logps` are [B, S] log-probabilities of the labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from megazpp.post_training.config import PairLoss, RewardScale, TokenLoss

AdvantageEstimator = Literal["grpo", "rloo"]
_ADVANTAGE_EPSILON, _WHITEN_EPSILON = 1e-4, 1e-8  # the values of TRL


class PairLosses(NamedTuple):
    """Results of DPO, each [B] fp32.

    Attributes:
        losses: losses of the pairs, with a gradient.
        chosen_rewards: implicit rewards of the preferred answers, without a gradient.
        rejected_rewards: implicit rewards of the rejected answers, without a gradient.
    """

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
    """Compute the losses of direct preference optimization.

    Args:
        policy_chosen: [B] sums of the policy's log-probabilities over the preferred answers.
        policy_rejected: [B] the same for the rejected answers.
        ref_chosen: [B] sums of the reference's log-probabilities over the preferred answers.
        ref_rejected: [B] the same for the rejected answers.
        beta: weight of the divergence from the reference.
        label_smoothing: share of wrong labels that the loss robust assumes.
        loss_types: Rafailov et al. 2023 (sigmoid), SLiC (hinge), Azar et al. 2023 (ipo), Chowdhury et al. 2024
            (robust), Chen et al. 2024 (nca_pair), Jung et al. 2024 (bco_pair without its running mean), Wu et al. 2024
            (sppo_hard), D'Oosterlinck et al. 2024 (apo_zero, apo_down), the likelihood of the preferred answers (sft).
        loss_weights: weight of each loss in the sum; None for 1 each.
        chosen_lengths: [B] tokens of the preferred answers, by which ipo divides.
        rejected_lengths: [B] tokens of the rejected answers, by which ipo divides.
        mean_chosen_length: mean number of tokens of a preferred answer in the whole step, by which sft divides.
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


def reward_losses(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    margins: torch.Tensor | None = None,
    center: float | None = None,
) -> torch.Tensor:
    """Compute the Bradley-Terry losses of pairs.

    Args:
        chosen: [B] scores of the preferred answers.
        rejected: [B] scores of the rejected answers.
        margins: [B] differences that the scores should have at least (Llama 2); None for 0.
        center: weight of a term that pulls the mean score to 0; None for no such term.
    Returns:
        [B] losses.
    """
    difference = chosen - rejected if margins is None else chosen - rejected - margins
    return -F.logsigmoid(difference) + (center or 0.0) * (chosen + rejected) ** 2


def group_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    *,
    scale: RewardScale = "group",
    estimator: AdvantageEstimator = "grpo",
) -> torch.Tensor:
    """Compute the advantage of each completion over the other completions of its prompt.

    Args:
        rewards: [N] rewards of the whole rollout, with the G completions of a prompt in sequence; NaN for no reward.
        num_generations: G.
        scale: divisor: the standard deviation of the group's rewards, of all N rewards (with rloo, of all N
            differences), or 1.
        estimator: baseline: the group's mean (grpo), or the mean of the group's other members (rloo).
    Returns:
        [N] advantages; 0 for a completion without a reward, or without others to compare it with.
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
    """Return the [rows, 1] standard deviations of [rows, n] numbers, ignoring NaN; NaN for fewer than two numbers."""
    count = (~x.isnan()).sum(dim=1, keepdim=True)
    return ((x - x.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True) / (count - 1)).sqrt()


class TokenLosses(NamedTuple):
    """Losses of tokens.

    Attributes:
        losses: [B, S] losses.
        clipped: [B, S], 1 where clipping removes the gradient.
    """

    losses: torch.Tensor
    clipped: torch.Tensor


def importance_ratio(
    logps: torch.Tensor, old_logps: torch.Tensor | None, mask: torch.Tensor, *, level: str = "token"
) -> torch.Tensor:
    """Compute the ratio of each token's probability to its probability under the policy that sampled it.

    Args:
        logps: log-probabilities of the policy.
        old_logps: log-probabilities of the policy that sampled the tokens; None if that is the same, so the ratio is 1.
        mask: mask of the tokens. The ratio is 1 elsewhere.
        level: "token" for [B, S] ratios of tokens, "sequence" for [B, 1] geometric means (GSPO).
    """
    # Log-probabilities outside the mask are arbitrary. Their exp could be inf, and inf * 0 is NaN.
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
    """Compute the clipped surrogate loss of PPO and GRPO, without an entropy or KL term; 0 outside `mask`.

    Args:
        ratio: ratios of `importance_ratio`.
        advantages: [B] advantages of rows, or [B, S] advantages of tokens.
        mask: mask of the tokens.
        epsilon: lower clip range, 1 - epsilon.
        epsilon_high: upper clip range, 1 + epsilon_high; None for `epsilon`.
        delta: largest ratio, which also bounds it where advantages are negative (INTELLECT-2); None for no bound.
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
    """Compute REINFORCE losses weighted by a truncated ratio without a gradient (CISPO); 0 outside `mask`.

    Args:
        logps: log-probabilities of the policy.
        ratio: ratios of `importance_ratio`.
        advantages: [B] advantages of rows.
        mask: mask of the tokens.
        highest: largest ratio.
    """
    advantages = advantages.unsqueeze(1)
    losses = -ratio.detach().clamp(max=highest) * advantages * torch.where(mask > 0, logps, 0.0)
    return TokenLosses(losses, ((ratio > highest) & (advantages > 0)).float() * mask)


def kl_to_reference(
    logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimate the divergence of each token from the reference (Schulman's k3); 0 outside `mask`.

    Args:
        logps: log-probabilities of the policy.
        ref_logps: log-probabilities of the reference.
        mask: mask of the tokens.
        ratio: ratios that multiply the estimates, for an unbiased gradient of the reverse divergence (DeepSeek-V3.2).
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
    """Compute [B, S] weights of token losses, whose weighted sum over a step is the loss of the step.

    Args:
        mask: mask of the tokens.
        loss_type: grpo gives equal weights to completions. dr_grpo gives equal weights to tokens, independently of the
            lengths. bnpo, dapo and cispo give each token its share of the step's tokens. (TRL's bnpo counts the tokens
            of a process's micro-batch.)
        num_completions: completions of the whole step on all ranks.
        num_tokens: tokens of the whole step on all ranks.
        max_completion_length: largest number of tokens of a completion.
    """
    match loss_type:
        case "grpo":
            return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_completions
        case "dr_grpo":
            return mask / (num_completions * max_completion_length)
        case "bnpo" | "dapo" | "cispo":
            return mask / (num_tokens.clamp(min=1) if isinstance(num_tokens, torch.Tensor) else max(num_tokens, 1))


def value_mask(mask: torch.Tensor, *, max_completion_length: int) -> torch.Tensor:
    """Return the mask of PPO's values: the completions' tokens, and the place after each that ended by itself.

    Args:
        mask: mask of the completions' tokens.
        max_completion_length: number of tokens of a completion that reached the limit, which has no place after it.
            (In TRL that is the longest completion of a batch.)
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
    """Compute [B, S] rewards of tokens: the penalty for divergence from the reference, and the score at the last value.

    Args:
        logps: log-probabilities of the policy.
        ref_logps: log-probabilities of the reference.
        scores: [B] scores of the completions.
        mask: mask of the completions' tokens.
        values_at: `value_mask` of `mask`.
        kl_coef: weight of the penalty.
    """
    kl = torch.where(mask > 0, logps - ref_logps, 0.0)
    following = F.pad(values_at, (0, 1))[:, 1:]
    return -kl_coef * kl + scores.unsqueeze(1) * values_at * (1 - following)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimates along rows, which PPO then whitens.

    Args:
        rewards: [B, S] rewards of tokens.
        values: [B, S] values.
        mask: `value_mask`; after its last place the value is 0.
        gamma: discount.
        lam: lambda of the estimation.
    Returns:
        [B, S] advantages, and [B, S] returns, which are the targets of the values.
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
    """Scale `x` to variance 1 and mean 0 over the masked places of the whole rollout; 0 outside `mask`.

    Args:
        x: [B, S] numbers.
        mask: [B, S] mask.
        sum_over_ranks: function that sums an fp64 tensor over the ranks with other rows. (TRL whitens per process.)
        shift_mean: False to keep the mean.
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
    """Compute PPO's clipped losses of values; 0 outside `mask`.

    Args:
        values: [B, S] values.
        old_values: [B, S] values before the first update.
        returns: [B, S] targets.
        mask: `value_mask`.
        cliprange_value: largest change of a value from its old value.
    """
    near = torch.minimum(torch.maximum(values, old_values - cliprange_value), old_values + cliprange_value)
    free, clamped = (values - returns).square(), (near - returns).square()
    return TokenLosses(0.5 * torch.maximum(free, clamped) * mask, (clamped > free).float() * mask)
