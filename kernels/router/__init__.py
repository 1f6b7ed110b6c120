"""The router of a mixture of experts in three Triton kernels for CUDA tensors: two in forward, one in backward.

The plain PyTorch code of `Router` in model/router.py defines the results. The same code serves CPUs, where a router
takes less than a hundredth of a layer's time.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from megazpp.kernels.router.settings import Routed, RouterSettings
from megazpp.kernels.triton_module import is_in_gpu_memory, triton_module

TRITON = triton_module(__name__)
MOST_EXPERTS = 1024  # maximum number of experts in Triton, because a program holds a token's logits in registers

__all__ = ["MOST_EXPERTS", "TRITON", "Routed", "RouterSettings", "find_router"]


def find_router(x: Tensor, num_experts: int) -> ModuleType | None:
    """Return the module with Triton's kernels for a router of the tokens `x`.

    None if PyTorch's operations must compute the router: without CUDA or Triton, or for more than MOST_EXPERTS experts.
    The module has two functions, for logits [N, E] fp32 of N tokens, which belong to B samples, and E experts:

        route(logits, bias [E] or None, choice [N, K] or None, totals [2 E + 2] fp64 or None, settings) -> Routed
            chooses K experts for each token, or repeats the given choice; adds this call's counts to `totals`, whose
            contents `Router.take_totals` describes
        route_backward(logits, routed, gradient of weight [N, K], gradient of loss [B], settings, dtype) -> [N, E]
            the gradient of the logits in `dtype`
    """
    return TRITON if is_in_gpu_memory(x) and num_experts <= MOST_EXPERTS else None
