"""Linear layers and the embedding, with matrices split over the tensor-parallel axis.

Letters: T ranks of the tp axis; activations are [S, B, H] (sequence, batch, hidden).

A column-parallel layer splits its outputs, a row-parallel layer its inputs. A column-parallel layer, elementwise
operations and a row-parallel layer therefore need one collective at the start and one at the end. On each rank the
product of an `Adapter` is added to the layer's product.

With sequence parallelism a column-parallel layer saves only its slice of the input and gathers the input again in
backward. Both collectives of backward are hidden: the gather overlaps with the product for the input's gradient, and
the reduction of that gradient overlaps with the product for the weight's gradient. Source: Megatron-LM's
LinearWithGradAccumulationAndAsyncCommunication. With another matrix product (model/float8.py) the layer saves the whole
input, and the collectives are not hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.parallel.axis import MeshAxis, axis_of_key, define_operator
from megazpp.parallel.comm_queue import CommQueue, Work
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import enter_region, leave_region

# A substitute for F.linear: takes x [..., K], weight [N, K] and bias [N] or None, and returns x W^T + b.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Tensors = Sequence[torch.Tensor]
Biases = Sequence[torch.Tensor | None]


class Adapter(nn.Module):
    """The base class of adapters. An adapter is a term that is added to the output of a linear layer.

    Attributes:
        enabled: False while the layer computes the same function as before training.
        has_reference: True if the adapter was not zero before training. It then keeps its initial matrices and uses
            them while it is not enabled.
    """

    enabled = True
    has_reference = False

    @property
    def adds(self) -> bool:
        """True if the adapter currently contributes to the output."""
        return self.enabled or self.has_reference


class _SplitLinear(nn.Module):
    """A linear layer whose weight [out, in] is split over tp by rows (`split` 0) or columns (`split` 1).

    Args:
        in_features: number of inputs of the whole layer.
        out_features: number of outputs of the whole layer.
        tp: tensor-parallel axis.
        std: standard deviation of the weight's initial values.
        bias: True adds a bias, which starts at zero.
        sequence_parallel: True if activations outside the tensor-parallel region are split along the sequence.
        product: substitute for F.linear; None uses F.linear.
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
    """A linear layer whose outputs are split over tp: [S, B, in] -> [S, B, out/T].

    With sequence parallelism the input is [S/T, B, in].

    Collectives on tp: an all-reduce in backward. With sequence parallelism an all-gather in forward, and an all-gather
    and a reduce-scatter in backward. `column_parallel` applies several layers to one input with the same collectives.
    """

    split = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b for this rank's outputs."""
        return column_parallel(x, [self])[0]


def column_parallel(x: torch.Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    """Apply several layers to one input, which enters the tensor-parallel region only once.

    Args:
        x: [S, B, in], or [S/T, B, in] with sequence parallelism.
        layers: layers with the same input size, axis, product and sequence parallelism, all with or all without a bias.
            Output sizes may differ.
    Returns:
        The output of each layer, [S, B, out/T].
    """
    tp, split, product = layers[0].tp, layers[0].sequence_parallel, layers[0].product
    weights = [local(layer.weight) for layer in layers]
    biases = [None if layer.bias is None else local(layer.bias) for layer in layers]
    adapted = any(layer.adapter is not None and layer.adapter.adds for layer in layers)  # adapters need the whole input
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
    """The identity on x, which saves x and the weights for the backward of `_ColumnParallel`.

    Its context is appended to `kept`, from which `_ColumnParallel` reads the saved tensors. They are saved before the
    gather and the products. With activation recomputation, the recomputed forward may stop as soon as all saved
    tensors are available; if they were saved after the products, it would repeat the gather and the products.
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
    """The products of one input with n weights, with overlapped collectives in backward.

    The arguments are x, the axis, True if x is a slice of the sequence (`split`), the list with the context of `_Keep`,
    then n weights and n biases (or None).
    """

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
    """Return x W^T + b for each weight. With `split`, x is first gathered along the sequence."""
    inside = tp.all_gather(x) if split else x
    return [F.linear(inside, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _gradients(
    grads: Tensors, x: torch.Tensor, weights: Tensors, needed: Sequence[bool], split: bool, tp: MeshAxis
) -> list[torch.Tensor | None]:
    """Return the gradient of x, then the gradients of all weights and biases, None for those that are not `needed`.

    The gather of x overlaps with the product for its gradient, and the reduction of that gradient overlaps with the
    products for the weights' gradients. On the CPU nothing overlaps.
    """
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


# In a graph of torch.compile, these layers are one operator for forward and one for backward. Otherwise the compiler
# could save the gathered input instead of gathering again in backward, and collectives would not overlap with products.


def _column_parallel(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], split: bool, axis: str
) -> list[torch.Tensor]:
    """Run the operator megazpp::column_parallel, see `_products`; `biases` is empty for layers without a bias."""
    return _products(x, weights, biases or [None] * len(weights), split, axis_of_key(axis))


def _shapes_of_products(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], split: bool, axis: str
) -> list[torch.Tensor]:
    """Return empty results of megazpp::column_parallel for tracing."""
    seq = x.shape[0] * axis_of_key(axis).size if split else x.shape[0]
    return [x.new_empty((seq, *x.shape[1:-1], weight.shape[0])) for weight in weights]


def _column_parallel_gradients(
    grads: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], needed: list[bool], split: bool, axis: str
) -> list[torch.Tensor]:
    """Run the operator megazpp::column_parallel_backward: `_gradients` without the entries that are None."""
    found = _gradients(grads, x, weights, needed, split, axis_of_key(axis))
    return [grad for grad in found if grad is not None]


def _shapes_of_gradients(
    grads: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], needed: list[bool], split: bool, axis: str
) -> list[torch.Tensor]:
    """Return empty results of megazpp::column_parallel_backward for tracing."""
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
    """Save the input and the weights of megazpp::column_parallel for its backward."""
    x, weights, _, ctx.split, ctx.axis = inputs
    ctx.save_for_backward(x, *weights)


def _backward_of_products(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return the gradients of the arguments of megazpp::column_parallel, None for those that need none."""
    x, *weights = ctx.saved_tensors
    of_weights, of_biases = ctx.needs_input_grad[1:3]
    needed = [*of_weights, *(of_biases or [False] * len(weights))]
    x_grad, *others = _column_parallel_backward(grads, x, weights, needed, ctx.split, ctx.axis)
    found = iter(others)
    return x_grad, *([next(found) if n else None for n in which] for which in (of_weights, of_biases)), None, None


torch.library.register_autograd("megazpp::column_parallel", _backward_of_products, setup_context=_save_for_backward)


class RowParallelLinear(_SplitLinear):
    """A linear layer whose inputs are split over tp: [S, B, in/T] -> [S, B, out].

    With sequence parallelism the output is [S/T, B, out].

    Collectives on tp: an all-reduce in forward. With sequence parallelism a reduce-scatter in forward and an all-gather
    in backward; each rank then computes only its slice's part of the bias's gradient.
    """

    split = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b, summed over tp."""
        product = self.product or F.linear
        if self.tp.size == 1:
            whole = product(x, local(self.weight), None if self.bias is None else local(self.bias))
            return _adapted(whole, x, self.adapter)
        part = _adapted(product(x, local(self.weight), None), x, self.adapter)
        y = leave_region(part, self.tp, sequence_parallel=self.sequence_parallel)
        return y if self.bias is None else y + local(self.bias)  # the bias is added once, after the sum over tp


class VocabParallelEmbedding(nn.Module):
    """An embedding whose vocabulary is split over tp: tokens [S, B] -> [S, B, H].

    With sequence parallelism the output is [S/T, B, H].

    Each rank looks up the tokens in its rows and returns zeros for all others; the sum over tp completes the result.
    Collectives on tp: an all-reduce in forward. With sequence parallelism a reduce-scatter in forward and an all-gather
    in backward.

    Args:
        padded_vocab_size: number of rows of the whole table, a multiple of the number of ranks.
        hidden_size: number of columns, H.
        vocab_size: number of tokens. Rows from here on are padding, which starts at zero.
        tp: tensor-parallel axis.
        std: standard deviation of the initial values.
        sequence_parallel: True returns this rank's slice of the sequence.
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
        """Look up the embeddings of tokens [S, B], int64."""
        if self.tp.size == 1:
            return F.embedding(tokens, local(self.weight))
        row = tokens - self.tp.rank * self.rows
        elsewhere = (row < 0) | (row >= self.rows)
        found = F.embedding(row.masked_fill(elsewhere, 0), local(self.weight))
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_region(found, self.tp, sequence_parallel=self.sequence_parallel)


def _adapted(y: torch.Tensor, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    """Return y plus the output of the adapter for x, or y itself if the adapter is missing or switched off."""
    return y if adapter is None or not adapter.adds else y + adapter(x)
