"""The router of a mixture of experts in three kernels for CUDA tensors: two in forward, one in backward.

The router's plain PyTorch code in model/router.py defines the results. It serves CPUs, where a router takes less than a
hundredth of a layer's time.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from megazpp.kernels.router.settings import Routed, RouterSettings
from megazpp.kernels.triton_module import is_in_gpu_memory, triton_module

TRITON = triton_module(__name__)
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
    return TRITON if is_in_gpu_memory(x) and num_experts <= MOST_EXPERTS else None
