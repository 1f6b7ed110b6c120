"""Tokens from a model: all prompts of a batch at once, one forward per token, one gather of the weights in all.

Every rank takes part: the weights are sharded, and the row of logits is put together over tp. The first of a tp group
draws for the group, so that ranks whose rounding differs do not part ways. Once the weights are gathered, and they stay
so, data ranks need nothing of each other: each may have prompts of its own and end when these are done. Where weights
stream, rank 0 draws for all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megazpp.inference.sample import SampleConfig, occurring, pick, pick_rows
from megazpp.model.gpt import GPTModel
from megazpp.model.kv_cache import KVCache
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.parameters import seed_for
from megazpp.zero.sharding import WeightHandle


class Generated(NamedTuple):
    """New tokens of each prompt, and how long it took.

    Attributes:
        first_seconds: until the first tokens were there: weights gathered, prompts read.
        seconds: in all.
    """

    tokens: list[list[int]]
    first_seconds: float
    seconds: float

    def describe(self) -> str:
        """One line on its speed."""
        count = sum(map(len, self.tokens))
        later = sum(len(row) - 1 for row in self.tokens if row)
        rate = f", then {later / (self.seconds - self.first_seconds):.1f} tokens/s" if later else ""
        return f"{count} tokens in {self.seconds:.2f} s: the first after {self.first_seconds:.2f} s{rate}"


def generate(
    model: GPTModel,
    sharding: WeightHandle,
    dims: ParallelDims,
    prompts: Sequence[Sequence[int]],
    config: SampleConfig,
    *,
    max_length: int,
    seed: int,
    first_prompt: int = 0,
    use_cache: bool = True,
    cache_on_host: bool = False,
    is_last: Callable[[int, int], bool] = lambda row, token: False,
) -> Generated:
    """Continue each of `prompts` (at least one token) by up to `config.sample_tokens` tokens.

    Args:
        max_length: longest input the model takes, in tokens. Rows that are longer forget their beginning, and then each
            token costs a forward over all positions, because they have all moved.
        seed: of the draws of each prompt, with its number: the other prompts of a batch do not matter.
        first_prompt: number of the first prompt.
        use_cache: keep keys and values; without, each token costs a forward over all that came before.
        cache_on_host: keep them in the memory of the host.
        is_last: told each new token of a row, in order; whether the row ends with it. Same answers on all tp ranks.
    """
    started, first = time.perf_counter(), 0.0
    rows = [list(prompt) for prompt in prompts]
    going = [True] * len(rows)
    names = [f"prompt {first_prompt + row}" for row in range(len(rows))]
    generators = [torch.Generator().manual_seed(seed_for(name, seed=seed)) for name in names]
    together = dims.tp if sharding.keeps_gathered else dims.world  # who must take equally many forwards
    with torch.no_grad(), evaluating(model), sharding.kept_gathered():
        reader = Reader(model, rows, config.sample_tokens, max_length, use_cache, cache_on_host)
        for _ in range(config.sample_tokens):
            logits = reader.next_logits(rows, going)
            drawn = torch.zeros(len(rows), dtype=torch.int64)
            if together.rank == 0:
                scores = logits.float().cpu()
                for row in itertools.compress(range(len(rows)), going):
                    drawn[row] = pick(scores[row], config, generators[row], rows[row])
            agreed = together.all_reduce_(drawn.to(logits.device)).tolist()  # others bring zeros
            for row in itertools.compress(range(len(rows)), tuple(going)):
                rows[row].append(agreed[row])
                going[row] = not is_last(row, agreed[row])
            first = first or time.perf_counter() - started
            if not any(going):
                break
    new = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    return Generated(new, first, time.perf_counter() - started)


class Drawn(NamedTuple):
    """Completions of a batch of prompts, on the CPU; T is the limit.

    Attributes:
        tokens: [B, T] int64, 0 after a completion.
        lengths: [B] int64 tokens of each, the one that ended it included.
        logps: [B, T] fp32 log-probabilities of the tokens at the temperature, before a penalty, top-k, top-p
            and min-p.
        ended: [B] bool; False where the limit ended it.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    logps: torch.Tensor
    ended: torch.Tensor


@torch.no_grad()
def draw_completions(
    model: GPTModel,
    tp: MeshAxis,
    prompts: Sequence[Sequence[int]],
    config: SampleConfig,
    uniform: torch.Tensor,
    *,
    ends: int | None,
    is_last: Callable[[int, int], bool] | None = None,
) -> Drawn:
    """Draw a completion of each of `prompts` (at least one token), `config.sample_tokens` tokens long at most.

    No loop over rows: what a row draws follows from its logits and its numbers. Call where the model is in evaluation
    mode and its weights stay gathered. Rows that are over leave the batch when half of it is.

    Args:
        uniform: [B, sample_tokens] fp64 in [0, 1), see `pick_rows`.
        ends: the token that ends a completion.
        is_last: also asked, for each row and new token, whether the row ends with it. Same answers on all tp ranks.
    """
    batch, limit, lengths = len(prompts), config.sample_tokens, [len(prompt) for prompt in prompts]
    longest = max(lengths)
    device = model.embedding.word.weight.device  # of frozen models too
    cache = KVCache(len(model.layers), batch, longest + limit)
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    last, counts = torch.tensor(lengths, device=device) - 1, lengths
    uniform, rows = uniform.to(device), torch.arange(batch, device=device)  # which of the batch are still there
    drawn = torch.zeros(batch, limit, dtype=torch.int64, device=device)
    logps = torch.zeros(batch, limit, device=device)
    going, new_lengths = torch.ones(batch, dtype=torch.bool, device=device), torch.zeros_like(drawn[:, 0])
    seen = occurring(prompts, model.vocab_size, config)
    seen = None if seen is None else seen.to(device)
    for place in range(limit):
        part = model(tokens, cache=cache, logits_at=last)[:, 0]
        cache.add(counts)
        logits = tp.all_gather(part.t()).t()[:, : model.vocab_size].float()
        token = tp.broadcast_(pick_rows(logits, config, uniform[rows, place], None if seen is None else seen[rows]))
        if seen is not None:
            seen[rows, token] = True
        scaled = logits / (config.sample_temperature or 1.0)
        logp = scaled.gather(-1, token.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(dim=-1)
        here = going[rows]
        drawn[rows, place], logps[rows, place] = token * here, logp * here
        new_lengths[rows] += here
        over = token == ends if ends is not None else torch.zeros_like(here)
        if is_last is not None:
            asked = zip(rows.tolist(), token.tolist(), here.tolist(), strict=True)
            over |= torch.tensor([goes and is_last(row, new) for row, new, goes in asked], device=device)
        going[rows] = here & ~over
        left = (here & ~over).nonzero().flatten()
        if not len(left):
            break
        tokens, last, counts = token.unsqueeze(1), torch.zeros_like(rows), [1] * len(rows)
        if 2 * len(left) <= len(rows):
            cache.keep(left)
            rows, tokens, last, counts = rows[left], tokens[left], last[left], counts[: len(left)]
    return Drawn(drawn.cpu(), new_lengths.cpu(), logps.cpu(), (~going).cpu())


class Reader:
    """Reads rows of tokens and says what the model expects next.

    Args:
        rows: as they will be given first.
        num_tokens: by which each row will grow at most.
        max_length, use_cache, cache_on_host: see `generate`.
    """

    def __init__(
        self,
        model: GPTModel,
        rows: Sequence[Sequence[int]],
        num_tokens: int,
        max_length: int,
        use_cache: bool,
        cache_on_host: bool = False,
    ) -> None:
        self._model, self._max_length = model, max_length
        self._device = model.embedding.word.weight.device  # of frozen models too
        self._cache: KVCache | None = None
        if use_cache:
            capacity = min(max_length, max(map(len, rows)) + num_tokens)
            self._cache = KVCache(len(model.layers), len(rows), capacity, on_host=cache_on_host)

    def next_logits(self, rows: Sequence[Sequence[int]], going: Sequence[bool]) -> torch.Tensor:
        """[B, V]: the logits after the last token of each of `rows`; nobody looks at those that are not `going`."""
        if max(map(len, rows)) > self._max_length:
            self._cache = None  # positions move from here on
        cache = self._cache
        seen = [0] * len(rows) if cache is None else cache.lengths
        new = [row[count:][-self._max_length :] for row, count in zip(rows, seen, strict=True)]
        longest = max(map(len, new))
        # causal: what follows a row's own tokens is never seen
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in new], device=self._device)
        last = torch.tensor([len(row) - 1 for row in new], device=self._device)
        part = self._model(tokens, cache=cache, logits_at=last)[:, 0]
        if cache is not None:  # a row that is over stays where it is: its last token is read again and again
            cache.add([len(row) if goes else 0 for row, goes in zip(new, going, strict=True)])
        return self._model.tp.all_gather(part.t()).t()[:, : self._model.vocab_size]


@contextmanager
def evaluating(model: GPTModel) -> Iterator[None]:
    """Evaluation mode, and sequences of any length: without sequence parallelism, which changes who computes what only.

    Everything is as it was afterwards.
    """
    training = model.training
    split: list[Any] = [module for module in model.modules() if getattr(module, "sequence_parallel", False)]
    model.eval()
    for module in split:
        module.sequence_parallel = False
    try:
        yield
    finally:
        for module in split:
            module.sequence_parallel = True
        model.train(training)
