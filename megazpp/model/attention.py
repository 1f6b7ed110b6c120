"""Causal self-attention of a layer: projections, rotary embeddings, and attention kernels.

Letters: S sequence length, B batch size, H hidden size, D channels per head, T tensor-parallel ranks, C
context-parallel ranks. G is the number of query groups (key and value heads) on this tensor-parallel rank, Q the number
of query heads in each group. backends.py chooses the attention kernel.

One matrix projects to queries, keys and values. Its rows are ordered [group, (Q queries, key, value), D], so that a
tensor-parallel slice of the rows consists of complete groups. With context parallelism (Ulysses) each rank holds S/C
tokens of the residual stream. Inside attention it holds all S tokens of 1/C of this tensor-parallel rank's heads.

Masked attention never uses cuDNN, because its backward can return NaN in the gradients of the queries
(https://github.com/pytorch/pytorch/issues/196678; torch 2.11 to 2.13 on H100 and H200).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megazpp.model.config import GPTConfig
from megazpp.model.kv_cache import LayerCache
from megazpp.model.layer_parts import HeadsNorm, LayerSettings, Norm, mark_varying, normed, recomputed
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megazpp.tensor_parallel.regions import exchange

# Limits of --use-rope-scaling, as numbers of full rotations of a channel over the original context. Channels that turn
# at most LOW_TURNS times get their frequency divided by the full factor. Channels that turn at least HIGH_TURNS times
# are unchanged.
LOW_TURNS, HIGH_TURNS = 1.0, 4.0
MASKED_ON_CUDA = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # torch's kernels for masked attention on CUDA
# Names of the arguments of torch's varlen_attn, which depend on torch's version: torch 2.11 has no `enable_gqa`.
VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs of attention that layers share in one forward. Without mask and documents, attention is plainly causal.

    S is the sequence length, B the batch size.

    Attributes:
        rotary: (cos, sin) of the rotary angles, each [S, B or 1, 1, rotated channels] fp32; None without rotary
            embeddings.
        mask: [B, 1, S, keys] bool, True where a query attends to a key, or the additive mask that `shared_mask`
            returns; [1, 1, S, keys] if all sequences have the same mask; None without a mask. `keys` is S or, with a
            key-value cache, the number of cached positions that attention reads.
        document_starts: [documents + 1] int32 offsets of the documents in the B x S flattened tokens, for the kernel of
            attention inside documents (see backends.py); None without documents or without this kernel.
        places: [B, S] int64 positions in the key-value cache at which new keys and values are stored; None without a
            cache.
        counted: tokens that the losses of routers include, for layers with experts: ([S, B] fp32, 1 for such a token;
            [B] fp32, their number in the complete sequence). None if all tokens count.
    """

    rotary: tuple[torch.Tensor, torch.Tensor] | None
    mask: torch.Tensor | None
    document_starts: torch.Tensor | None = None
    places: torch.Tensor | None = None
    counted: tuple[torch.Tensor, torch.Tensor] | None = None

    def mark_varying(self) -> None:
        """Tell torch.compile that batch size, sequence length and number of keys vary, so that one graph serves all.

        `document_starts` is not marked here. Its size varies even if the other sizes are constant, so the layers mark
        it in every case.
        """
        for angles in self.rotary or ():
            mark_varying(angles, 0, 1)
        mark_varying(self.mask, 0, 2, 3)
        mark_varying(self.places, 0, 1)


class SelfAttention(nn.Module):
    """Causal self-attention of one layer: [S, B, H] -> [S, B, H].

    S is the sequence length, B the batch size, H the hidden size. With sequence parallelism over T tp ranks, input and
    output are [S/T, B, H]. With context parallelism over C cp ranks, S/C replaces S.

    Collectives on tp: the collectives of one ColumnParallelLinear and one RowParallelLinear. Collectives on cp: 2
    all-to-alls. The heads of all tensor-parallel ranks share the weights of --qk-layernorm. So each rank computes only
    a partial sum of these weights' gradients (`ParameterSpec.partial`).

    Args:
        config: config of the model.
        settings: mesh axes and implementations that all layers share.
        output_std: standard deviation of the initial weights of the output projection.
        window: number of tokens that a token attends to, itself included; None for all earlier tokens.
    """

    def __init__(
        self, config: GPTConfig, settings: LayerSettings, *, output_std: float, window: int | None = None
    ) -> None:
        super().__init__()
        tp = settings.tp
        self.window, self.scale = window, config.attention_multiplier
        self.cp, self.document_kernel = settings.cp, settings.document_kernel
        self.context_parallel = self.cp.size > 1
        self.head_size = config.head_size
        self.groups = config.query_groups // tp.size
        self.queries_per_group = config.heads // config.query_groups
        self.dropout = config.attention_dropout
        self.recompute_norm, self.recompute_core = config.recomputes("layernorm"), config.recomputes("core_attn")
        rows = config.query_groups * (self.queries_per_group + 2) * self.head_size
        std = config.init_method_std
        self.qkv = ColumnParallelLinear(config.hidden, rows, std=std, bias=config.qkv_bias, **settings.linear)
        # Muon trains queries, keys and values as three matrices, whose rows alternate in groups of these sizes.
        fused = (self.queries_per_group * self.head_size, self.head_size, self.head_size)
        self.qkv.specs["weight"] = dataclasses.replace(self.qkv.specs["weight"], matrices=fused)
        self.q_norm: Norm | HeadsNorm | None = None
        self.k_norm: Norm | HeadsNorm | None = None
        if config.qk_layernorm:
            self.q_norm, self.k_norm = (Norm(config, self.head_size, tp=tp, split=True) for _ in range(2))
        elif config.qk_layernorm_all_heads:
            heads = config.heads, config.query_groups
            self.q_norm, self.k_norm = (HeadsNorm(config, count * self.head_size, tp=tp) for count in heads)
        columns = config.heads * self.head_size
        self.proj = RowParallelLinear(
            columns, config.hidden, std=output_std, bias=config.linear_bias, **settings.linear
        )

    def forward(
        self, x: torch.Tensor, inputs: AttentionInputs, cache: LayerCache | None = None, *, norm: Norm | None = None
    ) -> torch.Tensor:
        """Return attention's output, in the shape of x, for norm(x), or for x if `norm` is None.

        Args:
            x: [S, B, H] residual stream of B sequences of S tokens. It is [S/T, B, H] with sequence parallelism over T
                ranks. With context parallelism over C ranks S/C replaces S.
            inputs: attention mask, rotary angles and offsets of documents for this layer.
            cache: key-value cache of this layer with earlier tokens, to which this call adds the tokens of x; None
                without a cache.
            norm: norm of the layer's input, which backward may recompute; None without a norm before attention.
        """
        # ---- project the layer's input to queries, keys and values
        qkv = normed(norm, x, then=self.qkv, recompute=self.recompute_norm)
        seq, batch = qkv.shape[:2]
        heads = qkv.view(seq, batch, self.groups, self.queries_per_group + 2, self.head_size)
        q, k, v = heads.split((self.queries_per_group, 1, 1), dim=3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)  # q is [S, B, heads, D], k and v are [S, B, groups, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if inputs.rotary is not None:
            q, k = rotate(q, *inputs.rotary), rotate(k, *inputs.rotary)
            # Autograd saves v for backward. As a view, v would keep all of `qkv` in memory, so copy it. The copy is not
            # necessary if autograd keeps `qkv` anyway, as the input of `q_norm`, or if context parallelism copies v.
            if self.q_norm is None and not self.context_parallel and torch.is_grad_enabled():
                v = v.contiguous()
        # ---- store the new tokens' keys and values in the cache, and get the keys and values that attention reads
        if cache is not None:
            assert inputs.places is not None, "a key-value cache needs `places`, the positions of the new tokens"
            k, v = cache.extend((k, v), inputs.places, inputs.mask)
        # ---- compute attention; with context parallelism, each rank computes it for all tokens of some heads
        if self.context_parallel:
            q, k, v = heads_for_tokens(q, k, v, self.cp)
        when, draws, in_graph = self.recompute_core, self.dropout > 0.0, self.qkv.tp.size == 1
        out = recomputed(self._core, q, k, v, inputs, when=when, draws=draws, in_graph=in_graph)
        return self.proj(tokens_for_heads(out, self.cp) if self.context_parallel else out)

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Compute attention by the kernel that the mask or the documents in `inputs` require.

        There are B sequences of S tokens, D channels per head, and `groups` key and value heads.

        Args:
            q: [S, B, heads, D] queries.
            k: [keys, B, groups, D] keys, where `keys` is S or, with earlier tokens in a key-value cache, the number of
                cached positions that attention reads (`KVCache.mask_length`).
            v: [keys, B, groups, D] values of the same tokens.
            inputs: attention mask, and offsets of documents.

        Returns:
            Attention's output before the output projection, [S, B, heads x D].
        """
        if inputs.document_starts is not None:
            return self._inside_documents(q, k, v, inputs.document_starts)
        # torch's kernels expect [B, heads, S, D] instead of [S, B, heads, D].
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        if inputs.mask is not None:
            out = masked_attention(q, k, v, inputs.mask, dropout=dropout, scale=self.scale)
        else:
            grouped = k.shape[1] != q.shape[1]
            options: dict[str, Any] = {"dropout_p": dropout, "enable_gqa": grouped, "scale": self.scale}
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        return out.permute(2, 0, 1, 3).flatten(2, 3)

    def _inside_documents(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention inside documents or a window by the variable-length kernel.

        The kernel takes one sequence, so the B rows of the batch are concatenated. With more than one row this copies
        queries, keys and values.

        Args:
            q: [S, B, heads, D] queries, for rows of S tokens and heads of D channels.
            k: [S, B, groups, D] keys, for `groups` key and value heads.
            v: [S, B, groups, D] values.
            starts: [documents + 1] int32 offsets of the documents in the B x S concatenated tokens.

        Returns:
            Attention's output before the output projection, [S, B, heads x D].
        """
        assert self.document_kernel is not None, "document_starts are set, but this device has no document kernel"
        seq, batch = q.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # from [S, B, heads, D] to [B x S, heads, D]
        # The kernel requires an upper bound of the documents' lengths. Pass the row's length, because reading the exact
        # maximum would make the host wait for the device.
        out = self.document_kernel(q, k, v, starts, seq, self.window, self.scale)
        return out.view(batch, seq, -1).transpose(0, 1)


def heads_for_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: MeshAxis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange all heads of this cp rank's tokens for this rank's heads of all tokens, in 1 all-to-all (Ulysses).

    C is the number of cp ranks, and G the number of key and value heads. If C does not divide G, keys and values are
    repeated to lcm(G, C) heads first. Each rank then receives lcm(G, C) / C = G / gcd(G, C) heads of each token. An
    all-gather of keys and values would deliver G heads of each token: as many if gcd(G, C) is 1, otherwise more.

    Args:
        q: [S/C, B, heads, D] queries of this rank's S/C tokens in each of B sequences, with D channels per head.
        k: [S/C, B, G, D] keys.
        v: [S/C, B, G, D] values.
        cp: context-parallel axis of C ranks.

    Returns:
        Queries [S, B, heads/C, D], and keys and values [S, B, lcm(G, C)/C, D] each.
    """
    times = math.lcm(k.shape[2], cp.size) // k.shape[2]
    if times > 1:
        k, v = k.repeat_interleave(times, dim=2), v.repeat_interleave(times, dim=2)
    sent = torch.cat([x.unflatten(2, (cp.size, -1)).movedim(2, 0) for x in (q, k, v)], dim=3)
    own = [x.shape[2] // cp.size for x in (q, k, v)]
    q, k, v = exchange(sent, cp).flatten(0, 1).split(own, dim=2)
    return q, k, v


def tokens_for_heads(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """Exchange this cp rank's heads of all tokens for all heads of this rank's tokens, in 1 all-to-all (Ulysses).

    This is the inverse of `heads_for_tokens`. It applies to attention's output: [S, B, heads/C x D] ->
    [S/C, B, heads x D] for C context-parallel ranks, B sequences of S tokens, and D channels per head.
    """
    return exchange(x.unflatten(0, (cp.size, -1)), cp).movedim(0, 2).flatten(2)


def config_angles(config: GPTConfig, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the rotary angles for all positions of a batch.

    Channels i and i + channels / 2 of a head's rotated channels form a pair. At position p the pair rotates by
    p base^(-2 i / channels) radians. Source: RoFormer, with the half-split order of channels that Llama and Megatron-LM
    use.

    Args:
        config: config of a model with rotary embeddings; its flags select the scaling of frequencies.
        position_ids: [B, S] int64 position of each token.

    Returns:
        (cos, sin), each [S, B, 1, rotated channels] fp32.
    """
    # ---- rotary frequencies without scaling, [channels / 2] in radians per token
    channels, device, factor = int(config.head_size * config.rotary_percent), position_ids.device, 1.0
    base: float | torch.Tensor = config.rotary_base
    if config.rope_type == "dynamic":
        scale, longest = config.rotary_scaling_factor, config.max_position_embeddings
        assert longest is not None
        # Dynamic NTK scaling raises the base once a position exceeds the context without scaling (`longest` tokens).
        # The base stays a tensor on the device, because reading it would make the host wait.
        share = (position_ids.max() + 1).clamp(min=longest) / longest
        base = base * (scale * share - (scale - 1.0)) ** (channels / (channels - 2))
    frequency = base ** -(torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels)

    # ---- scale the rotary frequencies for a longer context; `GPTConfig` allows at most one of these methods
    if config.rotary_seq_len_interpolation_factor is not None:
        frequency = frequency / config.rotary_seq_len_interpolation_factor
    if config.rope_scaling is not None:
        frequency = scaled_frequencies(frequency, config.rope_scaling, config.rope_scaling_original_length)
    if config.rope_type == "yarn":
        frequency = yarn_frequencies(frequency, config)
        factor = config.yarn_attention_factor or 1.0 + 0.1 * math.log(config.rotary_scaling_factor)

    # ---- rotary angles of all positions, [S, B, 1, channels]; both channels of a pair have the same angle
    angle = position_ids.t().unsqueeze(-1) * frequency
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(2)
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def yarn_frequencies(frequency: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """Return YaRN's rotary frequencies for a longer context (arXiv 2309.00071).

    Low frequencies are divided by --rotary-scaling-factor, and high frequencies are unchanged. Between low and high
    frequencies, divided and unchanged values are mixed along a linear ramp over the channels. The ramp starts and ends
    at integer channels, as in the authors' code.

    Args:
        frequency: [channels / 2] unscaled frequencies, in radians per token.
        config: config of the model with the flags of YaRN.

    Returns:
        [channels / 2] scaled frequencies, in radians per token.
    """
    half, original = len(frequency), config.yarn_original_max_position_embeddings

    def channel(turns: float) -> float:
        """Return the index, as a real number, of the rotary channel that turns `turns` times over the original context.

        The original context has --yarn-original-max-position-embeddings tokens.
        """
        return half * math.log(original / (turns * 2.0 * math.pi)) / math.log(config.rotary_base)

    first = max(math.floor(channel(config.yarn_beta_fast)), 0)
    last = min(math.ceil(channel(config.yarn_beta_slow)), 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32, device=frequency.device) - first) / ((last - first) or 0.001)
    divided = ramp.clamp(0.0, 1.0)
    return frequency / config.rotary_scaling_factor * divided + frequency * (1.0 - divided)


def scaled_frequencies(frequency: torch.Tensor, factor: float, original: int) -> torch.Tensor:
    """Return Llama 3.1's rotary frequencies for a longer context (--use-rope-scaling).

    The frequencies of channels that turn less than once over the original context are divided by `factor`. Channels
    that turn more than four times are unchanged. Between the two limits the frequencies are interpolated linearly in
    the number of turns.

    Args:
        frequency: [channels / 2] unscaled frequencies, in radians per token.
        factor: divisor of the lowest frequencies.
        original: length of the original context in tokens.

    Returns:
        [channels / 2] scaled frequencies, in radians per token.
    """
    turns = frequency * (original / (2.0 * math.pi))
    kept = ((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings: rotate the first channels of each head, and leave the other channels unchanged.

    Args:
        x: [S, B, heads, D] queries or keys of S tokens in each of B sequences, with D channels per head.
        cos: [S, B or 1, 1, rotated channels] fp32 cosines of the rotary angles.
        sin: fp32 sines of the rotary angles, shaped like `cos`.

    Returns:
        [S, B, heads, D] in the dtype of x; the rotation is computed in fp32.
    """
    turned, kept = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    first, second = turned.float().chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), kept), dim=-1) if kept.shape[-1] else turned.to(x.dtype)


def window_mask(seq: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of sliding-window attention, [1, 1, S, S] bool, for S = `seq` tokens.

    An element is True if the query attends to the key: a token attends to itself and the `window` - 1 tokens before it.
    """
    whole = torch.ones(seq, seq, dtype=torch.bool, device=device)
    return whole.tril().triu(1 - window)[None, None]


def document_mask(document_starts: torch.Tensor, *, batch: int, seq: int) -> torch.Tensor:
    """Return the mask of causal attention inside documents, [B, 1, S, S] bool, True where a query attends to a key.

    Args:
        document_starts: [documents + 1] ascending offsets of the documents in the B x S flattened tokens of the batch.
        batch: number of rows B of the batch.
        seq: number of tokens S per row.
    """
    position = torch.arange(batch * seq, device=document_starts.device)
    document = torch.bucketize(position, document_starts, right=True).view(batch, 1, seq)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return same & torch.ones(seq, seq, dtype=torch.bool, device=document_starts.device).tril()


# ---- attention kernels for everything but plain causal attention: inside documents or a window, and with a mask ------


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
        Attention's output, [tokens, heads, D].
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

    `groups` is the number of key and value heads, D the number of channels per head. If varlen_attn does not support
    grouped-query attention (torch 2.11), the result is [tokens, heads, D], in which each head is repeated.
    """
    return x if "enable_gqa" in VARLEN_ARGUMENTS else repeated(x, heads)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """Compute attention with a mask, but never by cuDNN, whose backward can return NaN (see the top of the file).

    There are B sequences of S tokens, D channels per head, and `groups` key and value heads.

    Args:
        q: [B, heads, S, D] queries.
        k: [B, groups, keys, D] keys.
        v: [B, groups, keys, D] values.
        mask: [B or 1, 1, S, keys], either bool (True where a query attends to a key) or the result of `shared_mask`.
        dropout: dropout rate of the attention probabilities.
        scale: number by which scores are multiplied before the softmax; None for 1 / sqrt(D).

    Returns:
        Attention's output, [B, heads, S, D].
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
    """Repeat the heads of keys or values: [B, groups, ...] -> [B, heads, ...] for B sequences.

    Kernels without grouped-query attention need as many key and value heads as query heads. In some torch versions the
    memory-efficient kernel does not support grouped-query attention.
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
