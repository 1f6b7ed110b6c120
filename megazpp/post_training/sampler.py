"""Sampling of completions from the trained policy, and their rewards by reward functions.

Each data rank samples completions for its own prompts. The policy's weights are gathered once and stay gathered until
all completions are sampled. A completion depends on the weights and on a name that the caller gives to it, not on the
parallel layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from megazpp.base.program import user_errors
from megazpp.data.tokenizer import Tokenizer
from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import Drawn, draw_completions, evaluating, random_numbers
from megazpp.inference.text import Continuation, split_stops
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims, raise_on_all_ranks
from megazpp.post_training.formatting import Prompt
from megazpp.post_training.rewards import RewardFunction, judge
from megazpp.zero.sharding import Sharding, WeightHandle


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
        give_up: function that raises StopRequested on all ranks if one of them has caught a stop signal. All data ranks
            call it equally often, after each batch of completions.
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
            [n, functions] fp64 rewards, equal on all tp and cp ranks of this data rank; NaN where a function returns
            None.
        Raises:
            UserError: a function fails on some rank. All ranks raise it; the message names the function and the sample.
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
            prompts: token ids of each prompt.
            uniform: random numbers of each completion, from `random_numbers`.

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
        texts = []
        for prompt, tokens, length in zip(prompts, drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True):
            last = length - (tokens[length - 1] in ends)
            texts.append(tokenizer.decode([*prompt, *tokens[:last]])[len(tokenizer.decode(prompt)) :])
        return drawn, texts
