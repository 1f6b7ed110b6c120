"""The tokenizer that the flags name, read from its files.

A Hugging Face folder gives the ids that transformers gives for it, with the special tokens that its files put around a
text (`Marks`): <s> before a prompt, and before each document of a dataset, as Megatron's HuggingFaceTokenizer has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megazpp.base.flags import check_positive, check_words, flag
from megazpp.data.tokenizer_folder import (
    DEFINITION,
    MERGES,
    SENTENCEPIECE,
    VOCABULARIES,
    VOCABULARY,
    read_companions,
    read_description,
    read_files,
    tokenizers,
)
from megazpp.data.tokenizer_kinds import ByteTokenizer, HFTokenizer, SentencePieceTokenizer, Tokenizer


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


def names_tokenizer(config: TokenizerConfig) -> bool:
    """True if the flags name a tokenizer; else one is trained, or comes from a checkpoint."""
    trainable = config.kind in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer")
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
    files = read_companions(Path(config.vocab_file)) | contents
    return HFTokenizer(tokenizer.to_str(), files=files, add_special_tokens=config.add_special_tokens)
