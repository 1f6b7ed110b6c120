"""A tokenizer's flags and its folder as Hugging Face has it: its files, and what transformers does with them.

Files are kept in memory, for checkpoints and converted models. Source of the rules: transformers 5.23, AutoTokenizer,
TokenizersBackend, LlamaTokenizer, GPT2Tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megazpp.base.flags import check_positive, check_words, flag

try:
    import tokenizers
except ImportError:  # an optional dependency: HFTokenizer says how to get it
    tokenizers = None  # type: ignore[assignment]

SENTENCEPIECE, DEFINITION = "tokenizer.model", "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
DESCRIPTION, CONFIG = "tokenizer_config.json", "config.json"
_TOKENS_MAP, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
VOCABULARIES = (DEFINITION, SENTENCEPIECE, VOCABULARY, MERGES)
# what else a Hugging Face folder says about text
_COMPANIONS = (DESCRIPTION, _TOKENS_MAP, _ADDED_TOKENS, "chat_template.jinja", "generation_config.json")
_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "model_type")  # of config.json, what is about text
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # of a special token
# special tokens of transformers' classes that rebuild what is around the merges of a tokenizer.json
_REBUILT = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer; without any of these one is trained on --text-path."""

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
        None, "SentencePiece model, or Hugging Face tokenizer.json or folder", common=True
    )
    vocab_size: int | None = flag(
        None,
        "pieces of a SentencePiece tokenizer to train (default: 4096)",
        common=True,
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

    @property
    def kind(self) -> str | None:
        """The type given, or what the files look like; None if none is named."""
        if self.tokenizer_type is not None:
            return self.tokenizer_type
        if self.vocab_file or self.merge_file:
            return "GPT2BPETokenizer"
        if self.tokenizer_model is None:
            return None
        path = Path(self.tokenizer_model)
        return "HuggingFaceTokenizer" if path.suffix == ".json" or path.is_dir() else "SentencePieceTokenizer"


def names_tokenizer(config: TokenizerConfig) -> bool:
    """True if the flags name a tokenizer; else one is trained, or comes from a checkpoint."""
    trainable = config.kind in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer")
    return not trainable or config.tokenizer_model is not None


def find_tokenizer(folder: Path) -> TokenizerConfig:
    """Flags for the tokenizer in a Hugging Face folder, or beside a checkpoint; none if there is none we can use."""
    files = {name: str(folder / name) for name in VOCABULARIES if (folder / name).is_file()}
    if DEFINITION in files:
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if SENTENCEPIECE in files:
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=files[SENTENCEPIECE])
    if VOCABULARY in files and MERGES in files:
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=files[VOCABULARY], merge_file=files[MERGES]
        )
    return TokenizerConfig()


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


def read_companions(file: Path) -> dict[str, bytes]:
    """Read the files about text beside a vocabulary: all of them where it has its name at Hugging Face.

    Beside another name only tokenizer_config.json counts. Of config.json ids of tokens and the kind of model are taken.
    """
    if file.name not in VOCABULARIES:
        return read_files(file.parent, (DESCRIPTION,)) if file.suffix == ".json" else {}
    found = read_files(file.parent, _COMPANIONS)
    try:
        settings = json.loads((file.parent / CONFIG).read_bytes())
    except (OSError, ValueError):
        settings = None
    known = settings.items() if isinstance(settings, dict) else ()
    ids = {name: value for name, value in known if name in _SETTINGS}
    return found | ({CONFIG: (json.dumps(ids, indent=2) + "\n").encode()} if ids else {})


def read_files(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def read_description(files: Mapping[str, bytes]) -> dict[str, Any]:
    found = _json(files, DESCRIPTION)
    return found if "added_tokens_decoder" in found else found | _json(files, _TOKENS_MAP)


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(files.get(name, b"{}")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} beside the tokenizer holds no settings: {error}") from error


def do_as_transformers(tokenizer: Any, files: Mapping[str, bytes]) -> str:
    """Do to a `tokenizers.Tokenizer` what transformers does; returns the suffix of its identity that follows.

    Nothing is cut or padded. tokenizer_config.json names special tokens, which are found in texts, and perhaps
    LlamaTokenizer or GPT2Tokenizer, which rebuild everything around the merges.
    """
    plain, description, model_type = tokenizer.to_str(), read_description(files), _json(files, CONFIG).get("model_type")
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
    """Put around the merges what LlamaTokenizer and, of bytes, GPT2Tokenizer have there."""
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
    """Have the tokens found in texts that the description names beside those of tokenizer.json; returns them all.

    Each with the names of its fields that change where it is found.
    """
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
    return [" ".join([fields["content"], *filter(fields.get, _FIELDS[1:-1])]) for fields in tokens]


def wanted_marks(files: Mapping[str, bytes]) -> list[list[str]]:
    """Tokens before and after a text where no tokenizer.json says it: by `add_bos_token` and `add_eos_token`."""
    description = _REBUILT["GPT2Tokenizer" if MERGES in files else "LlamaTokenizer"] | read_description(files)
    tokens = {mark: description[f"{mark}_token"] for mark in ("bos", "eos") if description.get(f"add_{mark}_token")}
    names = {mark: [each["content"] if isinstance(each, dict) else each] for mark, each in tokens.items() if each}
    return [names.get("bos", []), names.get("eos", [])]
