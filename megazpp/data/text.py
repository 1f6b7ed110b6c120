"""Plain text to an indexed dataset, and to a tokenizer trained on it, each done once and kept.

`--text-path` takes what `documents.py` reads: a document is a JSON line's or a Parquet row's "text", or a file of text.
Cache keys are hashes of the contents, so a file may move, and an edited one is tokenized again. Every document ends
with the tokenizer's eod.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from megazpp.data.cache import build_once, cache_key
from megazpp.data.documents import BadLine, check_readable, kind_of, parse_block, read_blocks
from megazpp.data.indexed_dataset import optimal_dtype
from megazpp.data.indexed_dataset_builder import IndexedDatasetBuilder
from megazpp.data.tokenizer import SentencePieceTokenizer, Tokenizer

_CORPUS = Path(__file__).parent / "corpus"
_BUILTIN = "builtin:"
_KEYS = ("text",)
_MAX_TRAINING_CHARACTERS = 100_000_000  # more text does not make a better vocabulary, only a slower one
_MAX_LINE_CHARACTERS = 4096


def resolve_text_paths(values: Sequence[str]) -> list[Path]:
    """The files that --text-path names; `builtin:moby_dick` is the corpus shipped with the package.

    Raises:
        ValueError: a file does not exist or is a directory, or there is no such corpus.
    """
    return [_resolve(value) for value in values]


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one file that are not empty.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, or a line is no object with a string "text"; it is named.
    """
    check_readable(path, _KEYS)
    for block in read_blocks(path, _KEYS):
        for document in parse_block(block, _KEYS):
            if isinstance(document, BadLine):
                raise ValueError(f"--text-path {document}")
            if document[0]:
                yield document[0]


def cached_sentencepiece(
    paths: Sequence[Path], vocab_size: int, *, cache_dir: Path, announce: Callable[[str], None]
) -> SentencePieceTokenizer:
    """The SentencePiece tokenizer of `vocab_size` pieces trained on these files.

    Raises:
        ValueError: the text is empty, or does not support so many pieces.
    """
    key = cache_key(kind="sentencepiece-1", text=_content_hash(paths), vocab_size=vocab_size)

    path = cache_dir / "tokenizers" / f"{key}.model"

    def build(file: Path) -> None:
        file.write_bytes(train_sentencepiece(_all_documents(paths), vocab_size))

    if not path.exists():  # announced also by a process that then waits for the one that builds
        announce(f"training a SentencePiece tokenizer of {vocab_size} pieces on {_names(paths)}")
    return SentencePieceTokenizer(build_once(path, build).read_bytes())


def cached_indexed_dataset(
    paths: Sequence[Path], tokenizer: Tokenizer, *, cache_dir: Path, announce: Callable[[str], None]
) -> Path:
    """The prefix of the .bin/.idx pair of these files' documents, each ended by eod if the tokenizer has one.

    Raises:
        ValueError: the text is empty.
    """
    key = cache_key(kind="indexed-1", text=_content_hash(paths), tokenizer=tokenizer.identity)

    path = cache_dir / "text" / key

    def build(directory: Path) -> None:
        directory.mkdir()
        write_indexed_dataset(_all_documents(paths), tokenizer, directory / "text")

    if not path.exists():
        announce(f"tokenizing {_names(paths)}")
    return build_once(path, build) / "text"


def write_indexed_dataset(documents: Iterator[str], tokenizer: Tokenizer, prefix: Path) -> None:
    """Tokenize `documents` into `<prefix>.bin` and `<prefix>.idx`, each ended by eod if the tokenizer has one."""
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    with IndexedDatasetBuilder(prefix, optimal_dtype(tokenizer.vocab_size)) as builder:
        for text in documents:
            builder.add_document(tokenizer.encode(text) + end)
        builder.finalize()


def train_sentencepiece(documents: Iterator[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE model that gives any text back exactly (but for U+2581, its own sign for a space).

    No normalization, bytes for characters it has no piece for, and `<eod>` (id 1) for the end of a document.
    Training is deterministic, so every node gets the same model.

    Raises:
        ValueError: the text does not support `vocab_size` pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_lines(documents),
            model_writer=model,
            model_type="bpe",
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
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"--vocab-size {vocab_size} does not suit this text: {error}") from error
    return model.getvalue()


def _training_lines(documents: Iterator[str]) -> Iterator[str]:
    seen = 0
    for text in documents:
        for line in text.splitlines():
            for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                yield line[start : start + _MAX_LINE_CHARACTERS]
        seen += len(text)
        if seen >= _MAX_TRAINING_CHARACTERS:
            return


def _all_documents(paths: Sequence[Path]) -> Iterator[str]:
    empty = True
    for path in paths:
        for text in read_documents(path):
            empty = False
            yield text
    if empty:
        raise ValueError(f"--text-path {_names(paths)} holds no text")


def _resolve(value: str) -> Path:
    if value.startswith(_BUILTIN):
        path = _CORPUS / f"{value.removeprefix(_BUILTIN)}.jsonl"
        if not path.is_file():
            known = ", ".join(_BUILTIN + file.stem for file in sorted(_CORPUS.glob("*.jsonl")))
            raise ValueError(f"--text-path {value}: there is no such corpus; there are {known}")
        return path
    path = Path(value).expanduser()
    if not path.is_file():
        raise ValueError(f"--text-path {value} {'is a directory' if path.is_dir() else 'does not exist'}")
    return path


def _content_hash(paths: Sequence[Path]) -> list[str]:
    hashes = []
    for path in paths:
        with open(path, "rb") as file:
            hashes.append(kind_of(path) + hashlib.file_digest(file, "blake2b").hexdigest())
    return hashes


def _names(paths: Sequence[Path]) -> str:
    return " ".join(path.name for path in paths)
