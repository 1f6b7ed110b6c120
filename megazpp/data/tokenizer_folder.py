"""A tokenizer's flags, and the files of its folder as Hugging Face has it.

transformers opens such a folder (`open_folder`), so ids, special tokens and chat templates are those that it gives.
Files are kept in memory, for checkpoints and converted models.
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
# other files of a Hugging Face folder about text
_COMPANIONS = (DESCRIPTION, "special_tokens_map.json", "added_tokens.json", TEMPLATE, GENERATION)
# entries of config.json about text, and those that decide which class of tokenizer transformers takes
_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "model_type", "tokenizer_class", "transformers_version")
# names of the end of a document in tokenizers that have no configuration beside them, likeliest first
EOD_NAMES = ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
MERGES_ALONE = {"tokenizer_class": "GPT2Tokenizer"}  # the description of a vocab.json with merges.txt that has none
INSTALL = "pip install 'megazpp[huggingface]'"


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
    ) = flag(None, "kind of tokenizer (default: what --tokenizer-model looks like; trained if there is none)")
    tokenizer_model: str | None = flag(
        None, "Hugging Face folder or tokenizer.json, or SentencePiece model", common=True
    )
    vocab_size: int | None = flag(None, "pieces of a SentencePiece tokenizer to train (default: 4096)", common=True)
    vocab_file: str | None = flag(None, "GPT-2's vocab.json, for GPT2BPETokenizer")
    merge_file: str | None = flag(None, "GPT-2's merges.txt, for GPT2BPETokenizer")
    eos_token: str | None = flag(
        None, "token that ends documents, answers and generated texts (default: as the tokenizer's files say)"
    )
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
        path = Path(self.tokenizer_model).expanduser()
        described = path.name in VOCABULARIES and (path.parent / DESCRIPTION).is_file()
        is_theirs = described or path.suffix == ".json" or path.is_dir()
        return "HuggingFaceTokenizer" if is_theirs else "SentencePieceTokenizer"


def names_tokenizer(config: TokenizerConfig) -> bool:
    """True if the flags name a tokenizer; else one is trained, or comes from a checkpoint."""
    trainable = config.kind in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer")
    return not trainable or config.tokenizer_model is not None


def find_tokenizer(folder: Path) -> TokenizerConfig:
    """Return flags for the tokenizer in a Hugging Face folder or beside a checkpoint; none if there is no tokenizer."""
    names = {name for name in (*VOCABULARIES, DESCRIPTION) if (folder / name).is_file()}
    if DEFINITION in names or len(names) > 1:  # also vocab.json and merges.txt alone
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if SENTENCEPIECE in names:
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / SENTENCEPIECE))
    return TokenizerConfig()


def read_folder(folder: Path) -> dict[str, bytes]:
    """Read the files about text of a Hugging Face folder; of config.json, only the entries about text."""
    templates = sorted((folder / _TEMPLATES).glob("*.jinja"))
    names = (*VOCABULARIES, *_COMPANIONS, *(f"{_TEMPLATES}/{path.name}" for path in templates))
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if (folder / CONFIG).is_file():
        settings = read_settings({CONFIG: (folder / CONFIG).read_bytes()}, CONFIG)
        found |= as_json(CONFIG, {name: value for name, value in settings.items() if name in _SETTINGS})
    return found


def read_settings(files: Mapping[str, bytes], name: str, where: str = "beside the tokenizer") -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is no such file."""
    try:
        values = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} {where} is not JSON: {in_words(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} {where} holds no JSON object")
    return values


def as_json(name: str, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a file of a folder that holds these values."""
    return {name: (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()}


def with_default_description(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Add tokenizer_config.json to files that say nothing about the class of the tokenizer and its special tokens."""
    if {DESCRIPTION, CONFIG} & files.keys():
        return dict(files)
    return {**files, **as_json(DESCRIPTION, fast(None) if DEFINITION in files else MERGES_ALONE)}


def fast(eos: str | None) -> dict[str, Any]:
    """Return the tokenizer_config.json that leaves everything but the end of a document to tokenizer.json."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}


def with_eos(files: Mapping[str, bytes], name: str, index: int) -> dict[str, bytes]:
    """Make a token the end of texts, in all files that say what ends them.

    Source: TRL 1.16, SFTTrainer, `eos_token`. The list of generation_config.json keeps its other ids.
    """
    changed = dict(files) | as_json(DESCRIPTION, read_settings(files, DESCRIPTION) | {"eos_token": name})
    changed |= as_json(CONFIG, read_settings(files, CONFIG) | {"eos_token_id": index})
    if GENERATION in files:
        settings = read_settings(files, GENERATION)
        others = [each for each in ids_of(settings.get("eos_token_id")) if each != index]
        changed |= as_json(GENERATION, settings | {"eos_token_id": [index, *others]})
    return changed


def ids_of(value: Any) -> list[int]:
    """Return the ids of an entry of config.json or generation_config.json: null, an id, or a list of ids."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in found):
        raise ValueError(f"eos_token_id is {value!r}, neither an id nor a list of ids")
    return found


def with_template(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    """Replace the chat templates of a folder by one."""
    others = {name: content for name, content in files.items() if not name.startswith(f"{_TEMPLATES}/")}
    description = read_settings(files, DESCRIPTION)
    if description.pop("chat_template", None) is not None:
        others |= as_json(DESCRIPTION, description)
    return others | {TEMPLATE: source.encode()}


def open_folder(files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer that transformers' AutoTokenizer makes of these files.

    Raises:
        ValueError: transformers is missing or cannot read them, or has no fast tokenizer for them.
    """
    transformers = import_package("transformers", "a Hugging Face tokenizer")
    with tempfile.TemporaryDirectory(prefix="megazpp-tokenizer-") as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        try:
            found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of any type, also bare Exception for a malformed tokenizer.json
            raise ValueError(f"transformers cannot read it: {str(error).replace(folder, 'the folder')}") from error
    if not getattr(found, "is_fast", False):
        raise ValueError(f"transformers has no fast tokenizer for it, only {type(found).__name__}")
    return found


def import_package(name: str, user: str) -> Any:
    """Import an optional package; raises ValueError with the command that installs it if it is missing.

    Args:
        name: package, whose import may take seconds.
        user: object that needs it, for the message.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{user} needs the package {name}: {INSTALL} ({error})") from error
