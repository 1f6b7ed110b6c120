"""How the next token is drawn: greedily, or by temperature among the top k or the top p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazpp.flags import check_not_negative, flag


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text from the model: what it continues, how far, and how tokens are drawn."""

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
    sample_stop: tuple[str, ...] = flag(
        (), "strings that end a text, not shown; \\n in them is a new line", nargs="*", aliases=("--stop",)
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "sample_tokens", "sample_temperature", "sample_top_k")
        if not 0.0 < self.sample_top_p <= 1.0:
            raise ValueError(f"--sample-top-p {self.sample_top_p} is not in (0, 1]")
        if "" in self.sample_stop:
            raise ValueError("--sample-stop '' is in every text")

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return tuple(stop.replace("\\n", "\n") for stop in self.sample_stop)


def pick(logits: torch.Tensor, config: SampleConfig, generator: torch.Generator) -> int:
    """A token for logits [V] fp32; `generator` moves only if something is drawn."""
    if config.sample_temperature == 0.0:
        return int(logits.argmax())
    if 0 < config.sample_top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(config.sample_top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / config.sample_temperature, dim=-1)
    if config.sample_top_p < 1.0:
        likely, order = probabilities.sort(descending=True, stable=True)
        beyond = likely.cumsum(dim=-1) - likely >= config.sample_top_p  # the share is reached before this one
        probabilities = probabilities.index_fill(0, order[beyond], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def pick_rows(logits: torch.Tensor, config: SampleConfig, uniform: torch.Tensor) -> torch.Tensor:
    """A token for each row of a batch, which depends on that row's logits and number alone.

    Args:
        logits: [B, V] fp32.
        uniform: [B] fp64 numbers in [0, 1): where in the distribution of its row a token is taken from.
    Returns:
        [B] int64.
    """
    if config.sample_temperature == 0.0:
        return logits.argmax(dim=-1)
    if 0 < config.sample_top_k < logits.shape[-1]:
        last = logits.topk(config.sample_top_k).values[:, -1:]
        logits = logits.masked_fill(logits < last, float("-inf"))
    probabilities = torch.softmax(logits / config.sample_temperature, dim=-1)
    if config.sample_top_p < 1.0:
        likely, order = probabilities.sort(descending=True, stable=True)
        beyond = likely.cumsum(dim=-1) - likely >= config.sample_top_p
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    below = probabilities.double().cumsum(dim=-1)
    # the first token up to and including which there is more than the number says: never one of probability 0
    return torch.searchsorted(below, uniform.unsqueeze(-1) * below[:, -1:], right=True).squeeze(-1)
