"""Convert the settings of rotary positions between a config.json of transformers and GPTConfig.

transformers 5 has these settings in `rope_parameters`, and transformers 4 in `rope_theta`, `rope_scaling` and
`partial_rotary_factor`. Written files contain both.
"""

from __future__ import annotations

import math
from typing import Any

from megazpp.convert.settings import Settings
from megazpp.model.attention import HIGH_TURNS, LOW_TURNS
from megazpp.model.config import GPTConfig

_LLAMA3 = {"low_freq_factor": LOW_TURNS, "high_freq_factor": HIGH_TURNS}
_ORIGINAL = "original_max_position_embeddings"
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", *_LLAMA3, _ORIGINAL, *_YARN)


def read_rotary(settings: Settings, *, partial: bool, scaled: bool) -> dict[str, Any]:
    """Return the fields of GPTConfig for the rotary positions (`rope_parameters`) of a Hugging Face config.json.

    Args:
        settings: values of the config.json, completed by transformers' defaults.
        partial: True if the model's family supports rotating only some channels of a head (partial_rotary_factor).
        scaled: True if the model's family supports scaled rotary frequencies for longer contexts, such as llama3 or
            yarn.
    Raises:
        ValueError: a value is missing or not supported. The message names its key.
    """
    rope = settings.part("rope_parameters")
    kind = rope.only("rope_type", "default", *(("llama3", "linear", "dynamic", "yarn") if scaled else ()))
    rope.absent(*(key for key in rope.values if key not in _ROPE_KEYS), empty=(None,))
    if not partial:
        rope.only("partial_rotary_factor", 1.0)
    percent = rope.positive("partial_rotary_factor", 1.0)
    found: dict[str, Any] = {"rotary_base": rope.positive("rope_theta"), "rotary_percent": percent}
    if kind == "default":
        return found
    factor = rope.positive("factor")
    if kind == "linear":
        return found | {"rotary_seq_len_interpolation_factor": factor}
    if kind == "dynamic":
        return found | {"rope_type": kind, "rotary_scaling_factor": factor}
    original = settings.count(_ORIGINAL, rope.count(_ORIGINAL))
    if kind == "llama3":
        for key, value in _LLAMA3.items():
            rope.only(key, value)
        scaling = {"rope_scaling_factor": factor, "rope_scaling_original_length": original}
        return found | {"use_rope_scaling": True, **scaling}
    rope.only("truncate", True)
    mscales = [rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    tempered = [1.0 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in mscales]
    default = tempered[0] / tempered[1] if all(mscales) else None
    attention = rope.positive("attention_factor", default) if default or "attention_factor" in rope else None
    turns = {f"yarn_{key}": rope.positive(key, value) for key, value in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    lengths: dict[str, Any] = {"yarn_original_max_position_embeddings": original, "yarn_attention_factor": attention}
    return found | turns | lengths | {"rope_type": kind, "rotary_scaling_factor": factor}


def write_rotary(config: GPTConfig, *, partial: bool, scaled: bool) -> dict[str, Any]:
    """Return the keys of config.json for a model's rotary positions, as transformers 4 and 5 read them.

    Args:
        config: architecture of the model.
        partial: True if the model's family supports rotating only some channels of a head (partial_rotary_factor).
        scaled: True if the model's family supports scaled rotary frequencies for longer contexts.
    """
    factor, original = config.rotary_scaling_factor, config.yarn_original_max_position_embeddings
    scaling: dict[str, Any] = {}
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling, **_LLAMA3}
        scaling[_ORIGINAL] = config.rope_scaling_original_length
    elif config.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    elif config.rope_type == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": factor}
    elif config.rope_type == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "attention_factor": config.yarn_attention_factor}
        scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow, _ORIGINAL: original}
    found = {"rope_theta": config.rotary_base} | ({"partial_rotary_factor": config.rotary_percent} if partial else {})
    scaling = {key: value for key, value in scaling.items() if scaled and value is not None}
    return {**found, "rope_scaling": scaling or None, "rope_parameters": {"rope_type": "default", **found, **scaling}}
