"""The files that a tokenizer is made of, by the names that they have in a Hugging Face folder.

A tokenizer keeps their content in memory, so that a checkpoint, or a converted model, can have them as they were read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SENTENCEPIECE, DEFINITION = "tokenizer.model", "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
DESCRIPTION, CONFIG = "tokenizer_config.json", "config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_VOCABULARIES = (DEFINITION, SENTENCEPIECE, VOCABULARY, MERGES)
# what else a Hugging Face folder says about text
_COMPANIONS = (
    DESCRIPTION,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_companions(file: Path) -> dict[str, bytes]:
    """What is said about text beside a vocabulary: all of it where the file has its name at Hugging Face.

    Beside a definition of another name only tokenizer_config.json counts, which names its end of a document: other
    files of such a folder are somebody else's. Of config.json only the ids of tokens are taken.
    """
    found: dict[str, bytes] = {}
    if file.name in _VOCABULARIES:
        found = _read(file.parent, _COMPANIONS)
        ids = {name: value for name, value in _read_settings(file.parent / CONFIG).items() if name in TOKEN_IDS}
        if ids:
            found[CONFIG] = (json.dumps(ids, indent=2) + "\n").encode()
    elif file.suffix == ".json":
        found = _read(file.parent, (DESCRIPTION,))
    return found


def read_folder(folder: Path) -> dict[str, bytes]:
    """Everything about text in a Hugging Face folder that has a tokenizer.json."""
    return _read(folder, _VOCABULARIES) | read_companions(folder / DEFINITION)


def flags_for(folder: Path) -> dict[str, Any]:
    """The flags of a tokenizer whose files lie in `folder`, by field name; {} if there is none we can use."""
    if (folder / DEFINITION).is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    if (folder / SENTENCEPIECE).is_file():
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / SENTENCEPIECE)}
    vocabulary, merges = folder / VOCABULARY, folder / MERGES
    if vocabulary.is_file() and merges.is_file():
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocabulary), "merge_file": str(merges)}
    return {}


def named_eod(files: Mapping[str, bytes]) -> str | None:
    """The piece that ends a document, if tokenizer_config.json names one."""
    if DESCRIPTION not in files:
        return None
    eos = json.loads(files[DESCRIPTION]).get("eos_token")
    return eos["content"] if isinstance(eos, dict) else eos


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _read_settings(path: Path) -> dict[str, Any]:
    """A JSON object; nothing of what is none."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
