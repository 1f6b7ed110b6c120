"""Test Hugging Face folders with further files, such as an adapter, that change the model of `from_pretrained`."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers.hf_models import TOKENS, convert_folder, file_tensors, make_model, our_logits, save

from megazpp.convert.config import ConvertConfig
from megazpp.convert.convert import convert
from megazpp.convert.huggingface import open_model
from megazpp.convert.native import NO_ADAPTERS, open_checkpoint
from megazpp.data.tokenizer import TokenizerConfig

transformers = pytest.importorskip("transformers")


def add_adapter(folder: Path) -> torch.Tensor:
    """Add a LoRA adapter with random weights to a folder with a model.

    Return the logits that transformers computes from the folder; `from_pretrained` applies the adapter.
    """
    import peft  # takes 3 seconds, which no other test process should spend

    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(folder)
    both = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return both(TOKENS).logits


def test_adapter_beside_the_weights_is_refused_or_merged(tmp_path):
    folder = save(make_model("llama"), tmp_path / "base")
    alone, expected = our_logits(open_model(folder)), add_adapter(folder)
    assert (expected - alone).abs().max() > 0.01
    with pytest.raises(ValueError, match=f"adapter_config.json.*--adapter {folder} merges it"):
        convert_folder(folder, tmp_path / "refused")
    # --adapter names another folder, so the adapter beside the weights would be ignored silently
    with pytest.raises(ValueError, match="also holds an adapter"):
        open_model(folder, adapter=tmp_path)
    merged = convert_folder(folder, tmp_path / "merged", adapter=str(folder))
    torch.testing.assert_close(our_logits(open_checkpoint(merged, None)[0]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", {"peft_type": "PROMPT_TUNING"}, "also holds an adapter"),
        ("shard-00000-model-00001-of-00002.safetensors", {}, "also holds a distributed checkpoint"),
    ],
)
def test_files_that_change_the_loaded_model_are_refused(tmp_path, name, content, message):
    folder = save(make_model("llama"), tmp_path / "base")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        open_model(folder)


def test_note_names_weights_that_from_pretrained_would_round(tmp_path):
    """Note weights that the dtype of config.json cannot hold, in an imported folder and in an exported one."""
    model, folder = make_model("llama"), tmp_path / "base"
    assert open_model(save(model, folder)).notes == ()
    values = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    (note,) = open_model(folder).notes
    assert "asks for torch.bfloat16, to which from_pretrained rounds 17 weights" in note
    assert open_model(folder).dtype == torch.float32
    tensors = {n: w if n.endswith("norm.weight") else w.bfloat16() for n, w in file_tensors(folder).items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (note,) = open_model(folder).notes
    assert re.search(r"rounds 5 weights: \S*norm.weight is stored in torch.float32", note)
    lines: list[str] = []
    checkpoint = convert_folder(folder, tmp_path / "checkpoint")
    config = ConvertConfig(input=str(checkpoint), output=str(tmp_path / "exported"))
    convert(config, TokenizerConfig(), lines.append, opener=NO_ADAPTERS)
    assert any(re.search(r"note: .* asks for torch.bfloat16, .* rounds 5 weights", line) for line in lines)
    (folder / "config.json").write_text(json.dumps(values | {"dtype": "float32"}))
    assert open_model(folder).notes == ()
