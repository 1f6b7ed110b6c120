"""Which of torch's attention kernels run where.

| attention                               | on CUDA                                            | on a CPU        |
|-----------------------------------------|----------------------------------------------------|-----------------|
| causal                                  | torch's order: cuDNN first on sm_90, sm_100        | flash, or plain |
| with a mask (generation, documents)     | memory-efficient, or plain                         | flash, or plain |
| inside documents, where there is a      | variable-length flash: nothing of S x S is kept or | with a mask     |
| kernel for it (`mask_reason`)           | computed                                           |                 |

cuDNN is never given a mask: the backward of its masked attention can return NaN in the gradients of the queries
(https://github.com/pytorch/pytorch/issues/196678; torch 2.11 to 2.13 on H100 and H200).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megazpp.model.config import GPTConfig

MASKED_ON_CUDA = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "plain",
}
# of the variable-length kernel, which is flash attention 2: some devices train with no wider heads
MOST_CHANNELS, CHANNELS_MULTIPLE, FIRST_CAPABILITY = 192, 8, (8, 0)

# of torch's varlen_attn; torch 2.11's takes no groups
VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)

DocumentKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


def variable_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int
) -> torch.Tensor:
    """Causal attention inside documents by torch's kernel, where `mask_reason` has nothing against it.

    Args:
        q, k, v: [T, heads, D], [T, groups, D] twice: the documents lie one after the other.
        starts: [documents + 1] int32 offsets from 0 to T.
        longest: no document has more tokens.
    Returns:
        [T, heads, D].
    """
    k, v = (varlen_groups(x, q.shape[1]) for x in (k, v))
    grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    found = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **grouped)
    assert isinstance(found, torch.Tensor)  # the normalizers come too only if asked for
    return found


def varlen_groups(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [T, groups, D] as torch's kernel takes them: with one of each head where it knows no groups."""
    return x if "enable_gqa" in VARLEN_ARGUMENTS else repeated(x, heads)


def mask_reason(config: GPTConfig, *, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Why attention inside documents takes a mask of S x S rather than `variable_length`; None where it does not.

    Args:
        capability: of the CUDA device; None for any other.
        dtype: of queries, keys and values.
    """
    if capability is None:
        return "only CUDA has a kernel for documents"
    if "window_size" not in VARLEN_ARGUMENTS:
        return f"torch {torch.__version__}'s varlen_attn has no window_size"
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
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, dropout: float
) -> torch.Tensor:
    """Attention where `mask` is True: q [B, heads, S, D], k and v [B, groups, keys, D], mask [B, 1, S, keys] bool."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=k.shape[1] != q.shape[1]
        )
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    with sdpa_kernel(MASKED_ON_CUDA):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, groups, ...] -> [B, heads, ...]: one of each head, for kernels that know no groups.

    The memory-efficient one of some versions is such a kernel, and the plain one would keep all scores.
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def causal_kernels(device: torch.device) -> tuple[str, ...]:
    """The kernels that torch tries for causal attention on `device`, in this order; the first that can is used."""
    if device.type != "cuda":
        return "flash", "plain"
    probe = torch.empty(1, 1, 8, 8, device=device, dtype=torch.float16)
    torch._fused_sdp_choice(probe, probe, probe)  # torch settles its order when it is first asked
    return _enabled_in_order()


def _enabled_in_order() -> tuple[str, ...]:
    names = [NAMES[kind] for kind in _cur_sdpa_kernel_backends(with_priority=True) if kind in NAMES]
    return tuple(names[: names.index("plain") + 1] if "plain" in names else names)  # plain takes everything


def attention_backend(
    config: GPTConfig, device: torch.device, dtype: torch.dtype, *, documents: bool
) -> tuple[str, str]:
    """What attention in training is, and why, for the table of back ends; `documents`: it stays inside them."""
    if not documents:
        return "torch scaled_dot_product_attention", f"{', '.join(causal_kernels(device))}: the first that can"
    reason = mask_reason(config, capability=capability(device), dtype=dtype)
    if reason is None:
        return "torch varlen_attn", "attention stays inside documents; nothing of S x S is kept"
    return "torch scaled_dot_product_attention with a mask of S x S", reason
