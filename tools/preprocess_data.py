"""Tokenize a corpus into Megatron's .bin/.idx files.

python tools/preprocess_data.py --input corpus.jsonl.gz --output-prefix my --tokenizer-model my.model --append-eod
    --workers 8

writes my_text_document.bin and .idx. Inputs are JSON lines (.jsonl, .json, .ndjson), Parquet (.parquet) or text, one
document a file (.txt), all but Parquet also as .gz and .zst; what has another name is JSON lines if it begins with {.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from megazpp.base.command_line import MegatronFlag
from megazpp.base.program import program_of, say
from megazpp.data.preprocess import PreprocessConfig, preprocess
from megazpp.data.tokenizer import TokenizerConfig

MEGATRON_FLAGS = {
    flag.name: flag
    for flag in (
        MegatronFlag("--partitions", "1", "ignored", "--workers share one input as it is"),
        MegatronFlag("--keep-sequential-samples", "0", "ignored", "the order is always kept"),
        MegatronFlag("--dataset-impl", "1", "only=mmap", "the other formats are Megatron's past"),
        MegatronFlag("--split-sentences", "0", "unsupported", "a GPT takes documents whole"),
    )
}


@program_of(PreprocessConfig, TokenizerConfig, megatron_flags=MEGATRON_FLAGS)
def main(config: PreprocessConfig, tokenizer: TokenizerConfig) -> None:
    progress = preprocess(config, tokenizer, say)
    say(progress)
    if progress.bad_lines:
        say(f"{progress.bad_lines:,} bad lines were skipped")
    for key in config.json_keys:
        print(f"{config.output_prefix}_{key}_document")


if __name__ == "__main__":
    raise SystemExit(main())
