"""The objectives of post-training, which compute a micro-batch's contribution to the step's loss, and metrics.

    sft     `LanguageModelLoss` of pretraining
    reward  PreferenceLoss with scores of the scalar head
    dpo     PreferenceLoss with log-probabilities of the policy and the reference model
    grpo    PolicyLoss
    ppo     PolicyLoss with losses of the policy and the value head

losses.py has the formulas. This file has the forward, the counts of the whole step by which losses are divided, and the
metrics, which have TRL's names.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.data import PairBatch, RolloutBatch
from megazpp.post_training.losses import (
    cispo_losses,
    clipped_value_losses,
    dpo_losses,
    importance_ratio,
    kl_to_reference,
    policy_losses,
    reward_losses,
    token_weights,
)
from megazpp.training.objective import Evaluator, Objective, add_router_gradient, counted_tokens

# Function that gets a batch of B rows with S tokens, and returns the reference model's [B, S] fp32 log-probabilities of
# the batch's labels
Logps = Callable[[Any], torch.Tensor]


class TokenOutputs(NamedTuple):
    """Outputs of the model's forward with a `TokenHead`, for B rows of S tokens. Outputs not requested are None.

    Attributes:
        losses: [B, S] fp32 cross entropy of each label, which is its negative log-probability.
        entropy: [B, S] fp32 entropy of the predicted distribution of each label, without a gradient.
        values: [B, S] fp32 outputs of the scalar head.
        router_loss: [B] fp32 losses of the experts' routers, see `Head` in model/gpt.py; None without experts.
    """

    losses: torch.Tensor | None
    entropy: torch.Tensor | None
    values: torch.Tensor | None
    router_loss: torch.Tensor | None


class TokenHead(NamedTuple):
    """A head of the model's forward that computes log-probabilities, entropies and values of tokens (`TokenOutputs`).

    Attributes:
        labels: [B, S] int64, the token that follows each token of B rows with S tokens; None to compute only values.
        temperature: divisor of the logits.
        with_entropy: True to compute entropies.
        with_values: True to compute the outputs of the scalar head, which the model must have.
    """

    labels: torch.Tensor | None
    temperature: float = 1.0
    with_entropy: bool = False
    with_values: bool = False

    def __call__(self, model: GPTModel, x: torch.Tensor, router_loss: torch.Tensor | None) -> TokenOutputs:
        values = model.values(x) if self.with_values else None
        if self.labels is None:
            return TokenOutputs(None, None, values, router_loss)
        options: dict[str, Any] = {"temperature": self.temperature, "with_entropy": self.with_entropy}
        losses, entropy = model.token_losses(x, self.labels, **options)
        return TokenOutputs(losses, entropy, values, router_loss)


class StepSums:
    """The metrics of one training step: means and maxima over its micro-batches and all data ranks, by name."""

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims
        self._sums: dict[str, torch.Tensor] = {}
        self._largest: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add the values of a micro-batch to the mean with the name `name`.

        Args:
            name: name of the metric.
            values: tensor of any shape.
            mask: weight of each value, of the same shape; None for 1 each.
        """
        weights = torch.ones_like(values) if mask is None else mask
        pair = torch.stack(((values.detach() * weights).sum(dtype=torch.float64), weights.sum(dtype=torch.float64)))
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def largest(self, name: str, value: torch.Tensor) -> None:
        """Include the value of a micro-batch, a scalar, in the maximum with the name `name`."""
        value = value.detach().double()
        self._largest[name] = torch.maximum(self._largest[name], value) if name in self._largest else value

    def means(self) -> dict[str, float]:
        """Return the means and maxima of the step by metric name, equal on all ranks.

        All ranks call this, and each host waits for its device. A mean is missing in the result if it got no values, or
        if the weights of its values are all 0. A maximum is missing if it got no values.
        """
        found: dict[str, float] = {}
        if self._sums:
            totals = self._dims.sum_over_data_(torch.stack(list(self._sums.values()))).tolist()
            found |= {name: s / n for name, (s, n) in zip(self._sums, totals, strict=True) if n}
        if self._largest:
            values = self._dims.world.max_(torch.stack(list(self._largest.values()))).tolist()
            found |= dict(zip(self._largest, values, strict=True))
        return found


class PreferenceLoss:
    """The objectives reward and dpo: the loss of pairs of answers, averaged over all pairs of the step.

    Args:
        config: flags of the objective.
        dims: parallel layout.
        reference: function that computes the reference model's log-probabilities, for batches of dpo without
            `ref_logps`; None if all batches have `ref_logps`, or for the objective reward.
    """

    def __init__(self, config: PostTrainingConfig, dims: ParallelDims, reference: Logps | None = None) -> None:
        self._config, self._dims, self._reference = config, dims, reference
        # Set by `begin_step`: the number of pairs of the step on all data ranks, and with --loss-type sft the mean
        # number of tokens of the preferred answers of these pairs
        self._sums, self._pairs = StepSums(dims), 1.0
        self._mean_length: torch.Tensor | float = 1.0

    def begin_step(self, batches: Sequence[PairBatch]) -> None:
        self._pairs = self._dims.data_size * sum(len(batch.tokens) // 2 for batch in batches)
        if "sft" in self._config.losses:
            chosen = torch.stack([batch.loss_mask.chunk(2)[0].sum(dtype=torch.float64) for batch in batches]).sum()
            self._mean_length = (self._dims.sum_over_data_(chosen) / self._pairs).float().clamp(min=1.0)
        self._sums = StepSums(self._dims)

    def loss(self, model: GPTModel, batch: PairBatch) -> torch.Tensor:
        compute = self._reward if self._config.objective == "reward" else self._dpo
        losses, outputs = compute(model, batch)
        # The losses of routers are averaged over rows, and a pair has two rows
        return add_router_gradient(losses.sum() / self._pairs, outputs.router_loss, 2 * self._pairs)

    def metrics(self) -> Mapping[str, float]:
        return self._sums.means()

    def _forward(self, model: GPTModel, batch: PairBatch, head: TokenHead) -> TokenOutputs:
        """Run the model's forward on all rows of a batch, and return the outputs of `head`."""
        counted = counted_tokens(model, batch.loss_mask)
        return model(batch.tokens, position_ids=batch.position_ids, counted=counted, head=head)

    def _reward(self, model: GPTModel, batch: PairBatch) -> tuple[torch.Tensor, TokenOutputs]:
        """Return the [B] losses of a reward model for B pairs of answers, and the outputs of the model's forward."""
        outputs = self._forward(model, batch, TokenHead(None, with_values=True))
        assert outputs.values is not None
        chosen, rejected = scores_of(outputs.values, batch.loss_mask).chunk(2)
        self._sums.add("accuracy", (chosen > rejected).float())
        self._sums.add("margin", chosen - rejected)
        self._sums.add("mean_reward", torch.cat((chosen, rejected)))
        center = self._config.center_rewards_coefficient
        return reward_losses(chosen, rejected, margins=batch.margins, center=center), outputs

    def _dpo(self, model: GPTModel, batch: PairBatch) -> tuple[torch.Tensor, TokenOutputs]:
        """Return the [B] losses of DPO for B pairs of answers, and the outputs of the policy's forward."""
        reference = batch.ref_logps
        if reference is None:
            assert self._reference is not None, "dpo needs a reference model"
            reference = (self._reference(batch) * batch.loss_mask).sum(dim=1)
        outputs = self._forward(model, batch, TokenHead(batch.labels))
        assert outputs.losses is not None
        logps, lengths = -(outputs.losses * batch.loss_mask).sum(dim=1), batch.loss_mask.sum(dim=1)
        found = dpo_losses(
            *logps.chunk(2),
            *reference.chunk(2),
            beta=self._config.beta_or_default,
            label_smoothing=self._config.label_smoothing,
            loss_types=self._config.losses,
            loss_weights=self._config.loss_weights,
            chosen_lengths=lengths.chunk(2)[0],
            rejected_lengths=lengths.chunk(2)[1],
            mean_chosen_length=self._mean_length,
        )
        self._sums.add("rewards/chosen", found.chosen_rewards)
        self._sums.add("rewards/rejected", found.rejected_rewards)
        self._sums.add("rewards/margins", found.chosen_rewards - found.rejected_rewards)
        self._sums.add("rewards/accuracies", (found.chosen_rewards > found.rejected_rewards).float())
        for name, part in zip(("chosen", "rejected"), logps.chunk(2), strict=True):
            self._sums.add(f"logps/{name}", part)
        return found.losses, outputs


class PolicyLoss:
    """The objectives grpo and ppo: the clipped surrogate loss of sampled completions.

    Args:
        config: flags of the objective.
        dims: parallel layout.
        temperature: temperature at which the completions were sampled.
        rollout_metrics: function that returns metrics of the sampled completions, which are added to the loss's own
            metrics.
    """

    def __init__(
        self,
        config: PostTrainingConfig,
        dims: ParallelDims,
        *,
        temperature: float,
        rollout_metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._config, self._dims, self._temperature = config, dims, temperature
        self._rollout_metrics, self._sums = rollout_metrics, StepSums(dims)
        # Set by `begin_step`, over all data ranks: the numbers of the step's completions, of their trained tokens, and
        # of the positions at which the value head is trained
        self._completions, self._tokens, self._values = (torch.tensor(1.0) for _ in range(3))

    def begin_step(self, batches: Sequence[RolloutBatch]) -> None:
        counts = [
            torch.stack([mask.sum(dtype=torch.float64) for mask in (batch.loss_mask, _value_mask(batch))])
            for batch in batches
        ]
        self._tokens, self._values = self._dims.sum_over_data_(torch.stack(counts).sum(dim=0)).float().clamp(min=1.0)
        self._completions = self._tokens.new_tensor(self._dims.data_size * sum(len(batch.tokens) for batch in batches))
        self._sums = StepSums(self._dims)

    def loss(self, model: GPTModel, batch: RolloutBatch) -> torch.Tensor:
        config, mask = self._config, batch.loss_mask
        assert batch.advantages is not None
        ppo = config.objective == "ppo"
        outputs: TokenOutputs = model(
            batch.tokens,
            position_ids=batch.position_ids,
            counted=counted_tokens(model, mask),
            head=TokenHead(batch.labels, self._temperature, with_entropy=True, with_values=ppo),
        )
        assert outputs.losses is not None
        assert outputs.entropy is not None
        logps = -outputs.losses
        ratio = importance_ratio(logps, batch.old_logps, mask, level=config.importance_sampling_level)
        if config.loss == "cispo":
            highest = config.epsilon_high or config.epsilon
            policy = cispo_losses(logps, ratio, batch.advantages, mask, highest=highest)
        else:
            policy = policy_losses(
                ratio,
                batch.advantages,
                mask,
                epsilon=config.cliprange if ppo else config.epsilon,
                epsilon_high=config.epsilon_high,
                delta=config.delta,
            )
        self._sums.add("entropy", outputs.entropy, mask)
        # With one ratio per completion (GSPO), all tokens of a completion together count once in the metric clip_ratio
        counts = mask if ratio.shape == mask.shape else mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        self._sums.add("clip_ratio", policy.clipped, counts)
        # Log how much the log-probabilities at which tokens were sampled differ from the log-probabilities that a
        # training forward computes with the same weights
        if batch.sampling_logps is not None:
            drawn_by = logps if batch.old_logps is None else batch.old_logps
            difference = ((drawn_by - batch.sampling_logps) * mask).abs()
            self._sums.add("sampling_logp_difference/mean", difference, mask)
            self._sums.largest("sampling_logp_difference/max", difference.max())
        if ppo:
            return add_router_gradient(self._ppo(policy.losses, outputs, batch), outputs.router_loss, self._completions)
        losses = policy.losses
        if batch.ref_logps is not None:
            kl = kl_to_reference(logps, batch.ref_logps, mask, ratio if config.use_bias_correction_kl else None)
            losses = losses + config.beta_or_default * kl
            self._sums.add("kl", kl, mask)
        weights = token_weights(
            mask,
            config.loss,
            num_completions=self._completions,
            num_tokens=self._tokens,
            max_completion_length=config.max_completion_length,
        )
        return add_router_gradient((losses * weights).sum(), outputs.router_loss, self._completions)

    def metrics(self) -> Mapping[str, float]:
        return {**self._rollout_metrics(), **self._sums.means()}

    def _ppo(self, policy: torch.Tensor, outputs: TokenOutputs, batch: RolloutBatch) -> torch.Tensor:
        """Return PPO's loss of a micro-batch: the policy's loss plus the weighted loss of the value head.

        Args:
            policy: [B, S] losses of the policy, for B completions in rows of S tokens.
            outputs: outputs of the model's forward.
            batch: the micro-batch.
        """
        assert outputs.values is not None
        assert batch.values is not None
        assert batch.returns is not None
        at = _value_mask(batch)
        values = clipped_value_losses(
            outputs.values, batch.values, batch.returns, at, cliprange_value=self._config.cliprange_value
        )
        self._sums.add("loss/policy_avg", policy, batch.loss_mask)
        self._sums.add("loss/value_avg", values.losses, at)
        self._sums.add("val/clipfrac_avg", values.clipped, at)
        return policy.sum() / self._tokens + self._config.vf_coef * values.losses.sum() / self._values


@dataclass
class ObjectiveEvaluator(Evaluator):
    """An evaluator of the mean loss over the first global batches of a held-out dataset, which also logs metrics.

    Each logged metric is the mean over the global batches that have a value for it.

    Args:
        objective: the training's objective, whose loss is a mean over one global batch.
        log: function that prints a line with the metrics.
    """

    objective: Objective
    log: Callable[[str], None]

    def mean_loss(self, steps: Iterable[Sequence[Any]]) -> float:
        """Return the mean loss over global batches, equal on all ranks, and log the means of the metrics.

        Args:
            steps: this rank's micro-batches of each global batch.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        found: dict[str, list[float]] = {}
        for batches in steps:
            self.objective.begin_step(batches)
            for batch in batches:
                total += self.objective.loss(self.model, batch)
            for name, value in self.objective.metrics().items():
                found.setdefault(name, []).append(value)
        if found:
            means = (f"{name}: {statistics.fmean(values):.4g}" for name, values in found.items())
            self.log(f" validation | {' | '.join(means)} |")
        return float(self.dims.sum_over_data_(total)) / self.iterations


def scores(model: GPTModel, batch: PairBatch | RolloutBatch, *, pad: int | None = None) -> torch.Tensor:
    """Compute a reward model's [B] fp32 scores, one for each of B rows of prompt and answer.

    Args:
        model: model with a scalar head.
        batch: rows to score.
        pad: id of the padding token. The score is then the head's output at the last token of the answer that is not
            this token, as in transformers. None takes the output at the last token of the answer.
    """
    head = TokenHead(None, with_values=True)
    outputs: TokenOutputs = model(batch.tokens, position_ids=batch.position_ids, head=head)
    assert outputs.values is not None
    if pad is None:
        return scores_of(outputs.values, batch.loss_mask)
    places, last = torch.arange(batch.tokens.shape[1], device=batch.tokens.device), last_places(batch.loss_mask)
    counted = (batch.tokens != pad) & (places <= last.unsqueeze(1))
    place = torch.where(counted, places, 0).amax(dim=1, keepdim=True)
    return outputs.values.gather(1, place).squeeze(1)


def scores_of(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the [B] outputs of the scalar head at the last token of each row's answer.

    Args:
        values: [B, S] outputs of the scalar head, for B rows of S tokens.
        mask: [B, S] loss mask, 1 where the label is a token of the answer.
    """
    return values.gather(1, last_places(mask).unsqueeze(1)).squeeze(1)


def last_places(mask: torch.Tensor) -> torch.Tensor:
    """Return the [B] positions of the last token of each row's answer, as indices of input tokens.

    If this token is the label of the last input, and itself no input, the result is S - 1. For a row without an answer
    the result is min(1, S - 1).

    Args:
        mask: [B, S] loss mask of B rows with S tokens, 1 where the label is a token of the answer. The label at t is
            the input at t + 1.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    return (torch.where(mask > 0, places, 0).amax(dim=1) + 1).clamp(max=mask.shape[1] - 1)


def _value_mask(batch: RolloutBatch) -> torch.Tensor:
    """Return the mask of the positions at which the value head is trained: [B, S] for B rows of S tokens.

    A batch of GRPO has no such mask, and the result is its `loss_mask`.
    """
    return batch.loss_mask if batch.value_mask is None else batch.value_mask
