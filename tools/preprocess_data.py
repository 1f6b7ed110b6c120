"""Tokenize a corpus into Megatron's .bin/.idx files.

python tools/preprocess_data.py --input corpus.jsonl.gz --output-prefix my --tokenizer-model my.model --append-eod
    --workers 8

This writes my_text_document.bin and my_text_document.idx. Inputs are JSON Lines (.jsonl, .json, .ndjson), Parquet
(.parquet) or plain text with one document per file (.txt). All of them except Parquet may be compressed (.gz, .zst). A
file with any other extension counts as JSON Lines if it begins with {.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.flag_tables import MegatronFlag
from megazpp.base.program import program_of, say
from megazpp.data.preprocess import PreprocessConfig, preprocess
from megazpp.data.tokenizer import TokenizerConfig

MEGATRON_FLAGS = {
    flag.name: flag
    for flag in (
        MegatronFlag("--partitions", "1", "ignored", "--workers process one input without partitions"),
        MegatronFlag("--keep-sequential-samples", "0", "ignored", "the order of documents is always kept"),
        MegatronFlag("--dataset-impl", "1", "only=mmap", "Megatron-LM no longer uses other formats"),
        MegatronFlag("--split-sentences", "0", "unsupported", "GPT models are trained on whole documents"),
    )
}


@program_of(PreprocessConfig, TokenizerConfig, megatron_flags=MEGATRON_FLAGS)
def main(config: PreprocessConfig, tokenizer: TokenizerConfig) -> None:
    """Tokenize the corpus, and print the prefix of each .bin/.idx pair."""
    progress = preprocess(config, tokenizer, say)
    say(progress)
    if progress.bad_lines:
        say(f"{progress.bad_lines:,} bad lines were skipped")
    for key in config.json_keys:
        print(f"{config.output_prefix}_{key}_document")


if __name__ == "__main__":
    raise SystemExit(main())
