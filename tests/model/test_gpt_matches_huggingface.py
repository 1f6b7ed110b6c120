"""Test the GPT model against transformers' models with the same weights.

Logits, all gradients and scaled rotary angles must agree.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers.hf_models import TOKENS, VOCAB, make_gpt2, make_llama, make_qwen3, save
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megazpp.convert.huggingface import open_model
from megazpp.model.attention import config_angles
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel

MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2": make_gpt2,
    "llama": make_llama,
    "llama tied, plain heads": lambda: make_llama(tie_word_embeddings=True, num_key_value_heads=4),
    "qwen3": make_qwen3,  # Qwen3 normalizes queries and keys of each head
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(name, tmp_path):
    """Compare logits and all gradients with transformers. The tolerance allows fp32 sums in another order.

    Weights and gradients of transformers' models are converted by this project's reader of weights.
    """
    theirs = MODELS[name]()
    source = open_model(save(theirs, tmp_path / "weights"))
    sizes = {"make_vocab_size_divisible_by": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    ours = GPTModel(dataclasses.replace(source.config, **sizes), vocab_size=source.rows)
    ours.load_state_dict({key: entry.read() for key, entry in source.tensors.items()})
    labels = TOKENS.roll(-1, dims=1)

    expected = theirs(TOKENS).logits
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(ours(TOKENS)[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)
    ours(TOKENS, labels).mean().backward()

    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    gradients = open_model(save(theirs, tmp_path / "gradients")).tensors
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key].read(), rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize(("base", "factor"), [(10000.0, 32.0), (500000.0, 8.0)])
def test_scaled_rotary_angles_equal_llama_3_1(base, factor):
    """Compare angles of Llama 3.1's scaled rotary embeddings with transformers.

    Errors are fp32 roundings: 6e-3 for angles of 100000 radians, and 3e-7 of the frequency at position 1.
    """
    rope = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope
    )
    positions = torch.tensor([[0, 1, 777, 8192, 100000]])
    expected = LlamaRotaryEmbedding(config)(torch.empty(1), positions)
    rotated: dict[str, Any] = {"position_embedding_type": "rope", "kv_channels": 128, "rotary_base": base}
    unscaled, llama = (
        config_angles(GPTConfig(**rotated, **flags), positions)
        for flags in ({}, {"use_rope_scaling": True, "rope_scaling_factor": factor})
    )
    for ours, theirs in zip(llama, expected, strict=True):
        torch.testing.assert_close(ours[:, 0, 0], theirs[0], rtol=0, atol=2e-2)
        torch.testing.assert_close(ours[:2, 0, 0], theirs[0, :2], rtol=0, atol=1e-6)
    plain, scaled = (sines[4, 0, 0] for _, sines in (unscaled, llama))
    # scaling leaves the high frequencies (many turns within the original length) unchanged
    assert torch.equal(plain[:8], scaled[:8])
    assert float((plain - scaled).abs().max()) > 0.5
