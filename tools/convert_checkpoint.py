"""Convert a model: from Hugging Face or Megatron-LM to a checkpoint of ours, and back out to Hugging Face.

python tools/convert_checkpoint.py --input gpt2/ --output checkpoints/                     config.json and safetensors
python tools/convert_checkpoint.py --input megatron_checkpoints/ --output checkpoints/     mp_rank_XX
python tools/convert_checkpoint.py --input checkpoints/ --output gpt2_trained/             to Hugging Face

GPT-2, Llama, Mistral, Qwen2 and Qwen3. What comes in is loaded with any tensor-parallel size: pretrain_gpt.py --load
checkpoints/ --finetune --use-checkpoint-args, tools/generate.py, tools/evaluate.py. Types of numbers stay as they are,
tensors go through one at a time, and the output appears whole or not at all.
"""

from __future__ import annotations

import sys

from entry import leave_with, run_tool, say

from megazpp.convert.convert import ConvertConfig, convert
from megazpp.data.tokenizer import TokenizerConfig


def main(argv: list[str]) -> int:
    return run_tool(
        "convert_checkpoint.py",
        (__doc__ or "").partition("\n")[0],
        [ConvertConfig, TokenizerConfig],
        lambda config, tokenizer: print(convert(config, tokenizer, say)),
        argv,
    )


if __name__ == "__main__":
    leave_with(lambda: main(sys.argv[1:]))
