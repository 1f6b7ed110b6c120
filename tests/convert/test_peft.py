"""LoRA adapters in PEFT's files: what PEFT computes with them, our merged model does, and the other way round."""

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.hf_models import TOKENS, convert_folder, logits, make_llama, make_model, save
from helpers.refusals import not_refused
from helpers.tiers import slow

from megazpp.convert.huggingface import open_model
from megazpp.convert.model import HEAD, held
from megazpp.convert.native import open_checkpoint
from megazpp.convert.peft import (
    CONFIG,
    TENSORS,
    AdapterSettings,
    adapter_shapes,
    checksum_of,
    default_targets,
    find_branches,
    read_adapter,
    write_adapter,
)

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft")
assert_same_sums = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-5)  # of about 1: (x A) B or x (A B)


def drawn_adapter(folder: Path, base: Path, targets: tuple[str, ...], checksum: str | None = None) -> str:
    """An adapter of rank 3 with random values, as our training writes one."""
    config, generator = open_model(base).config, torch.Generator().manual_seed(4)
    shapes = adapter_shapes(config, find_branches(config, targets), 3)
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
    ("gpt2", ("c_attn",)),
    ("llama", ("q_proj", "v_proj", "down_proj")),
    slow("gpt2", ("all-linear",)),
    slow("llama", ("all-linear",)),
    slow("qwen3", ("k_proj", "up_proj", "gate_proj", "self_attn.o_proj")),
]


@needs_peft
@pytest.mark.parametrize(("kind", "targets"), CASES)
def test_peft_computes_with_our_files_what_the_merged_model_does(tmp_path, kind, targets):
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
def test_an_adapter_of_peft_is_read_and_merged(tmp_path, kind, targets):
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
    back = convert_folder(checkpoint, tmp_path / "back", adapter=adapter)  # on the way out
    assert_same_sums(logits(back), expected)
    merged = convert_folder(checkpoint, tmp_path / "merged", adapter=adapter, target="megazpp")
    assert torch.equal(logits(convert_folder(merged, tmp_path / "again")), logits(back))


@needs_peft
def test_an_adapter_of_a_reward_model_brings_its_score(tmp_path):
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
def test_the_default_targets_are_pefts(tmp_path, kind):
    import peft

    config = peft.get_peft_model(make_model(kind), peft.LoraConfig(task_type="CAUSAL_LM")).peft_config["default"]
    assert config.target_modules == {*default_targets(open_model(save(make_model(kind), tmp_path)).config)}


def test_files_are_as_pefts_are(tmp_path):
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


def test_the_checksum_is_that_of_the_weights_in_any_format_and_another_base_is_refused(tmp_path):
    base = save(make_llama(), tmp_path / "base")
    checkpoint, checksum = convert_folder(base, tmp_path / "checkpoint"), checksum_of(open_model(base))
    model = open_checkpoint(checkpoint, None)[0]
    with_head = model._replace(tensors={**model.tensors, HEAD: held(torch.ones(1, 32))})
    assert checksum_of(model) == checksum_of(with_head) == checksum
    adapter = drawn_adapter(tmp_path / "adapter", base, ("q_proj",), checksum)
    convert_folder(checkpoint, tmp_path / "merged", adapter=adapter)
    drawn_adapter(tmp_path / "adapter", base, ("q_proj",), "0123456789abcdef")
    with pytest.raises(ValueError, match=f"trained on weights with checksum 0123456789abcdef; these have {checksum}"):
        convert_folder(checkpoint, tmp_path / "other", adapter=adapter)
    assert not (tmp_path / "other").exists()


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "has peft_type 'IA3'; only LORA is known"),
    ({"use_dora": True}, "asks for use_dora, which adapters here do not have"),
    ({"bias": "all"}, "asks for bias, which"),
    ({"r": 0}, "has r 0, lora_alpha 6"),
    ({"r": 4}, "lora_A.weight has shape [3, 32], the model's is [4, 32]"),
    ({"target_modules": ["k_proj"]}, "are missing"),
    ({"target_modules": ["lm_head"]}, "lm_head is no linear layer of this model's: there are down_proj, gate_proj"),
]


def test_an_adapter_that_does_something_else_or_is_not_there_is_refused(tmp_path):
    base, path = save(make_llama(), tmp_path / "base"), tmp_path / "adapter" / CONFIG
    drawn_adapter(path.parent, base, ("q_proj",))
    sound = json.loads(path.read_text())

    def merge(values: dict[str, Any], adapter: Path = path.parent) -> None:
        path.write_text(json.dumps(sound | values))
        convert_folder(base, tmp_path / "merged", adapter=str(adapter))

    assert not_refused(OTHERS, merge) == []
    with pytest.raises(ValueError, match=re.escape(f"--adapter {tmp_path}/none does not exist")):
        merge({}, tmp_path / "none")
