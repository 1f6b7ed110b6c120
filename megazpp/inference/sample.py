"""Choose the next token from logits: the most likely one, or a random one after top-k, top-p and min-p filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazpp.inference.config import SampleConfig


def occurring(rows: Sequence[Sequence[int]], vocab_size: int, config: SampleConfig) -> torch.Tensor | None:
    """Mark the tokens that occur in each prompt, for the repetition penalty.

    Args:
        rows: token ids of each prompt.
        vocab_size: V, the number of tokens of the vocabulary.
        config: sampling settings.
    Returns:
        [rows, V] bool on the CPU, True for tokens that occur; None without a repetition penalty.
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
    """Choose the next token for each row of a batch.

    A row's token depends only on the row's logits, its random number, and the tokens that occur in it.

    Args:
        logits: [B, V] fp32 logits of the next token, for B rows and a vocabulary of V tokens.
        config: sampling settings.
        uniform: [B] fp64 random numbers in [0, 1): the quantile of each row's distribution at which the token is taken.
        seen: [B, V] bool, True for tokens that occur in each row (see `occurring`); None without a repetition penalty.
    Returns:
        [B] int64 token ids.
    """
    if config.sample_temperature == 0.0:
        return _penalized(logits, config, seen).argmax(dim=-1)
    below = next_probabilities(logits, config, seen).double().cumsum(dim=-1)
    # Take the first token whose cumulative probability exceeds the random number. A token of probability 0 is never
    # taken, because it does not increase the cumulative probability.
    found = torch.searchsorted(below, uniform.unsqueeze(-1) * below[:, -1:], right=True).squeeze(-1)
    return found.clamp(max=logits.shape[-1] - 1)  # NaN in the logits would give an id beyond the vocabulary


def next_probabilities(logits: torch.Tensor, config: SampleConfig, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Return the probabilities with which the next token is sampled; tokens that are filtered out have 0.

    Repetition penalty, top-k, temperature, top-p and min-p are applied in the order of transformers' logits processors.

    Args:
        logits: [B, V] fp32 logits of the next token, for B rows and a vocabulary of V tokens.
        config: sampling settings.
        seen: [B, V] bool, True for tokens that occur in each row; None without a repetition penalty.
    Returns:
        [B, V] fp32 probabilities, which are not normalized after top-p and min-p.
    """
    logits = _penalized(logits, config, seen)
    if 0 < config.sample_top_k < logits.shape[-1]:
        last = logits.topk(config.sample_top_k).values[:, -1:]
        logits = logits.masked_fill(logits < last, float("-inf"))
    probabilities = torch.softmax(logits / config.sample_temperature, dim=-1)
    if config.sample_top_p < 1.0:
        likely, order = probabilities.sort(descending=True, stable=True)
        beyond = likely.cumsum(dim=-1) - likely >= config.sample_top_p  # True after the tokens whose sum reaches top-p
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    if config.sample_min_p is not None:
        least = config.sample_min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities


def _penalized(logits: torch.Tensor, config: SampleConfig, seen: torch.Tensor | None) -> torch.Tensor:
    """Apply the repetition penalty to the logits of tokens that already occur, and return all logits.

    Args:
        logits: [B, V] logits of the next token, for B rows and a vocabulary of V tokens.
        config: sampling settings, with the penalty.
        seen: [B, V] bool, True for tokens that occur in each row; None without a repetition penalty.
    """
    if seen is None:
        return logits
    penalty = config.sample_repetition_penalty
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
