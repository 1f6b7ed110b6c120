"""Tokens from a model: all prompts of a batch at once, one forward per token, one gather of the weights in all.

Every rank takes part: the weights are sharded, and the row of logits is put together over tp. The first of a tp group
draws for the group, so that ranks whose rounding differs do not part ways. Once the weights are gathered, and they stay
so, data ranks need nothing of each other: each may have prompts of its own and end when these are done. Where weights
stream, rank 0 draws for all.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.inference.decoding import Drawing, StepGraphs
from megazpp.inference.sample import SampleConfig, pick
from megazpp.model.gpt import GPTModel
from megazpp.model.kv_cache import KVCache
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.parameters import seed_for
from megazpp.zero.sharding import WeightHandle

LOOK_EVERY = 8  # tokens, between two waits for the device
MOST_SEQUENCES = 256  # of a batch that `sequences_that_fit` chooses


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
        seconds = self.seconds - self.first_seconds
        rate = f", then {later / seconds:.1f} tokens/s" if later and seconds else ""
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
    cache_on_host: bool = False,
    is_last: Callable[[int, int], bool] = lambda row, token: False,
) -> Generated:
    """Continue each of `prompts` (at least one token) by up to `config.sample_tokens` tokens.

    Args:
        max_length: longest input the model takes, in tokens. Rows that are longer forget their beginning, and then each
            token costs a forward over all positions, because they have all moved.
        seed: of the draws of each prompt, with its number: the other prompts of a batch do not matter.
        first_prompt: number of the first prompt.
        cache_on_host: keep keys and values in the memory of the host.
        is_last: told each new token of a row, in order; whether the row ends with it. Same answers on all tp ranks.
    """
    started, first = time.perf_counter(), 0.0
    rows = [list(prompt) for prompt in prompts]
    active = [True] * len(rows)
    seeds = [seed_for(f"prompt {first_prompt + row}", seed=seed) for row in range(len(rows))]
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    capacity = min(max_length, max(map(len, rows)) + config.sample_tokens)
    device = model.embedding.word.weight.device  # of frozen models too
    cache: KVCache | None = KVCache(len(model.layers), len(rows), capacity, device=device, on_host=cache_on_host)
    together = dims.tp if sharding.keeps_gathered else dims.world  # who must take equally many forwards
    with torch.no_grad(), evaluating(model), sharding.kept_gathered():
        for _ in range(config.sample_tokens):
            if max(map(len, rows)) > max_length:
                cache = None  # positions move from here on
            logits = _next_logits(model, cache, rows, active, max_length)
            drawn = torch.zeros(len(rows), dtype=torch.int64)
            if together.rank == 0:
                scores = logits.float().cpu()
                for row in itertools.compress(range(len(rows)), active):
                    drawn[row] = pick(scores[row], config, generators[row], rows[row])
            agreed = together.all_reduce_(drawn.to(logits.device)).tolist()  # others bring zeros
            for row in itertools.compress(range(len(rows)), tuple(active)):
                rows[row].append(agreed[row])
                active[row] = not is_last(row, agreed[row])
            first = first or time.perf_counter() - started
            if not any(active):
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
    ends: Sequence[int] = (),
    is_last: Callable[[int, int], bool] | None = None,
    graphs: StepGraphs | None = None,
    look_every: int | None = None,
) -> Drawn:
    """Draw a completion of each of `prompts` (at least one token), `config.sample_tokens` tokens long at most.

    No loop over rows: what a row draws follows from its logits and its numbers. Call where the model is in evaluation
    mode and its weights stay gathered. Rows that are over leave the batch when half of it is and the host sees it.

    Args:
        uniform: [B, sample_tokens] fp64 in [0, 1), see `pick_rows`.
        ends: tokens that end a completion.
        is_last: also asked, for each row and new token, whether the row ends with it. Same answers on all tp ranks.
            The host then waits for each token.
        graphs: object that runs the steps; None for eager steps.
        look_every: tokens after which the host looks which rows are over; None for LOOK_EVERY on CUDA, where it waits
            for the device, and 1 on a CPU. Tokens that a row draws after its end are not part of the result.
    """
    drawing = Drawing(model, tp, prompts, config, uniform, ends=ends)
    graphs = graphs or StepGraphs(capture=False)
    if is_last is not None or look_every is None:
        look_every = LOOK_EVERY if drawing.going.is_cuda and is_last is None else 1
    going, limit = [True] * len(prompts), config.sample_tokens
    graphs.drop()  # of other weights
    try:
        for count in range(1, limit + 1):
            if count == 1:
                drawing.read_prompts_()
            else:
                drawing.advance_(graphs)
            if is_last is None and (not ends or count == limit or count % look_every):
                continue
            tokens, now = drawing.look()
            if is_last is not None:
                asked = zip(drawing.rows, tokens, going, strict=True)
                over = [goes and is_last(row, token) for row, token, goes in asked]
                if any(over):
                    now = [goes and not ended for goes, ended in zip(now, over, strict=True)]
                    drawing.end_(now)
            left = [place for place, goes in enumerate(now) if goes]
            if not left:
                break
            if 2 * len(left) <= len(now):
                drawing.keep_(left)
                now = [True] * len(left)
            going = now
    finally:
        graphs.drop()
    return Drawn(*(x.cpu() for x in (drawing.tokens, drawing.lengths, drawing.logps, ~drawing.going)))


def _next_logits(
    model: GPTModel, cache: KVCache | None, rows: Sequence[Sequence[int]], active: Sequence[bool], max_length: int
) -> torch.Tensor:
    """[B, V]: the logits after the last token of each of `rows`; nobody looks at those that are not active."""
    seen = [0] * len(rows) if cache is None else cache.lengths
    new = [row[count:][-max_length:] for row, count in zip(rows, seen, strict=True)]
    device, longest = model.embedding.word.weight.device, max(map(len, new))  # of frozen models too
    # causal: what follows a row's own tokens is never seen
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in new], device=device)
    last = None
    if longest > 1:
        last = torch.tensor([len(row) - 1 for row in new], device=device)
    part = model(tokens, cache=cache, logits_at=last)[:, 0]
    if cache is not None:  # a row that is over stays where it is: its last token is read again and again
        cache.add([len(row) if goes else 0 for row, goes in zip(new, active, strict=True)])
    return model.tp.all_gather(part.t()).t()[:, : model.vocab_size]


def sequences_that_fit(model: GPTModel, length: int, device: torch.device, *, on_host: bool) -> int:
    """Count the sequences of `length` tokens that have their keys and values in half of the free memory; 1 to 256.

    More would not help: products of so many rows take longer than it takes to unpack the matrix.
    """
    config, weight = model.config, model.embedding.word.weight
    per_token = 2 * config.layers * (config.query_groups // model.tp.size) * config.head_size * weight.element_size()
    if device.type == "cuda" and not on_host:
        free = torch.cuda.mem_get_info(device)[0]
    else:
        try:
            fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            free = 1024 * int(fields["MemAvailable"].split()[0])
        except (OSError, KeyError, ValueError):  # not on Linux: all the memory there is
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(free // 2 // (per_token * length), 1), MOST_SEQUENCES)


@contextmanager
def evaluating(model: GPTModel) -> Iterator[None]:
    """Evaluation mode, and sequences of any length: without sequence and context parallelism.

    Those change who computes what only. Everything is as it was afterwards.
    """
    training = model.training
    names = ("sequence_parallel", "context_parallel")
    split: list[Any] = [(each, name) for each in model.modules() for name in names if getattr(each, name, False)]
    model.eval()
    for module, name in split:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module, name in split:
            setattr(module, name, True)
        model.train(training)
