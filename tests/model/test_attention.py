"""Rotary positions, document masks and whole attention layers against independent formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import compare_slices, draw, part, tp_axis
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megazpp.model.attention import AttentionInputs, SelfAttention, document_mask, rotary_angles, rotate
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis


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


@pytest.mark.parametrize(("base", "factor"), [(10000.0, 32.0), (500000.0, 8.0)])
def test_scaled_angles_are_those_of_llama_3_1(base: float, factor: float):
    """fp32, at positions of up to 100000 radians: 6e-3 there, and 3e-7 of the frequency at position 1."""
    rope = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope)
    positions = torch.tensor([[0, 1, 777, 8192, 100000]])
    expected = LlamaRotaryEmbedding(config)(torch.empty(1), positions)
    for ours, theirs in zip(rotary_angles(positions, channels=128, base=base, scaling=factor), expected, strict=True):
        torch.testing.assert_close(ours[:, 0, 0], theirs[0], rtol=0, atol=2e-2)
        torch.testing.assert_close(ours[:2, 0, 0], theirs[0, :2], rtol=0, atol=1e-6)
    plain, scaled = (rotary_angles(positions, channels=128, base=base, scaling=s)[1][4, 0, 0] for s in (None, factor))
    assert torch.equal(plain[:8], scaled[:8])  # what turns often stays
    assert float((plain - scaled).abs().max()) > 0.5


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


def attention_by_loops(
    x: torch.Tensor, weights: dict[str, torch.Tensor], config: GPTConfig, mask: torch.Tensor
) -> torch.Tensor:
    """One query of one head at a time; the fused rows are [group, (queries, key, value), channels]."""
    channels, per_group = config.head_size, config.heads // config.query_groups
    seq, batch, _ = x.shape
    projected = x @ weights["qkv.weight"].t() + weights.get("qkv.bias", 0.0)
    blocks = projected.view(seq, batch, -1, channels)
    context = x.new_zeros(seq, batch, config.heads, channels)
    for head in range(config.heads):
        first = head // per_group * (per_group + 2)
        q, k, v = (blocks[:, :, i] for i in (first + head % per_group, first + per_group, first + per_group + 1))
        if config.qk_layernorm:
            q, k = head_norm(q, weights, "q", config), head_norm(k, weights, "k", config)
        for row in range(batch):
            for query in range(seq):
                scores = [float(q[query, row] @ k[key, row]) / math.sqrt(channels) for key in range(seq)]
                exps = [math.exp(s) if mask[row, 0, query, key] else 0.0 for key, s in enumerate(scores)]
                context[query, row, head] = sum(e / sum(exps) * v[key, row] for key, e in enumerate(exps))
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


def shape(name: str) -> GPTConfig:
    return GPTConfig(hidden_size=8, num_attention_heads=4, attention_dropout=0.0, **SHAPES[name])


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


def build(config: GPTConfig, tp: MeshAxis, *, sequence_parallel: bool = False) -> SelfAttention:
    layer = SelfAttention(config, tp=tp, sequence_parallel=sequence_parallel, output_std=1.0).double()
    values = whole_weights(config)
    assert values.keys() == dict(layer.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = part(values[name], SPLITS[name], tp) if name in SPLITS else values[name]
            assert parameter.shape == value.shape
            parameter.copy_(value)
    return layer


def masks() -> dict[str, torch.Tensor | None]:
    return {"causal": None, "documents": document_mask(torch.tensor([0, 2, 6, 7, 12]), batch=2, seq=6)}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_that_of_a_plain_loop_over_queries(name: str):
    """fp64, so 1e-12: the order of the sums alone differs."""
    config, x = shape(name), draw(0, 6, 2, 8)
    for given in masks().values():
        allowed = torch.ones(2, 1, 6, 6).tril().bool() if given is None else given
        y = build(config, MeshAxis("tp"))(x, AttentionInputs(rotary=None, mask=given))
        expected = attention_by_loops(x, whole_weights(config), config, allowed)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


SPLIT = {"multi-head": "causal", "grouped": "documents", "kv-channels": "documents", "qkv-bias-only": "causal"}
SPLIT |= {"no-bias": "causal", "head norms": "documents", "grouped head norms": "causal"}


def compare_with_the_whole() -> None:
    tp = tp_axis()
    for (name, mask), sequence_parallel in itertools.product(SPLIT.items(), (False, True)):
        x, y_grad, inputs = draw(0, 6, 2, 8), draw(5, 6, 2, 8), AttentionInputs(rotary=None, mask=masks()[mask])
        whole = build(shape(name), MeshAxis("tp"))
        y = whole(x.requires_grad_(), inputs)
        y.backward(y_grad)
        grads = {key: parameter.grad for key, parameter in whole.named_parameters()}
        layer = build(shape(name), tp, sequence_parallel=sequence_parallel)
        compare_slices(layer, x, y, y_grad, grads, SPLITS, inputs, tp=tp, sequence_parallel=sequence_parallel)


def test_attention_split_over_heads_is_the_whole_one():
    ranks(2).run(compare_with_the_whole)
