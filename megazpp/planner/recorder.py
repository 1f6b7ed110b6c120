"""What the model's own code does, noted operation by operation while it runs on tensors without memory.

A recorder sees each operation and each storage, and files them under the part of the model (a segment: the embedding, a
layer, the head; forward or backward) in which they happen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megazpp.model.attention_kernels import repeated
from megazpp.model.gpt import GPTModel
from megazpp.planner.live import LiveBytes

FORWARD, BACKWARD = "forward", "backward"
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
FREE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::_unsafe_view")


class Operation(NamedTuple):
    """One operation: a product [m, k] x [k, n], `batch` times; a pass over memory; or a collective on tp.

    Attributes:
        kind: "matrix", "memory" or the name of a collective.
        bytes: read and written, or sent by this rank.
        m, n, k, batch: of a product; a causal one counts half.
    """

    kind: str
    bytes: int
    m: int = 0
    n: int = 0
    k: int = 0
    batch: float = 0.0


class TraceSegment(NamedTuple):
    """What one part of the model does in forward or backward.

    Attributes:
        operations: in order.
        kept: bytes that live when it is done, less those before it; negative in backward.
        peak: most bytes that live while it runs, above those before it.
        gradients: bytes of whole gradients among those kept.
    """

    operations: tuple[Operation, ...]
    kept: int
    peak: int
    gradients: int


class TraceRecorder(TorchDispatchMode):
    """Notes every operation and every storage, by segment of the model that it watches."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: dict[tuple[str, int], list[Operation]] = defaultdict(list)
        self._kept: dict[tuple[str, int], int] = defaultdict(int)
        self._peak: dict[tuple[str, int], int] = defaultdict(int)
        self._gradients: dict[tuple[str, int], int] = defaultdict(int)
        self._now = (FORWARD, 0)
        self._live, self._before = LiveBytes(), 0

    def watch(self, model: GPTModel) -> None:
        """Call once, before `model` runs."""
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        for index, module in enumerate([model.embedding, *model.layers]):
            module.register_forward_pre_hook(self._entering((FORWARD, index)))
            module.register_forward_hook(self._leaving(index))

    def sent(self, collective: str, sent_bytes: int) -> None:
        """A collective on tp."""
        self._operations[self._now].append(Operation(collective, sent_bytes))

    def product(self, m: int, n: int, k: int, batch: float, touched: int) -> None:
        self._operations[self._now].append(Operation("matrix", touched, m, n, k, batch))

    def memory_pass(self, touched: int) -> None:
        """One kernel that reads and writes `touched` bytes."""
        self._operations[self._now].append(Operation("memory", touched))

    def segment(self, key: tuple[str, int]) -> TraceSegment:
        return TraceSegment(tuple(self._operations[key]), self._kept[key], self._peak[key], self._gradients[key])

    def enter(self, key: tuple[str, int]) -> None:
        self._kept[self._now] += self._live.now - self._before
        self._now, self._before = key, self._live.now

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._gradients[self._now] += parameter.nbytes

    def _entering(self, key: tuple[str, int]) -> Callable[..., None]:
        return lambda *_: self.enter(key)

    def _leaving(self, index: int) -> Callable[..., None]:
        def leave(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            self.enter((FORWARD, index + 1))
            output.register_hook(self._entering((BACKWARD, index)))

        return leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, outputs, inputs = func.name().split(".")[0], _tensors(result), _tensors((args, kwargs))
        owned = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in owned]
        for tensor in fresh:
            self._live.see(tensor)
        self._peak[self._now] = max(self._peak[self._now], self._live.now - self._before)
        if name in MATRIX:
            a, b = inputs[-2:]
            self.product(a.shape[-2], b.shape[-1], a.shape[-1], math.prod(a.shape[:-2]), _nbytes(inputs + outputs))
        elif not func.is_view and name not in FREE and (fresh or func._schema.is_mutable):
            self.memory_pass(_nbytes(inputs + fresh))
        return result


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, which as a torch function would run without the function mode that it is called in."""
    arguments = ((loss,), (torch.ones_like(loss),), False, False, ())
    Variable._execution_engine.run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)


class FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels do it, which meta tensors do not choose: no scores of S x S are kept.

    A mask is kept, in the dtype of the queries.

    Args:
        on_cpu: of which device the kernels are: CUDA's take no groups beside a mask.
    """

    def __init__(self, recorder: TraceRecorder, *, on_cpu: bool) -> None:
        super().__init__()
        self._recorder, self._on_cpu = recorder, on_cpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        mask = kwargs.get("attn_mask")
        if mask is not None and not self._on_cpu:
            k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        return _Attention.apply(q, k, v, mask, self._recorder, 0.5 if mask is None else 1.0)

    def inside_documents(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """A DocumentKernel: as if every document were `longest` tokens long."""
        batch = q.shape[0] // longest
        q, k, v = (x.unflatten(0, (batch, longest)).transpose(1, 2) for x in (q, k, v))
        return _Attention.apply(q, k, v, None, self._recorder, 0.5).transpose(1, 2).flatten(0, 1)


class _Attention(torch.autograd.Function):
    """q [B, heads, S, D], k, v [B, groups, S, D] -> [B, heads, S, D]; keeps these, one fp32 per query, and the mask."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        recorder: TraceRecorder,
        share: float,
    ) -> torch.Tensor:
        batch, heads, seq, channels = q.shape
        out = torch.empty_like(q)  # as q lies in memory, so the output layer needs no copy of it
        normalizer = q.new_empty(batch, heads, seq, dtype=torch.float32)
        bias = None if mask is None else q.new_empty(mask.shape)
        ctx.save_for_backward(q, k, v, out, normalizer, bias)
        ctx.recorder, ctx.share = recorder, share
        for _ in range(2):  # scores, weighted sum
            recorder.product(seq, seq, channels, batch * heads * share, _nbytes([q, k]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v = ctx.saved_tensors[:3]
        batch, heads, seq, channels = q.shape
        for _ in range(5):  # scores again, and the gradients of scores, q, k and v
            ctx.recorder.product(seq, seq, channels, batch * heads * ctx.share, _nbytes([q, k]))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None


class FusedNorm(TorchFunctionMode):
    """RMSNorm as CUDA's fused kernel does it: its input and one fp32 per row are kept.

    Meta and CPU tensors take torch's composite, which keeps four times as much.

    Args:
        memory_pass: told the bytes that a kernel reads and writes.
    """

    def __init__(self, memory_pass: Callable[[int], None] = lambda touched: None) -> None:
        super().__init__()
        self._memory_pass = memory_pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.rms_norm:
            x, _, weight = (*args, *(kwargs or {}).values())[:3]
            return _RmsNorm.apply(x, weight, self._memory_pass)
        if func is torch.Tensor.backward:
            with self:
                return backward(args[0])
        return func(*args, **(kwargs or {}))


class _RmsNorm(torch.autograd.Function):
    """x [..., H], weight [H] -> [..., H]; keeps these and [..., 1] in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, memory_pass: Callable[[int], None]) -> torch.Tensor:
        out, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        ctx.memory_pass = memory_pass
        memory_pass(_nbytes([x, weight, out, scale]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        ctx.memory_pass(_nbytes([*grads, x, weight, scale, x, weight]))  # the last two as large as the gradients
        return torch.empty_like(x), torch.empty_like(weight), None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
