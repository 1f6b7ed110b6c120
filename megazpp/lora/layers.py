"""LoRA adapters for tensor-parallel linear layers: y + scale (x A) B^T, where only A and B are trained.

Letters: r is the rank of the adapter, T the number of ranks of the tp axis. The adapter splits the same dimension as
its base layer. The other of its two matrices is whole on every tp rank, and each rank computes only a part of the
gradient of that matrix:

| base layer      | A            | B            | x A on each rank  | partial gradient |
|-----------------|--------------|--------------|-------------------|------------------|
| column-parallel | [in, r]      | [out / T, r] | complete          | of A             |
| row-parallel    | [in / T, r]  | [out, r]     | part of a sum     | of B             |

The sum over tp of a row-parallel layer follows the adapter, so the adapter needs no further collective, also with
sequence parallelism. A is stored as [in, r] because ZeRO shards the first dimension, which is then the long one.

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
_AT_ONCE = 1 << 18  # elements that are merged at a time, few enough for the CPU's caches


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Return a context in which `model` computes the same function as before training.

    This lets a model with LoRA serve as its own reference model.
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
    """An adapter with two matrices: [S, B, in] -> [S, B, out], with the base layer's sizes on this rank.

    Args:
        linear: base layer.
        out_features: number of the base layer's outputs on this tp rank to which the adapter adds.
        rank: rank r of the adapter.
        scale: factor of the adapter's output, alpha / r.
        dropout: module that is applied to the adapter's input.
    """

    def __init__(self, linear: Linear, out_features: int, *, rank: int, scale: float, dropout: nn.Module) -> None:
        super().__init__()
        self.scale, self.dropout, self.tp = scale, dropout, linear.tp
        self.reference: tuple[torch.Tensor, torch.Tensor] | None = None
        in_features, several, row = linear.weight.shape[1], linear.tp.size > 1, isinstance(linear, RowParallelLinear)
        self.a = nn.Parameter(torch.empty(in_features, rank))
        self.b = nn.Parameter(torch.empty(out_features, rank))
        whole_inputs = in_features * (linear.tp.size if row else 1)
        # PEFT initializes A uniformly in +-1 / sqrt(inputs). This is a normal distribution of the same variance. B
        # starts at zero.
        std = 1.0 / math.sqrt(3.0 * whole_inputs)
        self.specs = {"a": ParameterSpec(std=std, split=0 if row else None, partial=several and not row)}
        self.specs["b"] = ParameterSpec(split=None if row else 0, partial=several and row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scale (x A) B^T, with the reference matrices and without dropout if the adapter is not enabled."""
        if self.enabled:
            return F.linear(self.dropout(x) @ local(self.a), local(self.b)) * self.scale
        assert self.reference is not None
        a, b = (weight.to(x.dtype) for weight in self.reference)
        return F.linear(x @ a, b) * self.scale

    def keep_reference(self, a: torch.Tensor, b: torch.Tensor, device: torch.device) -> None:
        """Store the matrices that the adapter uses while it is not enabled.

        Args:
            a: [in, r] whole matrix A.
            b: [out, r] whole matrix B.
            device: device that keeps this tp rank's parts.
        """
        parts = [
            whole if (split := self.specs[name].split) is None else whole.chunk(self.tp.size, split)[self.tp.rank]
            for name, whole in (("a", a), ("b", b))
        ]
        self.reference, self.has_reference = (parts[0].to(device), parts[1].to(device)), True


class QkvAdapter(Adapter):
    """Separate adapters of queries, keys and values for the fused column-parallel projection.

    Maps [S, B, in] to [S, B, rows of this rank]. The rows have the fused order: for each group of this rank its
    queries, then its key, then its value, with `head_size` rows per head.

    Args:
        adapters: the adapters of "q", "k" and "v"; each may be missing.
        groups: number of key-value heads on this rank.
        queries_per_group: number of query heads per key-value head.
        head_size: size of a head.
    """

    def __init__(
        self, adapters: Mapping[str, LowRankAdapter], *, groups: int, queries_per_group: int, head_size: int
    ) -> None:
        super().__init__()
        for name, adapter in adapters.items():
            self.add_module(name, adapter)
        self.groups, self.head_size = groups, head_size
        self.heads = {"q": queries_per_group, "k": 1, "v": 1}  # number of heads in a group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the adapters in the fused order, zeros for missing adapters."""
        parts = []
        for name, heads in self.heads.items():
            shape, adapter = (*x.shape[:2], self.groups, heads, self.head_size), getattr(self, name, None)
            parts.append(x.new_zeros(shape) if adapter is None else adapter(x).view(shape))
        return torch.cat(parts, dim=3).flatten(2)


class LowRankExpertAdapter(ExpertAdapter):
    """The adapters of one matrix of all E experts of a layer, each with its own A and B.

    The parameters are A [E in, r] and B [E out, r], with the rows of the experts one after another. They are sharded
    like the weights of experts.

    Args:
        num_experts: number of experts E.
        in_features: number of inputs of an expert's matrix.
        out_features: number of outputs of an expert's matrix.
        rank: rank r of each adapter.
        scale: factor of the adapters' output, alpha / r.
        dropout: module that is applied to the adapters' input.
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, rank: int, scale: float, dropout: nn.Module
    ) -> None:
        super().__init__()
        self.num_experts, self.rank, self.scale, self.dropout = num_experts, rank, scale, dropout
        self.a = nn.Parameter(torch.empty(num_experts * in_features, rank))
        self.b = nn.Parameter(torch.empty(num_experts * out_features, rank))
        std = 1.0 / math.sqrt(3.0 * in_features)  # as in `LowRankAdapter`
        self.specs = {name: ParameterSpec(split=0, expert=True, std=std if name == "a" else 0.0) for name in ("a", "b")}

    def forward(self, x: torch.Tensor, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return scale (x A) B^T for the rows x [R, in] of all experts, see `ExpertAdapter`."""
        a, b = (local(weight).view(self.num_experts, -1, self.rank) for weight in (self.a, self.b))
        return multiply(multiply(self.dropout(x), a), b.mT) * self.scale


def joined_factors(
    parameters: Mapping[str, torch.Tensor], groups: int, queries: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [in, R] and B [out, R] such that B A^T is the whole adapter of a linear layer.

    For an adapter of the fused projection of queries, keys and values, R is the sum of the ranks of its parts. In the
    columns of B that belong to one part, the rows of the other parts are zero.

    Args:
        parameters: whole parameters of the adapter, by name: a and b, or q.a, q.b, k.a and so on.
        groups: number of key-value heads of the whole layer.
        queries: number of query heads of the whole layer.
        head_size: size of a head.
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
    """Return weight + scale b a^T, computed in fp32 and rounded to the weight's dtype.

    `weight` may be any rectangular part of a layer's weight. The R terms of each element are added one after the other,
    so that the result is bit-identical for every division of the weight into parts.

    Args:
        weight: [rows, columns] part of a weight [out, in].
        a: [columns, R] rows of A for the part's columns.
        b: [rows, R] rows of B for the part's rows.
        scale: factor of the adapter.
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
