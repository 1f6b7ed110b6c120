"""The tokenizer goes with its model: found, kept, written, and read by transformers with the same ids."""

import io
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from helpers.pairs import TEXT

from megazpp.convert.tokenizer_files import find_differences, write_tokenizer_files
from megazpp.data.text import read_documents, resolve_text_paths, train_sentencepiece
from megazpp.data.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerConfig,
    load_tokenizer,
)
from megazpp.data.tokenizer_folder import find_tokenizer

TEXTS = ["Call me  Ishmael\nSome", " two", "naïve—日本語 🐳", "", "a\ttab"]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, TokenizerConfig]:
    """A tokenizer of each kind that has files."""
    home = tmp_path_factory.mktemp("tokenizers")
    for kind in ("bpe", "unigram"):
        (home / f"{kind}.model").write_bytes(train_sentencepiece(iter([TEXT]), 288, model_type=kind))
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(home), "my")
    bpe.save(str(home / "my.json"))
    return {
        "bpe": TokenizerConfig(tokenizer_model=str(home / "bpe.model")),
        "unigram": TokenizerConfig(tokenizer_model=str(home / "unigram.model")),
        "gpt2": TokenizerConfig(vocab_file=str(home / "my-vocab.json"), merge_file=str(home / "my-merges.txt")),
        "huggingface": TokenizerConfig(tokenizer_model=str(home / "my.json")),
        "bytes": TokenizerConfig(tokenizer_type="NullTokenizer"),
    }


def load(config: TokenizerConfig) -> Tokenizer:
    found = load_tokenizer(config)
    assert found is not None
    return found


KINDS = ["bpe", "unigram", "gpt2", "huggingface", "bytes"]


def test_transformers_gives_the_ids_that_training_saw(files, tmp_path):
    for kind in KINDS:
        ours, folder = load(files[kind]), tmp_path / kind
        folder.mkdir()
        assert write_tokenizer_files(folder, ours) == {"bos_token_id": ours.eod, "eos_token_id": ours.eod}, kind
        assert find_differences(ours) == [], kind
        assert_same(folder, ours, TEXTS)


def assert_same(folder: Path, ours: Tokenizer, texts: list[str]) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == ours.eod
    assert len(theirs) == ours.vocab_size
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_of_a_whole_book_too(kind, tmp_path):
    """The tokenizer of the first run, and what is no piece of it, or looks like one that no text has."""
    book = list(read_documents(*resolve_text_paths(["builtin:moby_dick"])))[:40]
    ours = SentencePieceTokenizer(train_sentencepiece(iter(book), 2048, model_type=kind))
    write_tokenizer_files(tmp_path, ours)
    marks = ["a <eod> b", "<unk>x", "<0x41>", "<", "<<é<eod>"]
    marks += ["\x00\x01", "\r\n\r\n x", "  lead", "trail  ", "\u00a0nb"]
    assert_same(tmp_path, ours, ["Call me", *TEXTS, *marks, *book])


def test_a_byte_tokenizer_of_more_ids_keeps_its_last_one(tmp_path):
    write_tokenizer_files(tmp_path, ByteTokenizer(300))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, theirs("hé")["input_ids"]) == (300, [104, 195, 169])
    assert theirs.decode([104, 300], skip_special_tokens=True) == "h"


def test_written_files_are_the_same_tokenizer_and_are_found_again(files, tmp_path):
    for kind in KINDS[:-1]:
        before, folder = load(files[kind]), tmp_path / kind
        folder.mkdir()
        for name, content in before.files.items():
            (folder / name).write_bytes(content)
        after = load(find_tokenizer(folder))
        assert (after.identity, after.eod, after.files) == (before.identity, before.eod, before.files)


def test_what_a_folder_says_about_text_goes_both_ways(files, tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    output.mkdir()
    shutil.copy(str(files["huggingface"].tokenizer_model), source / "tokenizer.json")
    said = {
        "tokenizer_config.json": {"eos_token": {"content": "Ċ"}, "chat_template": "x"},
        "generation_config.json": {"temperature": 0.5},
        "config.json": {"bos_token_id": 7, "eos_token_id": [8, 9], "hidden_size": 4096},
    }
    for name, values in said.items():
        (source / name).write_text(json.dumps(values))
    (source / "model.safetensors").write_text("weights")
    tokenizer = load(find_tokenizer(source))
    assert tokenizer.eod_name == "Ċ"
    assert write_tokenizer_files(output, tokenizer) == {"bos_token_id": 7, "eos_token_id": [8, 9]}
    names = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in output.iterdir()} == names
    assert json.loads((output / "tokenizer_config.json").read_text()) == said["tokenizer_config.json"]


def test_files_of_somebody_else_beside_a_tokenizer_stay_where_they_are(files, tmp_path):
    for name in ("my.model", "my.json", "config.json", "generation_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_text('{"eos_token_id": 3}')
    shutil.copy(str(files["bpe"].tokenizer_model), tmp_path / "my.model")
    shutil.copy(str(files["huggingface"].tokenizer_model), tmp_path / "my.json")
    for name, kept in (("my.model", "tokenizer.model"), ("my.json", "tokenizer.json")):
        assert list(load(TokenizerConfig(tokenizer_model=str(tmp_path / name))).files) == [kept]


def test_where_transformers_does_something_else_it_is_said(tmp_path):
    normalizing = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=normalizing, vocab_size=30, minloglevel=2
    )
    (line,) = find_differences(SentencePieceTokenizer(normalizing.getvalue()))
    assert "normalizes texts" in line
    definition = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1}, "<s>"))
    definition.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    (line,) = find_differences(HFTokenizer(definition.to_str(), add_special_tokens=False))
    assert "texts do not get the special tokens [0] before them that transformers gives them" in line
    assert find_differences(HFTokenizer(definition.to_str())) == []


def test_without_files_there_is_nothing_to_find(tmp_path):
    assert find_tokenizer(tmp_path) == TokenizerConfig()
    assert write_tokenizer_files(tmp_path, None) == {"bos_token_id": None, "eos_token_id": None}
    assert not list(tmp_path.iterdir())
