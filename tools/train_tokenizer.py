"""Train a SentencePiece tokenizer on a corpus.

python tools/train_tokenizer.py --input corpus.jsonl.gz --vocab-size 32000 --output-prefix my

writes my.model. The inputs are those of preprocess_data.py.
"""

from __future__ import annotations

import signal

from megazpp.data.tokenizer_training import TrainTokenizerConfig, train_tokenizer
from megazpp.program import program_of, say


@program_of(TrainTokenizerConfig)
def main(config: TrainTokenizerConfig) -> None:
    print(train_tokenizer(config, say))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SentencePiece's training would not hear Ctrl-C
    raise SystemExit(main())
