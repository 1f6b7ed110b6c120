"""Generate tokens for a batch of prompts, with one forward per token and one gather of the weights in total.

Every rank takes part, because the weights are sharded, and the logits are gathered over tensor-parallel ranks. The
first rank of a tensor-parallel group samples for the group. Otherwise ranks with different rounding could sample
different tokens.

While the weights stay gathered, data ranks do not communicate. Each may have its own prompts and stop independently. If
weights are streamed, or several ranks share out the experts, all ranks must run equally many forwards. Rank 0 then
samples for all ranks.
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

from megazpp.inference.decoding import Drawing, StepGraphs, logits_at
from megazpp.inference.sample import SampleConfig, pick
from megazpp.model.gpt import GPTModel
from megazpp.model.kv_cache import KVCache
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.initialize import seed_for
from megazpp.zero.sharding import WeightHandle

LOOK_EVERY = 8  # tokens between two waits of the host for the device
MOST_SEQUENCES = 256  # largest batch that `sequences_that_fit` returns


class Generated(NamedTuple):
    """New tokens of each prompt, and the time of their generation.

    Attributes:
        tokens: new token ids of each prompt.
        first_seconds: time until the first token of every prompt, including the gather of weights and the prompts'
            forward.
        seconds: total time.
    """

    tokens: list[list[int]]
    first_seconds: float
    seconds: float

    def describe(self) -> str:
        """Return one line about the speed."""
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
    """Continue each prompt by up to `config.sample_tokens` tokens; all ranks call it.

    Args:
        model: the model.
        sharding: handle to its weights.
        dims: mesh axes of the job.
        prompts: token ids of each prompt, at least one.
        config: sampling settings.
        max_length: longest input of the model, in tokens. Longer rows drop their beginning. Then each token needs a
            forward over all positions, because all tokens have moved.
        seed: seed of the random numbers. A prompt's numbers depend only on it and on the prompt's index.
        first_prompt: index of the first prompt.
        cache_on_host: whether to keep keys and values in host memory.
        is_last: function (row, token) that is called for each new token of a row in order, and returns True if the row
            ends with it. It must return the same on all tensor-parallel ranks.
        stopped: function that returns True if this rank has caught a stop signal, which ends all rows.
    """
    # rows, their random generators, and the cache of keys and values
    started, first = time.perf_counter(), 0.0
    rows = [list(prompt) for prompt in prompts]
    active = [True] * len(rows)
    seeds = [seed_for(f"prompt {first_prompt + row}", seed=seed) for row in range(len(rows))]
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    capacity = min(max_length, max(map(len, rows)) + config.sample_tokens)
    device = model.embedding.word.weight.device  # frozen models have this tensor but no parameters
    cache: KVCache | None = KVCache(len(model.layers), len(rows), capacity, device=device, on_host=cache_on_host)
    apart = sharding.keeps_gathered and dims.layout.ep == 1
    together = dims.tp if apart else dims.world  # ranks that must run equally many forwards
    with torch.no_grad(), evaluating(model), sharding.keep_unsharded():
        for _ in range(config.sample_tokens):
            if max(map(len, rows)) > max_length:
                cache = None  # from now on all positions move with each token, which invalidates cached keys
            logits = _next_logits(model, cache, rows, active, max_length)
            # one rank samples, and the others add zeros in the all-reduce
            drawn = torch.zeros(len(rows) + 1, dtype=torch.int64)  # the last one counts ranks with a stop signal
            drawn[-1] = stopped()
            if together.rank == 0:
                scores = logits.float().cpu()
                for row in itertools.compress(range(len(rows)), active):
                    drawn[row] = pick(scores[row], config, generators[row], rows[row])
            *agreed, stops = together.all_reduce_(drawn.to(logits.device)).tolist()
            # append the tokens
            for row in itertools.compress(range(len(rows)), tuple(active)):
                rows[row].append(agreed[row])
                active[row] = not is_last(row, agreed[row])
            first = first or time.perf_counter() - started
            if stops or not any(active):
                break
    new = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    return Generated(new, first, time.perf_counter() - started)


class Drawn(NamedTuple):
    """Completions of a batch of B prompts, on the CPU; T is the largest number of new tokens.

    Attributes:
        tokens: [B, T] int64, 0 after the end of a completion.
        lengths: [B] int64, number of tokens of each completion, including the token that ended it.
        logps: [B, T] fp32 log-probabilities of the tokens at the temperature, before repetition penalty, top-k, top-p
            and min-p.
        ended: [B] bool; False if the completion reached the largest length.
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
    stopped: Callable[[], bool] = lambda: False,
) -> Drawn:
    """Sample a completion of each prompt, at most `config.sample_tokens` tokens long.

    All rows are sampled at once, and a row's tokens depend only on its logits and its random numbers. The model must be
    in evaluation mode with weights that stay gathered. Ended rows leave the batch when half of it has ended and the
    host notices.

    Args:
        model: the model.
        tp: the tensor-parallel axis.
        prompts: token ids of each prompt, at least one.
        config: sampling settings.
        uniform: [B, sample_tokens] fp64 in [0, 1), see `pick_rows`.
        ends: token ids that end a completion.
        is_last: function (row, token) that may also end a row; called for each new token. It must return the same on
            all tensor-parallel ranks. With it, the host waits for each token.
        graphs: object that runs the steps; None for eager steps.
        look_every: tokens between two checks of the host for ended rows. None: LOOK_EVERY on CUDA, where a check waits
            for the device, and 1 on a CPU. Tokens that a row samples after its end are not part of the result.
        stopped: function that returns True if this rank has caught a stop signal. Without tensor parallelism, the
            sampling then ends at once, and the caller drops its result.
    """
    drawing = Drawing(model, tp, prompts, config, uniform, ends=ends)
    graphs = graphs or StepGraphs(capture=False)
    if is_last is not None or look_every is None:
        look_every = LOOK_EVERY if drawing.going.is_cuda and is_last is None else 1
    going, limit = [True] * len(prompts), config.sample_tokens
    graphs.drop()  # an earlier graph may hold addresses of other weights
    try:
        for count in range(1, limit + 1):
            # one token for each row
            if tp.size == 1 and stopped():
                break
            if count == 1:
                drawing.read_prompts_()
            else:
                drawing.advance_(graphs)
            if is_last is None and (not ends or count == limit or count % look_every):
                continue
            # find the rows that have ended
            tokens, now = drawing.look()
            if is_last is not None:
                asked = zip(drawing.rows, tokens, going, strict=True)
                over = [goes and is_last(row, token) for row, token, goes in asked]
                if any(over):
                    now = [goes and not ended for goes, ended in zip(now, over, strict=True)]
                    drawing.end_(now)
            # shrink the batch
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
    """Return [B, V]: the logits after the last token of each row; rows that are not active have arbitrary logits."""
    seen = [0] * len(rows) if cache is None else cache.lengths
    new = [row[count:][-max_length:] for row, count in zip(rows, seen, strict=True)]
    device, longest = model.embedding.word.weight.device, max(map(len, new))
    # Padding follows a row's tokens, so causal attention never sees it.
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in new], device=device)
    head = None
    if longest > 1:
        head = logits_at(torch.tensor([len(row) - 1 for row in new], device=device))
    part = model(tokens, cache=cache, head=head)[:, 0]
    if cache is not None:  # an ended row does not advance: its last token is processed again in each forward
        cache.add([len(row) if goes else 0 for row, goes in zip(new, active, strict=True)])
    return model.tp.all_gather(part.t()).t()[:, : model.vocab_size]


def sequences_that_fit(model: GPTModel, length: int, device: torch.device, *, on_host: bool) -> int:
    """Return how many sequences have room for their keys and values in half of the free memory; 1 to 256.

    Larger batches would not be faster, because their products take longer than unpacking the matrix.

    Args:
        model: the model.
        length: tokens of a sequence.
        device: device of the model.
        on_host: whether keys and values are kept in host memory.
    """
    config, weight = model.config, model.embedding.word.weight
    per_token = 2 * config.layers * (config.query_groups // model.tp.size) * config.head_size * weight.element_size()
    if device.type == "cuda" and not on_host:
        free = torch.cuda.mem_get_info(device)[0]
    else:
        try:
            fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            free = 1024 * int(fields["MemAvailable"].split()[0])
        except (OSError, KeyError, ValueError):  # not on Linux: use the total memory
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(free // 2 // (per_token * length), 1), MOST_SEQUENCES)


@contextmanager
def evaluating(model: GPTModel) -> Iterator[None]:
    """Set evaluation mode, and disable sequence and context parallelism, so that sequences may have any length.

    Both only change which rank computes what. The earlier state is restored at the end.
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
