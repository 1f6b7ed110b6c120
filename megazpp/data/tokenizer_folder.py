"""The tokenizer's flags, and the files of a Hugging Face tokenizer folder.

transformers opens such a folder (`open_folder`) and decides on ids, special tokens and chat templates. Files are kept
in memory, because checkpoints and converted models store them, too.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megazpp.base.flags import check_positive, check_words, flag
from megazpp.base.program import in_words

SENTENCEPIECE, DEFINITION = "tokenizer.model", "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
DESCRIPTION, CONFIG, GENERATION = "tokenizer_config.json", "config.json", "generation_config.json"
TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
VOCABULARIES = (
    *(DEFINITION, SENTENCEPIECE, VOCABULARY, MERGES, "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "spm.model", "qwen.tiktoken"),
)
# Other files of a Hugging Face folder that concern text.
_COMPANIONS = (DESCRIPTION, "special_tokens_map.json", "added_tokens.json", TEMPLATE, GENERATION)
# Entries of config.json that concern text, or decide on the class of tokenizer that transformers uses.
_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "model_type", "tokenizer_class", "transformers_version")
# Names of the end of a document, likeliest first, for tokenizers without a configuration.
EOD_NAMES = ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
MERGES_ALONE = {"tokenizer_class": "GPT2Tokenizer"}  # for a vocab.json with merges.txt and no tokenizer_config.json


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer.

    Without any of these flags a SentencePiece tokenizer is trained on --text-path.
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
    ) = flag(None, "kind of tokenizer (default: detected from --tokenizer-model; without it, a tokenizer is trained)")
    tokenizer_model: str | None = flag(
        None, "Hugging Face folder or tokenizer.json, or SentencePiece model", common=True
    )
    vocab_size: int | None = flag(None, "pieces of a SentencePiece tokenizer to train (default: 4096)", common=True)
    vocab_file: str | None = flag(None, "GPT-2's vocab.json, for GPT2BPETokenizer")
    merge_file: str | None = flag(None, "GPT-2's merges.txt, for GPT2BPETokenizer")
    eos_token: str | None = flag(
        None, "token that ends documents, answers and generated texts (default: the eos token of the tokenizer's files)"
    )
    add_special_tokens: bool = flag(
        True, "put the special tokens of the tokenizer's files (BOS, ...) around texts, as transformers does"
    )
    model_vocab_size: int | None = flag(
        None, "size of the model's vocabulary, if it differs from the tokenizer's (default: the checkpoint's)"
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "vocab_size", "model_vocab_size")

    @property
    def kind(self) -> str | None:
        """The given type, otherwise the type that the files look like; None if no files are named."""
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
    """Return True if the flags name a tokenizer. Otherwise one is trained, or a checkpoint has it."""
    trainable = config.kind in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer")
    return not trainable or config.tokenizer_model is not None


def find_tokenizer(folder: Path) -> TokenizerConfig:
    """Return flags for the tokenizer in a Hugging Face or checkpoint folder; empty flags if there is no tokenizer."""
    names = {name for name in (*VOCABULARIES, DESCRIPTION) if (folder / name).is_file()}
    if DEFINITION in names or len(names) > 1:  # a BPE tokenizer has two files
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if SENTENCEPIECE in names:
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / SENTENCEPIECE))
    return TokenizerConfig()


def read_folder(folder: Path) -> dict[str, bytes]:
    """Read the files of a Hugging Face folder that concern text, and the entries of its config.json that do."""
    templates = sorted((folder / _TEMPLATES).glob("*.jinja"))
    names = (*VOCABULARIES, *_COMPANIONS, *(f"{_TEMPLATES}/{path.name}" for path in templates))
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if (folder / CONFIG).is_file():
        settings = read_settings({CONFIG: (folder / CONFIG).read_bytes()}, CONFIG)
        found |= as_json(CONFIG, {name: value for name, value in settings.items() if name in _SETTINGS})
    return found


def read_settings(files: Mapping[str, bytes], name: str, where: str = "of the tokenizer") -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file does not exist.

    Args:
        files: content of files by name.
        name: file to read.
        where: description of the file's place, for messages.
    Raises:
        ValueError: the file is not JSON, or holds something other than an object.
    """
    try:
        values = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} {where} is not JSON: {in_words(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} {where} holds no JSON object")
    return values


def as_json(name: str, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the JSON file `name` with these values."""
    return {name: (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()}


def fast(eos: str | None) -> dict[str, Any]:
    """Return a tokenizer_config.json that sets the eos token and leaves all else to tokenizer.json."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}


def with_eos(files: Mapping[str, bytes], name: str, index: int) -> dict[str, bytes]:
    """Make a token the eos token in all files that name one.

    The list in generation_config.json keeps its other ids. Source: TRL 1.16, SFTTrainer, `eos_token`.
    """
    changed = dict(files) | as_json(DESCRIPTION, read_settings(files, DESCRIPTION) | {"eos_token": name})
    changed |= as_json(CONFIG, read_settings(files, CONFIG) | {"eos_token_id": index})
    if GENERATION in files:
        settings = read_settings(files, GENERATION)
        others = [each for each in ids_of(settings.get("eos_token_id")) if each != index]
        changed |= as_json(GENERATION, settings | {"eos_token_id": [index, *others]})
    return changed


def ids_of(value: Any) -> list[int]:
    """Return the ids of an eos_token_id entry, which is null, an id, or a list of ids."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in found):
        raise ValueError(f"eos_token_id is {value!r}, neither an id nor a list of ids")
    return found


def with_template(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    """Replace all chat templates of a folder by one."""
    others = {name: content for name, content in files.items() if not name.startswith(f"{_TEMPLATES}/")}
    description = read_settings(files, DESCRIPTION)
    if description.pop("chat_template", None) is not None:
        others |= as_json(DESCRIPTION, description)
    return others | {TEMPLATE: source.encode()}


def open_folder(files: Mapping[str, bytes]) -> Any:
    """Open these files with transformers' AutoTokenizer.

    Raises:
        ValueError: transformers is not installed, cannot read the files, or has no fast tokenizer for them.
    """
    transformers = import_package("transformers", "a Hugging Face tokenizer")
    with tempfile.TemporaryDirectory(prefix="megazpp-tokenizer-") as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        try:
            found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # any type is possible: a malformed tokenizer.json raises a bare Exception
            raise ValueError(f"transformers cannot read it: {str(error).replace(folder, 'the folder')}") from error
    if not getattr(found, "is_fast", False):
        raise ValueError(f"transformers has no fast tokenizer for it, only {type(found).__name__}")
    return found


def import_package(name: str, user: str, installs: str = "'megazpp[huggingface]'") -> Any:
    """Import an optional package; raises ValueError with the command that installs it if it is missing.

    Args:
        name: package or module, whose import may take seconds.
        user: object that needs it, for the message.
        installs: argument of `pip install`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{user} needs the package {name}: pip install {installs} ({error})") from error
