"""Tokenizers: load the tokenizer that the flags name, and convert text to token ids and back.

The package transformers opens Hugging Face folders, so texts get the same token ids as in transformers. The ids include
the special tokens that the folder's files put around a text (`SpecialTokens`), such as <s> before a prompt and before
each document of a dataset. Megatron's HuggingFaceTokenizer adds the same tokens.

All kinds of tokenizers are in one file, because each of them implements the private methods of `Tokenizer`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from megazpp.base.files import errors_as
from megazpp.data.tokenizer_folder import (
    CONFIG,
    DEFINITION,
    DESCRIPTION,
    EOD_NAMES,
    GENERATION,
    MERGES,
    MERGES_ALONE,
    SENTENCEPIECE,
    TEMPLATE,
    VOCABULARIES,
    VOCABULARY,
    TokenizerConfig,
    as_json,
    fast,
    ids_of,
    names_tokenizer,
    open_folder,
    read_folder,
    read_settings,
    with_eos,
)

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")  # name of a vocabulary entry of SentencePiece that encodes a single byte


def load_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """Load the tokenizer that the flags name, and return it; return None if the flags name no tokenizer.

    Raises:
        ValueError: a file of the tokenizer is missing or has another format, or flags contradict each other.
    """
    tokenizer: Tokenizer
    if not names_tokenizer(config):
        if config.eos_token is not None:
            raise ValueError(f"--eos-token {config.eos_token} needs --tokenizer-model with a Hugging Face tokenizer")
        return None
    if config.kind == "NullTokenizer":
        tokenizer = ByteTokenizer(config.vocab_size or 256)
    elif config.kind == "GPT2BPETokenizer":
        tokenizer = _load_gpt2(config)
    elif config.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {config.kind} needs --tokenizer-model with the tokenizer's folder or file")
    else:
        path = Path(config.tokenizer_model).expanduser()
        if not path.is_dir() and not (path.is_file() and path.stat().st_size):  # reading a FIFO would block for ever
            what = "is empty" if path.is_file() else "is no regular file" if path.exists() else "does not exist"
            raise ValueError(f"--tokenizer-model {path} {what}: name a file, or a folder with tokenizer files")
        # Of the remaining types, SentencePieceTokenizer and GPTSentencePieceTokenizer both have a SentencePiece model.
        # In Megatron they give the same ids.
        is_theirs = config.kind == "HuggingFaceTokenizer"
        tokenizer = _load_huggingface(path, config) if is_theirs else _load_sentencepiece(path)
    if config.eos_token is not None and not isinstance(tokenizer, HFTokenizer):
        raise ValueError(f"--eos-token {config.eos_token} does not apply to {config.kind}: leave out --eos-token")
    if config.model_vocab_size is not None:
        tokenizer.fit(config.model_vocab_size)
    return tokenizer


def document_end(tokenizer: Tokenizer) -> list[int]:
    """Return the token ids to append to each document of training data: [eod], or [].

    The list is empty if the tokenizer has no eod, or if it already ends each text with eod as a special token.
    """
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    return [] if tokenizer.special_tokens.used and tokenizer.special_tokens.after[-1:] == end else end


def special_tokens_note(tokenizer: Tokenizer, *, prompts: bool = False) -> str | None:
    """Return a line for the log that says which special tokens, such as BOS, the run adds before and after texts.

    Args:
        tokenizer: tokenizer of the texts.
        prompts: True if the texts are prompts, which get special tokens before them only.
    Returns:
        The line, or None if the tokenizer's files define no special tokens around texts.
    """
    (before, after, used), what = tokenizer.special_tokens, "prompts" if prompts else "texts"
    after = [] if prompts else after
    does = f"{what} get" if used else f"--no-add-special-tokens: {what} do not get"
    added = " and ".join(f"{ids} {where}" for ids, where in ((before, "before"), (after, "after")) if ids)
    return f"{does} the special tokens {added} them that transformers adds" if added else None


def _load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    if path.is_dir():
        raise ValueError(f"--tokenizer-model {path} is a directory: name the file of the SentencePiece model")
    template = path.with_name(TEMPLATE)
    # A checkpoint stores a SentencePiece model as tokenizer.model, with the chat template in a file next to the model.
    kept = path.name == SENTENCEPIECE and template.is_file()
    with errors_as(f"--tokenizer-model {path} is not a SentencePiece model", RuntimeError):
        return SentencePieceTokenizer(path.read_bytes(), {TEMPLATE: template.read_bytes()} if kept else {})


def _load_huggingface(path: Path, config: TokenizerConfig) -> HFTokenizer:
    files = read_folder(path if path.is_dir() else path.parent)
    if not path.is_dir() and path.name not in VOCABULARIES:  # --tokenizer-model is a tokenizer.json with another name
        files = {name: content for name, content in files.items() if name == DESCRIPTION}
        files[DEFINITION] = path.read_bytes()
    if not files.keys() & VOCABULARIES:
        raise ValueError(f"--tokenizer-model {path} contains neither {DEFINITION} nor another vocabulary; name another")
    return _open(files, f"--tokenizer-model {path}", config)


def _load_gpt2(config: TokenizerConfig) -> HFTokenizer:
    if config.vocab_file is None or config.merge_file is None:
        raise ValueError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file: give both")
    for name, file in (("--vocab-file", config.vocab_file), ("--merge-file", config.merge_file)):
        if not Path(file).is_file():
            raise ValueError(f"{name} {file} is not an existing file: correct the path")
    vocabulary = Path(config.vocab_file)
    beside = read_folder(vocabulary.parent) if vocabulary.name == VOCABULARY else {}
    files = {name: content for name, content in beside.items() if name not in VOCABULARIES}
    files |= {VOCABULARY: vocabulary.read_bytes(), MERGES: Path(config.merge_file).read_bytes()}
    return _open(files, f"--vocab-file {vocabulary}", config)


def _open(files: Mapping[str, bytes], name: str, config: TokenizerConfig) -> HFTokenizer:
    with errors_as(name):
        return HFTokenizer(files, eos_token=config.eos_token, add_special_tokens=config.add_special_tokens)


# ---- kinds of tokenizers --------------------------------------------------------------------------------------------


class EncodedText(NamedTuple):
    """A tokenized text: its token ids, and for each id the range (start, end) of the characters that it encodes."""

    ids: list[int]
    spans: list[tuple[int, int]]


class SpecialTokens(NamedTuple):
    """The special tokens, such as BOS, that the files of a tokenizer define to put around each text.

    Attributes:
        before: ids of the tokens before a text.
        after: ids of the tokens after a text.
        used: True if this run adds the tokens (--add-special-tokens); False if it leaves them out.
    """

    before: list[int]
    after: list[int]
    used: bool

    @property
    def number(self) -> int:
        """Number of special tokens that this run adds to a text."""
        return len(self.before + self.after) if self.used else 0

    def around(self, ids: list[int]) -> list[int]:
        """Return the token ids of a text, with special tokens before and after them if this run adds special tokens."""
        return [*self.before, *ids, *self.after] if self.number else ids

    def missing(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Return the special tokens to add before and after a text, unless the text already has them.

        Args:
            ids: token ids of the text.
        Returns:
            The ids to add before the text, and the ids to add after it. The first list is empty if the text already
            begins with `before`, and the second if the text already ends with `after`. Both lists are empty if this run
            adds no special tokens.
        """
        before, after = (self.before, self.after) if self.used else ([], [])
        last = ids[max(len(ids) - len(after), 0) :]
        return [] if ids[: len(before)] == before else before, [] if last == after else after

    def __str__(self) -> str:
        """Return the end of `Tokenizer.identity`: the ids of the special tokens that this run adds; "" for none."""
        return f"-{self.before}{self.after}" if self.number else ""


class Tokenizer:
    """The interface of all tokenizers.

    Attributes:
        vocab_size: size of the model's vocabulary without padding. The token ids of texts are in [0, vocab_size).
        eod: id of the end-of-document token; None if the tokenizer has none.
        eod_name: text of the end-of-document token, which `encode_spans` encodes as eod; None if there is no eod.
        identity: string that is equal for tokenizers that give equal ids. Cache keys contain it.
        files: content of the tokenizer's files by Hugging Face's file names. It is empty for a tokenizer without files.
        special_tokens: special tokens, such as BOS, that the tokenizer's files put around a text.
        variables: text of each special token by its role, such as eos_token, for chat templates.
        special_ids: id of each special token by its text.
        added_ids: ids of added tokens, such as special tokens, which are not in the vocabulary that the tokenizer's
            training has produced.
    """

    vocab_size: int
    eod: int | None
    eod_name: str | None
    identity: str
    files: Mapping[str, bytes]
    special_tokens = SpecialTokens([], [], used=False)
    variables: Mapping[str, str]
    special_ids: Mapping[str, int]
    added_ids: Collection[int]
    _finds_eod = False  # True if the method `_encode_spans` of this class already encodes eod_name in a text as eod
    # largest id of the tokenizer itself, which `fit` stores before it changes `vocab_size`; -1 before a call of `fit`
    _largest = -1

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with special tokens around them if this run adds special tokens.

        Raises:
            ValueError: an id is beyond the model's vocabulary.
        """
        return self._known(self.special_tokens.around(self._encode(text)))

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> EncodedText:
        """Return the token ids of `text`, and for each id the range of characters of `text` that it encodes.

        Each `eod_name` in the text becomes eod. Special tokens that are added before or after the text have an empty
        range at the beginning or the end of the text. They are not added if the text already begins or ends with them.

        Args:
            text: text to encode.
            add_special_tokens: True to add the special tokens of the tokenizer's files, if this run adds them. False
                for a text into which a chat template has already written them.
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
        if add_special_tokens:
            end, (before, after) = (len(text), len(text)), self.special_tokens.missing(ids)
            ids, spans = [*before, *ids, *after], [(0, 0)] * len(before) + spans + [end] * len(after)
        return EncodedText(self._known(ids), spans)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, which generation continues. Each `eod_name` in the prompt becomes eod.

        Special tokens are added before the prompt, unless it already begins with them. No special tokens are added
        after it, because a model that has read an end-of-text token begins another text.
        """
        ids = self.encode_spans(text, add_special_tokens=False).ids
        return self._known([*self.special_tokens.missing(ids)[0], *ids])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, the same as `encode` returns."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that the token ids encode. Special tokens are left out."""
        raise NotImplementedError

    def decode_with_specials(self, ids: Sequence[int]) -> str:
        """Return the text that the token ids encode. Each special token becomes its name, such as `<eod>`."""
        names = {token: name for name, token in self.special_ids.items()}
        parts = itertools.groupby(ids, names.get)
        return "".join(self.decode(part) if name is None else name * len(list(part)) for name, part in parts)

    @functools.cached_property
    def stop_ids(self) -> list[int]:
        """Token ids that end a generated text: eod, and the eos ids at which transformers' `generate` stops.

        The eos ids come from the tokenizer's generation_config.json or, without this file, from its config.json.
        """
        source = GENERATION if GENERATION in self.files else CONFIG
        theirs = ids_of(read_settings(self.files, source).get("eos_token_id"))
        return list(dict.fromkeys([*([] if self.eod is None else [self.eod]), *theirs]))

    def chat_template(self, name: str | None = None, tools: Sequence[object] | None = None) -> str | None:
        """Return the source of the chat template that transformers selects; None if the tokenizer has no template.

        Args:
            name: name of one of the tokenizer's templates; None selects the default.
            tools: descriptions of the tools that a conversation may call; None if there are none. With tools,
                transformers prefers the template `tool_use`.
        """
        return self.files[TEMPLATE].decode() if TEMPLATE in self.files else None

    def piece_bytes(self, token: int) -> int | None:
        """Return the number of bytes of text that a token encodes, as far as its vocabulary entry shows it.

        The result is 0 for a special or unknown token, and None if only decoding the token can tell the number.
        """
        raise NotImplementedError

    @property
    def rules(self) -> Any:
        """A value that is equal for two tokenizers of the same kind if both split texts into vocabulary entries alike.

        Added tokens and the special tokens around texts do not count. Compare values of one process only: versions of
        the package tokenizers write the rules of the same files differently.
        """
        return self.identity

    def fit(self, vocab_size: int) -> None:
        """Set `vocab_size` to the size of the model's vocabulary, which may differ from the tokenizer's.

        Encoding a text then raises ValueError for an id beyond the model's vocabulary.

        Raises:
            ValueError: eod is beyond the model's vocabulary.
        """
        if self.eod is not None and self.eod >= vocab_size:
            problem = f"{self.eod_name} has the id {self.eod}, but the model has {vocab_size} tokens"
            raise ValueError(f"the tokenizer's {problem}; use the tokenizer of the model")
        self.vocab_size, self._largest = vocab_size, self.vocab_size - 1

    def _known(self, ids: list[int]) -> list[int]:
        """Return `ids` if all of them are in the model's vocabulary; otherwise raise ValueError."""
        if self._largest >= self.vocab_size and (largest := max(ids, default=0)) >= self.vocab_size:
            vocabulary = f"the model's vocabulary of {self.vocab_size} tokens"
            beyond = f"the tokenizer gives the id {largest}, which is beyond {vocabulary}"
            raise ValueError(f"{beyond}; name the tokenizer of the model with --tokenizer-model")
        return ids

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without the special tokens that the tokenizer puts around texts."""
        raise NotImplementedError

    def _encode_spans(self, text: str) -> EncodedText:
        """Return the token ids of `text` as `_encode` does, and the range of characters that each id encodes.

        This is slower than `_encode`.
        """
        raise NotImplementedError


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with a SentencePiece model. Its eod is the piece `<eod>` if the model has it, otherwise the eos.

    Args:
        model: content of the SentencePiece model's file.
        files: content of further files of the tokenizer by file name, such as a chat template.
    """

    def __init__(self, model: bytes, files: Mapping[str, bytes] | None = None) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._num_pieces = self.processor.get_piece_size()
        named, eos, unknown = self.processor.piece_to_id("<eod>"), self.processor.eos_id(), self.processor.unk_id()
        self.eod = named if named != unknown else eos if eos >= 0 else None
        self.eod_name = None if self.eod is None else self.processor.id_to_piece(self.eod)
        self.files = {**(files or {}), SENTENCEPIECE: model}
        self.special_ids = {} if self.eod is None else {self.processor.id_to_piece(self.eod): self.eod}
        self.added_ids = set(self.special_ids.values())
        self.variables = {"eos_token": self.eod_name or "", "bos_token": ""}
        self.identity = f"sentencepiece-{hashlib.sha256(model).hexdigest()}"

    def _encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def _encode_spans(self, text: str) -> EncodedText:
        if hasattr(self.processor, "encode_as_offset_mapping"):
            found = self.processor.encode_as_offset_mapping(text)
            return EncodedText(found["ids"], found["offsets"])
        immutable: Any = self.processor  # sentencepiece 0.2.1 has only a method that its types do not declare
        pieces = immutable.encode_as_immutable_proto(text).pieces
        return EncodedText([piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces])

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([int(i) for i in ids if i < self._num_pieces])

    def piece_bytes(self, token: int) -> int | None:
        pieces = self.processor
        if token == self.eod or token >= self._num_pieces or pieces.is_control(token) or pieces.is_unknown(token):
            return 0
        return 1 if pieces.is_byte(token) else None


class HFTokenizer(Tokenizer):
    """A Hugging Face tokenizer. transformers opens its files, and the fast backend (package tokenizers) encodes texts.

    Args:
        files: content of the files of the tokenizer's folder, by file name.
        eos_token: token of the vocabulary that becomes the eos token; None uses the eos token that the files name.
        add_special_tokens: True to put the special tokens that the files define, such as BOS, around texts.
    Raises:
        ValueError: transformers is not installed or cannot read the files, or `eos_token` is not in the vocabulary.
    """

    def __init__(
        self, files: Mapping[str, bytes], *, eos_token: str | None = None, add_special_tokens: bool = True
    ) -> None:
        self.files = dict(files)
        if not {DESCRIPTION, CONFIG} & files.keys():  # transformers needs a file that names the tokenizer's class
            self.files |= as_json(DESCRIPTION, fast(None) if DEFINITION in files else MERGES_ALONE)
        self._theirs = open_folder(self.files)
        vocabulary: dict[str, int] = self._theirs.get_vocab()
        if eos_token is not None:
            if eos_token not in vocabulary:
                raise ValueError(f"--eos-token {eos_token} is not in the vocabulary; name one of its tokens")
            self.files = with_eos(self.files, eos_token, vocabulary[eos_token])
        elif self._theirs.eos_token is None and (usual := next(filter(vocabulary.__contains__, EOD_NAMES), None)):
            self.files |= as_json(DESCRIPTION, read_settings(self.files, DESCRIPTION) | {"eos_token": usual})
            eos_token = usual
        if eos_token is not None:
            self._theirs = open_folder(self.files)
        backend = self._tokenizer = self._theirs.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        split = backend.encode_special_tokens = bool(self._theirs.split_special_tokens)
        added = backend.get_added_tokens_decoder()
        self._added = self.added_ids = {token: each.special for token, each in added.items()}
        self.special_ids = {each.content: token for token, each in added.items() if each.special}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # the number of tokens may be smaller, if some ids are unused
        self.eod_name = self._theirs.eos_token
        self.eod = None if self.eod_name is None else vocabulary[self.eod_name]
        self._finds_eod = not split and self.eod in added
        self.variables = {name: str(token) for name, token in self._theirs.special_tokens_map.items()}
        # Find the special tokens that the files put around a text. For this, encode a text that has at least one id:
        # the special tokens are the ids before and after the ids of the text itself.
        text = next(text for text in ("a", *vocabulary) if self._encode(text))
        whole = backend.encode(text, add_special_tokens=True)
        first = whole.sequence_ids.index(0)
        before, after = whole.ids[:first], whole.ids[first + len(self._encode(text)) :]
        self.special_tokens = SpecialTokens(before, after, used=add_special_tokens)
        # Remove the post-processor, because some post-processors exclude spaces from the character ranges of tokens.
        # The special tokens that it would add are now in `special_tokens`.
        backend.post_processor = None
        self._unknown = getattr(backend.model, "unk_token", None)
        # True if each character of a vocabulary entry stands for one byte of text (byte-level BPE)
        self._has_bytes = "ByteLevel" in str(backend.decoder)
        self.identity = f"huggingface-{self._digest(split)}{self.special_tokens}"

    def _digest(self, split: bool) -> str:
        """Return the part of `identity` for the vocabulary, the eod, and changes that transformers makes at opening.

        The string has a hash of the vocabulary files and the eod's id. A hash of the entries that `_around` returns is
        appended in three cases:

        - transformers changes these entries of tokenizer.json when it opens the files
        - the files have no tokenizer.json, and are not just vocab.json and merges.txt
        - `split` is True

        The complete definition is not hashed, because its serialization by the package tokenizers differs between
        versions of this package.

        Args:
            split: True if the tokenizer splits the names of special tokens in a text like other text.
        """
        names = [DEFINITION] if DEFINITION in self.files else [name for name in VOCABULARIES if name in self.files]
        digest = hashlib.sha256(b"".join(self.files[name] for name in names)).hexdigest()
        around = _around(self._tokenizer)
        plain = type(self._tokenizer).from_str(self.files[DEFINITION].decode()) if DEFINITION in self.files else None
        merges_alone = read_settings(self.files, DESCRIPTION) == MERGES_ALONE
        if not split and (merges_alone if plain is None else _around(plain) == around):
            return f"{digest}-{self.eod}"
        return f"{digest}-{self.eod}-{hashlib.sha256(json.dumps([around, split]).encode()).hexdigest()[:8]}"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._known(self.special_tokens.around(each.ids)) for each in found]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_spans(self, text: str) -> EncodedText:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return EncodedText(encoding.ids, encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        # Clean-up is off, because it would also remove spaces before punctuation that belong to the encoded text.
        return self._theirs.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_with_specials(self, ids: Sequence[int]) -> str:
        return self._theirs.decode(ids, clean_up_tokenization_spaces=False)

    @property
    def rules(self) -> Any:
        values = json.loads(self._tokenizer.to_str())
        return [values[name] for name in ("normalizer", "pre_tokenizer", "model")]

    def chat_template(self, name: str | None = None, tools: Sequence[object] | None = None) -> str | None:
        return None if self._theirs.chat_template is None else self._theirs.get_chat_template(name, tools)

    def piece_bytes(self, token: int) -> int | None:
        piece, special = self._tokenizer.id_to_token(token), self._added.get(token)
        if piece is None or token == self.eod or piece == self._unknown or special:
            return 0
        if special is None and self._has_bytes:
            return len(piece)
        # A vocabulary entry with a name such as <0x0A> stands for one byte. If the tokenizer decodes the entry to this
        # name, the entry stands for the characters of the name instead.
        return 1 if _BYTE_PIECE.fullmatch(piece) and self.decode([token]) != piece else None


class ByteTokenizer(Tokenizer):
    """A tokenizer with one id per UTF-8 byte. As in Megatron's NullTokenizer, eod is the last id.

    Args:
        num_ids: number of ids below eod (--vocab-size), at least 256. Only tokenized datasets and --mock-data use ids
            from 256 on.
    """

    def __init__(self, num_ids: int = 256) -> None:
        if num_ids < 256:
            raise ValueError(f"--vocab-size {num_ids} is below 256, the number of byte values of a NullTokenizer")
        self.vocab_size = num_ids + 1
        self.eod, self.eod_name = num_ids, "<|endoftext|>"
        self.variables, self.special_ids = {"eos_token": self.eod_name, "bos_token": ""}, {self.eod_name: num_ids}
        self.added_ids = {num_ids}
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


def _around(tokenizer: Any) -> list[Any]:
    """Return the entries of a fast tokenizer's definition that, with the vocabulary, decide how it encodes a text.

    They are JSON values: normalizer, pre-tokenizer, added tokens, and options of the model.
    """
    values = json.loads(tokenizer.to_str())
    options = {name: value for name, value in values["model"].items() if value and name not in ("vocab", "merges")}
    return [values["normalizer"], values["pre_tokenizer"], values["added_tokens"], options]
