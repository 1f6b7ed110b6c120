"""Rotary positions, document masks and whole attention layers against independent formulas."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import compare_slices, draw, tp_axis

from megazpp.model.attention import AttentionInputs, SelfAttention, document_mask, rotary_angles, rotate
from megazpp.model.config import GPTConfig


def rotate_complex(x: torch.Tensor, position_ids: torch.Tensor, *, channels: int, base: float) -> torch.Tensor:
    """Channels (i, i + channels/2) of x [S, B, heads, D] as one complex number, times exp(i position base^(-2i/c))."""
    half = channels // 2
    numbers = torch.complex(x[..., :half], x[..., half:channels])
    frequency = torch.tensor([base ** (-2 * i / channels) for i in range(half)], dtype=torch.float64)
    angle = position_ids.t()[:, :, None, None].double() * frequency
    turned = numbers * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, x[..., channels:]), dim=-1)


POSITIONS = {
    "counting": torch.arange(9).expand(2, 9),
    "restarting": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 0, 1]]),
    "far": torch.arange(2000, 2009).expand(2, 9),
}


def test_rotary_positions_turn_pairs_of_channels_as_complex_numbers():
    """fp32 angles: 6e-8 relative to at most 2009 radians, 1.2e-4 after a turn; below 10 radians 1e-6."""
    x = draw(0, 9, 2, 3, 20)
    for positions, percent, base in itertools.product(POSITIONS, (1.0, 0.5, 0.2), (10000.0, 7.0)):
        channels, ids = int(20 * percent), POSITIONS[positions]
        cos, sin = rotary_angles(ids, channels=channels, base=base)
        assert cos.shape == sin.shape == (9, 2, 1, channels)
        expected = rotate_complex(x, ids, channels=channels, base=base)
        tolerance = 1e-3 if positions == "far" else 5e-6
        turned = rotate(x.float(), cos, sin)
        torch.testing.assert_close(turned.double(), expected, rtol=0, atol=tolerance)
        assert torch.equal(turned[..., channels:], x.float()[..., channels:])


def test_bf16_is_turned_in_fp32_and_rounded_once():
    x = draw(0, 9, 2, 3, 8).bfloat16()
    turned = rotate(x, *rotary_angles(POSITIONS["counting"], channels=4, base=10000.0))
    assert turned.dtype == torch.bfloat16
    expected = rotate_complex(x.double(), POSITIONS["counting"], channels=4, base=10000.0)
    torch.testing.assert_close(turned.double(), expected, rtol=2**-8, atol=1e-5)


def test_a_query_looks_at_earlier_tokens_of_its_own_document_only():
    batch, seq = 2, 7
    for starts in (
        [0, 14],  # one document over two rows: rows are separate all the same
        [0, 7, 14],
        [0, 1, 2, 7, 12, 13, 14],
        [0, 3, 7, 8, 14],
        [*range(15)],  # every token by itself
    ):
        mask = document_mask(torch.tensor(starts, dtype=torch.int32), batch=batch, seq=seq)
        assert mask.shape == (batch, 1, seq, seq)
        for row, query in itertools.product(range(batch), range(seq)):
            own = max(start for start in starts if start <= row * seq + query)
            allowed = [own <= row * seq + key and key <= query for key in range(seq)]
            assert mask[row, 0, query].tolist() == allowed


def head_norm(x: torch.Tensor, weights: dict[str, torch.Tensor], letter: str, config: GPTConfig) -> torch.Tensor:
    """RMSNorm or LayerNorm of one head [S, B, D]."""
    if config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    normal = x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
    return normal * weights[f"{letter}_norm.weight"] + weights.get(f"{letter}_norm.bias", 0.0)


def attention_by_heads(
    config: GPTConfig, mask: torch.Tensor, x: torch.Tensor, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """One head at a time; the fused rows are [group, (queries, key, value), channels]."""
    channels, per_group = config.head_size, config.heads // config.query_groups
    seq, batch, _ = x.shape
    projected = x @ weights["qkv.weight"].t() + weights.get("qkv.bias", 0.0)
    blocks = projected.view(seq, batch, -1, channels)
    contexts = []
    for head in range(config.heads):
        first = head // per_group * (per_group + 2)
        q, k, v = (blocks[:, :, i] for i in (first + head % per_group, first + per_group, first + per_group + 1))
        if config.qk_layernorm:
            q, k = head_norm(q, weights, "q", config), head_norm(k, weights, "k", config)
        exps = (torch.einsum("qbc,kbc->bqk", q, k) / math.sqrt(channels)).exp() * mask.squeeze(1)
        contexts.append(torch.einsum("bqk,kbc->qbc", exps / exps.sum(-1, keepdim=True), v))
    context = torch.stack(contexts, dim=2)
    return context.flatten(2) @ weights["proj.weight"].t() + weights.get("proj.bias", 0.0)


SPLITS = {"qkv.weight": 0, "qkv.bias": 0, "proj.weight": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"group_query_attention": True, "num_query_groups": 2},
    "multi-query": {"group_query_attention": True, "num_query_groups": 1},
    "kv-channels": {"kv_channels": 3},
    "qkv-bias-only": {"disable_bias_linear": True, "add_qkv_bias": True},
    "head norms": {"qk_layernorm": True, "normalization": "RMSNorm", "disable_bias_linear": True},
    "grouped head norms": {"qk_layernorm": True, "group_query_attention": True, "num_query_groups": 2},
    "no-bias": {"disable_bias_linear": True, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 5},
}


def whole_weights(config: GPTConfig) -> dict[str, torch.Tensor]:
    rows = (config.heads + 2 * config.query_groups) * config.head_size
    weights = {"qkv.weight": draw(1, rows, 8), "proj.weight": draw(2, 8, config.heads * config.head_size)}
    if config.qkv_bias:
        weights["qkv.bias"] = draw(3, rows)
    if config.linear_bias:
        weights["proj.bias"] = draw(4, 8)
    if config.qk_layernorm:
        kinds = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
        names = [f"{letter}_norm.{kind}" for letter in "qk" for kind in kinds]
        weights |= {name: draw(seed, config.head_size) for seed, name in enumerate(names, start=5)}
    return weights


def compare_with_formula() -> None:
    tp, x, documents = tp_axis(), draw(0, 6, 2, 8), document_mask(torch.tensor([0, 2, 6, 7, 12]), batch=2, seq=6)
    for name, mask, sequence_parallel in itertools.product(SHAPES, (None, documents), (False, True)):
        config = GPTConfig(hidden_size=8, num_attention_heads=4, attention_dropout=0.0, **SHAPES[name])
        if config.query_groups % tp.size:
            continue
        layer = SelfAttention(config, tp=tp, sequence_parallel=sequence_parallel, output_std=1.0).double()
        allowed = torch.ones(2, 1, 6, 6).tril().bool() if mask is None else mask
        whole, inputs = functools.partial(attention_by_heads, config, allowed), AttentionInputs(rotary=None, mask=mask)
        split: dict[str, Any] = {"tp": tp, "sequence_parallel": sequence_parallel, "row": (name, mask is None)}
        compare_slices(layer, whole, x, whole_weights(config), SPLITS, inputs, **split)


@pytest.mark.parametrize("size", [1, 2])
def test_attention_however_it_is_split_is_its_formula_head_by_head(size):
    ranks(size).run(compare_with_formula)
