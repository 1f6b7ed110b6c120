"""Attention kernels for everything but plain causal attention: inside documents or a window, and with a mask.

Masked attention never uses cuDNN, because its backward can return NaN in the gradients of the queries
(https://github.com/pytorch/pytorch/issues/196678; torch 2.11 to 2.13 on H100 and H200).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

MASKED_ON_CUDA = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # torch's kernels for masked attention on CUDA
# Names of the arguments of torch's varlen_attn, which depend on torch's version: torch 2.11 has no `enable_gqa`.
VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)

# Type of a kernel for attention inside documents, such as `variable_length`. Its arguments are queries, keys, values,
# the documents' offsets, the length of the longest document, the window, and the factor of the scores.
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
    """Compute causal attention inside each of several concatenated documents by torch's variable-length kernel.

    D is the number of channels per head, and `groups` the number of key and value heads.

    Args:
        q: [tokens, heads, D] 16-bit queries.
        k: [tokens, groups, D] 16-bit keys.
        v: [tokens, groups, D] 16-bit values.
        starts: [documents + 1] int32 offsets of the documents, from 0 to the number of tokens.
        longest: upper bound of the documents' lengths in tokens.
        window: number of tokens that a token attends to, itself included; None for all earlier tokens of its document.
        scale: number by which scores are multiplied before the softmax; None for 1 / sqrt(D).

    Returns:
        [tokens, heads, D].
    """
    k, v = (varlen_groups(x, q.shape[1]) for x in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    options |= {} if scale is None else {"scale": scale}
    sides = (-1 if window is None else window - 1, 0)
    found = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=sides, **options)
    assert isinstance(found, torch.Tensor)  # varlen_attn returns a tuple only if asked for the softmax normalizers
    return found


def varlen_groups(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values [tokens, groups, D] in the shape that the installed torch's varlen_attn accepts.

    If varlen_attn does not support grouped-query attention (torch 2.11), repeat them to [tokens, heads, D].
    """
    return x if "enable_gqa" in VARLEN_ARGUMENTS else repeated(x, heads)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """Compute attention with a mask, but never by cuDNN, whose backward can return NaN (see the top of the file).

    Args:
        q: [B, heads, S, D] queries.
        k: [B, groups, keys, D] keys.
        v: [B, groups, keys, D] values.
        mask: [B, 1, S, keys], either bool (True where a query attends to a key) or the result of `shared_mask`.
        dropout: dropout rate of the attention probabilities.
        scale: number by which scores are multiplied before the softmax; None for 1 / sqrt(D).

    Returns:
        [B, heads, S, D].
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=k.shape[1] != q.shape[1], scale=scale
        )
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    with sdpa_kernel(MASKED_ON_CUDA):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def shared_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert a bool attention mask on CUDA to an additive mask; return a mask on the CPU, and None, unchanged.

    The additive mask has 0 where a query attends to a key and -inf elsewhere. CUDA's attention kernels need such a
    mask. Converting once for all layers saves the two kernel launches that torch would make in each layer.

    Args:
        mask: bool mask of any shape, True where a query attends to a key; None without a mask.
        dtype: dtype of the attention scores, to which the mask is added.
    """
    if mask is None or not mask.is_cuda:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat keys or values [B, groups, ...] to [B, heads, ...], for kernels without grouped-query attention.

    In some torch versions the memory-efficient kernel does not support grouped-query attention.
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
