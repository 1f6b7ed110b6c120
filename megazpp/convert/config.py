"""The flags of tools/convert_checkpoint.py, which converts models between checkpoint formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import Config, flag


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Config):
    """Conversion.

    Source and target of a model's conversion, and their formats.

    Attributes:
        input: folder of a Hugging Face model, or of checkpoints of Megatron-LM or MegaZ++.
        output: folder to write, which must be new or empty.
        source: format of --input (default: detected from its files).
        target: format of --output (default: huggingface for --from megazpp, megazpp for other formats).
        ckpt_step: convert the checkpoint of this iteration instead of the latest.
        adapter: folder of a LoRA adapter (adapter_config.json) to merge into the weights.
        keep_adapters: write a LoRA run's base, and its adapters for PEFT into adapter/, instead of merging them.
    """

    input: str = flag(None, required=True, must_exist=True)
    output: str = flag(None, required=True)
    source: Literal["huggingface", "megatron", "megazpp"] | None = flag(None, name="--from")
    target: Literal["huggingface", "megazpp"] | None = flag(None, name="--to")
    ckpt_step: int | None = flag(None)
    adapter: str | None = flag(None, must_exist=True)
    keep_adapters: bool = flag(False)
