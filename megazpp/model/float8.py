"""The products of the linear layers with inputs in float8, by torchao's casts and scaled products (--fp8-format).

    forward           y  = x8 W8^T
    input's gradient  dx = dy8 W8
    weight's gradient dW = dy8^T x8

Each of x, W and dy is scaled by one number, so that its largest element is the largest that its format has, and rounded
(torchao's recipe "tensorwise"; the number is found anew at each use, so there is no state to save). NaN and Inf come
out as NaN. For backward x and W are kept as they were, in 16 bits, so neither FSDP2 nor ZeRO++ notices. With tensor
parallelism each rank scales its own slices.

A cast is several passes over memory, which torch.compile fuses. Source: `matmul_with_hp_or_float8_args` of
torchao.float8, from which this differs in three things: the output's gradient is cast once for both products, a frozen
weight has no third product, and the result may be summed over tensor-parallel ranks in place.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from megazpp.tensor_parallel.layers import Product

Float8Format = Literal["e4m3", "hybrid"]

FLOAT8_CAPABILITY = (8, 9)  # of CUDA devices whose tensor cores take float8
MULTIPLE = 16  # of the scaled products: both sizes of a matrix, and what is summed over


def float8_product(fmt: Float8Format, *, emulate: bool = False) -> Product:
    """Make the product of x [..., K], weight [N, K] and bias [N] or None: x W^T + b, [..., N].

    Args:
        fmt: "e4m3" for everything; "hybrid": gradients of outputs in e5m2, which reach further and round coarser.
        emulate: multiply what was rounded in fp32, on any device. Else K and N are multiples of 16.
    Raises:
        ValueError: torchao is not there.
    """
    try:
        from torchao.float8.config import e4m3_dtype, e5m2_dtype
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError as error:
        raise ValueError(f"--fp8-format {fmt} needs torchao: pip install 'torchao>=0.18' ({error})") from None

    def gemms(pad: bool) -> Any:
        backward = ScaledMMConfig(emulate=emulate, pad_inner_dim=pad)
        return LinearMMConfig(ScaledMMConfig(emulate=emulate, use_fast_accum=True), backward, backward)

    grad_dtype = e5m2_dtype if fmt == "hybrid" else e4m3_dtype
    whole, padded = (_Settings(e4m3_dtype, grad_dtype, gemms(pad)) for pad in (False, True))

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[:-1].numel()  # which the weight's gradient sums over
        y: torch.Tensor = _Float8Linear.apply(x, weight, padded if rows % MULTIPLE else whole)
        return y if bias is None else y + bias

    return product


class _Settings(NamedTuple):
    """The formats of inputs and weights, and of gradients; torchao's settings of the three products."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    gemms: Any


@torch.compiler.allow_in_graph
class _Float8Linear(torch.autograd.Function):
    """x [..., K], weight [N, K] -> x W^T [..., N]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, settings: _Settings) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        y = torch.mm(_cast(_rows(x), "INPUT", settings), _cast(weight.t(), "WEIGHT", settings))
        # no view, which could not be summed in place
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (x, weight), settings, x_grad, weight_grad = ctx.saved_tensors, ctx.settings, None, None
        grad = _cast(_rows(grads[0]), "GRAD_OUTPUT", settings)
        if ctx.needs_input_grad[0]:
            x_grad = torch.mm(grad, _cast(weight, "WEIGHT", settings)).view(x.shape)
        if ctx.needs_input_grad[1]:
            weight_grad = torch.mm(grad.t(), _cast(_rows(x), "INPUT", settings))
        return x_grad, weight_grad, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _cast(x: torch.Tensor, role: str, settings: _Settings) -> torch.Tensor:
    """x in float8 with its scale; `role` is torchao's name of its place in the three products."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    dtype = settings.grad_dtype if role == "GRAD_OUTPUT" else settings.dtype
    return hp_tensor_to_float8_dynamic(x, dtype, settings.gemms, gemm_input_role=GemmInputRole[role])
