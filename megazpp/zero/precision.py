"""The flags of precision: the dtype in which the model computes, and the one in which gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazpp.base.flags import flag


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision: fp32 master weights always; compute in fp32, bf16 or fp16."""

    fp16: bool = flag(False, "compute in fp16, with loss scaling")
    bf16: bool = flag(False, "compute in bf16")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "accumulate and reduce gradients in fp32 (always so with --bf16, unless --grad-reduce-in-bf16)"
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16: half the bytes, less exact sums")

    def __post_init__(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 exclude each other")
        if self.grad_reduce_in_bf16 and not self.bf16:
            raise ValueError("--grad-reduce-in-bf16 needs --bf16")
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise ValueError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other")

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype in which weights are gathered and layers compute."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are accumulated and reduced."""
        if self.grad_reduce_in_bf16:
            return torch.bfloat16
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return torch.float16
        return torch.float32


class Dtypes(NamedTuple):
    """The dtypes that `PrecisionConfig` comes to, for models whose precision no flags describe."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
