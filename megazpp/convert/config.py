"""The flags of tools/convert_checkpoint.py, which converts models between checkpoint formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import check_words, flag


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Conversion.

    Source and target of a model's conversion, and their formats.
    """

    input: str | None = flag(None, "folder of a Hugging Face model, or of checkpoints of Megatron-LM or MegaZ++")
    output: str | None = flag(None, "folder to write, which must be new or empty")
    source: Literal["huggingface", "megatron", "megazpp"] | None = flag(
        None, "format of --input (default: detected from its files)", name="--from"
    )
    target: Literal["huggingface", "megazpp"] | None = flag(
        None, "format of --output (default: huggingface for --from megazpp, megazpp for other formats)", name="--to"
    )
    ckpt_step: int | None = flag(None, "convert the checkpoint of this iteration instead of the latest")
    adapter: str | None = flag(None, "folder of a LoRA adapter (adapter_config.json) to merge into the weights")
    keep_adapters: bool = flag(
        False, "write a LoRA run's base, and its adapters for PEFT into adapter/, instead of merging them"
    )

    def __post_init__(self) -> None:
        check_words(self)
