"""Drawing the next token: greedily, or by temperature among the top k, the top p or those above min p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megazpp.base.flags import check_not_negative, check_positive, flag
from megazpp.run.arguments import FeatureConfig


@dataclass(frozen=True, kw_only=True)
class SampleConfig(FeatureConfig):
    """Text generation.

    Prompts, number of tokens, and how tokens are sampled.
    """

    sample_prompt: tuple[str, ...] = flag(
        (), "texts to continue (default: an end-of-document token)", nargs="*", aliases=("--prompt",)
    )
    sample_tokens: int = flag(0, "tokens to generate; 0 for no sample", aliases=("--num-tokens-to-generate",))
    sample_temperature: float = flag(
        0.8, "divide the logits by this; 0 takes the most likely token", aliases=("--temperature",)
    )
    sample_top_k: int = flag(40, "draw among this many most likely tokens; 0 for all", aliases=("--top-k", "--top_k"))
    sample_top_p: float = flag(
        1.0, "draw among the most likely tokens that have this share together", aliases=("--top-p", "--top_p")
    )
    sample_min_p: float | None = flag(
        None,
        "draw among the tokens that have at least this share of the most likely one's probability",
        aliases=("--min-p",),
    )
    sample_repetition_penalty: float = flag(
        1.0,
        "divide positive logits of tokens that the prompt or the text has by this, and multiply negative ones",
        aliases=("--repetition-penalty",),
    )
    sample_stop: tuple[str, ...] = flag(
        (), "strings that end a text, not shown; \\n in them is a new line", nargs="*", aliases=("--stop",)
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "sample_tokens", "sample_temperature", "sample_top_k")
        if not 0.0 < self.sample_top_p <= 1.0:
            raise ValueError(f"--sample-top-p {self.sample_top_p} is not in (0, 1]")
        if not 0.0 <= (self.sample_min_p or 0.0) <= 1.0:
            raise ValueError(f"--sample-min-p {self.sample_min_p} is not in [0, 1]")
        check_positive(self, "sample_repetition_penalty")
        if "" in self.sample_stop:
            raise ValueError("--sample-stop '' is in every text")

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return tuple(stop.replace("\\n", "\n") for stop in self.sample_stop)


def occurring(rows: Sequence[Sequence[int]], vocab_size: int, config: SampleConfig) -> torch.Tensor | None:
    """[rows, V] bool on the CPU: the tokens of each row, where `config` penalizes them; else None."""
    if config.sample_repetition_penalty == 1.0:
        return None
    found = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for own, row in zip(found, rows, strict=True):
        own[list(row)] = True
    return found


def pick(logits: torch.Tensor, config: SampleConfig, generator: torch.Generator, tokens: Sequence[int] = ()) -> int:
    """A token to follow `tokens`, for logits [V] fp32; `generator` moves only if something is drawn."""
    row, seen = logits.unsqueeze(0), occurring([tokens], len(logits), config)
    if config.sample_temperature == 0.0:
        return int(_penalized(row, config, seen).argmax())
    return int(torch.multinomial(next_probabilities(row, config, seen)[0], 1, generator=generator))


def pick_rows(
    logits: torch.Tensor, config: SampleConfig, uniform: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """A token for each row of a batch, which depends on that row's logits and number alone.

    Args:
        logits: [B, V] fp32.
        uniform: [B] fp64 numbers in [0, 1): where in the distribution of its row a token is taken from.
        seen: [B, V] bool, the tokens of each row (`occurring`).
    Returns:
        [B] int64.
    """
    if config.sample_temperature == 0.0:
        return _penalized(logits, config, seen).argmax(dim=-1)
    below = next_probabilities(logits, config, seen).double().cumsum(dim=-1)
    # the first token up to and including which there is more than the number says: never one of probability 0
    return torch.searchsorted(below, uniform.unsqueeze(-1) * below[:, -1:], right=True).squeeze(-1)


def next_probabilities(logits: torch.Tensor, config: SampleConfig, seen: torch.Tensor | None = None) -> torch.Tensor:
    """[B, V] fp32, each row up to a factor; arguments as for `pick_rows`. In the order of transformers' processors."""
    logits = _penalized(logits, config, seen)
    if 0 < config.sample_top_k < logits.shape[-1]:
        last = logits.topk(config.sample_top_k).values[:, -1:]
        logits = logits.masked_fill(logits < last, float("-inf"))
    probabilities = torch.softmax(logits / config.sample_temperature, dim=-1)
    if config.sample_top_p < 1.0:
        likely, order = probabilities.sort(descending=True, stable=True)
        beyond = likely.cumsum(dim=-1) - likely >= config.sample_top_p  # the share is reached before this one
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    if config.sample_min_p is not None:
        least = config.sample_min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities


def _penalized(logits: torch.Tensor, config: SampleConfig, seen: torch.Tensor | None) -> torch.Tensor:
    if seen is None:
        return logits
    penalty = config.sample_repetition_penalty
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
