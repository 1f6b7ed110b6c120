"""The tokenizer that goes with a model: found beside it, carried along, and named by the flags of ours."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece

from megazpp.convert.huggingface import CONFIG, TOKEN_IDS, read_json
from megazpp.data.tokenizer import TokenizerConfig

FOLDER = "tokenizer"
SENTENCEPIECE, DESCRIPTION = "tokenizer.model", "tokenizer_config.json"
_VOCABULARIES = ("tokenizer.json", SENTENCEPIECE, "vocab.json", "merges.txt")
# What else a Hugging Face folder says about text; of its config.json only the ids of tokens are used
_COMPANIONS = (
    DESCRIPTION,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    CONFIG,
)


def find_tokenizer(folder: Path) -> TokenizerConfig:
    """Flags for the tokenizer in a Hugging Face folder; none if there is none that we can use."""
    if (folder / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if (folder / SENTENCEPIECE).is_file():
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / SENTENCEPIECE))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    return TokenizerConfig()


def carry(config: TokenizerConfig, folder: Path, final: Path) -> TokenizerConfig:
    """Copy the tokenizer's files into `folder`, under the names they have at Hugging Face.

    Args:
        final: what `folder` will be called.
    Returns:
        The flags that name the copies.
    """
    folder.mkdir(exist_ok=True)
    if config.vocab_file is not None and config.merge_file is not None:
        _copy(_found(_COMPANIONS, Path(config.vocab_file).parent), folder)
        _copy({"vocab.json": Path(config.vocab_file), "merges.txt": Path(config.merge_file)}, folder)
        return dataclasses.replace(config, vocab_file=str(final / "vocab.json"), merge_file=str(final / "merges.txt"))
    if config.tokenizer_model is None:
        return config
    model = Path(config.tokenizer_model).expanduser()
    if model.is_dir():
        _copy(_found((*_VOCABULARIES, *_COMPANIONS), model), folder)
        return dataclasses.replace(config, tokenizer_model=str(final))
    _copy(_found(_COMPANIONS, model.parent), folder)
    name = "tokenizer.json" if model.suffix == ".json" else SENTENCEPIECE
    _copy({name: model}, folder)
    return dataclasses.replace(config, tokenizer_model=str(final / name))


def has_files(config: TokenizerConfig) -> bool:
    """Whether there is anything to carry."""
    return config.tokenizer_model is not None or config.vocab_file is not None


def carry_out(config: TokenizerConfig, folder: Path, eod: int | None) -> dict[str, Any]:
    """Copy the tokenizer's files into a Hugging Face folder, and describe those that are not described.

    Args:
        eod: the tokenizer's.
    Returns:
        What config.json says about the tokenizer.
    """
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), eod)
    if not has_files(config):
        return ids
    carry(config, folder, folder)
    if (folder / CONFIG).exists():
        ids |= {name: value for name, value in read_json(folder / CONFIG).items() if name in TOKEN_IDS}
        (folder / CONFIG).unlink()
    if not (folder / DESCRIPTION).exists():
        (folder / DESCRIPTION).write_text(json.dumps(_describe(folder, eod), indent=2) + "\n")
    return ids


def _describe(folder: Path, eod: int | None) -> dict[str, Any]:
    """A tokenizer_config.json for files that have none."""
    piece: str | None = None
    if (folder / SENTENCEPIECE).is_file() and not (folder / "tokenizer.json").is_file():
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / SENTENCEPIECE))
        piece = None if eod is None else processor.id_to_piece(eod)
        unknown = processor.id_to_piece(processor.unk_id())
        marks = {"bos_token": piece, "eos_token": piece, "unk_token": unknown}
        space = processor.encode("a", out_type=str)[0].startswith("\N{LOWER ONE EIGHTH BLOCK}")
        added = {"add_bos_token": False, "add_eos_token": False, "add_prefix_space": space, "legacy": False}
        return {"tokenizer_class": "LlamaTokenizer", **added, **marks}
    if (folder / "vocab.json").is_file():
        vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        piece = next((piece for piece, index in vocabulary.items() if index == eod), None)
        return {"tokenizer_class": "GPT2Tokenizer", "bos_token": piece, "eos_token": piece, "unk_token": piece}
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    piece = next((entry["content"] for entry in vocabulary.get("added_tokens", []) if entry["id"] == eod), None)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": piece}


def _found(names: Iterable[str], folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}


def _copy(files: dict[str, Path], folder: Path) -> None:
    for name, file in files.items():
        if not (folder / name).exists() or not file.samefile(folder / name):
            shutil.copyfile(file, folder / name)
