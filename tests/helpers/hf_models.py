"""Write folders of tiny transformers models with random weights; compute logits with transformers and this project.

Letters in shapes: B samples, S tokens of a sample, V tokens in the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import tokenizers
import torch

from megazpp.convert.config import ConvertConfig
from megazpp.convert.convert import convert
from megazpp.convert.model import Model
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.features import FEATURES
from megazpp.model.gpt import GPTModel
from megazpp.parallel.config import ParallelConfig
from megazpp.run.feature import weight_opener
from megazpp.run.flag_checks import check_model

if TYPE_CHECKING:  # imported in functions only, because the import takes a second
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
_GPT2_SIZES = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIZES: dict[str, dict[str, Any]] = {  # config of the tiny model of each transformers model_type
    "gpt2": _GPT2_SIZES | {"bos_token_id": 5, "eos_token_id": 5},
    "llama": _LLAMA_SIZES,
    "mistral": _LLAMA_SIZES,
    "qwen2": _LLAMA_SIZES,
    "qwen3": _LLAMA_SIZES | {"head_dim": 12},
    "granite": _LLAMA_SIZES,
    **dict.fromkeys(("smollm3", "phi3", "olmo2"), _LLAMA_SIZES | {"pad_token_id": None}),
    "starcoder2": _LLAMA_SIZES,
    "mixtral": _LLAMA_SIZES | {"num_local_experts": 4},
    "qwen3_moe": _LLAMA_SIZES
    | {"head_dim": 12, "moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 3},
    "qwen2_moe": _LLAMA_SIZES
    | {
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": None,
    },
    "glm4_moe": _LLAMA_SIZES
    | {
        "head_dim": 12,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    },
    "olmoe": _LLAMA_SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None},
}
LLAMA3 = {  # the entry `rope_scaling` of Llama 3.2's config.json
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_model(kind: str, **settings: Any) -> transformers.PreTrainedModel:
    """Build a tiny transformers model of type `kind` in eval mode, with random weights.

    Biases and norms are random too: transformers' constant initial values would hide a mix-up of two tensors.
    """
    import transformers

    config = transformers.AutoConfig.for_model(kind, **SIZES[kind] | settings)
    return randomized(transformers.AutoModelForCausalLM.from_config(config))


make_gpt2 = functools.partial(make_model, "gpt2")
make_llama = functools.partial(make_model, "llama")
make_qwen3 = functools.partial(make_model, "qwen3")


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def convert_folder(source: Path, output: Path, **flags: Any) -> Path:
    """Convert the folder `source` to `output` like tools/convert_checkpoint.py, without log lines; return `output`."""
    config = ConvertConfig(input=str(source), output=str(output), **flags)
    convert(config, TokenizerConfig(), lambda line: None, opener=weight_opener(FEATURES, ()))
    return output


def logits(folder: Path) -> torch.Tensor:
    """Return the fp32 logits [B, S, V] of TOKENS that transformers computes with the model in `folder`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def our_model(model: Model, seq_length: int = SEQ) -> GPTModel:
    """Build this project's model in one process, with the weights of a model that was read from another format."""
    config = dataclasses.replace(model.config, make_vocab_size_divisible_by=1)
    check_model(config, ParallelConfig(), seq_length)
    scalar_head = "scalar_head.weight" in model.tensors
    ours = GPTModel(config, vocab_size=model.rows, scalar_head=scalar_head).eval()
    ours.load_state_dict({name: entry.read() for name, entry in model.tensors.items()})
    return ours


def our_logits(model: Model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Return the fp32 logits [B, S, V] of `tokens` that this project's model computes with the weights of `model`."""
    with torch.no_grad():
        return our_model(model, tokens.shape[1]).float()(tokens)


def file_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the safetensors files of a folder, by name."""
    files = map(safetensors.torch.load_file, sorted(folder.glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items()}


def randomized(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and parameter.dim() == 1
            parameter.copy_(is_norm + 0.15 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def write_llama_tokenizer(folder: Path, text: str, **config: Any) -> Path:
    """Write a small tokenizer.json like Llama 2's, trained on `text`, which adds <s> before each text; return `folder`.

    Args:
        folder: output folder, which is created if it does not exist.
        text: training text.
        config: entries of tokenizer_config.json in addition to bos_token and eos_token.
    """
    space, trained = "\u2581", tokenizers.SentencePieceBPETokenizer()
    trained.train_from_iterator([text], vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer, of = tokenizers.Tokenizer.from_str(trained.to_str()), tokenizers.normalizers
    tokenizer.normalizer = of.Sequence([of.Prepend(space), of.Replace(" ", space)])
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "$A $B:1", [("<s>", 1)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return folder
