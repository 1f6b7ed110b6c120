"""The implementations that a model gets on a device: attention kernels, torch.compile, and the table that names them.

| attention                               | on CUDA                                            | on a CPU        |
|-----------------------------------------|----------------------------------------------------|-----------------|
| causal                                  | torch's order: cuDNN first on sm_90, sm_100        | flash, or plain |
| with a mask (generation, documents)     | memory-efficient, or plain                         | flash, or plain |
| inside documents and windows, where     | variable-length flash: nothing of S x S is kept or | with a mask     |
| there is a kernel (`mask_reason`)       | computed                                           |                 |

cuDNN is never given a mask: the backward of its masked attention can return NaN in the gradients of the queries
(https://github.com/pytorch/pytorch/issues/196678; torch 2.11 to 2.13 on H100 and H200).
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megazpp.kernels.c_library import CLibraryError, find_compiler
from megazpp.model.config import GPTConfig
from megazpp.model.float8 import FLOAT8_CAPABILITY, MULTIPLE, float8_product
from megazpp.tensor_parallel.layers import Product

MASKED_ON_CUDA = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# of the variable-length kernel, which is flash attention 2: some devices train with no wider heads
MOST_CHANNELS, CHANNELS_MULTIPLE, FIRST_CAPABILITY = 192, 8, (8, 0)
# All layers of a process share one code object, of which torch keeps a graph for each kind of layer: four models,
# with gradients or without, in training or not, of one row or several, and decoding are more than torch's limit of 8.
MOST_GRAPHS = 64
_TRITON_CAPABILITY = (7, 0)  # the first of CUDA devices that Triton compiles for

# of torch's varlen_attn; torch 2.11's takes no groups
VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)

# q, k, v, starts, longest document, window and scale of scores
DocumentKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int | None, float | None], torch.Tensor
]


def variable_length(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside documents by torch's kernel: [T, heads, D], [T, groups, D] twice -> [T, heads, D].

    The documents lie one after the other; `starts` are their [documents + 1] int32 offsets from 0 to T.

    Args:
        window: tokens that a token may look at, its own and those before it; None for all of its document.
        scale: factor of scores; None for 1 / sqrt(D).
    """
    k, v = (varlen_groups(x, q.shape[1]) for x in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    options |= {} if scale is None else {"scale": scale}
    sides = (-1 if window is None else window - 1, 0)
    found = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=sides, **options)
    assert isinstance(found, torch.Tensor)  # the normalizers come too only if asked for
    return found


def varlen_groups(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [T, groups, D]; one of each head where torch's kernel knows no groups."""
    return x if "enable_gqa" in VARLEN_ARGUMENTS else repeated(x, heads)


def mask_reason(config: GPTConfig, *, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Give the reason that attention inside documents takes a mask of S x S; None where `variable_length` is used."""
    if capability is None:
        return "only CUDA has a kernel for documents"
    if capability < FIRST_CAPABILITY:
        return f"varlen_attn needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn computes in 16 bit, not in {dtype}: see --bf16"
    if config.head_size % CHANNELS_MULTIPLE or config.head_size > MOST_CHANNELS:
        return f"varlen_attn takes multiples of 8 up to {MOST_CHANNELS} channels per head, not {config.head_size}"
    if config.attention_dropout:
        return f"varlen_attn has no dropout: --attention-dropout is {config.attention_dropout:g}"
    return None


def find_document_kernel(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> DocumentKernel | None:
    """The kernel for attention inside documents on `device`; None for a mask."""
    return None if mask_reason(config, capability=capability(device), dtype=dtype) else variable_length


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for any other, AMD's among them."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if nvidia else None


def find_product(config: GPTConfig, device: torch.device) -> Product | None:
    """Product of linear layers on `device`; None for their own 16-bit products.

    Raises:
        ValueError: --fp8-format on a device without float8, or without torchao.
    """
    if config.fp8_format is None:
        return None
    found = capability(device)
    if found is None or found < FLOAT8_CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else "a CPU"
        least = ".".join(map(str, FLOAT8_CAPABILITY))
        raise ValueError(
            f"--fp8-format {config.fp8_format} needs an NVIDIA GPU of compute capability {least} or later, and this "
            f"device is {name}"
        )
    return float8_product(config.fp8_format)


def check_device(config: GPTConfig, device_type: str) -> None:
    """Raises ValueError where no device of this type has float8; which GPU has it, its worker finds out."""
    if device_type == "cpu":
        find_product(config, torch.device("cpu"))


def check_products(config: GPTConfig, tp_size: int, device_type: str, *, bf16: bool) -> tuple[str, ...]:
    """Refuse sizes that the products of linear layers cannot take; a worker finds out if its device has them.

    Returns notices.
    """
    if config.fp8_format is None:
        return ()
    asked = f"--fp8-format {config.fp8_format}"
    if not bf16:
        raise ValueError(f"{asked} needs --bf16: what is not float8 is computed in that")
    heads, groups, ranks = config.heads, config.query_groups, f"over {tp_size} tensor-parallel rank(s)"
    all_heads, with_keys = heads * config.head_size, (heads + 2 * groups) * config.head_size
    sizes = {
        f"--hidden-size {config.hidden}": config.hidden,
        f"--ffn-hidden-size {config.ffn_size} {ranks}": config.ffn_size // tp_size,
        f"{heads} heads of {config.head_size} channels {ranks}": all_heads // tp_size,
        f"queries, keys and values of {heads} heads in {groups} group(s) {ranks}": with_keys // tp_size,
    }
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise ValueError(f"{asked}: {name}: {size} rows or columns of a matrix are no multiple of {MULTIPLE}")
    compiles = device_type == "cuda" if config.compile is None else config.compile
    return () if compiles else (f"{asked} without --compile: each cast to float8 is several passes over memory",)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """Attention where `mask` is True: q [B, heads, S, D], k and v [B, groups, keys, D], mask [B, 1, S, keys] bool.

    The mask may also be what `shared_mask` returns.
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=k.shape[1] != q.shape[1], scale=scale
        )
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    with sdpa_kernel(MASKED_ON_CUDA):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def shared_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the bool `mask` as the numbers that CUDA's kernels add to scores of type `dtype`; on a CPU as it is.

    torch would make them anew in each layer, by two kernels.
    """
    if mask is None or not mask.is_cuda:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, groups, ...] -> [B, heads, ...], for kernels that know no groups (some torch's memory-efficient one)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def compile_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap by `torch.compile`, with room for all kinds of layers that a process may have."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    return torch.compile(function)


def mark_varying(tensor: torch.Tensor | None, *dims: int) -> None:
    """Have one graph take `tensor` with any size above 1 in `dims`."""
    if tensor is not None:
        torch._dynamo.maybe_mark_dynamic(tensor, dims)


def compiles_layers(config: GPTConfig, device_type: str) -> tuple[bool, str]:
    """True if layers are compiled on such a device, and the reason; raises ValueError if --compile lacks a compiler.

    On CUDA, layers of small models spend more time on the host, launching kernels, than on the device; compiled layers
    launch fewer, so there --compile is the default. On a CPU it mostly costs the time to compile.
    """
    if config.compile is False:
        return False, "--no-compile"
    if config.compile is None and device_type != "cuda":
        return False, "the default on a CPU: see --compile"
    missing = missing_compiler(device_type)
    if config.compile is None:
        return (False, f"cannot be compiled: {missing}") if missing else (True, "the default on CUDA: see --no-compile")
    if missing:
        raise ValueError(f"--compile: {missing}; without it layers are eager")
    return True, "--compile"


def missing_compiler(device_type: str) -> str | None:
    """Name the compiler that torch.compile needs and does not find here; None where it can generate code."""
    if device_type != "cuda":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler})"
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton (pip install triton)"
    found = capability(torch.device(device_type))
    if found is not None and found < _TRITON_CAPABILITY:
        return f"Triton needs compute capability 7.0, not {found[0]}.{found[1]}"
    try:
        find_compiler()  # of the code that launches Triton's kernels
    except CLibraryError as error:
        return str(error)
    return None


def model_backends(
    config: GPTConfig, *, device: torch.device, dtype: torch.dtype, documents: bool
) -> list[tuple[str, str, str]]:
    """Rows (piece, implementation, why) of what has a choice; `documents`: attention stays inside documents."""
    attention = "torch scaled_dot_product_attention", "the first of its kernels that can"
    if documents or config.window is not None:
        where = "documents" if documents else f"--window-size {config.window_size}"
        attention = "torch varlen_attn", f"attention stays inside {where}; nothing of S x S is kept"
        if reason := mask_reason(config, capability=capability(device), dtype=dtype):
            attention = "torch scaled_dot_product_attention with a mask of S x S", reason
    compiled, because = compiles_layers(config, device.type)
    formats = f"--fp8-format {config.fp8_format}: e4m3, gradients {'e5m2' if config.fp8_format == 'hybrid' else 'e4m3'}"
    return [
        ("attention", *attention),
        *([("linear layers", "torchao float8 tensorwise", formats)] if config.fp8_format else []),
        ("layers", "torch.compile" if compiled else "eager", because),
    ]
