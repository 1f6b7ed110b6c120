"""One step of drawing completions, which stays on the device, and CUDA graphs of it.

The host launches a step per token and waits for none: the drawn tokens, the rows that have ended and the place of each
row are tensors with fixed addresses. A replayed CUDA graph of a step therefore draws the next token.

Legend: B rows of a batch, R of them still in it, T tokens at most, V vocabulary.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megazpp.inference.sample import SampleConfig, occurring, pick_rows
from megazpp.model.gpt import GPTModel
from megazpp.model.kv_cache import KVCache
from megazpp.parallel.axis import MeshAxis


class Drawing:
    """Completions of a batch of prompts while they grow, on the device of the model.

    Attributes:
        rows: numbers of the R rows that are still in the batch.
        tokens, logps, lengths: those of `Drawn`, so far.
        going: [B] bool, True for a row that has not ended.
    """

    def __init__(
        self,
        model: GPTModel,
        tp: MeshAxis,
        prompts: Sequence[Sequence[int]],
        config: SampleConfig,
        uniform: torch.Tensor,
        *,
        ends: Sequence[int],
    ) -> None:
        self._model, self._tp, self._config = model, tp, config
        batch, limit, counts = len(prompts), config.sample_tokens, [len(prompt) for prompt in prompts]
        longest = max(counts)
        device = model.embedding.word.weight.device  # of frozen models too
        self._hooked = modules_with_hooks(model)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._prompts = torch.tensor(
            [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], dtype=torch.int64, device=device
        )
        self._counts = counts
        self._cache = KVCache(len(model.layers), batch, longest + limit, device=device)
        self._uniform = uniform.to(device)
        seen = occurring(prompts, model.vocab_size, config)
        self._seen = None if seen is None else seen.to(device)
        self.rows = list(range(batch))
        self._rows = torch.arange(batch, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next token in the completions
        self._last = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # token of each row
        self.tokens = torch.zeros(batch, limit, dtype=torch.int64, device=device)
        self.logps = torch.zeros(batch, limit, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.going = torch.ones(batch, dtype=torch.bool, device=device)

    def read_prompts_(self) -> None:
        """Read the prompts and draw the first token of each row."""
        last = torch.tensor(self._counts, device=self._rows.device) - 1
        part = self._model(self._prompts, cache=self._cache, logits_at=last)[:, 0]
        self._cache.add(self._counts)
        self._draw_(part)

    def advance_(self, graphs: StepGraphs) -> None:
        """Draw the next token of each row. Weights must stay gathered since `read_prompts_`."""
        graphs.run((len(self.rows), self._cache.mask_length(1)), self._step_)
        self._cache.add_one_on_host()

    def look(self) -> tuple[list[int], list[bool]]:
        """Wait for the device. Returns the last token of each of `rows`, and whether the row goes on."""
        tokens, going = torch.stack((self._last.squeeze(1), self.going[self._rows])).tolist()
        return tokens, [bool(each) for each in going]

    def end_(self, going: Sequence[bool]) -> None:
        """Set which of `rows` go on."""
        self.going[self._rows] = torch.tensor(going).to(self.going.device)

    def keep_(self, left: Sequence[int]) -> None:
        """Take all but these places of `rows` out of the batch."""
        self._cache.keep(left)
        index = torch.tensor(left).to(self._rows.device)
        self.rows, self._rows, self._last = [self.rows[place] for place in left], self._rows[index], self._last[index]

    def _step_(self) -> None:
        """Launch a forward and a draw. A CUDA graph has this: it changes nothing on the host, and tensors in place."""
        with without_hooks(self._hooked):
            part = self._model(self._last, cache=self._cache)[:, 0]
        self._cache.add_one_on_device_()
        self._draw_(part)

    def _draw_(self, part: torch.Tensor) -> None:
        """Draw from logits [R, V/T] of this tp rank."""
        config, rows, place = self._config, self._rows, self._place
        logits = self._tp.all_gather(part.t()).t()[:, : self._model.vocab_size].float()
        token = pick_rows(logits, config, self._uniform[rows, place], None if self._seen is None else self._seen[rows])
        token = self._model.cp.broadcast_(self._tp.broadcast_(token))
        if self._seen is not None:
            # not `= True`, which copies from the host and waits
            self._seen.index_put_((rows, token), torch.ones_like(token, dtype=torch.bool))
        scaled = logits / (config.sample_temperature or 1.0)
        logp = scaled.gather(-1, token.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(dim=-1)
        here = self.going[rows]
        self.tokens[rows, place], self.logps[rows, place] = token * here, logp * here
        self.lengths[rows] += here
        if len(self._ends):
            self.going[rows] = here & (token.unsqueeze(1) != self._ends).all(dim=1)
        self._last.copy_(token.unsqueeze(1))
        place += 1


class StepGraphs:
    """Runs steps of decoding, and replays CUDA graphs of them where it may capture these.

    The first step with new shapes runs eagerly, which compiles and loads its kernels. The second is captured, and
    replayed from there on. A graph has addresses of weights, so call `drop` before these are freed.

    Args:
        capture: True to capture steps; see `may_capture`.

    A capture that fails is a warning with its reason, and steps are eager from there on: capturing changes no tensor.
    """

    def __init__(self, *, capture: bool) -> None:
        self.capture, self.captured, self.replayed = capture, 0, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_key: object = None
        self._last_key: object = None
        self._stream: torch.cuda.Stream | None = None  # always the same: cuBLAS keeps a workspace for each stream

    def run(self, key: object, step: Callable[[], None]) -> None:
        """Take a step; `key` is equal for steps with the same shapes and addresses."""
        if self.capture and key == self._last_key != self._graph_key:
            self._capture(key, step)
        if self.capture and key == self._graph_key:
            assert self._graph is not None
            self._graph.replay()
            self.replayed += 1
        else:
            step()
        self._last_key = key

    def drop(self) -> None:
        """Free the graph and its memory."""
        self._graph = self._graph_key = self._last_key = None

    def _capture(self, key: object, step: Callable[[], None]) -> None:
        try:
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._graph = capture_graph(step, self._stream, memory_of=self._graph)
        except RuntimeError as error:
            self.drop()
            self.capture = False
            reason = str(error).partition("\n")[0]
            warnings.warn(f"tokens are drawn eagerly: no CUDA graph of it can be captured: {reason}", stacklevel=2)
        else:
            self._graph_key = key
            self.captured += 1


def may_capture(model: GPTModel) -> bool:
    """Return True on CUDA, unless decoding has collectives: those of tensor or context parallelism."""
    return model.embedding.word.weight.is_cuda and model.tp.size == model.cp.size == 1


def capture_graph(
    step: Callable[[], None], stream: torch.cuda.Stream, *, memory_of: torch.cuda.CUDAGraph | None
) -> torch.cuda.CUDAGraph:
    """Capture the kernels that `step` launches, without running them.

    `torch.cuda.graph` would also collect garbage and return the allocator's free memory to the driver, each time.

    Args:
        stream: any but the current one.
        memory_of: a graph that will not be replayed any more, whose memory the new one uses.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    stream.wait_stream(torch.cuda.current_stream())
    gc.disable()  # may destroy objects of CUDA, which a capture does not allow
    try:
        with torch.cuda.stream(stream):
            # the calls of other threads, such as those of NCCL's watchdog, do not end this capture
            graph.capture_begin(None if memory_of is None else memory_of.pool(), capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def modules_with_hooks(model: nn.Module) -> list[nn.Module]:
    """List the modules that have hooks on their forward."""
    return [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]


@contextmanager
def without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Call `modules` without their hooks on forwards.

    The hooks gather weights. Where these stay gathered the hooks change nothing, but FSDP2's make its streams wait for
    the current one, which a capture must not do, and take a third of an eager step's time on the host.
    """
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in modules]
    for module in modules:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after
