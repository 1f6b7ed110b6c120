"""Test LoRA adapters in PEFT's format, in both directions: this project's merged models compute the same as PEFT."""

import dataclasses
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.hf_models import (
    TOKENS,
    convert_folder,
    file_tensors,
    logits,
    make_llama,
    make_model,
    our_logits,
    our_model,
    save,
)
from helpers.refusals import not_refused
from helpers.tiers import chosen, slow
from helpers.training import MIXTURE_STYLE

from megazpp.convert.huggingface import open_model
from megazpp.convert.model import HEAD, held, model_shapes
from megazpp.convert.native import open_checkpoint
from megazpp.lora.checks import adapter_settings, with_adapters
from megazpp.lora.config import LoraConfig
from megazpp.lora.peft import (
    CONFIG,
    TENSORS,
    AdapterSettings,
    checksum_of,
    default_targets,
    find_branches,
    read_adapter,
    with_adapter,
    write_adapter,
)
from megazpp.lora.policy import add_adapters
from megazpp.model.config import GPTConfig

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft")
# A tolerance for values of about 1: x (A B) with merged weights rounds differently from (x A) B with adapters.
assert_same_sums = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-5)


def drawn_adapter(folder: Path, base: Path, targets: tuple[str, ...], checksum: str | None = None) -> str:
    """Write an adapter of rank 3 with random values in the form in which training writes it. Return its folder."""
    config, generator = open_model(base).config, torch.Generator().manual_seed(4)
    linears, heads = model_shapes(config, 1, "", num_tensors=config.layers), {"q": config.heads, "": 0}
    shapes: dict[str, tuple[int, ...]] = {}
    for branch in find_branches(config, targets):
        outputs, inputs = linears[f"{branch.linear}.weight"]
        rows = heads.get(branch.part, config.query_groups) * config.head_size or outputs
        shapes |= {f"{branch.name}.a": (inputs, 3), f"{branch.name}.b": (rows, 3)}
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    write_adapter(folder, config, AdapterSettings(3, 6.0, 0.0, targets, str(base), checksum), tensors)
    settings, read = read_adapter(folder, config)
    torch.testing.assert_close(read, tensors, rtol=0, atol=0)
    assert (settings.rank, settings.scale, settings.targets) == (3, 2.0, tuple(sorted(targets)))
    assert settings.checksum == checksum
    return str(folder)


def randomize_lora(model: Any) -> None:
    generator = torch.Generator().manual_seed(8)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)


CASES = [
    slow("gpt2", ("c_attn",)),
    ("llama", ("q_proj", "v_proj", "down_proj")),
    slow("gpt2", ("all-linear",)),
    slow("llama", ("all-linear",)),
    slow("qwen3", ("k_proj", "up_proj", "gate_proj", "self_attn.o_proj")),
]


@needs_peft
@pytest.mark.parametrize(("kind", "targets"), CASES)
def test_peft_with_our_adapter_matches_the_merged_model(tmp_path, kind, targets):
    import peft
    import transformers

    base = save(make_model(kind), tmp_path / "base")
    adapter = drawn_adapter(tmp_path / "adapter", base, targets)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(model, adapter).eval()(TOKENS).logits
    assert (expected - logits(base)).abs().max() > 0.05
    merged = convert_folder(base, tmp_path / "merged", adapter=adapter)
    assert_same_sums(logits(convert_folder(merged, tmp_path / "back")), expected)


@needs_peft
@pytest.mark.parametrize(("kind", "targets"), CASES)
def test_adapter_of_peft_is_read_and_merged(tmp_path, kind, targets):
    import peft

    base, adapter = save(make_model(kind), tmp_path / "base"), str(tmp_path / "adapter")
    asked: Any = targets[0] if targets == ("all-linear",) else list(targets)
    config = peft.LoraConfig(r=5, lora_alpha=20, target_modules=asked, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(make_model(kind), config).eval()
    randomize_lora(adapted)
    with torch.no_grad():
        expected = adapted(TOKENS).logits
    adapted.save_pretrained(adapter)
    checkpoint = convert_folder(base, tmp_path / "checkpoint")
    # --adapter merges the adapter while the checkpoint is exported
    back = convert_folder(checkpoint, tmp_path / "back", adapter=adapter)
    assert_same_sums(logits(back), expected)
    merged = convert_folder(checkpoint, tmp_path / "merged", adapter=adapter, target="megazpp")
    assert torch.equal(logits(convert_folder(merged, tmp_path / "again")), logits(back))


@needs_peft
def test_adapter_of_a_reward_model_includes_its_score_head(tmp_path):
    import peft
    import transformers

    auto, base = transformers.AutoModelForSequenceClassification, save(make_llama(), tmp_path / "base")
    config = peft.LoraConfig(r=5, target_modules=["q_proj"], task_type="SEQ_CLS")
    adapted = peft.get_peft_model(auto.from_pretrained(base, num_labels=1, dtype=torch.float32), config).eval()
    randomize_lora(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = convert_folder(base, tmp_path / "merged", adapter=str(tmp_path / "adapter"))
    back = auto.from_pretrained(convert_folder(merged, tmp_path / "back"), dtype=torch.float32).eval()
    with torch.no_grad():
        scores, expected = ([model(text.unsqueeze(0)).logits for text in TOKENS] for model in (back, adapted))
    assert_same_sums(scores, expected)


@needs_peft
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_default_targets_are_pefts(tmp_path, kind):
    import peft

    config = peft.get_peft_model(make_model(kind), peft.LoraConfig(task_type="CAUSAL_LM")).peft_config["default"]
    assert config.target_modules == {*default_targets(open_model(save(make_model(kind), tmp_path)).config)}


def test_adapter_files_have_pefts_format(tmp_path):
    adapter = tmp_path / "adapter"
    drawn_adapter(adapter, save(make_llama(), tmp_path / "base"), ("q_proj", "down_proj"), "0123456789abcdef")
    found = safetensors.torch.load_file(adapter / TENSORS)
    assert {name: tuple(tensor.shape) for name, tensor in found.items() if "layers.1" in name} == {
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": (3, 32),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight": (32, 3),
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": (3, 44),
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight": (32, 3),
    }
    values = json.loads((adapter / CONFIG).read_text())
    assert (values["r"], values["lora_alpha"], values["fan_in_fan_out"]) == (3, 6, False)


@pytest.mark.slow
def test_base_checksum_ignores_the_format_and_another_base_is_rejected(tmp_path):
    base = save(make_llama(), tmp_path / "base")
    checkpoint, checksum = convert_folder(base, tmp_path / "checkpoint"), checksum_of(open_model(base))
    model = open_checkpoint(checkpoint, None)[0]
    with_head = model._replace(tensors={**model.tensors, HEAD: held(torch.ones(1, 32))})
    assert checksum_of(model) == checksum_of(with_head) == checksum
    adapter = drawn_adapter(tmp_path / "adapter", base, ("q_proj",), checksum)
    convert_folder(checkpoint, tmp_path / "merged", adapter=adapter)
    drawn_adapter(tmp_path / "adapter", base, ("q_proj",), "0123456789abcdef")
    with pytest.raises(ValueError, match=f"checksum 0123456789abcdef, but the given weights have {checksum}"):
        convert_folder(checkpoint, tmp_path / "other", adapter=adapter)
    assert not (tmp_path / "other").exists()


PATTERNS = {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 3}, "alpha_pattern": {"^model.*v_proj": 5}}
QV = ["q_proj", "v_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": QV}),
    "rslora": ("llama", {"target_modules": QV, "use_rslora": True}),
    "rank and alpha patterns": ("llama", {"target_modules": QV, **PATTERNS}),
    "patterns with rslora and dora": (
        "llama",
        {"target_modules": QV, "use_rslora": True, "use_dora": True, **PATTERNS},
    ),
    "regex": ("llama", {"target_modules": r".*\.1\.(self_attn|mlp)\.(k|down)_proj"}),
    "output layer": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "layers to transform": ("llama", {"target_modules": QV, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "excluded modules": ("llama", {"target_modules": QV, "exclude_modules": ["1.self_attn.q_proj"]}),
    "saved modules": ("llama", {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "dora": ("qwen2", {"target_modules": ["q_proj", "k_proj", "up_proj"], "use_dora": True}),
    "dora of gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "all-linear in capitals": ("gpt2", {"target_modules": "ALL-LINEAR"}),
    "a target without layers": ("llama", {"target_modules": ["q_proj", "c_attn"]}),
    "a fused layer of phi3": ("phi3", {"target_modules": ["qkv_proj", "o_proj"]}),
    "fused gate and up matrices of phi3": ("phi3", {"target_modules": ["gate_up_proj", "down_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "gaussian": ("llama", {"target_modules": QV, "init_lora_weights": "gaussian"}),
}


@needs_peft
@pytest.mark.parametrize(
    "name",
    chosen(
        {name: name for name in KINDS},
        "plain",
        "patterns with rslora and dora",
        "saved modules",
        "a fused layer of phi3",
    ),
)
def test_merged_weights_equal_merge_and_unload(tmp_path, name):
    """Compare merged weights with the result of PEFT's `merge_and_unload`.

    fp32 sums of a few terms in another order differ by up to 1e-6.
    """
    import peft

    kind, settings = KINDS[name]
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    make = functools.partial(make_model, kind, **({"rope_parameters": rope} if kind == "phi3" else {}))
    base, adapter = save(make(), tmp_path / "base"), tmp_path / "adapter"
    adapted = peft.get_peft_model(make(), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(8)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(adapter)
    if name == "plain":  # PEFT's older format, a pickled file
        torch.save(safetensors.torch.load_file(adapter / TENSORS), adapter / "adapter_model.bin")
        (adapter / TENSORS).unlink()
    merged = convert_folder(base, tmp_path / "merged", adapter=str(adapter))
    found = file_tensors(convert_folder(merged, tmp_path / "back"))
    expected = file_tensors(save(adapted.merge_and_unload(), tmp_path / "expected"))
    assert any(not torch.equal(tensor, file_tensors(base)[key]) for key, tensor in found.items())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@needs_peft
@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"target_modules": r".*1.*\.[qv]_proj"}, {"layers_to_transform": [1]}]
)
def test_training_continues_a_peft_adapter_of_one_rank_and_scale(tmp_path, settings):
    import peft

    base = save(make_llama(), tmp_path / "base")
    asked = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": QV, "task_type": "CAUSAL_LM", **settings})
    adapted = peft.get_peft_model(make_llama(), asked)
    randomize_lora(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    config = open_model(base).config
    found, tensors = read_adapter(tmp_path / "adapter", config)
    assert found.rank == 4
    assert found.scale == pytest.approx(3.0 if "use_rslora" in settings else 1.5)
    # `write_adapter` writes plain LoRA even if the adapter was rsLoRA, so lora_alpha must express the scale
    write_adapter(tmp_path / "adapter", config, found, tensors)
    merged = file_tensors(
        convert_folder(convert_folder(base, tmp_path / "merged", adapter=str(tmp_path / "adapter")), tmp_path / "back")
    )
    expected = adapted.merge_and_unload().state_dict()
    torch.testing.assert_close(merged, {key: expected[key] for key in merged}, rtol=0, atol=1e-6)


@needs_peft
@pytest.mark.parametrize(
    ("kind", "targets", "settings"),
    [
        # without windows and partial rotary positions, phi3 is a Llama with fused matrices, so two families fit
        ("phi3", ["qkv_proj", "gate_up_proj"], {}),
        slow("phi3", ["gate_up_proj"], {"sliding_window": 5}),  # with windows, phi3 is a Mistral with fused matrices
        slow("gpt2", ["wte"], {"tie_word_embeddings": False}),
        slow("llama", ["embed_tokens"], {}),
    ],
)
def test_adapter_is_merged_without_embeddings_and_for_every_family(tmp_path, kind, targets, settings):
    """Compare logits with PEFT's model; the adapter's files contain no embedding that tells the vocabulary size."""
    import peft

    base = save(make_model(kind, **settings), tmp_path / "base")
    asked = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(make_model(kind, **settings), asked)
    randomize_lora(adapted)
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    with torch.no_grad():
        expected = adapted(TOKENS).logits
    model = open_model(base)
    torch.testing.assert_close(our_logits(with_adapter(model, tmp_path)), expected, rtol=0, atol=1e-5)
    if kind == "phi3":  # our adapters have q_proj, k_proj and v_proj, which PEFT does not find in the folder's model
        assert model.origin is None
        with pytest.raises(ValueError, match=r"self_attn\.qkv_proj|mlp\.gate_up_proj"):
            read_adapter(tmp_path, model.config)


@needs_peft
def test_without_peft_an_adapter_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    drawn_adapter(tmp_path / "adapter", save(make_llama(), tmp_path / "base"), ("q_proj",))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs the package peft: pip install 'megazpp\[huggingface\]'"):
        read_adapter(tmp_path / "adapter", open_model(tmp_path / "base").config)


@needs_peft
@pytest.mark.parametrize("tie", [False, True])
def test_embeddings_of_a_resized_base_in_an_adapter_are_used_or_refused(tmp_path, tie):
    """Convert a base with an adapter that was made after the base's embeddings were resized from 107 to 112 rows.

    PEFT then saves the embeddings in the adapter's file, because the saved base has another number of rows. The adapter
    fits only a base with 112 rows. Embeddings that differ from this base's are used only if they are not tied.
    """
    import peft

    make = functools.partial(make_llama, tie_word_embeddings=tie)
    base, adapter = save(make(), tmp_path / "base"), tmp_path / "adapter"
    resized = make()
    resized.resize_token_embeddings(112)
    save(resized, tmp_path / "resized")
    resized.name_or_path = str(base)
    adapted = peft.get_peft_model(resized, peft.LoraConfig(r=4, target_modules=QV, task_type="CAUSAL_LM"))
    randomize_lora(adapted)
    adapted.save_pretrained(adapter)
    assert "base_model.model.model.embed_tokens.weight" in safetensors.torch.load_file(adapter / TENSORS)
    with pytest.raises(
        ValueError, match=r"(lm_head|embed_tokens).weight has shape \[112, 32\], but the model's is \[107, 32\]"
    ):
        convert_folder(base, tmp_path / "no", adapter=str(adapter))
    assert not (tmp_path / "no").exists()
    merged = convert_folder(tmp_path / "resized", tmp_path / "merged", adapter=str(adapter))
    found = file_tensors(convert_folder(merged, tmp_path / "back"))
    expected = adapted.merge_and_unload().state_dict()
    torch.testing.assert_close(found, {key: expected[key] for key in found}, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"target_modules or modules_to_save .*embed_tokens.weight"):
        read_adapter(adapter, open_model(tmp_path / "resized").config)
    # Change the embeddings in the adapter's file, as if they had been trained after the resized base was saved.
    tensors = safetensors.torch.load_file(adapter / TENSORS)
    trained = {name: tensor + 1 if "lora_" not in name else tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(trained, adapter / TENSORS, {"format": "pt"})
    if tie:
        with pytest.raises(
            ValueError, match=r"changes lm_head\.weight, model\.embed_tokens\.weight, which this model does not have"
        ):
            convert_folder(tmp_path / "resized", tmp_path / "no", adapter=str(adapter))
        return
    other = convert_folder(
        convert_folder(tmp_path / "resized", tmp_path / "other", adapter=str(adapter)), tmp_path / "other-back"
    )
    change = file_tensors(other)["lm_head.weight"] - found["lm_head.weight"]
    torch.testing.assert_close(change, torch.ones_like(change), rtol=0, atol=1e-6)


@needs_peft
def test_training_refuses_adapters_whose_tensors_are_missing(tmp_path):
    path = tmp_path / "adapter" / CONFIG
    base = save(make_llama(), tmp_path / "base")
    drawn_adapter(path.parent, base, ("q_proj", "v_proj"))
    sound, config = json.loads(path.read_text()), open_model(base).config

    def read(values: dict[str, Any]) -> None:
        path.write_text(json.dumps(sound | values))
        read_adapter(path.parent, config)

    rows = [
        ({"rank_pattern": {"q_proj": 2}}, "size mismatch for base_model.model.model.layers.0.self_attn.q_proj.lora_A"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "lm_head.lora_A.default.weight"),
        (
            {"modules_to_save": ["norm"]},
            "PEFT cannot load this adapter: KeyError: 'base_model.model.model.layers.0.input_layernorm.weight'",
        ),
    ]
    assert not_refused(rows, read) == []


@needs_peft
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern {'q_proj': 2} (several ranks or scales)"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern {'q_proj': 2} (several ranks or scales)"),
        (PATTERNS, "and alpha_pattern {'^model.*v_proj': 5} (several"),
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": [*QV, "lm_head"]}, "target_modules or modules_to_save lm_head"),
        ({"modules_to_save": ["norm"]}, "target_modules or modules_to_save model.layers.0.input_layernorm.weight"),
    ],
)
def test_training_names_keys_that_it_does_not_support_and_the_remedy_works(tmp_path, settings, named):
    import peft

    base, adapter = save(make_llama(), tmp_path / "base"), tmp_path / "adapter"
    config = peft.LoraConfig(**{"r": 4, "target_modules": QV, "task_type": "CAUSAL_LM", **settings})
    adapted = peft.get_peft_model(make_llama(), config)
    randomize_lora(adapted)
    adapted.save_pretrained(adapter)
    remedy = "merge the adapter into its base with tools/convert_checkpoint.py --adapter, and train the result"
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        read_adapter(adapter, open_model(base).config)
    assert str(caught.value).endswith(remedy)
    convert_folder(base, tmp_path / "merged", adapter=str(adapter))


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "has peft_type 'IA3', but only LORA is supported"),
    ({"peft_type": None}, "has peft_type None"),
    ({"init_lora_weights": "pissa"}, "asks for init_lora_weights 'pissa', which is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "asks for init_lora_weights 'pissa_niter_4'"),
    ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "init_lora_weights 'loftq', loftq_config {"),
    ({"init_lora_weights": "olora"}, "asks for init_lora_weights 'olora'"),
    ({"init_lora_weights": "corda", "corda_config": {"corda_method": "ipm"}}, "asks for init_lora_weights 'corda', co"),
    ({"alora_invocation_tokens": [3]}, "asks for alora_invocation_tokens [3]"),
    ({"trainable_token_indices": [1, 2]}, "asks for trainable_token_indices [1, 2]"),
    ({"layer_replication": [[0, 2]]}, "asks for layer_replication"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "asks for target_parameters"),
    ({"lora_bias": True}, "asks for lora_bias True"),
    ({"use_qalora": True}, "asks for use_qalora True"),
    ({"of_a_later_version": {"on": 1}}, "asks for of_a_later_version {'on': 1}"),
    ({"bias": "all"}, "asks for bias 'all', which"),
    ({"rank_pattern": {"q_proj": 0}}, "`r` should be a positive integer value but the value passed is 0"),
    ({"modules_to_save": ["lm_head"]}, "PEFT cannot load this adapter: KeyError: 'base_model.model.lm_head.weight'"),
    ({"use_dora": True}, "are missing"),
    ({"target_modules": ["embed_tokens"]}, "embed_tokens.lora_embedding_A.default"),
    ({"r": 0}, "`r` should be a positive integer value but the value passed is 0"),
    (
        {"r": 4},
        "a param with shape torch.Size([3, 32]) from checkpoint, the shape in current model is torch.Size([4, 32])",
    ),
    ({"target_modules": ["k_proj"]}, "are missing"),
    ({"target_modules": ["c_attn"]}, "Target modules {'c_attn'} not found in the base model"),
]


def test_unsupported_or_missing_adapter_is_rejected(tmp_path):
    base, path = save(make_llama(), tmp_path / "base"), tmp_path / "adapter" / CONFIG
    drawn_adapter(path.parent, base, ("q_proj",))
    sound = json.loads(path.read_text())

    def merge(values: dict[str, Any], adapter: Path = path.parent) -> None:
        path.write_text(json.dumps(sound | values))
        convert_folder(base, tmp_path / "merged", adapter=str(adapter))

    assert not_refused(OTHERS, merge) == []
    with pytest.raises(ValueError, match=re.escape(f"--adapter {tmp_path}/none does not exist")):
        merge({}, tmp_path / "none")


@needs_peft
@pytest.mark.parametrize(("kind", "targets"), [
    ("mixtral", ("q_proj", "w1", "w2", "w3")),
    slow("qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
    slow("olmoe", ("down_proj",)),
])  # fmt: skip
def test_peft_with_our_adapters_on_experts_matches_our_model(tmp_path, kind, targets):
    """Write adapters on experts, and compare logits of PEFT with our model.

    For each target, the file has matrices A and B per expert, under the names of transformers 4. PEFT converts them for
    transformers 5.
    """
    import peft
    import transformers

    base = save(make_model(kind), tmp_path / "base")
    model, generator = open_model(base), torch.Generator().manual_seed(4)
    ours, tensors = our_model(model), {}
    settings = AdapterSettings(3, 6.0, 0.0, targets, str(base))
    add_adapters(ours, settings, None)
    for name, parameter in ours.named_parameters():
        if ".adapter." in name:
            tensors[name] = 0.2 * torch.randn(parameter.shape, generator=generator)
    ours.load_state_dict(tensors, strict=False, assign=True)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_adapter(adapter, model.config, settings, tensors)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        plain = loaded(TOKENS).logits
        expected = peft.PeftModel.from_pretrained(loaded, adapter).eval()(TOKENS).logits
        found = ours.eval()(TOKENS)
    assert (expected - plain).abs().max() > 0.05
    assert_same_sums(found[..., : expected.shape[-1]], expected)
    with pytest.raises(ValueError, match="has adapters on experts, which are not read from PEFT's files"):
        read_adapter(adapter, model.config)


def test_targets_of_a_mixture_that_peft_could_not_load_are_refused():
    shared = dataclasses.replace(MIXTURE_STYLE, moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True)
    rows = [
        ((MIXTURE_STYLE, "w1"), "--lora-target-modules w1: adapters on experts need both w1 and w3, or neither"),
        ((shared, "down_proj"), "--lora-target-modules down_proj with --moe-shared-expert-intermediate-size 16"),
    ]

    def check(model: GPTConfig, target: str) -> None:
        adapter_settings(LoraConfig(lora_r=2, lora_target_modules=(target,)), model)

    assert not not_refused(rows, lambda given: check(*given))


def test_missing_adapter_is_reported_with_its_flag(tmp_path):
    parsed = SimpleNamespace(config=SimpleNamespace(model=None))
    with pytest.raises(ValueError, match=rf"^--lora-load {tmp_path}: .*adapter_config\.json is missing"):
        with_adapters(LoraConfig(lora_load=str(tmp_path)), parsed, None, "")
