"""Linear layers and the embedding with their matrices split over the tensor-parallel axis.

T ranks of the tp axis; activations [S, B, H]. A column-parallel layer splits its outputs, a row-parallel layer its
inputs: column, then anything elementwise, then row needs one collective at each end. What an adapter (lora.py) makes of
a layer's input on this rank is added to the layer's own product there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.lora import Adapter
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import enter_region, leave_region, sum_gradients


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W split: [S, B, in] -> [S, B, out/T].

    Collectives on tp: with `enter`, what `enter_region` does (backward all-reduce; or all-gather forward and
    reduce-scatter backward with sequence parallelism); without, none (the caller has entered the region).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: MeshAxis,
        std: float,
        bias: bool,
        sequence_parallel: bool,
        enter: bool = True,
    ) -> None:
        super().__init__()
        assert out_features % tp.size == 0, f"{out_features} outputs over {tp.size} ranks"
        self.tp, self.sequence_parallel, self.enter = tp, sequence_parallel, enter
        self.adapter: Adapter | None = None
        self.weight = nn.Parameter(torch.empty(out_features // tp.size, in_features))
        self.specs = {"weight": ParameterSpec(split=0, std=std)}
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features // tp.size))
            self.specs["bias"] = ParameterSpec(split=0)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enter:
            x = enter_region(x, self.tp, sequence_parallel=self.sequence_parallel)
        y = F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))
        return _adapted(y, x, self.adapter)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W split: [S, B, in/T] -> [S, B, out] ([S/T, B, out] with sequence parallelism).

    Collectives on tp: forward all-reduce; or forward reduce-scatter, backward all-gather and the bias's backward
    all-reduce with sequence parallelism.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: MeshAxis,
        std: float,
        bias: bool,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        assert in_features % tp.size == 0, f"{in_features} inputs over {tp.size} ranks"
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.adapter: Adapter | None = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tp.size))
        self.specs = {"weight": ParameterSpec(split=1, std=std)}
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features))
            self.specs["bias"] = ParameterSpec()
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            whole = F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))
            return _adapted(whole, x, self.adapter)
        part = _adapted(F.linear(x, local(self.weight)), x, self.adapter)
        y = leave_region(part, self.tp, sequence_parallel=self.sequence_parallel)
        if self.bias is None:
            return y
        # after the sum, so that it is added once
        bias = local(self.bias)
        return y + (sum_gradients(self.tp, bias)[0] if self.sequence_parallel else bias)


class VocabParallelEmbedding(nn.Module):
    """Rows of the table split over tp: tokens [S, B] -> [S, B, H] ([S/T, B, H] with sequence parallelism).

    Each rank looks up the tokens it owns and the sum over tp completes the rest. Collectives on tp: forward
    all-reduce, or forward reduce-scatter and backward all-gather with sequence parallelism.

    Args:
        padded_vocab_size: rows, a multiple of T; rows from `vocab_size` on are padding and start at zero.
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
    return y if adapter is None or not adapter.enabled else y + adapter(x)
