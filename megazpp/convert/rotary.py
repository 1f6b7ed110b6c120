"""Rotary frequencies in a config.json of transformers: read as its versions 4 and 5 write them, written as 4 does."""

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


def read_rotary(
    settings: Settings, positions: int, *, theta: float = 10000.0, partial: bool = False, scaled: bool = True
) -> dict[str, Any]:
    """Read fields of GPTConfig from `rope_scaling`, or else `rope_parameters`, as transformers 5 does.

    Args:
        theta: default of rope_theta.
        partial: partial_rotary_factor may be given.
        scaled: a rope_type for longer contexts may be given.
    """
    name = "rope_scaling" if settings.part("rope_scaling").values else "rope_parameters"
    rope = settings.part(name)
    rope.absent(*(key for key in rope.values if key not in _ROPE_KEYS), empty=(None,))
    kinds = ("default", "llama3", "linear", "dynamic", "yarn") if scaled else ("default",)
    kind = rope.only("rope_type" if "rope_type" in rope else "type", *kinds)
    if not partial:
        settings.only("partial_rotary_factor", 1.0)
        rope.only("partial_rotary_factor", 1.0)
    percent = rope.positive("partial_rotary_factor", settings.positive("partial_rotary_factor", 1.0))
    found: dict[str, Any] = {"rotary_base": rope.positive("rope_theta", settings.positive("rope_theta", theta))}
    found["rotary_percent"] = percent
    if kind == "default":
        return found
    factor = rope.positive("factor")
    original = settings.count(_ORIGINAL, rope.count(_ORIGINAL, positions))
    if kind == "llama3":
        for key, value in _LLAMA3.items():
            rope.only(key, value)
        scaling = {"rope_scaling_factor": factor, "rope_scaling_original_length": original}
        return found | {"use_rope_scaling": True, **scaling}
    if kind == "linear":
        return found | {"rotary_seq_len_interpolation_factor": factor}
    found |= {"rope_type": kind, "rotary_scaling_factor": factor}
    if kind == "dynamic":
        return found
    rope.only("truncate", True)
    mscales = [rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    tempered = [1.0 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in mscales]
    default = tempered[0] / tempered[1] if all(mscales) else None
    attention = rope.positive("attention_factor", default) if default or "attention_factor" in rope else None
    turns = {f"yarn_{key}": rope.positive(key, value) for key, value in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    return found | turns | {"yarn_original_max_position_embeddings": original, "yarn_attention_factor": attention}


def write_scaling(config: GPTConfig) -> dict[str, Any] | None:
    """The opposite of `read_rotary`, without base and share of channels: rope_scaling of a config.json."""
    factor, original = config.rotary_scaling_factor, config.yarn_original_max_position_embeddings
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling, **_LLAMA3}
        return {**scaling, _ORIGINAL: config.rope_scaling_original_length}
    if config.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    if config.rope_type == "rope":
        return None
    if config.rope_type == "dynamic":
        return {"rope_type": "dynamic", "factor": factor}
    given = {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow, _ORIGINAL: original}
    attention = {} if config.yarn_attention_factor is None else {"attention_factor": config.yarn_attention_factor}
    return {"rope_type": "yarn", "factor": factor, **given, **attention}
