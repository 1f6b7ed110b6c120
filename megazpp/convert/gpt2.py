"""Hugging Face's GPT-2: learned positions, LayerNorm, biases, matrices stored as [in, out]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megazpp.convert.model import ForeignTensors, named_pieces
from megazpp.convert.settings import Settings
from megazpp.model.config import GPTConfig

# For each name of an activation function in transformers, the fields of GPTConfig that select this function.
ACTIVATIONS: dict[str, dict[str, bool]] = {
    "gelu_new": {"openai_gelu": True},
    "gelu_pytorch_tanh": {"openai_gelu": True},
    "gelu_fast": {"openai_gelu": True},
    "gelu": {},
    "relu2": {"squared_relu": True},
}
# For a key of Hugging Face's config.json: the field of GPTConfig that its value sets, the property of GPTConfig with
# the value to write, and the method of `Settings` that reads and checks the value.
Keys = Mapping[str, tuple[str, str, str]]
_KEYS: Keys = {
    "n_layer": ("num_layers", "layers", "count"),
    "n_embd": ("hidden_size", "hidden", "count"),
    "n_head": ("num_attention_heads", "heads", "count"),
    "n_positions": ("max_position_embeddings", "max_position_embeddings", "count"),
    "layer_norm_epsilon": ("norm_epsilon", "norm_epsilon", "positive"),
    "initializer_range": ("init_method_std", "init_method_std", "number"),
    "resid_pdrop": ("hidden_dropout", "hidden_dropout", "number"),
    "attn_pdrop": ("attention_dropout", "attention_dropout", "number"),
}


class Gpt2:
    """Hugging Face's family GPT-2, and the mapping of its models to GPTConfig and back.

    The attributes and methods are the same as those of `llama.Relative`.
    """

    model_type, class_name, fused, predicts = "gpt2", "GPT2LMHeadModel", False, False
    prefix = "transformer."
    buffers = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")  # attention masks in older files

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of GPTConfig that a GPT-2 config.json defines.

        Raises:
            ValueError: a value is not supported. The message names its key.
        """
        settings.absent("scale_attn_by_inverse_layer_idx", "add_cross_attention")
        settings.only("scale_attn_weights", True)
        found = read_keys(settings, _KEYS) | ACTIVATIONS[settings.only("activation_function", *ACTIVATIONS)]
        found["ffn_hidden_size"] = settings.count("n_inner", 4 * found["hidden_size"])
        return found | {"untie_embeddings_and_output_weights": not settings.truth("tie_word_embeddings", True)}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return GPT-2's config.json for a model, without the entries about the vocabulary and special tokens."""
        return {
            **write_keys(config, _KEYS),
            "n_inner": config.ffn_size,
            "embd_pdrop": config.hidden_dropout,
            "tie_word_embeddings": config.tied,
            "activation_function": activation_of(config, "gelu_new"),
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Return the mapping from the tensors of `GPTModel`, by name, to the tensors of Hugging Face's GPT-2."""
        modules = {"embedding.word": "transformer.wte", "embedding.position": "transformer.wpe"}
        modules |= {"final_norm": "transformer.ln_f"} | ({} if config.tied else {"output": "lm_head"})
        parts = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.proj": "attn.c_proj"}
        parts |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
        return named_pieces(config, modules, parts, ["attn.c_attn"], layers="transformer.h", is_transposed=True)


def activation_of(config: GPTConfig, tanh: str) -> str:
    """Return Hugging Face's name of the activation function in a model's MLPs without gates.

    Args:
        config: architecture of the model.
        tanh: the family's name of GeLU's tanh approximation, which differs between Hugging Face's families.
    """
    return tanh if config.openai_gelu else "relu2" if config.squared_relu else "gelu"


def read_keys(settings: Settings, keys: Keys) -> dict[str, Any]:
    """Return the fields of GPTConfig that are set by one key of config.json each.

    Args:
        settings: values of the config.json.
        keys: for each key, the field, the property, and the method of `Settings` that reads the value.
    Raises:
        ValueError: a value is missing or invalid. The message names its key.
    """
    return {field: getattr(settings, method)(key) for key, (field, _, method) in keys.items()}


def write_keys(config: GPTConfig, keys: Keys) -> dict[str, Any]:
    """Return those entries of a Hugging Face config.json that set one field of GPTConfig each.

    Args:
        config: architecture of the model.
        keys: for each key of config.json, the field, the property with the value to write, and the reading method.
    """
    return {key: getattr(config, value) for key, (_, value, _) in keys.items()}
