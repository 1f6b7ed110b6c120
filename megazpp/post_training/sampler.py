"""Completions of prompts from the policy in training, and what they are worth.

Each data rank draws for prompts of its own; the weights are gathered once and kept while it does. What is drawn for a
prompt follows from the weights and from a name that the caller gives it, so the layout does not matter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch

from megazpp.base.program import user_errors
from megazpp.checkpoint.together import together
from megazpp.data.tokenizer import Tokenizer
from megazpp.inference.generate import Drawn, draw_completions, evaluating
from megazpp.inference.sample import SampleConfig
from megazpp.inference.text import Continuation
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.post_training.examples import Prompt
from megazpp.post_training.rewards import RewardFunction, judge
from megazpp.tensor_parallel.parameters import seed_for
from megazpp.zero.sharding import Sharding, WeightHandle


class Completions(NamedTuple):
    """Completions of a batch of prompts: tokens, and texts on the first rank of each tp group ([] elsewhere)."""

    drawn: Drawn
    texts: list[str]


@dataclass
class PolicySampler:
    """Draws and judges; every rank calls every method.

    Args:
        model, sharding: the policy and its handle.
        config: how tokens are drawn; `sample_tokens` is the limit.
        functions: reward functions.
        seed: of everything that is drawn.
        at_once: completions of one batch on a data rank; None for all.
        base: the frozen weights of the policy, if it has some.
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

    def draw(self, prompts: Sequence[Prompt], names: Sequence[str]) -> Completions:
        """A completion of each of this data rank's prompts, at least one.

        Args:
            names: of the draws, different for each.
        """
        uniform = torch.stack([self._numbers(name) for name in names])
        size = self.at_once or len(prompts)
        parts = []
        base = contextlib.nullcontext() if self.base is None else self.base.kept_gathered()
        with torch.no_grad(), evaluating(self.model), self.sharding.kept_gathered(), base:
            for first in range(0, len(prompts), size):
                chosen = prompts[first : first + size]
                parts.append(
                    draw_completions(
                        self.model,
                        self.dims.tp,
                        [prompt.tokens for prompt in chosen],
                        self.config,
                        uniform[first : first + size],
                        ends=self.tokenizer.eod,
                        is_last=self._stopper(chosen) if self.config.stops else None,
                    )
                )
        drawn = _joined(parts)
        texts = []
        if self.dims.tp.rank == 0:
            rows = zip(prompts, drawn.tokens, drawn.lengths.tolist(), strict=True)
            texts = [self._text(prompt, tokens[:length].tolist()) for prompt, tokens, length in rows]
        return Completions(drawn, texts)

    def judge(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> torch.Tensor:
        """[n, functions] fp64 rewards of this data rank's completions, the same on its tp ranks; NaN for None.

        Raises:
            UserError: on all ranks, if a function fails on one; it names the function and the sample.
        """
        found = torch.zeros(len(prompts), len(self.functions), dtype=torch.float64)

        def work() -> torch.Tensor:
            return judge(self.functions, prompts, texts) if self.dims.tp.rank == 0 else found

        with user_errors():
            found = together(self.dims.world, work)
        device = next(self.model.parameters()).device
        return self.dims.tp.broadcast_(found.to(device)).cpu()

    def _numbers(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed_for(name, seed=self.seed))
        return torch.rand(self.config.sample_tokens, generator=generator, dtype=torch.float64)

    def _text(self, prompt: Prompt, tokens: list[int]) -> str:
        row = Continuation(self.tokenizer, prompt.tokens, self.config.stops)
        if not self.config.stops:  # all at once
            tokens = tokens[:-1] if tokens[-1:] == [self.tokenizer.eod] else tokens
            return self.tokenizer.decode([*prompt.tokens, *tokens])[len(self.tokenizer.decode(prompt.tokens)) :]
        for token in tokens:
            row.add(token)
        row.finish()
        return row.text

    def _stopper(self, prompts: Sequence[Prompt]) -> functools.partial[bool]:
        rows = [Continuation(self.tokenizer, prompt.tokens, self.config.stops) for prompt in prompts]
        return functools.partial(_is_last, rows)


def _is_last(rows: Sequence[Continuation], row: int, token: int) -> bool:
    return rows[row].add(token)


def _joined(parts: Sequence[Drawn]) -> Drawn:
    longest = max(part.tokens.shape[1] for part in parts)
    tokens, logps = (
        torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in columns])
        for columns in ([part.tokens for part in parts], [part.logps for part in parts])
    )
    return Drawn(tokens, torch.cat([p.lengths for p in parts]), logps, torch.cat([p.ended for p in parts]))
