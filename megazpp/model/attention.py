"""Self attention: fused projection, rotary positions, torch's attention kernels (backends.py says which).

S sequence, B batch, H hidden, G query groups (key and value heads) and Q = heads / G query heads per group on this
tp rank, D channels per head. The fused projection's rows are ordered [group, (Q queries, key, value), D], so a slice
of its rows is a set of whole groups. Each of C context-parallel ranks has S/C tokens, and for attention itself heads/C.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.backends import DocumentKernel, mark_varying, masked_attention
from megazpp.model.config import GPTConfig
from megazpp.model.kv_cache import LayerCache
from megazpp.model.norms import HeadsNorm, Norm, normed, recomputed
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.layers import ColumnParallelLinear, Product, RowParallelLinear
from megazpp.tensor_parallel.regions import exchange

LOW_TURNS, HIGH_TURNS = 1.0, 4.0  # of --use-rope-scaling: how often what is slowed down turns in the original context


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs that all layers share in one forward pass; None what is not used.

    Attributes:
        rotary: (cos, sin), each [S, B or 1, 1, rotated channels] fp32.
        mask: [B, 1, S, keys] bool, True where a query may look, or what `shared_mask` makes of it; without it and
            documents attention is causal.
        document_starts: [documents + 1] int32 offsets into the B x S flattened tokens, for a document kernel.
        places: [B, S] where keys and values go in a cache.
    """

    rotary: tuple[torch.Tensor, torch.Tensor] | None
    mask: torch.Tensor | None
    document_starts: torch.Tensor | None = None
    places: torch.Tensor | None = None

    def mark_varying(self) -> None:
        """Have one graph take any numbers of rows, positions and keys; callers mark `document_starts` themselves."""
        for angles in self.rotary or ():
            mark_varying(angles, 0, 1)
        mark_varying(self.mask, 0, 2, 3)
        mark_varying(self.places, 0, 1)


class SelfAttention(nn.Module):
    """[S, B, H] -> [S, B, H] ([S/T, B, H] at both ends with sequence parallelism), S/C for S with context parallelism.

    Collectives on tp: those of one ColumnParallelLinear and one RowParallelLinear; on cp: 2 all-to-alls. With
    --qk-layernorm the gradients of the weights that all heads share are partial.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        tp: MeshAxis,
        sequence_parallel: bool,
        output_std: float,
        cp: MeshAxis | None = None,
        document_kernel: DocumentKernel | None = None,
        product: Product | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.window, self.scale = window, config.attention_multiplier
        self.cp = cp or MeshAxis("cp")
        self.context_parallel = self.cp.size > 1
        self.head_size = config.head_size
        self.groups = config.query_groups // tp.size
        self.queries_per_group = config.heads // config.query_groups
        self.dropout = config.attention_dropout
        self.document_kernel = document_kernel
        self.recompute_norm, self.recompute_core = config.recomputes("layernorm"), config.recomputes("core_attn")
        rows = config.query_groups * (self.queries_per_group + 2) * self.head_size
        split: dict[str, Any] = {"tp": tp, "sequence_parallel": sequence_parallel, "product": product}
        self.qkv = ColumnParallelLinear(config.hidden, rows, std=config.init_method_std, bias=config.qkv_bias, **split)
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
        self.proj = RowParallelLinear(columns, config.hidden, std=output_std, bias=config.linear_bias, **split)

    def forward(
        self, x: torch.Tensor, inputs: AttentionInputs, cache: LayerCache | None = None, *, norm: Norm | None = None
    ) -> torch.Tensor:
        """Attention of `norm(x)`, of x without a norm."""
        qkv = normed(norm, x, then=self.qkv, recompute=self.recompute_norm)
        seq, batch = qkv.shape[:2]
        heads = qkv.view(seq, batch, self.groups, self.queries_per_group + 2, self.head_size)
        q, k, v = heads.split((self.queries_per_group, 1, 1), dim=3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)  # [S, B, heads or groups, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if inputs.rotary is not None:
            q, k = rotate(q, *inputs.rotary), rotate(k, *inputs.rotary)
            if self.q_norm is None and not self.context_parallel and torch.is_grad_enabled():
                v = v.contiguous()  # autograd keeps q, k and v: a view of `qkv` would keep all of it, for v alone
        if cache is not None:
            assert inputs.places is not None, "a cache needs places"
            k, v = cache.extend((k, v), inputs.places, inputs.mask)
        if self.context_parallel:
            q, k, v = heads_for_tokens(q, k, v, self.cp)
        when, draws, in_graph = self.recompute_core, self.dropout > 0.0, self.qkv.tp.size == 1
        out = recomputed(self._core, q, k, v, inputs, when=when, draws=draws, in_graph=in_graph)
        return self.proj(tokens_for_heads(out, self.cp) if self.context_parallel else out)

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """[S, B, heads, D], 2 x [keys, B, groups, D] -> [S, B, heads x D]."""
        if inputs.document_starts is not None:
            return self._inside_documents(q, k, v, inputs.document_starts)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, heads, S, D]
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
        """Like `_core`; rows of the batch are laid one after the other, which copies where there are several."""
        assert self.document_kernel is not None, "document_starts need a document kernel"
        seq, batch = q.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [B x S, heads, D]
        # no document is longer than a row; how long the longest is, the host does not know without waiting
        out = self.document_kernel(q, k, v, starts, seq, self.window, self.scale)
        return out.view(batch, seq, -1).transpose(0, 1)


def heads_for_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: MeshAxis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send other ranks their heads of this rank's tokens, and get its heads of theirs, in 1 all-to-all.

    Keys and values are repeated where C does not divide the groups, to the least multiple of both: each rank then gets
    G / gcd(G, C) heads of a token, and with all-gathered keys and values it would get all G.

    Args:
        q, k, v: [S/C, B, heads, D] and 2 x [S/C, B, G, D].
    Returns:
        [S, B, heads/C, D] and 2 x [S, B, lcm(G, C)/C, D].
    """
    times = math.lcm(k.shape[2], cp.size) // k.shape[2]
    if times > 1:
        k, v = k.repeat_interleave(times, dim=2), v.repeat_interleave(times, dim=2)
    sent = torch.cat([x.unflatten(2, (cp.size, -1)).movedim(2, 0) for x in (q, k, v)], dim=3)
    own = [x.shape[2] // cp.size for x in (q, k, v)]
    q, k, v = exchange(sent, cp).flatten(0, 1).split(own, dim=2)
    return q, k, v


def tokens_for_heads(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """[S, B, heads/C x D] of this rank's heads -> [S/C, B, heads x D] of its tokens, in 1 all-to-all."""
    return exchange(x.unflatten(0, (cp.size, -1)), cp).movedim(0, 2).flatten(2)


def rotary_angles(
    position_ids: torch.Tensor, channels: int, base: float, scaling: float | None = None, original: int = 8192
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary angles, [S, B, 1, channels] fp32 each, for position_ids [B, S].

    Channel i and channel i + channels/2 turn together by position x base^(-2i/channels) (RoFormer; the half-split
    order of Llama and Megatron), and slower by `scaled_frequencies` if `scaling` is given, with `original` tokens.
    """
    frequency = plain_frequencies(channels, base, position_ids.device)
    if scaling is not None:
        frequency = scaled_frequencies(frequency, scaling, original)
    return turned_angles(position_ids, frequency)


def config_angles(config: GPTConfig, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles` with the frequencies of `config`."""
    channels, interpolation = int(config.head_size * config.rotary_percent), config.rotary_seq_len_interpolation_factor
    if config.rope_type == "rope" and interpolation is None:
        scaling = config.rope_scaling, config.rope_scaling_original_length
        return rotary_angles(position_ids, channels, config.rotary_base, *scaling)
    base: float | torch.Tensor = config.rotary_base
    factor, longest = config.rotary_scaling_factor, config.max_position_embeddings
    if config.rope_type == "dynamic":  # a tensor, so that no sequence's length is waited for
        assert longest is not None
        share = (position_ids.max() + 1).clamp(min=longest) / longest
        base = base * (factor * share - (factor - 1.0)) ** (channels / (channels - 2))
    frequency = plain_frequencies(channels, base, position_ids.device) / (interpolation or 1.0)
    if config.rope_type != "yarn":
        return turned_angles(position_ids, frequency)
    attention_factor = config.yarn_attention_factor or 1.0 + 0.1 * math.log(factor)
    return turned_angles(position_ids, yarn_frequencies(frequency, config), attention_factor)


def plain_frequencies(channels: int, base: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """[channels / 2] fp32 radians per token."""
    exponent = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
    return base**-exponent


def turned_angles(
    position_ids: torch.Tensor, frequency: torch.Tensor, factor: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position x frequency, times `factor`; shapes as of `rotary_angles`."""
    angle = position_ids.t().unsqueeze(-1) * frequency  # [S, B, channels / 2]
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(2)
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if factor is None else (cos * factor, sin * factor)


def yarn_frequencies(frequency: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """YaRN's frequencies (arXiv 2309.00071): low ones are divided by the factor, high ones kept, with a ramp between.

    The ends of the ramp are whole channels, as in the authors' code.
    """
    half, original = len(frequency), config.yarn_original_max_position_embeddings

    def channel(turns: float) -> float:
        """Return the channel that turns so often in the original context."""
        return half * math.log(original / (turns * 2.0 * math.pi)) / math.log(config.rotary_base)

    first = max(math.floor(channel(config.yarn_beta_fast)), 0)
    last = min(math.ceil(channel(config.yarn_beta_slow)), 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32, device=frequency.device) - first) / ((last - first) or 0.001)
    divided = ramp.clamp(0.0, 1.0)
    return frequency / config.rotary_scaling_factor * divided + frequency * (1.0 - divided)


def scaled_frequencies(frequency: torch.Tensor, factor: float, original: int) -> torch.Tensor:
    """Llama 3.1's frequencies for a longer context, in radians per token.

    Channels that turn less than once in the original context are `factor` times slower, more than four times stay,
    and between the two the share that stays grows with the turns.
    """
    turns = frequency * (original / (2.0 * math.pi))
    kept = ((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first `cos.shape[-1]` channels of x [S, B, heads, D] by the given angles, in fp32; keep the rest."""
    turned, kept = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    first, second = turned.float().chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), kept), dim=-1) if kept.shape[-1] else turned.to(x.dtype)


def window_mask(seq: int, window: int, device: torch.device) -> torch.Tensor:
    """[1, 1, S, S] bool: True where a token may look, at itself and the `window` - 1 tokens before it."""
    whole = torch.ones(seq, seq, dtype=torch.bool, device=device)
    return whole.tril().triu(1 - window)[None, None]


def document_mask(document_starts: torch.Tensor, *, batch: int, seq: int) -> torch.Tensor:
    """Causal attention inside documents, [B, 1, S, S] bool, for their [D + 1] offsets in the B x S flattened tokens."""
    position = torch.arange(batch * seq, device=document_starts.device)
    document = torch.bucketize(position, document_starts, right=True).view(batch, 1, seq)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return same & torch.ones(seq, seq, dtype=torch.bool, device=document_starts.device).tril()
