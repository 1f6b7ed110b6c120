"""Float8 matrix products of the linear layers (--fp8-format), built on torchao's casts and scaled matrix products.

    forward             y  = x8 W8^T
    gradient of input   dx = dy8 W8
    gradient of weight  dW = dy8^T x8

The suffix 8 marks an operand in float8. Each operand has one scale, which maps its largest absolute value to the
largest number of the format. The scale is computed at every use, so there is no state to save (torchao's recipe
"tensorwise"). NaN and Inf in an operand give NaN in the result. x and W stay in 16 bits, also when they are saved for
backward, so FSDP2 and ZeRO++ handle the same tensors as without float8. With tensor parallelism each rank scales its
own slices.

A cast takes several passes over memory; torch.compile fuses them. Source: `matmul_with_hp_or_float8_args` in
torchao.float8. There are three differences: the gradient of the output is cast once for both backward products, a
frozen weight gets no gradient product, and the result can be summed over tensor-parallel ranks in place.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from megazpp.tensor_parallel.layers import Product

Float8Format = Literal["e4m3", "hybrid"]

FLOAT8_CAPABILITY = (8, 9)  # lowest compute capability of GPUs with float8 tensor cores
MULTIPLE = 16  # the three sizes m, n and k of a float8 matrix product must be multiples of this number


def float8_product(fmt: Float8Format, *, emulate: bool = False) -> Product:
    """Return a function that computes x W^T + b with a matrix product in float8, for linear layers with --fp8-format.

    For a layer with K inputs and N outputs, the function maps x [..., K], weight [N, K] and bias [N] or None to
    [..., N]. K and N must be multiples of 16, unless `emulate` is True.

    Args:
        fmt: "e4m3" for all operands, or "hybrid", which uses e5m2 for gradients: a larger range with coarser rounding.
        emulate: True to round operands to float8 but multiply in fp32, which works on any device; for tests.

    Raises:
        ValueError: torchao is not installed.
    """
    try:
        from torchao.float8.config import e4m3_dtype, e5m2_dtype
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError as error:
        raise ValueError(f"--fp8-format {fmt} needs torchao: pip install 'torchao>=0.18' ({error})") from None

    def gemms(pad: bool) -> Any:
        # As torchao does by default, only the product of the forward uses the faster, less exact accumulation.
        backward = ScaledMMConfig(emulate=emulate, pad_inner_dim=pad)
        return LinearMMConfig(ScaledMMConfig(emulate=emulate, use_fast_accum=True), backward, backward)

    grad_dtype = e5m2_dtype if fmt == "hybrid" else e4m3_dtype
    whole, padded = (_Settings(e4m3_dtype, grad_dtype, gemms(pad)) for pad in (False, True))

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # The product for the weight's gradient sums over the rows of x, so their number is padded to a multiple of 16.
        rows = x.shape[:-1].numel()
        y: torch.Tensor = _Float8Linear.apply(x, weight, padded if rows % MULTIPLE else whole)
        return y if bias is None else y + bias

    return product


class _Settings(NamedTuple):
    """Formats and torchao's settings for the three float8 matrix products of a linear layer.

    Attributes:
        dtype: float8 dtype of inputs and weights.
        grad_dtype: float8 dtype of the gradients of outputs.
        gemms: torchao's `LinearMMConfig` for the matrix products that compute the output, the gradient of the input and
            the gradient of the weight.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    gemms: Any


@torch.compiler.allow_in_graph
class _Float8Linear(torch.autograd.Function):
    """Autograd function of the matrix product x W^T in float8: x [..., K], weight [N, K] -> [..., N].

    K is the number of inputs of the linear layer, N the number of outputs. The gradients are float8 matrix products
    too.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, settings: _Settings) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        y = torch.mm(_cast(_rows(x), "INPUT", settings), _cast(weight.t(), "WEIGHT", settings))
        # A plain view would forbid in-place operations on the result, such as the sum over tensor-parallel ranks:
        # autograd does not allow them on a view that a custom function returns.
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
    """Flatten all dimensions of x except the last, of any size K, for a matrix product: [..., K] -> [rows, K]."""
    return x.reshape(-1, x.shape[-1])


def _cast(x: torch.Tensor, role: str, settings: _Settings) -> torch.Tensor:
    """Convert x to torchao's float8 tensor, which carries its scale, for use as an operand of a matrix product.

    Args:
        x: 16-bit or fp32 tensor.
        role: name of the operand in torchao's `GemmInputRole`: "INPUT", "WEIGHT" or "GRAD_OUTPUT".
        settings: float8 dtypes, and torchao's settings for the matrix products.
    """
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    dtype = settings.grad_dtype if role == "GRAD_OUTPUT" else settings.dtype
    return hp_tensor_to_float8_dynamic(x, dtype, settings.gemms, gemm_input_role=GemmInputRole[role])
