"""Test that a model's tokenizer is found, saved in checkpoints and exported.

An exported tokenizer must give the same token ids in transformers.
"""

import io
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from helpers.hf_tokenizers import definition
from helpers.pairs import TEXT

from megazpp.convert.tokenizer_files import find_differences, write_tokenizer_files
from megazpp.data.text import read_documents, resolve_text_paths, train_sentencepiece
from megazpp.data.tokenizer import HFTokenizer, SentencePieceTokenizer, Tokenizer, TokenizerConfig, load_tokenizer
from megazpp.data.tokenizer_folder import find_tokenizer

TEXTS = ["Call me  Ishmael\nSome", " two", "naïve—日本語 🐳", "", "a\ttab"]
KINDS = ["bpe", "unigram", "gpt2", "huggingface"]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, TokenizerConfig]:
    """Make one tokenizer of each kind that is read from files; return the TokenizerConfig by kind."""
    home = tmp_path_factory.mktemp("tokenizers")
    for kind in ("bpe", "unigram"):
        (home / f"{kind}.model").write_bytes(train_sentencepiece(iter([TEXT]), 288, model_type=kind))
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(home), "my")
    bpe.save(str(home / "my.json"))
    gpt2 = TokenizerConfig(vocab_file=str(home / "my-vocab.json"), merge_file=str(home / "my-merges.txt"))
    models = {"bpe": "bpe.model", "unigram": "unigram.model", "huggingface": "my.json"}
    return {"gpt2": gpt2} | {kind: TokenizerConfig(tokenizer_model=str(home / name)) for kind, name in models.items()}


def assert_same(folder: Path, ours: Tokenizer, texts: list[str]) -> None:
    assert write_tokenizer_files(folder, ours) == {"bos_token_id": ours.eod, "eos_token_id": ours.eod}
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == ours.eod
    assert max(theirs.get_vocab().values()) == ours.vocab_size - 1
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode([*ids, ours.eod], skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", KINDS)
def test_written_tokenizer_gives_the_training_ids_in_transformers(kind, files, tmp_path):
    ours = load_tokenizer(files[kind])
    for name, content in ours.files.items():
        (tmp_path / name).write_bytes(content)
    found = load_tokenizer(find_tokenizer(tmp_path))
    assert (found.identity, found.eod, found.files) == (ours.identity, ours.eod, ours.files)
    assert find_differences(ours) == []
    assert_same(tmp_path, ours, TEXTS)


@pytest.mark.parametrize("last", [256, 300])
def test_byte_tokenizer_of_any_size_keeps_its_last_id(last, tmp_path):
    assert_same(tmp_path, load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=last)), TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_tokenizer_trained_on_a_book_is_written_for_transformers(kind, tmp_path):
    """Train a SentencePiece tokenizer on a book, export it, and compare its ids with transformers'.

    Texts include characters outside the vocabulary, and strings that look like special pieces.
    """
    book = list(read_documents(*resolve_text_paths(["builtin:moby_dick"])))[:40]
    ours = SentencePieceTokenizer(train_sentencepiece(iter(book), 2048, model_type=kind))
    marks = ["a <eod> b", "<unk>x", "<0x41>", "<", "<<é<eod>"]
    marks += ["\x00\x01", "\r\n\r\n x", "  lead", "trail  ", "\u00a0nb"]
    assert_same(tmp_path, ours, ["Call me", *TEXTS, *marks, *book])


def test_text_settings_of_a_folder_survive_both_directions(files, tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    output.mkdir()
    shutil.copy(str(files["huggingface"].tokenizer_model), source / "tokenizer.json")
    said = {
        "tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "Ċ"}, "chat_template": "x"},
        "generation_config.json": {"temperature": 0.5},
        "config.json": {"bos_token_id": 7, "eos_token_id": [8, 9], "hidden_size": 4096},
    }
    for name, values in said.items():
        (source / name).write_text(json.dumps(values))
    (source / "model.safetensors").write_text("weights")
    tokenizer = load_tokenizer(find_tokenizer(source))
    assert tokenizer.eod_name == "Ċ"
    assert write_tokenizer_files(output, tokenizer) == {"bos_token_id": 7, "eos_token_id": [8, 9]}
    assert {file.name for file in output.iterdir()} == {*said, "tokenizer.json"} - {"config.json"}
    assert json.loads((output / "tokenizer_config.json").read_text()) == said["tokenizer_config.json"]


def test_unrelated_files_next_to_a_tokenizer_are_ignored(files, tmp_path):
    for name in ("config.json", "generation_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_text('{"eos_token_id": 3}')
    for kind, kept in (("bpe", {"tokenizer.model"}), ("huggingface", {"tokenizer.json", "tokenizer_config.json"})):
        copy = shutil.copy(str(files[kind].tokenizer_model), tmp_path)
        assert load_tokenizer(TokenizerConfig(tokenizer_model=copy)).files.keys() == kept


def test_differences_from_transformers_are_reported():
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    for text, options in {
        "a  \uff22\tc ": {},
        " a": plain | {"model_type": "bpe", "byte_fallback": True},  # transformers adds no space before a space
        "a<sep>a": plain | {"byte_fallback": True, "user_defined_symbols": ["<sep>"]},
    }.items():
        model, sentences = io.BytesIO(), iter(TEXT.splitlines())
        sizes = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **sizes, **options)
        (line,) = find_differences(SentencePieceTokenizer(model.getvalue()))
        assert line.endswith(f"such as {text!r}")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1}, "<s>"))
    words.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    (line,) = find_differences(HFTokenizer(definition(words.to_str()), add_special_tokens=False))
    assert "texts do not get the special tokens [0] before them that transformers adds" in line
    assert find_differences(HFTokenizer(definition(words.to_str()))) == []
