"""Convert a Hugging Face or Megatron-LM model to a checkpoint of this project, or such a checkpoint to Hugging Face.

python tools/convert_checkpoint.py --input gpt2/ --output checkpoints/                     config.json and safetensors
python tools/convert_checkpoint.py --input megatron_checkpoints/ --output checkpoints/     mp_rank_XX
python tools/convert_checkpoint.py --input checkpoints/ --output gpt2_trained/             to Hugging Face
python tools/convert_checkpoint.py --input checkpoints/ --output merged/ --adapter lora/   with PEFT's LoRA merged
python tools/convert_checkpoint.py --input lora_run/ --output base/ --keep-adapters        base, and adapter/ for PEFT

docs/reference/features.md lists the supported architectures. Reward models based on them
(...ForSequenceClassification) are supported too. A converted checkpoint can be loaded with any tensor-parallel size by
pretrain_gpt.py --load checkpoints/ --finetune --use-checkpoint-args, tools/generate.py and tools/evaluate.py.

Dtypes are preserved. Tensors are converted one at a time, so little memory is needed. The output appears atomically.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.program import program_of, say
from megazpp.convert.config import ConvertConfig
from megazpp.data.tokenizer_folder import TokenizerConfig
from megazpp.features import FEATURES
from megazpp.run.arguments import FeatureConfig, section_configs
from megazpp.run.feature import weight_opener

SECTIONS = section_configs([feature for feature in FEATURES if feature.opens_weights])


@program_of(ConvertConfig, TokenizerConfig, *SECTIONS, description=(__doc__ or "").partition("\n")[0])
def main(config: ConvertConfig, tokenizer: TokenizerConfig, *sections: FeatureConfig) -> None:
    """Convert the model and print a line that describes the result."""
    from megazpp.convert.convert import convert  # imports torch, which takes seconds

    print(convert(config, tokenizer, say, opener=weight_opener(FEATURES, sections)))


if __name__ == "__main__":
    raise SystemExit(main())
