"""The tokenizer's flags, and functions for the files of a Hugging Face tokenizer folder.

transformers opens such a folder (`open_folder`) and decides on token ids, special tokens and chat templates. The
contents of the files stay in memory as a dictionary {file name: bytes}, because checkpoints and converted models also
store these files.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megazpp.base.files import errors_naming
from megazpp.base.flags import Config, flag
from megazpp.base.program import in_words

# The largest size of a vocabulary, and the words with which an error message explains it. Token ids are stored in 32
# bits with a sign.
MOST_TOKENS = (2**31 - 1, "the number of 32-bit token ids")
SENTENCEPIECE, DEFINITION = "tokenizer.model", "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
DESCRIPTION, CONFIG, GENERATION = "tokenizer_config.json", "config.json", "generation_config.json"
TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
VOCABULARIES = (
    *(DEFINITION, SENTENCEPIECE, VOCABULARY, MERGES, "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "spm.model", "qwen.tiktoken"),
)
# Files of a Hugging Face model folder, in addition to the vocabulary, that belong to its tokenizer.
_COMPANIONS = (DESCRIPTION, "special_tokens_map.json", "added_tokens.json", TEMPLATE, GENERATION)
# Entries of a model's config.json that a tokenizer needs, or by which transformers selects the tokenizer's class.
_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "model_type", "tokenizer_class", "transformers_version")
# Possible names of the end-of-document token, likeliest first, for tokenizers whose files name no eos token.
EOD_NAMES = ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# The tokenizer_config.json of a folder that has only vocab.json and merges.txt.
MERGES_ALONE = {"tokenizer_class": "GPT2Tokenizer"}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """Tokenizer.

    Without any of these flags a SentencePiece tokenizer is trained on --text-path.

    Attributes:
        tokenizer_type: kind of tokenizer (default: detected from --tokenizer-model; without it, a tokenizer is
            trained).
        tokenizer_model: Hugging Face folder or tokenizer.json, or SentencePiece model.
        vocab_size: pieces of a SentencePiece tokenizer to train (default: 4096).
        vocab_file: GPT-2's vocab.json, for GPT2BPETokenizer.
        merge_file: GPT-2's merges.txt, for GPT2BPETokenizer.
        eos_token: token that ends documents, answers and generated texts (default: the eos token of the tokenizer's
            files).
        add_special_tokens: put the special tokens of the tokenizer's files (BOS, ...) around texts, as transformers
            does.
        model_vocab_size: size of the model's vocabulary, if it differs from the tokenizer's (default: the
            checkpoint's).
    """

    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "NullTokenizer",
        ]
        | None
    ) = flag(None)
    tokenizer_model: str | None = flag(None, common=True, must_exist=True)
    vocab_size: int | None = flag(None, common=True, must_be="positive", most=MOST_TOKENS)
    vocab_file: str | None = flag(None, must_exist=True)
    merge_file: str | None = flag(None, must_exist=True)
    eos_token: str | None = flag(None)
    add_special_tokens: bool = flag(True)
    model_vocab_size: int | None = flag(None, must_be="positive", most=MOST_TOKENS)

    @property
    def known_vocab_size(self) -> int | None:
        """Size of the model's vocabulary according to the flags; None if only the tokenizer's files determine it."""
        return self.model_vocab_size or self.vocab_size

    @property
    def kind(self) -> str | None:
        """The tokenizer's type: --tokenizer-type, or the type that suits the files; None if the flags name no files."""
        if self.tokenizer_type is not None:
            return self.tokenizer_type
        if self.vocab_file or self.merge_file:
            return "GPT2BPETokenizer"
        if self.tokenizer_model is None:
            return None
        path = Path(self.tokenizer_model).expanduser()
        described = path.name in VOCABULARIES and (path.parent / DESCRIPTION).is_file()
        is_theirs = described or path.suffix == ".json" or path.is_dir()
        return "HuggingFaceTokenizer" if is_theirs else "SentencePieceTokenizer"


def names_tokenizer(config: TokenizerConfig) -> bool:
    """Return True if the flags name a tokenizer.

    If False, a program takes the checkpoint's tokenizer, trains one on --text-path, or uses bytes for --mock-data.
    """
    trainable = config.kind in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer")
    return not trainable or config.tokenizer_model is not None


def find_tokenizer(folder: Path) -> TokenizerConfig:
    """Return the tokenizer flags that name the tokenizer in a Hugging Face or checkpoint folder.

    If the folder has no tokenizer, the result has all flags at their defaults.
    """
    names = {name for name in (*VOCABULARIES, DESCRIPTION) if (folder / name).is_file()}
    if DEFINITION in names or len(names) > 1:  # transformers opens several files, such as vocab.json and merges.txt
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if SENTENCEPIECE in names:
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / SENTENCEPIECE))
    return TokenizerConfig()


def read_folder(folder: Path) -> dict[str, bytes]:
    """Read the tokenizer's files from a Hugging Face model folder.

    Returns:
        The content of each file by name. The config.json contains only the entries that a tokenizer needs.
    """
    templates = sorted((folder / _TEMPLATES).glob("*.jinja"))
    names = (*VOCABULARIES, *_COMPANIONS, *(f"{_TEMPLATES}/{path.name}" for path in templates))
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if (folder / CONFIG).is_file():
        settings = read_settings({CONFIG: (folder / CONFIG).read_bytes()}, CONFIG)
        found |= as_json(CONFIG, {name: value for name, value in settings.items() if name in _SETTINGS})
    return found


def read_settings(files: Mapping[str, bytes], name: str, where: str = "of the tokenizer") -> dict[str, Any]:
    """Return the JSON object in one of a tokenizer's files; {} if the file does not exist.

    Args:
        files: content of the files by file name.
        name: name of the file to read.
        where: words that follow the file's name in messages, such as "of the tokenizer".
    Raises:
        ValueError: the file is not JSON, or contains another value than an object.
    """
    try:
        values = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} {where} is not JSON: {in_words(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} {where} contains a JSON value that is not an object")
    return values


def as_json(name: str, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return {name: content} for a JSON file with the object `values`, to merge with the tokenizer's other files."""
    return {name: (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()}


def fast(eos: str | None) -> dict[str, Any]:
    """Return the object for a tokenizer_config.json that sets the eos token and leaves the rest to tokenizer.json.

    Args:
        eos: text of the eos token; None sets no eos token.
    """
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}


def with_eos(files: Mapping[str, bytes], name: str, index: int) -> dict[str, bytes]:
    """Return a tokenizer's files with another eos token in all files that name the eos token.

    If generation_config.json lists several eos ids, the list keeps its other ids. Source: TRL 1.16, SFTTrainer,
    `eos_token`.

    Args:
        files: content of the tokenizer's files by file name.
        name: text of the new eos token.
        index: id of the new eos token.
    """
    changed = dict(files) | as_json(DESCRIPTION, read_settings(files, DESCRIPTION) | {"eos_token": name})
    changed |= as_json(CONFIG, read_settings(files, CONFIG) | {"eos_token_id": index})
    if GENERATION in files:
        settings = read_settings(files, GENERATION)
        others = [each for each in ids_of(settings.get("eos_token_id")) if each != index]
        changed |= as_json(GENERATION, settings | {"eos_token_id": [index, *others]})
    return changed


def ids_of(value: Any) -> list[int]:
    """Return the list of token ids in the entry eos_token_id of a Hugging Face file: null, an id, or a list of ids.

    Raises:
        ValueError: the entry has another value.
    """
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in found):
        raise ValueError(
            f"the entry eos_token_id of the tokenizer's files is {value!r}, neither an id nor a list of ids"
        )
    return found


def with_template(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    """Return a tokenizer's files with `source` as their only chat template.

    Args:
        files: content of the tokenizer's files by file name. Their chat templates are removed.
        source: source text of the new chat template, in Jinja.
    """
    others = {name: content for name, content in files.items() if not name.startswith(f"{_TEMPLATES}/")}
    description = read_settings(files, DESCRIPTION)
    if description.pop("chat_template", None) is not None:
        others |= as_json(DESCRIPTION, description)
    return others | {TEMPLATE: source.encode()}


def open_folder(files: Mapping[str, bytes]) -> Any:
    """Open a tokenizer's files with transformers' AutoTokenizer, and return its tokenizer.

    Args:
        files: content of the tokenizer's files by file name.
    Raises:
        ValueError: transformers is not installed, cannot read the files, or has no fast tokenizer for them.
    """
    transformers = import_package("transformers", "a Hugging Face tokenizer")
    with tempfile.TemporaryDirectory(prefix="megazpp-tokenizer-") as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            with errors_naming(path):
                path.write_bytes(content)
        try:
            found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # any type is possible: a malformed tokenizer.json raises a bare Exception
            reason = str(error).replace(folder, "the folder")
            raise ValueError(f"transformers cannot read the tokenizer's files: {reason}") from error
    if not getattr(found, "is_fast", False):
        kind = type(found).__name__
        raise ValueError(
            f"transformers opens the tokenizer as {kind}, but only fast tokenizers are supported: add a {DEFINITION}"
        )
    return found


def import_package(name: str, user: str, installs: str = "'megazpp[huggingface]'") -> Any:
    """Import and return an optional package, when a feature first needs it.

    Args:
        name: name of the package or module.
        user: subject of the message, which says what needs the package, such as "a Hugging Face tokenizer".
        installs: argument of the `pip install` command that the message gives.
    Raises:
        ValueError: the package is not installed. The message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{user} needs the package {name}: pip install {installs} ({error})") from error
