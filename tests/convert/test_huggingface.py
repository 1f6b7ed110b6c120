"""Test the conversion of models from and to Hugging Face formats.

Converted weights keep their bits, and models give the same logits, for any tensor-parallel size.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import run
from helpers.hf_models import (
    LLAMA3,
    SEQ,
    TOKENS,
    VOCAB,
    convert_folder,
    file_tensors,
    logits,
    make_gpt2,
    make_llama,
    make_model,
    our_logits,
    our_model,
    randomized,
    save,
)
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import chosen, nightly, slow
from helpers.training import Case, build_on_ranks
from safetensors.torch import save_file

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import shape_of
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.checkpoint.safe_reader import WHOLE_WEIGHTS
from megazpp.convert import convert, huggingface
from megazpp.convert.huggingface import choose_architecture, open_model
from megazpp.convert.model import HEAD, held
from megazpp.convert.native import open_checkpoint
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig
from megazpp.post_training.data import make_rollout_batch
from megazpp.post_training.reference import FrozenModel

BITS = {"rtol": 0.0, "atol": 0.0}
SUMS = {"rtol": 0.0, "atol": 1e-5}  # tolerance for logits of about 1, because fp32 numbers are added in other orders
SCALED = {"rope_scaling": dict(LLAMA3)}
TIED = {"tie_word_embeddings": True}
EXACT_GELU = {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 40}
BIASES = {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "num_key_value_heads": 4}
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3, "initializer_range": 0.03}
FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}
ROPE: dict[str, Any] = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 12}
YARN = {"rope_parameters": ROPE | {"rope_type": "yarn"}}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
ALTERNATING = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
TURNS = {"beta_fast": 4.0, "beta_slow": 0.5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", DROPOUT),
    "gpt2 untied, exact gelu": ("gpt2", EXACT_GELU),
    "llama grouped": ("llama", {"attention_dropout": 0.4, "rms_norm_eps": 1e-3}),
    "llama tied, biases, wide heads": ("llama", TIED | BIASES),
    "llama 3.2, one key head": ("llama", TIED | SCALED | {"head_dim": 16, "num_key_value_heads": 1}),
    "mistral with a window": ("mistral", {"sliding_window": SEQ}),
    "mistral without": ("mistral", {"sliding_window": None}),
    "qwen2 tied, wide heads, scaled": ("qwen2", TIED | SCALED | {"head_dim": 12}),
    "qwen3": ("qwen3", {}),
    "mistral beyond its window": ("mistral", {"sliding_window": 5}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3 with alternating layers": ("qwen3", ALTERNATING),
    "granite": ("granite", FACTORS | BIASES),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5}),
    "smollm3 by an interval": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "phi3": ("phi3", {"rope_parameters": PARTIAL, "sliding_window": 7}),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-3}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "starcoder2 without biases": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral with a window": ("mixtral", {"sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe with a window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, every second layer": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {}),
    "glm4_moe": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4_moe, two shared experts": ("glm4_moe", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}}),
    "yarn": ("llama", YARN),
    "yarn, its own ramp": ("qwen2", {"rope_parameters": YARN["rope_parameters"] | TURNS | {"attention_factor": 1.3}}),
    "yarn, two scales": (
        "llama",
        {"rope_parameters": YARN["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}, "max_position_embeddings": 8},
    ),
    "llama3, a short context": ("llama", {"rope_parameters": LLAMA3 | ROPE | {"original_max_position_embeddings": 16}}),
}
# dtypes in which these models are saved; all other models are saved in fp32
DTYPES = {"gpt2 untied, exact gelu": torch.float16, "llama 3.2, one key head": torch.bfloat16}
# models that the default tier converts
FEW = (
    *("gpt2", "gpt2 untied, exact gelu", "llama grouped", "llama tied, biases, wide heads", "llama 3.2, one key head"),
    *("mistral with a window", "mistral without", "qwen2 tied, wide heads, scaled", "qwen3"),
    *("mistral beyond its window", "olmo2", "mixtral", "qwen2_moe", "glm4_moe", "yarn"),
)
KEPT = (  # keys of config.json whose values must survive a conversion to this project's format and back
    *("vocab_size", "initializer_range", "tie_word_embeddings"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"),
)


@pytest.mark.parametrize("name", chosen({name: name for name in MODELS}, *FEW))
def test_round_trip_keeps_every_bit_and_transformers_logits(name, tmp_path):
    kind, settings = MODELS[name]
    theirs = save(make_model(kind, **settings).to(DTYPES.get(name, torch.float32)), tmp_path / "theirs")
    ours = convert_folder(theirs, tmp_path / "ours")
    back = convert_folder(ours, tmp_path / "back")
    torch.testing.assert_close(file_tensors(back), file_tensors(theirs), **BITS)
    # a Mistral without a window computes the same as a Llama, and is exported as one
    expected, as_llama = logits(theirs), name == "mistral without"
    torch.testing.assert_close(logits(back), expected, **(SUMS if as_llama else BITS))
    torch.testing.assert_close(our_logits(open_checkpoint(ours, None)[0]), expected, **SUMS)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (theirs, back))
    assert after["model_type"] == ("llama" if as_llama else kind)
    assert {key: after.get(key) for key in KEPT} == {key: before.get(key) for key in KEPT}


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 2},
        {"topk_group": 2},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 1, "n_routed_experts": 1},
    ],
)
def test_glm_routers_that_limit_or_do_not_normalize_choices_are_refused_by_key(tmp_path, changes):
    folder = save(make_model("glm4_moe"), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    key, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"{key} {value} is not supported"):
        open_model(folder)


def test_glm_layer_that_predicts_a_second_token_is_left_out(tmp_path):
    folder = save(make_model("glm4_moe"), tmp_path)
    tensors = file_tensors(folder) | {"model.layers.3.eh_proj.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert set(open_model(folder).tensors) == set(our_model(open_model(folder)).state_dict())


def test_rotary_settings_are_read_into_flags(tmp_path):
    yarn = {"yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5, "yarn_attention_factor": 1.3, "rotary_scaling_factor": 4.0}
    for name, expected in {
        "linear": {"rotary_seq_len_interpolation_factor": 2.5, "rope_type": "rope"},
        "yarn, its own ramp": yarn | {"yarn_original_max_position_embeddings": 12},
        "llama3, a short context": {"rope_scaling_original_length": 16, "rope_scaling_factor": 4.0},
    }.items():
        kind, settings = MODELS[name]
        config = open_model(save(make_model(kind, **settings), tmp_path / name)).config
        assert {field: getattr(config, field) for field in expected} == expected


def logits_on_ranks(load: str, tp: int) -> torch.Tensor:
    """Load a checkpoint into a model with `tp` tensor-parallel ranks; return the logits [B, S, V].

    B counts samples, S tokens of a sample, and V tokens of the vocabulary. The model's vocabulary is padded for `tp`
    ranks, but the returned logits have no padding.
    """
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    config = dataclasses.replace(GPTConfig(**shape_of(record.flags)), hidden_dropout=0.0, attention_dropout=0.0)
    model, sharding, dims = build_on_ranks(Case(model=config, tp=tp, vocab_size=record.vocab_size, seq_length=SEQ))
    load_weights(model, sharding, dims, source, record, vocab_size=record.vocab_size, say=lambda line: None)
    with torch.no_grad():
        part = model.eval()(TOKENS)
    return dims.tp.all_gather(part.permute(2, 0, 1).contiguous()).permute(1, 2, 0)[..., :VOCAB]


ON_RANKS = [
    "gpt2",
    *map(slow, ("qwen2_moe", "llama tied, biases, wide heads", "mistral beyond its window", "olmo2", "glm4_moe")),
    *map(slow, ("qwen3", "phi3")),
    *map(nightly, ("mistral without", "qwen2 with windows", "qwen3 with alternating layers", "granite", "smollm3")),
    *map(nightly, ("starcoder2", "yarn", "dynamic")),
]


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_read_their_parts_of_a_converted_checkpoint(name, tmp_path):
    kind, settings = MODELS[name]
    theirs = save(make_model(kind, **settings), tmp_path / "theirs")
    for found in ranks(2).run(logits_on_ranks, str(convert_folder(theirs, tmp_path / "ours")), 2):
        torch.testing.assert_close(found, logits(theirs), **SUMS)


def test_model_in_several_files_is_the_same_model(tmp_path, monkeypatch):
    whole = save(make_llama(), tmp_path / "whole")
    parts = save(make_llama(), tmp_path / "parts", max_shard_size="30KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    monkeypatch.setattr(huggingface, "FILE_BYTES", 30_000)
    back = convert_folder(convert_folder(parts, tmp_path / "ours"), tmp_path / "back")
    assert len(list(back.glob("model-0000?-of-0000?.safetensors"))) > 2
    torch.testing.assert_close(file_tensors(back), file_tensors(whole), **BITS)
    # transformers reads the several files through model.safetensors.index.json
    assert torch.equal(logits(back), logits(whole))


def test_vocabulary_padding_of_a_run_is_not_exported(tmp_path):
    case = Case(tp=2)
    ranks(2).run(run, case, 1, save=str(tmp_path / "ours"))
    words = open_checkpoint(tmp_path / "ours", None)[0].tensors["embedding.word.weight"]
    found = file_tensors(convert_folder(tmp_path / "ours", tmp_path / "theirs"))["transformer.wte.weight"]
    assert found.shape == words.shape == (case.vocab_size, case.model.hidden)
    # 101 words on 2 tensor-parallel ranks, so the run padded the embedding by one row
    assert case.vocab_size % case.tp == 1
    assert torch.equal(found, words.read())


def test_original_gpt2_files_are_read(tmp_path):
    """Convert a file like OpenAI's original GPT-2, and back to transformers' format.

    Names of its tensors lack the prefix "transformer.". The file also has causal masks, and the tied embedding twice.
    """
    theirs = save(make_gpt2(), tmp_path / "theirs")
    tensors = file_tensors(theirs)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, SEQ, SEQ) for layer in range(2)}
    old |= {"h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": old["wte.weight"].clone()}
    save_file(old, theirs / "model.safetensors")
    back = convert_folder(convert_folder(theirs, tmp_path / "ours"), tmp_path / "back")
    torch.testing.assert_close(file_tensors(back), tensors, **BITS)


def test_index_that_names_a_file_outside_its_folder_is_rejected(tmp_path):
    query = "model.layers.1.self_attn.q_proj.weight"
    save(make_llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def open_with(file: str) -> None:
        (tmp_path / huggingface.INDEX).write_text(json.dumps({"weight_map": {query: file}}))
        open_model(tmp_path)

    rows = [
        (file, f"names {file!r} as a file of weights, which is not a file of this folder")
        for file in ("..", ".", "", "../x", "/model.safetensors")
    ]
    assert not_refused(rows, open_with) == []


def marked_files(folder: Path) -> dict[str, float]:
    """Write all files that transformers may read weights from, each with a different value in the final norm.

    Return that value by file name, so that a test sees which file was read.
    """
    tensors, norm = file_tensors(save(make_llama(), folder)), "model.norm.weight"
    marks = dict(zip(huggingface._FILES, (1.0, 2.0, 3.0, 4.0), strict=True))
    for file, mark in marks.items():
        held = {**tensors, norm: torch.full((32,), mark)}
        if file.endswith(".json"):
            part = file.replace(".index.json", "").replace(".", "-1.")
            (folder / file).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(held, part)}))
        else:
            part = file
        (torch.save if part.endswith(".bin") else save_file)(held, folder / part)
    return marks


def test_weight_files_have_transformers_precedence(tmp_path):
    import transformers

    for file, mark in marked_files(tmp_path).items():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).model.norm.weight
        ours = open_model(tmp_path).tensors["final_norm.weight"].read()
        assert torch.equal(ours, theirs), file
        assert ours[0] == mark
        (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        open_model(tmp_path)


def test_file_named_in_config_json_comes_first_and_must_be_inside(tmp_path):
    marked_files(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"transformers_weights": "model-1.safetensors"}))
    assert open_model(tmp_path).tensors["final_norm.weight"].read()[0] == 2.0
    path.write_text(json.dumps(values | {"transformers_weights": "../model.safetensors"}))
    with pytest.raises(ValueError, match=r"names '\.\./model\.safetensors' as a file of weights, which is not a file"):
        open_model(tmp_path)


class Unpickled:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


@pytest.mark.parametrize("content", [b"", b"text", {"model.norm.weight": Unpickled()}])
def test_pickled_file_is_read_as_weights_only(tmp_path, content, capsys):
    save(make_llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged or contains more than tensors"):
        open_model(tmp_path)
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize("zipped", [True, slow(False)])
def test_old_folders_are_read_like_transformers_reads_them(tmp_path, zipped):
    """Convert old Hugging Face folders, and compare logits with transformers.

    The folders have pickled files with buffers for rotary embeddings and causal masks. Names of tensors lack the
    model's prefix. One layer is in fp32.
    """
    for kind in ("llama", "gpt2"):
        folder = tmp_path / kind
        theirs = save(make_model(kind, tie_word_embeddings=True).bfloat16(), folder)
        tensors = {name.split(".", 1)[1]: tensor for name, tensor in file_tensors(theirs).items()}
        tensors |= {name: value.float() for name, value in tensors.items() if ".1." in name and "q_proj" in name}
        tensors |= {"rotary_emb.inv_freq": torch.ones(4), "layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        if kind == "gpt2":
            tensors = {name: value for name, value in tensors.items() if "inv_freq" not in name}
            tensors["h.1.attn.bias"] = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool)
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        expected = logits(folder)
        torch.testing.assert_close(our_model(open_model(folder)).float()(TOKENS), expected, **SUMS)
        back = convert_folder(convert_folder(folder, tmp_path / f"{kind} ours"), tmp_path / f"{kind} back")
        torch.testing.assert_close(logits(back), expected, **BITS)


LLAMA = {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "disable_bias_linear": True}
QWEN3 = LLAMA | {"qk_layernorm": True}
GROUPS = {"group_query_attention": True, "num_query_groups": 2}
# flags of a model that no family of Hugging Face can hold; the message names the family that differs in the fewest
# flags
NOT_THERE: list[tuple[dict[str, Any], str]] = [
    (
        {"swiglu": True, "disable_bias_linear": True, "normalization": "RMSNorm", "qk_layernorm": True},
        "Qwen3ForCausalLM cannot hold a model with --position-embedding-type learned_absolute",
    ),
    (
        {"apply_layernorm_1p": True, "kv_channels": 4, "position_embedding_type": "none", "window_size": "3,0"},
        "Starcoder2ForCausalLM cannot hold a model with --position-embedding-type none, --apply-layernorm-1p",
    ),
    (GROUPS, "cannot hold a model with --position-embedding-type learned_absolute"),
    ({"kv_channels": 4, "openai_gelu": True, "window_size": "3,0"}, "with --position-embedding-type learned_absolute"),
    (
        LLAMA | {"rotary_percent": 0.5, "no_rope_freq": "2"},
        "SmolLM3ForCausalLM cannot hold a model with --rotary-percent 0.5",
    ),
    (LLAMA | {"rotary_percent": 0.5, "use_rope_scaling": True}, "cannot hold a model with --rotary-percent 0.5"),
    (LLAMA | {"normalization": "LayerNorm"}, "LlamaForCausalLM cannot hold a model with --normalization LayerNorm"),
    (LLAMA | {"norm_after_block": True}, "LlamaForCausalLM cannot hold a model with --norm-after-block"),
    (
        LLAMA | {"logits_scaling": 2.0, "window_size": "3,0"},
        "MistralForCausalLM cannot hold a model with --logits-scaling 2.0",
    ),
    (
        LLAMA | {"swiglu": False, "disable_bias_linear": False, "apply_layernorm_1p": True},
        "LlamaForCausalLM cannot hold a model with --apply-layernorm-1p, --no-swiglu",
    ),
    ({"logits_scaling": 2.0}, "GPT2LMHeadModel cannot hold a model with --logits-scaling 2.0"),
    (LLAMA | {"swiglu": False, "window_size": "3,0"}, "MistralForCausalLM cannot hold a model with --no-swiglu"),
    (QWEN3 | {"add_qkv_bias": True}, "Qwen2ForCausalLM cannot hold a model with --qk-layernorm"),
    (QWEN3 | {"disable_bias_linear": False}, "LlamaForCausalLM cannot hold a model with --qk-layernorm"),
]


def test_model_that_no_architecture_can_hold_is_rejected_by_flags():
    def choose(changes: dict[str, Any]) -> None:
        sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 8}
        choose_architecture(GPTConfig(**sizes | changes))

    assert not_refused(NOT_THERE, choose) == []


@pytest.mark.parametrize("kind", ["granite", "glm4_moe", "olmoe"])
def test_reward_model_without_a_class_in_transformers_is_refused(tmp_path, kind):
    factors = FACTORS if kind == "granite" else {}
    model = open_model(save(make_model(kind, **factors), tmp_path / "there"))
    with_head = model._replace(tensors={**model.tensors, HEAD: held(torch.ones(1, 32))})
    assert huggingface.class_name(model).endswith("ForCausalLM")
    with pytest.raises(ValueError, match=f"has no .*ForSequenceClassification, so a reward model of the family {kind}"):
        huggingface.class_name(with_head)


@pytest.mark.parametrize(("kind", "eos"), [("llama", 3), ("gpt2", [3, 5]), ("llama", [5, 3]), slow("qwen2", 5)])
def test_scores_of_a_reward_model_match_transformers_in_both_directions(tmp_path, kind, eos):
    """Compare scores of a reward model with transformers, also if the end token is used as padding.

    The texts end with one padding token, with two, and with none.
    """
    import transformers

    auto = transformers.AutoModelForSequenceClassification
    config = make_model(kind).config
    config.num_labels, config.pad_token_id, config.eos_token_id = 1, 3, eos
    there = randomized(auto.from_config(config))
    folder, texts = save(there, tmp_path / "there"), TOKENS.where(TOKENS != 3, 4)[:1].repeat(3, 1)
    texts[0, -1:] = texts[1, -2:] = 3
    with torch.no_grad():
        expected = there(texts).logits.squeeze(1)
    ours = convert_folder(folder, tmp_path / "here")
    model, record = open_checkpoint(ours, None)
    batch = make_rollout_batch(torch.cat((texts, texts[:, :1]), dim=1), torch.ones(texts.shape))
    found = FrozenModel(our_model(model), score_pad=record.flags["score_pad"]).scores(batch)
    torch.testing.assert_close(found, expected, **SUMS)
    back = auto.from_pretrained(convert_folder(ours, tmp_path / "back"), dtype=torch.float32).eval()
    assert (type(back), back.config.num_labels) == (type(there), 1)
    with torch.no_grad():
        torch.testing.assert_close(back(texts).logits.squeeze(1), expected, **SUMS)


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ({"pad_token_id": VOCAB}, {"pad_token_id": None}),
        ({"pad_token_id": -1}, {"pad_token_id": -1}),
        ({"eos_token_id": [5, VOCAB + 3], "pad_token_id": 4}, {"eos_token_id": [5], "pad_token_id": 4}),
        ({"bos_token_id": 2 * VOCAB, "eos_token_id": [VOCAB]}, {"bos_token_id": None, "eos_token_id": None}),
    ],
)
def test_id_beyond_the_embedding_is_left_out_of_an_export(tmp_path, monkeypatch, ids, kept):
    said: list[str] = []
    ours = convert_folder(save(make_llama(), tmp_path / "theirs"), tmp_path / "ours")
    monkeypatch.setattr(convert, "write_tokenizer_files", lambda *_: dict(ids))
    flags = convert.ConvertConfig(input=str(ours), output=str(tmp_path / "back"))
    convert.convert(flags, TokenizerConfig(), said.append, opener=WHOLE_WEIGHTS)
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: values[name] for name in ids} == kept
    assert len([line for line in said if "is left out of config.json" in line]) == sum(ids[x] != kept[x] for x in ids)
    logits(tmp_path / "back")  # transformers can load the exported folder


def test_adapter_is_refused_without_the_feature_that_merges_it(tmp_path):
    theirs, ours = save(make_llama(), tmp_path / "theirs"), tmp_path / "ours"
    flags = convert.ConvertConfig(input=str(theirs), output=str(ours), adapter=str(tmp_path))
    with pytest.raises(ValueError, match=f"--adapter {tmp_path}: the optional feature .* is not installed"):
        convert.convert(flags, TokenizerConfig(), lambda line: None, opener=WHOLE_WEIGHTS)
    assert not ours.exists()
