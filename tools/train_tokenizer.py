"""Train a SentencePiece tokenizer on a corpus.

python tools/train_tokenizer.py --input corpus.jsonl.gz --vocab-size 32000 --output-prefix my

writes my.model. The inputs are those of preprocess_data.py.
"""

from __future__ import annotations

import signal
import sys

from entry import leave_with, run_tool, say

from megazpp.data.tokenizer_training import TrainTokenizerConfig, train_tokenizer


def main(argv: list[str]) -> int:
    return run_tool("train_tokenizer.py", __doc__, [TrainTokenizerConfig], run, argv)


def run(config: TrainTokenizerConfig) -> None:
    print(train_tokenizer(config, say))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SentencePiece's training would not hear Ctrl-C
    leave_with(lambda: main(sys.argv[1:]))
