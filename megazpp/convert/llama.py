"""Hugging Face's Llama: rotary positions, RMSNorm, SwiGLU, queries, keys and values apart."""

from __future__ import annotations

import functools
import re
from typing import Any

from megazpp.convert.architecture import Architecture, refuse
from megazpp.convert.settings import Settings
from megazpp.convert.tensors import Piece, fuse_qkv, same, split_qkv
from megazpp.model.config import GPTConfig

_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # in older files


def read(settings: Settings) -> dict[str, Any]:
    """Fields of GPTConfig."""
    settings.absent("quantization_config")
    settings.only("hidden_act", "silu", "swish")
    hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    groups = settings.count("num_key_value_heads", heads)
    head_size = settings.count("head_dim", max(hidden // heads, 1))
    bias = settings.truth("attention_bias", False)
    if settings.truth("mlp_bias", False) != bias:
        raise ValueError(f"{settings.where}: attention_bias and mlp_bias differ, here linear layers have biases or not")
    return {
        "num_layers": settings.count("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": settings.count("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": None if head_size * heads == hidden else head_size,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "max_position_embeddings": settings.count("max_position_embeddings", 2048),
        "position_embedding_type": "rope",
        "rotary_base": _read_rotary_base(settings),
        "normalization": "RMSNorm",
        "norm_epsilon": settings.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "untie_embeddings_and_output_weights": not settings.truth("tie_word_embeddings", False),
        "disable_bias_linear": not bias,
        "init_method_std": settings.number("initializer_range", 0.02),
        "hidden_dropout": 0.0,
        "attention_dropout": settings.number("attention_dropout", 0.0),
    }


def _read_rotary_base(settings: Settings) -> float:
    """From `rope_theta` and `rope_scaling`, or from `rope_parameters`, which transformers 5 has instead."""
    scaling, parameters = settings.part("rope_scaling"), settings.part("rope_parameters")
    for name in ("rope_type", "type"):
        scaling.only(f"rope_scaling.{name}", "default")
        parameters.only(f"rope_parameters.{name}", "default")
    parameters.only("rope_parameters.partial_rotary_factor", 1.0)
    return parameters.number("rope_parameters.rope_theta", settings.number("rope_theta", 10000.0))


def write(config: GPTConfig) -> dict[str, Any]:
    """config.json without the vocabulary."""
    refuse(
        "LlamaForCausalLM",
        {
            f"--position-embedding-type {config.positions}": config.positions != "rope",
            f"--rotary-percent {config.rotary_percent}": config.rotary_percent != 1.0,
            f"--normalization {config.normalization}": config.normalization != "RMSNorm",
            "--apply-layernorm-1p": config.apply_layernorm_1p,
            "--no-swiglu": not config.swiglu,
            "--add-qkv-bias and --disable-bias-linear": config.qkv_bias != config.linear_bias,
        },
    )
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rotary_base,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.linear_bias,
        "mlp_bias": config.linear_bias,
        "initializer_range": config.init_method_std,
        "attention_dropout": config.attention_dropout,
    }


def pieces(config: GPTConfig) -> dict[str, Piece]:
    """Our names to theirs."""
    found = {
        "embedding.word.weight": same("model.embed_tokens.weight"),
        "final_norm.weight": same("model.norm.weight"),
    }
    if not config.tied:
        found["output.weight"] = same("lm_head.weight")
    linears = {"attention.proj": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.fc1": "mlp.up_proj"}
    linears["mlp.fc2"] = "mlp.down_proj"
    join = functools.partial(fuse_qkv, groups=config.query_groups, head_size=config.head_size)
    split = functools.partial(split_qkv, groups=config.query_groups, head_size=config.head_size)
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        found[f"{ours}.attention_norm.weight"] = same(f"{theirs}.input_layernorm.weight")
        found[f"{ours}.mlp_norm.weight"] = same(f"{theirs}.post_attention_layernorm.weight")
        for kind in ("weight", "bias") if config.linear_bias else ("weight",):
            found |= {f"{ours}.{linear}.{kind}": same(f"{theirs}.{name}.{kind}") for linear, name in linears.items()}
            names = tuple(f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv")
            found[f"{ours}.attention.qkv.{kind}"] = Piece(names, join, split)
    return found


def their_name(name: str) -> str | None:
    return None if _FREQUENCIES.fullmatch(name) else name


LLAMA = Architecture(
    model_type="llama", class_name="LlamaForCausalLM", read=read, write=write, pieces=pieces, their_name=their_name
)
