"""A sample of text from a model in training: a plain forward per token, so that a user sees what was learned.

Every rank takes part (the weights are sharded) and all draw the same tokens: the full row of logits is assembled
over tp and the random numbers come from one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megazpp.flags import flag
from megazpp.model.gpt import GPTModel
from megazpp.zero.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The sample of text printed after training."""

    sample_prompt: str | None = flag(None, "text to continue (default: an end-of-document token)")
    sample_tokens: int = flag(0, "tokens to generate; 0 for no sample")
    sample_temperature: float = flag(0.8, "divide the logits by this; 0 takes the most likely token")
    sample_top_k: int = flag(40, "draw among this many most likely tokens; 0 for all")

    def __post_init__(self) -> None:
        for name in ("sample_tokens", "sample_temperature", "sample_top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is negative")


@torch.no_grad()
def generate(
    model: GPTModel, sharding: Sharding, prompt: Sequence[int], config: SampleConfig, *, max_length: int, seed: int
) -> list[int]:
    """Continue `prompt` (at least one token) by `config.sample_tokens` tokens; returns the new ones.

    Args:
        max_length: longest input the model takes; earlier tokens are forgotten beyond it. A multiple of the tp size,
            because sequence parallelism splits the input, which is padded to this length.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(config.sample_tokens):
        seen = tokens[-max_length:]
        padded = torch.tensor([seen + [0] * (max_length - len(seen))], device=device)  # causal: padding is never seen
        tokens.append(_pick(_next_logits(model, padded, len(seen) - 1), config, generator))
    sharding.free_gathered()
    model.train()
    return tokens[len(prompt) :]


def _next_logits(model: GPTModel, tokens: torch.Tensor, position: int) -> torch.Tensor:
    """[V] fp32 on the CPU: the logits after `position` of tokens [1, S]."""
    part = model(tokens)[0, position]
    return model.tp.all_gather(part.contiguous()).float().cpu()[: model.vocab_size]


def _pick(logits: torch.Tensor, config: SampleConfig, generator: torch.Generator) -> int:
    if config.sample_temperature == 0.0:
        return int(logits.argmax())
    if 0 < config.sample_top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(config.sample_top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / config.sample_temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
