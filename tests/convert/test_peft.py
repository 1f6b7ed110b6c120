"""LoRA adapters in PEFT's files: what PEFT computes with them, our merged model does, and the other way round."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.hf_models import TOKENS, logits, make_llama, make_model, save
from helpers.refusals import not_refused
from helpers.tiers import slow

from megazpp.convert.convert import ConvertConfig, convert
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
from megazpp.data.tokenizer import TokenizerConfig

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft")
SUMS = {"rtol": 0.0, "atol": 2e-5}  # logits of about 1: (x A) B or x (A B)


def convert_folder(source: Path, output: Path, adapter: Path | None = None, **flags: Any) -> None:
    config = ConvertConfig(input=str(source), output=str(output), adapter=adapter and str(adapter), **flags)
    convert(config, TokenizerConfig(), lambda line: None)


def drawn_adapter(folder: Path, base: Path, targets: tuple[str, ...], checksum: str | None = None) -> None:
    """An adapter of rank 3 with random values, as our training writes one."""
    model = open_model(base)
    branches, generator = find_branches(model.config, targets), torch.Generator().manual_seed(4)
    shapes = adapter_shapes(model.config, branches, 3)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    write_adapter(folder, model.config, AdapterSettings(3, 6.0, 0.0, targets, str(base), checksum), tensors)
    settings, read = read_adapter(folder, model.config)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert (settings.rank, settings.scale, settings.targets) == (3, 2.0, tuple(sorted(targets)))


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

    base, adapter = save(make_model(kind), tmp_path / "base"), tmp_path / "adapter"
    drawn_adapter(adapter, base, targets)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        expected = adapted(TOKENS).logits
    assert (expected - logits(base)).abs().max() > 0.05
    convert_folder(base, tmp_path / "merged", adapter)
    convert_folder(tmp_path / "merged", tmp_path / "back")
    torch.testing.assert_close(logits(tmp_path / "back"), expected, **SUMS)


@needs_peft
@pytest.mark.parametrize(("kind", "targets"), CASES)
def test_an_adapter_of_peft_is_read_and_merged(tmp_path, kind, targets):
    import peft

    base, generator = save(make_model(kind), tmp_path / "base"), torch.Generator().manual_seed(8)
    asked: Any = targets[0] if targets == ("all-linear",) else list(targets)
    config = peft.LoraConfig(r=5, lora_alpha=20, target_modules=asked, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(make_model(kind), config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        expected = adapted(TOKENS).logits
    adapted.save_pretrained(tmp_path / "adapter")
    convert_folder(base, tmp_path / "checkpoint")
    convert_folder(tmp_path / "checkpoint", tmp_path / "back", tmp_path / "adapter")  # on the way out
    torch.testing.assert_close(logits(tmp_path / "back"), expected, **SUMS)
    convert_folder(tmp_path / "checkpoint", tmp_path / "merged", tmp_path / "adapter", target="megazpp")
    convert_folder(tmp_path / "merged", tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "back"))


@needs_peft
def test_an_adapter_of_a_reward_model_brings_its_score(tmp_path):
    import peft
    import transformers

    auto, base = transformers.AutoModelForSequenceClassification, save(make_llama(), tmp_path / "base")
    config = peft.LoraConfig(r=5, target_modules=["q_proj"], task_type="SEQ_CLS")
    adapted = peft.get_peft_model(auto.from_pretrained(base, num_labels=1, dtype=torch.float32), config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        expected = [adapted(text.unsqueeze(0)).logits for text in TOKENS]
    adapted.save_pretrained(tmp_path / "adapter")
    convert_folder(base, tmp_path / "merged", tmp_path / "adapter")
    convert_folder(tmp_path / "merged", tmp_path / "back")
    found = auto.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close([found(text.unsqueeze(0)).logits for text in TOKENS], expected, **SUMS)


@needs_peft
def test_the_default_targets_are_pefts(tmp_path):
    import peft

    for kind in ("gpt2", "llama"):
        config = peft.get_peft_model(make_model(kind), peft.LoraConfig(task_type="CAUSAL_LM")).peft_config["default"]
        ours = open_model(save(make_model(kind), tmp_path / kind)).config
        assert set(config.target_modules) == set(default_targets(ours))


def test_files_are_as_pefts_are(tmp_path):
    base = save(make_llama(), tmp_path / "base")
    drawn_adapter(tmp_path / "adapter", base, ("q_proj", "down_proj"), "0123456789abcdef")
    found = safetensors.torch.load_file(tmp_path / "adapter" / TENSORS)
    assert {name: tuple(tensor.shape) for name, tensor in found.items() if "layers.1" in name} == {
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": (3, 32),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight": (32, 3),
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": (3, 44),
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight": (32, 3),
    }
    values = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (values["r"], values["lora_alpha"], values["fan_in_fan_out"]) == (3, 6, False)
    assert read_adapter(tmp_path / "adapter", open_model(base).config)[0].checksum == "0123456789abcdef"


def test_the_checksum_is_that_of_the_weights_in_any_format_and_another_base_is_refused(tmp_path):
    base = save(make_llama(), tmp_path / "base")
    convert_folder(base, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="--from megazpp --to megazpp: one of the two"):  # but for merging
        convert_folder(tmp_path / "checkpoint", tmp_path / "copy", target="megazpp")
    checksum = checksum_of(open_model(base))
    model = open_checkpoint(tmp_path / "checkpoint", None)[0]
    with_head = model._replace(tensors={**model.tensors, HEAD: held(torch.ones(1, 32))})
    assert checksum_of(model) == checksum_of(with_head) == checksum
    drawn_adapter(tmp_path / "adapter", base, ("q_proj",), checksum)
    convert_folder(tmp_path / "checkpoint", tmp_path / "merged", tmp_path / "adapter")
    drawn_adapter(tmp_path / "adapter", base, ("q_proj",), "0123456789abcdef")
    with pytest.raises(ValueError, match=f"trained on weights with checksum 0123456789abcdef; these have {checksum}"):
        convert_folder(tmp_path / "checkpoint", tmp_path / "other", tmp_path / "adapter")
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
    drawn_adapter(tmp_path / "adapter", base, ("q_proj",))
    sound = json.loads(path.read_text())

    def merge(values: dict[str, Any]) -> None:
        path.write_text(json.dumps(sound | values))
        convert_folder(base, tmp_path / "merged", tmp_path / "adapter")

    assert not_refused(OTHERS, merge) == []
    with pytest.raises(ValueError, match=f"--adapter {tmp_path}/none does not exist"):
        convert_folder(base, tmp_path / "merged", tmp_path / "none")
