"""Test the key-value cache.

Logits equal the logits of a forward without cache, for any lengths of rows and any order of forwards.
"""

import dataclasses

import pytest
import torch
from helpers.tensor_parallel import build_gpt, sample
from helpers.training import GPT2_STYLE, LLAMA_STYLE

from megazpp.inference.generate import logits_at
from megazpp.model.kv_cache import KVCache

ROUNDING = 1e-5  # tolerance for fp32 logits, because with a cache a masked attention kernel replaces the causal kernel
STYLES = {
    "gpt2": GPT2_STYLE,
    "llama": LLAMA_STYLE,
    "part of each head rotated": dataclasses.replace(LLAMA_STYLE, rotary_percent=0.5),
    "head norms, scaled frequencies": dataclasses.replace(LLAMA_STYLE, qk_layernorm=True, use_rope_scaling=True),
    "a window": dataclasses.replace(LLAMA_STYLE, window_size="2,0"),
    "windows and positions by layers": dataclasses.replace(
        LLAMA_STYLE, window_size="3,0", window_attn_skip_freq="2", no_rope_freq="[1,0]"
    ),
    "norms after blocks": dataclasses.replace(LLAMA_STYLE, norm_after_block=True, qk_layernorm_all_heads=True),
    "factors": dataclasses.replace(
        GPT2_STYLE,
        attention_multiplier=0.7,
        residual_multiplier=0.5,
        embedding_multiplier=2.0,
        logits_scaling=3.0,
    ),
    "no positions": dataclasses.replace(GPT2_STYLE, position_embedding_type="none"),
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@torch.no_grad()
def test_cached_logits_do_not_depend_on_chunks_or_padding(style):
    model, tokens, lengths = build_gpt(style), sample()[0], [2, 7, 5]
    for parts in ((16,), (9, 1, 1, 5), (1,) * 16):
        cache, found = KVCache(2, 3, 16), []
        for part in tokens.split(parts, dim=1):
            found.append(model(part, cache=cache))
            cache.add([part.shape[1]] * 3)
        torch.testing.assert_close(torch.cat(found, dim=1), model(tokens), atol=ROUNDING, rtol=ROUNDING)

    cache = KVCache(2, 3, 16)
    last = torch.tensor([n - 1 for n in lengths])
    padded = torch.where(torch.arange(7) <= last.unsqueeze(1), tokens[:, :7], 100)
    found = [model(padded, cache=cache, head=logits_at(last))]
    cache.add(lengths)
    for step in range(4):
        new = tokens[torch.arange(3), last + 1 + step].unsqueeze(1)
        found.append(model(new, cache=cache))
        cache.add([1, 1, 1])
    for row, n in enumerate(lengths):
        expected = model(tokens[row : row + 1, : n + 4])[0, n - 1 :]
        torch.testing.assert_close(torch.cat(found, dim=1)[row], expected, atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.parametrize("multiple", [1, 16])
@torch.no_grad()
def test_kept_rows_have_their_logits_with_rounded_mask_lengths(multiple):
    """Keep two rows of a key-value cache in another order, and compare their next logits with a plain forward.

    The lengths of rows on the host and their positions on the device must agree after every change.
    """
    model, tokens = build_gpt(LLAMA_STYLE), sample()[0]
    cache = KVCache(2, 3, 16, mask_multiple=multiple)
    model(tokens[:, :4], cache=cache)
    cache.add([4, 3, 2])
    cache.keep([2, 0])
    for _ in range(3):
        length = cache.mask_length(1)
        assert length == (16 if multiple == 16 else max(cache.lengths) + 1)
        new = torch.stack([tokens[row, place] for row, place in zip((2, 0), cache.lengths, strict=True)]).unsqueeze(1)
        found = model(new, cache=cache)
        cache.add([1, 1])
    assert cache.lengths == cache.positions(1).flatten().tolist() == [5, 7]
    for logits, row, length in zip(found, (2, 0), cache.lengths, strict=True):
        expected = model(tokens[row : row + 1, :length])[0, -1:]
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=ROUNDING)


@torch.no_grad()
def test_cache_has_the_dtype_of_the_models_computation():
    model = build_gpt(LLAMA_STYLE).bfloat16()
    cache = KVCache(2, 1, 4)
    model(sample()[0][:1, :3], cache=cache)
    cache.add([3])
    assert model(sample()[0][:1, :1], cache=cache).dtype == torch.bfloat16
