"""Tiny transformers models with random weights in folders, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
import transformers

VOCAB, SEQ = 107, 24
TOKENS = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))

_LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
    "rope_theta": 5e5,
}
LLAMA3 = {  # the frequencies of Llama 3.2
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_gpt2(**settings: Any) -> transformers.GPT2LMHeadModel:
    """In eval mode, with biases and norms off their constants."""
    sizes = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ids = {"bos_token_id": 5, "eos_token_id": 5}
    return randomized(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | ids | settings)))


def make_llama(**settings: Any) -> transformers.LlamaForCausalLM:
    return randomized(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA_SIZES | settings)))


def make_mistral(**settings: Any) -> transformers.MistralForCausalLM:
    return randomized(transformers.MistralForCausalLM(transformers.MistralConfig(**_LLAMA_SIZES | settings)))


def make_qwen2(**settings: Any) -> transformers.Qwen2ForCausalLM:
    return randomized(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_LLAMA_SIZES | settings)))


def make_qwen3(**settings: Any) -> transformers.Qwen3ForCausalLM:
    sizes = _LLAMA_SIZES | {"head_dim": 12}
    return randomized(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes | settings)))


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def logits(folder: Path) -> torch.Tensor:
    """What transformers makes of a folder, in fp32: [B, S, V]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def file_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that lies in the safetensors of a folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def randomized(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and parameter.dim() == 1
            parameter.copy_(is_norm + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def write_llama_tokenizer(folder: Path, text: str, **config: Any) -> Path:
    """Llama 2's tokenizer.json of the words of `text`, with a template that puts <s> before a text.

    Args:
        config: tokenizer_config.json, beside bos_token and eos_token.
    """
    space, marks = "\u2581", ["<unk>", "<s>", "</s>"]
    trained = tokenizers.SentencePieceBPETokenizer()
    trained.train_from_iterator([text], vocab_size=200, special_tokens=marks)
    start, body = ({"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}})
    prepend = {"type": "Prepend", "prepend": space}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": space}
    definition = json.loads(trained.to_str()) | {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, body],
            "pair": [body, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return folder
