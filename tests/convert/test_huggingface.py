"""GPT-2, Llama and its relatives in and out: the same bits, the same logits, on any tensor-parallel size."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.checkpoints import Job, run
from helpers.hf_models import (
    LLAMA3,
    SEQ,
    TOKENS,
    VOCAB,
    edit_config,
    file_tensors,
    logits,
    make_gpt2,
    make_llama,
    make_mistral,
    make_qwen2,
    make_qwen3,
    randomized,
    save,
)
from helpers.ranks import ranks
from helpers.training import Case, build_on_ranks
from safetensors.torch import save_file

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.checkpoint.record import read_record, shape_of
from megazpp.convert import huggingface
from megazpp.convert.convert import ConvertConfig, convert
from megazpp.convert.huggingface import choose_architecture, open_model
from megazpp.convert.native import open_checkpoint
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis

SAME = 1e-5  # absolute, on logits of about 1: fp32 sums in another order
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": make_gpt2,
    "gpt2 untied, exact gelu, bf16": lambda: make_gpt2(
        tie_word_embeddings=False, activation_function="gelu", n_inner=40
    ).bfloat16(),
    "gpt2 fp16": lambda: make_gpt2().half(),
    "llama grouped": make_llama,
    "llama tied, biases, wide heads": lambda: make_llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12, num_key_value_heads=4
    ),
    "llama one key head, bf16": lambda: make_llama(num_key_value_heads=1).bfloat16(),
    "llama 3.2": lambda: make_llama(rope_scaling=dict(LLAMA3), head_dim=16, tie_word_embeddings=True),
    "mistral with a window": lambda: make_mistral(sliding_window=SEQ),
    "qwen2": make_qwen2,
    "qwen2 tied, wide heads, scaled frequencies": lambda: make_qwen2(
        tie_word_embeddings=True, head_dim=12, rope_scaling=dict(LLAMA3)
    ),
    "qwen3": make_qwen3,
    "qwen3 tied, bf16": lambda: make_qwen3(tie_word_embeddings=True).bfloat16(),
}


def turn(source: Path, output: Path) -> Path:
    convert(ConvertConfig(input=str(source), output=str(output)), TokenizerConfig(), lambda line: None)
    return output


def logits_on_ranks(load: str, tp: int) -> torch.Tensor:
    """What our model makes of a checkpoint: [B, S, V], with a vocabulary padded for `tp`."""
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    config = dataclasses.replace(GPTConfig(**shape_of(record.flags)), hidden_dropout=0.0, attention_dropout=0.0)
    model, sharding, dims = build_on_ranks(Case(model=config, tp=tp, vocab_size=record.vocab_size, seq_length=SEQ))
    load_weights(model, sharding, dims, source, record, vocab_size=record.vocab_size, say=lambda line: None)
    with torch.no_grad():
        part = model.eval()(TOKENS)
    return dims.tp.all_gather(part.permute(2, 0, 1).contiguous()).permute(1, 2, 0)[..., :VOCAB]


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_keeps_every_bit_and_the_logits_are_transformers(name: str, tmp_path: Path):
    theirs = save(MODELS[name](), tmp_path / "theirs")
    ours = turn(theirs, tmp_path / "ours")
    back = turn(ours, tmp_path / "back")
    before, after = file_tensors(theirs), file_tensors(back)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key]), key
    expected = logits(theirs)
    assert torch.equal(logits(back), expected)
    model_type = json.loads((theirs / "config.json").read_text())["model_type"]
    assert json.loads((back / "config.json").read_text())["model_type"] == model_type
    for tp in (1, 2) if name != "llama one key head, bf16" else (1,):
        for found in ranks(tp).run(logits_on_ranks, str(ours), tp):
            torch.testing.assert_close(found, expected, atol=SAME, rtol=0)


def test_a_mistral_without_a_window_is_a_llama(tmp_path: Path):
    theirs = save(make_mistral(sliding_window=None), tmp_path / "theirs")
    back = turn(turn(theirs, tmp_path / "ours"), tmp_path / "back")
    assert json.loads((back / "config.json").read_text())["model_type"] == "llama"
    torch.testing.assert_close(logits(back), logits(theirs), atol=SAME, rtol=0)


def test_the_window_of_a_mistral_bounds_the_samples(tmp_path: Path):
    theirs = save(make_mistral(sliding_window=6), tmp_path / "theirs")
    ours = turn(theirs, tmp_path / "ours")
    record = read_record(ours / "iter_0000000")
    assert record.flags["seq_length"] == 6
    assert GPTConfig(**shape_of(record.flags)).window == 6


def test_a_model_in_several_files_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = save(make_llama(), tmp_path / "whole")
    parts = save(make_llama(), tmp_path / "parts", max_shard_size="30KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    monkeypatch.setattr(huggingface, "FILE_BYTES", 30_000)
    back = turn(turn(parts, tmp_path / "ours"), tmp_path / "back")
    assert len(list(back.glob("model-0000?-of-0000?.safetensors"))) > 2
    expected, found = file_tensors(whole), file_tensors(back)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert torch.equal(logits(back), logits(whole))  # through the index


def test_the_padding_of_a_run_s_vocabulary_stays_behind(tmp_path: Path):
    case = Case(tp=2)
    ranks(2).run(run, Job(case=case, steps=1, flags={"save": str(tmp_path / "ours")}))
    words = open_checkpoint(tmp_path / "ours", None)[0].tensors["embedding.word.weight"]
    found = file_tensors(turn(tmp_path / "ours", tmp_path / "theirs"))["transformer.wte.weight"]
    assert found.shape == words.shape == (case.vocab_size, case.model.hidden)
    assert case.vocab_size % case.tp == 1  # so that the run had a row more
    assert torch.equal(found, words.read())


def test_the_first_gpt2_files_are_read_too(tmp_path: Path):
    """No prefix, causal masks among the weights, the tied matrix twice."""
    theirs = save(make_gpt2(), tmp_path / "theirs")
    tensors = file_tensors(theirs)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, SEQ, SEQ) for layer in range(2)}
    old |= {"h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": old["wte.weight"].clone()}
    save_file(old, theirs / "model.safetensors")
    back = file_tensors(turn(turn(theirs, tmp_path / "ours"), tmp_path / "back"))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


# fmt: off
UNKNOWN = {
    "model_type": ("gpt2", {"model_type": "gemma"}, "model_type 'gemma' is not one that can be converted"),
    "inverse": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    "no layers": ("gpt2", {"n_layer": 0}, "n_layer 0 is not a positive integer"),
    "heads": ("gpt2", {"n_head": 5}, "--hidden-size 32 is not divisible by --num-attention-heads 5"),
    "rope_parameters": (
        "llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rope_parameters.rope_type 'yarn'"
    ),
    "no factor": (
        "llama", {"rope_parameters": {**LLAMA3, "factor": None, "rope_theta": 5e5}}, "rope_parameters.factor is missing"
    ),
    "a factor below one": ("llama", {"rope_scaling": LLAMA3 | {"factor": 0.5}}, "--rope-scaling-factor 0.5"),
    "layers of their own": ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "truth": ("gpt2", {"tie_word_embeddings": 3}, "tie_word_embeddings 3 is not true or false"),
    "no part": ("llama", {"rope_scaling": "linear"}, "rope_scaling 'linear' holds no settings"),
    "not a list": ("llama", {"layer_types": 3}, "layer_types 3 is not supported"),
    "number": ("llama", {"rms_norm_eps": "tiny"}, "rms_norm_eps 'tiny' is not a number"),
    "groups": ("llama", {"num_key_value_heads": 3}, "--num-attention-heads 4 is not divisible by --num-query-groups 3"),
    "wide": ("llama", {"hidden_size": 40, "head_dim": 8}, "has shape [107, 32], the model's is [107, 40]"),
    "vocabulary": ("llama", {"vocab_size": 108}, "model.embed_tokens.weight has shape [107, 32]"),
    "more layers": ("llama", {"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
    "fewer layers": ("llama", {"num_hidden_layers": 1}, "have no place in this model"),
}
# fmt: on


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {"gpt2": save(make_gpt2(), home / "gpt2"), "llama": save(make_llama(), home / "llama")}


def test_what_we_do_not_have_is_refused_by_the_key_of_the_config(folders: dict[str, Path], tmp_path: Path):
    for case, (kind, values, message) in UNKNOWN.items():
        folder = shutil.copytree(folders[kind], tmp_path / case)
        edit_config(folder, **values)
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            open_model(folder)
        assert "\n" not in str(caught.value)


def test_an_index_that_names_what_is_outside_its_folder_is_refused(folders: dict[str, Path], tmp_path: Path):
    shutil.copy(folders["gpt2"] / "config.json", tmp_path)
    for file in ("..", ".", "", "../model.safetensors", "/model.safetensors"):
        (tmp_path / huggingface.INDEX).write_text(json.dumps({"weight_map": {"wte.weight": file}}))
        with pytest.raises(ValueError, match=re.escape(f"index.json names {file!r}, which is no file of this folder")):
            open_model(tmp_path)


LLAMA = {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "disable_bias_linear": True}


NOT_THERE: list[tuple[dict[str, Any], str]] = [
    ({"swiglu": True}, "GPT2LMHeadModel cannot hold a model with --swiglu"),
    ({"disable_bias_linear": True}, "--disable-bias-linear"),
    ({"normalization": "RMSNorm"}, "--normalization RMSNorm"),
    ({"apply_layernorm_1p": True, "kv_channels": 4}, "--apply-layernorm-1p, --kv-channels 4"),
    ({"group_query_attention": True, "num_query_groups": 2}, "--num-query-groups 2"),
    ({"position_embedding_type": "none"}, "--position-embedding-type none"),
    (LLAMA | {"rotary_percent": 0.5}, "LlamaForCausalLM cannot hold a model with --rotary-percent 0.5"),
    (LLAMA | {"add_qkv_bias": True, "qk_layernorm": True}, "Qwen3ForCausalLM cannot hold .* --add-qkv-bias"),
    (LLAMA | {"add_qkv_bias": True, "window_size": "3,0"}, "MistralForCausalLM cannot hold .* --add-qkv-bias"),
    (LLAMA | {"qk_layernorm": True, "window_size": "3,0"}, "Qwen3ForCausalLM cannot hold .* --window-size 3,0"),
    (LLAMA | {"qk_layernorm": True, "disable_bias_linear": False}, "with --no-disable-bias-linear"),
    ({"qk_layernorm": True, "window_size": "3,0"}, "GPT2LMHeadModel .* --qk-layernorm, --window-size 3,0"),
    (LLAMA | {"swiglu": False, "normalization": "LayerNorm"}, "--normalization LayerNorm, --no-swiglu"),
]


def test_what_they_do_not_have_is_refused_by_its_flags():
    for changes, message in NOT_THERE:
        config = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=8, **changes)
        with pytest.raises(ValueError, match=message):
            choose_architecture(config)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_a_reward_model_scores_the_same_there_and_here_and_there_again(tmp_path: Path, kind: str):
    """Sums in another order: 1e-5."""
    causal = {"llama": make_llama, "gpt2": make_gpt2, "qwen2": make_qwen2}[kind]().config
    auto = transformers.AutoModelForSequenceClassification
    causal.num_labels, causal.pad_token_id = 1, 3
    there = randomized(auto.from_config(causal))
    folder, texts = save(there, tmp_path / "there"), TOKENS.where(TOKENS != 3, 4)
    with torch.no_grad():
        expected = there(texts).logits.squeeze(1)
    source = open_model(folder)
    config = dataclasses.replace(source.config, make_vocab_size_divisible_by=1)
    here = GPTModel(config, vocab_size=source.rows, tp=MeshAxis("tp"), scalar_head=True).eval()
    here.load_state_dict({name: entry.read() for name, entry in source.tensors.items()})
    with torch.no_grad():
        found = here(texts, with_values=True).values[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    lines: list[str] = []
    for first, second in (("there", "here"), ("here", "back")):
        paths = {"input": str(tmp_path / first), "output": str(tmp_path / second)}
        convert(ConvertConfig(**paths), TokenizerConfig(), lines.append)
    back = auto.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        again = torch.cat([back(text.unsqueeze(0)).logits[0] for text in texts])
    assert (type(back), back.config.num_labels) == (type(there), 1)
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)
