"""Write a tokenizer into a Hugging Face folder, with the JSON files by which transformers selects and configures it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megazpp.base.files import write_whole
from megazpp.data.tokenizer import SentencePieceTokenizer, Tokenizer, special_tokens_note
from megazpp.data.tokenizer_folder import (
    CONFIG,
    DEFINITION,
    DESCRIPTION,
    SENTENCEPIECE,
    as_json,
    fast,
    import_package,
    open_folder,
    read_settings,
)

_EOD = "<eod>"
# Texts to compare two tokenizers: one that SentencePiece normalizes by default, one that begins with a space, and one
# with characters for which most models have no piece
_UNUSUAL = ("a  \N{FULLWIDTH LATIN CAPITAL LETTER B}\tc ", " a", "a\x01\N{SNOWMAN}\x02 b")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # character by which SentencePiece represents a space
_NEVER = -1e6  # log probability of a piece that the tokenizer must never choose
# Makes transformers encode "<eod>" in a text as letters, like `Tokenizer.encode`
_PLAIN = {"split_special_tokens": True}


def write_tokenizer_files(folder: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Write a tokenizer's files into a Hugging Face folder.

    A tokenizer for which transformers has no class is written as an equivalent tokenizer.json.

    Args:
        folder: existing folder to write into.
        tokenizer: tokenizer to write; None writes nothing.
    Returns:
        The entries of config.json about special tokens, such as {"eos_token_id": 0}. A value of None means no token.
    """
    ids = token_ids(tokenizer)
    files = {} if tokenizer is None else _written_files(tokenizer)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_whole(folder / name, content)
    return ids


def _written_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the content of the files that a Hugging Face folder with this tokenizer gets, by file name."""
    files = dict(tokenizer.files)
    files.pop(CONFIG, None)  # `write_model` writes the model's config.json
    made: dict[str, Any] = {}
    if not files:
        made = {DEFINITION: _byte_level(tokenizer.vocab_size), DESCRIPTION: fast(_EOD) | _PLAIN}
    elif isinstance(tokenizer, SentencePieceTokenizer):
        made = _describe_sentencepiece(files[SENTENCEPIECE], tokenizer.eod)
    for name, values in made.items():
        files |= as_json(name, values)
    return files


def token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the entries of config.json about special tokens, such as {"eos_token_id": 0}. None means no token.

    Without these entries, transformers would take the default ids of the model's class.

    Args:
        tokenizer: tokenizer of the model; None if it is not known.
    """
    names = "bos_token_id", "eos_token_id"
    if tokenizer is None:
        return dict.fromkeys(names)
    ids = dict.fromkeys(names, tokenizer.eod) | read_settings(tokenizer.files, CONFIG)
    # Keep only the ids of special tokens; the tokenizer's config.json may have other keys, such as model_type
    ids = {name: value for name, value in ids.items() if name.endswith("_token_id")}
    pad = tokenizer.variables.get("pad_token", "")
    if ids.get("pad_token_id") is None and pad in tokenizer.special_ids:
        ids["pad_token_id"] = tokenizer.special_ids[pad]
    return ids


def find_differences(tokenizer: Tokenizer) -> list[str]:
    """Return notes about texts that transformers, with this tokenizer's files, encodes to other ids than MegaZ++ does.

    The list has at most one note, and is empty if the ids are always equal.
    """
    if not tokenizer.special_tokens.used and (note := special_tokens_note(tokenizer)):
        return [note]
    # Compare the ids of a few unusual texts, and of each piece between two letters
    if isinstance(tokenizer, SentencePieceTokenizer):
        theirs, processor = open_folder(_written_files(tokenizer)), tokenizer.processor
        pieces = (processor.id_to_piece(i).replace(_SPACE, " ") for i in range(processor.get_piece_size()))
        texts = [*_UNUSUAL, *(f"a{piece}a" for piece in pieces)]
        pairs = zip(texts, tokenizer.encode_batch(texts), theirs(texts)["input_ids"], strict=True)
        if differ := next((text for text, own, other in pairs if own != other), None):
            return [f"transformers gives other token ids than the SentencePiece model to texts such as {differ!r}"]
    return []


def _describe_sentencepiece(model: bytes, eod: int | None) -> dict[str, dict[str, Any]]:
    """Return the files, by name, that transformers needs in addition to a SentencePiece model's file.

    transformers reads the file of a BPE model (merges) as it is, but it would misread the file of a unigram model
    (probabilities). A tokenizer.json is therefore added for a unigram model.

    Args:
        model: content of the SentencePiece model's file.
        eod: id of the end-of-document token; None if there is none.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    piece = None if eod is None else processor.id_to_piece(eod)
    scores = [processor.get_score(i) for i in range(processor.get_piece_size())]
    prefix = processor.encode("a", out_type=str)[0].startswith(_SPACE)
    if any(score != int(score) for score in scores):  # a unigram model; the scores of BPE are integers, ranks of merges
        return {DEFINITION: _unigram(processor, scores, prefix=prefix), DESCRIPTION: fast(piece) | _PLAIN}
    marks = {"bos_token": piece, "eos_token": piece, "unk_token": processor.id_to_piece(processor.unk_id())}
    added = {"add_bos_token": False, "add_eos_token": False, "add_prefix_space": prefix, "legacy": False}
    return {DESCRIPTION: {"tokenizer_class": "LlamaTokenizer", **added, **marks, **_PLAIN}}


def _unigram(processor: sentencepiece.SentencePieceProcessor, scores: Sequence[float], *, prefix: bool) -> Any:
    """Return the content of a tokenizer.json that encodes texts as a SentencePiece unigram model does.

    Args:
        processor: SentencePiece's processor with the model.
        scores: log probability of each piece.
        prefix: True if the model adds a space before each text.
    """
    tokenizers = import_package("tokenizers", "a tokenizer.json")
    count = processor.get_piece_size()
    special = [i for i in range(count) if processor.is_control(i) or processor.is_unknown(i)]
    # Pieces that must never be chosen for characters of a text; pieces of bytes are for the model's byte fallback alone
    never = {*special, *(i for i in range(count) if processor.is_byte(i) or processor.is_unused(i))}
    pieces = [(processor.id_to_piece(i), _NEVER if i in never else scores[i]) for i in range(count)]
    known = {piece for i, (piece, _) in enumerate(pieces) if i not in never}
    # A letter without a piece has a log probability even below _NEVER, so the tokenizer would prefer a piece like <eod>
    # that begins with this letter. The pre-tokenizer therefore splits off such letters.
    alone = sorted({processor.id_to_piece(i)[0] for i in never} - known)
    found = tokenizers.Tokenizer(
        tokenizers.models.Unigram(pieces, processor.unk_id(), any(map(processor.is_byte, range(count))))
    )
    found.normalizer = tokenizers.normalizers.Sequence(
        [*([tokenizers.normalizers.Prepend(_SPACE)] if prefix else []), tokenizers.normalizers.Replace(" ", _SPACE)]
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(letter, "isolated") for letter in alone]
    )
    end = [tokenizers.decoders.Strip(" ", 1, 0)] if prefix else []
    found.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace(_SPACE, " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), *end]
    )
    return _definition(found, [processor.id_to_piece(i) for i in special])


def _byte_level(vocab_size: int) -> Any:
    """Return the content of a tokenizer.json that encodes texts as `ByteTokenizer` does, one token per byte.

    GPT-2's letters represent the 256 bytes, there are no merges, and the last id is the end-of-document token.
    """
    tokenizers = import_package("tokenizers", "a tokenizer.json")
    letters = import_package("transformers.convert_slow_tokenizer", "a tokenizer.json").bytes_to_unicode()
    vocabulary = {letter: byte for byte, letter in letters.items()} | {_EOD: vocab_size - 1}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    return _definition(found, [_EOD])


def _definition(tokenizer: Any, special: list[str]) -> Any:
    """Add special tokens to a tokenizer of the package tokenizers; return the content of its tokenizer.json."""
    tokenizer.add_special_tokens(special)
    return json.loads(tokenizer.to_str())
