"""The router of a mixture of experts in three kernels for CUDA tensors: two in forward, one in backward.

The router's plain PyTorch code in model/router.py defines the results. It serves CPUs, where a router takes less than a
hundredth of a layer's time.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megazpp.kernels.router.settings import Routed, RouterSettings

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON: ModuleType | None = importlib.import_module("megazpp.kernels.router.triton") if HAS_TRITON else None
MOST_EXPERTS = 1024  # more do not fit in the registers of a program

__all__ = ["MOST_EXPERTS", "TRITON", "Routed", "RouterSettings", "find_router"]


def find_router(x: Tensor, num_experts: int) -> ModuleType | None:
    """Return the module with kernels for a router of tokens `x`; None if PyTorch's operations compute it.

    Its functions, for logits [N, E] fp32:

        route(logits, bias [E] or None, choice [N, K] or None, totals [2 E + 2] fp64 or None, settings) -> Routed
            chooses, or repeats the given choice; adds to `totals` what `Router.take_totals` describes
        route_backward(logits, routed, gradient of weight [N, K], gradient of loss [B], settings, dtype) -> [N, E]
            the gradient of the logits in `dtype`
    """
    fused = x.is_cuda and not isinstance(x, FakeTensor) and x.numel() > 0 and num_experts <= MOST_EXPERTS
    return TRITON if fused else None
