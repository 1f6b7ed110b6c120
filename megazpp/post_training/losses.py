"""The losses of post-training, as functions of tensors.

The functions do not communicate. Only `whiten` sums over ranks, by its argument `sum_over_ranks`. A loss is a number
per token or per pair. objectives.py averages these numbers with counts of the whole global batch. (TRL uses counts of a
process or a micro-batch.) tests/post_training compares values and gradients with TRL: DPO, reward, GRPO and RLOO with
1.16.0, PPO with 1.12.0.

Legend: B rows of a micro-batch, S tokens of a row, N completions of a whole generation on all ranks, G completions of
one prompt. Masks are fp32 zeros and ones. Unless stated otherwise, `mask` is [B, S] and marks the completions' tokens,
and `logps`, `old_logps` and `ref_logps` are [B, S] log-probabilities of the labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from megazpp.post_training.config import PairLoss, RewardScale, TokenLoss

AdvantageEstimator = Literal["grpo", "rloo"]
_ADVANTAGE_EPSILON, _WHITEN_EPSILON = 1e-4, 1e-8  # TRL's values; they avoid a division by 0


class PairLosses(NamedTuple):
    """Results of direct preference optimization (DPO) for B pairs of answers, each [B] fp32.

    An answer's implicit reward is beta times the log-ratio of its probability under policy and reference model.

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
    """Compute the losses of direct preference optimization (DPO) for B pairs of answers.

    Args:
        policy_chosen: [B] sums of the policy's log-probabilities over the preferred answers.
        policy_rejected: [B] sums of the policy's log-probabilities over the rejected answers.
        ref_chosen: [B] sums of the reference model's log-probabilities over the preferred answers.
        ref_rejected: [B] sums of the reference model's log-probabilities over the rejected answers.
        beta: weight of the divergence from the reference model.
        label_smoothing: fraction of wrong preferences that the loss `robust` assumes.
        loss_types: Rafailov et al. 2023 (sigmoid), SLiC (hinge), Azar et al. 2023 (ipo), Chowdhury et al. 2024
            (robust), Chen et al. 2024 (nca_pair), Jung et al. 2024 (bco_pair without its running mean), Wu et al. 2024
            (sppo_hard), D'Oosterlinck et al. 2024 (apo_zero, apo_down), the likelihood of the preferred answers (sft).
        loss_weights: weight of each loss in the sum; None for 1 each.
        chosen_lengths: [B] numbers of tokens of the preferred answers, by which `ipo` divides.
        rejected_lengths: [B] numbers of tokens of the rejected answers, by which `ipo` divides.
        mean_chosen_length: mean number of tokens of a preferred answer in the whole step, by which `sft` divides.
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
    """Compute the Bradley-Terry losses of a reward model for B pairs of answers.

    Args:
        chosen: [B] scores of the preferred answers.
        rejected: [B] scores of the rejected answers.
        margins: [B] numbers by which the score of the preferred answer should at least exceed the score of the rejected
            answer (Llama 2); None for 0.
        center: weight of a term that pulls the mean score to 0; None for no such term.
    Returns:
        [B] fp32 losses of the pairs.
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
    """Compute the advantage of each completion over the other completions of its prompt, for GRPO and RLOO.

    Args:
        rewards: [N] rewards of all completions of a generation, with the G completions of a prompt in sequence; NaN for
            a completion without a reward.
        num_generations: G, the number of completions of each prompt.
        scale: divisor of the advantages: the standard deviation of the rewards of the prompt's completions ("group"),
            of all N rewards ("batch"; with rloo, of all N differences from the baseline), or 1 ("none").
        estimator: baseline of a reward: the mean over all completions of the prompt ("grpo"), or over its other
            completions ("rloo").
    Returns:
        [N] advantages; 0 for a completion without a reward, or if no other completion of the prompt has a reward.
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
    """Return the standard deviation of each row of [rows, n] numbers, as [rows, 1].

    NaN entries are left out. The result is NaN for a row with one number, and 0 for a row without numbers.
    """
    count = (~x.isnan()).sum(dim=1, keepdim=True)
    return ((x - x.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True) / (count - 1)).sqrt()


class TokenLosses(NamedTuple):
    """Losses of the tokens of B rows with S tokens each, before they are weighted and summed.

    Attributes:
        losses: [B, S] fp32 losses of the tokens.
        clipped: [B, S] fp32, for metrics: 1 where the clip range removes the token's gradient. For CISPO, 1 where the
            ratio is truncated and the advantage is positive; the token keeps its gradient.
    """

    losses: torch.Tensor
    clipped: torch.Tensor


def importance_ratio(
    logps: torch.Tensor, old_logps: torch.Tensor | None, mask: torch.Tensor, *, level: str = "token"
) -> torch.Tensor:
    """Compute the ratio of each token's probability to its probability under the policy that sampled the token.

    Args:
        logps: [B, S] log-probabilities of the policy, for B completions in rows of S tokens.
        old_logps: [B, S] log-probabilities of the policy that sampled the tokens; None if the policy has not changed,
            so that the ratio is 1.
        mask: [B, S], 1 at the completions' tokens. The ratio is 1 elsewhere.
        level: "token" for [B, S] ratios of tokens, "sequence" for [B, 1] geometric means over a completion (GSPO).
    """
    # Log-probabilities outside the mask are arbitrary: their exp could be infinite, and infinity times 0 is NaN
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
        ratio: [B, S] or [B, 1] probability ratios, from `importance_ratio`, for B completions in rows of S tokens.
        advantages: [B] advantages of completions, or [B, S] advantages of tokens.
        mask: [B, S], 1 at the completions' tokens.
        epsilon: the lower limit of the clip range is 1 - epsilon.
        epsilon_high: the upper limit of the clip range is 1 + epsilon_high; None for `epsilon`.
        delta: upper limit of the ratio where advantages are negative (INTELLECT-2); None for no limit.
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
    """Compute the losses of CISPO: REINFORCE weighted by a truncated ratio without a gradient; 0 outside `mask`.

    Args:
        logps: [B, S] log-probabilities of the policy, for B completions in rows of S tokens.
        ratio: [B, S] or [B, 1] probability ratios, from `importance_ratio`.
        advantages: [B] advantages of completions.
        mask: [B, S], 1 at the completions' tokens.
        highest: value at which ratios are truncated.
    """
    advantages = advantages.unsqueeze(1)
    losses = -ratio.detach().clamp(max=highest) * advantages * torch.where(mask > 0, logps, 0.0)
    return TokenLosses(losses, ((ratio > highest) & (advantages > 0)).float() * mask)


def kl_to_reference(
    logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimate the policy's divergence from the reference model at each token (Schulman's k3); 0 outside `mask`.

    Args:
        logps: [B, S] log-probabilities of the policy, for B completions in rows of S tokens.
        ref_logps: [B, S] log-probabilities of the reference model.
        mask: [B, S], 1 at the completions' tokens.
        ratio: [B, S] or [B, 1] probability ratios that multiply the estimates, for an unbiased gradient of the reverse
            divergence (DeepSeek-V3.2); None to leave the estimates unchanged.
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
    """Compute the weights of GRPO's token losses, whose weighted sum over a step is the loss of the step.

    Args:
        mask: [B, S], 1 at the completions' tokens, for B completions in rows of S tokens.
        loss_type: grpo gives equal weights to all completions. dr_grpo divides by the largest possible number of
            tokens. bnpo, dapo and cispo divide by the number of tokens of the step. (TRL's bnpo divides by the number
            of tokens of a process's micro-batch.)
        num_completions: number of completions of the whole step on all ranks.
        num_tokens: number of the completions' tokens in the whole step on all ranks.
        max_completion_length: largest allowed number of tokens of a completion.

    Returns:
        [B, S] fp32 weights, 0 outside `mask`.
    """
    match loss_type:
        case "grpo":
            return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_completions
        case "dr_grpo":
            return mask / (num_completions * max_completion_length)
        case "bnpo" | "dapo" | "cispo":
            return mask / (num_tokens.clamp(min=1) if isinstance(num_tokens, torch.Tensor) else max(num_tokens, 1))


def value_mask(mask: torch.Tensor, *, max_completion_length: int) -> torch.Tensor:
    """Return the positions at which PPO uses the value head's output, as a [B, S] mask.

    They are the completions' tokens, and one position after each completion that ended before the token limit.

    Args:
        mask: [B, S], 1 at the completions' tokens, for B completions in rows of S tokens.
        max_completion_length: token limit of completions; a completion of this length gets no further position. (TRL
            uses the longest completion of a batch instead.)
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
    """Compute PPO's rewards of tokens.

    Each token gets a penalty for the policy's divergence from the reference model. The last position of `values_at` in
    each row also gets the completion's score.

    Args:
        logps: [B, S] log-probabilities of the policy, for B completions in rows of S tokens.
        ref_logps: [B, S] log-probabilities of the reference model.
        scores: [B] scores of the completions.
        mask: [B, S], 1 at the completions' tokens.
        values_at: [B, S] result of `value_mask`.
        kl_coef: weight of the penalty.

    Returns:
        [B, S] rewards.
    """
    kl = torch.where(mask > 0, logps - ref_logps, 0.0)
    following = F.pad(values_at, (0, 1))[:, 1:]
    return -kl_coef * kl + scores.unsqueeze(1) * values_at * (1 - following)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimates (GAE) along each row, which PPO then whitens.

    Args:
        rewards: [B, S] rewards of tokens, for B completions in rows of S tokens.
        values: [B, S] outputs of the value head.
        mask: [B, S] result of `value_mask`; after its last position in a row the value counts as 0.
        gamma: discount of later rewards.
        lam: lambda of the estimation, the weight of longer estimates.
    Returns:
        [B, S] advantages, and [B, S] returns, which are the targets of the value head.
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
    """Scale `x` to variance 1 and mean 0 over all masked positions of a generation on all ranks; 0 outside `mask`.

    Args:
        x: [B, S] numbers, one for each of the S tokens of this rank's B completions.
        mask: [B, S], 1 at the positions that count.
        sum_over_ranks: function that sums an fp64 tensor over the data ranks. (TRL whitens on each process alone.)
        shift_mean: False to keep the mean of `x`.
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
    """Compute PPO's clipped losses of the value head; 0 outside `mask`.

    Args:
        values: [B, S] outputs of the value head, for B completions in rows of S tokens.
        old_values: [B, S] outputs of the value head before the first update with these completions.
        returns: [B, S] targets for the value head.
        mask: [B, S] result of `value_mask`.
        cliprange_value: change of a value from its old value beyond which the loss is clipped.
    """
    near = torch.minimum(torch.maximum(values, old_values - cliprange_value), old_values + cliprange_value)
    free, clamped = (values - returns).square(), (near - returns).square()
    return TokenLosses(0.5 * torch.maximum(free, clamped) * mask, (clamped > free).float() * mask)
