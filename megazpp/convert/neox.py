"""Hugging Face's GPT-NeoX (Pythia): starcoder2 with other names, a fused matrix, and attention and MLP in parallel.

Its fused query_key_value has the rows of our `qkv`: head by head, a query, a key and a value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megazpp.convert.llama import Relative
from megazpp.convert.model import ForeignTensors, same
from megazpp.convert.settings import Settings
from megazpp.model.config import GPTConfig

_NAMES = {  # of parts of names
    "model.layers.": "gpt_neox.layers.",
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head.": "embed_out.",
    "self_attn.o_proj.": "attention.dense.",
    "mlp.c_fc.": "mlp.dense_h_to_4h.",
    "mlp.c_proj.": "mlp.dense_4h_to_h.",
}
_KEYS = {"norm_epsilon": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_PREFIXES = ("gpt_neox.", "embed_out.", "score.")


@dataclass(frozen=True)
class Neox(Relative):
    """GPT-NeoX, with the methods of `llama.Relative`."""

    def read(self, settings: Settings) -> dict[str, Any]:
        """Fields of GPTConfig."""
        settings.only("attention_bias", True)
        values = {key: value for key, value in settings.values.items() if key != "attention_bias"}
        values |= {ours: values[theirs] for ours, theirs in _KEYS.items() if theirs in values}
        values |= {"use_bias": True, "num_key_value_heads": settings.count("num_attention_heads")}
        rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
        if isinstance(rope, dict) and "partial_rotary_factor" not in {**values, **rope}:
            values["partial_rotary_factor"] = 0.25
        found = super().read(Settings(values, settings.where))
        return found | {"use_parallel_residual": settings.truth("use_parallel_residual", True)}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """config.json without the vocabulary."""
        if config.query_groups != config.heads:
            raise ValueError(f"{self.class_name} cannot hold a model with --num-query-groups {config.query_groups}")
        if config.head_size * config.heads != config.hidden:
            raise ValueError(f"{self.class_name} cannot hold a model with --kv-channels {config.head_size}")
        values = super().write(replace(config, use_parallel_residual=False))
        found = {_KEYS.get(key, key): value for key, value in values.items()}
        return found | {"use_parallel_residual": config.use_parallel_residual, "attention_bias": True}

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Our names to theirs."""
        found = {}
        for name, piece in super().pieces(config).items():
            theirs = piece.theirs[0]
            for ours, other in _NAMES.items():
                theirs = theirs.replace(ours, other)
            found[name] = same(theirs.replace("self_attn.q_proj.", "attention.query_key_value."))
        return found

    def their_name(self, name: str) -> str | None:
        """Return the full name of a tensor in a file; None for one that holds no weight."""
        if name.endswith(("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")):
            return None
        return name if name.startswith(_PREFIXES) else f"gpt_neox.{name}"


NEOX = Neox(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    required=("max_position_embeddings",),
    biases=("use_bias",),
    dropouts=("hidden_dropout",),
    partial=True,
    layer_norm=True,
    norm_epsilon=1e-5,
)
