"""Convert a model: from Hugging Face or Megatron-LM to a checkpoint of ours, and back out to Hugging Face.

python tools/convert_checkpoint.py --input gpt2/ --output checkpoints/                     config.json and safetensors
python tools/convert_checkpoint.py --input megatron_checkpoints/ --output checkpoints/     mp_rank_XX
python tools/convert_checkpoint.py --input checkpoints/ --output gpt2_trained/             to Hugging Face
python tools/convert_checkpoint.py --input checkpoints/ --output merged/ --adapter lora/   with PEFT's LoRA merged
python tools/convert_checkpoint.py --input lora_run/ --output base/ --keep-adapters        base, and adapter/ for PEFT

GPT-2, Llama, Mistral, Qwen2, Qwen3 and reward models of them (...ForSequenceClassification). What comes in is loaded
with any tensor-parallel size: pretrain_gpt.py --load checkpoints/ --finetune --use-checkpoint-args, tools/generate.py,
tools/evaluate.py. Types of numbers stay as they are, tensors go through one at a time, and the output appears whole or
not at all.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from megazpp.base.program import program_of, say
from megazpp.convert.convert import ConvertConfig, convert
from megazpp.data.tokenizer import TokenizerConfig


@program_of(ConvertConfig, TokenizerConfig, description=(__doc__ or "").partition("\n")[0])
def main(config: ConvertConfig, tokenizer: TokenizerConfig) -> None:
    print(convert(config, tokenizer, say))


if __name__ == "__main__":
    raise SystemExit(main())
