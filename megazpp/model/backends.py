"""Choice of the model's implementations on a device: attention kernel, matrix product and torch.compile.

In this table "plain" is torch's unfused attention, used where no other kernel applies. S is the sequence length.

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
from megazpp.model.attention_kernels import DocumentKernel, variable_length
from megazpp.model.config import GPTConfig
from megazpp.model.float8 import FLOAT8_CAPABILITY, MULTIPLE, float8_product
from megazpp.tensor_parallel.layers import Product

# Limits of the variable-length kernel (flash attention 2): channels per head, their divisor, and compute capability.
# Some devices cannot train with more than 192 channels.
MOST_CHANNELS, CHANNELS_MULTIPLE, FIRST_CAPABILITY = 192, 8, (8, 0)
# The first compute capability with a fast grouped product, and the multiple of channels that it takes (16 bytes).
GROUPED_CAPABILITY, GROUPED_MULTIPLE = (9, 0), 8
_TRITON_CAPABILITY = (7, 0)  # lowest compute capability for which Triton compiles


def mask_reason(config: GPTConfig, *, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Return the reason why attention inside documents or a window needs an S x S mask; None if it does not.

    Without a reason, attention uses the kernel `variable_length`.

    Args:
        config: config of the model.
        capability: compute capability of the device; None for a device that is no NVIDIA GPU.
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
    """Return the kernel for attention inside documents or a window on `device`; None if it needs a mask instead."""
    return None if mask_reason(config, capability=capability(device), dtype=dtype) else variable_length


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for any other device, AMD GPUs included."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if nvidia else None


def find_product(config: GPTConfig, device: torch.device) -> Product | None:
    """Return the float8 product of the linear layers on `device`; None without --fp8-format.

    With None the layers use their own 16-bit products.

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
    """Return why the experts of a layer are multiplied one by one; None if torch's grouped product is used.

    Before compute capability 9.0, torch's grouped product is itself a loop, and it waits for the device each time.
    """
    if capability is None:
        return "only CUDA has a grouped product that is faster"
    if capability < GROUPED_CAPABILITY:
        return f"torch's grouped product needs compute capability 9.0 to be faster, not {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"torch's grouped product is fast in bf16, not in {dtype}"
    if config.hidden % GROUPED_MULTIPLE or config.expert_ffn_size % GROUPED_MULTIPLE:
        sizes = f"{config.hidden} and {config.expert_ffn_size}"
        return f"torch's grouped product takes multiples of {GROUPED_MULTIPLE} channels, not {sizes}"
    return None


def find_grouped_product(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the experts of a layer are multiplied in one product on `device`.

    Versions of torch return NaN or leave garbage for experts without tokens on some devices
    (https://github.com/pytorch/pytorch/issues/172439). So one small case with such experts is computed here.
    """
    if config.num_experts is None or loop_reason(config, capability=capability(device), dtype=dtype) is not None:
        return False
    return grouped_product_is_right(device, dtype)


@functools.cache
def grouped_product_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if torch's grouped matrix product and its gradients are correct when some experts get no tokens."""
    rows, counts = 24, torch.tensor([0, 16, 0, 8], device=device)
    torch.full((1 << 20,), math.nan, dtype=dtype, device=device)  # fills freed memory with NaN
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
    """Raise ValueError if --fp8-format is set for a CPU run.

    The process that starts the workers calls this. Whether a GPU supports float8 is checked by its worker, in
    `find_product`.
    """
    if device_type == "cpu":
        find_product(config, torch.device("cpu"))


def check_products(config: GPTConfig, tp_size: int, device_type: str, *, bf16: bool) -> tuple[str, ...]:
    """Check that the model's matrices have sizes that float8 products support.

    Whether the device supports float8 is checked by its worker, in `find_product`.

    Args:
        config: config of the model.
        tp_size: number of tensor-parallel ranks, over which the matrices are split.
        device_type: "cuda" or "cpu".
        bf16: True with --bf16.

    Returns:
        Notices for the log.

    Raises:
        ValueError: --fp8-format is set without --bf16, or with a size that is not a multiple of 16.
    """
    if config.fp8_format is None:
        return ()
    asked = f"--fp8-format {config.fp8_format}"
    if not bf16:
        raise ValueError(f"{asked} needs --bf16, the format of all other computations")
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
            raise ValueError(f"{asked}: {name}: a matrix has {size} rows or columns, not a multiple of {MULTIPLE}")
    compiles = device_type == "cuda" if config.compile is None else config.compile
    return () if compiles else (f"{asked} without --compile: each cast to float8 is several passes over memory",)


def compiles_layers(config: GPTConfig, device_type: str) -> tuple[bool, str]:
    """Return whether layers are compiled on a device of this type, and the reason for the log.

    --compile is the default on CUDA: small models spend more time on the host, launching kernels, than on the device,
    and compiled layers launch fewer kernels. On a CPU, layers are eager by default, because compiling them takes time
    and saves little.

    Raises:
        ValueError: --compile is set, but torch.compile lacks a compiler.
    """
    if config.compile is False:
        return False, "--no-compile"
    if config.compile is None and device_type != "cuda":
        return False, "the default on a CPU: see --compile"
    missing = missing_compiler(device_type)
    if config.compile is None:
        return (False, f"cannot be compiled: {missing}") if missing else (True, "the default on CUDA: see --no-compile")
    if missing:
        raise ValueError(f"--compile: {missing}. Leave out --compile to run the layers eagerly")
    return True, "--compile"


def missing_compiler(device_type: str) -> str | None:
    """Return why torch.compile cannot generate code on this machine, such as a missing compiler; None if it can."""
    if device_type != "cuda":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler})"
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton (pip install triton)"
    found = capability(torch.device(device_type))
    if found is not None and found < _TRITON_CAPABILITY:
        return f"Triton needs compute capability 7.0, not {found[0]}.{found[1]}"
    try:
        find_compiler()  # a C compiler, which Triton needs for the code that launches its kernels
    except CLibraryError as error:
        return str(error)
    return None


def model_backends(
    config: GPTConfig, *, device: torch.device, dtype: torch.dtype, documents: bool
) -> list[tuple[str, str, str]]:
    """Return the chosen implementations of the model for the log, as rows (part, implementation, reason).

    Args:
        config: config of the model.
        device: device on which the model computes.
        dtype: dtype in which it computes.
        documents: True if tokens attend only to their own document.
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
