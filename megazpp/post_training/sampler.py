"""Sampling of completions from the trained policy, and their rewards by functions.

Each data rank samples for its own prompts. The weights are gathered once and stay gathered meanwhile. Samples depend on
the weights and on a name that the caller gives to each, not on the parallel layout.
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
    """Sampler of completions and their rewards. Every rank calls every method.

    Args:
        model: the policy.
        sharding: handle to the policy's sharded weights.
        dims: parallel layout.
        tokenizer: tokenizer of the texts.
        config: sampling parameters; `sample_tokens` limits the tokens of a completion.
        functions: reward functions.
        seed: seed for the samples.
        at_once: completions of one batch on a data rank; None for all.
        base: handle to the frozen base of the policy; None without one.
        stopped: function that returns True if this rank has caught a stop signal.
        give_up: function that raises StopRequested on all ranks if one of them has caught a stop signal; all data ranks
            call it equally often, between two batches of work.
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
        """Sample a completion for each of this data rank's prompts.

        Args:
            prompts: prompts of this data rank, at least one.
            names: distinct names of the samples, from which their random numbers follow.
        Returns:
            The tokens of the completions, and their texts.
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
        """Return [n, functions] fp64 rewards of this data rank's completions, equal on its tp and cp ranks.

        A reward is NaN where a function returns None.

        Args:
            prompts: prompts of this data rank.
            texts: texts of the completions.
            drawn: tokens of the completions.
        Raises:
            UserError: a function fails on some rank; raised on all ranks, with the function and the sample.
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
        """Sample the completions of one batch."""
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
