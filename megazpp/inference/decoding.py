"""One decoding step of a batch of completions, which runs without host synchronization, and CUDA graphs of such steps.

The host launches one step per token and does not wait for it. The new tokens, the rows that have ended, and the
position in each row are tensors at fixed addresses. Replaying a step's CUDA graph therefore generates the next token.

Legend: B rows of a batch, R rows still in it, T largest number of new tokens, V vocabulary size.
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
from megazpp.model.gpt import GPTModel, Head
from megazpp.model.kv_cache import KVCache
from megazpp.parallel.axis import MeshAxis


def logits_at(places: torch.Tensor) -> Head:
    """Return a head that computes the logits of one token per row, [B, 1, V/T].

    Args:
        places: [B] index of the token in each row.
    """

    def head(model: GPTModel, x: torch.Tensor, router_loss: torch.Tensor | None) -> torch.Tensor:
        return model.logits(x[places, torch.arange(len(places), device=x.device)].unsqueeze(0))

    return head


class Drawing:
    """Completions of a batch of prompts during their generation, on the device of the model.

    Args:
        model: the model, in evaluation mode, with gathered weights.
        tp: the tensor-parallel axis.
        prompts: token ids of each prompt, at least one.
        config: sampling settings.
        uniform: [B, T] fp64 in [0, 1), the random numbers for sampling.
        ends: token ids that end a completion.
    Attributes:
        rows: indices of the R rows that are still in the batch.
        tokens, logps, lengths: the fields of `Drawn` so far.
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
        # prompts, padded to the same length
        self._model, self._tp, self._config = model, tp, config
        batch, limit, counts = len(prompts), config.sample_tokens, [len(prompt) for prompt in prompts]
        longest = max(counts)
        device = model.embedding.word.weight.device  # frozen models have this tensor but no parameters
        self._hooked = [each for each in model.modules() if each._forward_pre_hooks or each._forward_hooks]
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._prompts = torch.tensor(
            [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], dtype=torch.int64, device=device
        )
        # state of the step on the device
        self._counts = counts
        self._cache = KVCache(len(model.layers), batch, longest + limit, device=device)
        self._uniform = uniform.to(device)
        seen = occurring(prompts, model.vocab_size, config)
        self._seen = None if seen is None else seen.to(device)
        self.rows = list(range(batch))
        self._rows = torch.arange(batch, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # position of the next token in completions
        self._last = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # last token of each row
        # results
        self.tokens = torch.zeros(batch, limit, dtype=torch.int64, device=device)
        self.logps = torch.zeros(batch, limit, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.going = torch.ones(batch, dtype=torch.bool, device=device)

    def read_prompts_(self) -> None:
        """Run the forward of the prompts, and sample the first token of each row."""
        last = torch.tensor(self._counts, device=self._rows.device) - 1
        part = self._model(self._prompts, cache=self._cache, head=logits_at(last))[:, 0]
        self._cache.add(self._counts)
        self._draw_(part)

    def advance_(self, graphs: StepGraphs) -> None:
        """Sample the next token of each row; the weights must have stayed gathered since `read_prompts_`."""
        graphs.run((len(self.rows), self._cache.mask_length(1)), self._step_)
        self._cache.add_one_on_host()

    def look(self) -> tuple[list[int], list[bool]]:
        """Wait for the device, and return the last token of each row in `rows`, and whether the row continues."""
        tokens, going = torch.stack((self._last.squeeze(1), self.going[self._rows])).tolist()
        return tokens, [bool(each) for each in going]

    def end_(self, going: Sequence[bool]) -> None:
        """Set which rows in `rows` continue."""
        self.going[self._rows] = torch.tensor(going).to(self.going.device)

    def keep_(self, left: Sequence[int]) -> None:
        """Keep only the rows at the positions `left` of `rows` in the batch."""
        self._cache.keep(left)
        index = torch.tensor(left).to(self._rows.device)
        self.rows, self._rows, self._last = [self.rows[place] for place in left], self._rows[index], self._last[index]

    def _step_(self) -> None:
        """Run one forward and sample; a CUDA graph can capture it.

        It changes no state on the host, and it changes tensors in place only.
        """
        with without_hooks(self._hooked):
            part = self._model(self._last, cache=self._cache)[:, 0]
        self._cache.add_one_on_device_()
        self._draw_(part)

    def _draw_(self, part: torch.Tensor) -> None:
        """Sample a token per row from this tensor-parallel rank's part of the logits, [R, V / tp], and record it."""
        # sample the same token on all tensor- and context-parallel ranks
        config, rows, place = self._config, self._rows, self._place
        logits = self._tp.all_gather(part.t()).t()[:, : self._model.vocab_size].float()
        token = pick_rows(logits, config, self._uniform[rows, place], None if self._seen is None else self._seen[rows])
        token = self._model.cp.broadcast_(self._tp.broadcast_(token))
        if self._seen is not None:
            # An assignment of `True` would copy from the host and wait.
            self._seen.index_put_((rows, token), torch.ones_like(token, dtype=torch.bool))
        # record it for the rows that have not ended
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
    """Runs decoding steps, and replays CUDA graphs of them where capturing is possible.

    The first step with new shapes runs eagerly, which compiles and loads its kernels. The second step is captured, and
    all later ones are replayed. A graph holds the addresses of weights, so call `drop` before the weights are freed.

    If a capture fails, a warning gives the reason, and all further steps run eagerly. A capture changes no tensors.

    Args:
        capture: whether to capture steps; see `may_capture`.
    """

    def __init__(self, *, capture: bool) -> None:
        self.capture, self.captured, self.replayed = capture, 0, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_key: object = None
        self._last_key: object = None
        self._stream: torch.cuda.Stream | None = None  # one for all captures: cuBLAS keeps a workspace per stream

    def run(self, key: object, step: Callable[[], None]) -> None:
        """Run a step, eagerly or from a graph.

        Args:
            key: value that is equal for steps with the same shapes and addresses.
            step: function that launches the step.
        """
        # ---- capture the step if it comes for the second time; after a failure, warn and disable capturing
        if self.capture and key == self._last_key != self._graph_key:
            try:
                if self._stream is None:
                    self._stream = torch.cuda.Stream()
                self._graph = capture_graph(step, self._stream, memory_of=self._graph)
            except RuntimeError as error:
                self.drop()
                self.capture = False
                reason = str(error).partition("\n")[0]
                warnings.warn(
                    f"decoding runs eagerly, because its CUDA graph could not be captured: {reason}", stacklevel=2
                )
            else:
                self._graph_key = key
                self.captured += 1
        # ---- replay its graph, or run it
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


def may_capture(model: GPTModel) -> bool:
    """Return True on CUDA, unless decoding communicates because of tensor or context parallelism.

    The products of a mixture of experts have sizes that vary from step to step, so these models are not captured.
    """
    dense = model.config.num_experts is None
    return dense and model.embedding.word.weight.is_cuda and model.tp.size == model.cp.size == 1


def capture_graph(
    step: Callable[[], None], stream: torch.cuda.Stream, *, memory_of: torch.cuda.CUDAGraph | None
) -> torch.cuda.CUDAGraph:
    """Capture the kernels that `step` launches as a CUDA graph, without running them.

    `torch.cuda.graph` is not used, because it also collects garbage and returns the allocator's free memory to the
    driver at each capture.

    Args:
        step: function that launches the kernels.
        stream: a stream other than the current one.
        memory_of: a graph that will not be replayed again, whose memory the new graph reuses. None: new memory.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    stream.wait_stream(torch.cuda.current_stream())
    gc.disable()  # the collector may destroy CUDA objects, which is not allowed during a capture
    try:
        with torch.cuda.stream(stream):
            # With "thread_local", CUDA calls of other threads, such as NCCL's watchdog, do not abort the capture.
            graph.capture_begin(None if memory_of is None else memory_of.pool(), capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


@contextmanager
def without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run `modules` without their forward hooks inside this context.

    These hooks gather weights, and have no effect while the weights stay gathered. FSDP2's hooks still make its streams
    wait for the current stream, which is not allowed in a capture. They also take a third of an eager step's host time.
    """
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in modules]
    for module in modules:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after
