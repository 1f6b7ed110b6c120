"""What Megatron-LM's versions call our tensors, and how their ranks have split them.

language_model.embedding.{word,position}_embeddings.weight
language_model.{transformer,encoder}.layers.N.{attention,self_attention}.query_key_value.{weight,bias}  ...
language_model.output_layer.weight                       untied
decoder.layers.N.self_attention.linear_qkv.weight  ...   Megatron-core's names for the same
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from megazpp.convert.model import OUTPUT, WORDS

_LAYER = re.compile(r"(?:language_model\.(?:transformer|encoder)|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_FUSED_NORM = re.compile(r"(.*\.)(?:self_attention\.|mlp\.)(linear_qkv|linear_fc1)\.layer_norm_(weight|bias)")
_FUSED_NORMS = {"linear_qkv": "input_layernorm", "linear_fc1": "pre_mlp_layernorm"}
_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "attention.query_key_value": "attention.qkv",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "attention.dense": "attention.proj",
    "self_attention.dense": "attention.proj",
    "self_attention.linear_proj": "attention.proj",
    "mlp.dense_h_to_4h": "mlp.fc1",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.dense_4h_to_h": "mlp.fc2",
    "mlp.linear_fc2": "mlp.fc2",
}
_OTHER_NAMES = {
    "embedding.word_embeddings.weight": WORDS,
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "output_layer.weight": OUTPUT,
    **{
        f"{stack}.{norm}.{kind}": f"final_norm.{kind}"
        for stack in ("transformer", "encoder", "decoder")
        for norm in ("final_layernorm", "final_norm")
        for kind in ("weight", "bias")
    },
}
_SPLIT_ROWS = ("qkv.weight", "qkv.bias", "fc1.weight", "fc1.bias", WORDS, OUTPUT)
_SPLIT_COLUMNS = ("proj.weight", "fc2.weight")


def our_tensors(model: Mapping[str, Any], where: str) -> dict[str, torch.Tensor]:
    """One rank's tensors by our names; with SwiGLU gate and fc1 are still one.

    Raises:
        ValueError: one has a name that is not known.
    """
    found = {}
    for name, tensor in _flatten(model):
        ours = our_name(name)
        if ours is None:
            raise ValueError(f"{where}: {name} has no place in this model")
        found[ours] = tensor
    return found


def our_name(name: str) -> str | None:
    """What we call the tensor; None if we do not have it."""
    fused = _FUSED_NORM.fullmatch(name)  # Transformer Engine's layers begin with their norm
    if fused:
        name = f"{fused[1]}{_FUSED_NORMS[fused[2]]}.{fused[3]}"
    layer = _LAYER.fullmatch(name)
    if layer:
        return f"layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}" if layer[2] in _LAYER_NAMES else None
    return _OTHER_NAMES.get(name.removeprefix("language_model."))


def split_dim(name: str) -> int | None:
    """The dim that tensor-parallel ranks share out; None for what each has whole."""
    return 0 if name.endswith(_SPLIT_ROWS) else 1 if name.endswith(_SPLIT_COLUMNS) else None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """Tensors in nested dicts by their dotted names, without Transformer Engine's extra state."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor) and not str(name).endswith("_extra_state"):
            found.append((f"{prefix}{name}", value))
    return found
