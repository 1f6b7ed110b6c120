"""Train a SentencePiece tokenizer on a corpus.

python tools/train_tokenizer.py --input corpus.jsonl.gz --vocab-size 32000 --output-prefix my

This writes my.model. The input formats are the same as for preprocess_data.py.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.files import check_prefix, check_writable, write_whole
from megazpp.base.flags import Config, flag
from megazpp.base.program import program_of, say
from megazpp.data.documents import read_texts, readable_inputs, stop_or_skip
from megazpp.data.text import MAX_CHARACTERS, first_characters, train_sentencepiece
from megazpp.data.tokenizer_folder import MOST_TOKENS

SECONDS_BETWEEN_LINES = 5.0
MOST_THREADS = (1024, "SentencePiece's limit")  # largest number of threads, and the words that say what limits it


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig(Config):
    """Tokenizer training.

    The training text, and the output of the SentencePiece model.

    Attributes:
        input: JSON Lines, Parquet or text files, also compressed (.gz, .zst).
        json_key: field of a JSON object or Parquet column that holds the text.
        output_prefix: prefix of the output, which is PREFIX.model.
        vocab_size: number of pieces in the vocabulary.
        model_type: algorithm of SentencePiece.
        max_characters: number of characters to train on, in equal parts from the beginnings of the files.
        workers: number of SentencePiece's threads, which speed up unigram only; its pieces depend slightly on this
            number.
        on_error: action at a malformed line: abort, or report the line and skip it.
        character_coverage: share of the text's characters that the pieces cover, 0.98 to 1; all others are encoded as
            bytes (default: 0.9995, as in SentencePiece).
        minloglevel: log level of SentencePiece: 0 shows its whole log with the progress, 1 warnings, 2 errors; options
            in the log are SentencePiece's own, not flags of this program.
        overwrite: replace an existing tokenizer at the output's path.
    """

    input: tuple[str, ...] = flag(None, nargs="+", required=True)
    json_key: str = flag("text")
    output_prefix: str = flag(None, metavar="PREFIX", required=True)
    vocab_size: int = flag(32000, must_be="positive", most=MOST_TOKENS)
    model_type: Literal["bpe", "unigram"] = flag("bpe")
    max_characters: int = flag(MAX_CHARACTERS, must_be="positive")
    workers: int = flag(1, must_be="positive", most=MOST_THREADS)
    on_error: Literal["stop", "skip"] = flag("stop")
    character_coverage: float | None = flag(None)
    minloglevel: Literal[0, 1, 2] = flag(2)
    overwrite: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.character_coverage is not None and not 0.98 <= self.character_coverage <= 1.0:
            raise ValueError(f"--character-coverage {self.character_coverage} is not a fraction from 0.98 to 1")


@program_of(TrainTokenizerConfig)
def main(config: TrainTokenizerConfig) -> None:
    """Train the SentencePiece tokenizer on the input files, and print the path of its file."""
    check_prefix(config.output_prefix, "--output-prefix")
    output = Path(config.output_prefix + ".model").expanduser()
    check_writable(output, "--output-prefix", overwrite=config.overwrite)
    paths = readable_inputs(config.input, (config.json_key,))
    started = time.monotonic()
    model = train_sentencepiece(
        _texts(paths, config),
        config.vocab_size,
        model_type=config.model_type,
        num_threads=config.workers,
        minloglevel=config.minloglevel,
        character_coverage=config.character_coverage,
    )
    check_writable(output, "--output-prefix", overwrite=config.overwrite)  # again: another process may have written it
    write_whole(output, model)
    say(f"trained a tokenizer with {config.vocab_size} pieces in {time.monotonic() - started:.1f} s")
    print(output)


def _texts(paths: Sequence[Path], config: TrainTokenizerConfig) -> Iterator[str]:
    """Yield the training texts, equal parts of each file, and report the progress of reading every few seconds."""
    on_bad_line = functools.partial(stop_or_skip, on_error=config.on_error, log=say)
    started = said = time.monotonic()
    read = 0
    for path in paths:
        texts = read_texts(path, config.json_key, on_bad_line)
        for text in first_characters(texts, config.max_characters // len(paths)):
            yield text
            read += len(text)
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                say(f"read {read:,} characters, {read / (said - started) / 1e6:.1f} million per second: {path}")
    if read == 0:
        raise ValueError(f"--input {' '.join(config.input)} holds no text; give files with text")
    seconds = time.monotonic() - started
    say(f"read {read:,} characters in {seconds:.1f} s; training {config.vocab_size} pieces takes a while")


if __name__ == "__main__":
    raise SystemExit(main())
