"""Generate tokens for a batch of prompts: each new token takes one forward. Sharded weights are gathered only once.

Each prompt is a row of the batch, and one forward gives the next token of all rows. A row's tokens depend only on its
logits and its random numbers, and not on the parallel layout. All ranks take part, because the weights are sharded, and
the logits are gathered over tensor-parallel ranks. One rank samples for all ranks of a tensor-parallel group, because
ranks with different rounding could sample different tokens.

While the weights stay gathered, data ranks do not communicate. Each data rank may have its own prompts, and its rows
may end at any time. If weights are streamed, or experts are divided among ranks, all ranks must run equally many
forwards. Rank 0 then samples for all ranks.

The host launches the forward of each token without waiting for the device. For this, the new tokens, and the marks of
rows that have ended, stay on the device.

Legend: B rows of a batch, R rows that have not left the batch, T largest number of new tokens, V vocabulary size.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from megazpp.base.memory import host_memory
from megazpp.base.program import UserError
from megazpp.inference.config import SampleConfig
from megazpp.inference.sample import occurring, pick_rows
from megazpp.model.gpt import GPTModel, Head
from megazpp.model.kv_cache import KVCache
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.initialize import seed_for
from megazpp.zero.sharding import WeightHandle

LOOK_EVERY = 8  # number of tokens after which the host waits for a GPU to see which rows have ended
MOST_SEQUENCES = 256  # largest number of rows that `sequences_that_fit` returns


class Generated(NamedTuple):
    """The new tokens of each prompt, and the time that their generation took.

    Attributes:
        tokens: new token ids of each prompt.
        first_seconds: seconds until each prompt had its first new token, which includes gathering the weights and the
            forward of the prompts.
        seconds: seconds of the whole generation.
    """

    tokens: list[list[int]]
    first_seconds: float
    seconds: float

    def describe(self) -> str:
        """Return one line for the log about the number of tokens and the speed of their generation."""
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
    stopped: Callable[[], bool] = lambda: False,
) -> Generated:
    """Continue each prompt by up to `config.sample_tokens` tokens. All ranks call this.

    Args:
        model: model that continues the prompts.
        sharding: handle to the model's weights.
        dims: mesh axes of the job.
        prompts: token ids of each prompt, at least one per prompt.
        config: sampling settings.
        max_length: longest input of the model, in tokens; see `draw_completions`.
        seed: seed for the random numbers. A prompt's random numbers depend only on the seed and on the prompt's index.
        first_prompt: index of the first prompt, if earlier calls have continued other prompts of the same list.
        cache_on_host: True to keep keys and values in host memory.
        is_last: function (row, token) that is called for each new token of a row in order, and returns True if the
            token ends the row. Its results must be the same on all tensor-parallel ranks. With streamed weights or
            expert parallelism, they must be the same on all ranks.
        stopped: function that returns True if this rank has caught a stop signal, which ends all rows.
    """
    started, first = time.perf_counter(), 0.0

    def timed(row: int, token: int) -> bool:
        """Call `is_last` for a new token, and record at the first call how long the first token took."""
        nonlocal first
        first = first or time.perf_counter() - started
        return is_last(row, token)

    uniform = random_numbers([f"prompt {first_prompt + row}" for row in range(len(prompts))], config, seed=seed)
    # True if data ranks do not communicate in forwards after the first, so that each may run its own number of forwards
    apart = sharding.keeps_gathered and dims.layout.ep == 1
    with torch.no_grad(), evaluating(model), sharding.keep_unsharded():
        drawn = draw_completions(
            model,
            dims.tp if apart else dims.world,
            prompts,
            config,
            uniform,
            is_last=timed,
            stopped=stopped,
            max_length=max_length,
            cache_on_host=cache_on_host,
            stays_gathered=sharding.keeps_gathered,
        )
    new = [row[:length] for row, length in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)]
    return Generated(new, first, time.perf_counter() - started)


def random_numbers(names: Sequence[str], config: SampleConfig, *, seed: int) -> torch.Tensor:
    """Return the random numbers with which tokens are sampled, [len(names), T] fp64 in [0, 1).

    Args:
        names: name of each row. A row's random numbers depend only on its name and the seed.
        config: sampling settings, with T, the largest number of new tokens.
        seed: seed for all rows.
    """
    generators = [torch.Generator().manual_seed(seed_for(name, seed=seed)) for name in names]
    count = config.sample_tokens
    return torch.stack([torch.rand(count, generator=each, dtype=torch.float64) for each in generators])


class Drawn(NamedTuple):
    """Sampled completions of B prompts, on the CPU; T is the largest number of new tokens.

    Attributes:
        tokens: [B, T] int64 token ids, 0 after the end of a completion.
        lengths: [B] int64 number of tokens of each completion, including the token that ended the completion.
        logps: [B, T] fp32 log-probabilities of the tokens at the sampling temperature, without the effect of repetition
            penalty, top-k, top-p and min-p.
        ended: [B] bool, True if a token ended the completion, also if this was its T-th token; False if the limit of T
            tokens has cut the completion.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    logps: torch.Tensor
    ended: torch.Tensor


@torch.no_grad()
def draw_completions(
    model: GPTModel,
    together: MeshAxis,
    prompts: Sequence[Sequence[int]],
    config: SampleConfig,
    uniform: torch.Tensor,
    *,
    ends: Sequence[int] = (),
    is_last: Callable[[int, int], bool] | None = None,
    look_every: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    max_length: int = sys.maxsize,
    cache_on_host: bool = False,
    stays_gathered: bool = True,
) -> Drawn:
    """Sample a completion of each prompt, at most `config.sample_tokens` tokens long.

    The model must be in evaluation mode, and the handle to its weights must keep them gathered or fetch them for each
    forward. Rows that have ended are removed from the batch once they are at least half of the batch.

    Args:
        model: model that samples the completions, in evaluation mode.
        together: axis of the ranks that run equally many forwards; the axis's first rank samples for all of them.
        prompts: token ids of each prompt, at least one per prompt.
        config: sampling settings.
        uniform: [B, T] fp64 random numbers in [0, 1) for B prompts and T = `config.sample_tokens`; see `pick_rows`.
        ends: token ids that end a completion.
        is_last: function (row, token) that is called for each new token and may end the row by returning True. Its
            results must be the same on all ranks of `together`. With this function the host waits for each token.
        look_every: number of tokens after which the host checks which rows have ended. None: LOOK_EVERY on CUDA, where
            a check waits for the device, and 1 on a CPU. Tokens that a row samples after its end are dropped.
        stopped: function that returns True if this rank has caught a stop signal. The sampling then ends early on all
            ranks of `together`. The completions are incomplete: `generate` returns them for display, and
            `PolicySampler` discards them.
        max_length: longest input of the model, in tokens. A longer row loses its first tokens. Each further token then
            needs a forward over all positions, because the remaining tokens have changed their positions.
        cache_on_host: True to keep keys and values in host memory.
        stays_gathered: True if the weights stay gathered after the first forward. Later forwards then skip the hooks
            that gather weights.

    Raises:
        UserError: a logit is NaN, for example because the weights are from a run that has diverged.
    """
    # ---- create the key-value cache, the tensors of the results, and other state of the sampling
    device = model.device
    batch, limit, longest = len(prompts), config.sample_tokens, max(map(len, prompts))
    if is_last is not None or look_every is None:
        look_every = LOOK_EVERY if device.type == "cuda" and is_last is None else 1
    capacity = min(longest + limit, max_length)
    cache: KVCache | None = KVCache(len(model.layers), batch, capacity, device=device, on_host=cache_on_host)
    # Modules with hooks, such as those that gather weights; see `without_hooks`
    hooked = [each for each in model.modules() if each._forward_pre_hooks or each._forward_hooks]
    end_ids, uniform = torch.tensor(ends, dtype=torch.int64, device=device), uniform.to(device)
    seen = occurring(prompts, model.vocab_size, config)
    seen = None if seen is None else seen.to(device)
    # Indices of the R prompts whose rows are still in the batch, on the host and on the device
    rows, places = list(range(batch)), torch.arange(batch, device=device)
    found = Drawn(
        torch.zeros(batch, limit, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
        torch.zeros(batch, limit, device=device),
        torch.zeros(batch, dtype=torch.bool, device=device),
    )
    # `broken` is True once a logit of any row was NaN. It is on the device, so that the host need not wait for it after
    # each token.
    broken = torch.zeros((), dtype=torch.bool, device=device)
    for count in range(limit):
        # ---- end here if this rank decides alone; several ranks agree below, so that all run equally many forwards
        stops = stopped()
        if stops and together.size == 1:
            break
        # ---- compute this tensor-parallel rank's part of the next token's logits, [R, V / tp]
        if longest + count > max_length:
            cache = None  # rows lose their first tokens, so the others change position, and cached keys are wrong
        if count and cache is not None:
            with without_hooks(hooked if stays_gathered else []):
                part = model(found.tokens[places, count - 1].unsqueeze(1), cache=cache)[:, 0]
            cache.add([1] * len(rows))
        else:
            earlier = found.tokens[places, :count].tolist() if count else [[]] * len(rows)
            texts = [[*prompts[row], *new][-max_length:] for row, new in zip(rows, earlier, strict=True)]
            counts = list(map(len, texts))
            # Padding comes after a row's tokens, so causal attention never reads it
            tokens = torch.tensor([[*text, *[0] * (max(counts) - len(text))] for text in texts], device=device)
            last = torch.tensor(counts, device=device) - 1
            part = model(tokens, cache=cache, head=logits_at(last))[:, 0]
            if cache is not None:
                cache.add(counts)
        # ---- choose the next token of each row, the same on all ranks
        logits = model.tp.all_gather(part.t()).t()[:, : model.vocab_size].float()
        token = pick_rows(logits, config, uniform[places, count], None if seen is None else seen[places])
        # One all-reduce gives all ranks of `together` the first rank's tokens, because other ranks add zeros. It also
        # counts the ranks that have caught a stop signal. The broadcast makes both results equal on all cp ranks, which
        # generate the same rows.
        own = token if together.rank == 0 else torch.zeros_like(token)
        signal = torch.full((1,), stops, dtype=torch.int64, device=device)
        agreed = model.cp.broadcast_(together.all_reduce_(torch.cat((own, signal))))
        token = agreed[:-1]
        if seen is not None:
            # Assigning the Python value `True` to `seen` would copy it from the host, and wait for the device
            seen.index_put_((places, token), torch.ones_like(token, dtype=torch.bool))
        # ---- record the token; `lengths` does not count tokens of rows that have already ended
        scaled = logits / (config.sample_temperature or 1.0)
        logp = scaled.gather(-1, token.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(dim=-1)
        found.tokens[places, count], found.logps[places, count] = token, logp
        found.lengths[places] += ~found.ended[places]
        broken |= logits.isnan().any()
        if ends:
            found.ended[places] |= (token.unsqueeze(1) == end_ids).any(dim=1)
        # ---- find the rows that have ended, and shrink the batch
        # To find these rows, the host waits for the device. So without `is_last`, look only after every `look_every`
        # tokens, not after the last token, and never if there are no tokens that end a row.
        if is_last is None and (not ends or count + 1 == limit or (count + 1) % look_every):
            continue
        marks = (found.ended[places], broken.expand(len(rows)), agreed[-1:].expand(len(rows)))
        new, over, nan, stop = torch.stack((token, *marks)).tolist()
        if nan[0] or stop[0]:
            break
        if is_last is not None:
            over = [bool(ended) or is_last(row, each) for row, each, ended in zip(rows, new, over, strict=True)]
            found.ended[places] = torch.tensor(over).to(device)
        left = [place for place, ended in enumerate(over) if not ended]
        if not left:
            break
        if 2 * len(left) <= len(rows):
            if cache is not None:
                cache.keep(left)
            rows, places = [rows[place] for place in left], places[torch.tensor(left).to(device)]
            longest = max(len(prompts[row]) for row in rows)
    if broken:
        raise UserError(
            "no token can be sampled: the model's logits are NaN, so its weights have diverged; use an "
            "earlier checkpoint"
        )
    tokens, lengths, logps, ended = (tensor.cpu() for tensor in found)
    there = torch.arange(limit) < lengths.unsqueeze(1)
    return Drawn(tokens * there, lengths, logps * there, ended)


def logits_at(places: torch.Tensor) -> Head:
    """Return a head of the model's forward that computes logits for only one position of each row.

    Args:
        places: [B] index of the position in each row.
    Returns:
        a head that returns [B, 1, V / tp] logits: this tensor-parallel rank's part of the logits over V tokens.
    """

    def head(model: GPTModel, x: torch.Tensor, router_loss: torch.Tensor | None) -> torch.Tensor:
        return model.logits(x[places, torch.arange(len(places), device=x.device)].unsqueeze(0))

    return head


@contextmanager
def without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context in which the forwards of `modules` do not run their hooks, to save host time.

    The hooks gather weights, so they are not needed while the weights stay gathered. They would take a third of the
    host's time for each generated token.
    """
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in modules]
    for module in modules:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after


def sequences_that_fit(model: GPTModel, length: int, device: torch.device, *, on_host: bool) -> int:
    """Return the number of sequences, from 1 to 256, whose keys and values fit into half of the free memory.

    More than 256 sequences would not make generation with packed weights faster, because the matrix products then take
    longer than unpacking the weights.

    Args:
        model: model whose keys and values are cached.
        length: number of tokens of a sequence.
        device: device of the model.
        on_host: True if keys and values are kept in host memory; then its free memory counts.
    """
    config, weight = model.config, model.embedding.word.weight
    per_token = 2 * config.layers * (config.query_groups // model.tp.size) * config.head_size * weight.element_size()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" and not on_host else host_memory().available
    return min(max(free // 2 // (per_token * length), 1), MOST_SEQUENCES)


@contextmanager
def evaluating(model: GPTModel) -> Iterator[None]:
    """Return a context in which a model is in evaluation mode, without sequence and context parallelism.

    Sequences may then have any length. Sequence and context parallelism only decide which rank computes which tokens,
    so the results do not change. The previous settings are restored at the end.
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
