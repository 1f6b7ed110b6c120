"""LoRA adapters for tensor-parallel linear layers: a layer's output becomes y + scale (x A) B^T.

Only A and B are trained; the layer's own weight is frozen. r is the rank of the adapter, T the number of tp ranks, and
`in` and `out` are the layer's inputs and outputs over all tp ranks. One of the two matrices is split over the tp ranks
in the same dimension as the layer's weight. The other matrix is complete on every tp rank, and each rank computes only
a partial gradient of it, which has to be summed over tp:

| base layer      | A            | B            | x A on each rank  | partial gradient |
|-----------------|--------------|--------------|-------------------|------------------|
| column-parallel | [in, r]      | [out / T, r] | complete          | of A             |
| row-parallel    | [in / T, r]  | [out, r]     | part of a sum     | of B             |

A row-parallel layer sums its outputs over tp after the adapter has been added. So the adapter needs no collective of
its own, also with sequence parallelism. A is stored as [in, r], because ZeRO shards the first dimension, and `in` is
larger than r.

Source: LoRA (arXiv 2106.09685). Initial values have the same variance as in PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.moe import ExpertAdapter
from megazpp.tensor_parallel.layers import Adapter, ColumnParallelLinear, RowParallelLinear
from megazpp.tensor_parallel.parameters import ParameterSpec, local

Linear = ColumnParallelLinear | RowParallelLinear
_AT_ONCE = 1 << 18  # number of weight elements that `merged` computes at a time, which fit into the CPU's caches


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Return a context in which a model with adapters computes the same function as before training.

    Inside the context a new adapter adds nothing, and an adapter of --lora-load computes with its loaded values instead
    of the trained ones. This lets a policy with LoRA be its own reference model.
    """
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


class LowRankAdapter(Adapter):
    """A LoRA adapter of a linear layer, with two trained matrices A and B: [S, N, in] -> [S, N, out].

    S is the sequence length and N the number of samples; `in` and `out` are sizes on this tp rank.

    Args:
        linear: base layer, to whose output the adapter's output is added.
        out_features: number of the base layer's outputs on this tp rank that the adapter changes.
        rank: rank r of the adapter.
        scale: factor of the adapter's output, alpha / r.
        dropout: dropout module that is applied to the adapter's input.
    Attributes:
        reference: matrices A and B that the adapter uses while it is not enabled. With None, an adapter that is not
            enabled adds nothing to the base layer's output.
    """

    def __init__(self, linear: Linear, out_features: int, *, rank: int, scale: float, dropout: nn.Module) -> None:
        super().__init__()
        self.scale, self.dropout, self.tp = scale, dropout, linear.tp
        self.reference: tuple[torch.Tensor, torch.Tensor] | None = None
        in_features, several, row = linear.weight.shape[1], linear.tp.size > 1, isinstance(linear, RowParallelLinear)
        self.a = nn.Parameter(torch.empty(in_features, rank))
        self.b = nn.Parameter(torch.empty(out_features, rank))
        whole_inputs = in_features * (linear.tp.size if row else 1)
        # PEFT initializes A uniformly between -1 / sqrt(inputs) and 1 / sqrt(inputs). Here A is normally distributed
        # with the same variance. B starts at zero, so a new adapter changes nothing.
        std = 1.0 / math.sqrt(3.0 * whole_inputs)
        self.specs = {"a": ParameterSpec(std=std, split=0 if row else None, partial=several and not row)}
        self.specs["b"] = ParameterSpec(split=None if row else 0, partial=several and row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the LoRA adapter's output, scale (x A) B^T, which is added to the output of its base layer.

        An adapter that is not enabled uses its reference matrices, without dropout.
        """
        if self.enabled:
            return F.linear(self.dropout(x) @ local(self.a), local(self.b)) * self.scale
        assert self.reference is not None
        a, b = (weight.to(x.dtype) for weight in self.reference)
        return F.linear(x @ a, b) * self.scale

    def keep_reference(self, a: torch.Tensor, b: torch.Tensor, device: torch.device) -> None:
        """Store the matrices that the adapter uses while it is not enabled, as part of the reference model.

        Args:
            a: [in, r] unsharded matrix A; here `in` counts the inputs of all tp ranks.
            b: [out, r] unsharded matrix B; here `out` counts the outputs of all tp ranks.
            device: device on which this tp rank's parts of the matrices are stored.
        """
        parts = [
            whole if (split := self.specs[name].split) is None else whole.chunk(self.tp.size, split)[self.tp.rank]
            for name, whole in (("a", a), ("b", b))
        ]
        self.reference, self.has_reference = (parts[0].to(device), parts[1].to(device)), True


class QkvAdapter(Adapter):
    """Separate LoRA adapters of queries, keys and values for the fused projection of attention.

    Maps [S, B, in] to [S, B, outputs of this tp rank], for S tokens of each of B samples. The outputs are in the order
    of the fused projection: for each key-value head of this rank first its query heads, then the key, then the value,
    with `head_size` outputs each.

    Args:
        adapters: the adapters by name, "q", "k" and "v"; a missing one adds nothing.
        groups: number of key-value heads on this tp rank.
        queries_per_group: number of query heads per key-value head.
        head_size: number of outputs of a head.
    """

    def __init__(
        self, adapters: Mapping[str, LowRankAdapter], *, groups: int, queries_per_group: int, head_size: int
    ) -> None:
        super().__init__()
        for name, adapter in adapters.items():
            self.add_module(name, adapter)
        self.groups, self.head_size = groups, head_size
        # For queries, keys and values: the number of heads per key-value head
        self.heads = {"q": queries_per_group, "k": 1, "v": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the LoRA adapters of queries, keys and values in the order of the fused projection.

        Outputs without an adapter are zero.
        """
        parts = []
        for name, heads in self.heads.items():
            shape, adapter = (*x.shape[:2], self.groups, heads, self.head_size), getattr(self, name, None)
            parts.append(x.new_zeros(shape) if adapter is None else adapter(x).view(shape))
        return torch.cat(parts, dim=3).flatten(2)


class LowRankExpertAdapter(ExpertAdapter):
    """The LoRA adapters of one matrix of all E experts of a layer; each expert has its own A and B.

    The parameters are A [E * in, r] and B [E * out, r], for matrices with `in` inputs and `out` outputs. The rows of
    expert 0 come first, then the rows of expert 1, and so on. A and B are sharded like the experts' weights.

    Args:
        num_experts: number of experts E.
        in_features: number of inputs of an expert's matrix.
        out_features: number of outputs of an expert's matrix.
        rank: rank r of each adapter.
        scale: factor of the adapters' output, alpha / r.
        dropout: dropout module that is applied to the adapters' input.
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, rank: int, scale: float, dropout: nn.Module
    ) -> None:
        super().__init__()
        self.num_experts, self.rank, self.scale, self.dropout = num_experts, rank, scale, dropout
        self.a = nn.Parameter(torch.empty(num_experts * in_features, rank))
        self.b = nn.Parameter(torch.empty(num_experts * out_features, rank))
        std = 1.0 / math.sqrt(3.0 * in_features)  # gives A the same variance as in PEFT, see `LowRankAdapter`
        self.specs = {name: ParameterSpec(split=0, expert=True, std=std if name == "a" else 0.0) for name in ("a", "b")}

    def forward(self, x: torch.Tensor, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the output [R, out] of the experts' LoRA adapters, scale (x A) B^T.

        Args:
            x: [R, in] inputs of the experts' matrix, sorted by expert. There is one row for each pair of a token and an
                expert that the router has chosen for it, R rows in all.
            multiply: function (rows, matrices) that multiplies each expert's rows by this expert's matrix.
        """
        a, b = (local(weight).view(self.num_experts, -1, self.rank) for weight in (self.a, self.b))
        return multiply(multiply(self.dropout(x), a), b.mT) * self.scale


def joined_factors(
    parameters: Mapping[str, torch.Tensor], groups: int, queries: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices A [in, R] and B [out, R] of a linear layer's adapter, whose weight change is B A^T.

    If the fused projection of queries, keys and values has separate adapters (`QkvAdapter`), their matrices are joined:
    R is the sum of their ranks. In each column of B, only the rows for queries, for keys or for values are not zero.
    Otherwise A and B are the adapter's own matrices, and R is its rank.

    Args:
        parameters: unsharded parameters of the adapter, by name: "a" and "b", or "q.a", "q.b", "k.a" and so on.
        groups: number of key-value heads of the layer over all tp ranks.
        queries: number of query heads of the layer over all tp ranks.
        head_size: number of outputs of a head.
    """
    if "a" in parameters:
        return parameters["a"], parameters["b"]
    found, start = [], 0
    for part, heads in (("q", queries // groups), ("k", 1), ("v", 1)):
        if f"{part}.a" in parameters:
            own = parameters[f"{part}.b"]
            rows = own.new_zeros(groups, queries // groups + 2, head_size, own.shape[1])
            rows[:, start : start + heads] = own.view(groups, heads, head_size, -1)
            found.append((parameters[f"{part}.a"], rows.flatten(0, 2)))
        start += heads
    a, b = (torch.cat(factors, dim=1) for factors in zip(*found, strict=True))
    return a, b


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Merge an adapter into a layer's weight: return weight + scale b a^T, in the weight's dtype.

    The sum is computed in fp32. `weight` may be any rectangular part of a layer's weight. An element of b a^T is a sum
    of R terms, where R is the rank of the adapter. The terms are always added in the same order, so the result is
    bit-identical for every division of the weight into parts.

    Args:
        weight: [rows, columns] rectangular part of a weight [out, in].
        a: [columns, R] rows of A that belong to the columns of `weight`.
        b: [rows, R] rows of B that belong to the rows of `weight`.
        scale: factor of the adapter's output, alpha / r.
    """
    result, at_once = torch.empty_like(weight), max(_AT_ONCE // weight.shape[1], 1)
    a, b = a.float(), b.float()
    for first in range(0, weight.shape[0], at_once):
        rows = slice(first, first + at_once)
        total = torch.zeros(weight[rows].shape)
        for index in range(a.shape[1]):
            total += b[rows, index, None] * a[:, index]
        result[rows] = weight[rows].float() + total * scale
    return result
