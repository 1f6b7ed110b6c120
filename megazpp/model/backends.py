"""Choose the model's implementations for a device: attention kernel, matrix products and torch.compile.

The table shows the attention kernels. "Plain" is torch's unfused attention, used where no other kernel applies. S is
the sequence length.

| attention                         | on CUDA                                            | on a CPU          |
|-----------------------------------|----------------------------------------------------|-------------------|
| causal                            | torch's order: cuDNN first on sm_90, sm_100        | flash or plain    |
| with a mask (generation)          | memory-efficient or plain                          | flash or plain    |
| inside documents or a window, if  | variable-length flash attention, which needs no    | not supported     |
| `mask_reason` returns None        | S x S mask or scores                               |                   |
| inside documents or a window,     | as with a mask                                     | as with a mask    |
| otherwise                         |                                                    |                   |
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil

import torch
import torch.nn.functional as F

from megazpp.base.flags import in_use
from megazpp.kernels.c_library import CLibraryError, find_compiler
from megazpp.model.attention import variable_length
from megazpp.model.config import GPTConfig
from megazpp.model.float8 import FLOAT8_CAPABILITY, MULTIPLE, float8_product
from megazpp.model.layer_parts import DocumentKernel
from megazpp.tensor_parallel.layers import Product

# Limits of the variable-length attention kernel (flash attention 2): most channels per head, the number that must
# divide them, and lowest compute capability. With more than 192 channels, the kernel has no backward on some devices.
MOST_CHANNELS, CHANNELS_MULTIPLE, FIRST_CAPABILITY = 192, 8, (8, 0)
# Limits of torch's fast grouped matrix product: the lowest compute capability, and the number that must divide the
# matrices' dimensions (8 elements of bf16 are 16 bytes).
GROUPED_CAPABILITY, GROUPED_MULTIPLE = (9, 0), 8
_TRITON_CAPABILITY = (7, 0)  # lowest compute capability for which Triton compiles


def mask_reason(config: GPTConfig, *, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Return why attention inside documents or a window needs an S x S mask, for the log; None if it needs none.

    Without such a reason, attention uses the kernel `variable_length`.

    Args:
        config: config of the model.
        capability: compute capability of the device, such as (9, 0); None for a device that is no NVIDIA GPU.
        dtype: dtype in which attention computes.
    """
    if capability is None:
        return "only NVIDIA GPUs have a kernel for attention inside documents"
    if capability < FIRST_CAPABILITY:
        return f"varlen_attn needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn needs 16-bit inputs, not {dtype}: see --bf16"
    if config.head_size % CHANNELS_MULTIPLE or config.head_size > MOST_CHANNELS:
        return f"varlen_attn needs a multiple of 8 up to {MOST_CHANNELS} channels per head, not {config.head_size}"
    if config.attention_dropout:
        return f"varlen_attn does not support dropout: --attention-dropout is {config.attention_dropout:g}"
    return None


def find_document_kernel(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> DocumentKernel | None:
    """Return the kernel with which `device` computes attention inside documents or inside a sliding window.

    Returns None if this kernel does not support the device, the dtype or the model. `GPTModel` then makes attention
    masks, which `masked_attention` passes to torch's scaled_dot_product_attention.
    """
    return None if mask_reason(config, capability=capability(device), dtype=dtype) else variable_length


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, such as (9, 0); None for any other device, even an AMD GPU."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if nvidia else None


def find_product(config: GPTConfig, device: torch.device) -> Product | None:
    """Return the float8 matrix product of the linear layers on `device`; None without --fp8-format.

    With None the layers multiply in the dtype of their inputs.

    Raises:
        ValueError: --fp8-format is set, but the device does not support float8 or torchao is not installed.
    """
    if config.fp8_format is None:
        return None
    found = capability(device)
    if found is None or found < FLOAT8_CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else "a CPU"
        least = ".".join(map(str, FLOAT8_CAPABILITY))
        raise ValueError(
            f"--fp8-format {config.fp8_format} needs an NVIDIA GPU with compute capability {least} or later, but this "
            f"device is {name}"
        )
    return float8_product(config.fp8_format)


def loop_reason(config: GPTConfig, *, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Return why the matrices of a layer's experts are multiplied one by one, for the log.

    Return None if torch's grouped matrix product can multiply them in one call. Before compute capability 9.0, that
    product is itself a loop, in which the host waits for the device.

    Args:
        config: config of a model with experts.
        capability: compute capability of the device; None for a device that is no NVIDIA GPU.
        dtype: dtype in which the experts compute.
    """
    if capability is None:
        return "torch's grouped product is faster on NVIDIA GPUs only"
    if capability < GROUPED_CAPABILITY:
        return f"torch's grouped product needs compute capability 9.0 to be faster, not {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"torch's grouped product is fast in bf16, not in {dtype}"
    if config.hidden % GROUPED_MULTIPLE or config.expert_ffn_size % GROUPED_MULTIPLE:
        sizes = f"{config.hidden} and {config.expert_ffn_size}"
        return f"torch's grouped product takes multiples of {GROUPED_MULTIPLE} channels, not {sizes} channels"
    return None


def find_grouped_product(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if one grouped matrix product multiplies the matrices of all experts of a layer on `device`.

    Some versions of torch return NaN or leave garbage for experts without tokens on some devices
    (https://github.com/pytorch/pytorch/issues/172439). So this function also computes a small case with such experts.
    """
    if config.num_experts is None or loop_reason(config, capability=capability(device), dtype=dtype) is not None:
        return False
    return grouped_product_is_right(device, dtype)


@functools.cache
def grouped_product_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Compute a small grouped matrix product, and return True if torch's result and gradients are correct.

    Some experts of this test get no tokens; `find_grouped_product` says why.
    """
    rows, counts = 24, torch.tensor([0, 16, 0, 8], device=device)
    # Fill memory with NaN and free it, so that results which the product leaves unwritten contain NaN.
    torch.full((1 << 20,), math.nan, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(4, 32, 16, generator=generator).to(device, dtype).requires_grad_()
    one_by_one = torch.cat([part @ w.t() for part, w in zip(x.split(counts.tolist()), weight, strict=True)])
    expected = torch.autograd.grad(one_by_one.square().sum(), (x, weight))
    grouped = F.grouped_mm(x, weight.mT, offs=counts.cumsum(dim=0).int())
    found = torch.autograd.grad(grouped.square().sum(), (x, weight))
    pairs = zip((grouped, *found), (one_by_one, *expected), strict=True)
    return all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in pairs)


def check_device(config: GPTConfig, device_type: str) -> None:
    """Raise ValueError if --fp8-format is set and the run uses CPUs.

    The process that starts the workers calls this function. Each worker checks in `find_product` whether its GPU
    supports float8.

    Args:
        config: config of the model.
        device_type: type of the run's devices, "cpu" or "cuda".
    """
    if device_type == "cpu":
        find_product(config, torch.device("cpu"))


def check_products(config: GPTConfig, tp_size: int, device_type: str, *, bf16: bool) -> tuple[str, ...]:
    """Check that float8 matrix products support the sizes of the model's matrices, if --fp8-format is set.

    Each worker checks in `find_product` whether its GPU supports float8.

    Args:
        config: config of the model.
        tp_size: number of tensor-parallel ranks, over which the matrices are split.
        device_type: type of the run's devices, "cuda" or "cpu".
        bf16: True if --bf16 is set.

    Returns:
        Notices for the log; () if there are none.

    Raises:
        ValueError: --fp8-format is set without --bf16, or with a size that is not a multiple of 16.
    """
    if config.fp8_format is None:
        return ()
    asked = f"--fp8-format {config.fp8_format}"
    if not bf16:
        raise ValueError(f"{asked} needs --bf16, the format of all other computations: add --bf16")
    heads, groups, ranks = config.heads, config.query_groups, f"over {tp_size} tensor-parallel rank(s)"
    all_heads, with_keys = heads * config.head_size, (heads + 2 * groups) * config.head_size
    sizes = {
        f"--hidden-size {config.hidden}": config.hidden,
        f"{in_use(config, 'ffn_hidden_size', config.ffn_size)} {ranks}": config.ffn_size // tp_size,
        f"{heads} heads of {config.head_size} channels {ranks}": all_heads // tp_size,
        f"queries, keys and values of {heads} heads in {groups} group(s) {ranks}": with_keys // tp_size,
    }
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise ValueError(
                f"{asked}: {name}: a matrix has {size} rows or columns, not a multiple of {MULTIPLE}: change this size"
                " or --tensor-model-parallel-size, or leave --fp8-format out"
            )
    compiles = device_type == "cuda" if config.compile is None else config.compile
    return () if compiles else (f"{asked} without --compile: each cast to float8 is several passes over memory",)


def compiles_layers(config: GPTConfig, device_type: str) -> tuple[bool, str]:
    """Return True if torch.compile is applied to the layers on a device of this type, and the reason for the log.

    --compile is the default on CUDA: small models spend more time on the host, launching kernels, than on the device,
    and compiled layers launch fewer kernels. On a CPU, layers are not compiled by default, because compiling takes time
    and saves little.

    Args:
        config: config of the model.
        device_type: type of the run's devices, "cpu" or "cuda".
    Raises:
        ValueError: --compile is set, but torch.compile cannot generate code on this machine.
    """
    if config.compile is False:
        return False, "--no-compile"
    if config.compile is None and device_type != "cuda":
        return False, "the default on a CPU: see --compile"
    missing = missing_compiler(device_type)
    if config.compile is None:
        return (False, f"cannot be compiled: {missing}") if missing else (True, "the default on CUDA: see --no-compile")
    if missing:
        raise ValueError(f"--compile cannot be used: {missing}. Leave out --compile to run the layers eagerly")
    return True, "--compile"


def missing_compiler(device_type: str) -> str | None:
    """Return why torch.compile cannot generate code for devices of this type on this machine; None if it can.

    The reason is a missing C or C++ compiler, a missing Triton, or a GPU that Triton does not support.
    """
    if device_type != "cuda":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler})"
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton (pip install triton)"
    found = capability(torch.device(device_type))
    if found is not None and found < _TRITON_CAPABILITY:
        return f"Triton needs compute capability 7.0, not {found[0]}.{found[1]}"
    try:
        find_compiler()  # Triton needs a C compiler for the code that launches its kernels
    except CLibraryError as error:
        return str(error)
    return None


def model_backends(
    config: GPTConfig, *, device: torch.device, dtype: torch.dtype, documents: bool
) -> list[tuple[str, str, str]]:
    """Return the chosen implementations of the model as rows (part, implementation, reason) of the log's table.

    Args:
        config: config of the model.
        device: device on which the model computes.
        dtype: dtype in which the model computes.
        documents: True if tokens attend only to tokens of their own document.
    """
    attention = "torch scaled_dot_product_attention", "the first of torch's kernels that supports the inputs"
    if documents or config.window is not None:
        where = "documents" if documents else f"--window-size {config.window_size}"
        attention = "torch varlen_attn", f"attention stays inside {where}; no S x S mask or scores are kept"
        if reason := mask_reason(config, capability=capability(device), dtype=dtype):
            attention = "torch scaled_dot_product_attention with an S x S mask", reason
    compiled, because = compiles_layers(config, device.type)
    formats = f"--fp8-format {config.fp8_format}: e4m3, gradients {'e5m2' if config.fp8_format == 'hybrid' else 'e4m3'}"
    experts = "torch grouped_mm", "one product for all experts of a layer"
    if config.num_experts is not None and not find_grouped_product(config, device, dtype):
        reason = loop_reason(config, capability=capability(device), dtype=dtype)
        experts = "expert by expert", reason or "this torch's grouped product is wrong for experts without tokens here"
    return [
        ("attention", *attention),
        *([("experts", *experts)] if config.num_experts is not None else []),
        *([("linear layers", "torchao float8 tensorwise", formats)] if config.fp8_format else []),
        ("layers", "torch.compile" if compiled else "eager", because),
    ]
