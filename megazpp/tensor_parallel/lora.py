"""LoRA beside tensor-parallel linear layers: y + scale (x A) B, of which only A and B are trained.

r the rank, T ranks of the tp axis. What the base layer splits, its adapter splits, and the small matrix in between is
whole on every rank; its gradient there is partial:

| beside       | A            | B            | x A on a rank         | partial gradient        |
|--------------|--------------|--------------|-----------------------|-------------------------|
| column       | [in, r]      | [out / T, r] | whole                 | A's                     |
| row          | [in / T, r]  | [out, r]     | a part of the sum     | B's                     |

A row-parallel layer sums over tp behind the adapter, so the parts need no collective of their own, with sequence
parallelism neither. A is stored transposed, so that ZeRO shards its long side. Source: LoRA (arXiv 2106.09685); initial
values have the variance of PEFT's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, local

_AT_ONCE = 1 << 18  # elements that are merged at once, which caches hold


class Adapter(nn.Module):
    """The term that is added to the product of a linear layer."""

    enabled = True  # see `adapters_off`
    has_reference = False  # it did not begin at zero: where it is not enabled, it is as it began

    @property
    def adds(self) -> bool:
        return self.enabled or self.has_reference


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes what it did before training: with LoRA it is its own reference."""
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


class LowRankAdapter(Adapter):
    """[S, B, in] -> [S, B, out] as the base layer has them on this rank.

    Args:
        in_features, out_features: of this tp rank.
        rank, scale: r, alpha / r.
        row: whether the base splits its inputs; otherwise it splits its outputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        scale: float,
        tp: MeshAxis,
        row: bool,
        dropout: nn.Module,
    ) -> None:
        super().__init__()
        self.scale, self.dropout, self.tp = scale, dropout, tp
        self.reference: tuple[torch.Tensor, torch.Tensor] | None = None
        self.a = nn.Parameter(torch.empty(in_features, rank))
        self.b = nn.Parameter(torch.empty(out_features, rank))
        whole_inputs = in_features * (tp.size if row else 1)
        # the variance of PEFT's uniform distribution over +-1 / sqrt(inputs); B begins at zero
        std, several = 1.0 / math.sqrt(3.0 * whole_inputs), tp.size > 1
        self.specs = {"a": ParameterSpec(std=std, split=0 if row else None, partial=several and not row)}
        self.specs["b"] = ParameterSpec(split=None if row else 0, partial=several and row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enabled:
            return F.linear(self.dropout(x) @ local(self.a), local(self.b)) * self.scale
        assert self.reference is not None
        a, b = (weight.to(x.dtype) for weight in self.reference)
        return F.linear(x @ a, b) * self.scale

    def keep_reference(self, a: torch.Tensor, b: torch.Tensor, device: torch.device) -> None:
        """Be these whole matrices where it is not enabled; this tp rank's parts of them stay on `device`."""
        parts = [
            whole if (split := self.specs[name].split) is None else whole.chunk(self.tp.size, split)[self.tp.rank]
            for name, whole in (("a", a), ("b", b))
        ]
        self.reference, self.has_reference = (parts[0].to(device), parts[1].to(device)), True


class QkvAdapter(Adapter):
    """Adapters of queries, keys and values, each with its own A, beside the fused column-parallel projection.

    [S, B, in] -> [S, B, rows of this rank], in the fused order [group of this rank, (Q queries, key, value), D].
    """

    def __init__(
        self, adapters: Mapping[str, LowRankAdapter], *, groups: int, queries_per_group: int, head_size: int
    ) -> None:
        super().__init__()
        for name, adapter in adapters.items():
            self.add_module(name, adapter)
        self.groups, self.head_size = groups, head_size
        self.heads = {"q": queries_per_group, "k": 1, "v": 1}  # of a group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for name, heads in self.heads.items():
            shape, adapter = (*x.shape[:2], self.groups, heads, self.head_size), getattr(self, name, None)
            parts.append(x.new_zeros(shape) if adapter is None else adapter(x).view(shape))
        return torch.cat(parts, dim=3).flatten(2)


def joined_factors(
    parameters: Mapping[str, torch.Tensor], groups: int, queries: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [in, R] and B [out, R] beside a whole linear layer, of its adapter's whole parameters: a, b, or q.a, q.b, ...

    R is the sum of the parts' ranks; rows of the fused projection that a part does not reach are zeros in its columns.
    `groups` and `queries` are the heads of keys and of queries of the whole layer.
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
    """`weight` [rows, columns], a box of [out, in], + scale b [rows, R] a^T [R, columns] in fp32, rounded to its type.

    The terms are added one after the other: an element has the same bits whatever box of the weight it is computed in.
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
