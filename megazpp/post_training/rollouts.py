"""Data loading for GRPO and PPO: completions that are sampled from the policy, rewarded, and then trained on.

Sampling, rewarding and the buffer are in one file, because all of them use the same numbering of a generation's
completions.

One generation samples the completions for `slices` x `passes` optimizer steps, and keeps them in a buffer. Its stages:

    sample          each data rank samples the completions that it trains on, while the policy's weights stay gathered;
                    the completions of one prompt may be on several ranks
    rewards         by reward functions and a reward model; all ranks get the rewards and lengths of all completions
    old policy      log-probabilities (and values) of the policy before its first update with these completions. They
                    are computed by the same forward, in the same micro-batches, as in training, so that the probability
                    ratio is exactly 1 in the first step. This stage is only for PPO, and for buffers that serve more
                    than one step
    reference       log-probabilities of the reference model
    advantages      from the rewards of the same prompt's completions (GRPO) or from values (PPO)

A generation takes the prompts that follow the prompts of the previous generation. Completions and prompts of a
generation are numbered from 0 over all ranks. Completion i belongs to prompt i // group size. The random numbers of
completion i depend on the seed, the number of the generation, and i. So prompts and completions do not depend on the
parallel layout. A checkpoint contains the buffer if further steps still need it.

Legend: n completions of this data rank, N completions of all ranks, S tokens of a row, F rewards of a completion.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from megazpp.base.program import UserError, user_errors
from megazpp.checkpoint.state import StatePart
from megazpp.data.loader import on_device
from megazpp.data.tokenizer import Tokenizer
from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import Drawn, draw_completions, evaluating, random_numbers
from megazpp.inference.text import Continuation, split_stops
from megazpp.model.gpt import GPTModel
from megazpp.parallel.agreement import raise_on_all_ranks
from megazpp.parallel.dims import ParallelDims
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.data import (
    PromptDataset,
    RolloutBatch,
    lay_out_rollouts,
    make_rollout_batch,
    row_multiple,
    shortened,
)
from megazpp.post_training.formatting import Prompt
from megazpp.post_training.losses import gae, group_advantages, ppo_rewards, value_mask, whiten
from megazpp.post_training.objectives import Logps, TokenHead
from megazpp.post_training.reference import FrozenModel
from megazpp.post_training.rewards import RewardFunction, judge, reward_metrics, total_rewards
from megazpp.zero.sharding import Sharding, WeightHandle

# Fields of a batch that a checkpoint stores besides tokens and loss mask. The first five fields are left out: they are
# the fields of a `MicroBatch`, which can be computed from tokens and loss mask.
_KNOWN = RolloutBatch._fields[5:]
# Fields of the configs of post-training and of sampling that decide neither which completions a generation has, nor
# what the buffer stores about each completion. A run that is resumed with another value keeps the checkpoint's buffer.
# --ref-checksum is among these fields, because a resume sets it even if the first start did not have it. The loading of
# the frozen base weights compares them with --ref-checksum.
_FREE = ("log_completions", "rollouts_at_once", "eval_on_start", "sample_prompt", "ref_checksum")


@dataclass
class PolicySampler:
    """Sampler of the policy's completions for GRPO and PPO, which also calls the reward functions.

    All ranks call every public method.

    Args:
        model: the policy.
        sharding: sharding handle of the policy's weights.
        dims: parallel layout.
        tokenizer: tokenizer of the texts.
        config: sampling parameters; `sample_tokens` is the largest number of tokens of a completion.
        functions: reward functions.
        seed: seed for the random numbers of all samples.
        at_once: number of completions that a data rank samples in one batch; None for all.
        base: handle to the frozen base weights of a policy with adapters; None without adapters.
        stopped: function that returns True if this rank has caught a stop signal.
        give_up: function that raises StopRequested on all ranks if one of them has caught a stop signal. All ranks call
            it together: after each batch of sampled completions, and before each micro-batch of the later stages.
    """

    model: GPTModel
    sharding: Sharding
    dims: ParallelDims
    tokenizer: Tokenizer
    _: KW_ONLY
    config: SampleConfig
    functions: Sequence[RewardFunction]
    seed: int
    at_once: int | None = None
    base: WeightHandle | None = None
    stopped: Callable[[], bool] = lambda: False
    give_up: Callable[[], None] = lambda: None

    def draw(self, prompts: Sequence[Prompt], names: Sequence[str]) -> tuple[Drawn, list[str]]:
        """Sample one completion for each of this data rank's prompts.

        Args:
            prompts: prompts of this data rank, at least one.
            names: a distinct name for each completion, which together with the seed decides its random numbers.
        Returns:
            the token ids of the completions with their log-probabilities, and the texts of the completions.
        """
        size, uniform = self.at_once or len(prompts), random_numbers(names, self.config, seed=self.seed)
        base = contextlib.nullcontext() if self.base is None else self.base.keep_unsharded()
        with torch.no_grad(), evaluating(self.model), self.sharding.keep_unsharded(), base:
            parts = [
                self._draw([prompt.tokens for prompt in prompts[first : first + size]], uniform[first : first + size])
                for first in range(0, len(prompts), size)
            ]
        drawn = Drawn(*(torch.cat(tensors) for tensors in zip(*(part for part, _ in parts), strict=True)))
        return drawn, [text for _, texts in parts for text in texts]

    def judge(self, prompts: Sequence[Prompt], texts: Sequence[str], drawn: Drawn) -> torch.Tensor:
        """Call the reward functions for this data rank's completions.

        Args:
            prompts: prompt of each completion.
            texts: text of each completion.
            drawn: token ids of the completions.
        Returns:
            [number of prompts, number of functions] fp64 rewards, equal on all tp and cp ranks of this data rank; NaN
            where a function returns None.
        Raises:
            UserError: a function fails on some rank. All ranks raise the error, whose message names the function and
                the lines of the data.
        """
        found = torch.zeros(len(prompts), len(self.functions), dtype=torch.float64)

        def work() -> torch.Tensor:
            if self.dims.tp.rank > 0 or self.dims.cp.rank > 0:
                return found
            rows = zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)
            return judge(self.functions, prompts, texts, [tokens[:length] for tokens, length in rows])

        with user_errors():
            found = raise_on_all_ranks(self.dims.world, work)
        found = found.to(self.sharding.device)
        return self.dims.cp.broadcast_(self.dims.tp.broadcast_(found)).cpu()

    def _draw(self, prompts: list[list[int]], uniform: torch.Tensor) -> tuple[Drawn, list[str]]:
        """Sample one completion for each prompt of one batch.

        Args:
            prompts: token ids of each of B prompts.
            uniform: [B, T] random numbers from `random_numbers`, for completions of at most T tokens.

        Returns:
            the token ids of the completions with their log-probabilities, and the texts of the completions.
        """
        tokenizer = self.tokenizer
        ends, stops = split_stops(tokenizer, self.config.stops)
        rows = [Continuation(tokenizer, prompt, self.config.stops) for prompt in prompts]

        def is_last(row: int, token: int) -> bool:
            return rows[row].add(token)

        drawn = draw_completions(
            self.model,
            self.dims.tp,
            prompts,
            self.config,
            uniform,
            ends=ends,
            is_last=is_last if stops else None,
            stopped=self.stopped,
        )
        self.give_up()
        if stops:
            for row in rows:
                row.finish()
            return drawn, [row.text for row in rows]
        # Decode each prompt together with its completion, so that a space between prompt and completion is kept. A
        # token that ended the completion is not part of the text.
        texts = []
        for prompt, tokens, length in zip(prompts, drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True):
            last = length - (tokens[length - 1] in ends)
            texts.append(tokenizer.decode([*prompt, *tokens[:last]])[len(tokenizer.decode(prompt)) :])
        return drawn, texts


class Buffer(NamedTuple):
    """The completions of one generation that this data rank trains on, and the rewards of all ranks' completions.

    All tensors are on the CPU.

    Attributes:
        number: number of the generation, a scalar tensor.
        table: [N, F + 2] fp64, for each of the N completions of all ranks: its F rewards, its number of tokens, and 1
            if a token ended it, or 0 if the token limit has cut it.
        rows: [n] int64, the numbers of the completions that this data rank trains on, from 0 to N - 1.
        batch: batch of these n completions.
    """

    number: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    batch: RolloutBatch


@dataclass
class RolloutLoader(StatePart):
    """Loader of micro-batches of sampled completions for one data rank, in place of pretraining's `BatchLoader`.

    The loader is also a part of the training state: a checkpoint contains the buffer of completions.

    Args:
        sampler: sampler of completions, which also calls the reward functions.
        prompts: prompts of the training data, in the order in which generations use them.
        config: flags of the objective.
        reward_weights: weights of the reward functions; None for 1 each. A reward model has weight 1.
        reference: function that computes the reference model's log-probabilities; None without a reference model.
        reward_model: trained reward model; None without one.
        max_length: S, the number of tokens of a row.
        global_batch_size: number of completions of an optimizer step on all ranks.
        micro_batch_size: number of completions of a forward on one data rank.
        show: function that rank 0 calls once per generation, for the log. Its arguments are the iteration, and the
            prompt, text and rewards of all completions of some prompts. A reward is NaN where a function returns None.
        start: number of steps that were done with other batch sizes, and the number of completions that these steps
            consumed; see `BatchPlan`.
    Attributes:
        wait_seconds: always 0, because no data is prepared in parallel to the training.
    """

    prefix = "extra."

    sampler: PolicySampler
    prompts: PromptDataset
    config: PostTrainingConfig
    _: KW_ONLY
    reward_weights: Sequence[float] | None
    reference: Logps | None
    reward_model: FrozenModel | None
    max_length: int
    global_batch_size: int
    micro_batch_size: int
    show: Callable[[int, list[dict[str, Any]]], None]
    start: tuple[int, int] = (0, 0)
    wait_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._dims, self._device = self.sampler.dims, self.sampler.sharding.device
        self._buffer: Buffer | None = None
        self._used_up = True  # True if no further step needs the buffer, so that checkpoints leave it out
        self._metrics: dict[str, float] = {}  # PPO's metrics of the completions in the buffer
        self._once: dict[str, float] = {}  # metrics that only the next call of `metrics` returns
        model = ["reward_model"] if self.reward_model is not None else []
        self._reward_names = [*(function.name for function in self.sampler.functions), *model]

    def step(self, consumed_samples: int, global_batch_size: int) -> list[RolloutBatch]:
        """Return this data rank's micro-batches of a training step; sample completions if a generation begins.

        Args:
            consumed_samples: number of completions that earlier steps have consumed on all ranks.
            global_batch_size: number of completions of this step, which is the same in all steps.
        """
        assert global_batch_size == self.global_batch_size, "batches of completions do not ramp up"
        config = self.config
        iteration = self.start[0] + (consumed_samples - self.start[1]) // global_batch_size
        # `number` is the number of the generation, and `place` the index of this step among the generation's steps
        number, place = divmod(iteration, config.slices * config.passes)
        if self._buffer is None or int(self._buffer.number) != number:
            # `consumed_samples` counts a completion once for each pass over it
            first = max(0, consumed_samples - place * global_batch_size) // config.passes // config.group_size
            self._buffer = self._generate(number, iteration + 1, first_prompt=first)
        self._used_up = place + 1 == config.slices * config.passes
        count = global_batch_size // self._dims.data_size
        first = place % config.slices * count
        return self._batches(self._buffer.batch.part(first, first + count))

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the current generation by TRL's names, equal on all ranks.

        Only the first call in each generation also returns the time of sampling, because further steps do not sample.
        """
        once, self._once = self._once, {}
        assert self._buffer is not None
        table, size = self._buffer.table, self.config.group_size
        rewards = reward_metrics(self._reward_names, table[:, :-2], self.totals(table[:, :-2]), group_size=size)
        lengths = {
            "completions/mean_length": float(table[:, -2].mean()),
            "completions/clipped_ratio": float((table[:, -1] == 0).double().mean()),
        }
        return {**rewards, **lengths, **self._metrics, **once}

    def tensors(self) -> dict[str, torch.Tensor]:
        if self._buffer is None or self._used_up:
            return {}
        number, table, rows, batch = self._buffer
        tokens = torch.cat((batch.tokens, batch.labels[:, -1:]), dim=1)
        own = {"rows": rows, "tokens": tokens, "mask": batch.loss_mask, **{x: getattr(batch, x) for x in _KNOWN}}
        place = f"rollout.{self._dims.data_rank}"
        found = {f"{place}.{name}": x for name, x in own.items() if x is not None}
        metrics = {f"metric.{name}": torch.tensor(value, dtype=torch.float64) for name, value in self._metrics.items()}
        settings = torch.frombuffer(bytearray(self._settings(), "utf-8"), dtype=torch.uint8)
        return {"rollout.number": number, "rollout.table": table, "rollout.settings": settings} | found | metrics

    def accept(self, tensors: Mapping[str, torch.Tensor], iteration: int) -> list[str]:
        self._buffer, self._metrics = None, {}
        # `parts` has the saved tensors by name and data rank. Below, `whole` has the rows of all data ranks together.
        # `order` has the row of each completion in `whole`, by the number of the completion.
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            rank, _, own = name.partition(".")
            if kind == "metric":
                self._metrics[name] = float(tensor)
            elif own:
                parts.setdefault(own, {})[int(rank)] = tensor
        if parts:
            whole = {name: torch.cat([found[rank] for rank in sorted(found)]) for name, found in parts.items()}
            order = {row: place for place, row in enumerate(whole["rows"].tolist())}
            then, now = json.loads(bytes(tensors["rollout.settings"].tolist())), json.loads(self._settings())
            changed = [f"--{name.replace('_', '-')}" for name, value in now.items() if then.get(name) != value]
            if changed:
                return [
                    f"the {len(order)} completions of the checkpoint are dropped, because they were sampled and "
                    f"rewarded with other values of {', '.join(changed)}"
                ]
            mine = torch.tensor([order[row] for row in self._rows()])
            known = {name: x[mine] for name, x in whole.items()}
            batch = make_rollout_batch(known["tokens"], known["mask"], **{x: known[x] for x in _KNOWN if x in known})
            self._buffer = Buffer(tensors["rollout.number"], tensors["rollout.table"], known["rows"], batch)
            self._used_up = False  # a checkpoint that is saved before the next step needs the buffer as well
        return []

    def judged(self, prompts: Sequence[Prompt], drawn: Drawn, texts: Sequence[str]) -> torch.Tensor:
        """Compute the rewards of this data rank's completions, by the reward functions and the reward model.

        Args:
            prompts: prompt of each completion.
            drawn: token ids of the completions.
            texts: texts of the completions.
        Returns:
            [n, F] fp64 rewards of n completions: one column for each reward function, and then one for the reward model
            if there is one.
        """
        rewards = self.sampler.judge(prompts, texts, drawn)
        if self.reward_model is not None:
            scores = self._each(self._laid_out(prompts, drawn), self.reward_model.scores)
            rewards = torch.cat((rewards, scores.double().unsqueeze(1)), dim=1)
        return rewards

    def totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the total reward of each of N completions, the weighted sum of its F rewards; NaN if it has none."""
        weights = self.reward_weights
        if weights is not None and self.reward_model is not None:
            weights = [*weights, 1.0]
        return total_rewards(rewards, weights)

    def summed(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all data ranks, on the tensor's own device. All ranks call this."""
        return self._dims.sum_over_data_(sums.to(self._device)).to(sums.device)

    def _settings(self) -> str:
        """Return the values of the flags that decide a generation's completions and the buffer, as JSON by field name.

        A checkpoint stores this text. A resumed run uses the checkpoint's buffer only if its own flags have the same
        values.
        """
        values = asdict(self.config) | asdict(self.sampler.config)
        given = {"global_batch_size": self.global_batch_size, "reward_funcs": self._reward_names}
        kept = {name: value for name, value in values.items() if name not in _FREE}
        return json.dumps(kept | given | {"reward_weights": self.reward_weights})

    def _generate(self, number: int, iteration: int, *, first_prompt: int) -> Buffer:
        """Sample the completions of one generation, and compute rewards and advantages. All ranks call this.

        Args:
            number: number of the generation.
            iteration: number of the training step that begins, for the log and for error messages.
            first_prompt: index in `prompts` of the generation's first prompt.
        """
        began, config, rows = time.perf_counter(), self.config, self._rows()
        prompts = [self.prompts[first_prompt + row // config.group_size] for row in rows]
        drawn, texts = self.sampler.draw(prompts, [f"generation {number} completion {row}" for row in rows])
        rewards, batch = self.judged(prompts, drawn, texts), self._laid_out(prompts, drawn)
        if config.mask_truncated_completions and config.objective == "grpo":
            batch = batch._replace(loss_mask=batch.loss_mask * drawn.ended.unsqueeze(1))
        table = torch.zeros(self.global_batch_size * config.slices, rewards.shape[1] + 2, dtype=torch.float64)
        # Each data rank fills its own rows of the table, which is 0 elsewhere. So the sum over data ranks has all rows.
        table[rows] = torch.cat((rewards, torch.stack((drawn.lengths, drawn.ended), dim=1).double()), dim=1)
        table, seconds = self.summed(table), time.perf_counter() - began
        if table[:, :-2].isnan().all():
            silent = ", ".join(self._reward_names)
            raise UserError(
                f"--reward-funcs: {silent} returned None for all {len(table)} completions of iteration {iteration}, "
                "so there is no reward to train with; give each completion a number from at least one function"
            )
        self._once = {"rollout/seconds": seconds, "rollout/tokens_per_second": float(table[:, -2].sum()) / seconds}
        # Gather the completions of the first prompts for the log, because the completions of a prompt may be on several
        # ranks
        if config.log_completions:
            names, count = self._reward_names, config.log_completions * config.group_size
            own = {
                row: {"prompt": prompt.value, "completion": text, "rewards": dict(zip(names, found, strict=True))}
                for row, prompt, text, found in zip(rows, prompts, texts, rewards.tolist(), strict=True)
                if row < count
            }
            shown = {row: each for part in self._dims.world.gather_objects(own) for row, each in part.items()}
            if self._dims.world.rank == 0:
                self.show(iteration, [shown[row] for row in sorted(shown)])
        buffer = Buffer(torch.tensor(number), table, torch.tensor(rows), self._looked_back(batch))
        return buffer._replace(batch=self._compared(buffer))

    def _laid_out(self, prompts: Sequence[Prompt], drawn: Drawn) -> RolloutBatch:
        """Return a batch with one row for each prompt and its sampled completion, on the CPU."""
        tokens = [prompt.tokens for prompt in prompts]
        return lay_out_rollouts(tokens, drawn, max_length=self.max_length, pad=self.sampler.tokenizer.eod or 0)

    def _looked_back(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with `old_logps`, `values` and `ref_logps`. Fields that this run does not use stay None.

        `old_logps` and `values` are the log-probabilities and the value head's outputs of the policy that sampled the
        completions. `ref_logps` are the log-probabilities under the reference model.
        """
        ppo, passes = self.config.objective == "ppo", self.config.slices * self.config.passes
        known: dict[str, torch.Tensor] = {}
        if ppo or passes > 1:
            with torch.no_grad():
                both = self._each(batch, self._logps_and_values)
            known["old_logps"] = both[..., 0].contiguous()
            if ppo:
                known["values"] = both[..., 1].contiguous()
        if self.reference is not None:
            known["ref_logps"] = self._each(batch, self.reference)
        self.sampler.sharding.reshard()  # frees the gathered weights; the training step gathers them again
        return batch._replace(**known)

    def _compared(self, buffer: Buffer) -> RolloutBatch:
        """Return the buffer's batch with advantages, and for PPO also with `returns` and `value_mask`."""
        config, batch, total = self.config, buffer.batch, self.totals(buffer.table[:, :-2])
        if config.objective == "grpo":
            advantages = group_advantages(
                total, config.num_generations, scale=config.reward_scale, estimator=config.advantage_estimator
            )
            return batch._replace(advantages=advantages.float()[buffer.rows])
        assert batch.old_logps is not None
        assert batch.values is not None
        scores = total.nan_to_num(0.0).float()  # 0 for a completion without a reward, because PPO trains on it as well
        if config.missing_eos_penalty is not None:
            scores = scores - config.missing_eos_penalty * (buffer.table[:, -1] == 0)
        reference = batch.old_logps if batch.ref_logps is None else batch.ref_logps
        mask, at = batch.loss_mask, value_mask(batch.loss_mask, max_completion_length=config.max_completion_length)
        rewards = ppo_rewards(batch.old_logps, reference, scores[buffer.rows], mask, at, kl_coef=config.kl_coef)
        if config.whiten_rewards:
            rewards = whiten(rewards, at, sum_over_ranks=self.summed, shift_mean=False)
        advantages, returns = gae(rewards, batch.values, at, gamma=config.gamma, lam=config.lam)
        divergence = (batch.old_logps - reference) * mask
        kl, tokens, rows = self.summed(torch.stack((divergence.sum(), mask.sum(), mask.new_tensor(len(mask)))).double())
        self._metrics = {"kl": float(kl / tokens.clamp(min=1)), "objective/kl": float(kl / rows)}
        advantages = whiten(advantages, mask, sum_over_ranks=self.summed)
        return batch._replace(advantages=advantages, returns=returns, value_mask=at)

    def _each(self, batch: RolloutBatch, ask: Callable[[RolloutBatch], torch.Tensor]) -> torch.Tensor:
        """Apply a model to all completions of a batch, in the training's micro-batches.

        Args:
            batch: completions of this data rank.
            ask: function of a micro-batch with B rows, cut to s tokens, that returns a [B], [B, s] or [B, s, ...]
                tensor.

        Returns:
            the results for all rows on the CPU. Results for tokens are padded with 0 to `max_length` tokens.
        """
        found = []
        for part in self._batches(batch):
            self.sampler.give_up()
            found.append(ask(part).cpu())
        if found[0].dim() > 1:  # pad results for tokens to S, because each micro-batch was cut to its own length s
            found = [torch.cat((x, x.new_zeros(len(x), self.max_length - x.shape[1], *x.shape[2:])), 1) for x in found]
        return torch.cat(found)

    def _logps_and_values(self, batch: RolloutBatch) -> torch.Tensor:
        """Compute the policy's log-probabilities of labels, and the value head's outputs, by the training's forward.

        Returns:
            [B, S, 2] for a micro-batch of B rows with S tokens: log-probability and value. The values are 0 for other
            objectives than PPO, which have no value head.
        """
        ppo, temperature = self.config.objective == "ppo", self.sampler.config.sample_temperature
        head = TokenHead(batch.labels, temperature=temperature, with_values=ppo)
        found = self.sampler.model(batch.tokens, position_ids=batch.position_ids, head=head)
        values = found.values if ppo else torch.zeros_like(found.losses)
        return torch.stack((-found.losses, values), dim=-1)

    def _batches(self, batch: RolloutBatch) -> list[RolloutBatch]:
        """Divide a batch into the training's micro-batches, each cut to its longest completion, on the device."""
        size, multiple = self.micro_batch_size, row_multiple(self._device, self._dims)
        parts = [batch.part(first, first + size) for first in range(0, len(batch.tokens), size)]
        return [on_device(shortened(part, multiple), self._device) for part in parts]

    def _rows(self) -> list[int]:
        """Return the numbers of this data rank's completions in a generation, in the order of training.

        The completions of a generation are numbered from 0 over all ranks. Completions with consecutive numbers form a
        micro-batch. The first micro-batch goes to data rank 0, the second to data rank 1, and so on in turn.
        """
        size, ranks = self.micro_batch_size, self._dims.data_size
        firsts = range(self._dims.data_rank * size, self.global_batch_size * self.config.slices, size * ranks)
        return [row for first in firsts for row in range(first, first + size)]


@dataclass
class RewardEvaluator:
    """An evaluator of the mean reward of completions for held-out prompts.

    Each evaluation has the same prompts and random numbers.

    Args:
        loader: loader of the training's completions, whose sampler and reward model the evaluator uses.
        prompts: held-out prompts.
        count: number of prompts of an evaluation over all ranks.
    """

    loader: RolloutLoader
    prompts: PromptDataset
    count: int

    def __call__(self, between_batches: Callable[[], None] = lambda: None) -> float:
        """Sample a completion for each prompt, and return the mean reward, equal on all ranks. All ranks call this.

        The result is NaN if no completion has a reward. After a stop signal the sampler raises StopRequested.

        Args:
            between_batches: function that is called once, before the sampling; see `Evaluator`.
        """
        between_batches()
        loader, sampler = self.loader, self.loader.sampler
        dims = sampler.dims
        rows = range(dims.data_rank, self.count, dims.data_size)
        with dims.counter.paused():
            prompts = [self.prompts[row] for row in rows]
            drawn, texts = sampler.draw(prompts, [f"validation prompt {row}" for row in rows])
            total = loader.totals(loader.judged(prompts, drawn, texts))
            reward, count = loader.summed(torch.stack((total.nansum(), (~total.isnan()).sum().double()))).tolist()
        return reward / count if count else math.nan
