"""The tokenizer goes with its model: found, carried, recorded, and read by transformers with the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import transformers

from megazpp.convert.tokenizer_files import carry, carry_out, find_tokenizer
from megazpp.data.tokenizer import TokenizerConfig, load_tokenizer
from megazpp.data.tokenizer_training import train_sentencepiece

TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9
TEXTS = ["Call me  Ishmael\nSome", " two", "naïve—日本語 🐳", "", "a\ttab"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerConfig]:
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
    }


@pytest.mark.parametrize("kind", ["bpe", "unigram", "gpt2", "huggingface"])
def test_transformers_gives_the_ids_that_training_saw(kind: str, files: dict[str, TokenizerConfig], tmp_path: Path):
    ours = load_tokenizer(files[kind])
    assert ours is not None
    assert carry_out(files[kind], tmp_path, ours.eod) == {"bos_token_id": ours.eod, "eos_token_id": ours.eod}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == ours.eod
    assert len(theirs) == ours.vocab_size
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "unigram", "gpt2", "huggingface"])
def test_a_carried_tokenizer_is_the_same_one_and_is_found_again(
    kind: str, files: dict[str, TokenizerConfig], tmp_path: Path
):
    before = load_tokenizer(files[kind])
    assert before is not None
    flags = carry(files[kind], tmp_path / "copy", tmp_path / "copy")
    for config in (flags, find_tokenizer(tmp_path / "copy")):
        after = load_tokenizer(config)
        assert after is not None
        assert (after.identity, after.eod) == (before.identity, before.eod)


def test_what_a_folder_says_about_text_goes_both_ways(files: dict[str, TokenizerConfig], tmp_path: Path):
    source = tmp_path / "source"
    model = files["huggingface"].tokenizer_model
    assert model is not None
    carry(TokenizerConfig(tokenizer_model=model), source, source)
    said = {
        "tokenizer_config.json": {"eos_token": {"content": "Ċ"}, "chat_template": "x"},
        "generation_config.json": {"temperature": 0.5},
        "config.json": {"bos_token_id": 7, "eos_token_id": [8, 9], "hidden_size": 4096},
    }
    for name, values in said.items():
        (source / name).write_text(json.dumps(values))
    (source / "model.safetensors").write_text("weights")
    flags = carry(find_tokenizer(source), tmp_path / "kept", tmp_path / "kept")
    tokenizer = load_tokenizer(flags)
    assert tokenizer is not None
    assert tokenizer.decode([tokenizer.eod or 0]) == "\n"
    output = tmp_path / "output"
    output.mkdir()
    assert carry_out(flags, output, tokenizer.eod) == {"bos_token_id": 7, "eos_token_id": [8, 9]}
    assert sorted(file.name for file in output.iterdir()) == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((output / "tokenizer_config.json").read_text()) == said["tokenizer_config.json"]


def test_without_files_there_is_nothing_to_carry(tmp_path: Path):
    assert find_tokenizer(tmp_path) == TokenizerConfig()
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=300)
    assert carry_out(null, tmp_path, 300) == {"bos_token_id": 300, "eos_token_id": 300}
    assert carry_out(TokenizerConfig(), tmp_path, None) == {"bos_token_id": None, "eos_token_id": None}
    assert not list(tmp_path.iterdir())
