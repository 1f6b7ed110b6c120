"""Hugging Face's Llama and its relatives: rotary positions, RMSNorm, SwiGLU, queries, keys and values apart.

| model_type | differs from llama in                             | which here is                             |
|------------|---------------------------------------------------|-------------------------------------------|
| mistral    | tokens look back over a window at most; no biases | --window-size                             |
| qwen2      | biases on queries, keys and values only           | --add-qkv-bias with --disable-bias-linear |
| qwen3      | normalised queries and keys; no biases            | --qk-layernorm                            |

Without a window a Mistral is a Llama, and becomes one. A relative that differs in these ways alone is one more entry
of `RELATIVES` and one more case of `huggingface.choose_architecture`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megazpp.convert.model import ForeignTensors, qkv_rows, refuse, same
from megazpp.convert.settings import Settings
from megazpp.model.attention import HIGH_TURNS, LOW_TURNS, ORIGINAL_CONTEXT
from megazpp.model.config import GPTConfig

_FREQUENCIES = re.compile(r"rotary_emb\.inv_freq")  # a buffer in older files
_REQUIRED = ("num_key_value_heads", "max_position_embeddings")
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor")
_LLAMA3 = {
    "low_freq_factor": LOW_TURNS,
    "high_freq_factor": HIGH_TURNS,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}


@dataclass(frozen=True)
class Relative:
    """A model_type; `gpt2.Gpt2` has the same methods.

    Attributes:
        model_type, class_name: in config.json, and of transformers, with the output layer.
        required: keys of config.json that may not be left out (transformers has defaults for them that no model uses).
        linear_bias: attention_bias and mlp_bias may give all linear layers biases.
        qkv_bias, qk_norm: it has biases on queries, keys and values; norms of queries and keys.
        window_switch: key that turns a window on, which is refused; None where windows are supported.
    """

    model_type: str
    class_name: str
    required: tuple[str, ...] = _REQUIRED
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window_switch: str | None = "use_sliding_window"

    def read(self, settings: Settings) -> dict[str, Any]:
        """Fields of GPTConfig, or a ValueError that names a key; what is left out has transformers' value, if any."""

        def count(key: str, default: int) -> int:
            return settings.count(key, None if key in self.required else default)

        settings.only("hidden_act", "silu", "swish")
        windows = self.window_switch is None
        settings.each("layer_types", *(() if windows else ("full_attention",)))  # a Mistral with any is a Ministral
        hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
        groups, head_size = count("num_key_value_heads", heads), count("head_dim", max(hidden // heads, 1))
        positions = count("max_position_embeddings", 2048)
        return {
            "num_layers": settings.count("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": settings.count("intermediate_size"),
            "num_attention_heads": heads,
            "kv_channels": None if head_size * heads == hidden else head_size,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else 1,
            "max_position_embeddings": positions,
            "position_embedding_type": "rope",
            **_read_rotary(settings, positions),
            "window_size": self._read_window(settings),
            "normalization": "RMSNorm",
            "norm_epsilon": settings.positive("rms_norm_eps", 1e-6),
            "qk_layernorm": self.qk_norm,
            "swiglu": True,
            "untie_embeddings_and_output_weights": not settings.truth("tie_word_embeddings", False),
            "disable_bias_linear": not self._read_bias(settings),
            "add_qkv_bias": self.qkv_bias,
            "init_method_std": settings.number("initializer_range", 0.02),
            "hidden_dropout": 0.0,
            "attention_dropout": settings.number("attention_dropout", 0.0),
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """config.json without the vocabulary; a ValueError names the flags of what it cannot hold."""
        windows = self.window_switch is None
        refuse(
            self.class_name,
            {
                f"--position-embedding-type {config.positions}": config.positions != "rope",
                f"--rotary-percent {config.rotary_percent}": config.rotary_percent != 1.0,
                f"--normalization {config.normalization}": config.normalization != "RMSNorm",
                "--apply-layernorm-1p": config.apply_layernorm_1p,
                "--no-swiglu": not config.swiglu,
                f"--window-size {config.window_size}": config.window is not None and not windows,
                "--qk-layernorm": config.qk_layernorm and not self.qk_norm,
                "--no-disable-bias-linear": config.linear_bias and not self.linear_bias,
                "--add-qkv-bias": config.qkv_bias and not config.linear_bias and not self.qkv_bias,
            },
        )
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling, **_LLAMA3}
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
            "rope_scaling": scaling if config.rope_scaling is not None else None,
            "rms_norm_eps": config.norm_epsilon,
            "tie_word_embeddings": config.tied,
            "initializer_range": config.init_method_std,
            "attention_dropout": config.attention_dropout,
            **({"attention_bias": config.linear_bias, "mlp_bias": config.linear_bias} if self.linear_bias else {}),
            **({"sliding_window": config.window} if windows else {}),
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Our names to theirs."""
        found = {
            "embedding.word.weight": same("model.embed_tokens.weight"),
            "final_norm.weight": same("model.norm.weight"),
        }
        if not config.tied:
            found["output.weight"] = same("lm_head.weight")
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if config.qk_layernorm:
            norms |= {f"attention.{letter}_norm": f"self_attn.{letter}_norm" for letter in "qk"}
        linears = {"attention.proj": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.fc1": "mlp.up_proj"}
        linears["mlp.fc2"] = "mlp.down_proj"
        for layer in range(config.layers):
            ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
            found |= {f"{ours}.{norm}.weight": same(f"{theirs}.{name}.weight") for norm, name in norms.items()}
            for kind in ("weight", "bias") if config.linear_bias else ("weight",):
                found |= {
                    f"{ours}.{linear}.{kind}": same(f"{theirs}.{name}.{kind}") for linear, name in linears.items()
                }
            for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
                names = [f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
                found[f"{ours}.attention.qkv.{kind}"] = qkv_rows(names, config)
        return found

    def their_name(self, name: str) -> str | None:
        """Return the full name of a tensor in a file; None for one that holds no weight.

        Files of a model without an output layer (transformers' AutoModel) have no prefix.
        """
        if _FREQUENCIES.search(name):
            return None
        return name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"

    def _read_bias(self, settings: Settings) -> bool:
        """Return whether all linear layers have biases."""
        if not self.linear_bias:
            settings.absent("attention_bias", "mlp_bias")
            return False
        bias = settings.truth("attention_bias", False)
        if settings.truth("mlp_bias", False) != bias:
            raise ValueError(
                f"{settings.where}: attention_bias and mlp_bias differ, here linear layers have biases or not"
            )
        return bias

    def _read_window(self, settings: Settings) -> str | None:
        """Return --window-size: `sliding_window` counts the token itself, is 4096 if missing, and null is none."""
        if self.window_switch is None:
            null = settings.values.get("sliding_window", 0) is None
            return None if null else f"{settings.count('sliding_window', 4096) - 1},0"
        settings.absent(self.window_switch)
        return None


def _read_rotary(settings: Settings, positions: int) -> dict[str, Any]:
    """From `rope_scaling` or else `rope_parameters`, as transformers 5 does, with `rope_theta` beside them."""
    name = "rope_scaling" if settings.part("rope_scaling").values else "rope_parameters"
    rope = settings.part(name)
    rope.absent(*(key for key in rope.values if key not in (*_ROPE_KEYS, *_LLAMA3)), empty=(None,))
    kind = rope.only("rope_type" if "rope_type" in rope else "type", "default", "llama3")
    settings.only("partial_rotary_factor", 1.0)
    rope.only("partial_rotary_factor", 1.0)
    base = rope.positive("rope_theta", settings.positive("rope_theta", 10000.0))
    if kind == "default":
        return {"rotary_base": base}
    settings.absent("original_max_position_embeddings", empty=(None, ORIGINAL_CONTEXT))
    for key, value in _LLAMA3.items():
        rope.only(key, value, default=positions if value == ORIGINAL_CONTEXT else None)
    return {"rotary_base": base, "use_rope_scaling": True, "rope_scaling_factor": rope.positive("factor")}


RELATIVES = {
    relative.model_type: relative
    for relative in (
        Relative("llama", "LlamaForCausalLM", required=(), linear_bias=True, window_switch="sliding_window"),
        Relative("mistral", "MistralForCausalLM", window_switch=None),
        Relative("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
        Relative("qwen3", "Qwen3ForCausalLM", required=(*_REQUIRED, "head_dim"), qk_norm=True),
    )
}
