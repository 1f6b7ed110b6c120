"""Tokenizers give text back, know their end-of-document token, and are told apart by their identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.data.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    TokenizerConfig,
    load_tokenizer,
)
from megazpp.data.tokenizer_training import train_sentencepiece

TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\x00"), max_size=60)


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    return train_sentencepiece(iter([TEXT]), 300)


@pytest.fixture(scope="module")
def byte_level_bpe() -> tokenizers.ByteLevelBPETokenizer:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    return tokenizer


@settings(max_examples=100)
@given(text=ANY_TEXT)
def test_a_trained_sentencepiece_gives_any_text_back(sentencepiece_model: bytes, text: str) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids


@pytest.mark.parametrize("text", ["", " ", "  two  spaces ", "\n\n\ttab\r\n", "naïve—日本語 🐳", "<eod>", "</s><unk>"])
def test_awkward_text_comes_back_from_every_tokenizer(
    sentencepiece_model: bytes, byte_level_bpe: tokenizers.ByteLevelBPETokenizer, text: str
) -> None:
    for tokenizer in (
        SentencePieceTokenizer(sentencepiece_model),
        HFTokenizer(byte_level_bpe.to_str()),
        ByteTokenizer(),
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids


def test_eod_decodes_to_nothing(sentencepiece_model: bytes, byte_level_bpe: tokenizers.ByteLevelBPETokenizer) -> None:
    for tokenizer in (
        SentencePieceTokenizer(sentencepiece_model),
        HFTokenizer(byte_level_bpe.to_str()),
        ByteTokenizer(),
    ):
        assert tokenizer.eod is not None
        assert 0 <= tokenizer.eod < tokenizer.vocab_size
        assert tokenizer.decode([*tokenizer.encode("money"), tokenizer.eod]) == "money"


def test_the_null_tokenizer_counts_as_megatrons_does() -> None:
    tokenizer = ByteTokenizer(50256)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("hé") == [104, 195, 169]
    with pytest.raises(ValueError, match="--vocab-size 255 is below the 256 byte values"):
        ByteTokenizer(255)


def test_equal_ids_have_equal_identities_and_others_not(
    sentencepiece_model: bytes, byte_level_bpe: tokenizers.ByteLevelBPETokenizer
) -> None:
    definition = byte_level_bpe.to_str()
    assert SentencePieceTokenizer(sentencepiece_model).identity == SentencePieceTokenizer(sentencepiece_model).identity
    identities = {
        SentencePieceTokenizer(sentencepiece_model).identity,
        SentencePieceTokenizer(train_sentencepiece(iter([TEXT]), 301)).identity,
        HFTokenizer(definition).identity,
        HFTokenizer(definition, eod="a").identity,  # another token at the end of every document
        ByteTokenizer().identity,
        ByteTokenizer(300).identity,
    }
    assert len(identities) == 6


def test_flags_choose_the_tokenizer(
    tmp_path: Path, sentencepiece_model: bytes, byte_level_bpe: tokenizers.ByteLevelBPETokenizer
) -> None:
    (tmp_path / "spm.model").write_bytes(sentencepiece_model)
    (tmp_path / "tokenizer.json").write_text(byte_level_bpe.to_str(), encoding="utf-8")
    byte_level_bpe.save_model(str(tmp_path))

    def load(**flags: str) -> object:
        return load_tokenizer(TokenizerConfig(**flags))  # type: ignore[arg-type]

    assert load() is None
    assert load(tokenizer_type="SentencePieceTokenizer") is None  # to be trained
    assert isinstance(load(tokenizer_type="NullTokenizer"), ByteTokenizer)
    for kind in ({}, {"tokenizer_type": "GPTSentencePieceTokenizer"}):
        assert isinstance(load(tokenizer_model=str(tmp_path / "spm.model"), **kind), SentencePieceTokenizer)
    for model in (tmp_path, tmp_path / "tokenizer.json"):
        assert isinstance(load(tokenizer_model=str(model)), HFTokenizer)
    gpt2 = load(vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt"))
    assert isinstance(gpt2, HFTokenizer)
    assert gpt2.encode(TEXT) == byte_level_bpe.encode(TEXT).ids
    assert gpt2.eod == 0


@pytest.mark.parametrize("eos", ["money", {"content": "money", "lstrip": False}])
def test_the_eos_of_a_hugging_face_directory_is_its_eod(tmp_path: Path, eos: object) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "money": 5}, "[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    loaded = load_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path)))
    assert loaded is not None
    assert (loaded.eod, loaded.vocab_size) == (5, 6)  # ids have holes
    (tmp_path / "tokenizer_config.json").unlink()
    loaded = load_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path)))
    assert loaded is not None
    assert loaded.eod == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"tokenizer_model": "{tmp}/none"}, "none does not exist"),
        ({"tokenizer_model": "{tmp}/junk"}, "junk is not a SentencePiece model"),
        ({"tokenizer_model": "{tmp}/junk.json"}, "not a usable tokenizer.json"),
        ({"tokenizer_model": "{tmp}"}, "there is no tokenizer.json"),
        ({"tokenizer_model": "{tmp}", "tokenizer_type": "SentencePieceTokenizer"}, "is a directory"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "HuggingFaceTokenizer needs --tokenizer-model"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file"),
        ({"vocab_file": "{tmp}/none", "merge_file": "{tmp}/junk"}, "--vocab-file .*none is not a file"),
    ],
)
def test_unusable_tokenizers_are_refused_with_flag_and_reason(
    tmp_path: Path, flags: dict[str, str], reason: str
) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    (tmp_path / "junk.json").write_text("{}")
    config = TokenizerConfig(**{k: v.format(tmp=tmp_path) for k, v in flags.items()})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=reason):
        load_tokenizer(config)


@settings(max_examples=100)
@given(text=ANY_TEXT)
def test_spans_are_in_order_and_those_of_all_ids_make_the_text(
    sentencepiece_model: bytes, byte_level_bpe: tokenizers.ByteLevelBPETokenizer, text: str
) -> None:
    for tokenizer in (
        SentencePieceTokenizer(sentencepiece_model),
        HFTokenizer(byte_level_bpe.to_str()),
        ByteTokenizer(),
    ):
        ids, spans = tokenizer.encode_spans(text)
        assert len(ids) == len(spans)
        assert ids == tokenizer.encode(text)
        assert spans == sorted(spans)
        assert {place for first, last in spans for place in range(first, last)} == set(range(len(text)))


def test_the_name_of_eod_in_a_text_is_eod_and_has_its_place(
    sentencepiece_model: bytes, byte_level_bpe: tokenizers.ByteLevelBPETokenizer
) -> None:
    plain = HFTokenizer(byte_level_bpe.to_str())
    without = json.loads(byte_level_bpe.to_str()) | {"added_tokens": []}  # in the vocabulary, but not looked for
    for tokenizer in (
        SentencePieceTokenizer(sentencepiece_model),
        plain,
        HFTokenizer(json.dumps(without)),
        ByteTokenizer(),
    ):
        name = tokenizer.eod_name
        assert name is not None
        ids, spans = tokenizer.encode_spans(f"money{name}never{name}")
        money, never = tokenizer.encode("money"), tokenizer.encode("never")
        assert ids == [*money, tokenizer.eod, *never, tokenizer.eod]
        assert spans[len(money)] == (5, 5 + len(name))
        assert spans[-1] == (10 + len(name), 10 + 2 * len(name))
