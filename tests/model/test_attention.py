"""Test rotary embeddings, document masks and complete attention layers against independent formulas."""

import functools
import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import REGION, compare_slices, draw, layer_on, saved_tensors, tp_axis

from megazpp.model.attention import AttentionInputs, SelfAttention, config_angles, document_mask, rotate
from megazpp.model.config import GPTConfig
from megazpp.model.layer_parts import LayerSettings

RESTARTING = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
FAR = torch.arange(2000, 2009).expand(2, 9)


def rotated(channels: int, **flags: Any) -> GPTConfig:
    """Return the config of a model whose heads have `channels` channels, all of which get rotary embeddings."""
    return GPTConfig(position_embedding_type="rope", kv_channels=channels, **flags)


def rotate_complex(x: torch.Tensor, position_ids: torch.Tensor, *, channels: int, base: float) -> torch.Tensor:
    """Apply rotary embeddings to the channel pairs (k, k + channels/2) of x [S, B, heads, D] as complex numbers.

    S counts tokens, B samples and D channels of a head. The factor is exp(1j * position * base^(-2k/channels)).
    """
    half = channels // 2
    angle = position_ids.t()[:, :, None, None] * base ** (-2 * torch.arange(half).double() / channels)
    turned = torch.complex(x[..., :half], x[..., half:channels]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, x[..., channels:]), dim=-1)


def test_rotary_embeddings_rotate_pairs_like_complex_numbers():
    """Compare rotary embeddings with products of complex numbers.

    The tolerances are at least eight fp32 roundings of the angles. One rounding is 6e-8 of the angle: 1.2e-4 for 2009
    radians (the positions FAR), and 6e-7 for 10 radians.
    """
    for (ids, near), percent, base, (dtype, rounding) in itertools.product(
        ((RESTARTING, 5e-6), (FAR, 1e-3)),
        (1.0, 0.5, 0.2),
        (10000.0, 7.0),
        ((torch.float32, 0.0), (torch.bfloat16, 2**-8)),
    ):
        x, channels = draw(0, 9, 2, 3, 20).to(dtype), int(20 * percent)
        cos, sin = config_angles(rotated(channels, rotary_base=base), ids)
        assert cos.shape == sin.shape == (9, 2, 1, channels)
        turned = rotate(x, cos, sin)
        assert turned.dtype == dtype
        expected = rotate_complex(x.double(), ids, channels=channels, base=base)
        torch.testing.assert_close(turned.double(), expected, rtol=rounding, atol=near)
        assert torch.equal(turned[..., channels:], x[..., channels:])


def test_query_attends_only_to_earlier_tokens_of_its_document():
    for starts in (
        [0, 14],  # one document spans both rows of 7 tokens, but attention never crosses rows
        [0, 7, 14],
        [0, 1, 2, 7, 12, 13, 14],
        [0, 3, 7, 8, 14],
        [*range(15)],  # 14 documents of one token each
    ):
        mask = document_mask(torch.tensor(starts, dtype=torch.int32), batch=2, seq=7)
        assert mask.shape == (2, 1, 7, 7)
        for row, query in itertools.product(range(2), range(7)):
            own = max(start for start in starts if start <= row * 7 + query)
            assert mask[row, 0, query].tolist() == [own <= row * 7 + key and key <= query for key in range(7)]


def head_norm(config: GPTConfig, letter: str, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    if not config.qk_layernorm:
        return x
    scale, bias = weights[f"{letter}_norm.weight"], weights.get(f"{letter}_norm.bias")
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, scale.shape, scale, config.norm_epsilon)
    return F.layer_norm(x, scale.shape, scale, bias, config.norm_epsilon)


def attention_by_heads(
    config: GPTConfig, mask: torch.Tensor, x: torch.Tensor, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Compute an attention layer one head at a time, as a reference.

    x is [S, B, hidden]: S counts tokens and B samples. The fused projection's rows are in the order [group, (queries,
    key, value), D], with D channels per head.
    """
    projected = x @ weights["qkv.weight"].t() + weights.get("qkv.bias", 0.0)
    groups, contexts = projected.unflatten(-1, (config.query_groups, -1, config.head_size)), []
    for group in groups.unbind(2):
        *queries, key, value = group.unbind(2)  # queries of the group's heads, one key and one value: [S, B, D] each
        for query in queries:
            q, k = head_norm(config, "q", query, weights), head_norm(config, "k", key, weights)
            scores = torch.einsum("qbc,kbc->bqk", q, k) / math.sqrt(config.head_size)
            shares = scores.masked_fill(~mask, -math.inf).softmax(-1)
            contexts.append(torch.einsum("bqk,kbc->qbc", shares, value))
    return torch.cat(contexts, -1) @ weights["proj.weight"].t() + weights.get("proj.bias", 0.0)


GROUPED = {"group_query_attention": True, "num_query_groups": 2}
SHAPES = {
    "multi-head": {},
    "grouped": GROUPED,
    "multi-query": {"group_query_attention": True, "num_query_groups": 1},
    "kv-channels": {"kv_channels": 3},
    "qkv-bias-only": {"disable_bias_linear": True, "add_qkv_bias": True},
    "head norms": {"qk_layernorm": True, "normalization": "RMSNorm", "disable_bias_linear": True},
    "grouped head norms": {"qk_layernorm": True, **GROUPED},
    "no-bias": {"disable_bias_linear": True, "kv_channels": 5, **GROUPED},
}


def compare_with_formula() -> None:
    x, documents = draw(0, 6, 2, 8), document_mask(torch.tensor([0, 2, 6, 7, 12]), batch=2, seq=6)
    causal = torch.ones(6, 6).tril().bool()
    for name, mask, split in itertools.product(SHAPES, (None, documents), (False, True)):
        config = GPTConfig(hidden_size=8, num_attention_heads=4, attention_dropout=0.0, **SHAPES[name])
        if config.query_groups % tp_axis().size == 0:
            make = layer_on(SelfAttention, config, sequence_parallel=split)
            whole = functools.partial(attention_by_heads, config, causal if mask is None else mask.squeeze(1))
            inputs = AttentionInputs(rotary=None, mask=mask)
            compare_slices((name, mask is None), make, whole, x, inputs, **REGION[split])


@pytest.mark.parametrize("size", [1, 2])
def test_attention_on_any_layout_equals_its_formula_per_head(size):
    ranks(size).run(compare_with_formula)


def keeps_fused_product(inputs: AttentionInputs, **changes: Any) -> bool:
    """Return True if autograd saves the output of the fused query-key-value projection for backward."""
    config = GPTConfig(hidden_size=8, num_attention_heads=4, attention_dropout=0.0, **changes)
    attention = SelfAttention(config, LayerSettings(), output_std=1.0).double()
    outputs: list[torch.Tensor] = []
    attention.qkv.register_forward_hook(lambda module, args, output: outputs.append(output))
    with saved_tensors() as kept:
        attention(draw(0, 6, 2, 8).requires_grad_(), inputs)
    return outputs[0].untyped_storage().data_ptr() in {x.untyped_storage().data_ptr() for x in kept}


@pytest.mark.parametrize("masked", [False, True])
def test_rotary_attention_does_not_keep_the_fused_projection(masked):
    """Check that attention with rotary embeddings frees the output of the fused query-key-value projection.

    Rotated queries and keys are new tensors. Attention copies the values, which are only a small part of the output, so
    that no view keeps the rest in memory.
    """
    mask = document_mask(torch.tensor([0, 2, 6, 7, 12]), batch=2, seq=6) if masked else None
    core = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
    cases = itertools.product(("multi-head", "grouped", "multi-query"), (1.0, 0.5), ({}, core))
    for shape, percent, recompute in cases:
        changes = {"kv_channels": 4, "position_embedding_type": "rope", "rotary_percent": percent} | SHAPES[shape]
        rotary = config_angles(rotated(int(4 * percent)), torch.arange(6).expand(2, 6))
        inputs = AttentionInputs(rotary=rotary, mask=mask)
        assert not keeps_fused_product(inputs, **changes, **recompute), (shape, percent, recompute)


def test_attention_without_rotary_keeps_the_fused_projection():
    """Check that attention keeps the output of the fused query-key-value projection where freeing it saves nothing.

    Without rotary embeddings, queries, keys and values are views of this output. With norms of heads, the output is the
    input of the norms, whose backward needs it.
    """
    rotary = config_angles(rotated(4), torch.arange(6).expand(2, 6))
    assert keeps_fused_product(AttentionInputs(rotary=None, mask=None), kv_channels=4)
    with mock.patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("a copy that saves no memory")):
        norms = {"position_embedding_type": "rope", "kv_channels": 4, **SHAPES["grouped head norms"]}
        assert keeps_fused_product(AttentionInputs(rotary=rotary, mask=None), **norms)
