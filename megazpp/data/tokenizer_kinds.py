"""Tokenizers behind one small base class: text to ids and back, special tokens around the text (`Marks`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import sentencepiece

from megazpp.data.tokenizer_folder import (
    DEFINITION,
    DESCRIPTION,
    MERGES,
    SENTENCEPIECE,
    VOCABULARY,
    do_as_transformers,
    tokenizers,
    wanted_marks,
)

# names of the end of a document in tokenizers that have no configuration beside them, likeliest first
_EOD_NAMES = ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class EncodedText(NamedTuple):
    """Ids, and for each the characters of the text that it stands for, from and to."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Marks(NamedTuple):
    """Special tokens that a tokenizer's files put before and after a text, and whether this run does."""

    before: list[int]
    after: list[int]
    used: bool

    @property
    def number(self) -> int:
        """Tokens that a text gets."""
        return len(self.before + self.after) if self.used else 0

    def around(self, ids: list[int]) -> list[int]:
        return [*self.before, *ids, *self.after] if self.number else ids

    def __str__(self) -> str:
        """The part of an identity: nothing where texts get no marks."""
        return f"-{self.before}{self.after}" if self.number else ""


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: of the model, not padded; ids of texts are in [0, vocab_size).
        eod: the id that ends a document, or None if the tokenizer has none.
        eod_name: how eod is written in a text for `encode_spans`.
        marks: special tokens around a text.
        identity: equal for tokenizers that give equal ids; part of cache keys.
        files: its files, by name at Hugging Face; none where the flags say all.
    """

    vocab_size: int
    eod: int | None
    eod_name: str | None
    identity: str
    files: Mapping[str, bytes]
    marks = Marks([], [], used=False)
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
        named, eos = self._processor.piece_to_id("<eod>"), self._processor.eos_id()
        self.eod = named if named != self._processor.unk_id() else eos if eos >= 0 else None
        self.eod_name = None if self.eod is None else self._processor.id_to_piece(self.eod)
        self.files = {**(companions or {}), SENTENCEPIECE: model}
        wanted = wanted_marks(self.files)
        before, after = (list(map(self._processor.piece_to_id, names)) for names in wanted)
        if self._processor.unk_id() in before + after:
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


class HFTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` package as transformers runs it.

    Args:
        definition: the text of tokenizer.json.
        eod: the piece that ends a document; None looks for the usual names.
        files: sources of the definition, if not the text of tokenizer.json alone.
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
        if tokenizers is None:
            raise ValueError("this --tokenizer-type needs the package tokenizers: pip install tokenizers")
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
        self.marks = Marks(before, after, used=add_special_tokens)
        split = self._tokenizer.encode_special_tokens
        self._finds_eod = not split and self.eod in self._tokenizer.get_added_tokens_decoder()
        if DEFINITION not in self.files:  # the package writes another definition from version to version
            definition = "".join(self.files[name].decode() for name in (VOCABULARY, MERGES))
        digest = hashlib.sha256(definition.encode()).hexdigest()
        self.identity = f"huggingface-{digest}-{self.eod}{changes}{self.marks}"

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_spans(self, text: str) -> EncodedText:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return EncodedText(encoding.ids, encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


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
