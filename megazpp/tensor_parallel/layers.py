"""Tensor-parallel linear layers and embedding: their weights are split over the tensor-parallel axis.

Letters: T ranks of the tp axis; activations are [S, B, H] (sequence, batch, hidden).

A column-parallel layer splits its outputs, a row-parallel layer its inputs. So the sequence of a column-parallel layer,
elementwise operations and a row-parallel layer needs one collective at the start and one at the end. If a layer has a
LoRA adapter (`Adapter`), each rank adds the adapter's output to its own x W^T, before any sum over ranks.

With sequence parallelism a column-parallel layer saves only its slice of the input, and gathers the input again in
backward. Both collectives of backward overlap with compute. The gather overlaps with the matrix product for the input's
gradient, and the reduction of that gradient with the matrix product for the weight's gradient. Source: Megatron-LM's
LinearWithGradAccumulationAndAsyncCommunication. With a substitute for F.linear (model/float8.py) the layer saves the
gathered input, and the collectives do not overlap.
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

# The type of a substitute for F.linear with K inputs and N outputs: it takes x [..., K], a weight W [N, K] and a bias b
# [N] or None, and returns x W^T + b.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Tensors = Sequence[torch.Tensor]
Biases = Sequence[torch.Tensor | None]


class Adapter(nn.Module):
    """The base class of LoRA adapters. An adapter computes a term that is added to the output of a linear layer.

    Attributes:
        enabled: False while the layer computes the same function as before training, to serve as a reference model.
        has_reference: True if the adapter's output was not zero before training. The adapter then keeps its initial
            matrices, and uses them while it is not enabled.
    """

    enabled = True
    has_reference = False

    @property
    def adds(self) -> bool:
        """True if the layer must add the adapter's term to its output.

        The term is added while the adapter is enabled. If `has_reference` is True, a term is always added: an adapter
        that is not enabled then computes the term of the reference model from its initial matrices.
        """
        return self.enabled or self.has_reference


class _SplitLinear(nn.Module):
    """The base class of linear layers whose weight [out, in] is split over tensor-parallel ranks.

    A subclass sets `split` to 0 to split the weight's rows, or to 1 to split its columns.

    Args:
        in_features: number of inputs of the layer, over all tensor-parallel ranks.
        out_features: number of outputs of the layer, over all tensor-parallel ranks.
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
        assert shape[self.split] % tp.size == 0, f"{shape[self.split]} {kind} cannot be split over {tp.size} tp ranks"
        shape[self.split] //= tp.size
        self.tp, self.sequence_parallel, self.product = tp, sequence_parallel, product
        self.adapter: Adapter | None = None
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": ParameterSpec(split=self.split, std=std, matrices=(shape[0],))}
        self.register_parameter("bias", nn.Parameter(torch.empty(shape[0])) if bias else None)
        if bias:
            self.specs["bias"] = ParameterSpec(split=0) if self.split == 0 else ParameterSpec(partial=sequence_parallel)


class ColumnParallelLinear(_SplitLinear):
    """A linear layer whose outputs are split over T tensor-parallel ranks: [S, B, in] -> [S, B, out/T].

    S is the sequence length and B the batch size. With sequence parallelism the input is [S/T, B, in].

    Collectives on tp: an all-reduce in backward. With sequence parallelism an all-gather in forward, and an all-gather
    and a reduce-scatter in backward. `column_parallel` applies several layers to one input with the collectives of one
    layer.
    """

    split = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs of x W^T + b, [S, B, out/T] on T ranks; see the class for the shape of x."""
        return column_parallel(x, [self])[0]


def column_parallel(x: torch.Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    """Apply several column-parallel layers to one input, with the collectives of a single layer.

    Args:
        x: [S, B, in] activations, or this rank's slice [S/T, B, in] with sequence parallelism.
        layers: layers with the same input size, axis, substitute for F.linear and sequence parallelism, all with or all
            without a bias. Output sizes may differ.
    Returns:
        The output of each layer on this rank, [S, B, out/T].
    """
    tp, split, product = layers[0].tp, layers[0].sequence_parallel, layers[0].product
    weights = [local(layer.weight) for layer in layers]
    biases = [None if layer.bias is None else local(layer.bias) for layer in layers]
    # `_ColumnParallel` and its operator overlap the collectives of backward with matrix products. They do not return
    # the gathered input, which an adapter needs. On a single rank `_ColumnParallel` is used only for several layers in
    # eager mode, where it sums the layers' gradients of x without autograd.
    adapted = any(layer.adapter is not None and layer.adapter.adds for layer in layers)
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
    """The autograd function that returns x, and saves x and the weights for the backward of `_ColumnParallel`.

    The function appends its context to the list `kept`, from which `_ColumnParallel` reads the saved tensors. It is
    separate from `_ColumnParallel`, so that the tensors are saved before the gather and the matrix products. With
    activation recomputation, the recomputed forward stops as soon as all tensors are saved. So the recomputation does
    not repeat the gather and the products.
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
    """The autograd function that applies n column-parallel layers to one input; backward overlaps its collectives.

    The arguments of `apply` are x, the axis tp, `split` (True if x is a slice of the sequence), the list with the
    context of `_Keep`, then n weights and n biases (None for a layer without a bias).
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
    """Return x W^T + b, the output for the input x of each column-parallel layer with weight W and bias b.

    If `split` is True, x is this rank's slice of the sequence, and the slices are gathered over tp first.
    """
    inside = tp.all_gather(x) if split else x
    return [F.linear(inside, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _gradients(
    grads: Tensors, x: torch.Tensor, weights: Tensors, needed: Sequence[bool], split: bool, tp: MeshAxis
) -> list[torch.Tensor | None]:
    """Return the gradients of column-parallel layers with one input: of x, of all weights, then of all biases.

    The gather of x overlaps with the matrix products for the gradient of x. The reduction of that gradient overlaps
    with the matrix products for the weights' gradients. On the CPU nothing overlaps.

    Args:
        grads: gradients [S, B, out/T] of the outputs of the layers.
        x: input of the layers, [S, B, in], or with `split` this rank's slice of it, [S/T, B, in].
        weights: weights of the layers, [out/T, in] each.
        needed: one bool per weight, then one per bias. False returns None in place of that gradient.
        split: True if x is a slice of the sequence.
        tp: tensor-parallel axis.
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


# In a graph of torch.compile, column-parallel layers with one input are one operator for forward and one for backward.
# Otherwise the compiler could save the gathered input for backward instead of gathering it again, and collectives would
# not overlap with matrix products.


def _column_parallel(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], split: bool, axis: str
) -> list[torch.Tensor]:
    """Compute the operator megazpp::column_parallel for torch.compile; see `_products`.

    `biases` is empty for layers without a bias. `axis` is a string that identifies the tensor-parallel axis, because
    operators take no objects as arguments.
    """
    return _products(x, weights, biases or [None] * len(weights), split, axis_of_key(axis))


def _shapes_of_products(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], split: bool, axis: str
) -> list[torch.Tensor]:
    """Return uninitialized results of the operator megazpp::column_parallel, whose shapes torch.compile needs."""
    seq = x.shape[0] * axis_of_key(axis).size if split else x.shape[0]
    return [x.new_empty((seq, *x.shape[1:-1], weight.shape[0])) for weight in weights]


def _column_parallel_gradients(
    grads: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], needed: list[bool], split: bool, axis: str
) -> list[torch.Tensor]:
    """Compute the operator megazpp::column_parallel_backward for torch.compile: `_gradients` without its None entries.

    `axis` is a string that identifies the tensor-parallel axis, because operators take no objects as arguments.
    """
    found = _gradients(grads, x, weights, needed, split, axis_of_key(axis))
    return [grad for grad in found if grad is not None]


def _shapes_of_gradients(
    grads: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], needed: list[bool], split: bool, axis: str
) -> list[torch.Tensor]:
    """Return uninitialized results of megazpp::column_parallel_backward, whose shapes torch.compile needs."""
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
    """Save the input and the weights of the operator megazpp::column_parallel for its backward."""
    x, weights, _, ctx.split, ctx.axis = inputs
    ctx.save_for_backward(x, *weights)


def _backward_of_products(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return one gradient per argument of the operator megazpp::column_parallel, None for arguments that need none."""
    x, *weights = ctx.saved_tensors
    of_weights, of_biases = ctx.needs_input_grad[1:3]
    needed = [*of_weights, *(of_biases or [False] * len(weights))]
    x_grad, *others = _column_parallel_backward(grads, x, weights, needed, ctx.split, ctx.axis)
    found = iter(others)
    return x_grad, *([next(found) if n else None for n in which] for which in (of_weights, of_biases)), None, None


torch.library.register_autograd("megazpp::column_parallel", _backward_of_products, setup_context=_save_for_backward)


class RowParallelLinear(_SplitLinear):
    """A linear layer whose inputs are split over T tensor-parallel ranks: [S, B, in/T] -> [S, B, out].

    S is the sequence length and B the batch size. With sequence parallelism the output is [S/T, B, out].

    Collectives on tp: an all-reduce in forward. With sequence parallelism a reduce-scatter in forward and an all-gather
    in backward. The bias's gradient on each rank is then partial: it comes from this rank's slice of the sequence.
    """

    split = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T, summed over tensor-parallel ranks, plus the bias if there is one; see the class for shapes."""
        product = self.product or F.linear
        if self.tp.size == 1:
            y = product(x, local(self.weight), None if self.bias is None else local(self.bias))
            return _adapted(y, x, self.adapter)
        partial = _adapted(product(x, local(self.weight), None), x, self.adapter)
        y = leave_region(partial, self.tp, sequence_parallel=self.sequence_parallel)
        return y if self.bias is None else y + local(self.bias)  # the bias is added once, after the sum over tp


class VocabParallelEmbedding(nn.Module):
    """An embedding whose vocabulary is split over T tensor-parallel ranks: token ids [S, B] -> [S, B, H].

    S is the sequence length, B the batch size, H the hidden size. With sequence parallelism the output is [S/T, B, H].

    Each rank looks up the token ids that its rows have, and takes zeros for all other ids. The sum over tp completes
    the result.

    Collectives on tp: an all-reduce in forward. With sequence parallelism a reduce-scatter in forward and an all-gather
    in backward.

    Args:
        padded_vocab_size: number of rows of the table over all ranks, a multiple of the number of ranks.
        hidden_size: number of columns, H.
        vocab_size: number of token ids. Later rows of the table are padding, whose initial values are zero.
        tp: tensor-parallel axis.
        std: standard deviation of the initial values.
        sequence_parallel: True returns only this rank's slice of the sequence.
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
        assert padded_vocab_size % tp.size == 0, f"{padded_vocab_size} rows cannot be split over {tp.size} tp ranks"
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.rows = padded_vocab_size // tp.size
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))
        self.specs = {"weight": ParameterSpec(split=0, std=std, rows=vocab_size)}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `tokens`, token ids [S, B] int64; see the class for the shape of the result."""
        if self.tp.size == 1:
            return F.embedding(tokens, local(self.weight))
        row = tokens - self.tp.rank * self.rows
        elsewhere = (row < 0) | (row >= self.rows)
        found = F.embedding(row.masked_fill(elsewhere, 0), local(self.weight))
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_region(found, self.tp, sequence_parallel=self.sequence_parallel)


def _adapted(y: torch.Tensor, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    """Return y, the output of a linear layer, plus the output of the layer's adapter for the same input x.

    Returns y itself if `adapter` is None or adds nothing, see `Adapter.adds`.
    """
    return y if adapter is None or not adapter.adds else y + adapter(x)
