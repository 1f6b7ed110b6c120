"""Hugging Face's GPT-2: learned positions, LayerNorm, biases, matrices stored [in, out]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megazpp.convert.model import Deferred, ForeignTensors, qkv_rows, refuse, same, transposed
from megazpp.convert.settings import Settings
from megazpp.model.config import GPTConfig

# activation_function there -> flags here; what is written is the first of each kind
ACTIVATIONS: dict[str, dict[str, bool]] = {
    "gelu_new": {"openai_gelu": True},
    "gelu_pytorch_tanh": {"openai_gelu": True},
    "gelu_fast": {"openai_gelu": True},
    "gelu": {},
    "relu2": {"squared_relu": True},
}
_ALIASES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_MASKS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")  # older files hold the causal mask


class Gpt2:
    """GPT-2, with the methods of `llama.Relative`."""

    model_type, class_name, fused = "gpt2", "GPT2LMHeadModel", False

    def read(self, settings: Settings) -> dict[str, Any]:
        """Fields of GPTConfig."""
        settings.absent("scale_attn_by_inverse_layer_idx", "add_cross_attention")
        settings.only("scale_attn_weights", True)
        activation = settings.only("activation_function", *ACTIVATIONS)
        key = {name: settings.one_of(name, alias) for name, alias in _ALIASES.items()}
        hidden = settings.count(key["n_embd"], 768)
        return {
            "num_layers": settings.count(key["n_layer"], 12),
            "hidden_size": hidden,
            "ffn_hidden_size": settings.count("n_inner") if "n_inner" in settings else 4 * hidden,
            "num_attention_heads": settings.count(key["n_head"], 12),
            "max_position_embeddings": settings.count(key["n_positions"], 1024),
            "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-5),
            "untie_embeddings_and_output_weights": not settings.truth("tie_word_embeddings", True),
            "init_method_std": settings.number("initializer_range", 0.02),
            "hidden_dropout": settings.number("resid_pdrop", 0.1),
            "attention_dropout": settings.number("attn_pdrop", 0.1),
            **ACTIVATIONS[activation],
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """config.json without the vocabulary."""
        refuse(
            "GPT2LMHeadModel",
            {
                f"--position-embedding-type {config.positions}": config.positions != "learned_absolute",
                f"--normalization {config.normalization}": config.normalization != "LayerNorm",
                "--apply-layernorm-1p": config.apply_layernorm_1p,
                "--qk-layernorm": config.qk_layernorm,
                "--qk-layernorm-all-heads": config.qk_layernorm_all_heads,
                "--norm-after-block": config.norm_after_block,
                "--use-parallel-residual": config.use_parallel_residual,
                f"--embedding-multiplier {config.embedding_multiplier}": config.embedding_multiplier != 1.0,
                f"--residual-multiplier {config.residual_multiplier}": config.residual_multiplier != 1.0,
                f"--attention-multiplier {config.attention_multiplier}": config.attention_multiplier is not None,
                f"--logits-scaling {config.logits_scaling}": config.logits_scaling != 1.0,
                f"--window-size {config.window_size}": config.window is not None,
                "--swiglu": config.swiglu,
                "--disable-bias-linear": config.disable_bias_linear,
                f"--num-query-groups {config.query_groups}": config.query_groups != config.heads,
                f"--kv-channels {config.head_size}": config.head_size * config.heads != config.hidden,
            },
        )
        kind = {name: getattr(config, name) for name in ("openai_gelu", "squared_relu") if getattr(config, name)}
        return {
            "n_layer": config.layers,
            "n_embd": config.hidden,
            "n_inner": config.ffn_size,
            "n_head": config.heads,
            "n_positions": config.max_position_embeddings,
            "layer_norm_epsilon": config.norm_epsilon,
            "tie_word_embeddings": config.tied,
            "initializer_range": config.init_method_std,
            "resid_pdrop": config.hidden_dropout,
            "embd_pdrop": config.hidden_dropout,
            "attn_pdrop": config.attention_dropout,
            "activation_function": next(name for name, flags in ACTIVATIONS.items() if flags == kind),
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Our names to theirs."""
        found = {
            "embedding.word.weight": same("transformer.wte.weight"),
            "embedding.position.weight": same("transformer.wpe.weight"),
            "final_norm.weight": same("transformer.ln_f.weight"),
            "final_norm.bias": same("transformer.ln_f.bias"),
        }
        if not config.tied:
            found["output.weight"] = same("lm_head.weight")
        for layer in range(config.layers):
            ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
            for norm, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
                found |= {f"{ours}.{norm}.{kind}": same(f"{theirs}.{name}.{kind}") for kind in ("weight", "bias")}
            for linear, name in (("attention.proj", "attn.c_proj"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj")):
                found[f"{ours}.{linear}.weight"] = transposed(f"{theirs}.{name}.weight")
                found[f"{ours}.{linear}.bias"] = same(f"{theirs}.{name}.bias")
            for kind in ("weight", "bias"):
                found[f"{ours}.attention.qkv.{kind}"] = qkv_rows(
                    [f"{theirs}.attn.c_attn.{kind}"], config, transposed=True
                )
        return found

    def opened(self, tensors: Mapping[str, Deferred]) -> dict[str, Deferred]:
        """All matrices are apart."""
        return {**tensors}

    closed = opened

    def their_name(self, name: str) -> str | None:
        """The first GPT-2 files have no `transformer.`."""
        if _MASKS.fullmatch(name):
            return None
        return name if name.startswith(("transformer.", "lm_head.", "score.")) else f"transformer.{name}"
