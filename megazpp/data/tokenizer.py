"""Tokenizers: the one that the flags name, read from its files; text to ids and back, and special tokens around it.

A Hugging Face folder gives the ids that transformers gives for it, with the special tokens that its files put around a
text (`Marks`): <s> before a prompt, and before each document of a dataset, as Megatron's HuggingFaceTokenizer has it.
One file of more than 300 lines, because all kinds of tokenizers implement the private methods of `Tokenizer`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from megazpp.data.tokenizer_folder import (
    DEFINITION,
    DESCRIPTION,
    MERGES,
    SENTENCEPIECE,
    VOCABULARIES,
    VOCABULARY,
    Marks,
    TokenizerConfig,
    do_as_transformers,
    names_tokenizer,
    read_companions,
    read_description,
    read_files,
    tokenizers,
    wanted_marks,
)

# names of the end of a document in tokenizers that have no configuration beside them, likeliest first
_EOD_NAMES = ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


def load_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer that the flags name, or None when they name none (one is to be trained).

    Raises:
        ValueError: a file is missing or of another kind, or flags contradict each other.
    """
    tokenizer: Tokenizer
    if not names_tokenizer(config):
        return None
    if config.kind == "NullTokenizer":
        tokenizer = ByteTokenizer(256 if config.vocab_size is None else config.vocab_size)
    elif config.kind == "GPT2BPETokenizer":
        tokenizer = _load_gpt2(config)
    elif config.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {config.kind} needs --tokenizer-model")
    else:
        path = Path(config.tokenizer_model).expanduser()
        if not path.exists():
            raise ValueError(f"--tokenizer-model {path} does not exist")
        # GPTSentencePieceTokenizer, too: Megatron's has the same ids
        load = _load_huggingface if config.kind == "HuggingFaceTokenizer" else _load_sentencepiece
        tokenizer = load(path, add_special_tokens=config.add_special_tokens)
    if config.model_vocab_size is not None:
        tokenizer.fit(config.model_vocab_size)
    return tokenizer


def document_end(tokenizer: Tokenizer) -> list[int]:
    """The ids after a document in training data: eod, unless its marks end with that already."""
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    return [] if tokenizer.marks.used and tokenizer.marks.after[-1:] == end else end


def marks_note(tokenizer: Tokenizer) -> str | None:
    """A line on special tokens around texts, if the tokenizer's files say there are."""
    before, after, used = tokenizer.marks
    does = "texts get" if used else "--no-add-special-tokens: texts do not get"
    marks = " and ".join(f"{ids} {where}" for ids, where in ((before, "before"), (after, "after")) if ids)
    return f"{does} the special tokens {marks} them that transformers gives them" if marks else None


def _load_sentencepiece(path: Path, *, add_special_tokens: bool) -> SentencePieceTokenizer:
    if path.is_dir():
        raise ValueError(f"--tokenizer-model {path} is a directory; a SentencePiece model is a file")
    try:
        return SentencePieceTokenizer(path.read_bytes(), read_companions(path), add_special_tokens=add_special_tokens)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model: {error}") from error


def _load_huggingface(path: Path, *, add_special_tokens: bool) -> HFTokenizer:
    file = path / DEFINITION if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer-model {path}: there is no {file.name} in it")
    try:
        vocabularies = read_files(path, VOCABULARIES) if path.is_dir() else {DEFINITION: file.read_bytes()}
        files = read_companions(file) | vocabularies
        eos = read_description(files).get("eos_token")
        eod, text = eos["content"] if isinstance(eos, dict) else eos, file.read_text(encoding="utf-8")
        return HFTokenizer(text, eod=eod, files=files, add_special_tokens=add_special_tokens)
    except Exception as error:  # the package raises bare Exception for a malformed definition
        raise ValueError(f"--tokenizer-model {file} is not a usable tokenizer.json: {error}") from error


def _load_gpt2(config: TokenizerConfig) -> HFTokenizer:
    if config.vocab_file is None or config.merge_file is None:
        raise ValueError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
    for name, file in (("--vocab-file", config.vocab_file), ("--merge-file", config.merge_file)):
        if not Path(file).is_file():
            raise ValueError(f"{name} {file} is not a file")
    _require_tokenizers()
    tokenizer = tokenizers.ByteLevelBPETokenizer.from_file(config.vocab_file, config.merge_file)
    contents = {VOCABULARY: Path(config.vocab_file).read_bytes(), MERGES: Path(config.merge_file).read_bytes()}
    files = read_companions(Path(config.vocab_file)) | contents
    return HFTokenizer(tokenizer.to_str(), files=files, add_special_tokens=config.add_special_tokens)


def _require_tokenizers() -> None:
    if tokenizers is None:
        raise ValueError("this --tokenizer-type needs the package tokenizers: pip install tokenizers")


# ---- kinds ---------------------------------------------------------------------------------------------------------


class EncodedText(NamedTuple):
    """Ids, and for each the characters of the text that it stands for, from and to."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Tokenizer:
    """Text to ids and back."""

    vocab_size: int  # of the model, not padded; ids of texts are in [0, vocab_size)
    eod: int | None  # the id that ends a document, if there is one
    eod_name: str | None  # the way that eod is written in a text for `encode_spans`
    identity: str  # equal for tokenizers that give equal ids; part of cache keys
    files: Mapping[str, bytes]  # by name at Hugging Face; none where the flags say all
    marks = Marks([], [], used=False)  # around a text
    _finds_eod = False  # in texts, by itself
    _largest = -1  # id that a text may have, where the model may have fewer

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with the marks around it; raises ValueError at one that the model's vocabulary has not."""
        return self._known(self.marks.around(self._encode(text)))

    def encode_spans(self, text: str, *, marked: bool = True) -> EncodedText:
        """Ids of `text`, in which `eod_name` is eod, and where in it they are; a mark is nowhere, at its end.

        Args:
            marked: with the marks; False for a text in which a template has written them.
        """
        name = "" if self._finds_eod else self.eod_name or ""
        ids, spans, start = list[int](), list[tuple[int, int]](), 0
        for number, part in enumerate(text.split(name) if name else [text]):
            if number:
                assert self.eod is not None
                ids.append(self.eod)
                spans.append((start, start + len(name)))
                start += len(name)
            found = self._encode_spans(part)
            ids.extend(found.ids)
            spans.extend((start + first, start + last) for first, last in found.spans)
            start += len(part)
        if marked and self.marks.number:
            end, (before, after, _) = (len(text), len(text)), self.marks
            ids, spans = self.marks.around(ids), [(0, 0)] * len(before) + spans + [end] * len(after)
        return EncodedText(self._known(ids), spans)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; marks such as eod give nothing."""
        raise NotImplementedError

    def piece_bytes(self, token: int) -> int | None:
        """Return the bytes of a token, 0 for a mark or an unknown piece; None: those of its decoded text."""
        raise NotImplementedError

    def fit(self, vocab_size: int) -> None:
        """Have the vocabulary of a model; raises ValueError if that has no end of a document."""
        if self.eod is not None and self.eod >= vocab_size:
            raise ValueError(f"the tokenizer's {self.eod_name} has the id {self.eod}, the model {vocab_size} tokens")
        self.vocab_size, self._largest = vocab_size, self.vocab_size - 1

    def _known(self, ids: list[int]) -> list[int]:
        if self._largest >= self.vocab_size and (largest := max(ids, default=0)) >= self.vocab_size:
            vocabulary = f"the model's vocabulary of {self.vocab_size} tokens"
            raise ValueError(f"the tokenizer gives the id {largest}, which {vocabulary} has not (--tokenizer-model)")
        return ids

    def _encode(self, text: str) -> list[int]:
        """Ids of `text` alone; `_encode_spans` gives the same ids, slower."""
        raise NotImplementedError

    def _encode_spans(self, text: str) -> EncodedText:
        raise NotImplementedError


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, its file's content; a document ends with its `<eod>` piece if it has one, else its eos."""

    def __init__(
        self, model: bytes, companions: Mapping[str, bytes] | None = None, *, add_special_tokens: bool = True
    ) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.get_piece_size()
        self._num_pieces = self.vocab_size
        named, eos, unknown = self._processor.piece_to_id("<eod>"), self._processor.eos_id(), self._processor.unk_id()
        self.eod = named if named != unknown else eos if eos >= 0 else None
        self.eod_name = None if self.eod is None else self._processor.id_to_piece(self.eod)
        self.files = {**(companions or {}), SENTENCEPIECE: model}
        wanted = wanted_marks(self.files)
        before, after = (list(map(self._processor.piece_to_id, names)) for names in wanted)
        if unknown in before + after:
            raise ValueError(f"{DESCRIPTION} beside it adds {wanted} to texts, and it has no such pieces")
        self.marks = Marks(before, after, used=add_special_tokens)
        self.identity = f"sentencepiece-{hashlib.sha256(model).hexdigest()}{self.marks}"

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _encode_spans(self, text: str) -> EncodedText:
        found = self._processor.encode_as_offset_mapping(text)
        return EncodedText(found["ids"], found["offsets"])

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i < self._num_pieces])

    def piece_bytes(self, token: int) -> int | None:
        pieces = self._processor
        if token == self.eod or token >= self._num_pieces or pieces.is_control(token) or pieces.is_unknown(token):
            return 0
        return 1 if pieces.is_byte(token) else None


class HFTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` package as transformers runs it.

    Args:
        definition: the text of tokenizer.json; `files` are its sources, if not that alone.
        eod: the piece that ends a document; None looks for the usual names.
    Raises:
        ValueError: `tokenizers` is not installed, or `eod` is not in the vocabulary.
    """

    def __init__(
        self,
        definition: str,
        *,
        eod: str | None = None,
        files: Mapping[str, bytes] | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        _require_tokenizers()
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        self.files = {DEFINITION: definition.encode()} if files is None else dict(files)
        changes = do_as_transformers(self._tokenizer, self.files)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if eod is not None and eod not in vocabulary:
            raise ValueError(f"the end-of-document piece {eod!r} is not in the tokenizer's vocabulary")
        names = _EOD_NAMES if eod is None else (eod,)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have holes
        self.eod_name = next((name for name in names if name in vocabulary), None)
        self.eod = None if self.eod_name is None else vocabulary[self.eod_name]
        if DEFINITION in self.files:
            text = next(text for text in ("a", *vocabulary) if self._encode(text))
            whole = self._tokenizer.encode(text, add_special_tokens=True)
            first = whole.sequence_ids.index(0)
            before, after = whole.ids[:first], whole.ids[first + len(self._encode(text)) :]
        else:
            before, after = ([vocabulary[name] for name in names] for names in wanted_marks(self.files))
            # the package writes another definition from version to version
            definition = "".join(self.files[name].decode() for name in (VOCABULARY, MERGES))
        self.marks = Marks(before, after, used=add_special_tokens)
        self._unknown = getattr(self._tokenizer.model, "unk_token", None)
        has_bytes = "ByteLevel" in str(self._tokenizer.decoder)  # whose pieces have a letter for each byte
        self._byte_letters = set(tokenizers.pre_tokenizers.ByteLevel.alphabet() if has_bytes else ())
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token: each.special for token, each in added.items()}
        split = self._tokenizer.encode_special_tokens
        self._finds_eod = not split and self.eod in added
        digest = hashlib.sha256(definition.encode()).hexdigest()
        self.identity = f"huggingface-{digest}-{self.eod}{changes}{self.marks}"

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_spans(self, text: str) -> EncodedText:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return EncodedText(encoding.ids, encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def piece_bytes(self, token: int) -> int | None:
        piece, special = self._tokenizer.id_to_token(token), self._added.get(token)
        if piece is None or token == self.eod or piece == self._unknown or special:
            return 0
        if special is None and self._byte_letters.issuperset(piece):
            return len(piece)
        return 1 if _BYTE_PIECE.fullmatch(piece) and self.decode([token]) != piece else None


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte. It counts as Megatron's NullTokenizer does: eod is the id after all others.

    There are `num_ids` below eod, at least 256; those above 255 serve pre-tokenized and mock data only.
    """

    def __init__(self, num_ids: int = 256) -> None:
        if num_ids < 256:
            raise ValueError(f"--vocab-size {num_ids} is below the 256 byte values of --tokenizer-type NullTokenizer")
        self.vocab_size = num_ids + 1
        self.eod, self.eod_name = num_ids, "<|endoftext|>"
        self.identity, self.files = f"bytes-{num_ids}", {}

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _encode_spans(self, text: str) -> EncodedText:
        spans = [(place, place + 1) for place, character in enumerate(text) for _ in character.encode()]
        return EncodedText(self._encode(text), spans)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def piece_bytes(self, token: int) -> int | None:
        return int(token < 256)
