"""FSDP2's own collectives, passed through our axis so that their bytes are counted where they leave.

The only file that names FSDP2's comm interface, which lives in a private module in torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megazpp.parallel.axis import MeshAxis

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"torch {torch.__version__} has moved FSDP2's comm interface; MegaZ++ knows torch 2.11 to 2.13"
    ) from error


class FreshBuffers:
    """FSDP2 asks its comms for buffers; a new one per call leaves their lifetime to the allocator."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(FreshBuffers, AllGather):
    """[n] shard -> [W n] parameters over `axis`, as FSDP2 does it."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        assert group is self.axis.group, f"FSDP2 gathers over another group than {self.axis.name}"
        self.axis.all_gather(input_tensor, out=output_tensor)


class CountedReduce(FreshBuffers, ReduceScatter):
    """[W n] gradients -> this rank's [n] of their sum over `axis`, as FSDP2 does it."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert group is self.axis.group, f"FSDP2 reduces over another group than {self.axis.name}"
        assert op == dist.ReduceOp.SUM, f"communication only sums, FSDP2 asked for {op}"
        self.axis.reduce_scatter(input_tensor, out=output_tensor)


def count_all_reduce(axis: MeshAxis) -> Callable[[torch.Tensor], None]:
    """A hook for `set_all_reduce_hook`: counts the all-reduce between replicas that FSDP2 has just done."""

    def hook(reduced: torch.Tensor) -> None:
        axis.count("all_reduce", 2 * axis.ring_bytes(reduced))

    return hook
