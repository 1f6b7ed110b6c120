"""Rollouts as data loading: completions that the policy draws, judges and is then trained on.

One file of more than 300 lines: a buffer is filled, judged, kept in checkpoints and used up here.

One generation fills a buffer, which serves `slices` x `passes` optimizer steps:

    draw          each data rank the completions that it will be trained on; groups of a prompt may lie on several ranks
    judge         by functions and a reward model; rewards and lengths of all completions go to all ranks, texts do not
    look back     only where the policy will have changed by the last of these steps, and for PPO: log-probabilities
                  (and values) by the forward of the training, with its micro-batches, so that the first ratio is 1
    reference     log-probabilities of the frozen model
    compare       with the group (GRPO), or with the values (PPO), over the whole generation

Completion n of generation g has prompt (g x completions + n) / group size of the data, and is drawn by numbers that
follow from both: neither depends on the layout. A buffer that is not used up is part of a checkpoint.

Legend: n completions of this rank, N of all, S tokens of a row, F rewards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch

from megazpp.checkpoint.state import StatePart
from megazpp.inference.generate import Drawn
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.post_training.batch import RolloutBatch, row_multiple, shortened
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.data import PromptDataset
from megazpp.post_training.examples import Prompt
from megazpp.post_training.losses import gae, group_advantages, nanstd, ppo_rewards, value_mask, whiten
from megazpp.post_training.objectives import Scorer
from megazpp.post_training.reference import FrozenModel
from megazpp.post_training.rewards import total_rewards
from megazpp.post_training.sampler import Completions, PolicySampler

_OF_ALL = ("number", "table")  # of a buffer's tensors; the others are a rank's own rows
_NOT_YET = torch.empty(0)


class Buffer(NamedTuple):
    """The completions of one generation that this rank is trained on, in that order; on the CPU.

    Attributes:
        number: of the generation, a scalar.
        table: [N, F + 2] fp64 of all: the rewards, the number of tokens, and 1 where the limit did not end it.
        rows: [n] int64, which of the N these are.
        tokens: [n, S + 1] int64: prompt, completion, padding.
        mask: [n, S] fp32, 1 on the tokens of the completion that are trained on.
        sampling_logps: [n, S] fp32, as they were drawn.
        advantages: [n] or [n, S] fp32.
        old_logps, ref_logps, values, returns, value_mask: [n, S] fp32; as in `RolloutBatch`.
    """

    number: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    sampling_logps: torch.Tensor
    advantages: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    value_mask: torch.Tensor | None = None

    def batch(self, first: int, last: int, multiple: int) -> RolloutBatch:
        """Rows `first` to `last` - 1, `shortened` to a multiple."""
        tokens = self.tokens[first:last]
        positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
        others = (self.advantages, self.old_logps, self.ref_logps, self.sampling_logps)
        values = (self.values, self.returns, self.value_mask)
        batch = RolloutBatch(
            tokens[:, :-1],
            tokens[:, 1:],
            self.mask[first:last],
            positions,
            None,
            *(None if x is None else x[first:last] for x in (*others, *values)),
        )
        return shortened(batch, multiple)


class Shown(NamedTuple):
    """A completion for the user to read; `rewards` by name, None where a function has no opinion."""

    prompt: Any
    completion: str
    rewards: dict[str, float | None]


@dataclass
class RolloutLoader(StatePart):
    """Micro-batches of one data rank, in the place of a `BatchLoader`; also the state that a checkpoint keeps of it.

    Args:
        sampler: draws and judges.
        prompts: the training data.
        config: of the objective.
        reward_weights: of the F rewards; None for 1 each.
        reference, reward_model: frozen models, where they are needed.
        max_length: S.
        global_batch_size, micro_batch_size: completions of an optimizer step, and of a forward on one data rank.
        show: told all completions of some prompts of each generation, on rank 0, with the iteration that begins.
    Attributes:
        wait_seconds: always 0: nothing is prepared beside the training.
    """

    prefix = "extra."

    sampler: PolicySampler
    prompts: PromptDataset
    config: PostTrainingConfig
    _: KW_ONLY
    reward_weights: Sequence[float] | None
    reference: Scorer | None
    reward_model: FrozenModel | None
    max_length: int
    global_batch_size: int
    micro_batch_size: int
    show: Callable[[int, list[Shown]], None]
    wait_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._buffer: Buffer | None = None
        self._used_up = True
        self._metrics: dict[str, float] = {}
        self._once: dict[str, float] = {}

    def step(self, consumed_samples: int, global_batch_size: int) -> list[RolloutBatch]:
        """The micro-batches of the step that begins at `consumed_samples`; draws where a generation begins."""
        assert global_batch_size == self.global_batch_size, "completions do not ramp up"
        config, iteration = self.config, consumed_samples // global_batch_size
        number, place = divmod(iteration, config.slices * config.passes)
        if self._buffer is None or int(self._buffer.number) != number:
            self._buffer = self._generate(number, iteration + 1)
        self._used_up = place + 1 == config.slices * config.passes
        count = global_batch_size // self._dims.data_size
        first = place % config.slices * count
        return self._batches(self._buffer, range(first, first + count, self.micro_batch_size))

    def metrics(self) -> Mapping[str, float]:
        """The numbers of the current buffer, under TRL's names; the same on all ranks."""
        once, self._once = self._once, {}
        return {**self._reward_metrics(), **self._metrics, **once}

    def tensors(self) -> dict[str, torch.Tensor]:
        if self._buffer is None or self._used_up:
            return {}
        found = {name: x for name, x in self._buffer._asdict().items() if x is not None}
        metrics = {f"metric.{name}": torch.tensor(value, dtype=torch.float64) for name, value in self._metrics.items()}
        own = f"rollout.{self._dims.data_rank}"
        return {f"rollout.{name}" if name in _OF_ALL else f"{own}.{name}": x for name, x in found.items()} | metrics

    def accept(self, tensors: Mapping[str, torch.Tensor], iteration: int) -> list[str]:
        self._buffer = None
        metrics = {name: value for name, value in tensors.items() if name.startswith("metric.")}
        self._metrics = {name.removeprefix("metric."): float(value) for name, value in metrics.items()}
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            rank, _, name = rest.partition(".")
            if kind == "rollout" and name:
                parts.setdefault(name, {})[int(rank)] = tensor
        if not parts:
            return []
        ranks = sorted(parts["rows"])
        order = {int(row): place for place, row in enumerate(torch.cat([parts["rows"][rank] for rank in ranks]))}
        mine = torch.tensor([order[row] for row in self._rows()])
        own = {name: torch.cat([found[rank] for rank in ranks])[mine] for name, found in parts.items()}
        self._buffer = Buffer(**{name: tensors[f"rollout.{name}"] for name in _OF_ALL}, **own)
        return []

    def close(self) -> None:
        """There is nothing to end."""

    def __enter__(self) -> RolloutLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one generation ---------------------------------------------------------------------------------------

    def judged(self, prompts: Sequence[Prompt], names: Sequence[str]) -> tuple[Completions, torch.Tensor]:
        """Completions of this data rank's prompts, and their [n, F] fp64 rewards."""
        found = self.sampler.draw(prompts, names)
        rewards = self.sampler.judge(prompts, found.texts)
        if self.reward_model is not None:
            scores = self._each(self._laid_out(prompts, found.drawn), self.reward_model.scores)
            rewards = torch.cat((rewards, scores.double().unsqueeze(1)), dim=1)
        return found, rewards

    def totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """[N] weighted sums of [N, F] rewards."""
        weights = self.reward_weights
        if weights is not None and self.reward_model is not None:
            weights = [*weights, 1.0]
        return total_rewards(rewards, weights)

    def summed(self, sums: torch.Tensor) -> torch.Tensor:
        """`sums` over all data ranks."""
        return self._dims.sum_over_data_(sums.to(self._device)).to(sums.device)

    def _generate(self, number: int, iteration: int) -> Buffer:
        began, config, rows = time.perf_counter(), self.config, self._rows()
        total = self.global_batch_size * config.slices
        places = [(number * total + row) // config.group_size for row in rows]
        prompts = [self.prompts[place] for place in places]
        found, rewards = self.judged(prompts, [f"generation {number} completion {row}" for row in rows])
        drawn, buffer = found.drawn, self._laid_out(prompts, found.drawn)
        if config.mask_truncated_completions and config.objective == "grpo":
            buffer = buffer._replace(mask=buffer.mask * drawn.ended.unsqueeze(1))
        table = torch.zeros(total, rewards.shape[1] + 2, dtype=torch.float64)
        about = torch.stack((drawn.lengths.double(), drawn.ended.double()), dim=1)
        table[rows] = torch.cat((rewards, about), dim=1)
        buffer = buffer._replace(number=torch.tensor(number), table=self.summed(table), rows=torch.tensor(rows))
        seconds = time.perf_counter() - began
        self._once = {
            "rollout/seconds": seconds,
            "rollout/tokens_per_second": float(buffer.table[:, -2].sum()) / seconds,
        }
        if config.log_completions:  # of the first prompts, whole groups, which may lie on several ranks
            texts = zip(rows, prompts, found.texts, rewards, strict=self._dims.tp.rank == 0)
            count = config.log_completions * config.group_size
            own = {row: Shown(prompt.value, text, self._named(x)) for row, prompt, text, x in texts if row < count}
            shown = {row: each for part in self._dims.world.gather_objects(own) for row, each in part.items()}
            if self._dims.world.rank == 0:
                self.show(iteration, [shown[row] for row in sorted(shown)])
        return self._compared(self._looked_back(buffer))

    def _laid_out(self, prompts: Sequence[Prompt], drawn: Drawn) -> Buffer:
        """Rows of prompt, completion and padding; without what is known of the whole generation."""
        pad = self.sampler.tokenizer.eod or 0
        tokens = torch.full((len(prompts), self.max_length + 1), pad)
        mask, logps = (torch.zeros(len(prompts), self.max_length) for _ in range(2))
        for row, (prompt, length) in enumerate(zip(prompts, drawn.lengths.tolist(), strict=True)):
            start = len(prompt.tokens)
            tokens[row, :start] = torch.tensor(prompt.tokens)
            tokens[row, start : start + length] = drawn.tokens[row, :length]
            mask[row, start - 1 : start - 1 + length] = 1.0
            logps[row, start - 1 : start - 1 + length] = drawn.logps[row, :length]
        return Buffer(_NOT_YET, _NOT_YET, _NOT_YET, tokens, mask, logps)

    def _looked_back(self, buffer: Buffer) -> Buffer:
        """With log-probabilities of the policy and the reference, and values, where they are needed."""
        config, model = self.config, self.sampler.model
        if config.objective == "ppo" or config.slices * config.passes > 1:
            with torch.no_grad():
                both = self._each(buffer, lambda batch: _logps_and_values(model, batch, config, self._temperature))
            buffer = buffer._replace(old_logps=both[..., 0].contiguous(), values=both[..., 1].contiguous())
            if config.objective != "ppo":
                buffer = buffer._replace(values=None)
        if self.reference is not None:
            buffer = buffer._replace(ref_logps=self._each(buffer, self.reference.logps))
        self.sampler.sharding.free_gathered()  # the step reads the shards anew
        return buffer

    def _compared(self, buffer: Buffer) -> Buffer:
        """With advantages (and returns)."""
        config = self.config
        total = self.totals(buffer.table[:, :-2])
        if config.objective == "grpo":
            advantages = group_advantages(
                total, config.num_generations, scale=config.reward_scale, estimator=config.advantage_estimator
            )
            return buffer._replace(advantages=advantages.float()[buffer.rows])
        assert buffer.old_logps is not None
        assert buffer.values is not None
        scores = total.nan_to_num(0.0).float()  # where no function has an opinion
        if config.missing_eos_penalty is not None:
            scores = scores - config.missing_eos_penalty * (buffer.table[:, -1] == 0)
        reference = buffer.old_logps if buffer.ref_logps is None else buffer.ref_logps
        mask, at = buffer.mask, value_mask(buffer.mask, max_completion_length=config.max_completion_length)
        rewards = ppo_rewards(buffer.old_logps, reference, scores[buffer.rows], mask, at, kl_coef=config.kl_coef)
        if config.whiten_rewards:
            rewards = whiten(rewards, at, sum_over_ranks=self.summed, shift_mean=False)
        found = gae(rewards, buffer.values, at, gamma=config.gamma, lam=config.lam)
        divergence = (buffer.old_logps - reference) * mask
        kl, tokens, rows = self.summed(torch.stack((divergence.sum(), mask.sum(), mask.new_tensor(len(mask)))).double())
        self._metrics = {"kl": float(kl / tokens.clamp(min=1)), "objective/kl": float(kl / rows)}
        return buffer._replace(
            advantages=whiten(found.advantages, mask, sum_over_ranks=self.summed),
            returns=found.returns,
            value_mask=at,
        )

    def _each(self, buffer: Buffer, ask: Callable[[RolloutBatch], torch.Tensor]) -> torch.Tensor:
        """Ask `ask` of all rows, by the micro-batches of the training; on the CPU, 0 behind their rows."""
        batches = self._batches(buffer, range(0, len(buffer.tokens), self.micro_batch_size))
        found = [ask(batch).cpu() for batch in batches]
        if found[0].dim() > 1:  # [B, s, ...] -> [B, S, ...]
            found = [torch.cat((x, x.new_zeros(len(x), self.max_length - x.shape[1], *x.shape[2:])), 1) for x in found]
        return torch.cat(found)

    def _batches(self, buffer: Buffer, starts: range) -> list[RolloutBatch]:
        multiple = row_multiple(self._device, self._dims)
        return [buffer.batch(start, start + starts.step, multiple).to(self._device) for start in starts]

    # ---- numbers ----------------------------------------------------------------------------------------------

    def _rows(self) -> list[int]:
        """The completions of a generation that are this data rank's, in the order of the steps that take them."""
        size, ranks = self.micro_batch_size, self._dims.data_size
        total = self.global_batch_size * self.config.slices
        firsts = range(self._dims.data_rank * size, total, size * ranks)
        return [row for first in firsts for row in range(first, first + size)]

    @property
    def _reward_names(self) -> list[str]:
        model = ["reward_model"] if self.reward_model is not None else []
        return [*(function.name for function in self.sampler.functions), *model]

    def _named(self, rewards: torch.Tensor) -> dict[str, float | None]:
        values = [None if math.isnan(reward) else reward for reward in rewards.tolist()]
        return dict(zip(self._reward_names, values, strict=True))

    def _reward_metrics(self) -> dict[str, float]:
        assert self._buffer is not None
        table, config = self._buffer.table, self.config
        found: dict[str, float] = {}
        for name, column in zip(self._reward_names, table[:, :-2].t(), strict=True):
            known = column[~column.isnan()]
            if len(known):
                found[f"rewards/{name}/mean"] = float(known.mean())
                found[f"rewards/{name}/std"] = float(known.std()) if len(known) > 1 else 0.0
        total = self.totals(table[:, :-2])
        total = total[~total.isnan()] if config.group_size == 1 else total
        found["reward"] = float(total.nanmean())
        if config.group_size > 1:
            spread = nanstd(total.view(-1, config.group_size)).nan_to_num(0.0)
            found["reward_std"] = float(spread.mean())
            found["frac_reward_zero_std"] = float((spread < 1e-8).double().mean())
        elif len(total) > 1:
            found["reward_std"] = float(total.std())
        found["completions/mean_length"] = float(table[:, -2].mean())
        found["completions/clipped_ratio"] = float((table[:, -1] == 0).double().mean())
        return found

    @property
    def _dims(self) -> ParallelDims:
        return self.sampler.dims

    @property
    def _device(self) -> torch.device:
        return next(self.sampler.model.parameters()).device

    @property
    def _temperature(self) -> float:
        return self.sampler.config.sample_temperature


class RewardEvaluator:
    """Mean reward of drawn completions of held-out prompts, the same prompts and numbers at every call.

    Args:
        loader: of the training, whose sampler and reward model are used.
        prompts: the held-out data.
        iterations, batch_size: how many batches of how many prompts, over all ranks.
    """

    metric = "reward"

    def __init__(self, loader: RolloutLoader, prompts: PromptDataset, *, iterations: int, batch_size: int) -> None:
        self._loader, self._prompts, self._count = loader, prompts, iterations * batch_size

    def __call__(self) -> float:
        """The same number on all ranks."""
        loader = self._loader
        dims = loader.sampler.dims
        rows = range(dims.data_rank, self._count, dims.data_size)
        with dims.counter.paused():
            chosen = [self._prompts[row] for row in rows]
            _, rewards = loader.judged(chosen, [f"validation prompt {row}" for row in rows])
            total = loader.totals(rewards)
            reward, count = loader.summed(torch.stack((total.nansum(), (~total.isnan()).sum().double()))).tolist()
        return reward / count if count else math.nan


def _logps_and_values(
    model: GPTModel, batch: RolloutBatch, config: PostTrainingConfig, temperature: float
) -> torch.Tensor:
    """[B, S, 2], by the same forward as the training's; values are 0 where there is no value head."""
    found = model(
        batch.tokens,
        batch.labels,
        position_ids=batch.position_ids,
        temperature=temperature,
        with_values=config.objective == "ppo",
    )
    losses, _, values = found if config.objective == "ppo" else (found, None, None)
    return torch.stack((-losses, torch.zeros_like(losses) if values is None else values), dim=-1)
