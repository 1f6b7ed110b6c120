"""Sample the next token: greedily, or by temperature among the tokens that top-k, top-p and min-p keep."""

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
        (),
        "texts to continue (default: an end-of-document token; stdin in generate.py)",
        nargs="*",
        aliases=("--prompt",),
    )
    sample_tokens: int = flag(
        0, "number of tokens to generate; 0 generates no sample", aliases=("--num-tokens-to-generate",)
    )
    sample_temperature: float = flag(
        0.8, "divisor of the logits; 0 selects the most likely token", aliases=("--temperature",)
    )
    sample_top_k: int = flag(
        40, "number of most likely tokens to sample from; 0 keeps all", aliases=("--top-k", "--top_k")
    )
    sample_top_p: float = flag(
        1.0,
        "probability in (0, 1]: sample from the most likely tokens that together have it",
        aliases=("--top-p", "--top_p"),
    )
    sample_min_p: float | None = flag(
        None,
        "share in [0, 1]: sample from tokens with at least this share of the most likely token's probability",
        aliases=("--min-p",),
    )
    sample_repetition_penalty: float = flag(
        1.0,
        "divisor of positive logits and factor of negative logits, for tokens that already occur in the prompt or text",
        aliases=("--repetition-penalty",),
    )
    sample_stop: tuple[str, ...] = flag(
        (),
        "strings that end a text and are not part of it; \\n in them is a line break",
        nargs="*",
        aliases=("--stop",),
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "sample_tokens", "sample_temperature", "sample_top_k")
        if not 0.0 < self.sample_top_p <= 1.0:
            raise ValueError(f"--sample-top-p {self.sample_top_p} is not in (0, 1]")
        if not 0.0 <= (self.sample_min_p or 0.0) <= 1.0:
            raise ValueError(f"--sample-min-p {self.sample_min_p} is not in [0, 1]")
        check_positive(self, "sample_repetition_penalty")
        if "" in self.sample_stop:
            raise ValueError("--sample-stop '' is in every text: give a string that is not empty")

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a generated text; `\\n` in the flag becomes a line break."""
        return tuple(stop.replace("\\n", "\n") for stop in self.sample_stop)


def occurring(rows: Sequence[Sequence[int]], vocab_size: int, config: SampleConfig) -> torch.Tensor | None:
    """Return which tokens occur in each row, [rows, V] bool on the CPU; None without a repetition penalty.

    Args:
        rows: token ids of each row.
        vocab_size: V.
        config: sampling settings.
    """
    if config.sample_repetition_penalty == 1.0:
        return None
    found = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for own, row in zip(found, rows, strict=True):
        own[list(row)] = True
    return found


def pick_rows(
    logits: torch.Tensor, config: SampleConfig, uniform: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a token for each row of a batch, which depends only on that row's logits and random number.

    Args:
        logits: [B, V] fp32.
        config: sampling settings.
        uniform: [B] fp64 in [0, 1): the quantile of each row's token distribution at which the token is taken.
        seen: [B, V] bool, the tokens that occur in each row (see `occurring`).
    Returns:
        [B] int64.
    """
    if config.sample_temperature == 0.0:
        return _penalized(logits, config, seen).argmax(dim=-1)
    below = next_probabilities(logits, config, seen).double().cumsum(dim=-1)
    # Take the first token whose cumulative probability exceeds the number, so never a token of probability 0.
    found = torch.searchsorted(below, uniform.unsqueeze(-1) * below[:, -1:], right=True).squeeze(-1)
    return found.clamp(max=logits.shape[-1] - 1)  # NaN would give an id beyond the vocabulary


def next_probabilities(logits: torch.Tensor, config: SampleConfig, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Return [B, V] fp32 probabilities of the next token, not normalized.

    Penalty, top-k, temperature, top-p and min-p are applied in the order of transformers' logits processors.

    Args:
        logits: [B, V] fp32.
        config: sampling settings.
        seen: [B, V] bool, the tokens that occur in each row.
    """
    logits = _penalized(logits, config, seen)
    if 0 < config.sample_top_k < logits.shape[-1]:
        last = logits.topk(config.sample_top_k).values[:, -1:]
        logits = logits.masked_fill(logits < last, float("-inf"))
    probabilities = torch.softmax(logits / config.sample_temperature, dim=-1)
    if config.sample_top_p < 1.0:
        likely, order = probabilities.sort(descending=True, stable=True)
        beyond = likely.cumsum(dim=-1) - likely >= config.sample_top_p  # reached without this token
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    if config.sample_min_p is not None:
        least = config.sample_min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities


def _penalized(logits: torch.Tensor, config: SampleConfig, seen: torch.Tensor | None) -> torch.Tensor:
    """Apply the repetition penalty to the logits of tokens in `seen`."""
    if seen is None:
        return logits
    penalty = config.sample_repetition_penalty
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
