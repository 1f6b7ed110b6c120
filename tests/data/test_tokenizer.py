"""Test tokenizers: decoding the tokens of a text returns the text.

Also test end-of-document tokens, other special tokens, and the identity that tells whether two tokenizers are equal.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from helpers.hf_models import write_llama_tokenizer
from helpers.hf_tokenizers import (
    KINDS,
    byte_fallback,
    byte_level,
    definition,
    gpt2_merges,
    llama2,
    llama3,
    qwen2,
    write,
)
from helpers.pairs import TEXT, write_jsonl
from helpers.program import ROOT
from helpers.refusals import not_refused
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from megazpp.data.config import DataConfig
from megazpp.data.dataset import check_inputs
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.preprocess import PreprocessConfig, preprocess
from megazpp.data.text import train_sentencepiece, write_indexed_dataset
from megazpp.data.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    SpecialTokens,
    Tokenizer,
    TokenizerConfig,
    document_end,
    load_tokenizer,
    special_tokens_note,
)
from megazpp.data.tokenizer_folder import find_tokenizer

BPE = tokenizers.ByteLevelBPETokenizer
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="▁\x00")
# hypothesis uses this file's string constants as examples, so without the filter it would generate the end-of-document
# token's name.
ANY_TEXT = st.text(CHARACTERS, max_size=60).filter(lambda text: "<|endoftext|>" not in text)


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    return train_sentencepiece(iter([TEXT]), 300)


@pytest.fixture(scope="module")
def byte_level_bpe() -> BPE:
    tokenizer = BPE()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="module")
def one_of_each(sentencepiece_model, byte_level_bpe) -> list[Tokenizer]:
    return [
        SentencePieceTokenizer(sentencepiece_model),
        HFTokenizer(definition(byte_level_bpe.to_str())),
        ByteTokenizer(),
    ]


def load(folder: Path, **flags: Any) -> Any:
    """Load the tokenizer of a Hugging Face folder; `flags` are fields of TokenizerConfig to change."""
    return load_tokenizer(dataclasses.replace(find_tokenizer(folder), **flags))


@settings(max_examples=100)
@given(text=ANY_TEXT)
@example("  two  spaces ")
@example("\n\n\ttab\r\n")
@example("naïve—日本語 🐳")
@example("<eod>")
@example("</s><unk>")
def test_any_text_round_trips_and_spans_cover_every_character(one_of_each, text):
    for tokenizer in one_of_each:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for i in ids)
        if str(tokenizer.eod_name) not in text:
            same, spans = tokenizer.encode_spans(text)
            assert (same, len(spans), spans) == (ids, len(ids), sorted(spans))
            assert {place for first, last in spans for place in range(first, last)} == set(range(len(text)))


def test_null_tokenizer_counts_like_megatrons():
    tokenizer = ByteTokenizer(50256)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("hé") == [104, 195, 169]


def test_identities_are_equal_exactly_if_ids_are(sentencepiece_model, byte_level_bpe):
    backend = tokenizers.Tokenizer.from_str(byte_level_bpe.to_str())
    backend.add_special_tokens(["<pad>"])
    files = definition(backend.to_str())
    models = [sentencepiece_model, sentencepiece_model, train_sentencepiece(iter([TEXT]), 301)]
    made: list[Tokenizer] = [*map(SentencePieceTokenizer, models), ByteTokenizer(), ByteTokenizer(300)]
    # Change the end-of-document token by the flag: to "<pad>", which is already special, and to "a", which becomes
    # special.
    made += [HFTokenizer(files), *(HFTokenizer(files, eos_token=name) for name in ("<pad>", "a"))]
    assert made[0].identity == made[1].identity
    assert len({tokenizer.identity for tokenizer in made}) == 7


def test_flags_choose_the_tokenizer_or_are_rejected(tmp_path, sentencepiece_model, byte_level_bpe):
    (tmp_path / "spm.model").write_bytes(sentencepiece_model)
    byte_level_bpe.save(f"{tmp_path}/tokenizer.json")
    byte_level_bpe.save_model(str(tmp_path))
    by_type, by_model, here = "tokenizer_type", "tokenizer_model", str(tmp_path)
    for flags, kind in (
        ({}, type(None)),
        # the flags name no model file, so the tokenizer is trained later and not loaded here
        ({by_type: "SentencePieceTokenizer"}, type(None)),
        ({by_type: "NullTokenizer"}, ByteTokenizer),
        ({by_model: f"{here}/spm.model"}, SentencePieceTokenizer),
        ({by_model: f"{here}/spm.model", by_type: "GPTSentencePieceTokenizer"}, SentencePieceTokenizer),
        ({by_model: here}, HFTokenizer),
        ({by_model: f"{here}/tokenizer.json"}, HFTokenizer),
        ({"vocab_file": f"{here}/vocab.json", "merge_file": f"{here}/merges.txt"}, HFTokenizer),
    ):
        tokenizer = load_tokenizer(TokenizerConfig(**flags))
        assert isinstance(tokenizer, kind), flags
    assert (tokenizer.encode(TEXT), tokenizer.eod) == (byte_level_bpe.encode(TEXT).ids, 0)
    (tmp_path / "junk.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.model").touch()
    os.mkfifo(tmp_path / "fifo")
    rows = [
        ({by_model: f"{here}/none"}, "none does not exist"),
        ({by_model: f"{here}/empty.model"}, "empty.model is empty: name a file"),
        ({by_model: f"{here}/fifo"}, "fifo is no regular file: name a file"),
        ({by_model: f"{here}/merges.txt"}, "merges.txt is not a SentencePiece model"),
        ({by_model: f"{here}/junk.json"}, "junk.json: transformers cannot read the tokenizer's files"),
        ({by_model: f"{here}/empty"}, "contains neither tokenizer.json nor"),
        ({by_model: here, by_type: "SentencePieceTokenizer"}, "is a directory"),
        ({by_model: here, "eos_token": "none"}, "--eos-token none is not in the vocabulary"),
        ({by_type: "NullTokenizer", "eos_token": "a"}, "--eos-token a does not apply to NullTokenizer"),
        ({"eos_token": "a"}, "--eos-token a needs --tokenizer-model"),
        ({by_type: "HuggingFaceTokenizer"}, "HuggingFaceTokenizer needs --tokenizer-model"),
        ({by_type: "NullTokenizer", "vocab_size": 255}, "--vocab-size 255 is below 256, the number of byte values"),
        ({by_type: "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file"),
        (
            {"vocab_file": f"{here}/none", "merge_file": f"{here}/junk"},
            f"--vocab-file {here}/none is not an existing file",
        ),
    ]
    assert not not_refused(rows, lambda flags: load_tokenizer(TokenizerConfig(**flags)))


def test_eos_of_a_hugging_face_folder_is_its_eod(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "money": 5}, "[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for description, eod in (
        ({}, 1),
        ({"eos_token": "money"}, 5),
        ({"eos_token": {"__type": "AddedToken", "content": "money"}}, 5),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(description))
        # vocab_size counts up to the largest id, 5, although smaller ids are unused
        assert (load(tmp_path).eod, load(tmp_path).vocab_size) == (eod, 6)


def test_eods_name_in_a_text_becomes_eod_with_its_span(one_of_each, byte_level_bpe):
    # If the folder sets split_special_tokens, transformers does not recognize special tokens in a text. This project
    # recognizes them, because it joins documents by special tokens.
    files = definition(byte_level_bpe.to_str(), tokenizer_config={"split_special_tokens": True})
    for tokenizer in (*one_of_each, HFTokenizer(files)):
        name = tokenizer.eod_name
        ids, spans = tokenizer.encode_spans(f"money{name}never{name}")
        money, never = tokenizer.encode("money"), tokenizer.encode("never")
        assert tokenizer not in one_of_each or tokenizer.decode([*money, tokenizer.eod]) == "money"
        assert ids == [*money, tokenizer.eod, *never, tokenizer.eod]
        assert spans[len(money)] == (5, 5 + len(name))
        assert spans[-1] == (10 + len(name), 10 + 2 * len(name))


SPECIAL = ["Call me", " two", "money</s>me", "money</s> <s>me", "", "me  me", "[PAD] money", "<|endoftext|>me", "é"]
BOTH = {"add_bos_token": True, "add_eos_token": True}
LLAMA: list[dict[str, object]] = [
    {},
    BOTH,  # if there is a tokenizer.json, these two settings have no effect
    {"tokenizer_class": "LlamaTokenizerFast"},
    {"tokenizer_class": "LlamaTokenizer", "legacy": True},
    {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False},
    {"tokenizer_class": "LlamaTokenizer", "model_type": "mistral"},
    {"pad_token": "[PAD]", "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True}},
    {"extra_special_tokens": ["money"]},
    {"added_tokens_decoder": {"200": {"content": "[PAD]", "special": False, "normalized": True}}},
]
GPT2: list[dict[str, object]] = [
    {"model_type": "gpt2"},
    {"tokenizer_class": "GPT2Tokenizer", **BOTH},
    {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    {"tokenizer_class": "GPT2Tokenizer", "pad_token": "[PAD]", "add_bos_token": False},
]


def test_folder_gives_the_ids_of_transformers(tmp_path, byte_level_bpe):
    cases = [("llama", config) for config in LLAMA] + [(kind, each) for kind in ("json", "merges") for each in GPT2]
    of_identity: dict[str, list[list[int]]] = {}
    for number, (kind, described) in enumerate(cases):
        folder, config = tmp_path / str(number), {"model_type": "llama"} | described
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": config.pop("model_type")}))
        if kind == "llama":
            write_llama_tokenizer(folder, TEXT, **config)
        else:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            byte_level_bpe.save_model(str(folder))
            if kind == "json":
                byte_level_bpe.save(str(folder / "tokenizer.json"))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ours = {marked: load(folder, add_special_tokens=marked) for marked in (True, False)}
        for marked, tokenizer in ours.items():
            ids = [theirs(text, add_special_tokens=marked)["input_ids"] for text in SPECIAL]
            assert [tokenizer.encode(text) for text in SPECIAL] == ids, (kind, described)
            # If a text itself begins or ends with the special token that encoding adds, transformers adds it again.
            # This project does not.
            before, after, _ = ours[True].special_tokens
            for text, whole in zip(SPECIAL, ids, strict=True):
                bare = theirs(text, add_special_tokens=False)["input_ids"]
                if marked and before and bare[: len(before)] == before:
                    whole = whole[len(before) :]
                if marked and after and bare[-len(after) :] == after:
                    whole = whole[: -len(after)]
                found = ours[True].encode_spans(text, add_special_tokens=marked).ids
                assert found == whole, (kind, described, text)
            assert tokenizer.vocab_size == len(theirs)
            assert of_identity.setdefault(tokenizer.identity, ids) == ids, (kind, described)


SHOWN = [*SPECIAL, "naïve—日本語 🐳", " a  b ", "\n\n1234 x", "<|im_end|>\n", "money <|im_end|> never", "\ufb01 \uff21"]


@pytest.mark.parametrize("write", KINDS)
def test_each_kind_of_folder_gives_transformers_ids_texts_and_specials(tmp_path, write):
    write(tmp_path)
    theirs, ours, bare = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        load(tmp_path),
        load(tmp_path, add_special_tokens=False),
    )
    ids = [theirs(text)["input_ids"] for text in SHOWN]
    assert [ours.encode(text) for text in SHOWN] == ours.encode_batch(SHOWN) == ids
    assert [bare.encode(text) for text in SHOWN] == [theirs(x, add_special_tokens=False)["input_ids"] for x in SHOWN]
    assert [ours.decode(each) for each in ids] == theirs.batch_decode(ids, skip_special_tokens=True)
    assert [ours.decode_with_specials(each) for each in ids] == theirs.batch_decode(ids)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.variables == theirs.special_tokens_map
    assert ours.eod == theirs.eos_token_id
    if theirs.eos_token is not None:
        offsets = theirs(SHOWN, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
        if ours._finds_eod:
            assert [bare.encode_spans(text).spans for text in SHOWN] == offsets
    for name, content in ours.files.items():
        assert name == "config.json" or (tmp_path / name).read_bytes() == content
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in ours.files.items():
        (copy / name).write_bytes(content)
    assert (load(copy).identity, load(copy).encode_batch(SHOWN)) == (ours.identity, ids)


def test_only_hugging_face_folders_need_transformers(tmp_path, monkeypatch, sentencepiece_model):
    (tmp_path / "spm.model").write_bytes(sentencepiece_model)
    folder = write_llama_tokenizer(tmp_path / "their", TEXT)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_tokenizer(TokenizerConfig(tokenizer_model=f"{tmp_path}/spm.model")).encode("money")
    assert load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer")).encode("money")
    with pytest.raises(ValueError, match=r"needs the package transformers: pip install 'megazpp\[huggingface\]'"):
        load(folder)


@pytest.mark.parametrize("write", [qwen2, llama3, llama2, gpt2_merges])
def test_eos_token_flag_sets_eod_in_all_files_that_name_it(tmp_path, write):
    """Test that --eos-token sets the end-of-document token in all files that name it, as in TRL.

    Other end ids in generation_config.json stay.
    """
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    before = load(tmp_path)
    name = next(name for name in before.special_ids if name != before.eod_name)
    tokenizer, index = load(tmp_path, eos_token=name), before.special_ids[name]
    assert (tokenizer.eod, tokenizer.eod_name, tokenizer.variables["eos_token"]) == (index, name, name)
    assert tokenizer.identity != before.identity
    assert tokenizer.encode("Call me") == before.encode("Call me")
    said = {name: json.loads(content) for name, content in tokenizer.files.items() if name.endswith("config.json")}
    assert (said["tokenizer_config.json"]["eos_token"], said["config.json"]["eos_token_id"]) == (name, index)
    assert said.get("generation_config.json", {}).get("eos_token_id", [index])[0] == index
    # a tokenizer that is reloaded from these files, as from a checkpoint, has the same identity
    assert HFTokenizer(tokenizer.files).identity == tokenizer.identity


# contents of further JSON files in the folder, and the expected ids that end a generated text
STOPS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [2]),
    ({"config": {"eos_token_id": [2, 7]}}, [2, 7]),
    ({"config": {"eos_token_id": 9}, "generation_config": {"eos_token_id": [5, 2]}}, [2, 5]),
    ({"config": {"eos_token_id": 9}, "generation_config": {"eos_token_id": 6}}, [2, 6]),
    ({"config": {"eos_token_id": 9}, "generation_config": {}}, [2]),
    ({"config": {"eos_token_id": None}}, [2]),
]


def test_stop_ids_come_from_generation_config_or_else_config(tmp_path):
    folder = write_llama_tokenizer(tmp_path, TEXT)
    for files, stops in STOPS:
        for name in ("config", "generation_config"):
            (folder / f"{name}.json").unlink(missing_ok=True)
        for name, values in files.items():
            (folder / f"{name}.json").write_text(json.dumps(values))
        assert load(folder).stop_ids == stops, files
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(
        ValueError, match="eos_token_id of the tokenizer's files is '</s>', neither an id nor a list of ids"
    ):
        _ = load(folder).stop_ids


def test_truncation_and_padding_in_tokenizer_json_are_ignored(byte_level_bpe):
    """Load a tokenizer.json that sets truncation and padding, and check that texts are neither cut nor padded.

    transformers writes these settings into the file after a call that truncates.
    """
    cuts = tokenizers.Tokenizer.from_str(byte_level_bpe.to_str())
    cuts.enable_truncation(16)
    cuts.enable_padding(length=16)
    assert len(cuts.encode(TEXT)) == len(cuts.encode("me")) == 16
    plain, ours = (HFTokenizer(definition(text)) for text in (byte_level_bpe.to_str(), cuts.to_str()))
    for text in (TEXT, "me"):
        assert ours.encode(text) == plain.encode(text)


def test_documents_have_their_marks_once_and_must_match_the_flag(tmp_path):
    folder, texts = write_llama_tokenizer(tmp_path / "their", TEXT), write_jsonl(tmp_path / "a.jsonl", "Call me", "")
    for adds, note, refusal in (
        (True, "note: texts get the special tokens [1] before them", "all texts begin with"),
        (False, "--no-add-special-tokens: texts do not get the special tokens [1] before them", "no text begins with"),
    ):
        config = dataclasses.replace(find_tokenizer(folder), add_special_tokens=adds)
        prefix, tokenizer, lines = tmp_path / f"{adds}_text_document", load_tokenizer(config), list[str]()
        flags = {"input": (str(texts),), "output_prefix": f"{tmp_path}/{adds}", "append_eod": True}
        preprocess(PreprocessConfig(**flags), config, lines.append)
        written = IndexedDataset(prefix)
        # The second text is empty, so it would consist of special tokens only, and no document is written for it.
        (ids,) = [written.get(i).tolist() for i in range(len(written))]
        assert (ids, ids[0] == 1, ids.count(1)) == ([*tokenizer.encode("Call me"), 2], adds, adds)
        assert note in lines[0]
        write_indexed_dataset(iter(["Call me"]), tokenizer, tmp_path / "streamed")
        assert IndexedDataset(tmp_path / "streamed").get(0).tolist() == ids
        data = DataConfig(data_path=(str(prefix),))
        check_inputs(data, config)
        with pytest.raises(ValueError, match=f"{prefix}: {refusal} the special tokens"):
            check_inputs(data, dataclasses.replace(config, add_special_tokens=not adds))


def test_document_has_one_eod_if_the_tokenizer_adds_it_itself():
    tokenizer = ByteTokenizer()
    for after, used, end in (([256], True, []), ([7, 256], True, []), ([256, 7], True, [256]), ([256], False, [256])):
        tokenizer.special_tokens = SpecialTokens([], after, used)
        assert document_end(tokenizer) == end


def test_token_places_include_spaces_that_the_files_would_trim(tmp_path):
    """Test that spans of tokens include spaces, although the folder's files ask to trim them.

    Without the space, the token of a space at the end of a prompt would seem to be at the answer's first letter.
    """
    text = "Call  me \n money "
    for processor in (
        processors.ByteLevel(trim_offsets=True),
        processors.Sequence([processors.ByteLevel(trim_offsets=True)]),
        processors.RobertaProcessing(("<|endoftext|>", 0), ("<|endoftext|>", 0), trim_offsets=True),
    ):
        tokenizer = byte_level(["<|endoftext|>"])
        tokenizer.post_processor = processor
        write(tmp_path, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
        ids, spans = load(tmp_path).encode_spans(text, add_special_tokens=False)
        assert "".join(text[first:last] for first, last in spans) == text
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_mark_that_a_text_has_already_is_not_repeated(tmp_path):
    byte_fallback(tmp_path)  # writes a folder whose tokenizer adds <s> before and </s> after each text
    tokenizer, bare = load(tmp_path), load(tmp_path, add_special_tokens=False)
    a = tokenizer.encode_spans("a").ids[1:-1]
    for text in ("a", "<s>a", "a</s>", "<s>a</s>"):
        ids, spans = tokenizer.encode_spans(text)
        assert (ids, len(spans)) == ([1, *a, 2], len(ids)), text
        assert tokenizer.encode_prompt(text) == [1, *a, *[2] * text.endswith("</s>")]
        assert bare.encode_spans(text).ids == bare.encode(text)
    assert tokenizer.encode_spans("").ids == [1, 2]
    assert tokenizer.encode_prompt("") == [1]
    assert (
        special_tokens_note(tokenizer)
        == "texts get the special tokens [1] before and [2] after them that transformers adds"
    )
    assert (
        special_tokens_note(tokenizer, prompts=True)
        == "prompts get the special tokens [1] before them that transformers adds"
    )


def test_id_beyond_the_models_vocabulary_is_rejected_where_it_occurs(tmp_path):
    folder = write_llama_tokenizer(tmp_path, TEXT, pad_token="[PAD]")
    rows = load(folder).vocab_size - 1
    tokenizer = load(folder, model_vocab_size=rows)
    assert tokenizer.vocab_size == rows
    assert tokenizer.encode("money")
    for encode in (tokenizer.encode, tokenizer.encode_spans):
        with pytest.raises(ValueError, match=f"the id {rows}, which is beyond the model's vocabulary of {rows} tokens"):
            encode("money [PAD]")
    with pytest.raises(ValueError, match="the tokenizer's </s> has the id 2, but the model has 2 tokens"):
        load(folder, model_vocab_size=2)


@pytest.mark.slow
def test_training_on_the_shipped_text_needs_no_transformers(tmp_path):
    for name in ("transformers", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')")
    model = (
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 --lr 1e-3"
    )
    run = "--vocab-size 400 --micro-batch-size 1 --train-iters 1 --eval-iters 0 --nproc 1 --sample-tokens 2"
    files = ["--text-path", "builtin:moby_dick", "--data-cache-path", "cache", "--run-dir", "run"]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *model.split(), *run.split(), *files]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a sample of text:" in done.stdout
