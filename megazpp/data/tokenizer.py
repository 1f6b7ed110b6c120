"""Tokenizers behind one small protocol: text to ids and back.

Everything downstream needs little of a tokenizer: its vocabulary size, the id that ends a document, encode, decode, an
identity to build cache keys from (tokenizers with one identity give the same ids), and the files it is made of.
Those are kept in memory under the names that they have in a Hugging Face folder, so that a checkpoint, or a converted
model, can have them as they were read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import sentencepiece

from megazpp.flags import check_positive, check_words, flag

try:
    import tokenizers
except ImportError:  # an optional dependency: HFTokenizer says how to get it
    tokenizers = None  # type: ignore[assignment]

# What the end of a document is called in tokenizers that have no configuration beside them, likeliest first.
_EOD_NAMES = ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

SENTENCEPIECE, DEFINITION = "tokenizer.model", "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
DESCRIPTION, CONFIG = "tokenizer_config.json", "config.json"
_VOCABULARIES = (DEFINITION, SENTENCEPIECE, VOCABULARY, MERGES)
# what else a Hugging Face folder says about text
_COMPANIONS = (
    DESCRIPTION,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer; without any of these one is trained on --text-path."""

    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "NullTokenizer",
        ]
        | None
    ) = flag(None, "kind of tokenizer (default: what --tokenizer-model looks like; trained if there is none)")
    tokenizer_model: str | None = flag(
        None, "a SentencePiece model, a Hugging Face tokenizer.json, or a directory that holds one"
    )
    vocab_size: int | None = flag(
        None, "pieces of a SentencePiece model to train (default 4096), or of the NullTokenizer (default 256)"
    )
    vocab_file: str | None = flag(None, "GPT-2's vocab.json, for GPT2BPETokenizer")
    merge_file: str | None = flag(None, "GPT-2's merges.txt, for GPT2BPETokenizer")

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "vocab_size")


class EncodedText(NamedTuple):
    """Ids, and for each the characters of the text that it stands for, from and to."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer.

    Attributes:
        vocab_size: ids are in [0, vocab_size); not padded.
        eod: the id that ends a document, or None if the tokenizer has none.
        eod_name: how eod is written in a text for `encode_spans`.
        identity: equal for tokenizers that give equal ids; part of cache keys.
        files: what it is made of, by name at Hugging Face; none where the flags say all.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...
    @property
    def eod_name(self) -> str | None: ...
    @property
    def identity(self) -> str: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any begin or end marks."""
        ...

    def encode_spans(self, text: str) -> EncodedText:
        """Ids of `text`, in which `eod_name` is eod, and where in it they are."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; marks such as eod give nothing."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece model, its file's content; a document ends with its `<eod>` piece if it has one, else its eos."""

    def __init__(self, model: bytes, companions: Mapping[str, bytes] | None = None) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._processor.get_piece_size()
        named, eos = self._processor.piece_to_id("<eod>"), self._processor.eos_id()
        self.eod = named if named != self._processor.unk_id() else eos if eos >= 0 else None
        self.eod_name: str | None = None if self.eod is None else self._processor.id_to_piece(self.eod)
        self.identity = f"sentencepiece-{hashlib.sha256(model).hexdigest()}"
        self.files = {**(companions or {}), SENTENCEPIECE: model}

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_spans(self, text: str) -> EncodedText:
        return _encode_around(self.eod, self.eod_name, text, self._encode_spans)

    def _encode_spans(self, text: str) -> EncodedText:
        if hasattr(self._processor, "encode_as_offset_mapping"):
            found = self._processor.encode_as_offset_mapping(text)
            return EncodedText(found["ids"], found["offsets"])
        pieces = self._processor.encode_as_immutable_proto(text).pieces  # type: ignore[attr-defined]  # before 0.2.2
        return EncodedText([piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces])

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])


class HFTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` package.

    Args:
        definition: the text of tokenizer.json.
        eod: the piece that ends a document; None looks for the usual names.
        files: what the definition was made from, if not from the text of tokenizer.json alone.
    Raises:
        ValueError: `tokenizers` is not installed, or `eod` is not in the vocabulary.
    """

    def __init__(self, definition: str, *, eod: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        if tokenizers is None:
            raise ValueError("this --tokenizer-type needs the package tokenizers: pip install tokenizers")
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if eod is not None and eod not in vocabulary:
            raise ValueError(f"the end-of-document piece {eod!r} is not in the tokenizer's vocabulary")
        names = _EOD_NAMES if eod is None else (eod,)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have holes
        self.num_marks: int = self._tokenizer.num_special_tokens_to_add(False)  # around a text, if they were wanted
        self.eod_name = next((name for name in names if name in vocabulary), None)
        self.eod = None if self.eod_name is None else vocabulary[self.eod_name]
        self.files = {DEFINITION: definition.encode()} if files is None else dict(files)
        if DEFINITION not in self.files:  # the package writes another definition from version to version
            definition = "".join(self.files[name].decode() for name in (VOCABULARY, MERGES))
        self.identity = f"huggingface-{hashlib.sha256(definition.encode()).hexdigest()}-{self.eod}"

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_spans(self, text: str) -> EncodedText:
        if self.eod in self._tokenizer.get_added_tokens_decoder():  # found in texts by the package
            return self._encode_spans(text)
        return _encode_around(self.eod, self.eod_name, text, self._encode_spans)

    def _encode_spans(self, text: str) -> EncodedText:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return EncodedText(encoding.ids, encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class ByteTokenizer:
    """One id per UTF-8 byte. It counts as Megatron's NullTokenizer does: eod is the id after all others.

    There are `num_ids` below eod, at least 256; those above 255 serve pre-tokenized and mock data only.
    """

    def __init__(self, num_ids: int = 256) -> None:
        if num_ids < 256:
            raise ValueError(f"--vocab-size {num_ids} is below the 256 byte values of --tokenizer-type NullTokenizer")
        self.vocab_size = num_ids + 1
        self.eod: int | None = num_ids
        self.eod_name: str | None = "<|endoftext|>"
        self.identity = f"bytes-{num_ids}"
        self.files: Mapping[str, bytes] = {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_spans(self, text: str) -> EncodedText:
        return _encode_around(self.eod, self.eod_name, text, self._encode_spans)

    def _encode_spans(self, text: str) -> EncodedText:
        spans = [(place, place + 1) for place, character in enumerate(text) for _ in character.encode()]
        return EncodedText(self.encode(text), spans)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


def _encode_around(
    eod: int | None, eod_name: str | None, text: str, encode_spans: Callable[[str], EncodedText]
) -> EncodedText:
    """`encode_spans` of what is before, between and after the places where eod is written."""
    whole, start = EncodedText([], []), 0
    for number, part in enumerate(text.split(eod_name) if eod_name else [text]):
        if number:
            assert eod is not None
            assert eod_name is not None
            whole.ids.append(eod)
            whole.spans.append((start, start + len(eod_name)))
            start += len(eod_name)
        ids, spans = encode_spans(part)
        whole.ids.extend(ids)
        whole.spans.extend((start + first, start + last) for first, last in spans)
        start += len(part)
    return whole


def load_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer that the flags name, or None when they name none (one is to be trained).

    Raises:
        ValueError: a file is missing or is not what it should be, or flags contradict each other.
    """
    kind = config.tokenizer_type or _guess_type(config)
    match kind:
        case None:
            return None
        case "NullTokenizer":
            return ByteTokenizer(256 if config.vocab_size is None else config.vocab_size)
        case "GPT2BPETokenizer":
            return _load_gpt2(config)
        case "HuggingFaceTokenizer":
            return _load_huggingface(_model_path(config, kind))
        case _:
            # GPTSentencePieceTokenizer, too: Megatron's has the same ids
            return None if config.tokenizer_model is None else _load_sentencepiece(_model_path(config, kind))


def names_tokenizer(config: TokenizerConfig) -> bool:
    """Whether the flags name a tokenizer; else one is trained, or comes from a checkpoint."""
    kind = config.tokenizer_type or _guess_type(config)
    trainable = kind in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer")
    return not trainable or config.tokenizer_model is not None


def find_tokenizer(folder: Path) -> TokenizerConfig:
    """Flags for the tokenizer in a Hugging Face folder, or beside a checkpoint; none if there is none we can use."""
    if (folder / DEFINITION).is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if (folder / SENTENCEPIECE).is_file():
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / SENTENCEPIECE))
    vocabulary, merges = folder / VOCABULARY, folder / MERGES
    if vocabulary.is_file() and merges.is_file():
        return TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocabulary), merge_file=str(merges))
    return TokenizerConfig()


def _guess_type(config: TokenizerConfig) -> str | None:
    if config.vocab_file or config.merge_file:
        return "GPT2BPETokenizer"
    if config.tokenizer_model is None:
        return None
    path = Path(config.tokenizer_model)
    return "HuggingFaceTokenizer" if path.suffix == ".json" or path.is_dir() else "SentencePieceTokenizer"


def _model_path(config: TokenizerConfig, kind: str) -> Path:
    if config.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model")
    path = Path(config.tokenizer_model).expanduser()
    if not path.exists():
        raise ValueError(f"--tokenizer-model {path} does not exist")
    return path


def _load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    if path.is_dir():
        raise ValueError(f"--tokenizer-model {path} is a directory; a SentencePiece model is a file")
    try:
        return SentencePieceTokenizer(path.read_bytes(), _read_companions(path))
    except RuntimeError as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model: {error}") from error


def _load_huggingface(path: Path) -> HFTokenizer:
    file = path / DEFINITION if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer-model {path}: there is no {file.name} in it")
    try:
        vocabularies = _read(path, _VOCABULARIES) if path.is_dir() else {DEFINITION: file.read_bytes()}
        files = _read_companions(file) | vocabularies
        eos = json.loads(files[DESCRIPTION]).get("eos_token") if DESCRIPTION in files else None
        eod = eos["content"] if isinstance(eos, dict) else eos
        return HFTokenizer(file.read_text(encoding="utf-8"), eod=eod, files=files)
    except Exception as error:  # the package raises bare Exception for a malformed definition
        raise ValueError(f"--tokenizer-model {file} is not a usable tokenizer.json: {error}") from error


def _load_gpt2(config: TokenizerConfig) -> HFTokenizer:
    if config.vocab_file is None or config.merge_file is None:
        raise ValueError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
    for name, file in (("--vocab-file", config.vocab_file), ("--merge-file", config.merge_file)):
        if not Path(file).is_file():
            raise ValueError(f"{name} {file} is not a file")
    if tokenizers is None:
        raise ValueError("--tokenizer-type GPT2BPETokenizer needs the package tokenizers: pip install tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer.from_file(config.vocab_file, config.merge_file)
    contents = {VOCABULARY: Path(config.vocab_file).read_bytes(), MERGES: Path(config.merge_file).read_bytes()}
    return HFTokenizer(tokenizer.to_str(), files=_read_companions(Path(config.vocab_file)) | contents)


def _read_companions(file: Path) -> dict[str, bytes]:
    """What is said about text beside a vocabulary: all of it where the file has its name at Hugging Face.

    Beside a definition of another name only tokenizer_config.json counts, which names its end of a document: other
    files of such a folder are somebody else's. Of config.json only the ids of tokens are taken.
    """
    if file.name not in _VOCABULARIES:
        return _read(file.parent, (DESCRIPTION,)) if file.suffix == ".json" else {}
    found = _read(file.parent, _COMPANIONS)
    try:
        settings = json.loads((file.parent / CONFIG).read_bytes())
    except (OSError, ValueError):
        settings = None
    known = settings.items() if isinstance(settings, dict) else ()
    ids = {name: value for name, value in known if name in _TOKEN_IDS}
    return found | ({CONFIG: (json.dumps(ids, indent=2) + "\n").encode()} if ids else {})


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
