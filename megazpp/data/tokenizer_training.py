"""Training a SentencePiece tokenizer on a stream of text."""

from __future__ import annotations

import functools
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import sentencepiece

from megazpp.data.documents import check_readable, read_texts, stop_or_skip
from megazpp.files import check_writable, write_whole
from megazpp.flags import check_positive, check_words, flag

MAX_CHARACTERS = 100_000_000  # more text does not make a better vocabulary, only a slower one
_MAX_LINE_CHARACTERS = 4096
_SECONDS_BETWEEN_LINES = 5.0
_IN_SENTENCEPIECE = re.compile(r"^INTERNAL: src/\S+\(\d+\) \[.*?\](?= |$)")  # which of its checks failed


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig:
    """What a SentencePiece tokenizer is trained on, and where to."""

    input: tuple[str, ...] = flag((), "JSON lines, Parquet or text files, also .gz and .zst", nargs="+")
    json_key: str = flag("text", "field that holds the text")
    output_prefix: str | None = flag(None, "the tokenizer is PREFIX.model", metavar="PREFIX")
    vocab_size: int = flag(32000, "pieces")
    model_type: Literal["bpe", "unigram"] = flag("bpe", "SentencePiece's algorithm")
    max_characters: int = flag(MAX_CHARACTERS, "how much text to use, in equal parts from the beginnings of the files")
    workers: int = flag(
        1, "SentencePiece's threads, which help with unigram; its pieces depend on their number a little"
    )
    on_error: Literal["stop", "skip"] = flag("stop", "what to do at a line that is no document; skip names it")
    minloglevel: Literal[0, 1, 2] = flag(
        1, "SentencePiece's: 0 shows its whole log, which says how far it is, 1 warnings, 2 errors"
    )
    overwrite: bool = flag(False, "replace a tokenizer of that name")

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "vocab_size", "max_characters", "workers")


def train_tokenizer(config: TrainTokenizerConfig, log: Callable[[str], None]) -> Path:
    """Train a tokenizer; the path of its model.

    Raises:
        ValueError: a flag or an input is not usable, or the text does not support so many pieces. Nothing is written
            then.
    """
    if not config.input:
        raise ValueError("--input is missing: the files to train on")
    if config.output_prefix is None:
        raise ValueError("--output-prefix is missing: where the tokenizer goes")
    output = Path(config.output_prefix + ".model").expanduser()
    check_writable(output, "--output-prefix", overwrite=config.overwrite)
    paths = [Path(value).expanduser() for value in config.input]
    for path in paths:
        check_readable(path, (config.json_key,))
    started = time.monotonic()
    model = train_sentencepiece(
        _texts(paths, config, log),
        config.vocab_size,
        model_type=config.model_type,
        num_threads=config.workers,
        min_log_level=config.minloglevel,
    )
    write_whole(output, model)
    log(f"a tokenizer of {config.vocab_size} pieces in {time.monotonic() - started:.1f} s")
    return output


def train_sentencepiece(
    documents: Iterable[str],
    vocab_size: int,
    *,
    model_type: Literal["bpe", "unigram"] = "bpe",
    num_threads: int = 1,
    min_log_level: int = 2,
) -> bytes:
    """A SentencePiece model that gives any text back exactly (but for U+2581, its own sign for a space).

    No normalization, bytes for characters it has no piece for, and `<eod>` (id 1) for the end of a document.
    With one thread equal text gives an equal model, so nodes agree.

    Args:
        min_log_level: of SentencePiece's log on stderr: 0 all of it, 1 warnings, 2 errors.
    Raises:
        ValueError: the text does not support `vocab_size` pieces. What `documents` raises comes out as it is.
    """
    model = io.BytesIO()
    failure: Exception | None = None  # SentencePiece makes a RuntimeError of what the lines raise
    blank = True

    def lines() -> Iterator[str]:
        nonlocal failure, blank
        try:
            for text in documents:
                for line in text.splitlines():
                    for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                        blank = False
                        yield line[start : start + _MAX_LINE_CHARACTERS]
        except Exception as error:
            failure = error
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=4 * _MAX_LINE_CHARACTERS,  # in bytes; longer lines would be dropped
            unk_id=0,
            eos_id=1,
            eos_piece="<eod>",
            bos_id=-1,
            pad_id=-1,
            num_threads=num_threads,
            minloglevel=min_log_level,
        )
    except RuntimeError as error:
        if failure is not None:
            raise failure from None
        reason = "it is blank" if blank else _IN_SENTENCEPIECE.sub("", str(error)).strip() or str(error)
        raise ValueError(f"--vocab-size {vocab_size} does not suit this text: {reason}") from error
    return model.getvalue()


def first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The first `limit` characters of the texts."""
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return


def _texts(paths: Sequence[Path], config: TrainTokenizerConfig, log: Callable[[str], None]) -> Iterator[str]:
    """Equal parts of the files, with a line now and then about how much was read."""
    on_bad_line = functools.partial(stop_or_skip, on_error=config.on_error, log=log)
    started = said = time.monotonic()
    read = 0
    for path in paths:
        texts = read_texts(path, config.json_key, on_bad_line)
        for text in first_characters(texts, config.max_characters // len(paths)):
            yield text
            read += len(text)
            if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                log(f"read {read:,} characters, {read / (said - started) / 1e6:.1f} million a second: {path}")
    if read == 0:
        raise ValueError(f"--input {' '.join(config.input)} holds no text")
    seconds = time.monotonic() - started
    log(f"read {read:,} characters in {seconds:.1f} s; training {config.vocab_size} pieces takes a while")
