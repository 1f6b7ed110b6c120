"""Train a tokenizer on the text files of --text-path, and tokenize them into an indexed dataset. Both are cached.

`--text-path` takes the file formats of data/documents.py. A document is the field "text" of a JSON line or Parquet row,
or a complete plain text file. Cache keys contain hashes of the files' contents. Moved files are therefore found in the
cache, and edited files are tokenized again.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megazpp.base.files import write_synced
from megazpp.base.program import Problems, handling
from megazpp.data.cache import build_once, cache_key, errors_of_damage
from megazpp.data.documents import BadLine, check_readable, kind_of, missing_file, read_texts
from megazpp.data.indexed_builder import IndexedDatasetBuilder, optimal_dtype
from megazpp.data.indexed_dataset import IndexedDataset, pair_paths
from megazpp.data.tokenizer import SentencePieceTokenizer, Tokenizer, document_end

MAX_CHARACTERS = 100_000_000  # maximum to train a tokenizer on; more text does not improve the vocabulary
_MAX_LINE_CHARACTERS = 4096  # longer lines are split into pieces of this size for SentencePiece's trainer
# The sentence in SentencePiece's error messages that `_in_our_flags` replaces
_SENTENCEPIECE_ADVICE = "Increase vocab_size or decrease character_coverage with --character_coverage option."
# The place in SentencePiece's source code with which its error messages begin
_IN_SENTENCEPIECE = re.compile(r"(?i)^internal: src/\S+\(\d+\) \[.*?\](?= |$)")
_CORPUS = Path(__file__).parent / "corpus"
BUILTIN = "builtin:"
_KEY = "text"
_FLAG = "--text-path"


def resolve_text_paths(values: Sequence[str]) -> list[Path]:
    """Return the paths of the files that --text-path names. `builtin:moby_dick` names a corpus inside the package.

    Raises:
        ValueError: a file or a built-in corpus does not exist.
    """
    paths, problems = list[Path](), Problems()
    for value in values:
        path = Path(value).expanduser()
        with problems:
            if value.startswith(BUILTIN):
                path = _CORPUS / f"{value.removeprefix(BUILTIN)}.jsonl"
                if not path.is_file():
                    known = ", ".join(BUILTIN + file.stem for file in sorted(_CORPUS.glob("*.jsonl")))
                    raise ValueError(f"--text-path {value}: there is no such corpus; there are {known}")
            elif not path.is_file():
                raise ValueError(f"--text-path {missing_file(path)}")
        paths.append(path)
    problems.raise_all()
    return paths


def read_documents(path: Path, *, flag_name: str = _FLAG) -> Iterator[str]:
    """Yield the texts of a file of documents, except empty ones.

    Args:
        path: file to read, in a format of data/documents.py.
        flag_name: flag that names the file, for messages.
    Raises:
        ValueError: the file cannot be read, or a line is malformed. The message names the flag, the file and the line.
    """

    def refuse(bad: BadLine) -> None:
        raise ValueError(f"{flag_name} {bad}")

    try:
        check_readable(path, (_KEY,))
    except ValueError as error:
        raise ValueError(f"{flag_name} {error}") from error
    yield from filter(None, read_texts(path, _KEY, refuse))


def check_texts(paths: Sequence[Path], *, flag_name: str = _FLAG) -> None:
    """Read each text file up to its first non-empty text; raise ValueError for a malformed line, or if all are empty.

    Args:
        paths: files to check before the run begins.
        flag_name: flag that names the files, for messages.
    """
    first = [next(read_documents(path, flag_name=flag_name), None) for path in paths]
    if not any(first):
        raise ValueError(f"{flag_name} {_names(paths)} contains only empty documents: name a file with text")


def check_input(path: str) -> None:
    """Check that --input names a text with content, or the prefix of a .bin/.idx pair of files.

    Raises:
        ValueError: `path` names neither a text nor a .bin/.idx pair, or the text is empty.
    """
    if is_pair(path):
        IndexedDataset(Path(path).expanduser())
        return
    try:
        files = resolve_text_paths([path])
    except ValueError as error:
        raise ValueError(
            f"--input {path} is neither a text nor the prefix of a .bin/.idx pair: give an existing text "
            "file, or the pair's path without .bin"
        ) from error
    check_texts(files, flag_name="--input")


def is_pair(path: str) -> bool:
    """Return True if --input is the prefix of a .bin/.idx pair: one of the files PREFIX.bin and PREFIX.idx exists."""
    prefix = Path(path).expanduser()
    return prefix.name != "" and any(file.exists() for file in pair_paths(prefix))


def cached_sentencepiece(
    paths: Sequence[Path], vocab_size: int, *, exact: bool, cache_dir: Path, log: Callable[[str], None]
) -> SentencePieceTokenizer:
    """Return a SentencePiece tokenizer trained on text files. It comes from the cache if it has been trained before.

    Args:
        paths: text files to train on.
        vocab_size: number of pieces of the tokenizer's vocabulary.
        exact: True if a text that does not support `vocab_size` pieces is an error. If False, the tokenizer gets the
            nearest number of pieces that the text supports, and a note is logged.
        cache_dir: cache directory, with trained tokenizers in the folder `tokenizers`.
        log: function that prints a line: the start of a training, or the note about another number of pieces.
    Raises:
        ValueError: the files have no text, a line is malformed, or the text does not support `vocab_size` pieces.
    """

    def train(size: int) -> bytes:
        return train_sentencepiece(first_characters(_all_documents(paths), MAX_CHARACTERS), size)

    def build(file: Path) -> None:
        try:
            model = train(vocab_size)
        except ValueError as error:
            # SentencePiece's error message contains the number of pieces that the text supports
            limit = re.search(r" (?:<=|vs) (\d+)\.", str(error))
            if exact or limit is None:
                raise
            model = train(int(limit[1]))
        write_synced(file, model)

    key = cache_key(kind="sentencepiece-1", text=content_hash(paths), vocab_size=vocab_size, exact=exact)
    path = cache_dir / "tokenizers" / f"{key}.model"
    if not path.exists():  # one process trains the tokenizer; others wait for it, and log the same line
        log(f"training a SentencePiece tokenizer of {vocab_size} pieces on {_names(paths)}")
    build_once(path, build)
    with errors_of_damage(path):
        tokenizer = SentencePieceTokenizer(path.read_bytes())
    if tokenizer.vocab_size != vocab_size:
        log(f"note: the tokenizer has {tokenizer.vocab_size} pieces, because {vocab_size} do not suit this text")
    return tokenizer


def train_sentencepiece(documents: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """Train a SentencePiece model. The model decodes each encoded text exactly, unless the text contains U+2581.

    SentencePiece uses U+2581 for spaces. The model does not normalize text, encodes characters without a piece as
    bytes, and has the piece `<eod>` (id 1) for the end of a document. The training has one thread by default, because
    equal text then gives an equal model on all nodes.

    Args:
        documents: texts to train on.
        vocab_size: number of pieces of the model's vocabulary.
        **options: further options of SentencePiece's trainer. The defaults are BPE, one thread, and a log of errors
            only. None leaves an option out. This matters for character_coverage: an explicit 0.9995 changes the bytes
            of the model, and so its identity, although 0.9995 is the default. If character_coverage is among the
            options, even as None, error messages also recommend the flag --character-coverage.
    Returns:
        The content of the model's file.
    Raises:
        ValueError: the text does not support `vocab_size` pieces.
        Exception: an error that reading `documents` raised.
    """
    # ---- choose the trainer's options, and define how documents are cut into lines of limited length
    model, has_coverage = io.BytesIO(), "character_coverage" in options
    defaults: dict[str, Any] = {"model_type": "bpe", "num_threads": 1, "minloglevel": 2}
    options = defaults | options
    failure: Exception | None = None  # error that reading `documents` raised; SentencePiece replaces its type
    blank = True

    def lines() -> Iterator[str]:
        nonlocal failure, blank
        try:
            for line in itertools.chain.from_iterable(map(str.splitlines, documents)):
                for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                    blank = False
                    yield line[start : start + _MAX_LINE_CHARACTERS]
        except Exception as error:
            failure = error
            raise

    # ---- train the SentencePiece model
    try:
        with handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL):
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines(),
                model_writer=model,
                vocab_size=vocab_size,
                byte_fallback=True,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                max_sentence_length=4 * _MAX_LINE_CHARACTERS,  # in bytes; SentencePiece drops longer lines
                unk_id=0,
                eos_id=1,
                eos_piece="<eod>",
                bos_id=-1,
                pad_id=-1,
                **{name: value for name, value in options.items() if value is not None},
            )
    except RuntimeError as error:
        if failure is not None:
            raise failure from None
        reason = "it is blank" if blank else _IN_SENTENCEPIECE.sub("", str(error)).strip() or str(error)
        reason = _in_our_flags(reason, has_coverage=has_coverage)
        raise ValueError(f"--vocab-size {vocab_size} does not suit this text: {reason}") from error
    return model.getvalue()


def _in_our_flags(advice: str, *, has_coverage: bool) -> str:
    """Replace the options of SentencePiece's trainer in its error message by the flags of this project.

    Sentences with an option that has no such flag are removed.

    Args:
        advice: error message of SentencePiece.
        has_coverage: True if the program has the flag --character-coverage.
    """
    ours = "Increase --vocab-size" + (" or decrease --character-coverage." if has_coverage else ".")
    advice = advice.replace(_SENTENCEPIECE_ADVICE, ours)
    known = {"--vocab-size", "--character-coverage"}
    return " ".join(part for part in re.split(r"(?<=\.) ", advice) if {*re.findall(r"--[\w-]+", part)} <= known)


def first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield texts until they have `limit` characters in total. The last text is cut to reach exactly `limit`."""
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return


def cached_indexed_dataset(
    paths: Sequence[Path], tokenizer: Tokenizer, *, cache_dir: Path, log: Callable[[str], None], flag_name: str = _FLAG
) -> Path:
    """Tokenize text files into a .bin/.idx pair in the cache, unless it exists, and return the prefix of the pair.

    Args:
        paths: text files, in formats of data/documents.py.
        tokenizer: tokenizer of the texts.
        cache_dir: cache directory, with tokenized text in the folder `text`.
        log: function that prints a line before the tokenization.
        flag_name: flag that names the files, for messages.
    Raises:
        ValueError: all files are empty, or a line is malformed.
    """

    def build(directory: Path) -> None:
        directory.mkdir()
        write_indexed_dataset(_all_documents(paths, flag_name), tokenizer, directory / "text")

    path = cache_dir / "text" / cache_key(kind="indexed-1", text=content_hash(paths), tokenizer=tokenizer.identity)
    if not path.exists():
        log(f"tokenizing {_names(paths)}")
    build_once(path, build)
    with errors_of_damage(path):
        return IndexedDataset(path / "text").prefix


def write_indexed_dataset(documents: Iterator[str], tokenizer: Tokenizer, prefix: Path) -> None:
    """Tokenize texts into `<prefix>.bin` and `<prefix>.idx`, and end each document with eod if the tokenizer has it."""
    end = document_end(tokenizer)
    with IndexedDatasetBuilder(prefix, optimal_dtype(tokenizer.vocab_size)) as builder:
        for text in documents:
            builder.add_document(tokenizer.encode(text) + end)
        builder.finalize()


def _all_documents(paths: Sequence[Path], flag_name: str = _FLAG) -> Iterator[str]:
    texts = itertools.chain.from_iterable(read_documents(path, flag_name=flag_name) for path in paths)
    if (first := next(texts, None)) is None:
        raise ValueError(f"{flag_name} {_names(paths)} contains only empty documents: name a file with text")
    yield from itertools.chain([first], texts)


def content_hash(paths: Sequence[Path]) -> list[str]:
    """Return for each file its format followed by a hash of its content, for cache keys.

    A process reads a file once, and again only if the file's modification time or size differs at a later call.
    """
    states = [(path, path.stat()) for path in paths]
    return [kind_of(path) + _content_hash(path.resolve(), state.st_mtime_ns, state.st_size) for path, state in states]


@functools.lru_cache(maxsize=1024)
def _content_hash(path: Path, modified_ns: int, size: int) -> str:
    """Return a hash of a file's content, as hexadecimal digits.

    The modification time and the size are arguments only for `lru_cache`, so that a changed file is hashed again.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _names(paths: Sequence[Path]) -> str:
    return " ".join(path.name for path in paths)
