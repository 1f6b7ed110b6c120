"""Command-line flags of LoRA, for post-training runs that train low-rank adapters on frozen weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import Config, flag


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """LoRA.

    Flags for training low-rank adapters on frozen weights instead of training all weights.

    Attributes:
        lora_r: rank of the adapters; trains adapters only (default: all weights are trained).
        lora_alpha: numerator of the factor of an adapter's output, alpha / rank.
        lora_dropout: dropout probability of an adapter's input, for --objective sft.
        lora_target_modules: layers with an adapter, by transformers' names (q_proj ... down_proj; c_attn, c_fc, c_proj
            of a GPT-2), or all-linear (default: q_proj v_proj, or c_attn).
        lora_load: folder of adapters to train further, from PEFT or from a LoRA run (adapter/), on the base of --load;
            the reference model is the base with these adapters.
        base_weight_bits: bits per element of the frozen base's matrices; 8 and 4 round the base and the reference,
            equally on every layout (default: the compute dtype's bits, without rounding).
    """

    lora_r: int | None = flag(None, must_be="positive")
    lora_alpha: float = flag(8.0, needs="--lora-r", must_be="positive")
    lora_dropout: float = flag(0.0, needs="--lora-r", must_be="below one")
    lora_target_modules: tuple[str, ...] | None = flag(None, nargs="+", needs="--lora-r")
    lora_load: str | None = flag(None, must_exist=True)
    base_weight_bits: Literal[16, 8, 4] | None = flag(None, needs="--lora-r")
