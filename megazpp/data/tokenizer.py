"""Tokenizers behind one small protocol: text to ids and back.

Everything downstream needs little of a tokenizer: its vocabulary size, the id that ends a document, encode, decode, an
identity to build cache keys from (tokenizers with one identity give the same ids), and the files it is made of.
Those are kept in memory under the names that they have in a Hugging Face folder, so that a checkpoint, or a converted
model, can have them as they were read.

A Hugging Face folder gives the ids that transformers gives for it, with the special tokens that its files put around a
text (`Marks`): <s> before a prompt, and before each document of a dataset, as Megatron's HuggingFaceTokenizer has it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

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
_TOKENS_MAP, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
_VOCABULARIES = (DEFINITION, SENTENCEPIECE, VOCABULARY, MERGES)
# what else a Hugging Face folder says about text
_COMPANIONS = (
    DESCRIPTION,
    _TOKENS_MAP,
    _ADDED_TOKENS,
    "chat_template.jinja",
    "generation_config.json",
)
_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "model_type")  # of config.json, what is about text
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # of a special token
# special tokens of transformers' classes that rebuild what is around the merges of a tokenizer.json
_REBUILT = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
}


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
    add_special_tokens: bool = flag(
        True, "put around texts the special tokens (BOS, ...) that the tokenizer's files say, as transformers does"
    )
    model_vocab_size: int | None = flag(
        None, "tokens of the model's vocabulary, if not those of the tokenizer (default: as the checkpoint has it)"
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "vocab_size", "model_vocab_size")


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


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer.

    Attributes:
        vocab_size: of the model, not padded; ids of texts are in [0, vocab_size).
        eod: the id that ends a document, or None if the tokenizer has none.
        eod_name: how eod is written in a text for `encode_spans`.
        marks: special tokens around a text.
        identity: equal for tokenizers that give equal ids; part of cache keys.
        files: what it is made of, by name at Hugging Face; none where the flags say all.
    """

    vocab_size: int

    @property
    def marks(self) -> Marks: ...
    @property
    def eod(self) -> int | None: ...
    @property
    def eod_name(self) -> str | None: ...
    @property
    def identity(self) -> str: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with the marks around it; raises ValueError at one that the model's vocabulary has not."""
        ...

    def encode_spans(self, text: str, *, marked: bool = True) -> EncodedText:
        """Ids of `text`, in which `eod_name` is eod, and where in it they are; a mark is nowhere, at its end.

        Args:
            marked: with the marks; False for a text in which a template has written them.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; marks such as eod give nothing."""
        ...

    def fit(self, vocab_size: int) -> None:
        """Have the vocabulary of a model; raises ValueError if that has no end of a document."""
        ...


class _Encoder:
    """What all tokenizers share: marks around ids that `_encode_spans` and `_encode` give, none of which is refused."""

    vocab_size: int
    eod: int | None
    eod_name: str | None
    marks = Marks([], [], used=False)
    _finds_eod = False  # in texts, by itself
    _largest = -1  # id that a text may have, where the model may have fewer

    def encode(self, text: str) -> list[int]:
        return self._known(self.marks.around(self._encode(text)))

    def encode_spans(self, text: str, *, marked: bool = True) -> EncodedText:
        eod_name = None if self._finds_eod else self.eod_name
        ids, spans = _encode_around(self.eod, eod_name, text, self._encode_spans)
        if marked and self.marks.number:
            end, (before, after, _) = (len(text), len(text)), self.marks
            ids, spans = self.marks.around(ids), [(0, 0)] * len(before) + spans + [end] * len(after)
        return EncodedText(self._known(ids), spans)

    def fit(self, vocab_size: int) -> None:
        if self.eod is not None and self.eod >= vocab_size:
            raise ValueError(f"the tokenizer's {self.eod_name} has the id {self.eod}, the model {vocab_size} tokens")
        self.vocab_size, self._largest = vocab_size, self.vocab_size - 1

    def _known(self, ids: list[int]) -> list[int]:
        if self._largest >= self.vocab_size and (largest := max(ids, default=0)) >= self.vocab_size:
            vocabulary = f"the model's vocabulary of {self.vocab_size} tokens"
            raise ValueError(f"the tokenizer gives the id {largest}, which {vocabulary} has not (--tokenizer-model)")
        return ids

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def _encode_spans(self, text: str) -> EncodedText:
        raise NotImplementedError


class SentencePieceTokenizer(_Encoder):
    """A SentencePiece model, its file's content; a document ends with its `<eod>` piece if it has one, else its eos."""

    def __init__(
        self, model: bytes, companions: Mapping[str, bytes] | None = None, *, add_special_tokens: bool = True
    ) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._processor.get_piece_size()
        self._num_pieces = self.vocab_size
        named, eos = self._processor.piece_to_id("<eod>"), self._processor.eos_id()
        self.eod = named if named != self._processor.unk_id() else eos if eos >= 0 else None
        self.eod_name: str | None = None if self.eod is None else self._processor.id_to_piece(self.eod)
        self.files = {**(companions or {}), SENTENCEPIECE: model}
        wanted = _wanted_marks(self.files)
        before, after = (list(map(self._processor.piece_to_id, names)) for names in wanted)
        if self._processor.unk_id() in before + after:
            raise ValueError(f"{DESCRIPTION} beside it adds {wanted} to texts, and it has no such pieces")
        self.marks = Marks(before, after, used=add_special_tokens)
        self.identity = f"sentencepiece-{hashlib.sha256(model).hexdigest()}{_spelt(self.marks)}"

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _encode_spans(self, text: str) -> EncodedText:
        if hasattr(self._processor, "encode_as_offset_mapping"):
            found = self._processor.encode_as_offset_mapping(text)
            return EncodedText(found["ids"], found["offsets"])
        pieces = self._processor.encode_as_immutable_proto(text).pieces  # type: ignore[attr-defined]  # before 0.2.2
        return EncodedText([piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces])

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i < self._num_pieces])


class HFTokenizer(_Encoder):
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` package as transformers runs it.

    Args:
        definition: the text of tokenizer.json.
        eod: the piece that ends a document; None looks for the usual names.
        files: what the definition was made from, if not from the text of tokenizer.json alone.
        add_special_tokens: put marks around texts.
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
        changes = _do_as_transformers(self._tokenizer, self.files)
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
            before, after = ([vocabulary[name] for name in names] for names in _wanted_marks(self.files))
        self.marks = Marks(before, after, used=add_special_tokens)
        split = self._tokenizer.encode_special_tokens
        self._finds_eod = not split and self.eod in self._tokenizer.get_added_tokens_decoder()
        if DEFINITION not in self.files:  # the package writes another definition from version to version
            definition = "".join(self.files[name].decode() for name in (VOCABULARY, MERGES))
        digest = hashlib.sha256(definition.encode()).hexdigest()
        self.identity = f"huggingface-{digest}-{self.eod}{changes}{_spelt(self.marks)}"

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_spans(self, text: str) -> EncodedText:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return EncodedText(encoding.ids, encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class ByteTokenizer(_Encoder):
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

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _encode_spans(self, text: str) -> EncodedText:
        spans = [(place, place + 1) for place, character in enumerate(text) for _ in character.encode()]
        return EncodedText(self._encode(text), spans)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


def _do_as_transformers(tokenizer: Any, files: Mapping[str, bytes]) -> str:
    """Do to a `tokenizers.Tokenizer` what transformers does; returns what that adds to its identity.

    Nothing is cut or padded. Of what lies beside tokenizer.json, tokenizer_config.json names special tokens, which are
    found in texts, and perhaps LlamaTokenizer or GPT2Tokenizer, which rebuild what is around the merges.
    Source: transformers 5.23, AutoTokenizer, TokenizersBackend, LlamaTokenizer, GPT2Tokenizer.
    """
    plain, description, model_type = tokenizer.to_str(), _description(files), _json(files, CONFIG).get("model_type")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    kind = description.get("tokenizer_class") or ("GPT2Tokenizer" if model_type == "gpt2" else "")
    kind = kind.removesuffix("Fast") if model_type != "mistral" else ""  # whose class takes tokenizer.json as it is
    prefix, legacy = description.get("add_prefix_space"), bool(description.get("legacy"))
    has_bytes = "ByteLevel" in f"{tokenizer.pre_tokenizer} {tokenizer.decoder}"
    if kind in _REBUILT and has_bytes == (kind == "GPT2Tokenizer"):
        prefix = not has_bytes if prefix is None else bool(prefix)
        description = _REBUILT[kind] | description
        if tokenizer.normalizer is not None:
            tokenizer.normalizer = tokenizers.normalizers.Sequence([])
        _rebuild(tokenizer, has_bytes=has_bytes, prefix=prefix, legacy=legacy)
    tokenizer.encode_special_tokens = split = bool(description.get("split_special_tokens"))
    named = _add_special_tokens(tokenizer, description, _json(files, _ADDED_TOKENS))
    if tokenizer.to_str() == plain and not split:
        return ""
    return f"-{hashlib.sha256(json.dumps([kind, prefix, legacy, split, named]).encode()).hexdigest()[:8]}"


def _rebuild(tokenizer: Any, *, has_bytes: bool, prefix: bool, legacy: bool) -> None:
    """What LlamaTokenizer and, of bytes, GPT2Tokenizer have around their merges."""
    if has_bytes:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        return
    scheme = ("always" if legacy else "first") if prefix else "never"
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    of = tokenizers.decoders
    steps = [of.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), of.ByteFallback(), of.Fuse()]
    tokenizer.decoder = of.Sequence(steps + [of.Strip(" ", 1, 0)] * prefix)
    model = tokenizer.model
    model.unk_token, model.fuse_unk, model.byte_fallback, model.dropout = None, True, True, None


def _add_special_tokens(tokenizer: Any, description: Mapping[str, Any], added: Mapping[str, int]) -> list[str]:
    """Have the tokens found in texts that the description names beside those of tokenizer.json; returns them all."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    decoder, extra = description.get("added_tokens_decoder") or {}, description.get("extra_special_tokens")
    extra = extra or description.get("additional_special_tokens") or []
    tokens = [decoder[number] for number in sorted(decoder, key=int)]
    tokens += [{"content": name, "special": False} for name in sorted(added, key=added.__getitem__)]
    named = [description.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    for token in filter(None, [*named, *(extra.values() if isinstance(extra, dict) else extra)]):
        fields = {"content": token} if isinstance(token, str) else token
        tokens += [] if fields["content"] in known else [fields | {"special": True}]
    for fields in tokens:
        of_it = {name: fields[name] for name in _FIELDS if name in fields}
        (tokenizer.add_special_tokens if fields["special"] else tokenizer.add_tokens)([tokenizers.AddedToken(**of_it)])
    return [fields["content"] for fields in tokens]


def _wanted_marks(files: Mapping[str, bytes]) -> list[list[str]]:
    """What is put before and after a text where no tokenizer.json says it: `add_bos_token` and `add_eos_token`."""
    description = _REBUILT["GPT2Tokenizer" if MERGES in files else "LlamaTokenizer"] | _description(files)
    tokens = {mark: description[f"{mark}_token"] for mark in ("bos", "eos") if description.get(f"add_{mark}_token")}
    names = {mark: [each["content"] if isinstance(each, dict) else each] for mark, each in tokens.items() if each}
    return [names.get("bos", []), names.get("eos", [])]


def _spelt(marks: Marks) -> str:
    return f"-{marks.before}{marks.after}" if marks.number else ""


def _description(files: Mapping[str, bytes]) -> dict[str, Any]:
    found = _json(files, DESCRIPTION)
    return found if "added_tokens_decoder" in found else found | _json(files, _TOKENS_MAP)


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(files.get(name, b"{}")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} beside the tokenizer holds no settings: {error}") from error


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
    kind, adds = config.tokenizer_type or _guess_type(config), config.add_special_tokens
    tokenizer: ByteTokenizer | HFTokenizer | SentencePieceTokenizer
    match kind:
        case None:
            return None
        case "NullTokenizer":
            tokenizer = ByteTokenizer(256 if config.vocab_size is None else config.vocab_size)
        case "GPT2BPETokenizer":
            tokenizer = _load_gpt2(config)
        case "HuggingFaceTokenizer":
            tokenizer = _load_huggingface(_model_path(config, kind), add_special_tokens=adds)
        case _ if config.tokenizer_model is None:
            return None
        case _:  # GPTSentencePieceTokenizer, too: Megatron's has the same ids
            tokenizer = _load_sentencepiece(_model_path(config, kind), add_special_tokens=adds)
    if config.model_vocab_size is not None:
        tokenizer.fit(config.model_vocab_size)
    return tokenizer


def document_end(tokenizer: Tokenizer) -> list[int]:
    """What is put after a document in training data: eod, unless its marks end with that already."""
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    return [] if tokenizer.marks.used and tokenizer.marks.after[-1:] == end else end


def marks_note(tokenizer: Tokenizer) -> str | None:
    """A line on special tokens around texts, if the tokenizer's files say there are."""
    before, after, used = tokenizer.marks
    does = "texts get" if used else "--no-add-special-tokens: texts do not get"
    marks = " and ".join(f"{ids} {where}" for ids, where in ((before, "before"), (after, "after")) if ids)
    return f"{does} the special tokens {marks} them that transformers gives them" if marks else None


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


def _load_sentencepiece(path: Path, *, add_special_tokens: bool) -> SentencePieceTokenizer:
    if path.is_dir():
        raise ValueError(f"--tokenizer-model {path} is a directory; a SentencePiece model is a file")
    try:
        return SentencePieceTokenizer(path.read_bytes(), _read_companions(path), add_special_tokens=add_special_tokens)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model: {error}") from error


def _load_huggingface(path: Path, *, add_special_tokens: bool) -> HFTokenizer:
    file = path / DEFINITION if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer-model {path}: there is no {file.name} in it")
    try:
        vocabularies = _read(path, _VOCABULARIES) if path.is_dir() else {DEFINITION: file.read_bytes()}
        files = _read_companions(file) | vocabularies
        eos = _description(files).get("eos_token")
        eod = eos["content"] if isinstance(eos, dict) else eos
        text = file.read_text(encoding="utf-8")
        return HFTokenizer(text, eod=eod, files=files, add_special_tokens=add_special_tokens)
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
    files = _read_companions(Path(config.vocab_file)) | contents
    return HFTokenizer(tokenizer.to_str(), files=files, add_special_tokens=config.add_special_tokens)


def _read_companions(file: Path) -> dict[str, bytes]:
    """What is said about text beside a vocabulary: all of it where the file has its name at Hugging Face.

    Beside a definition of another name only tokenizer_config.json counts, which names its end of a document: other
    files of such a folder are somebody else's. Of config.json only the ids of tokens and the kind of model are taken.
    """
    if file.name not in _VOCABULARIES:
        return _read(file.parent, (DESCRIPTION,)) if file.suffix == ".json" else {}
    found = _read(file.parent, _COMPANIONS)
    try:
        settings = json.loads((file.parent / CONFIG).read_bytes())
    except (OSError, ValueError):
        settings = None
    known = settings.items() if isinstance(settings, dict) else ()
    ids = {name: value for name, value in known if name in _SETTINGS}
    return found | ({CONFIG: (json.dumps(ids, indent=2) + "\n").encode()} if ids else {})


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
