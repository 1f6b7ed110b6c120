"""Linear layers and the embedding with their matrices split over the tensor-parallel axis.

T ranks of the tp axis; activations [S, B, H]. A column-parallel layer splits its outputs, a row-parallel layer its
inputs: column, then anything elementwise, then row needs one collective at each end. An adapter's product (lora.py) is
added to the layer's own on each rank.

With sequence parallelism a column-parallel layer keeps its slice of the input for backward and gathers it again there,
under the product that gives the input's gradient; the collective that sums that gradient runs under the product that
gives the weight's. Source: Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication.
With a product of another kind (model/float8.py) it keeps the whole input, and nothing hides the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.parallel.axis import MeshAxis, axis_of_key, define_operator
from megazpp.parallel.comm_queue import CommQueue, Work
from megazpp.tensor_parallel.lora import Adapter
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import enter_region, leave_region

# of x [..., K], weight [N, K], bias [N] or None: x W^T + b, as F.linear's
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Tensors = Sequence[torch.Tensor]
Biases = Sequence[torch.Tensor | None]


class _SplitLinear(nn.Module):
    """A linear layer of which each tp rank has some rows (split 0) or columns (split 1) of the weight, [out, in].

    Args:
        std: standard deviation of the weight's initial values.
        product: multiplies in the place of F.linear.
    """

    split: int
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: MeshAxis,
        std: float,
        bias: bool,
        sequence_parallel: bool,
        product: Product | None = None,
    ) -> None:
        super().__init__()
        shape, kind = [out_features, in_features], ("outputs", "inputs")[self.split]
        assert shape[self.split] % tp.size == 0, f"{shape[self.split]} {kind} over {tp.size} ranks"
        shape[self.split] //= tp.size
        self.tp, self.sequence_parallel, self.product = tp, sequence_parallel, product
        self.adapter: Adapter | None = None
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": ParameterSpec(split=self.split, std=std, matrices=(shape[0],))}
        self.register_parameter("bias", nn.Parameter(torch.empty(shape[0])) if bias else None)
        if bias:
            self.specs["bias"] = ParameterSpec(split=0) if self.split == 0 else ParameterSpec(partial=sequence_parallel)


class ColumnParallelLinear(_SplitLinear):
    """y = x W^T + b with the rows of W split: [S, B, in] ([S/T, B, in] with sequence parallelism) -> [S, B, out/T].

    Collectives on tp: backward all-reduce; with sequence parallelism all-gather forward, and all-gather and
    reduce-scatter backward. Layers of one input share them: see `column_parallel`.
    """

    split = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return column_parallel(x, [self])[0]


def column_parallel(x: torch.Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    """Apply each of the layers, alike but for their sizes, to x; they enter the tensor-parallel region once."""
    tp, split, product = layers[0].tp, layers[0].sequence_parallel, layers[0].product
    weights = [local(layer.weight) for layer in layers]
    biases = [None if layer.bias is None else local(layer.bias) for layer in layers]
    adapted = any(layer.adapter is not None and layer.adapter.adds for layer in layers)  # they read the whole input
    together = tp.size > 1 or (len(layers) > 1 and not torch.compiler.is_compiling())
    if product is None and together and torch.is_grad_enabled() and x.requires_grad and not adapted:
        if torch.compiler.is_compiling():
            return tuple(_column_parallel_operator(x, weights, [b for b in biases if b is not None], split, tp.key))
        kept: list[Any] = []
        x = _Keep.apply(x, kept, *[weight.detach() for weight in weights])
        return _ColumnParallel.apply(x, tp, split, kept, *weights, *biases)
    x = enter_region(x, tp, sequence_parallel=split)
    products = ((product or F.linear)(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return tuple(_adapted(y, x, layer.adapter) for y, layer in zip(products, layers, strict=True))


class _Keep(torch.autograd.Function):
    """x, which is saved with the weights before it is gathered and multiplied; `kept` gets the context that has them.

    Saved after the products, a recomputation would gather and multiply once more to have them again.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[Any], *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0], None, *[None] * (len(ctx.needs_input_grad) - 2)


class _ColumnParallel(torch.autograd.Function):
    """Products with n weights: takes x, tp, whether x is a slice of the sequence, what is kept, weights and biases."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tp: MeshAxis, split: bool, kept: list[Any], *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        count = len(parameters) // 2
        ctx.tp, ctx.split, ctx.kept = tp, split, kept
        return tuple(_products(x, parameters[:count], parameters[count:], split, tp))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.kept[0].saved_tensors
        x_grad, *others = _gradients(grads, x, weights, ctx.needs_input_grad[4:], ctx.split, ctx.tp)
        return x_grad, None, None, None, *others


def _products(x: torch.Tensor, weights: Tensors, biases: Biases, split: bool, tp: MeshAxis) -> list[torch.Tensor]:
    inside = tp.all_gather(x) if split else x
    return [F.linear(inside, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _gradients(
    grads: Tensors, x: torch.Tensor, weights: Tensors, needed: Sequence[bool], split: bool, tp: MeshAxis
) -> list[torch.Tensor | None]:
    """Return the gradients of x, and of the weights and biases that are `needed`."""
    count = len(weights)
    queue = tp.queue if x.is_cuda else CommQueue()
    whole = queue.submit(lambda: tp.all_gather(x)) if split and any(needed[:count]) else Work(x)
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total += grad @ weight
    x_grad = queue.submit(lambda: tp.reduce_scatter(total) if split else tp.all_reduce_(total))
    inside, rows = whole.wait().flatten(0, 1), [grad.flatten(0, 1) for grad in grads]
    weight_grads = [g.t() @ inside if n else None for g, n in zip(rows, needed[:count], strict=True)]
    bias_grads = [g.sum(dim=0) if n else None for g, n in zip(rows, needed[count:], strict=True)]
    return [x_grad.wait(), *weight_grads, *bias_grads]


# What torch.compile sees of these layers: one operator each way, so that a graph keeps x as it is and does not merge
# the all-gather of backward with that of forward, and collectives run beside the products as in eager code.


def _column_parallel(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], split: bool, axis: str
) -> list[torch.Tensor]:
    return _products(x, weights, biases or [None] * len(weights), split, axis_of_key(axis))


def _shapes_of_products(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], split: bool, axis: str
) -> list[torch.Tensor]:
    seq = x.shape[0] * axis_of_key(axis).size if split else x.shape[0]
    return [x.new_empty((seq, *x.shape[1:-1], weight.shape[0])) for weight in weights]


def _column_parallel_gradients(
    grads: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], needed: list[bool], split: bool, axis: str
) -> list[torch.Tensor]:
    found = _gradients(grads, x, weights, needed, split, axis_of_key(axis))
    return [grad for grad in found if grad is not None]


def _shapes_of_gradients(
    grads: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], needed: list[bool], split: bool, axis: str
) -> list[torch.Tensor]:
    shapes = [weight.shape for weight in weights] + [weight.shape[:1] for weight in weights]
    return [torch.empty_like(x), *(x.new_empty(shape) for shape, n in zip(shapes, needed, strict=True) if n)]


_column_parallel_operator = define_operator(
    "column_parallel(Tensor x, Tensor[] weights, Tensor[] biases, bool split, str axis) -> Tensor[]",
    _column_parallel,
    _shapes_of_products,
)
_column_parallel_backward = define_operator(
    "column_parallel_backward(Tensor[] grads, Tensor x, Tensor[] weights, bool[] needed, bool split, str axis)"
    " -> Tensor[]",
    _column_parallel_gradients,
    _shapes_of_gradients,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, _, ctx.split, ctx.axis = inputs
    ctx.save_for_backward(x, *weights)


def _backward_of_products(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_weights, of_biases = ctx.needs_input_grad[1:3]
    needed = [*of_weights, *(of_biases or [False] * len(weights))]
    x_grad, *others = _column_parallel_backward(grads, x, weights, needed, ctx.split, ctx.axis)
    found = iter(others)
    return x_grad, *([next(found) if n else None for n in which] for which in (of_weights, of_biases)), None, None


torch.library.register_autograd("megazpp::column_parallel", _backward_of_products, setup_context=_save_for_backward)


class RowParallelLinear(_SplitLinear):
    """y = x W^T + b with the columns of W split: [S, B, in/T] -> [S, B, out] ([S/T, B, out] with sequence parallelism).

    Collectives on tp: forward all-reduce; or forward reduce-scatter and backward all-gather with sequence parallelism,
    where each rank has its slice's part of the bias's gradient.
    """

    split = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.product or F.linear
        if self.tp.size == 1:
            whole = product(x, local(self.weight), None if self.bias is None else local(self.bias))
            return _adapted(whole, x, self.adapter)
        part = _adapted(product(x, local(self.weight), None), x, self.adapter)
        y = leave_region(part, self.tp, sequence_parallel=self.sequence_parallel)
        return y if self.bias is None else y + local(self.bias)  # after the sum, so that it is added once


class VocabParallelEmbedding(nn.Module):
    """Rows of the table split over tp: tokens [S, B] -> [S, B, H] ([S/T, B, H] with sequence parallelism).

    Rows from `vocab_size` on are padding and start at zero. Each rank looks up the tokens it owns and the sum over tp
    completes the rest. Collectives on tp: forward all-reduce, or forward reduce-scatter and backward all-gather with
    sequence parallelism.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        vocab_size: int,
        tp: MeshAxis,
        std: float,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        assert padded_vocab_size % tp.size == 0, f"{padded_vocab_size} rows over {tp.size} ranks"
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.rows = padded_vocab_size // tp.size
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))
        self.specs = {"weight": ParameterSpec(split=0, std=std, rows=vocab_size)}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, local(self.weight))
        row = tokens - self.tp.rank * self.rows
        elsewhere = (row < 0) | (row >= self.rows)
        found = F.embedding(row.masked_fill(elsewhere, 0), local(self.weight))
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_region(found, self.tp, sequence_parallel=self.sequence_parallel)


def _adapted(y: torch.Tensor, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    return y if adapter is None or not adapter.adds else y + adapter(x)
